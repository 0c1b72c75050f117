"""Real checkpoints of every format: opened, counted against published sizes, their values finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import strati


def real(name: str, file: str | None = None) -> Path:
    """A network of the zoo, or a skip with the reason."""
    from strati_reproductions import zoo

    try:
        path = zoo.path(name)
    except strati.StratiError as error:
        pytest.skip(f"{name} cannot be had here: {error}")
    return path.with_name(file) if file else path


def check(path: Path) -> strati.Network:
    """Every layer yields finite matrices of the shape it says; every tensor is a layer or skipped."""
    net = strati.open(path)
    for layer in net.layers():
        matrices = list(layer.matrices())
        assert len(matrices) == layer.count
        assert all(m.shape == layer.shape for m in matrices)
        assert all(bool(np.isfinite(m.astype(np.float32)).all()) for m in matrices)
    named = {layer.tensor for layer in net.layers()} | {s.name for s in net.skipped()}
    assert named == {t.name for t in net.tensors} | {s.name for s in net.contents.unread}
    return net


def roles(net: strati.Network) -> dict[str, int]:
    counts: dict[str, int] = {}
    for layer in net.layers():
        counts[layer.role.value] = counts.get(layer.role.value, 0) + 1
    return counts


def test_mobilenet_torch():
    net = check(real("mobilenetv2"))
    assert net.parameters == 3_504_872  # torchvision's count
    assert roles(net) == {"conv": 52, "head": 1}


def test_cnn_keras():
    net = check(real("cifar-cnn"))
    assert net.format == "keras"
    assert [layer.kind for layer in net.layers()] == ["conv"] * 6 + ["linear"] * 3
    assert net.layers()[-1].shape == (10, 512)


def test_lstm_keras():
    net = check(real("textgenrnn"))
    assert [layer.kind for layer in net.layers()].count("lstm") == 4
    assert net.layers()[0].role.value == "embedding"


def test_one_architecture_in_three_formats():
    """Silero's safetensors and ONNX are two trainings of one network; its TorchScript is refused."""
    import onnx
    from onnx import numpy_helper

    folder = real("silero")
    folder = folder if folder.is_dir() else folder.parent
    plain, graph = check(folder / "silero.safetensors"), check(folder / "silero.onnx")
    assert plain.parameters == graph.parameters
    forms = [sorted((x.kind, x.shape, x.count) for x in net.layers()) for net in (plain, graph)]
    assert forms[0] == forms[1]
    basis = graph.read("model.stft.forward_basis_buffer")  # fixed, not trained
    np.testing.assert_array_equal(basis, plain.read("stft_conv.weight"))
    for weight in onnx.load(folder / "silero.onnx").graph.initializer:
        np.testing.assert_array_equal(graph.read(weight.name), numpy_helper.to_array(weight))
    with pytest.raises(strati.StratiError, match="TorchScript"):
        strati.open(folder / "silero.jit")


@pytest.mark.slow
def test_large_ones():
    minilm = check(real("minilm"))
    assert minilm.parameters == 22_713_216
    assert minilm.config is not None
    assert roles(minilm) == {
        "embedding": 3,
        **{f"attention.{part}": 6 for part in ("q", "k", "v", "out")},
        "mlp.in": 6,
        "mlp.out": 6,
        "linear": 1,
    }
    smollm = check(real("smollm2"))
    assert smollm.parameters == 134_515_008
    assert sum(layer.quantised for layer in smollm.layers()) == 211
    assert roles(check(real("whisper")))["attention.q"] == 12
    assert roles(check(real("stories15m")))["mlp.gate"] == 6
