"""Ranks of updates beyond rounding: merges of known rank in every dtype, rates under pure rounding, full fine-tunes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.comparison.update import update_between
from strati.comparison.update_rank import (
    LEVEL,
    effective_dtype,
    is_conversion,
    quantised_variance,
    rounding_variance,
    smallest_rank,
)

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def weights(seed: int, *shape: int) -> np.ndarray:
    return (0.05 * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def low_rank(seed: int, rank: int, size: float, *shape: int) -> np.ndarray:
    rng = np.random.default_rng([seed, rank])
    return (
        size / np.sqrt(rank) * rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))
    )


def judged(before: np.ndarray, after: np.ndarray) -> tuple[int, str]:
    found = update_between(before, after).rank
    return found.rank, str(found.kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 8, 16])
@pytest.mark.parametrize("size", [1e-2, 1e-3, 3e-4])
def test_merges_of_known_rank(dtype: str, rank: int, size: float) -> None:
    """The sum rounded once; the update rounded first, as PEFT does it; both networks rounded from one master copy."""
    shape = (192, 160)
    master, update = weights(0, *shape), low_rank(1, rank, size, *shape)
    kind = DTYPES[dtype]
    base = master.astype(kind)
    exact = base.astype(np.float64)
    for merged in (exact + update, exact + update.astype(kind).astype(np.float64), master + update):
        assert judged(base, merged.astype(kind)) == (rank, "low-rank")


def test_an_update_computed_coarsely_and_stored_finely() -> None:
    base = weights(0, 160, 128)
    update = low_rank(1, 4, 1e-2, 160, 128).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert judged(base, base + update) == (4, "low-rank")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_fine_base_merged_into_a_coarse_dtype(dtype: str) -> None:
    base = weights(0, 160, 128)
    merged = (base + low_rank(1, 4, 1e-2, 160, 128)).astype(DTYPES[dtype])
    assert judged(base, merged) == (4, "low-rank")
    assert judged(merged, base) == (4, "low-rank")


def test_directions_far_below_the_noise_of_rounding() -> None:
    """Steps of a fifth of bfloat16's spacing: noise of that size would hide them, exact arithmetic does not."""
    base = weights(0, 240, 240).astype(ml_dtypes.bfloat16)
    update = low_rank(1, 8, 5e-5, 240, 240)
    merged = (base.astype(np.float64) + update).astype(ml_dtypes.bfloat16)
    assert float(np.mean(merged == base)) > 0.6
    assert judged(base, merged) == (8, "low-rank")


@pytest.mark.parametrize("pair", [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16")])
def test_another_dtype_is_rounding(pair: tuple[str, str]) -> None:
    base = weights(0, 120, 90)
    first, second = (base.astype(DTYPES[name]) for name in pair)
    assert judged(first, second) == (0, "rounding")
    assert judged(second, first) == (0, "rounding")
    assert judged(first, first.copy()) == (0, "untouched")
    assert judged(first, first.astype(np.float32)) == (0, "untouched")


def test_rounding_is_called_structure_no_more_often_than_said() -> None:
    """300 pairs of roundings of the same weights at level 0.001: three or more found has a chance below 0.4 %."""
    assert LEVEL == 1e-3
    found = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        rows, columns = rng.integers(20, 60, 2)
        real = rng.standard_normal((rows, columns)) * rng.lognormal(size=(rows, 1))
        first, second = real.astype(np.float16 if seed % 2 else np.float32), real.astype(ml_dtypes.bfloat16)
        found += update_between(first, second, rng=rng).rank.rank > 0
    assert found < 3


def test_quantised_rows_of_different_size_have_errors_of_different_size() -> None:
    """Rounding to 15 levels in groups of 32: at most one of 60 matrices of unequal rows has more."""
    found = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        real = rng.standard_normal((64, 64)) * rng.lognormal(sigma=0.7, size=(64, 1))
        groups = real.reshape(64, 2, 32)
        scale = np.abs(groups).max(axis=2, keepdims=True) / 7
        coded = (np.round(groups / scale) * scale).reshape(64, 64)
        variance = quantised_variance(coded, float(np.mean(scale**2) / 12), 32)
        found += update_between(real.astype(np.float32), coded, rng=rng, variance=variance).rank.rank > 0
    assert found <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_dense_updates_are_dense(dtype: str, decay: float) -> None:
    """Spectra from flat to falling like 1/k, as fine-tunes have them; the update is as large as the dtype can show."""
    rng = np.random.default_rng(0)
    base = weights(0, 160, 128).astype(DTYPES[dtype])
    left, right = (
        np.linalg.qr(rng.standard_normal((160, 128)))[0],
        np.linalg.qr(rng.standard_normal((128, 128)))[0],
    )
    spectrum = np.arange(1, 129) ** -decay
    update = (left * spectrum) @ right.T
    update *= 3e-3 / np.sqrt(np.mean(update**2))
    rank, kind = judged(base, (base.astype(np.float64) + update).astype(DTYPES[dtype]))
    assert kind == "dense"
    assert rank > 32


def test_zero_weights_have_no_coarse_grid() -> None:
    base = weights(0, 100, 80)
    base[:40] = 0
    update = low_rank(1, 3, 1e-3, 100, 80)
    assert judged(base, (base + update).astype(np.float32)) == (3, "low-rank")


def test_the_coarsest_dtype_that_holds_the_weights() -> None:
    base = weights(0, 30, 20)
    assert effective_dtype(base) == "float32"
    assert effective_dtype(base.astype(np.float64)) == "float32"
    assert effective_dtype(base.astype(ml_dtypes.bfloat16).astype(np.float32)) == "bfloat16"
    assert effective_dtype(base.astype(np.float16).astype(np.float32)) == "float16"
    assert effective_dtype(np.random.default_rng(0).standard_normal((3, 3))) == "float64"


def test_spacings_are_numpys_own() -> None:
    values = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
    np.testing.assert_allclose(
        rounding_variance(values), np.spacing(np.abs(values)).astype(np.float64) ** 2 / 12
    )


@settings(max_examples=15, deadline=None)
@given(rank=st.integers(0, 6), seed=st.integers(0, 10**6), step=st.sampled_from([0.05, 0.2, 1.0]))
def test_the_smallest_rank_is_never_above_the_true_one(rank: int, seed: int, step: float) -> None:
    """Whatever was added and rounded on a grid, its own rank explains it, so no larger one is named."""
    rng = np.random.default_rng(seed)
    base = np.round(rng.standard_normal((72, 60)) / step) * step
    update = 0.3 * rng.standard_normal((72, rank)) @ rng.standard_normal((rank, 60))
    merged = np.round((base + update) / step) * step
    found = smallest_rank(merged - base, np.full(base.shape, step / 2 * (1 + 1e-9)), start=max(rank, 1))
    assert found is not None
    assert found.rank <= rank


def test_results_do_not_depend_on_chance_beyond_the_seed() -> None:
    base = weights(0, 60, 50)
    after = base + np.float32(1e-3) * weights(1, 60, 50)
    one, two = (update_between(base, after, rng=np.random.default_rng(7)).rank for _ in range(2))
    assert one == two


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 4, 16, 64])
@pytest.mark.parametrize("unequal", ["no", "rows", "columns"])
def test_merged_adapters_at_several_scales_and_in_rows_of_unequal_size(
    dtype: str, rank: int, unequal: str
) -> None:
    """Factors as LoRA has them; the update is a tenth or a hundredth of the weights' norm. Rows or columns may differ
    in size by a factor of e and more: the rounding errors of the large ones must not hide the directions elsewhere.
    """
    rng = np.random.default_rng([rank, len(dtype), len(unequal)])
    master = 0.05 * rng.standard_normal((288, 256))
    if unequal != "no":
        master = master * rng.lognormal(sigma=1.0, size=(288, 1) if unequal == "rows" else (1, 256)) / 2
    down, up = rng.uniform(-1, 1, (rank, 256)) / 16, rng.standard_normal((288, rank))
    base = master.astype(DTYPES[dtype])
    for size in (0.1, 0.01):
        update = up @ down
        update *= size * np.linalg.norm(master) / np.linalg.norm(update)
        assert judged(base, (base.astype(np.float64) + update).astype(DTYPES[dtype])) == (rank, "low-rank")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_updates_of_rows_of_unequal_size_are_dense(dtype: str) -> None:
    rng = np.random.default_rng(3)
    sizes = rng.lognormal(sigma=1.0, size=(160, 1))
    base = (0.02 * sizes * rng.standard_normal((160, 128))).astype(DTYPES[dtype])
    update = 0.002 * sizes * rng.standard_normal((160, 128))
    rank, kind = judged(base, (base.astype(np.float64) + update).astype(DTYPES[dtype]))
    assert (kind, rank > 40) == ("dense", True)


def test_rounding_of_rows_of_very_unequal_size_is_rounding() -> None:
    """300 pairs at level 0.001: three or more found has a chance below 0.4 %."""
    found = 0
    for seed in range(300):
        rng = np.random.default_rng([seed, 7])
        rows, columns = rng.integers(24, 60, 2)
        real = 1e-2 * rng.standard_normal((rows, columns)) * rng.lognormal(sigma=2.0, size=(rows, 1))
        if seed % 2:
            real = real.T
        first, second = real.astype((np.float32, np.float16)[seed % 3 % 2]), real.astype(ml_dtypes.bfloat16)
        found += update_between(first, second, rng=rng).rank.rank > 0
    assert found < 3


@pytest.mark.parametrize(
    ("shape", "rank"), [((32, 64), 4), ((96, 64), 16), ((160, 128), 64), ((200, 300), 16)]
)
def test_a_large_update_whose_product_was_rounded_too(shape: tuple[int, int], rank: int) -> None:
    """As PEFT merges: the product of the factors in float32, every sum of it rounded, about as large as the weights."""
    for seed in range(8):
        rng = np.random.default_rng([seed, rank])
        base = (0.02 * rng.standard_normal(shape)).astype(np.float32)
        down = (rng.uniform(-1, 1, (rank, shape[1])) / np.sqrt(shape[1])).astype(np.float32)
        up = (0.05 * rng.standard_normal((shape[0], rank))).astype(np.float32)
        assert judged(base, base + np.float32(2) * (up @ down)) == (rank, "low-rank")


def full_rank(seed: int, decay: float, *shape: int) -> np.ndarray:
    """Singular values ``k^-decay`` in random directions; Gaussian entries without a decay."""
    rng = np.random.default_rng([seed, 5])
    if decay == 0:
        return rng.standard_normal(shape)
    left, right = (np.linalg.qr(rng.standard_normal((side, min(shape))))[0] for side in shape)
    return (left * np.arange(1, min(shape) + 1) ** -decay) @ right.T


def sized(update: np.ndarray, relative: float, base: np.ndarray) -> np.ndarray:
    return update * (relative * np.linalg.norm(base) / np.linalg.norm(update))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("from_master", [False, True])
def test_full_rank_updates_are_never_rounding_and_never_low_rank(
    dtype: str, decay: float, from_master: bool
) -> None:
    """Both networks have one dtype. The update is added to the stored weights, or to their unrounded master copy."""
    for shape in ((112, 96), (64, 144)):
        master = weights(3, *shape).astype(np.float64)
        base = master.astype(DTYPES[dtype])
        start = master if from_master else base.astype(np.float64)
        for relative in (1e-2, 1e-3, 1e-4, 1e-5):
            after = (start + sized(full_rank(1, decay, *shape), relative, master)).astype(DTYPES[dtype])
            rank, kind = judged(base, after)
            assert kind in (("dense",) if dtype == "float32" and decay < 2 else ("dense", "undecided")), (
                shape,
                relative,
                rank,
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_pruning_and_single_steps_are_changes(dtype: str) -> None:
    base = weights(4, 120, 100).astype(DTYPES[dtype])
    sizes = np.abs(base.astype(np.float64))
    pruned = np.where(sizes < np.quantile(sizes, 0.01), 0, base.astype(np.float64)).astype(DTYPES[dtype])
    one_step = np.where(np.arange(base.size).reshape(base.shape) == 7, np.nextafter(base, base + base), base)
    for after in (pruned, one_step.astype(DTYPES[dtype])):
        assert judged(base, after)[1] in ("dense", "undecided")
        assert not is_conversion(base, after)


def test_single_entries_and_rows_that_changed_are_no_low_rank_update() -> None:
    base = weights(4, 64, 48)
    for changed in (1, 5, 40):
        after = base.copy()
        places = np.random.default_rng(changed).choice(base.size, changed, replace=False)
        after.reshape(-1)[places] = 0
        assert judged(base, after)[1] == "dense"
    row = base.copy()
    row[7] += weights(5, 48)
    assert judged(base, row)[1] == "dense"
    # A LoRA of an embedding changes some rows only.
    rows = base.copy()
    rows[:40] += low_rank(1, 3, 1e-2, 40, 48).astype(np.float32)
    assert judged(base, rows) == (3, "low-rank")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3.0, 10.0])
def test_exponentially_falling_spectra_are_not_low_rank(dtype: str, length: float) -> None:
    """Singular values exp(-k / length): where the last of them show, the next would not. 1 of 32 may be."""
    claims = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        base = (0.02 * rng.standard_normal((64, 64))).astype(DTYPES[dtype])
        left, right = (np.linalg.qr(rng.standard_normal((64, 64)))[0] for _ in range(2))
        update = (left * np.exp(-np.arange(64) / length)) @ right.T
        for relative in (1e-5, 1e-4, 1e-3, 1e-2):
            after = base.astype(np.float64) + sized(update, relative, base.astype(np.float64))
            claims += judged(base, after.astype(DTYPES[dtype]))[1] == "low-rank"
    assert claims <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_directions_above_a_floor_of_noise_are_not_low_rank(dtype: str) -> None:
    """Two strong directions and noise of a third of their size: below, near and above the dtype's step."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        base = (0.02 * rng.standard_normal((96, 64))).astype(DTYPES[dtype])
        strong, floor = low_rank(seed, 2, 1.0, 96, 64), rng.standard_normal((96, 64))
        update = strong / np.linalg.norm(strong) + 0.3 * floor / np.linalg.norm(floor)
        for relative in (1e-6, 1e-4, 1e-3, 3e-3, 1e-2):
            after = base.astype(np.float64) + sized(update, relative, base.astype(np.float64))
            assert judged(base, after.astype(DTYPES[dtype]))[1] in ("dense", "undecided", "untouched")


def stored_as_float8(values: np.ndarray, scaled: str) -> dict[str, np.ndarray]:
    """A layer as float8, alone or with one scale for the tensor or for each row."""
    name = "model.layers.0.mlp.up_proj.weight"
    if scaled == "no":
        return {name: values.astype(ml_dtypes.float8_e4m3fn)}
    sizes = np.abs(values)
    scale = np.asarray(sizes.max(axis=1, keepdims=True) if scaled == "rows" else sizes.max().reshape(1)) / 448
    return {name: (values / scale).astype(ml_dtypes.float8_e4m3fn), f"{name}_scale": scale.astype(np.float32)}


@pytest.mark.parametrize("scaled", ["no", "tensor", "rows"])
def test_float8_is_rounding_only_where_every_entry_is_its_nearest_code(scaled: str) -> None:
    """Both sides float8: the same or changed. One side float8: noise of a thousandth moves entries to other codes."""
    import strati

    real = weights(0, 128, 96)
    name = "model.layers.0.mlp.up_proj.weight"
    rng = np.random.default_rng(0)
    stored = stored_as_float8(real, scaled)
    plain = {name: real}
    assert strati.compare(plain, stored).layers[0].update_kind == "rounding"
    for relative in (1e-3, 1e-2):
        noisy = stored_as_float8(real + sized(rng.standard_normal(real.shape), relative, real), scaled)
        assert strati.compare(plain, noisy).layers[0].update_kind in ("undecided", "dense")
        assert strati.compare(stored, noisy).layers[0].update_kind in ("undecided", "dense")
        assert not strati.check(noisy, base=stored).passed


def test_ones_and_zeros_show_no_dtype() -> None:
    """A norm of ones that training moved by a hundredth is no conversion of a coarser dtype."""
    ones = np.ones(256, np.float32)
    moved = ones + np.random.default_rng(0).uniform(-0.06, 0.06, 256).astype(np.float32)
    assert not is_conversion(ones, moved)
    assert effective_dtype(ones) == "float32"


def test_the_kind_of_small_adapters_is_decided_only_by_what_shows() -> None:
    """A LoRA of rank 4 in bfloat16: found down to a thousandth of the weights, undecided at a hundred-thousandth."""
    base = weights(0, 200, 200).astype(ml_dtypes.bfloat16)
    exact = base.astype(np.float64)
    update = low_rank(1, 4, 1.0, 200, 200)
    kinds = {
        relative: judged(base, (exact + sized(update, relative, exact)).astype(ml_dtypes.bfloat16))
        for relative in (1e-1, 1e-2, 2e-3, 1e-5)
    }
    assert [kinds[r] for r in (1e-1, 1e-2, 2e-3)] == [(4, "low-rank")] * 3
    assert kinds[1e-5][1] == "undecided"


@pytest.mark.parametrize("coarse", ["float16", "bfloat16"])
def test_a_coarse_network_tuned_and_stored_in_a_finer_dtype_is_no_conversion(coarse: str) -> None:
    base = weights(0, 120, 100).astype(DTYPES[coarse])
    stored = base.astype(np.float32)
    assert judged(base, stored) == (0, "untouched")
    for update, expected in (
        (full_rank(1, 1.0, 120, 100), "dense"),
        (low_rank(1, 3, 1.0, 120, 100), "low-rank"),
    ):
        for relative in (3e-5, 1e-5):
            tuned = (stored + sized(update, relative, stored)).astype(np.float32)
            for first in (base, stored):
                assert not is_conversion(first, tuned)
                assert judged(first, tuned)[1] == expected


def test_conversions_that_truncate_or_pass_through_a_third_dtype() -> None:
    real = weights(0, 120, 100)
    truncated = (real.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(ml_dtypes.bfloat16)
    twice = real.astype(np.float16).astype(ml_dtypes.bfloat16)
    for after in (truncated, twice, real.astype(ml_dtypes.bfloat16).astype(np.float32)):
        assert judged(real, after) == (0, "rounding")
    assert is_conversion(real.astype(np.float16), real.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 0.02])
def test_float16_of_bfloat16_weights_is_a_conversion_below_the_normal_range(scale):
    source = (scale * np.random.default_rng(0).normal(size=(200, 120))).astype(ml_dtypes.bfloat16)
    target = source.astype(np.float16)
    assert np.any(source.astype(np.float32) != target.astype(np.float32))
    assert is_conversion(source, target) and is_conversion(target, source)
    assert is_conversion(source.astype(np.float32), target)
    moved = target.copy()
    moved[3, 4] *= np.float16(1.5)
    assert not is_conversion(source, moved)


def test_a_change_below_a_quantisers_step_is_rounding_only_between_two_formats() -> None:
    rng = np.random.default_rng(0)
    real = rng.standard_normal((64, 64))
    first, second = (np.round(x * 4) / 4 for x in (real, real + 0.01 * rng.standard_normal(real.shape)))
    found = [
        update_between(first, second, variance=np.full(real.shape, 2 * 0.25**2 / 12), converted=converted)
        for converted in (True, False)
    ]
    assert [str(x.rank.kind) for x in found] == ["rounding", "undecided"]
