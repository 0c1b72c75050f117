"""Counts against 60-digit arithmetic: what is called exact is, what rounding hides is flagged, bounds are bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from degenerate_nets import mlp
from precise import FUNCTIONS, precise_free
from torch import nn

import strati
from strati.landscape.counts import exact
from strati.landscape.counts.degeneracy import Degeneracy
from strati.landscape.mlp.sequential import as_chain


def check(result: Degeneracy, truth: int) -> bool:
    """Whether the count is called exact; it is right then, and otherwise flagged and inside its bounds."""
    codes = [flag.code for flag in result.warnings]
    assert result.structural_free <= truth <= result.free_at_most
    assert result.structural_free <= result.free
    if result.method == "exact":
        assert result.free == truth
        return True
    assert "undecided-rank" in codes and result.free == result.structural_free
    return False


def narrow(act: type[nn.Module], seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 4), act(), nn.Linear(4, 1)), torch.randn(40, 1)


@pytest.mark.parametrize("seed", range(6))
def test_narrow_smooth_networks_use_all_their_parameters(seed: int) -> None:
    """Singular values down to 1e-12 of the largest: a Gram matrix would lose two to five of the thirteen."""
    model, x = narrow(nn.Tanh, seed)
    assert precise_free(model, x, nn.Tanh) == 0
    result = strati.degeneracy(model, x)
    assert check(result, 0)  # seed 4's last singular value is 4e-15: more digits decide
    assert (result.weakly_used > 0) == (seed != 3)  # what a Gram matrix loses


@pytest.mark.parametrize("act", [nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU])
@pytest.mark.parametrize("widths", [[1, 6, 1], [1, 3, 3, 1], [2, 5, 2]])
def test_more_digits_decide_what_doubles_cannot(widths: list[int], act: type[nn.Module]) -> None:
    """Singular values far below rounding; every other network has a neuron twice, whose copies share freedom."""
    for seed in (40, 41):
        model = mlp(widths, bias=True, act=act, seed=seed)
        if seed == 41:
            with torch.no_grad():
                for tensor in (model[0].weight, model[0].bias):
                    tensor[1] = tensor[0]
        x = torch.tensor(np.random.default_rng(seed).standard_normal((24, widths[0])))
        result = strati.degeneracy(model, x)
        truth = precise_free(model, x, act)
        assert check(result, truth)
        assert sum(layer.free for layer in result.layers) == truth


def test_digits_say_when_they_cannot_decide_either() -> None:
    chain = as_chain(narrow(nn.Tanh, 0)[0]).to(torch.float64)
    x = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
    assert [r.low for r in exact.chain_ranks(chain, x, [0, 1]) or ()] == [13, 5]
    assert exact.chain_ranks(chain, 1e5 * x, [0, 1]) is None  # slopes with thousands of zeros after the point
    odd = as_chain(nn.Sequential(nn.Linear(1, 2), nn.Softsign(), nn.Linear(2, 1))).to(torch.float64)
    assert exact.chain_ranks(odd, x, [0, 1]) is None
    assert not exact.digits_affordable(500, 500)


@pytest.mark.parametrize("act", list(FUNCTIONS))
def test_other_activations(act: type[nn.Module]) -> None:
    for seed in range(2):
        model, x = narrow(act, seed)
        check(strati.degeneracy(model, x), precise_free(model, x, act))


def test_one_input_scaled_by_many_powers_of_ten() -> None:
    """Twenty networks of all activations: never wrong, never above, and most ReLU networks are decided."""
    decided = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        act = list(FUNCTIONS)[seed % len(FUNCTIONS)]
        widths = [int(n) for n in rng.integers(1, 4, 3)]
        model = mlp([widths[0], widths[1] + 1, widths[2]], bias=bool(seed % 3), act=act, seed=seed)
        model = model.float() if seed % 2 else model
        x = torch.tensor(rng.standard_normal((int(rng.choice([4, 12])), widths[0])))
        x[:, 0] *= 10.0 ** float(rng.choice([0, 3, 5, 8, 12]))
        truth = precise_free(model, x, act)
        exact = check(strati.degeneracy(model, x), truth)
        assert strati.degeneracy(model, x, exact=False).free <= truth
        decided.append((act, exact))
    assert sum(exact for act, exact in decided if act is nn.ReLU) >= 4  # of four
    assert sum(exact for _, exact in decided) >= 8


def test_a_narrow_bottleneck_is_counted_and_not_guessed() -> None:
    """One smooth neuron feeds four: singular values fall by 1e3 each."""
    model = mlp([2, 1, 4, 1], bias=False, act=nn.GELU, seed=0)
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check(strati.degeneracy(model, x), precise_free(model, x, nn.GELU))


def test_weights_rounded_to_float32_are_taken_as_they_are() -> None:
    """A sum of two rows that is one only up to float32 rounding is used, weakly, and the result says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    x = torch.randn(40, 3)
    x[:, 2] = (x[:, 0] * 0.7 + x[:, 1] * 0.3).float()
    result = strati.degeneracy(model, x)
    assert result.free == precise_free(model, x, nn.ReLU)
    assert 2 <= result.weakly_used <= 4  # a neuron's weight on the third input
    assert "weak-directions" in [flag.code for flag in result.warnings]


def test_saturated_neurons_are_not_called_free() -> None:
    """tanh of 1e5: the slope underflows, yet it is not zero; neither count may rest on it."""
    model, x = narrow(nn.Tanh, 0)
    result = strati.degeneracy(model, 1e5 * x[:12])
    assert result.method == "structural" and result.free_at_most > result.free
    assert {"ambiguous-rank", "undecided-rank"} <= {flag.code for flag in result.warnings}
    assert result.free <= precise_free(model, 1e5 * x[:12], nn.Tanh)
