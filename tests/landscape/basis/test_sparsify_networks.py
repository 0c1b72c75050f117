"""Sparsifying networks that branch: residual networks, CNNs, transformers. Outputs on the data must not move."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError, UnsupportedError


class Residual(nn.Module):
    """Two residual blocks of width 6; ``shared`` lets the outside read a hidden layer too."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2)
        )
        self.head, self.shared = nn.Linear(6, 2), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(())
        for block in self.blocks:
            hidden = block[1](block[0](x))
            x = x + block[2](hidden)
        return self.head(x) + (hidden.sum(dim=1, keepdim=True) if self.shared else 0.0)


def unmoved(net: nn.Module, result: strati.Sparsified, x: torch.Tensor, bound: float) -> None:
    """The written weights in the network itself give the same outputs on the data."""
    again = copy.deepcopy(net)
    again.load_state_dict({name: torch.from_numpy(value) for name, value in result.tensors.items()})
    with torch.no_grad():
        one, two = (getattr(m(x), "logits", None) if hasattr(m, "config") else m(x) for m in (net, again))
    assert one is not None and two is not None
    assert float((one - two).abs().max()) <= bound * float(one.abs().max())
    assert result.change <= bound


def test_a_residual_network_uses_every_dependence_of_its_activations() -> None:
    torch.manual_seed(0)
    net = Residual().double()
    x = torch.randn(200, 3, dtype=torch.float64) @ torch.randn(3, 6, dtype=torch.float64)
    result = strati.sparsify(net, x)
    by_name = {layer.name: layer for layer in result.layers}
    assert by_name["blocks.0.0"].dependent == 3  # the inputs span three of six dimensions
    assert by_name["blocks.0.0"].zeros_after >= 3 * 8
    assert by_name["blocks.1.0"].dependent == 0
    unmoved(net, result, x, 1e-9)


def test_neurons_that_fire_together_are_recombined_inside_a_block() -> None:
    torch.manual_seed(1)
    net = Residual().double()
    with torch.no_grad():
        first = net.blocks[0][0]
        first.bias[:] = 20.0  # all fire on all data: linear on the data, every recombination is allowed
    x = torch.randn(100, 6, dtype=torch.float64)
    result = strati.sparsify(net, x)
    own = next(layer for layer in result.layers if layer.name == "blocks.0.0")
    assert own.block_zeros > 0 or own.zeros_after > own.zeros_before
    assert next(layer for layer in result.layers if layer.name == "blocks.0.2").dependent >= 2
    unmoved(net, result, x, 1e-8)


def test_a_recombination_that_someone_else_would_notice_is_taken_back() -> None:
    torch.manual_seed(1)
    net = Residual(shared=True).double()
    with torch.no_grad():
        net.blocks[1][0].bias[:] = 20.0  # type: ignore[index,operator,union-attr]  # all fire; the outside sums them too
    x = torch.randn(100, 6, dtype=torch.float64)
    result = strati.sparsify(net, x)
    own = next(layer for layer in result.layers if layer.name == "blocks.1.0")
    assert own.blocks_written == () and own.block_zeros == 0
    unmoved(net, result, x, 1e-8)


def test_unread_neurons_are_silenced_unless_someone_else_reads_them() -> None:
    for shared in (False, True):
        torch.manual_seed(2)
        net = Residual(shared).double()
        with torch.no_grad():
            net.blocks[1][2].weight[:, :3] = 0.0
        x = torch.randn(100, 6, dtype=torch.float64)
        result = strati.sparsify(net, x)
        own = next(layer for layer in result.layers if layer.name == "blocks.1.0")
        assert (own.unread > 0) is not shared
        unmoved(net, result, x, 1e-8)


def cnn() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = (
                nn.Conv2d(2, 5, 3, padding=1),
                nn.Conv2d(5, 4, 3, stride=2, padding="valid"),
            )
            self.skip, self.deep = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, groups=4)
            self.norm, self.head = nn.BatchNorm2d(5), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv2(torch.relu(self.norm(self.conv1(x))))
            y = torch.relu(y + self.skip(x)[:, :, 1:-1:2, 1:-1:2][:, :, : y.shape[2], : y.shape[3]])
            return self.head(self.deep(y).mean(dim=(2, 3)))

    torch.manual_seed(3)
    return Net().double().eval()


def test_a_cnn_with_dependent_and_dead_channels() -> None:
    net = cnn()
    with torch.no_grad():
        net.conv1.weight[1] = 2 * net.conv1.weight[0]  # type: ignore[union-attr,index,operator]
        net.conv1.bias[1] = 2 * net.conv1.bias[0]  # type: ignore[union-attr,index,operator]
        net.conv1.bias[2] = -100.0  # type: ignore[union-attr,operator,index]  # never fires
    x = torch.randn(40, 2, 10, 10, dtype=torch.float64)
    x[:, 1] = 0.5 * x[:, 0]
    result = strati.sparsify(net, x)
    by_name = {layer.name: layer for layer in result.layers}
    assert by_name["skip"].dependent == 1
    assert by_name["conv1"].dependent == 9
    assert by_name["conv2"].dependent >= 18  # nine places each of the parallel and of the dead channel
    assert by_name["conv1"].unread >= 1
    assert any(flag.code == "left-alone" and "deep" in flag.text for flag in result.warnings)
    unmoved(net, result, x, 1e-8)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_mlps_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=8, vocab_size=11, n_inner=12,
                                         bos_token_id=0, eos_token_id=0)  # fmt: skip
        model = transformers.GPT2LMHeadModel(config).eval()
        down = [block.mlp.c_proj.weight.T for block in model.transformer.h]
        inner = "transformer.h.1.mlp.c_fc"
    else:
        config = transformers.LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=2,
            num_attention_heads=2, vocab_size=11, tie_word_embeddings=False, bos_token_id=0,
            eos_token_id=0)  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
        down = [block.mlp.down_proj.weight for block in model.model.layers]
        inner = "model.layers.1.mlp.gate_proj"
    with torch.no_grad():
        down[1][:, :4] = 0.0
    x = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    result = strati.sparsify(model, x)  # ten positions: no layer wider than ten is full
    by_name = {layer.name: layer for layer in result.layers}
    assert by_name[inner].unread >= 4
    wide = next(layer for layer in result.layers if layer.name.endswith(("mlp.c_proj", "mlp.down_proj")))
    assert wide.dependent >= 12 - 10
    unmoved(model, result, x, 1e-4)


def test_only_the_layers_asked_for_and_wrong_calls() -> None:
    torch.manual_seed(0)
    net = Residual().double()
    x = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 6, dtype=torch.float64)
    before = copy.deepcopy(net.state_dict())
    result = strati.sparsify(net, x, layers="head")
    assert [layer.name for layer in result.layers] == ["head"]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with pytest.raises(BadInputError, match="do not fit the model"):
        strati.sparsify(net, x[:, :4])
    with pytest.raises(UnsupportedError, match="no linear layer or convolution"):
        strati.sparsify(nn.ModuleDict({"a": nn.Bilinear(2, 2, 2)}), np.ones((3, 2)))
