"""Counts against the exact rank of the Hessian, on networks built to have each degeneracy alone and together."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from degenerate_nets import KINDS, exact_free, hessian_free, mlp, random_network, spoil
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strati
from strati.core.errors import BadInputError, UnsupportedError
from strati.landscape.counts.ranks import Factor
from strati.landscape.mlp.sequential import Chain, as_chain
from strati.landscape.mlp.statistics_pass import survey


def data(n: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kinds", [(), *((k,) for k in KINDS), ("dead", "duplicate"), KINDS])
@pytest.mark.parametrize("bias", [True, False])
def test_free_is_the_nullity_of_the_hessian(kinds: tuple[str, ...], bias: bool) -> None:
    model = mlp([4, 6, 5, 3], bias=bias, seed=3)
    x = spoil(model, data(120, 4), kinds, np.random.default_rng(5))
    result = strati.degeneracy(model, x)
    assert result.method == "exact"
    assert result.free == exact_free(model, x) == hessian_free(model, x)
    assert sum(layer.free for layer in result.layers) == result.free
    assert result.structural_free <= result.free
    assert result.effective == sum(p.numel() for p in model.parameters()) - result.free


@pytest.mark.parametrize("networks", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_structure_alone_is_right_on_random_networks_and_never_above(networks: int) -> None:
    """Networks of `random_network`: the structural count, which knows nothing of the exact one."""
    right = 0
    for seed in range(networks):
        model, x, kinds = random_network(seed)
        count = strati.degeneracy(model, x, exact=False)
        truth = exact_free(model, x)
        assert count.method == "structural"
        assert count.free <= truth, (seed, kinds)
        right += count.free == truth
    assert right >= 0.86 * networks, right


@pytest.mark.parametrize("networks", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_exact_count_agrees_with_an_independent_one_on_random_networks(networks: int) -> None:
    for seed in range(1000, 1000 + networks):
        model, x, kinds = random_network(seed)
        assert strati.degeneracy(model, x).free == exact_free(model, x), (seed, kinds)


@settings(max_examples=25, deadline=None)
@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    n=st.integers(1, 40),
    bias=st.booleans(),
    act=st.sampled_from([nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.GELU, nn.Identity]),
    seed=st.integers(0, 10_000),
)
def test_structure_never_exceeds_the_exact_count(
    widths: list[int], n: int, bias: bool, act: type[nn.Module], seed: int
) -> None:
    model = mlp(widths, bias=bias, act=act, seed=seed)
    x = data(n, widths[0], seed)
    result = strati.degeneracy(model, x)
    assert 0 <= result.structural_free <= result.free <= result.free_at_most <= result.parameters
    if result.method == "structural":  # only directions that hardly move the outputs may be open
        assert largest_disputed(model, x, result.free_at_most) < 1e-9


def largest_disputed(model: nn.Module, x: torch.Tensor, free: int) -> float:
    """The largest singular value of the Jacobian among those said to be free, relative to the largest of all."""
    values = {name: p.detach().double() for name, p in model.named_parameters()}
    inputs = torch.as_tensor(x).double()
    blocks = torch.func.jacrev(lambda v: torch.func.functional_call(model.double(), v, (inputs,)).flatten())(
        values
    )
    jacobian = torch.cat([b.flatten(1) for b in blocks.values()], 1)
    found = torch.linalg.svdvals(jacobian)
    used = jacobian.shape[1] - free
    return float(found[used] / found[0]) if used < len(found) else 0.0


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_units_and_neuron_scales_do_not_matter(factor: float) -> None:
    model = mlp([5, 7, 6, 2], seed=1)
    x = data(200, 5)
    before = strati.degeneracy(model, x)
    with torch.no_grad():
        x[:, 0] *= factor
        model[0].weight[:, 0] /= factor  # another unit of an input
        model[0].weight[1] *= factor  # a neuron's scale
        model[0].bias[1] *= factor
        model[2].weight[:, 1] /= factor
    after = strati.degeneracy(model, x)
    assert (after.free, after.structural_free) == (before.free, before.structural_free)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("power", [-30, -10, 10, 30])
def test_layers_of_very_different_scale_are_not_overcounted(power: int, bias: bool) -> None:
    factor = 10.0 ** (
        power / 3 if bias else power
    )  # a bias acts on a constant that has no other scale to be seen on
    for seed in range(8):
        model, x = mlp([4, 6, 5, 3], seed=seed, bias=bias), data(80, 4, seed)
        before = strati.degeneracy(model, x, exact=False).structural_free
        with torch.no_grad():  # the same function: ReLUs keep a positive scale
            model[0].weight *= factor
            model[2].weight /= factor
            if bias:
                model[0].bias *= factor
        assert strati.degeneracy(model, x, exact=False).structural_free == before


def test_the_order_of_data_and_of_neurons_does_not_matter() -> None:
    model, x, _ = random_network(7)
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
    neurons = torch.randperm(model[0].out_features, generator=torch.Generator().manual_seed(2))
    before = strati.degeneracy(model, x)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight[neurons])
        if model[0].bias is not None:
            model[0].bias.copy_(model[0].bias[neurons])
        model[2].weight.copy_(model[2].weight[:, neurons])
    after = strati.degeneracy(model, x[order])
    assert (after.free, after.structural_free) == (before.free, before.structural_free)


def test_known_numbers() -> None:
    """By hand: inputs of rank 3 (and the constant), one dead and two proportional neurons."""
    model = mlp([5, 6, 2], seed=0)
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].bias[0] = -1
        model[0].weight[2] = 2 * model[0].weight[1]
        model[0].bias[2] = 2 * model[0].bias[1]
    x = data(300, 3) @ data(3, 5, seed=9)
    first, last = strati.degeneracy(model, x, exact=False).layers
    assert (first.inputs, first.outputs, first.bias, first.parameters) == (5, 6, True, 36)
    assert (first.activation_rank, first.jacobian_rank) == (4, 5)
    assert (first.dead, first.synchronised_blocks, first.blocks) == (1, 1, ((1, 2),))
    assert first.free_from_activations == 6 * (6 - 4)
    assert first.free_from_jacobians == 6 * (6 - 5)
    assert first.free_from_synchrony == 3 * 1 + 1 * 2  # three lone neurons, s=1, t=2 for the pair
    assert first.free == 36 - 4 * 5 + 5
    assert last.free == 2 * 7 - 2 * 5 == strati.degeneracy(model, x, exact=False).layers[1].free


def test_float32_checkpoints_with_deficient_weights() -> None:
    """Weights rounded to float32 are deficient only up to rounding, which must not count as use."""
    model = mlp([6, 8, 3], seed=2)
    x = spoil(model, data(200, 6), ("subspace",), np.random.default_rng(1)).float()
    with torch.no_grad():
        model[2].weight[2] = model[2].weight[0] + model[2].weight[1]
    rounded = model.float()
    assert strati.degeneracy(rounded, x).free == strati.degeneracy(model.double(), x.double()).free


def test_few_data_and_few_values() -> None:
    model = mlp([6, 20, 20, 2], seed=4)
    result = strati.degeneracy(model, data(5, 6))
    assert result.effective <= 10
    assert result.free == exact_free(model, data(5, 6))
    assert "few-data" in [w.code for w in result.warnings]


def test_linear_networks_count_as_one_map() -> None:
    """A deep linear network is its product: outputs times inputs are used, by eq. 18 with one block."""
    model = mlp([4, 6, 5, 3], act=nn.Identity, bias=False, seed=0)
    result = strati.degeneracy(model, data(100, 4))
    assert result.effective == 12 == result.parameters - result.structural_free


def test_last_layer_with_a_nonlinearity() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU()).double()
    x = data(100, 3)
    assert strati.degeneracy(model, x).free == exact_free(model, x)


def test_epsilon_counts_grow_with_the_scale() -> None:
    model = mlp([6, 16, 16, 4], seed=0)
    x = data(300, 6)
    used = [
        strati.degeneracy(model, x, epsilon=e, exact=False).effective_at_epsilon
        for e in (1e-12, 1e-4, 1e-2, 10)
    ]
    assert used == sorted(used, reverse=True)
    result = strati.degeneracy(model, x, epsilon=1e-4)
    layer = result.layers[0]
    gram = np.c_[x, np.ones(300)].T @ np.c_[x, np.ones(300)] / 300
    assert layer.at_epsilon is not None
    assert layer.at_epsilon.activation_rank == int((np.linalg.eigvalsh(gram) > 1e-4).sum())
    assert result.epsilon == 1e-4 and result.effective_at_epsilon is not None


def test_result_is_json_table_and_picture() -> None:
    result = strati.degeneracy(mlp([4, 5, 2]), data(50, 4), epsilon=1e-3)
    form = json.loads(result.to_json())
    assert form["schema"] == "strati.degeneracy/1"
    needed = {
        "name", "inputs", "outputs", "activation_rank", "jacobian_rank", "synchronised_blocks",
        "free_from_activations", "free_from_jacobians", "free_from_synchrony", "free",
    }  # fmt: skip
    assert all(needed <= set(layer) for layer in form["layers"])
    assert form["free"] + form["effective"] == form["parameters"]
    assert f"{form['effective']} of {form['parameters']} parameters" in form["sentence"]
    assert len(result.frame()) == 2
    assert "<table" in result._repr_html_()
    assert len(result.plot().axes[0].patches) == 4


def test_the_same_seed_gives_the_same_result_and_batches_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp([6, 12, 100], seed=0)  # more outputs than are taken exactly
    x = data(40, 6)
    first = strati.degeneracy(model, x, exact=False)
    assert "probes" in [w.code for w in first.warnings]
    assert first.to_json() == strati.degeneracy(model, x, exact=False).to_json()
    monkeypatch.setattr("strati.landscape.mlp.statistics_pass.BATCH_BYTES", 400_000)
    assert first.layers == strati.degeneracy(model, x, exact=False, seed=1).layers
    assert first.free <= strati.degeneracy(model, x, exact=True).free


def test_probes_never_count_above_the_exact_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """More outputs than are taken, and so few data that a datum brings more directions than it has probes."""
    monkeypatch.setattr("strati.landscape.mlp.statistics_pass.MOST_OUTPUTS", 3)
    monkeypatch.setattr("strati.landscape.counts.module_counts.MOST_OUTPUTS", 3)
    monkeypatch.setattr("strati.landscape.counts.module_counts.PROBES", 3)
    certain = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        widths = [
            int(rng.integers(2, 5)),
            int(rng.integers(3, 10)),
            int(rng.integers(2, 9)),
            int(rng.integers(4, 10)),
        ]
        model = mlp(widths, seed=seed, bias=bool(seed % 2))
        x = data(int(rng.choice([1, 2, 3, 40])), widths[0], seed)
        exact = exact_free(model, x)
        count = strati.degeneracy(model, x, exact=False)
        assert count.free - count.free_from_few_data <= exact, seed
        text = next(w.text for w in count.warnings if w.code == "probes")
        certain.append("exact" in text)
        watched = strati.degeneracy(Twice(model), x, exact=False)  # not a chain: read by hooks
        assert watched.free - watched.free_from_few_data <= exact, seed
    assert 0 < sum(certain) < len(certain)


class Twice(nn.Module):
    """The same function as a network that is no chain."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.0 * x.sum(dim=1, keepdim=True)


def test_without_the_functions_of_single_neurons_the_count_is_a_lower_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many data are too dear for one factorisation per neuron; the bounds used then only miss something."""
    for seed in range(40):
        model, x, _ = random_network(seed)
        fine = strati.degeneracy(model, x, exact=False).free
        with monkeypatch.context() as patch:
            patch.setattr("strati.landscape.mlp.structure.BYTES", 0)
            assert strati.degeneracy(model, x, exact=False).free <= fine


def test_memory_does_not_grow_with_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing handles more rows at once than a batch, and what is kept has no axis of data."""
    seen: list[int] = []
    forward = Chain.forward

    def watched(chain: Chain, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        seen.append(len(x))
        return forward(chain, x)

    monkeypatch.setattr(Chain, "forward", watched)
    monkeypatch.setattr("strati.landscape.mlp.statistics_pass.BATCH_BYTES", 100_000)
    chain = as_chain(mlp([6, 8, 3]))
    for n in (1_000, 4_000):
        seen.clear()
        found = survey(chain, data(n, 6))
        assert sum(seen) == n + 256  # rounding is measured on some of them
        assert max(seen) <= 256
        kept = [f for layer in found.layers for f in vars(layer).values() if isinstance(f, Factor)]
        assert len(kept) == 4 and all(len(f.matrix) <= f.columns for f in kept)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_parameters_that_are_never_used_are_free() -> None:
    result = strati.degeneracy(Unused(), data(50, 3))
    assert (result.parameters, result.free) == (8 + 30, 30)


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (mlp([4, 3, 2]), np.zeros((10, 5)), "5 inputs a row"),
        (nn.Sequential(nn.ReLU()), np.zeros((10, 5)), "has no parameters"),
        (nn.Sequential(nn.LayerNorm(5)), np.zeros((10, 5)), "no linear layer"),
        (mlp([4, 3, 2]), np.full((10, 4), np.nan), "not finite"),
        (mlp([4, 3, 2]), np.full((10, 4), 1e300), "whose squares overflow; rescale"),
        (mlp([4, 3, 2]), np.zeros((0, 4)), "at least one row"),
        (
            nn.Sequential(nn.Conv3d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2)),
            np.zeros((4, 1, 3, 3, 3)),
            "Conv3d",
        ),
        (nn.LSTM(4, 4), np.zeros((4, 4)), "LSTM"),
        (17, np.zeros((4, 4)), "nn.Module"),
        ("no-such-model.pt", np.zeros((4, 4)), "no-such-model.pt"),
    ],
)
def test_bad_input_is_one_clear_line(model: nn.Module, x: np.ndarray, words: str) -> None:
    with pytest.raises((BadInputError, UnsupportedError)) as caught:
        strati.degeneracy(model, x)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_outputs_that_are_not_finite_are_refused() -> None:
    model = mlp([4, 3, 2])
    with torch.no_grad():
        model[0].weight[0, 0] = float("inf")
    with pytest.raises(BadInputError, match="not finite"):
        strati.degeneracy(model, np.ones((10, 4)))
    with pytest.raises(BadInputError, match="positive"):
        strati.degeneracy(mlp([4, 3, 2]), np.ones((10, 4)), epsilon=-1.0)
    with pytest.raises(BadInputError, match="too many"):
        strati.degeneracy(mlp([200, 200, 200, 200]), np.ones((200, 200)), exact=True)
