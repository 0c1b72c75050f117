"""``.keras`` and Flax files as Keras and flax wrote them, pipelines, indices as paths, and what is refused by name."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import is_mapped
from safetensors.numpy import save_file

import strati

ORACLE = Path(__file__).parent / "oracle"


def codes(net: strati.Network) -> set[str]:
    return {flag.code for flag in net.warnings}


# Keras


def test_a_keras_archive_as_keras_wrote_it():
    net = strati.open(ORACLE / "lambda.keras")
    assert net.format == "keras"
    kept = np.load(ORACLE / "keras.npz")
    shapes = {layer.shape: layer for layer in net.layers()}
    dense = shapes[(5, 144)]
    np.testing.assert_array_equal(next(dense.matrices()), kept["head"].T)
    conv = next(layer for layer in net.layers() if layer.kind == "conv")
    assert (conv.shape, conv.count) == ((4, 2), 9)
    np.testing.assert_array_equal(next(conv.matrices()), kept["stem"][0, 0].T)
    assert "twice" in next(flag.text for flag in net.warnings if flag.code == "lambda-layer")


def test_a_deflated_keras_archive_reads_the_same(tmp_path):
    with (
        zipfile.ZipFile(ORACLE / "lambda.keras") as old,
        zipfile.ZipFile(tmp_path / "a.keras", "w", 8) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    a, b = strati.open(ORACLE / "lambda.keras"), strati.open(tmp_path / "a.keras")
    for tensor in a.tensors:
        np.testing.assert_array_equal(a.read(tensor.name), b.read(tensor.name))


@pytest.mark.parametrize("damage", ["cut", "config", "h5"])
def test_damaged_keras_archives_are_one_line(tmp_path, damage):
    with zipfile.ZipFile(ORACLE / "lambda.keras") as old:
        parts = {name: old.read(name) for name in old.namelist()}
    if damage == "config":
        parts["config.json"] = b"{nonsense"
    if damage == "h5":
        parts["model.weights.h5"] = parts["model.weights.h5"][:200]
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as new:
        for name, raw in parts.items():
            new.writestr(name, raw)
    if damage == "cut":
        whole = (tmp_path / "a.keras").read_bytes()
        (tmp_path / "a.keras").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(strati.StratiError, match="keras"):
        strati.open(tmp_path / "a.keras")


# Flax


def test_a_flax_file_as_flax_wrote_it():
    net = strati.open(ORACLE / "flax.msgpack")
    kept = np.load(ORACLE / "flax.npz")
    assert net.format == "flax"
    for name in kept.files:
        np.testing.assert_array_equal(net.read(name).astype(np.float32), kept[name])
    layers = {layer.name: layer for layer in net.layers()}
    assert {name: (x.shape, x.kind) for name, x in layers.items()} == {
        "embed.embedding": ((11, 6), "embedding"),
        "dense.kernel": ((8, 6), "linear"),
        "conv.kernel": ((5, 4), "conv"),
        "big.kernel": ((30, 40), "linear"),
    }
    assert ("opt_state", "optimizer state, not part of the network") in {
        (s.name, s.reason) for s in net.skipped()
    }


def array(values: np.ndarray) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb((values.shape, values.dtype.name, values.tobytes())))


def test_equal_arrays_and_arrays_of_zeros_are_each_found(tmp_path):
    """msgpack does not say where an array lies: it is searched for, and equal bytes must not lead astray."""
    rng = np.random.default_rng(0)
    arrays = {f"a{i}": np.zeros((i % 3, 4), np.float32) for i in range(6)}
    arrays |= {f"b{i}": np.full((5, 2), i // 2, np.float64) for i in range(4)}
    arrays |= {"c": rng.normal(size=(3, 3)), "d": np.float32([[1, 2]]), "e": np.zeros((40, 40), np.float32)}
    order = list(arrays)
    rng.shuffle(order)
    (tmp_path / "a.msgpack").write_bytes(msgpack.packb({name: array(arrays[name]) for name in order}))
    net = strati.open(tmp_path / "a.msgpack")
    for name in order:
        np.testing.assert_array_equal(net.read(name), arrays[name])
    assert is_mapped(net.read("e"))


def test_gpt2_kernels_of_flax_are_outputs_first(tmp_path):
    tree = {"h": {"0": {"attn": {"c_attn": {"kernel": array(np.ones((12, 4), np.float32))}}}}}
    (tmp_path / "a.msgpack").write_bytes(msgpack.packb(tree))
    (layer,) = strati.open(tmp_path / "a.msgpack").layers()
    assert (layer.shape, str(layer.role), layer.view) == ((12, 4), "attention.qkv", "as stored")


@pytest.mark.parametrize(
    "raw",
    [
        msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb(((2, 2), "float32", b"123")))}),
        msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb(((2**40,), "float32", b"")))}),
        msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb(((-1,), "object", b"")))}),
        msgpack.packb({"w": 3}),
        msgpack.packb({"w": array(np.ones(3))})[:-4],
        b"\xdf\xff\xff\xff\xff\xa1w",
        b"\x81\xa1w" + b"\x91" * 500,
        b"\x81\xa1w" * 500 + b"\xc0",
        b"\x81\xa1w" * 2000 + b"\xc0",
        b"\xde\xff\xff" + b"\xa1w\x80" * 65535,
        msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb((3, "float32", b"")))}),
        msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb(((0,), "float8_nothing", b"")))}),
        msgpack.packb({"w": msgpack.ExtType(1, b"\x93\x91\x02\xa7float32")}),
        msgpack.packb({("a", "b"): array(np.ones(3))}, strict_types=False),
        msgpack.packb({1: array(np.ones(3)), "1": array(np.ones(3))}),
        msgpack.packb([array(np.ones(3))]),
        msgpack.packb({"a": {"__msgpack_chunked_array__": True, "shape": {"0": 9}, "chunks": {"0": 1}}}),
    ],
)
def test_bad_flax_files_are_one_line(tmp_path, raw):
    (tmp_path / "bad.msgpack").write_bytes(raw)
    with pytest.raises(strati.StratiError, match=r"bad\.msgpack"):
        strati.open(tmp_path / "bad.msgpack")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flax_files_with_a_byte_changed_never_crash(tmp_path_factory, data):
    whole = bytearray((ORACLE / "flax.msgpack").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("m") / "a.msgpack"
    path.write_bytes(bytes(whole[: data.draw(st.integers(1, len(whole)))]))
    try:
        net = strati.open(path)
        for tensor in net.tensors:
            net.read(tensor.name)
    except strati.StratiError:
        pass


# directories


def shards(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    names = {}
    for i in (1, 2):
        shard = f"model-{i:05d}-of-00002.safetensors"
        save_file({f"layers.{i}.weight": np.eye(4, dtype=np.float32)}, folder / shard)
        names[f"layers.{i}.weight"] = shard
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    return index


def test_an_index_as_path_is_its_folder(tmp_path):
    index = shards(tmp_path)
    assert [x.name for x in strati.open(index).layers()] == [x.name for x in strati.open(tmp_path).layers()]
    assert len(strati.open(index).layers()) == 2


def test_unlisted_tensors_and_stale_shards_are_said(tmp_path):
    shards(tmp_path)
    shutil.copy(tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00003-of-00003.safetensors")
    more = {"layers.2.weight": np.eye(4, dtype=np.float32), "extra.weight": np.ones((2, 2), np.float32)}
    save_file(more, tmp_path / "model-00002-of-00002.safetensors")
    assert {"unlisted-tensors", "stale-shard"} <= codes(strati.open(tmp_path))


def test_a_network_without_any_matrix_says_so(tmp_path):
    save_file({"b": np.ones(3, np.float32)}, tmp_path / "a.safetensors")
    assert "no-matrices" in codes(strati.open(tmp_path / "a.safetensors"))


def test_a_diffusers_pipeline_is_all_its_components(tmp_path):
    (tmp_path / "model_index.json").write_text(
        json.dumps(
            {
                "_class_name": "P",
                "unet": ["diffusers", "U"],
                "text_encoder": ["transformers", "T"],
                "scheduler": ["diffusers", "S"],
                "../outside": ["x", "y"],
            }
        )
    )
    for name, file in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"fc.weight": np.eye(3, dtype=np.float32)}, tmp_path / name / f"{file}.safetensors")
        save_file({"fc.weight": np.eye(3, dtype=np.float16)}, tmp_path / name / f"{file}.fp16.safetensors")
    (tmp_path / "scheduler").mkdir()
    net = strati.open(tmp_path)
    assert [(x.name, x.dtype) for x in net.layers()] == [
        ("unet.fc.weight", "float32"),
        ("text_encoder.fc.weight", "float32"),
    ]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([".metadata", "__0_0.distcp"], "torch distributed checkpoint.*dcp_to_torch"),
        (["_METADATA", "manifest.ocdbt"], "Orbax checkpoint"),
        (["saved_model.pb"], "SavedModel"),
        (["checkpoint", "model.ckpt.index", "model.ckpt.data-00000-of-00001"], "TensorFlow checkpoint"),
        (["config.json", "pytorch_model_fsdp_0/.metadata"], "pytorch_model_fsdp_0: is a torch distributed"),
        (["100/_CHECKPOINT_METADATA", "100/default/d"], "100: is an Orbax checkpoint"),
    ],
)
def test_formats_refused_by_name(tmp_path, files, why):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(strati.StratiError, match=why):
        strati.open(tmp_path)


def test_a_table_of_numbers_is_no_flax_file(tmp_path):
    (tmp_path / "a").write_bytes(struct.pack(">BB", 0x81, 0x01) + b"\x02")
    with pytest.raises(strati.StratiError):
        strati.open(tmp_path / "a")


def test_parts_of_a_distributed_checkpoint_are_refused_by_name(tmp_path):
    """A part looks like any torch file of one tensor; torch wrote these."""
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint

    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save({"fc.weight": torch.ones(4, 3)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for place in (tmp_path / "dcp", *(tmp_path / "dcp").iterdir()):
        with pytest.raises(strati.UnsupportedError, match="torch distributed checkpoint; convert it"):
            strati.open(place)


@pytest.mark.parametrize("kind", ["flax_model.msgpack", "model.keras"])
def test_folders_with_a_flax_or_keras_file(tmp_path, kind):
    oracle = ORACLE / ("flax.msgpack" if "flax" in kind else "lambda.keras")
    shutil.copy(oracle, tmp_path / kind)
    (tmp_path / "config.json").write_text("{}")
    net, alone = strati.open(tmp_path), strati.open(oracle)
    assert [x.name for x in net.layers()] == [x.name for x in alone.layers()] != []


def test_flax_shards_with_their_index(tmp_path):
    for number in (1, 2):
        array = np.full((2, 3), number, np.float32)
        packed = msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))
        shard = tmp_path / f"flax_model-0000{number}-of-00002.msgpack"
        shard.write_bytes(msgpack.packb({f"layer{number}": {"kernel": packed}}))
    listed = {f"layer{n}/kernel": f"flax_model-0000{n}-of-00002.msgpack" for n in (1, 2)}
    (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": listed}))
    net = strati.open(tmp_path)
    assert [layer.name for layer in net.layers()] == ["layer1.kernel", "layer2.kernel"]
    assert net.read("layer2.kernel").tolist() == [[2, 2, 2]] * 2
    assert not net.warnings


def test_a_pipelines_components_are_decoded_by_their_own_settings(tmp_path):
    """float8 in blocks of 64 in one, under another scheme's settings in the next, plain in the third."""
    import ml_dtypes

    rng = np.random.default_rng(7)
    names = {
        "a": {"quant_method": "fp8", "weight_block_size": [64, 64]},
        "b": {"quant_method": "gptq"},
        "c": None,
    }
    (tmp_path / "model_index.json").write_text(json.dumps({name: ["x", "y"] for name in names}))
    values = rng.standard_normal((100, 130)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random((2, 3)).astype(np.float32)
    for name, told in names.items():
        (tmp_path / name).mkdir()
        tensors = {"fc.weight": values, "fc.weight_scale_inv": scale}
        if told is None:
            tensors = {"fc.weight": values.astype(np.float32)}
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(
            json.dumps({"quantization_config": told} if told else {})
        )
    net = strati.open(tmp_path)
    first, last = net.layers()
    assert (first.name, last.name) == ("a.fc.weight", "c.fc.weight")
    wide = scale.repeat(64, 0)[:100].repeat(64, 1)[:, :130]
    np.testing.assert_allclose(next(first.matrices()), values.astype(np.float32) * wide, rtol=1e-6)
    assert first.quantisation.scheme == "fp8" and first.noise_floor() > 0 and last.noise_floor() is None
    reasons = {skipped.name: skipped.reason for skipped in net.skipped()}
    assert "its configuration says gptq" in reasons["b.fc.weight"]
