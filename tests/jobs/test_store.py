"""The store: nothing lost, nothing foreign adopted, every damage told."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strati.core.errors import BadInputError
from strati.jobs.store import Finished, Store, unit_key

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)

WRITER = textwrap.dedent("""
    import sys, time
    from strati.jobs.store import Finished, Store, unit_key
    store = Store(sys.argv[1], about={"identity": "x"})
    for i in range(int(sys.argv[2])):
        key = unit_key({"unit": i})
        if key not in store:
            time.sleep(float(sys.argv[3]))
            store.put(Finished(key, f"unit {i}", {"rows": [i, i / 7]}))
    print("finished")
""")


def writer(path: Path, count: int, pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(count), str(pause)],
        stdout=subprocess.DEVNULL,
        text=True,
    )


def contents(path: Path) -> list[Finished]:
    with Store(path) as store:
        return list(store.units())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "units.sqlite"


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_key_does_not_depend_on_the_order_of_a_configuration(config: dict[str, object]) -> None:
    assert unit_key(config) == unit_key(dict(reversed(list(config.items()))))


def test_values_come_back_bit_for_bit(path: Path) -> None:
    value = {"rows": [{"a": 0.1 + 0.2, "b": None, "c": "naïve \u202e", "d": 5e-324}]}
    with Store(path, about={"name": "n"}) as store:
        store.put(Finished("k", "unit", value))
        store.put(Finished("bad", "unit 2", {"rows": []}, "it raised"))
        assert store.about() == {"name": "n"}
        assert store.keys() == {"k", "bad"}
        assert store.keys(failed=False) == {"k"}
        assert "k" in store and "other" not in store
    assert contents(path) == [
        Finished("bad", "unit 2", {"rows": []}, "it raised"),
        Finished("k", "unit", value),
    ]


def test_done_stays_and_failed_can_be_replaced(path: Path) -> None:
    with Store(path, about={}) as store:
        store.put(Finished("a", "unit", 1))
        store.put(Finished("a", "unit", 2))
        store.put(Finished("b", "unit", None, "lost"))
        store.put(Finished("b", "unit", 3))
    assert [unit.value for unit in contents(path)] == [1, 3]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"hello, this is not a database at all", "no SQLite header"),
        (b"SQLite format 3\x00" + b"\xff" * 600, "damaged"),
    ],
)
def test_other_files_are_refused(path: Path, content: bytes, word: str) -> None:
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=word):
        Store(path, about={})
    assert path.read_bytes() == content, "a foreign file must not be touched"


def test_a_foreign_database_is_refused(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (x)")
    db.commit()
    db.close()
    before = path.read_bytes()
    with pytest.raises(BadInputError, match="not a store of strati"):
        Store(path, about={})
    assert path.read_bytes() == before


def test_a_newer_store_is_refused(path: Path) -> None:
    Store(path, about={}).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(BadInputError, match="version 99"):
        Store(path)


def test_a_missing_store_is_not_made_by_a_reader(path: Path) -> None:
    with pytest.raises(BadInputError, match="no store here"):
        Store(path)
    assert not path.exists()


def test_a_directory_or_pipe_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "f")
    for name in "df":
        with pytest.raises(BadInputError, match="regular"):
            Store(tmp_path / name, about={})


def test_every_flipped_byte_of_a_value_is_found(path: Path) -> None:
    with Store(path, about={}) as store:
        store.put(Finished("key", "unit", {"rows": [0.123456789]}))
    raw = path.read_bytes()
    place = raw.index(b"0.123456789")
    for offset in range(11):
        damaged = bytearray(raw)
        damaged[place + offset] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(BadInputError, match="damaged store"):
            contents(path)


def test_random_damage_never_passes_for_another_result(path: Path) -> None:
    with Store(path, about={"a": 1}) as store:
        for i in range(40):
            store.put(Finished(f"key{i}", f"unit {i}", {"rows": [i / 3] * 20}))
    raw, want = path.read_bytes(), contents(path)
    rng = random.Random(0)
    for _ in range(60):
        damaged = bytearray(raw)
        for _ in range(rng.choice((1, 8))):
            damaged[rng.randrange(100, len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged[: rng.choice((len(raw), len(raw), len(raw) // 2))]))
        try:
            found = contents(path)
        except BadInputError as error:
            assert "damaged" in str(error) or "not a store" in str(error) or "version" in str(error)
        else:
            # a flip may hit free space, or hide rows (they are then computed again), but never alter one
            assert all(unit in want for unit in found)
        for extra in path.parent.glob("units.sqlite-*"):
            extra.unlink()


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_many_moments_it_ends_as_undisturbed(tmp_path: Path, kills: int) -> None:
    calm, wild = tmp_path / "calm.sqlite", tmp_path / "wild.sqlite"
    assert writer(calm, 300, 0.0).wait(60) == 0
    rng = random.Random(1)
    for _ in range(kills):
        process = writer(wild, 300, 0.004)
        time.sleep(rng.uniform(0.1, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert writer(wild, 300, 0.0).wait(60) == 0
    assert contents(wild) == contents(calm)


def test_two_processes_on_one_store(path: Path) -> None:
    both = [writer(path, 400, 0.001) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert len(contents(path)) == 400


def test_a_full_disk_is_one_clear_line_and_keeps_what_was_finished(path: Path) -> None:
    with Store(path, about={}) as store:
        store.put(Finished("first", "unit", "kept"))
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count={pages}")  # SQLite's own way to a disk that is full
        with pytest.raises(BadInputError, match=r"disk is full.*resume"):
            store.put(Finished("second", "unit", "x" * 100_000))
    assert [unit.value for unit in contents(path)] == ["kept"]


def test_a_really_full_disk(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(mount)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        with Store(mount / "units.sqlite", about={}) as store:
            with pytest.raises(BadInputError, match="full"):
                for i in range(1000):
                    store.put(Finished(f"k{i:04d}", "unit", "x" * 4000))
            kept = store.keys()
        assert len(kept) > 5
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_read_only_folder_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        folder = Path("/proc/self")  # root may write anywhere but here
    with pytest.raises(BadInputError, match="cannot be created"):
        Store(folder / "units.sqlite", about={})
