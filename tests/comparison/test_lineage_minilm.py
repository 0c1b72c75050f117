"""Lineage of MiniLM and its fine-tune: renumbered, noisy, pruned, quantised, merged, partly re-initialised, rotated."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import strati

Weights = dict[str, np.ndarray[Any, Any]]
pytestmark = pytest.mark.slow


@cache
def weights(name: str) -> Weights:
    fetch = pytest.importorskip("strati_reproductions.zoo.fetch")
    network = strati.open(fetch.path(name))
    return {tensor.name: np.array(network.read(tensor.name)) for tensor in network.tensors if tensor.floating}


def in_matrices(change: Callable[[np.ndarray, np.random.Generator], Any]) -> Callable[[Weights], Weights]:
    """A change of every matrix of the encoder."""

    def child(network: Weights) -> Weights:
        rng = np.random.default_rng(0)
        return {
            name: np.asarray(change(w, rng), np.float32) if w.ndim == 2 and "encoder" in name else w
            for name, w in network.items()
        }

    return child


def quantised(w: np.ndarray, _: np.random.Generator) -> np.ndarray:
    step = np.abs(w).max(axis=1, keepdims=True) / 7
    return np.rint(w / step) * step


CHANGES = {
    "as it is": dict,
    "noise": in_matrices(lambda w, rng: w + 0.2 * w.std() * rng.standard_normal(w.shape)),
    "pruned": in_matrices(lambda w, rng: np.where(np.abs(w) < np.median(np.abs(w)), 0, w)),
    "4 bits": in_matrices(quantised),
}


def renumbered(network: Weights) -> Weights:
    """The neurons of every block in another order."""
    rng = np.random.default_rng(1)
    child = dict(network)
    for block in range(6):
        order = rng.permutation(1536)
        prefix = next(name for name in network if f"encoder.layer.{block}." in name).split("layer.")[0]
        into, out = (f"{prefix}layer.{block}.{part}.dense" for part in ("intermediate", "output"))
        child[f"{into}.weight"] = network[f"{into}.weight"][order]
        child[f"{into}.bias"] = network[f"{into}.bias"][order]
        child[f"{out}.weight"] = network[f"{out}.weight"][:, order]
    return child


@pytest.mark.parametrize("order", ["in place", "renumbered"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("source", ["minilm", "minilm-tuned"])
def test_children_of_minilm_are_related(source: str, change: str, order: str) -> None:
    child = CHANGES[change](weights(source))
    child = renumbered(child) if order == "renumbered" else child
    pair = strati.lineage(weights("minilm"), child, workers=1).pairs[0]
    assert pair.related is True and pair.pvalue is not None and pair.pvalue < 1e-100
    assert pair.shared_blocks == len(pair.blocks) == 6
    same = {"as it is": "identical", "noise": "fine-tuned", "pruned": "pruned", "4 bits": "quantised"}
    if source == "minilm":
        assert pair.kind == same[change]
        assert pair.direction == ("a-to-b" if change in ("pruned", "4 bits") else None)
    else:  # a fine-tune that was changed afterwards: no direction is claimed that the weights do not show
        assert pair.kind in ("fine-tuned", same[change]) and pair.direction is None


def test_new_layers_of_minilm_are_named() -> None:
    rng = np.random.default_rng(2)
    tuned = dict(weights("minilm-tuned"))
    fresh = {name for name in tuned if "encoder.layer.4." in name and tuned[name].ndim == 2}
    for name in fresh:
        tuned[name] = (tuned[name].std() * rng.standard_normal(tuned[name].shape)).astype(np.float32)
    pair = strati.lineage(weights("minilm"), tuned, workers=1).pairs[0]
    assert pair.kind == "partly-retrained" and set(pair.new_layers) == fresh and len(fresh) == 6


def test_a_merge_of_minilm_and_its_fine_tune_has_its_weights() -> None:
    base, tuned = weights("minilm"), weights("minilm-tuned")
    shared = {name for name in base if name in tuned and base[name].shape == tuned[name].shape}
    merged = {name: (0.3 * base[name] + 0.7 * tuned[name]).astype(np.float32) for name in shared}
    family = strati.lineage({n: base[n] for n in shared}, {n: tuned[n] for n in shared}, merged, workers=1)
    merges = [pair for pair in family.pairs if pair.kind == "merged"]
    assert len(merges) == 2 and {pair.direction for pair in merges} == {"a-to-b"}
    assert merges[0].weights == pytest.approx((0.3, 0.7), abs=0.01)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_rotated_residual_stream_is_never_called_independent(noise: float) -> None:
    """Every matrix in another basis of the residual stream: the matchings share nothing, the spectra stay."""
    rng = np.random.default_rng(3)
    turn = np.linalg.qr(rng.standard_normal((384, 384)))[0]
    child = dict(weights("minilm"))
    for name, w in child.items():
        if w.ndim != 2 or "encoder" not in name:
            continue
        moved = turn @ w if "output.dense" in name else w @ turn.T
        child[name] = (moved + noise * w.std() * rng.standard_normal(w.shape)).astype(np.float32)
    pair = strati.lineage(weights("minilm"), child, workers=1).pairs[0]
    assert (
        pair.related is None and pair.kind == "undecided" and pair.pvalue is not None and pair.pvalue > 0.001
    )


def test_two_networks_of_this_size_take_at_most_five_seconds_of_one_core() -> None:
    fetch = pytest.importorskip("strati_reproductions.zoo.fetch")
    networks = [strati.open(fetch.path(name)) for name in ("minilm", "minilm-tuned")]
    for second in (networks[1], strati.open(renumbered(weights("minilm-tuned")))):
        start = time.process_time()
        strati.lineage(networks[0], second, workers=1)
        assert time.process_time() - start < 5
