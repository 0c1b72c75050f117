"""The puzzle's reproductions; the tables themselves take minutes and are marked slow."""

import numpy as np
import pytest

import strati
from strati_reproductions.dropped_net.open_questions import _inversions, planted_network
from strati_reproductions.registry import reproduce


def test_inversions_are_counted():
    assert _inversions(np.arange(6)) == 0
    assert _inversions(np.arange(6)[::-1]) == 15


def test_planted_network_is_a_puzzle_of_the_public_kind():
    found = strati.reassemble(*planted_network(12, rows=1000))
    assert found.exact and found.pairing.separated and not found.searched
    assert found.seed_mse > 1e-4  # the seed alone does not solve it


@pytest.mark.long
def test_tables_of_the_paper(dropped_net, tmp_path):
    found = {row.what: row for row in reproduce("dropped-net-tables", quick=True, folder=tmp_path).rows}
    assert found["seed MSE, ||W_out||_F"].ours == pytest.approx(0.075851, abs=1e-6)
    assert found["seed MSE, delta-norm"].ours == pytest.approx(0.036794, abs=1e-6)
    assert found["Bradley-Terry: 3-cycles"].ours == 22
    assert found["Bradley-Terry: triples not transitive"].ours == 66
    assert found["Bradley-Terry: MSE of its order"].ours == pytest.approx(0.00299, abs=5e-6)
    assert found["table 3 (from ||W_out||_F): rounds"].ours == 6
    assert found["diagonal dominance of pairs, least"].ours == pytest.approx(1.764, abs=1e-3)
    assert found["appendix B: activation probability on each block's own stream, mean"].ours == pytest.approx(
        0.20, abs=0.02
    )


@pytest.mark.long
def test_figures_of_the_paper(dropped_net, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = reproduce("dropped-net-figures", folder=tmp_path)
    assert len([path for path in drawn.figures if path.endswith(".png")]) == 6
    traces = [row.ours for row in drawn.rows if "traces" in row.what]
    assert traces == pytest.approx([-13.5, -7.4], abs=0.05)
