"""Trained residual networks whose weights do not tell the pairs: data and weights together do."""

from dataclasses import replace

import numpy as np
import pytest

import strati
from strati.reassembly.residual.pairing import Score, aligned, pair, pairing_of, scores
from strati.reassembly.residual.search import infer_pairing, soft_belief

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def trained():
    from strati_reproductions.dropped_net.trainer import Recipe, train

    recipe = Recipe(blocks=16, width=24, hidden=48, rows=1500, epochs=12, optimiser="adam", seed=41)
    return {act: (train(replace(recipe, activation=act)), act) for act in ("relu", "gelu")}


def test_alignment_tells_more_pairs_than_any_signal_of_the_weights(trained):
    from strati_reproductions.dropped_net.training import in_order

    for network, act in trained.values():
        parts, order = in_order(network, act)
        right = {score: int((pair(parts, score).outs == order).sum()) for score in Score}
        by_data = int(
            (pairing_of(parts, "aligned", aligned(parts, network.x, network.pred)).outs == order).sum()
        )
        both = int((pair(parts, Score.COMBINED, (network.x, network.pred)).outs == order).sum())
        single = max(count for score, count in right.items() if score is not Score.COMBINED)
        assert by_data > single
        assert both >= max(by_data, *right.values())


def test_the_regression_finds_pairs_that_the_evidence_does_not(trained):
    from strati.core.assignment import assign
    from strati_reproductions.dropped_net.training import in_order

    network, act = trained["relu"]
    parts, order = in_order(network, act)
    evidence = scores(parts, Score.GRAM)
    assert (assign(evidence) == order).sum() < len(order) / 2
    evidence = evidence / evidence.std()
    shuffled = np.random.default_rng(0).permutation(len(order))
    mixture, _ = infer_pairing(parts, network.x, network.pred, soft_belief(parts, evidence, 0.3), shuffled)
    assert (assign(mixture) == order).all()


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_networks_trained_by_adam_without_decay_are_put_back(trained, act):
    network, _ = trained[act]
    pieces, truth = network.pieces()
    found = strati.reassemble(pieces, network.x, network.pred, activation=act, seconds=60)
    assert found.exact and found.permutation == truth


def test_roles_that_shape_does_not_tell():
    from strati_reproductions.dropped_net.trainer import Recipe, train

    recipe = Recipe(blocks=12, width=24, hidden=24, rows=1500, epochs=12, optimiser="adam", seed=42)
    network = train(recipe)
    pieces, truth = network.pieces()
    found = strati.reassemble(pieces, network.x, network.pred, seconds=60)
    assert found.exact and found.permutation == truth
