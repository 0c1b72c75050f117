"""npz and npy: headers by pattern, zip rules, nothing unpickled."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from makers import arrays as small
from makers import is_mapped

import strati


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_same_values_as_numpy(tmp_path, save):
    save(tmp_path / "a.npz", **small())
    net = strati.open(tmp_path / "a.npz")
    for name, array in small().items():
        np.testing.assert_array_equal(net.read(name), array)
    assert is_mapped(net.read("fc1.weight")) == (save is np.savez)


@settings(max_examples=30, deadline=None)
@given(
    arrays(
        st.sampled_from(["<f2", "<f4", "<f8", ">f4", "<i8", "|u1", "|b1", "<c8"]),
        array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    st.booleans(),
)
def test_any_array(tmp_path_factory, array, fortran):
    folder = tmp_path_factory.mktemp("n")
    np.savez(folder / "a.npz", w=np.asfortranarray(array) if fortran else array)
    np.testing.assert_array_equal(strati.open(folder / "a.npz").read("w"), array)


def test_a_single_npy(tmp_path):
    np.save(tmp_path / "w.npy", np.eye(3))
    net = strati.open(tmp_path / "w.npy")
    assert [layer.name for layer in net.layers()] == ["w"]


def test_objects_and_records_are_skipped_and_never_loaded(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name, array in {
            "objects": np.array([{"a": 1}], dtype=object),
            "records": np.zeros(2, dtype=[("x", "f4")]),
            "text": np.array(["abc"]),
            "w": np.eye(2),
        }.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=True)
            archive.writestr(f"{name}.npy", buffer.getvalue())
    net = strati.open(tmp_path / "a.npz")
    assert [layer.name for layer in net.layers()] == ["w"]
    assert {s.name for s in net.skipped()} == {"objects", "records", "text"}


def npy(header: str, data: bytes = bytes(32), version: int = 1) -> bytes:
    raw = header.encode("latin-1")
    length = struct.pack("<H", len(raw)) if version == 1 else struct.pack("<I", len(raw))
    return b"\x93NUMPY" + bytes([version, 0]) + length + raw + data


GOOD = "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 2), }\n"
HEADERS = {
    "shape too large": npy(GOOD.replace("(2, 2)", "(2, 200)")),
    "shape too small": npy(GOOD.replace("(2, 2)", "(2, 1)")),
    "negative": npy(GOOD.replace("(2, 2)", "(-2, -2)")),
    "absurd": npy(GOOD.replace("(2, 2)", "(" + "9" * 100 + ",)")),
    "forty dimensions": npy(GOOD.replace("(2, 2)", "(" + "1," * 40 + ")"), bytes(8)),
    "shape is a call": npy(GOOD.replace("(2, 2)", "__import__('os')")),
    "no dictionary": npy("print('hello')\n"),
    "nested": npy("{" * 10_000),
    "key missing": npy("{'descr': '<f8', 'shape': (2, 2), }\n"),
    "version 9": npy(GOOD, version=9),
    "header longer than the file": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + GOOD.encode(),
    "cut": npy(GOOD)[:20],
    "signature only": b"\x93NUMPY",
}


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.parametrize("zipped", [True, False], ids=["npz", "npy"])
def test_headers_that_lie(tmp_path, case, zipped):
    path = tmp_path / ("a.npz" if zipped else "a.npy")
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w.npy", HEADERS[case])
    else:
        path.write_bytes(HEADERS[case])
    with pytest.raises(strati.StratiError) as caught:
        strati.open(path)
    assert "\n" not in str(caught.value)


def entry(
    name: bytes,
    data: bytes,
    *,
    size: int | None = None,
    method: int = 8,
    flags: int = 0,
    crc: int | None = None,
):
    """Local header, data and directory record of one zip entry, with any lie one likes."""
    packed = data
    if method == 8:
        engine = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = engine.compress(data) + engine.flush()
    crc = zlib.crc32(data) if crc is None else crc
    size = len(data) if size is None else size
    common = struct.pack("<HHHHIIIHH", flags, method, 0, 0, crc, len(packed), size, len(name), 0)
    local = b"PK\x03\x04\x14\x00" + common + name + packed
    return (
        local,
        lambda at: b"PK\x01\x02\x14\x00\x14\x00" + common + struct.pack("<HHHII", 0, 0, 0, 0, at) + name,
    )


def archive(*parts, shift: int = 0) -> bytes:
    body, directory = b"", b""
    for local, record in parts:
        directory += record(len(body) + shift)
        body += local
    count = struct.pack("<HHHH", 0, 0, len(parts), len(parts))
    return body + directory + b"PK\x05\x06" + count + struct.pack("<IIH", len(directory), len(body), 0)


def good() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.eye(2))
    return buffer.getvalue()


def overlapping() -> bytes:
    local, record = entry(b"a.npy", good(), method=0)
    whole = archive((local, record))
    at = whole.find(b"PK\x01\x02")
    second = record(0).replace(b"a.npy", b"b.npy")
    directory = whole[at : whole.find(b"PK\x05\x06")] + second
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 2, 2, len(directory), at, 0)
    return whole[:at] + directory + end


def nested() -> bytes:
    """An entry whose bytes are a whole second entry, which the directory lists as well."""
    inner, record = entry(b"b.npy", good(), method=0)
    outer, outer_record = entry(b"a.npy", inner, method=0)
    directory = outer_record(0) + record(len(outer) - len(inner))
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 2, 2, len(directory), len(outer), 0)
    return outer + directory + end


BOMB = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2500000,), }", bytes(20_000_000))
ARCHIVES = {
    "twice": lambda: archive(entry(b"a.npy", good()), entry(b"a.npy", good())),
    "encrypted": lambda: archive(entry(b"a.npy", good(), flags=1)),
    "bzip2": lambda: archive(entry(b"a.npy", good(), method=12)),
    "bomb": lambda: archive(entry(b"a.npy", BOMB)),
    "stored with two sizes": lambda: archive(entry(b"a.npy", good(), method=0, size=10_000)),
    "not where it should be": lambda: archive(entry(b"a.npy", good()), shift=7),
    "overlapping": overlapping,
    "entry inside an entry": lambda: nested(),
    "without directory": lambda: archive(entry(b"a.npy", good()))[:-30],
    "empty": lambda: archive(),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_break_a_rule(tmp_path, case):
    (tmp_path / "a.npz").write_bytes(ARCHIVES[case]())
    with pytest.raises(strati.StratiError) as caught:
        strati.open(tmp_path / "a.npz")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"crc": 7}, "checksum"),
        ({"size": 100}, "damaged|larger|corrupt"),
        ({"size": 5000}, "damaged|smaller|corrupt"),
    ],
)
def test_entries_that_lie_are_found_when_read(tmp_path, lie, why):
    (tmp_path / "a.npz").write_bytes(archive(entry(b"a.npy", good(), **lie)))
    with pytest.raises(strati.StratiError, match=why):
        strati.open(tmp_path / "a.npz").read("a")


def test_a_packed_entry_never_grows_past_its_declared_size(tmp_path):
    from strati.io.checkpoint_file import MappedFile, ZipArchive

    (tmp_path / "a.zip").write_bytes(archive(entry(b"x", bytes(10_000_000), size=1000)))
    with pytest.raises(strati.StratiError, match="damaged"):
        ZipArchive(MappedFile(tmp_path / "a.zip")).data("x")


def test_zip64_sizes_are_read(tmp_path):
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w") as file,
        file.open("w.npy", "w", force_zip64=True) as member,
    ):
        member.write(good())
    np.testing.assert_array_equal(strati.open(tmp_path / "a.npz").read("w"), np.eye(2))
