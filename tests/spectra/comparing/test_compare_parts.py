"""The parts of a comparison: updates, distances, matching, roles, series. Exact oracles and properties."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.spectra.comparing.matching import match
from strati.spectra.comparing.role_differences import differences, distributions
from strati.spectra.comparing.series import leaves_random_like, out_of_order
from strati.spectra.comparing.update import relative_change, spectral_distance, update_between


def gaussian(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


class TestUpdate:
    @pytest.mark.parametrize("shape", [(60, 40), (40, 60), (300, 20)])
    @pytest.mark.parametrize("rank", [1, 4])
    @pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
    def test_a_low_rank_update_is_found_through_the_rounding_of_its_dtype(self, shape, rank, dtype) -> None:
        a = gaussian(0, *shape).astype(dtype)
        step = 0.5 * gaussian(1, shape[0], rank) @ gaussian(2, rank, shape[1])
        b = (a.astype(np.float64) + step).astype(dtype)
        update = update_between(a, b)
        assert update.hard_rank == rank
        assert update.relative_change == pytest.approx(
            np.linalg.norm(step) / np.linalg.norm(a.astype(float)), rel=0.05
        )
        values = np.linalg.svd(step, compute_uv=False) ** 2
        assert update.stable_rank == pytest.approx(values.sum() / values.max(), rel=0.05)

    def test_nothing_moved(self) -> None:
        a = gaussian(0, 30, 20).astype(np.float32)
        update = update_between(a, a.copy())
        assert (update.relative_change, update.stable_rank, update.hard_rank) == (0.0, None, 0)
        assert update.subspace_overlap == pytest.approx(1.0)

    def test_overlap_against_principal_angles(self) -> None:
        a, b = gaussian(0, 50, 30), gaussian(1, 50, 30)
        a[:, :3] *= 20
        b[:, :3] *= 20
        update = update_between(a, b)
        k = update.directions
        ua, _, va = np.linalg.svd(a)
        ub, _, vb = np.linalg.svd(b)
        left = np.square(np.linalg.svd(ua[:, :k].T @ ub[:, :k], compute_uv=False)).mean()
        right = np.square(np.linalg.svd(va[:k] @ vb[:k].T, compute_uv=False)).mean()
        assert update.subspace_overlap == pytest.approx((left + right) / 2, rel=1e-9)

    def test_random_matrices_overlap_as_chance_has_it(self) -> None:
        update = update_between(gaussian(0, 400, 200), gaussian(1, 400, 200))
        assert update.subspace_overlap == pytest.approx(update.overlap_by_chance, rel=0.15)

    def test_rotations_of_both_sides_change_nothing(self) -> None:
        a, b = gaussian(0, 30, 20), gaussian(1, 30, 20)
        q, r = np.linalg.qr(gaussian(2, 30, 30))[0], np.linalg.qr(gaussian(3, 20, 20))[0]
        one, two = update_between(a, b), update_between(q @ a @ r, q @ b @ r)
        assert one.subspace_overlap == pytest.approx(two.subspace_overlap, rel=1e-8)
        assert one.stable_rank == pytest.approx(two.stable_rank, rel=1e-9)

    def test_degenerate_matrices_give_no_invented_number(self) -> None:
        zero = np.zeros((5, 4))
        update = update_between(zero, zero)
        assert (update.relative_change, update.stable_rank, update.subspace_overlap) == (None, None, None)
        assert update_between(np.ones((1, 1)), np.full((1, 1), 2.0)).hard_rank == 1
        assert relative_change(np.ones((2, 2)), np.ones((2, 3))) is None


class TestDistance:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
    def test_against_scipy(self, n: int, m: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        a, b = rng.lognormal(size=n), rng.lognormal(size=m)
        expected = scipy.stats.wasserstein_distance(np.log(a), np.log(b))
        assert spectral_distance(a, b) == pytest.approx(expected, rel=1e-9, abs=1e-12)

    @given(st.floats(1e-6, 1e6))
    def test_a_scale_is_a_shift(self, scale: float) -> None:
        values = np.array([0.5, 1.0, 7.0])
        assert spectral_distance(values, scale * values) == pytest.approx(abs(np.log(scale)), abs=1e-9)

    def test_nothing_positive_is_not_a_distance(self) -> None:
        assert spectral_distance(np.zeros(3), np.ones(3)) is None
        assert spectral_distance(np.array([np.nan]), np.ones(3)) is None


@dataclass(frozen=True)
class Stub:
    name: str
    role: str = "linear"
    block: int | None = None


class TestMatching:
    def test_by_name_through_wrappers(self) -> None:
        a = [Stub(f"layers.{i}.fc.weight") for i in range(3)]
        b = [Stub(f"model.layers.{i}.fc.weight") for i in range(3)]
        found = match([a, b])
        assert found.by == "name"
        assert found.rows == ((0, 0), (1, 1), (2, 2))
        mixed = [Stub(f"bert.layers.{i}.fc.weight") for i in range(3)] + [Stub("cls.weight")]
        assert match([a, mixed]).rows == ((0, 0), (1, 1), (2, 2))
        assert [u.name for u in match([a, mixed]).unmatched] == ["cls.weight"]

    def test_small_against_large_by_role_and_depth(self) -> None:
        def model(blocks: int, prefix: str) -> list[Stub]:
            return [
                Stub(f"{prefix}{i}.{role}", role, i)
                for i in range(blocks)
                for role in ("attention.q", "mlp.in")
            ]

        small, large = model(3, "h."), model(9, "layer.")
        found = match([small, large])
        assert found.by == "role and depth"
        partners = [(small[i].name, large[j].name) for i, j in found.rows]
        assert partners[0] == ("h.0.attention.q", "layer.0.attention.q")
        assert partners[2] == ("h.1.attention.q", "layer.4.attention.q")
        assert partners[-1] == ("h.2.mlp.in", "layer.8.mlp.in")
        assert len(found.unmatched) == 12

    def test_nothing_in_common_is_said(self) -> None:
        found = match([[Stub("a", "conv")], [Stub("b", "mlp.in", 0)]])
        assert found.rows == ()
        assert {u.network for u in found.unmatched} == {0, 1}


class TestRoles:
    def test_against_scipy_and_holm_by_hand(self) -> None:
        rng = np.random.default_rng(0)
        rows = [{"role": "attention.q", "alpha": v, "entropy": w} for v, w in rng.normal(0, 1, (8, 2))]
        rows += [{"role": "mlp.in", "alpha": v + 1.5, "entropy": w} for v, w in rng.normal(0, 1, (9, 2))]
        found = {d.metric: d for d in differences(rows)}
        raw = {
            m: scipy.stats.mannwhitneyu([r[m] for r in rows[:8]], [r[m] for r in rows[8:]]).pvalue
            for m in found
        }
        smaller, larger = sorted(raw, key=raw.get)
        assert found[smaller].pvalue == pytest.approx(min(1, 2 * raw[smaller]))
        assert found[larger].pvalue == pytest.approx(max(raw[larger], min(1, 2 * raw[smaller])))

    def test_same_distribution_is_rarely_called_different(self) -> None:
        # 200 comparisons of equal groups at 5 %: more than 20 rejections has a chance below 0.1 %.
        rng = np.random.default_rng(1)
        rejected = 0
        for _ in range(200):
            rows = [{"role": r, "alpha": rng.normal()} for r in ["attention.q"] * 10 + ["mlp.out"] * 10]
            rejected += differences(rows)[0].pvalue < 0.05
        assert rejected <= 20

    def test_small_groups_are_not_tested_and_nones_left_out(self) -> None:
        rows = [{"role": "attention.q", "alpha": None}, {"role": "mlp.in", "alpha": 2.0}]
        assert differences(rows) == ()
        alphas = {d.role: d for d in distributions(rows) if d.metric == "alpha"}
        assert (alphas["attention.q"].n, alphas["attention.q"].median) == (0, None)
        assert alphas["mlp.in"].median == 2.0


class TestSeries:
    def test_leaving_random_like_is_for_good(self) -> None:
        assert leaves_random_like(["random-like", "heavy-tailed"]) == 1
        assert leaves_random_like(["bulk+spikes", "heavy-tailed"]) == 0
        assert leaves_random_like(["bulk+spikes", "random-like"]) is None

    def test_order_of_checkpoints(self) -> None:
        assert not out_of_order([Path("a-1.pt"), Path("a-2.pt"), Path("a-10.pt")])
        assert out_of_order([Path("step2/m.pt"), Path("step1/m.pt")])
        assert not out_of_order([Path("first.pt"), Path("last.pt")])
