"""Valid files of every format, damaged at random: one line or an honest network, never anything else."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import makers
import pytest
from fuzz_open import chosen, corpus, one_input
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FORMATS = ["a.safetensors", "a.npz", "packed.npz", "zip.pt", "stream.pt", "a.onnx", "a.gguf", "a.msgpack"]
FORMATS += ["gptq.safetensors", "schemes.safetensors"]
TABLES = ["adapter_config.json", "model.safetensors.index.json", "model_index.json", "config.json"]
VALUES = (b"\xff" * 8, bytes(8), b"\xff\xff\xff\x7f\0\0\0\0", b"\0\0\0\0\0\0\0\x80", b"{[]}", b"\x80\x02c")


@st.composite
def edits(draw):
    """A few changes of a byte string: flips, cuts, copies, insertions, extreme numbers."""
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "cut", "insert", "copy", "number", "end"]),
                st.floats(0, 1, exclude_max=True),
                st.integers(0, 255),
                st.integers(1, 64),
            ),
            min_size=1,
            max_size=6,
        )
    )


def edited(data: bytes, changes) -> bytes:
    raw = bytearray(data)
    for kind, place, value, length in changes:
        at = int(place * max(1, len(raw)))
        if kind == "flip" and raw:
            raw[at] ^= value or 1
        elif kind == "cut":
            del raw[at : at + length]
        elif kind == "insert":
            raw[at:at] = bytes([value]) * length
        elif kind == "copy":
            source = value * len(raw) // 256
            raw[at : at + length] = raw[source : source + length]
        elif kind == "number":
            new = VALUES[value % len(VALUES)]
            raw[at : at + len(new)] = new
        elif kind == "end":
            del raw[at:]
    return bytes(raw)


@pytest.mark.parametrize("name", FORMATS + TABLES)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=edits())
def test_damaged_files(seeds, name, changes):
    assert one_input(chosen(name) + edited(seeds[name], changes))


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_any_bytes(data):
    assert one_input(data)


@pytest.mark.parametrize("name", FORMATS)
def test_every_truncation(seeds, name):
    """A file cut anywhere is refused, or (where only padding is lost) still the same network."""
    ending = chosen(name)
    whole = one_input(ending + seeds[name])
    assert "layers" in whole and not whole.startswith("0 layers")
    step = max(1, len(seeds[name]) // 60)
    for length in range(0, len(seeds[name]), step):
        said = one_input(ending + seeds[name][:length])
        assert ": " in said or said == whole


@pytest.mark.parametrize(("name", "bytes_changed"), [("a.h5", 3), ("a.keras", 2)])
def test_damaged_hdf5(seeds, name, bytes_changed):
    """Fewer of them: each is opened in a process of its own."""
    rng = random.Random(bytes_changed)
    for _ in range(8):
        raw = bytearray(seeds[name])
        for _ in range(bytes_changed):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        assert one_input(chosen(name) + raw)


@pytest.mark.parametrize(
    "value", [None, True, -1, 10**40, 1e400, "x" * 100_000, [], [[]], {}, {"a": {"b": []}}]
)
@pytest.mark.parametrize("name", TABLES)
def test_tables_with_values_of_any_type(name, value):
    """Each value of a table in turn is something else."""
    valid = makers.FOLDERS[name][0]
    inner = valid.get("quantization_config", valid)
    for key in inner:
        changed = {**inner, key: value}
        whole = {**valid, "quantization_config": changed} if inner is not valid else changed
        assert one_input(chosen(name) + json.dumps(whole).encode())


def test_the_fuzzer_has_a_seed_of_every_kind(tmp_path):
    corpus(tmp_path)
    for file in tmp_path.iterdir():
        if file.suffix not in (".h5", ".keras"):
            assert one_input(file.read_bytes())[0].isdigit(), file.name


BOMBS = {
    "deep lists in a stream": (".pt", b"\x80\x02" + b"]" * 3_000_000),
    "sets in a stream": (".pt", b"\x80\x02" + b"\x8f" * 3_000_000),
    "memo in a stream": (".pt", b"\x80\x02}" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(1_500_000))),
    "tuples in a stream": (".pt", b"\x80\x02N" + b"\x85" * 3_000_000 + b"."),
    "a memo index in nine bytes": (".pt", b"\x80\x02]r\xff\xff\xff\x7f."),
    "text of wide letters in a stream": (
        ".pt", b"\x80\x02X" + (31_000_004).to_bytes(4, "little") + "\U0001f600".encode() + b"a" * 31_000_000 + b"."
    ),
    "nested tuples as a key": (".pt", b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns."),
    "a zip directory as large as the file": (
        ".npz",
        b"PK\x03\x04" + bytes(20_000_000)
        + b"PK\x05\x06" + bytes(8) + (20_000_004).to_bytes(4, "little") + bytes(6),
    ),
    "a zip directory of many entries": (
        ".npz",
        b"PK\x03\x04" + (b"PK\x01\x02" + bytes(42)) * 340_000
        + b"PK\x05\x06" + bytes(8) + (340_000 * 46).to_bytes(4, "little") + (4).to_bytes(4, "little") + bytes(2),
    ),
    "empty tables in msgpack": (
        ".msgpack", b"\xdf" + (50_000).to_bytes(4, "big") + (b"\xa1w\xdd\x00\x00\x27\x10" + b"\x80" * 10_000) * 500
    ),
    "empty tables in a header": (".safetensors", (5_100_006).to_bytes(8, "little") + b'{"a":[' + b"{}," * 1_700_000),
    "numbers in a header": (".safetensors", (9_000_006).to_bytes(8, "little") + b'{"a":[' + b"1e9," * 2_250_000),
    "fields in onnx": (".onnx", b"\x08\x07\x12\x00" + b"\x3a\xa0\xc2\x1e" + b"\x0a\x00" * 250_000 + bytes(100)),
    "strings in gguf": (
        ".gguf",
        b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
        + (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
        + (1_000_000).to_bytes(8, "little") + bytes(8_000_000),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_bounded_time_and_memory(tmp_path, case):
    """At most 20 s of processor time and 400 MB above the interpreter's own."""
    ending, data = BOMBS[case]
    path = tmp_path / f"bomb{ending}"
    path.write_bytes(data)
    program = (
        "import resource, sys, numpy, strati, strati.io.network\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        f"    print(strati.open({str(path)!r}))\n"
        "except strati.StratiError as error:\n"
        "    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    start = os.times()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert os.times().children_user - start.children_user < 20  # a busy machine lets everybody wait
    assert int(done.stdout.split("\n")[-2]) < 400_000  # kB
