"""torch files without torch: the same values as torch.load, and nothing but tensors."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import is_mapped

import strati
from strati.io.formats import restricted_pickle, torch_file


def plain(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(8, 6, generator=generator)
    return {
        "a.weight": torch.randn(5, 4, generator=generator),
        "sliced.weight": base[::2, 1:4],
        "turned.weight": base.t(),
        "bf16": torch.randn(3, 3, generator=generator).bfloat16(),
        "half": torch.randn(4, generator=generator).half(),
        "double": torch.randn(2, 3, generator=generator).double(),
        "count": torch.arange(6),
        "scalar": torch.tensor(3.0),
        "base": base,
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2, 3, generator=generator)),
        "kernel": torch.randn(4, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("wrap", ["plain", "nested", "module"])
def test_same_values_as_torch(tmp_path, zipped, protocol, wrap):
    state = tensors()
    saved = {
        "plain": state,
        "nested": {
            "epoch": 3,
            "loss": 0.5,
            "state_dict": collections.OrderedDict(state),
            "optimizer": {"m": torch.ones(2)},
        },
        "module": {"model": {f"module.{name}": tensor for name, tensor in state.items()}},
    }[wrap]
    path = tmp_path / "a.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    net = strati.open(path)
    assert net.format == "torch"
    assert {t.name for t in net.tensors} == set(state)
    for name, tensor in state.items():
        got = net.read(name)
        assert got.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(got.astype(np.float64), plain(tensor))
    assert net["bf16"].dtype == "bfloat16"
    assert net.ties == {"base": "turned.weight"}
    # 20 + the base's 48, of which the slice and the transpose are parts, + 9 + 4 + 6 + 1 + 6 + 48
    assert net.parameters == 20 + 48 + 9 + 4 + 6 + 1 + 6 + 48
    assert [flag.code for flag in net.warnings] == (["left-aside"] if wrap == "nested" else [])


def test_contiguous_weights_are_mapped(tmp_path):
    for zipped in (True, False):
        torch.save({"w": torch.ones(3, 2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        assert is_mapped(strati.open(tmp_path / "a.pt").read("w"))


def test_cuda_storages_are_read(tmp_path):
    """A file saved from a GPU differs in the location only."""
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith("data.pkl"):
                assert b"X\x03\x00\x00\x00cpu" in data
                data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            new.writestr(item.filename, data)
    np.testing.assert_array_equal(strati.open(tmp_path / "b.pt").read("w"), np.ones((2, 2)))


def test_real_pieces_and_resnet(dropped_net, shared_data):
    piece = dropped_net / "pieces" / "piece_0.pth"
    ours, theirs = strati.open(piece), torch.load(piece, map_location="cpu", weights_only=True)
    np.testing.assert_array_equal(ours.read("weight"), theirs["weight"].numpy())
    path = next((shared_data / "resnet20-cifar10").glob("*.th"))
    net = strati.open(path)
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    for name, tensor in state.items():
        np.testing.assert_array_equal(net.read(name.removeprefix("module.")), tensor.numpy())
    assert net.parameters == 269_722  # the published size of ResNet-20
    assert [layer.role.value for layer in net.layers()] == ["conv"] * 19 + ["head"]
    assert [layer.block for layer in net.layers()] == [None, *(b for b in range(9) for _ in (1, 2)), None]


class Evil:
    def __reduce__(self):
        return os.system, ("touch should-not-exist",)


class Thing:
    pass


EVIL = {
    "code": (Evil(), "posix.system"),
    "module": (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    "namespace": ({"args": argparse.Namespace(lr=1), "w": torch.ones(2)}, "argparse.Namespace"),
    "numpy scalar": ({"best": np.float64(1), "w": torch.ones(2)}, "numpy"),
    "class": ({"thing": Thing(), "w": torch.ones(2)}, "Thing"),
    "eval": ({"f": eval, "w": torch.ones(2)}, "eval"),
    "deque": ({"d": collections.deque([1]), "w": torch.ones(2)}, "collections.deque"),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
@pytest.mark.parametrize("case", EVIL)
def test_what_is_no_tensor_is_refused_and_named(tmp_path, monkeypatch, zipped, case):
    monkeypatch.chdir(tmp_path)
    thing, name = EVIL[case]
    torch.save(thing, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(strati.StratiError, match=name):
        strati.open(tmp_path / "a.pt")
    assert not (tmp_path / "should-not-exist").exists()


@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickles_are_refused_and_named(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"w": Evil()}, protocol=protocol))
    with pytest.raises(strati.StratiError, match=r"posix\.system"):
        strati.open(tmp_path / "a.pt")
    assert not (tmp_path / "should-not-exist").exists()


@pytest.mark.filterwarnings("ignore")
def test_programs_and_tars_are_refused_with_the_way_to_convert(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    with pytest.raises(strati.StratiError, match=r"TorchScript.*state_dict"):
        strati.open(tmp_path / "script.pt")
    import tarfile

    with tarfile.open(tmp_path / "old.pt", "w") as tar:
        info = tarfile.TarInfo("storages")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"abcd"))
    with pytest.raises(strati.StratiError, match=r"tar archive.*again"):
        strati.open(tmp_path / "old.pt")


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_be_read_are_skipped_with_a_reason(tmp_path):
    state = {
        "w": torch.ones(3, 3),
        "expanded": torch.ones(1, 1).expand(200_000, 200_000),  # 149 GiB out of 4 bytes
        "quantised": torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(2, 2, device="meta"),
        "float8": torch.ones(4, 4).to(torch.float8_e4m3fn),
    }
    torch.save(state, tmp_path / "a.pt")
    net = strati.open(tmp_path / "a.pt")
    reasons = {s.name: s.reason for s in net.skipped()}
    assert [layer.name for layer in net.layers()] == ["w", "float8"]
    assert set(reasons) == set(state) - {"w", "float8"}
    assert "expanded view" in reasons["expanded"]
    assert net.parameters == 9 + 16


def test_a_file_without_checksums_is_read_and_a_wrong_checksum_is_not(tmp_path):
    old = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3, 3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(old)
    assert strati.open(tmp_path / "a.pt").read("w").sum() == 9
    torch.save({"w": torch.full((3, 3), 7.5)}, tmp_path / "b.pt")
    data = bytearray((tmp_path / "b.pt").read_bytes())
    data[data.find(struct.pack("<f", 7.5)) + 1] ^= 1
    (tmp_path / "b.pt").write_bytes(data)
    with pytest.raises(strati.StratiError, match="checksum"):
        strati.open(tmp_path / "b.pt").read("w")


def forged(tmp_path, program: bytes, storage: bytes = bytes(16)) -> str:
    """A torch zip around a hand-written pickle."""
    path = tmp_path / "forged.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", storage)
        archive.writestr("archive/version", b"3\n")
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_pickles_of_one_name_are_refused(tmp_path):
    """Readers differ in which of them they take."""
    path = forged(tmp_path, tensor_program())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data.pkl", tensor_program(shape=(1, 4)))
    with pytest.raises(strati.StratiError, match="there twice"):
        strati.open(path)


def test_storages_that_overlap_are_refused(tmp_path):
    """The directory sends the second entry to the bytes of the first."""
    path = forged(tmp_path, tensor_program())
    raw = bytearray(path.read_bytes())
    first = raw.find(b"PK\x01\x02")
    second = raw.find(b"PK\x01\x02", first + 4)
    raw[second + 42 : second + 46] = raw[first + 42 : first + 46]  # the offset of the local header
    path.write_bytes(raw)
    with pytest.raises(strati.StratiError, match="overlap"):
        strati.open(path)


def tensor_program(offset=0, shape=(2, 2), stride=(2, 1), entries=4, key="0") -> bytes:
    """The pickle of {'w': tensor}, with any numbers one likes."""

    def number(value: int) -> bytes:
        raw = value.to_bytes((value.bit_length() // 8) + 1, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def numbers(values) -> bytes:
        return b"(" + b"".join(number(v) for v in values) + b"t"

    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(entries) + b"tQ"
    )
    call = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + numbers(shape) + numbers(stride)
    )
    return b"\x80\x02}" + text("w") + call + b"\x89ccollections\nOrderedDict\n)RtRs."


def test_the_forge_works(tmp_path):
    data = np.arange(4, dtype=np.float32).tobytes()
    assert strati.open(forged(tmp_path, tensor_program(), data)).read("w")[1, 1] == 3


FORGED = {
    "shape beyond the storage": tensor_program(shape=(200, 2)),
    "offset beyond the storage": tensor_program(offset=3),
    "negative offset": tensor_program(offset=-1),
    "negative stride": tensor_program(stride=(-2, 1)),
    "negative shape": tensor_program(shape=(-2, 2)),
    "huge stride": tensor_program(stride=(2**61, 1)),
    "overflowing": tensor_program(shape=(2**61, 2**61), stride=(2**61, 2**61)),
    "beyond 64 bits": tensor_program(shape=(2**80, 1)),
    "storage larger than the file": tensor_program(entries=4_000_000_000),
    "missing storage": tensor_program(key="7"),
    "storage outside": tensor_program(key="../../etc/passwd"),
    "stride and shape differ": tensor_program(shape=(2, 2, 1)),
    "forty dimensions": tensor_program(shape=(1,) * 40, stride=(1,) * 40),
    "dict in itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "list in itself": b"\x80\x02]q\x00h\x00a.",
    "nested a thousand deep": b"\x80\x02" + b"]" * 1000 + b"a" * 999 + b".",
    "memo bomb": b"\x80\x02}r\xff\xff\xff\x7f.",
    "huge text": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "huge bytes": b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "memo index of two gigabytes": b"\x80\x02]r\xff\xff\xff\x7f.",
    "number of a million digits": b"\x80\x02}(\x8b"
    + struct.pack("<i", 400_000)
    + bytes(399_999)
    + b"\x01Nu.",
    "shape of a list without end": b"\x80\x02ctorch\nSize\n(](" + b"K\x01" * 100 + b"etR.",
    "long of a gigabyte": b"\x80\x02\x8b\xff\xff\xff\x3f.",
    "unknown instruction": b"\x80\x02\xff.",
    "no end": b"\x80\x02}",
    "empty": b"",
    "pops nothing": b"\x80\x02000.",
    "tuple of nothing": b"\x80\x02\x87.",
    "mark as value": b"\x80\x02(.",
    "calls a number": b"\x80\x02K\x01)R.",
    "calls a storage": b"\x80\x02ctorch\nFloatStorage\n)R.",
    "odd number of items": b"\x80\x02}(K\x01u.",
    "unhashable key": b"\x80\x02}(]K\x01u.",
    "item of a list": b"\x80\x02](K\x01K\x02u.",
    "recalls nothing": b"\x80\x02h\x07.",
    "state of a list": b"\x80\x02]K\x01b.",
    "extension": b"\x80\x02\x82\x01.",
    "instance": b"\x80\x02(ios\nsystem\n.",
    "object": b"\x80\x02(cos\nsystem\no.",
    "persistent text": b"\x80\x02Pabc\n.",
    "storage of nothing": b"\x80\x02NQ.",
    "no tensors": b"\x80\x02}X\x01\x00\x00\x00aK\x01s.",
    "two tensors of one name": b"\x80\x02}(K\x01"
    + tensor_program()[3:-1]
    + b"X\x01\x00\x00\x001"
    + tensor_program()[3:-1]
    + b"u.",
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_pickles_are_refused_in_one_line(tmp_path, case):
    with pytest.raises(strati.StratiError) as caught:
        net = strati.open(forged(tmp_path, FORGED[case]))
        raise AssertionError(f"opened: {net.tensors}")
    assert "\n" not in str(caught.value)


def test_shared_containers_that_multiply_are_refused(tmp_path):
    """Thirty lists, each holding the one before ten times: 10^30 paths in 700 bytes."""
    program = b"\x80\x02]q\x00X\x01\x00\x00\x00xa"
    for index in range(30):
        program += b"](" + b"h%c" % index * 10 + b"eq%c" % (index + 1)
    with pytest.raises(strati.StratiError, match="repeat without end"):
        strati.open(forged(tmp_path, program + b"."))


def test_keys_that_are_costly_to_hash_are_refused(tmp_path):
    program = b"\x80\x02K\x01\x85"
    for _ in range(60):
        program += b"2\x86"  # (t, t): hashing walks 2^60 paths
    with pytest.raises(strati.StratiError, match="not plain"):
        strati.open(forged(tmp_path, b"\x80\x02}" + program[2:] + b"K\x01s."))


def loaded(data: bytes) -> object:
    return restricted_pickle.PickleStream(data, {}, lambda identity: identity).load()


def test_plain_values_agree_with_pickle():
    values = [
        {"a": [1, -2, 2**70, 1.5, None, True], "b": ("x", "\u00e9", b"raw", (), {1, 2}), 3: frozenset({"z"})},
        "s" * 300,
        {(1, "a"): 2, (1, ("b", 2.0)): 3, -(2**65): 4},
    ]
    for protocol in range(6):
        assert loaded(pickle.dumps("s" * 300, protocol=protocol)) == "s" * 300
    for protocol in (4, 5):
        assert loaded(pickle.dumps(values, protocol=protocol)) == values


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
)


@settings(max_examples=100, deadline=None)
@given(plain_values, st.sampled_from([4, 5]))
def test_any_plain_value_agrees_with_pickle(value, protocol):
    assert loaded(pickle.dumps(value, protocol=protocol)) == value


def test_pickles_one_after_another():
    data = b"".join(pickle.dumps(value) for value in ("first", [2], {"third": 3}))
    stream = restricted_pickle.PickleStream(data + b"weights", {}, lambda identity: identity)
    assert [stream.load() for _ in range(3)] == ["first", [2], {"third": 3}]
    assert stream.position == len(data)


BUILD = b"}X\x05\x00\x00\x00shape(K\x09tsb"  # sets the attribute "shape" to (9,)
STATES = {
    "of a tensor": tensor_program()[:-2] + BUILD + b"s.",
    "of a name": b"\x80\x02ctorch\nFloatStorage\n" + BUILD + b".",
    "of a storage": tensor_program().replace(b"tQ", b"tQ" + BUILD),
}


@pytest.mark.parametrize("case", STATES)
def test_no_pickle_changes_a_stand_in(tmp_path, case):
    """The plain Unpickler would write into its ``__dict__``, after it was checked, and for every later file."""
    with pytest.raises(strati.StratiError, match="sets the state"):
        strati.open(forged(tmp_path, STATES[case]))
    assert vars(torch_file._TABLE["torch.FloatStorage"]) == {"name": "torch.FloatStorage", "function": None}


def test_the_metadata_of_a_state_dict_is_dropped(tmp_path):
    state = torch.nn.Sequential(torch.nn.Linear(2, 3)).state_dict()
    assert state._metadata
    torch.save(state, tmp_path / "a.pt")
    assert {tensor.name for tensor in strati.open(tmp_path / "a.pt").tensors} == {"0.weight", "0.bias"}


def integer(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def test_keys_whose_hashes_collide_are_refused(tmp_path):
    """Hashes of integers are taken modulo 2^61 - 1: a table of a million such keys takes hours to fill."""
    keys = b"".join(integer((2**61 - 1) * i) + b"N" for i in range(1, 2000))
    with pytest.raises(strati.StratiError, match="not plain"):
        strati.open(forged(tmp_path, b"\x80\x02}(" + keys + b"u."))


def test_a_shared_list_is_not_copied_by_every_call(tmp_path):
    """Python 2 wrote an OrderedDict as a list of pairs; here one list is used a thousand times."""
    pairs = b"](" + b"".join(b"(X\x05\x00\x00\x00%05dNt" % i for i in range(20_000)) + b"eq\x000"
    call = b"ccollections\nOrderedDict\n(h\x00tR0"
    tracemalloc.start()
    try:
        with pytest.raises(strati.StratiError, match="no tensors"):
            strati.open(forged(tmp_path, b"\x80\x02" + pairs + call * 1000 + b"N."))
        assert tracemalloc.get_traced_memory()[1] < 50e6  # 1000 copies would take 1.2 GB
    finally:
        tracemalloc.stop()


def test_a_state_dict_of_python_2_is_read(tmp_path):
    """``OrderedDict([["w", tensor]])`` instead of items set one by one."""
    tensor = tensor_program()[9:-2]
    program = b"\x80\x02ccollections\nOrderedDict\n(](](U\x01w" + tensor + b"eetR."
    data = np.arange(4, dtype=np.float32).tobytes()
    assert strati.open(forged(tmp_path, program, data)).read("w")[1, 1] == 3


def test_a_stream_with_more_text_than_any_honest_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_file, "MAX_PICKLE", 1_000_000)
    path = tmp_path / "long.pt"
    for texts in (["x" * 2_000_000], [f"{i}" + "x" * 200_000 for i in range(10)]):
        torch.save({"w": torch.ones(3, 3), "texts": texts}, path, _use_new_zipfile_serialization=False)
        with pytest.raises(strati.StratiError, match="pickle is damaged"):
            strati.open(path)
    torch.save({"w": torch.ones(1000, 1000)}, path, _use_new_zipfile_serialization=False)
    assert strati.open(path).parameters == 1_000_000  # weights are no text


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A network after a real step of Adam, whose state has the shapes of the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    adam = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 6)).square().mean().backward()
    adam.step()
    return model, adam


def training_checkpoints() -> dict[str, object]:
    """The layouts that common training code writes, around one network and its optimizer."""
    model, adam = trained()
    weights, optimizer = model.state_dict(), adam.state_dict()
    average = {name: tensor.clone() for name, tensor in weights.items()}
    loss = torch.tensor(0.25)
    schedule = {"last_epoch": 3, "_last_lr": [torch.tensor(0.1)]}
    return {
        "loss beside model": {"model": weights, "optimizer": optimizer, "loss": loss},
        "tutorial": {
            "epoch": 1,
            "model_state_dict": weights,
            "optimizer_state_dict": optimizer,
            "loss": loss,
        },
        "pair": (weights, optimizer),
        "nanogpt": {
            "model": {f"_orig_mod.{k}": v for k, v in weights.items()},
            "optimizer": optimizer,
            "iter_num": 5,
            "best_val_loss": loss,
        },
        "lightning": {
            "epoch": 2,
            "state_dict": weights,
            "optimizer_states": [optimizer],
            "lr_schedulers": [schedule],
            "callbacks": {"ModelCheckpoint": {"best_model_score": loss}},
            "loops": {"fit_loop": {"state_dict": {}, "best": loss}},
        },
        "timm": {"state_dict": weights, "state_dict_ema": average, "optimizer": optimizer, "metric": loss},
        "fairseq": {
            "args": None,
            "model": weights,
            "criterion": {"scale": loss},
            "last_optimizer_state": optimizer,
            "extra_state": {"val_loss": loss},
        },
        "deepspeed": {"module": weights, "optimizer": optimizer, "lr_scheduler": schedule, "global_steps": 3},
        "composer": {"state": {"model": weights, "optimizers": {"AdamW": optimizer}}, "rng": [torch.ones(4)]},
        "diffusion": {"ema": average, "opt": optimizer, "model": weights},
        "elastic": {"MODEL_STATE": weights, "EPOCHS_RUN": 3, "OPTIMIZER": optimizer},
        "average alone": {"ema": average, "step": 4},
        "optimizer under any name": {"net": weights, "whatever": optimizer},
    }


@pytest.mark.parametrize("layout", training_checkpoints())
def test_only_the_network_of_a_training_checkpoint_is_read(tmp_path, layout):
    torch.save(training_checkpoints()[layout], tmp_path / "a.pt")
    net = strati.open(tmp_path / "a.pt")
    expected = trained()[0].state_dict()
    assert {t.name for t in net.tensors} == set(expected)
    assert [layer.name for layer in net.layers()] == ["0.weight", "2.weight"]
    for name, tensor in expected.items():
        np.testing.assert_array_equal(net.read(name), tensor.numpy())
    if layout != "average alone":
        assert [flag.code for flag in net.warnings] == ["left-aside"]
        assert any("optimizer state, 1" in s.reason for s in net.skipped()), net.skipped()


def test_networks_without_a_known_name_stay_and_their_optimizers_go(tmp_path):
    model, adam = trained()
    saved = {"generator": model.state_dict(), "critic": model.state_dict(), "g_optim": adam.state_dict()}
    torch.save(saved, tmp_path / "a.pt")
    net = strati.open(tmp_path / "a.pt")
    assert {t.name.split(".")[0] for t in net.tensors} == {"generator", "critic"}
    assert [s.name for s in net.skipped() if "optimizer" in s.reason] == ["g_optim"]


def test_parts_of_one_network_are_not_taken_for_checkpoint_entries(tmp_path):
    parts = {"net": {"w": torch.ones(4, 3)}, "score": {"w": torch.ones(2, 4)}, "loss": torch.tensor(1.0)}
    torch.save({"model": parts}, tmp_path / "a.pt")
    assert [layer.name for layer in strati.open(tmp_path / "a.pt").layers()] == ["net.w", "score.w"]
    torch.save({"best.weight": torch.ones(3, 3), "loss": torch.ones(4, 4)}, tmp_path / "b.pt")
    assert [layer.name for layer in strati.open(tmp_path / "b.pt").layers()] == ["best.weight", "loss"]


def test_a_file_of_optimizer_state_alone_has_no_layers(tmp_path):
    torch.save(trained()[1].state_dict(), tmp_path / "optimizer.pt")
    net = strati.open(tmp_path / "optimizer.pt")
    assert net.layers() == ()
    assert "optimizer state" in net.skipped()[0].reason
