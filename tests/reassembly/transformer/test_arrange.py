"""Units on one time line: chains whose places are known."""

import numpy as np
import pytest

import strati
from strati.reassembly.transformer.arrange import arrange, merged
from strati.reassembly.transformer.shuffle import shuffle_transformer
from strati.reassembly.transformer.solve import solve_transformer
from strati.reassembly.transformer.timeline import Expected, Similarity, Timeline
from strati_reproductions.dropped_transformer.measure import measured, prior_of
from strati_reproductions.dropped_transformer.scoring import score
from strati_reproductions.zoo.fetch import cache


def chained(places, *, told=40.0, noise=0.02, seed=0):
    """Three kinds of one role each at given places, likeness falling with distance; a and b told to be of one block."""
    rng = np.random.default_rng(seed)
    count = len(places["a"])
    between = {}
    for one in places:
        for two in places:
            apart = np.abs(places[one][:, None] - places[two][None, :])
            table = 0.5 * np.exp(-apart / 1.5) + noise * rng.normal(size=(count, count))
            between[one, two] = (table + table.T) / 2 if one == two else table
            between[two, one] = between[one, two].T
    together = {
        ("a", "b"): told * (places["a"][:, None] == places["b"][None, :]),
        ("a", "c"): np.zeros((count, count)),
        ("b", "c"): np.zeros((count, count)),
    }
    return Similarity({kind: (kind,) for kind in places}, between, count, together)


def shuffled(count, seed):
    rng = np.random.default_rng(seed)
    return {kind: rng.permutation(count) for kind in "abc"}


def test_units_surely_of_one_block_become_one_kind_and_come_apart_again():
    places = shuffled(7, 1)
    given = chained(places)
    one = merged(given)
    assert list(one.similarity.units) == ["a", "c"] and one.similarity.units["a"] == ("a", "b")
    assert list(one.similarity.together) == [("a", "c")]
    back = one.apart({"a": places["a"], "c": places["c"]})
    assert all(np.array_equal(back[kind], places[kind]) for kind in "abc")


def test_kinds_that_nothing_ties_together_stay_apart():
    assert list(merged(chained(shuffled(7, 2), told=3.0)).similarity.units) == ["a", "b", "c"]


@pytest.mark.parametrize("count", [5, 20])
def test_chains_of_known_places_are_found(count):
    places = shuffled(count, 3)
    given = chained(places)
    prior = {(x, y): (Expected(0.3, 0.2),) * 3 + (Expected(0.1, 0.2),) for x in "abc" for y in "abc"}
    one = merged(given)
    found = one.apart(arrange(Timeline(one.similarity, prior), np.random.default_rng(0))[0].places)
    forward = all(np.array_equal(found[kind], places[kind]) for kind in "abc")
    backward = all(np.array_equal(count - 1 - found[kind], places[kind]) for kind in "abc")
    assert forward or backward


@pytest.mark.slow
def test_all_210_matrices_of_smollm2_in_place_without_data():
    """With a prior of other networks only; every matrix that is called sure is in place."""
    files = sorted((cache() / "zoo").glob("smollm2*/*.gguf"))
    if not files:
        pytest.skip("smollm2 is not cached; python -m strati_reproductions.zoo smollm2 fetches it")
    prior = prior_of(m for k, m in measured().items() if k != "smollm2")
    dropped = shuffle_transformer(files[0], seed=1)
    found = solve_transformer(dropped.pieces, None, None, strati.configs.ReassembleConfig(), prior=prior)
    right = score(found.blocks, found.vectors, dropped.answer, dropped.pieces.arrays)
    assert right.matrices == right.of_matrices == 210 and right.tau == 1.0 and right.forward
