"""Each intervention against numpy written down a second time, and a property that must hold for every matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.interventions import edits, quantise_prune
from strati.interventions.targets import as_matrix, find_targets, from_matrix, values_of

RNG = np.random.default_rng(0)
MATRICES = arrays(
    np.float32,
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    elements=st.floats(-4, 4, width=32, allow_subnormal=False),
)


def changed_by(name: str, setting: Any, weight: np.ndarray, **options: Any) -> np.ndarray:
    """What an intervention makes of a linear layer's weight, through the public way in."""
    net = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0]))
    net[0].weight.data = torch.from_numpy(weight.astype(np.float32))
    with strati.intervened(net, name, {"0": setting}, **options):
        return net[0].weight.detach().numpy().copy()


W = RNG.standard_normal((12, 20)).astype(np.float32)
U, S, VT = np.linalg.svd(W.astype(float), full_matrices=False)


def rebuilt(which: slice) -> np.ndarray:
    return (U[:, which] * S[which]) @ VT[which]


@pytest.mark.parametrize(
    ("name", "setting", "expected"),
    [
        ("truncate", 3, rebuilt(slice(0, 3))),
        ("truncate", "rank=0", np.zeros_like(W)),
        ("truncate", "rank=99", W),
        (
            "truncate",
            "energy=0.6",
            rebuilt(slice(0, int(np.argmax(np.cumsum(S**2) >= 0.6 * (S**2).sum())) + 1)),
        ),
        ("truncate", "parameters=0.5", rebuilt(slice(0, int(0.5 * 240 / 32)))),
        ("remove-small", 4, rebuilt(slice(0, 8))),
        ("remove-large", 4, rebuilt(slice(4, None))),
        ("zero", None, np.zeros_like(W)),
        ("scale", -0.5, -0.5 * W),
    ],
)
def test_against_numpy(name: str, setting: Any, expected: np.ndarray) -> None:
    assert np.allclose(changed_by(name, setting, W), expected, atol=2e-6)


def test_signal_and_noise_split_at_the_edge() -> None:
    spiked = (RNG.standard_normal((120, 60)) + 4 * np.outer(np.ones(120), np.ones(60)) / 8).astype(np.float32)
    signal, noise = changed_by("signal-only", None, spiked), changed_by("noise-only", None, spiked)
    u, s, vt = np.linalg.svd(spiked.astype(float), full_matrices=False)
    assert np.allclose(signal, np.outer(u[:, 0] * s[0], vt[0]), atol=1e-5)
    assert np.allclose(signal + noise, spiked, atol=1e-5)


def test_quasi_null_directions_go_and_nothing_else() -> None:
    u, s, vt = np.linalg.svd(RNG.standard_normal((200, 100)), full_matrices=False)
    s[-3:] *= 0.01
    weight = ((u * s) @ vt).astype(np.float32)
    assert np.allclose(
        changed_by("remove-quasi-null", None, weight), (u[:, :-3] * s[:-3]) @ vt[:-3], atol=1e-5
    )
    plain = RNG.standard_normal((200, 100)).astype(np.float32)
    assert np.array_equal(changed_by("remove-quasi-null", None, plain), plain)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [None, 4, 7])
@pytest.mark.parametrize("symmetric", [False, True])
def test_rounding_one_weight_at_a_time(bits: int, group: int | None, symmetric: bool) -> None:
    if symmetric and bits == 1:
        with pytest.raises(BadInputError, match="at least 2 bits"):
            strati.quantise(bits=1, symmetric=True)
        return
    setting: dict[str, Any] = {"bits": bits, "symmetric": symmetric} | ({"group": group} if group else {})
    found = changed_by("quantise", setting, W)
    want = np.empty(W.shape)
    for i, row in enumerate(W.astype(float)):
        for start in range(0, 20, group or 20):
            part = row[start : start + (group or 20)]
            if symmetric:
                step = np.abs(part).max() / (2 ** (bits - 1) - 1)
                levels = step * np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
            else:
                low, high = min(part.min(), 0), max(part.max(), 0)
                step = (high - low) / (2**bits - 1)
                levels = step * (np.arange(2**bits) - np.round(-low / step))
            want[i, start : start + len(part)] = [levels[np.argmin(np.abs(levels - w))] for w in part]
    assert np.allclose(found, want, atol=1e-6)


def test_pruning_keeps_the_largest() -> None:
    found = changed_by("prune", 0.25, W)
    assert (found == 0).sum() == 60
    assert np.abs(W[found == 0]).max() <= np.abs(found[found != 0]).min()
    assert np.array_equal(found[found != 0], W[found != 0])
    by_pattern = changed_by("prune", "2:4", W)
    groups = by_pattern.reshape(12, 5, 4)
    assert ((groups != 0).sum(2) == 2).all()
    kept = np.sort(np.abs(W.reshape(12, 5, 4)), axis=2)[:, :, 2:]
    assert np.allclose(np.sort(np.abs(groups), axis=2)[:, :, 2:], kept)


def test_shuffle_noise_swap_and_adapt() -> None:
    mixed = changed_by("permute-entries", None, W)
    assert np.array_equal(np.sort(mixed, axis=None), np.sort(W, axis=None)) and not np.array_equal(mixed, W)
    noisy = changed_by("noise", 0.1, W)
    assert np.linalg.norm(noisy - W) == pytest.approx(0.1 * np.linalg.norm(W), rel=1e-5)
    base = RNG.standard_normal((12, 20)).astype(np.float32)
    tensors = {"0.weight": base, "0.bias": np.zeros(12, np.float32)}
    assert np.array_equal(changed_by("swap", None, W, source=tensors), base)
    u, s, vt = np.linalg.svd((W - base).astype(float), full_matrices=False)
    want = base + (u[:, :2] * s[:2]) @ vt[:2]
    assert np.allclose(changed_by("adapt", 2, W, source=tensors), want, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(MATRICES, st.integers(0, 9))
def test_truncation_is_the_best_of_its_rank(weight: np.ndarray, rank: int) -> None:
    """Eckart and Young: the squared error is the energy of the directions left out."""
    found = edits.truncate(edits.Directions(weight), rank=rank)
    s = np.linalg.svd(weight.astype(float), compute_uv=False)
    assert np.linalg.norm(found - weight) == pytest.approx(np.sqrt((s[rank:] ** 2).sum()), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(MATRICES, st.integers(0, 9))
def test_both_ends_add_up(weight: np.ndarray, k: int) -> None:
    directions = edits.Directions(weight)
    kept = edits.truncate(directions, rank=min(k, directions.count))
    rest = edits.remove_large(directions, k)
    assert np.allclose(kept + rest, weight, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(MATRICES, st.integers(1, 8), st.sampled_from([None, 1, 3]))
def test_rounding_moves_no_weight_further_than_a_step(
    weight: np.ndarray, bits: int, group: int | None
) -> None:
    found = quantise_prune.quantise(weight, bits, group)
    span = np.maximum(weight.max(1), 0.0) - np.minimum(weight.min(1), 0.0)
    # Half a step by rounding, and half a step because zero is one of the levels.
    assert (np.abs(found - weight) <= span[:, None] / (2**bits - 1) * (1 + 1e-6) + 1e-7).all()
    assert np.allclose(quantise_prune.quantise(found, bits, group), found, atol=1e-4)
    assert (found[weight == 0] == 0).all()


@settings(max_examples=60, deadline=None)
@given(MATRICES, st.floats(0, 1))
def test_pruning_zeroes_just_the_share(weight: np.ndarray, share: float) -> None:
    found = quantise_prune.prune(weight, share=share)
    assert (found == 0).sum() == max(round(share * weight.size), int((weight == 0).sum()))
    assert ((found == weight) | (found == 0)).all()


@pytest.mark.parametrize("kind", ["linear", "conv", "conv1d", "embedding"])
def test_a_layers_matrix_and_back(kind: str) -> None:
    shape = (4, 3, 2, 2) if kind == "conv" else (4, 3)
    weight = RNG.standard_normal(shape).astype(np.float32)
    assert np.array_equal(from_matrix(as_matrix(weight, kind), kind, shape), weight)


def test_a_kernel_is_truncated_as_outputs_by_everything_else() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 3))
    (target,) = find_targets(net)
    weight = values_of(net, target)[0]
    u, s, vt = np.linalg.svd(weight.reshape(6, 27).astype(float), full_matrices=False)
    with strati.truncated(net, {"0": 2}):
        found = net[0].weight.detach().numpy().copy()
    assert np.allclose(found.reshape(6, 27), (u[:, :2] * s[:2]) @ vt[:2], atol=1e-6)
    assert np.array_equal(net[0].weight.detach().numpy(), weight)


def test_changes_in_memory_undo_themselves_whatever_happens() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(RuntimeError), strati.quantised(net, {"*": "bits=2,group=2", "2": 8}):
        assert not torch.equal(net[0].weight, before["0.weight"])
        raise RuntimeError
    with strati.zeroed(net, "0"), strati.pruned(net, {"2": "1:2"}), strati.scaled(net, {"2": 2.0}):
        assert int((net[2].weight == 0).sum()) == 6
    other = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    with strati.swapped(net, other, ["0"]):
        assert torch.equal(net[0].weight, other[0].weight) and torch.equal(net[0].bias, other[0].bias)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: strati.truncate(), "needs settings: rank or energy or parameters"),
        (lambda: strati.truncate(rank=-1), "truncate.rank: must be at least 0"),
        (lambda: strati.truncate(rank=1.5), "must be a whole number"),
        (lambda: strati.truncate(energy=0.0), "must be above 0"),
        (lambda: strati.quantise(bits=0), "must be at least 1"),
        (lambda: strati.quantise(bits=True), "must be a whole number"),
        (lambda: strati.prune(share=1.5), "must be at most 1"),
        (lambda: strati.prune(pattern="4:2"), "n:m with 0 < n < m"),
        (lambda: strati.noise(float("nan")), "must be a number"),
        (lambda: strati.intervention("zero", lambda w, rng: w), "strati's own"),
        (lambda: strati.permute_entries(draws=0), "a whole number from 1"),
    ],
)
def test_settings_out_of_place(make: Any, word: str) -> None:
    with pytest.raises(BadInputError, match=word):
        make()


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("truncate", 3),
        ("truncate", "energy=0.8"),
        ("remove-small", 2),
        ("remove-large", 2),
        ("quantise", "bits=3,group=4"),
        ("prune", 0.4),
        ("prune", "2:4"),
        ("scale", -2.0),
        ("signal-only", None),
        ("noise-only", None),
        ("permute-entries", None),
        ("noise", 0.3),
    ],
)
def test_a_transposed_layer_is_changed_as_its_plain_twin(name: str, setting: Any) -> None:
    """GPT-2 stores its weights the other way round: the same matrix, whatever its order in memory."""
    from transformers.pytorch_utils import Conv1D

    turned = nn.Sequential(Conv1D(12, 20))
    turned[0].weight.data = torch.from_numpy(W.T.copy())
    with strati.intervened(turned, name, {"0": setting}):
        found = turned[0].weight.detach().numpy().T.copy()
    assert name == "noise-only" or not np.array_equal(found, W)  # random entries are all noise
    assert np.allclose(found, changed_by(name, setting, W), atol=1e-6)
