"""The exact rank: both Gram matrices, layer by layer, chains and other modules, against an oracle."""

from __future__ import annotations

import pytest
import torch
from degenerate_nets import exact_free, mlp, random_network
from torch import nn

import strati
from strati.landscape.counts.exact import affordable, chain_rows, exact_ranks, module_rows
from strati.landscape.mlp.sequential import as_chain


def parts_of(model: nn.Module) -> list[list[str]]:
    names = [n for n, _ in model.named_parameters()]
    stems = list(dict.fromkeys(n.rpartition(".")[0] for n in names))
    return [[n for n in names if n.rpartition(".")[0] == stem] for stem in stems]


@pytest.mark.parametrize("seed", range(12))
def test_chains_and_automatic_differentiation_agree(seed: int) -> None:
    model, x, _ = random_network(seed)
    chain = as_chain(model)
    sizes = [s.parameters for s in chain.stages]
    values = x.shape[0] * chain.widths[-1]
    one = exact_ranks(chain_rows(chain, x), sizes, values, x.shape[0])
    rows, more, n = module_rows(model, x, parts_of(model))
    two = exact_ranks(rows, sizes, more, n)
    assert one.ranks == two.ranks
    assert sum(one.free(sizes)) == exact_free(model, x)


@pytest.mark.parametrize("n", [3, 20, 400])
def test_few_and_many_data_use_different_matrices_and_agree(n: int) -> None:
    """Layers counted from the last to the first: each partial rank is that of the later layers alone."""
    model = mlp([4, 5, 5, 2], seed=1)
    x = torch.randn(n, 4, dtype=torch.float64)
    chain = as_chain(model)
    sizes = [s.parameters for s in chain.stages]
    ranks = exact_ranks(chain_rows(chain, x), sizes, 2 * n, n).ranks
    jacobian = torch.cat([rows for rows, _ in chain_rows(chain, x)()])
    for layer in range(3):
        later = jacobian[:, : sum(sizes[layer:])]
        assert ranks[layer] == int(torch.linalg.matrix_rank(later, rtol=1e-8))


@pytest.mark.parametrize("n", [5, 50])
def test_eigenvalues_above_a_loss_scale_are_those_of_the_gauss_newton_matrix(n: int) -> None:
    model = mlp([3, 4, 2], seed=2)
    x = torch.randn(n, 3, dtype=torch.float64)
    chain = as_chain(model)
    jacobian = torch.cat([rows for rows, _ in chain_rows(chain, x)()])
    eigenvalues = torch.linalg.svdvals(jacobian).square() / n
    for epsilon in (1e-3, float(eigenvalues[3:5].mean()), 10.0):
        ranks = exact_ranks(
            chain_rows(chain, x), [s.parameters for s in chain.stages], 2 * n, n, epsilon=epsilon
        )
        assert ranks.above == int((eigenvalues > epsilon).sum())


def test_what_is_affordable() -> None:
    assert affordable(1000, 10_000)
    assert affordable(10**5, 500)
    assert not affordable(10**6, 10**5)
    assert not affordable(2400, 10**7)
    assert not affordable(10**6, 500)  # the Jacobian itself would take gigabytes


def test_beyond_the_exact_rank_the_first_data_give_an_upper_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The range contains the exact count; if a single row is already too large, no upper end is given."""
    from strati.landscape.counts import exact

    model = mlp([6, 10, 8, 3], seed=4)
    x = torch.randn(200, 6, dtype=torch.float64)
    truth = strati.degeneracy(model, x)
    assert truth.method == "exact"
    monkeypatch.setattr(exact, "affordable", lambda parameters, values: False)
    assert strati.degeneracy(model, x).free_at_most is None  # the exact rank can be asked for
    monkeypatch.setattr(exact, "MOST_EXACT", 100)
    monkeypatch.setattr(exact, "MOST_DIMENSIONS", 60)
    ranges = strati.degeneracy(model, x)
    assert ranges.method == "structural" and ranges.free_at_most == ranges.parameters - 30
    assert ranges.free <= truth.free <= ranges.free_at_most
    assert strati.degeneracy(model, x, exact=False).free_at_most is None
    monkeypatch.setattr(exact, "MOST_DIMENSIONS", 4)
    assert strati.degeneracy(model, x).free_at_most is None
