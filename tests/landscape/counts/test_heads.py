"""Networks that are not chains, and attention heads: bounds against the exact rank of tiny transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

import strati
from strati.core.errors import BadInputError
from strati.landscape.counts.layer_statistics import HeadWeights, find_attention


def tiny(kind: str, seed: int = 0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    common = {"vocab_size": 7, "attn_implementation": "eager", "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=4, n_layer=1, n_head=2, n_positions=6, n_inner=5, **common)
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=4, intermediate_size=5, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            tie_word_embeddings=False, **common,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.BertConfig(
            hidden_size=4, intermediate_size=5, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=6, pad_token_id=0, **common,
        )  # fmt: skip
        model = transformers.BertModel(config, add_pooling_layer=False)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))  # larger than the usual start, so that nothing is nearly linear
    return model.double().eval()


def oracle(model: nn.Module, x: torch.Tensor) -> int:
    """``N - rank(J)`` one output at a time, by plain reverse mode."""
    named = dict(model.named_parameters())
    leaves = [p.detach().clone().requires_grad_() for p in named.values()]
    result = functional_call(model, dict(zip(named, leaves, strict=True)), (x,))
    values = (result.logits if hasattr(result, "logits") else result.last_hidden_state).reshape(-1)
    rows = []
    for value in values:
        slopes = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        flat = [torch.zeros_like(p) if s is None else s for s, p in zip(slopes, leaves, strict=True)]
        rows.append(torch.cat([s.reshape(-1) for s in flat]))
    jacobian = torch.stack(rows)
    size = jacobian.norm(dim=0)
    live = size > 1e-10 * size.max()
    singular = torch.linalg.svdvals(jacobian[:, live] / size[live])
    # norms and rotations inside transformers round to float32, so the threshold is above that
    return jacobian.shape[1] - int((singular > 1e-6 * singular[0]).sum())


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_transformers_are_never_overcounted(kind: str) -> None:
    model = tiny(kind)
    x = torch.randint(0, 6, (12, 5), generator=torch.Generator().manual_seed(0))
    result = strati.degeneracy(model, x, exact=False)
    truth = oracle(model, x)
    assert 0 < result.free <= truth
    by_name = {layer.name.rpartition(".")[2]: layer for layer in result.layers}
    values = by_name[{"gpt2": "c_attn", "llama": "v_proj", "bert": "value"}[kind]]
    heads, width = (1, 2) if kind == "llama" else (2, 2)
    # in the fused layer of GPT-2 queries and keys have as much again
    assert values.free_from_synchrony == (2 if kind == "gpt2" else 1) * heads * width**2
    assert "query and key bases" in result.warnings[0].text


def test_heads_that_attend_alike_are_one_block() -> None:
    model = tiny("bert")
    attention = next(m for n, m in model.named_modules() if n.endswith("attention.self"))
    with torch.no_grad():
        for part in (attention.query, attention.key):
            part.weight[2:] = part.weight[:2]
            part.bias[2:] = part.bias[:2]
    x = torch.randint(0, 6, (12, 5), generator=torch.Generator().manual_seed(0))
    result = strati.degeneracy(model, x, exact=False)
    values = next(layer for layer in result.layers if layer.name.endswith("value"))
    assert values.blocks == ((0, 1),)
    assert values.synchronised_blocks == 1
    assert values.free_from_synchrony == 4 * 3  # s t: the layer norm behind it takes one Jacobian direction
    assert result.free <= oracle(model, x)


def test_unseen_tokens_and_positions_are_free() -> None:
    model = tiny("bert")
    x = torch.randint(0, 4, (20, 3), generator=torch.Generator().manual_seed(0))
    layers = {layer.name: layer for layer in strati.degeneracy(model, x, exact=False).layers}
    words, places = layers["embeddings.word_embeddings"], layers["embeddings.position_embeddings"]
    assert (words.activation_rank, places.activation_rank) == (4, 3)
    assert words.free >= 3 * 4


class Residual(nn.Module):
    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu_(self.a(x)) if self.in_place else torch.relu(self.a(x))
        return self.c(x + self.b(hidden))


@pytest.mark.parametrize("in_place", [False, True])
def test_residual_networks_exactly_and_by_structure(in_place: bool) -> None:
    torch.manual_seed(0)
    model, x = Residual(in_place), torch.randn(80, 3) @ torch.randn(3, 4)
    exact = strati.degeneracy(model, x)
    assert exact.method == "exact"
    assert exact.structural_free <= exact.free == sum(layer.free for layer in exact.layers)
    assert "not-a-chain" in [w.code for w in exact.warnings]
    assert strati.degeneracy(model, x, exact=False).free == exact.structural_free
    assert not any(m._forward_hooks for m in model.modules())


def test_weights_used_without_calling_their_layer_are_not_counted() -> None:
    """nn.MultiheadAttention multiplies by its output layer's weights itself."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.attention(x, x, x)[0])

    result = strati.degeneracy(Attending().double(), torch.randn(10, 3, 4, dtype=torch.float64), exact=False)
    assert [layer.name for layer in result.layers] == ["head"]
    assert any("never called" in reason for _, reason in result.skipped)


def test_finding_heads_by_name() -> None:
    model = tiny("llama")
    found = find_attention(model, {"l.0.attn.v_proj": (8, 4), "v_proj": (8, 4), "l.0.mlp.up_proj": (8, 4)})
    assert [(a.name, a.heads, a.width, a.shared) for a in found] == [("l.0.attn", 1, 8, 2)]
    assert find_attention(nn.Linear(2, 2), {"a.v_proj": (2, 2)}) == []


def test_blocks_of_heads_from_patterns() -> None:
    patterns = torch.rand(3, 3, 5, 5, dtype=torch.float64)
    patterns[:, 2] = patterns[:, 0]
    one = HeadWeights("a", "a.v", 0, 3, 2, 1)
    assert one.blocks() == [[0], [1], [2]]
    one.add((torch.zeros(1), patterns))
    assert one.blocks() == [[0, 2], [1]]
    assert one.rows([0, 2]).tolist() == [0, 1, 4, 5]


def test_data_that_do_not_fit_a_transformer() -> None:
    with pytest.raises(BadInputError, match="do not fit"):
        strati.degeneracy(tiny("gpt2"), torch.full((2, 3), 99))


def test_the_price_of_nearly_equal_heads_is_what_they_read_otherwise() -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(4, 3, 5, 5, dtype=torch.float64, generator=generator)
    values = torch.randn(
        4, 5, 7, dtype=torch.float64, generator=generator
    )  # one more, then three heads of two
    one = HeadWeights("a", "a.v", 1, 3, 2, 1)
    assert one.blocks_within(1.0) is None
    one.add((torch.zeros(1), patterns), values)
    own = values[:, :, 1:].reshape(4, 5, 3, 2)
    for i in range(3):
        for j in range(3):
            read = [patterns[:, k] @ own[:, :, j] for k in (i, j)]
            expected = (read[0] - read[1]).square().sum() / 20
            assert float(one.price[i, j] / one.read) == pytest.approx(float(expected), abs=1e-12)


def test_heads_that_attend_nearly_alike_are_one_block_at_a_loss_scale() -> None:
    model = tiny("bert")
    attention = next(m for n, m in model.named_modules() if n.endswith("attention.self"))
    with torch.no_grad():
        for part in (attention.query, attention.key):
            part.weight[2:] = part.weight[:2] + 1e-4
            part.bias[2:] = part.bias[:2]
    x = torch.randint(0, 6, (12, 5), generator=torch.Generator().manual_seed(0))
    found = {
        epsilon: next(
            layer
            for layer in strati.degeneracy(model, x, exact=False, epsilon=epsilon).layers
            if layer.name.endswith("value")
        )
        for epsilon in (1e-12, 1e-6)
    }
    assert all(layer.synchronised_blocks == 0 for layer in found.values())  # not exactly
    tight, wide = (layer.at_epsilon for layer in found.values())
    assert tight is not None and wide is not None
    assert (tight.synchronised_blocks, wide.synchronised_blocks) == (0, 1)
    assert wide.free > tight.free
