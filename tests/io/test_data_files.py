import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.core.errors import BadInputError, StratiError
from strati.io.data_files import read_data, read_table

GOOD = "a,b,y\n1,2,3\n4,5,6\n"


@pytest.fixture
def file(tmp_path):
    def write(content, name="data.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is empty"),
        (" \n\n", "empty file"),
        ("a,b,y\n", "no rows"),
        ("a,b,y\n1,2,3\n4,5\n", "line 3 has 2 fields, the header has 3"),
        ("a,b,y\n1,2,3,9\n4,5,6,9\n", "line 2 has 4 fields"),
        ("a,b,y\n1,x,3\n", "line 2, column 'b': 'x' is not a number"),
        ("a,b,y\n1,,3\n", "line 2, column 'b': missing value"),
        ("a,b,y\n1,nan,3\n", "line 2, column 'b': nan is not a finite number"),
        ("a,b,y\n1,1e999,3\n", "not a finite number"),
        ("a,b,y\n1,1_000,3\n", "'1_000' is not a number"),
        ("a,b,y\n1,1.2.3,3\n", "'1.2.3' is not a number"),
        ("a,b,y\n1,\u0663,3\n", "is not a number"),
        (b"a" * (20 << 20), "a line of over 8 MB"),
        (b"a,b\n1," + b"1" * (20 << 20), "a line of over 8 MB"),
        (b"a,b\n" + b"," * (20 << 20), "a line of over 8 MB"),
        ("a,b,y\n1,2,3\n\n4,5,6\n", "line 3 is empty"),
        ("a;b;y\n1;2;3\n", "separated by semicolons"),
        ("a\tb\ty\n1\t2\t3\n", "separated by tabs"),
        ("a,a,y\n1,2,3\n", "column 'a' is there more than once"),
        ("a,,y\n1,2,3\n", "column 2 of the header has no name"),
        ("1,2,3\n4,5,6\n", "no header"),
        (GOOD.encode("utf-16"), "UTF-16"),
        (b"a,\xff\xfe,y\n1,2,3\n", "not UTF-8"),
        (b"a,b,y\n1,\xff,3\n", "line 2 is not UTF-8"),
        (b"\x00\x01\x02\x03", "binary file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x93NUMPY\x01\x00", "no numpy header|damaged"),
        (b"PK\x03\x04oops", "damaged|truncated|zip"),
    ],
)
def test_each_broken_file_has_its_own_sentence(file, content, why):
    with pytest.raises(BadInputError, match=why):
        read_data(file(content))


def test_byte_order_mark_quotes_and_line_ends_are_no_trouble(file):
    for content in (
        b"\xef\xbb\xbf" + GOOD.encode(),
        GOOD.replace("\n", "\r\n"),
        '"a","b","y"\n"1",2,3\n4,"5",6',
        GOOD[:-1],
    ):
        data = read_data(file(content))
        assert data.columns == ("a", "b")
        assert data.x.tolist() == [[1, 2], [4, 5]] and data.y.tolist() == [3, 6]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    )
)
def test_numbers_survive_the_trip(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "d.csv"
    path.write_text("a,b,c\n" + "".join(",".join(map(repr, row)) + "\n" for row in rows))
    assert np.array_equal(read_table(path).values, np.array(rows))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 18))
def test_any_bytes_give_an_answer_or_a_sentence(tmp_path_factory, noise, at):
    path = tmp_path_factory.mktemp("noise") / "d.csv"
    path.write_bytes(GOOD.encode()[:at] + noise + GOOD.encode()[at:])
    try:
        table = read_table(path)
    except StratiError as error:
        assert "\n" not in str(error)
    else:
        assert table.values.shape[1] == len(table.columns) and np.isfinite(table.values).all()


def test_columns_by_pattern_and_number(file):
    text = "id,measurement_10,measurement_2,pred_1,pred_0,true\n7,10,2,1,0,5\n8,11,3,2,1,6\n"
    data = read_data(file(text), target=("pred",))
    assert data.columns == ("measurement_2", "measurement_10")
    assert data.y.tolist() == [[0, 1], [1, 2]]
    data = read_data(file(text), inputs="measurement_10,id", target="true")
    assert data.columns == ("measurement_10", "id") and data.y.tolist() == [5, 6]
    with pytest.raises(BadInputError, match="no column 'zz'"):
        read_data(file(text), inputs="zz")
    with pytest.raises(BadInputError, match="no target column"):
        read_data(file("a,b\n1,2\n"), target=("pred", "y"))
    with pytest.raises(BadInputError, match="both as input and as target"):
        read_data(file(text), inputs="true", target="true")


def test_arrays(tmp_path):
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(3)
    np.savez(tmp_path / "d.npz", x=x, y=y, other=np.ones(1))
    data = read_data(tmp_path / "d.npz")
    assert np.array_equal(data.x, x) and data.x.dtype == np.float32 and np.array_equal(data.y, y)
    np.save(tmp_path / "d.npy", np.asfortranarray(x))
    data = read_data(tmp_path / "d.npy")
    assert np.array_equal(data.x, x) and data.y is None
    np.savez_compressed(tmp_path / "t.npz", x=x, y=y)
    assert np.array_equal(read_data(tmp_path / "t.npz").x, x)
    with pytest.raises(BadInputError, match="without column names"):
        read_table(tmp_path / "t.npz")


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"z": np.ones((2, 2))}, "no array 'x'"),
        ({"x": np.ones((2, 2)), "y": np.ones(3)}, "x has 2 rows and y has 3"),
        ({"x": np.array([[1, np.inf]])}, "NaN or infinite"),
        ({"x": np.ones((0, 2))}, "empty"),
        ({"x": np.array(["a"])}, "not analysed"),
        ({"x": np.array([None])}, "pickled objects"),
        ({}, "holds no arrays"),
    ],
)
def test_bad_arrays(tmp_path, arrays, why):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(StratiError, match=why):
        read_data(tmp_path / "d.npz")


def test_cut_off_and_lying_arrays(tmp_path):
    np.save(tmp_path / "d.npy", np.ones((50, 4)))
    raw = (tmp_path / "d.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(raw[:-8])
    with pytest.raises(BadInputError, match="header is corrupt"):
        read_data(tmp_path / "cut.npy")
    (tmp_path / "huge.npy").write_bytes(raw.replace(b"(50, 4)", b"(50, 9)"))
    with pytest.raises(StratiError):
        read_data(tmp_path / "huge.npy")
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("x.npy", b"\0" * (64 << 20))
    with pytest.raises(BadInputError, match="zip bomb"):
        read_data(tmp_path / "bomb.npz")


def test_pipes_folders_and_missing_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "pipe", "regular file"),
        (tmp_path, "a directory"),
        (tmp_path / "no", "no such file"),
    ):
        with pytest.raises(BadInputError, match=why):
            read_data(path)


def test_reading_needs_no_pandas(file):
    code = f"import sys; from strati.io.data_files import read_data; read_data({str(file(GOOD))!r})"
    code += "; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
