"""Checkpoints as modules: architectures inferred from tensors of every format; transformers from a folder."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

import strati
from strati import embedded
from strati.core.errors import BadInputError, UnsupportedError
from strati.io.to_module import as_module


def mlp(widths: list[int], bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for a, b in pairwise(widths):
        parts += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def numpy_state(model: nn.Module) -> dict[str, np.ndarray]:
    return {k: v.detach().numpy() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ending", ["safetensors", "pt", "npz"])
def test_the_module_computes_what_the_original_did(tmp_path: Path, ending: str, bias: bool) -> None:
    model = mlp([6, 5, 5, 3], bias)
    path = tmp_path / f"model.{ending}"
    if ending == "safetensors":
        save_file(numpy_state(model), path)
    elif ending == "pt":
        torch.save(model.state_dict(), path)
    else:
        np.savez(path, **numpy_state(model))
    x = torch.randn(9, 6)
    assert torch.allclose(as_module(path)(x), model(x), atol=1e-6)
    assert torch.allclose(as_module(strati.open(path))(x), model(x), atol=1e-6)


def test_numbered_layers_are_ordered_as_numbers(tmp_path: Path) -> None:
    model = mlp([3] + [4] * 11 + [2])
    save_file(numpy_state(model), tmp_path / "m.safetensors")
    x = torch.randn(5, 3)
    assert torch.allclose(as_module(tmp_path / "m.safetensors")(x), model(x), atol=1e-6)


def test_names_without_order_are_ordered_by_shape(tmp_path: Path) -> None:
    first, second, third = nn.Linear(3, 7), nn.Linear(7, 5), nn.Linear(5, 2)
    named = {"encoder": first, "core": second, "answer": third}
    save_file(
        {f"{k}.{n}": p.detach().numpy() for k, m in named.items() for n, p in m.named_parameters()},
        tmp_path / "m.safetensors",
    )
    x = torch.randn(5, 3)
    module = as_module(tmp_path / "m.safetensors", activation="tanh")
    assert torch.allclose(module(x), third(torch.tanh(second(torch.tanh(first(x))))), atol=1e-6)
    result = strati.degeneracy(module, x)
    assert [layer.name for layer in result.layers] == ["encoder", "core", "answer"]


def test_kernels_stored_inputs_first(tmp_path: Path) -> None:
    model = mlp([4, 4, 4])
    arrays = {}
    for index, layer in enumerate(m for m in model if isinstance(m, nn.Linear)):
        arrays[f"dense_{index}/kernel"] = layer.weight.detach().numpy().T
        arrays[f"dense_{index}/bias"] = layer.bias.detach().numpy()
    np.savez(tmp_path / "m.npz", **arrays)
    x = torch.randn(5, 4)
    assert torch.allclose(as_module(tmp_path / "m.npz")(x), model(x), atol=1e-6)


def test_double_stays_double_and_half_becomes_single(tmp_path: Path) -> None:
    model = mlp([3, 4, 2])
    for dtype, wanted in ((np.float64, torch.float64), (np.float16, torch.float32)):
        save_file({k: v.astype(dtype) for k, v in numpy_state(model).items()}, tmp_path / "m.safetensors")
        assert next(as_module(tmp_path / "m.safetensors").parameters()).dtype == wanted


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a.weight": np.ones((3, 4)), "b.weight": np.ones((6, 5))}, "do not fit one behind the other"),
        ({"a.weight": np.ones((3, 4)), "norm.weight": np.ones(3)}, "belongs to no linear layer"),
        (
            {"a.weight": np.ones((3, 4)), "conv.weight": np.ones((3, 3, 2, 2))},
            "not of a multilayer perceptron",
        ),
        ({"a.weight": np.ones((3, 4)), "a.bias": np.ones(2)}, "2 values for 3 outputs"),
        ({"a.bias": np.ones(3)}, "no linear layer"),
        ({"a.weight": np.full((3, 4), np.nan)}, "not finite"),
        ({"a.weight": np.ones((3, 4), dtype=np.int64)}, "not real weights"),
    ],
)
def test_what_is_not_a_perceptron_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], words: str
) -> None:
    save_file(arrays, tmp_path / "m.safetensors")
    with pytest.raises((UnsupportedError, BadInputError), match=words):
        as_module(tmp_path / "m.safetensors")


def test_unknown_activation() -> None:
    with pytest.raises(BadInputError, match="no such activation"):
        as_module(embedded.path("digits-mlp.safetensors"), activation="swish")  # type: ignore[arg-type]


def saved_gpt2(folder: Path) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(folder)
    return model


def test_a_transformer_from_a_folder(tmp_path: Path) -> None:
    original = saved_gpt2(tmp_path / "gpt2")
    model = as_module(tmp_path / "gpt2")
    x = torch.randint(0, 11, (3, 5))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert not model.training
    assert torch.allclose(model(x).logits, original(x).logits, atol=1e-5)


def test_code_beside_the_weights_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    saved_gpt2(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n"
    )
    config["architectures"] = ["Evil"]
    config["auto_map"] = {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="not a model class"):
        as_module(folder)
    assert not (folder / "ran").exists()


def test_a_folder_that_lacks_weights(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    saved_gpt2(folder)
    config = json.loads((folder / "config.json").read_text())
    config["n_layer"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="lacks"):
        as_module(folder)


def test_a_reassembled_network_keeps_its_residual_stream(tmp_path):
    import numpy as np
    import torch
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    shapes = {
        "blocks.0.inp": (5, 3),
        "blocks.0.out": (3, 5),
        "blocks.1.inp": (5, 3),
        "blocks.1.out": (3, 5),
        "last": (2, 3),
    }
    tensors = {f"{k}.weight": rng.standard_normal(v).astype(np.float32) for k, v in shapes.items()}
    tensors |= {f"{k}.bias": rng.standard_normal(v[0]).astype(np.float32) for k, v in shapes.items()}
    save_file(tensors, tmp_path / "net.safetensors")
    x = rng.standard_normal((7, 3)).astype(np.float32)
    stream = x
    for i in range(2):
        hidden = np.tanh(stream @ tensors[f"blocks.{i}.inp.weight"].T + tensors[f"blocks.{i}.inp.bias"])
        stream = stream + hidden @ tensors[f"blocks.{i}.out.weight"].T + tensors[f"blocks.{i}.out.bias"]
    expected = stream @ tensors["last.weight"].T + tensors["last.bias"]
    model = as_module(tmp_path / "net.safetensors", activation="tanh")
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_an_onnx_graph_is_not_run_and_the_way_to_convert_is_said(tmp_path: Path) -> None:
    import makers
    from command import run_strati

    path = tmp_path / "a.onnx"
    path.write_bytes(makers.onnx_bytes())
    assert len(strati.open(path).layers()) == 2
    with pytest.raises(strati.StratiError, match=r"does not run; convert it.*onnx2torch"):
        as_module(path)
    np.savez(tmp_path / "data.npz", x=np.ones((20, 4), np.float32), y=np.zeros(20, np.int64))
    done = run_strati("degeneracy", path, "--data", tmp_path / "data.npz", expect=2)
    assert done.stderr.count("\n") == 1 and "onnx2torch" in done.stderr
