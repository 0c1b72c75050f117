"""Hugging Face directories: shards, indexes, and links that lead elsewhere."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from makers import arrays, safetensors_bytes

import strati

INDEX = "model.safetensors.index.json"


def sharded(folder, weight_map=None, **config):
    folder.mkdir(exist_ok=True)
    parts = arrays()
    names = list(parts)
    (folder / "one.safetensors").write_bytes(safetensors_bytes({n: parts[n] for n in names[:2]}))
    (folder / "two.safetensors").write_bytes(safetensors_bytes({n: parts[n] for n in names[2:]}))
    default = {n: "one.safetensors" if i < 2 else "two.safetensors" for i, n in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map or default}))
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "mlp"}))
    return folder


def test_with_index(tmp_path):
    net = strati.open(sharded(tmp_path / "m"))
    assert net.config == {"model_type": "mlp"}
    assert net.format == "safetensors"
    for name, array in arrays().items():
        np.testing.assert_array_equal(net.read(name), array)
    assert net.parameters == sum(a.size for a in arrays().values())


def test_single_file_and_shards_without_index(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes())
    assert len(strati.open(tmp_path).tensors) == 4
    folder = tmp_path / "counted"
    folder.mkdir()
    for number, (name, array) in enumerate(arrays().items(), 1):
        (folder / f"model-{number:05}-of-00004.safetensors").write_bytes(safetensors_bytes({name: array}))
    assert len(strati.open(folder).tensors) == 4
    (folder / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(strati.StratiError, match="3 of 4 shards"):
        strati.open(folder)


def test_torch_shards(tmp_path):
    import torch

    torch.save({"a.weight": torch.ones(2, 3)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b.weight": torch.ones(2, 3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    table = {"a.weight": "pytorch_model-00001-of-00002.bin", "b.weight": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    net = strati.open(tmp_path)
    assert net.parameters == 12


@pytest.mark.parametrize(
    "shard",
    ["missing.safetensors", "/etc/passwd", "../outside.safetensors", "", ".", "..", "sub/x", 7, None, "a\0b"],
)
def test_shards_that_are_not_there_or_elsewhere(tmp_path, shard):
    (tmp_path / "outside.safetensors").write_bytes(safetensors_bytes())
    folder = sharded(tmp_path / "m", {"fc1.weight": shard})
    with pytest.raises(strati.StratiError) as caught:
        strati.open(folder)
    assert "\n" not in str(caught.value)


def test_links(tmp_path):
    (tmp_path / "outside.safetensors").write_bytes(safetensors_bytes())
    folder = sharded(tmp_path / "m", {"fc1.weight": "link.safetensors"})
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(strati.StratiError, match="out of the folder"):
        strati.open(folder)
    (folder / "link.safetensors").unlink()
    (folder / "link.safetensors").symlink_to(folder / "link.safetensors")
    with pytest.raises(strati.StratiError, match="circle"):
        strati.open(folder)
    folder = sharded(tmp_path / "config")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(strati.StratiError, match="out of the folder"):
        strati.open(folder)


def test_a_hub_snapshot_may_link_to_its_blobs(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "123").write_bytes(safetensors_bytes())
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert len(strati.open(snapshot).tensors) == 4


def test_a_tensor_in_two_shards_or_in_none(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / "two.safetensors").write_bytes(safetensors_bytes())
    with pytest.raises(strati.StratiError, match="in both"):
        strati.open(folder)
    folder = sharded(tmp_path / "n", {"fc1.weight": "one.safetensors", "ghost": "one.safetensors"})
    with pytest.raises(strati.StratiError, match="lacks ghost"):
        strati.open(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": 3}', '{"a":1,"a":2}', "\xff"]
)
def test_broken_indexes(tmp_path, text):
    folder = sharded(tmp_path / "m")
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(strati.StratiError) as caught:
        strati.open(folder)
    assert "\n" not in str(caught.value)


def test_an_index_or_shard_that_is_a_pipe_does_not_hang(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / "two.safetensors").unlink()
    os.mkfifo(folder / "two.safetensors")
    with pytest.raises(strati.StratiError, match="pipe"):
        strati.open(folder)
    (folder / INDEX).unlink()
    os.mkfifo(folder / INDEX)
    with pytest.raises(strati.StratiError, match="pipe"):
        strati.open(folder)


def test_no_weights_or_several(tmp_path):
    with pytest.raises(strati.StratiError, match="without weights"):
        strati.open(tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(b"x")
    with pytest.raises(strati.StratiError, match="SavedModel"):
        strati.open(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes())
    with pytest.raises(strati.StratiError, match="several models"):
        strati.open(tmp_path)
