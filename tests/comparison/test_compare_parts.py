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

from strati.comparison.layer_statistics import differences, distributions, leaves_random_like, out_of_order
from strati.comparison.matching import match
from strati.comparison.update import relative_change, spectral_distance, update_between


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
        assert (update.rank.rank, str(update.rank.kind)) == (rank, "low-rank")
        assert update.relative_change == pytest.approx(
            np.linalg.norm(step) / np.linalg.norm(a.astype(float)), rel=0.05
        )
        values = np.linalg.svd(step, compute_uv=False) ** 2
        assert update.stable_rank == pytest.approx(values.sum() / values.max(), rel=0.05)

    def test_nothing_moved(self) -> None:
        a = gaussian(0, 30, 20).astype(np.float32)
        update = update_between(a, a.copy())
        assert (update.relative_change, update.stable_rank, update.rank.rank) == (0.0, None, 0)
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
        assert update_between(np.ones((1, 1)), np.full((1, 1), 2.0)).rank.rank == 1
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
    kind: str = "linear"
    count: int = 1
    expert: int | None = None


def conv(name: str, size: int = 3) -> Stub:
    return Stub(name, "conv", None, "conv", size * size)


def resnet(blocks: list[int], bottleneck: bool = False, prefix: str = "") -> list[Stub]:
    """The layers of a ResNet by torchvision's names, stem and head included."""
    sizes = (1, 3, 1) if bottleneck else (3, 3)
    layers = [conv(f"{prefix}conv1.weight")]
    for stage, count in enumerate(blocks, 1):
        for block in range(count):
            place = f"{prefix}layer{stage}.{block}"
            layers += [conv(f"{place}.conv{i}.weight", size) for i, size in enumerate(sizes, 1)]
            if block == 0 and stage > 1:
                layers.append(conv(f"{place}.downsample.0.weight", 1))
    return [*layers, Stub(f"{prefix}fc.weight", "head")]


def pairs(first: list[Stub], second: list[Stub]) -> dict[str, str]:
    return {first[i].name: second[j].name for i, j in match([first, second]).rows}


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
        assert found.by == "role, block and place"
        partners = [(small[i].name, large[j].name) for i, j in found.rows]
        assert partners[0] == ("h.0.attention.q", "layer.0.attention.q")
        assert partners[2] == ("h.1.attention.q", "layer.4.attention.q")
        assert partners[-1] == ("h.2.mlp.in", "layer.8.mlp.in")
        assert len(found.unmatched) == 12

    @pytest.mark.parametrize(
        ("few", "many"), [([5] * 3, [9] * 3), ([3] * 3, [5] * 3), ([2, 2, 2, 2], [3, 4, 6, 3])]
    )
    @pytest.mark.parametrize("turned", [False, True])
    def test_resnets_of_different_depth(self, few, many, turned) -> None:
        small, large = resnet(few), resnet(many)
        found = pairs(large, small) if turned else pairs(small, large)
        assert len(found) == len(small)  # every layer of the smaller one has a partner
        for a, b in found.items():
            if "layer" not in a:
                assert a == b
                continue
            (stage, block, place), (other_stage, other_block, other_place) = (n.split(".", 2) for n in (a, b))
            assert (stage, place) == (other_stage, other_place)
            assert (block == "0") == (other_block == "0")
        ends = {f"layer{s}.{n - 1}.conv2.weight" for s, n in enumerate(many if turned else few, 1)}
        assert ends <= set(found)
        assert len(set(found.values())) == len(found)

    def test_a_bottleneck_is_not_taken_for_a_basic_block(self) -> None:
        basic, bottleneck = resnet([3, 4, 6, 3]), resnet([3, 4, 6, 3], bottleneck=True)
        found = pairs(basic, bottleneck)
        assert "layer1.0.conv1.weight" not in found  # 3x3 and 1x1
        assert found["layer1.0.conv2.weight"] == "layer1.0.conv2.weight"
        assert found["layer2.0.downsample.0.weight"] == "layer2.0.downsample.0.weight"

    def test_more_stages_stay_without_partner(self) -> None:
        found = match([resnet([3, 3, 3]), resnet([2, 2, 2, 2])])
        assert not any("layer4" in resnet([2, 2, 2, 2])[j].name for _, j in found.rows)
        assert any("layer4" in u.name for u in found.unmatched)

    def test_chains_of_different_length_keep_their_ends(self) -> None:
        small = [Stub(f"fc{i}.weight") for i in (1, 2, 3)]
        large = [Stub(f"fc{i}.weight") for i in (1, 2, 3, 4, 5)]
        assert pairs(small, large) == {
            "fc1.weight": "fc1.weight",
            "fc2.weight": "fc3.weight",
            "fc3.weight": "fc5.weight",
        }
        assert pairs(small, [Stub(f"net.{i}.weight") for i in (0, 2, 4)]) == {
            f"fc{i}.weight": f"net.{2 * i - 2}.weight" for i in (1, 2, 3)
        }

    def test_other_names_for_the_same_places(self) -> None:
        roles = (
            "attention.q",
            "attention.k",
            "attention.v",
            "attention.out",
            "mlp.gate",
            "mlp.in",
            "mlp.out",
        )
        ours = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
        ours += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        theirs = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        a = [
            Stub(f"model.layers.{b}.{n}.weight", r, b)
            for b in range(4)
            for n, r in zip(ours, roles, strict=True)
        ]
        b = [Stub(f"blk.{b}.{n}.weight", r, b) for b in range(4) for n, r in zip(theirs, roles, strict=True)]
        a += [Stub("model.embed_tokens.weight", "embedding"), Stub("lm_head.weight", "head")]
        b = [Stub("token_embd.weight", "embedding"), *b, Stub("output.weight", "head")]
        found = pairs(a, b)
        assert len(found) == len(a)
        assert found["model.layers.2.mlp.up_proj.weight"] == "blk.2.ffn_up.weight"
        assert found["model.embed_tokens.weight"] == "token_embd.weight"

    def test_encoder_and_decoder_are_not_mixed(self) -> None:
        def model(deep: int, shallow: int, cross: str) -> list[Stub]:
            found = [Stub(f"model.encoder.layers.{i}.q_proj.weight", "attention.q", i) for i in range(deep)]
            for i in range(shallow):
                found += [
                    Stub(f"model.decoder.layers.{i}.self_attn.q_proj.weight", "attention.q", i),
                    Stub(f"model.decoder.layers.{i}.{cross}.q_proj.weight", "attention.q", i),
                ]
            return found

        found = pairs(model(4, 4, "encoder_attn"), model(12, 6, "cross_attn"))
        for a, b in found.items():
            assert ("decoder" in a) == ("decoder" in b)
            assert ("encoder_attn" in a) == ("cross_attn" in b)
        assert len(found) == 12

    def test_positions_are_not_paired_with_tokens(self) -> None:
        gpt = [
            Stub("wte.weight", "embedding"),
            Stub("wpe.weight", "embedding"),
            Stub("h.0.fc.weight", "mlp.in", 0),
        ]
        llama = [Stub("embed_tokens.weight", "embedding"), Stub("layers.0.up.weight", "mlp.in", 0)]
        assert pairs(gpt, llama) == {
            "wte.weight": "embed_tokens.weight",
            "h.0.fc.weight": "layers.0.up.weight",
        }

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=4))
    def test_no_partner_twice_and_nothing_lost(self, depths: list[list[int]]) -> None:
        networks = [resnet(d, prefix="module." * (k % 2)) for k, d in enumerate(depths)]
        found = match(networks)
        for n, layers in enumerate(networks):
            used = [row[n] for row in found.rows]
            assert len(set(used)) == len(used)
            assert len(used) + sum(u.network == n for u in found.unmatched) == len(layers)
        for row in found.rows:
            places = [networks[n][i].name.removeprefix("module.").split(".") for n, i in enumerate(row)]
            assert len({(p[0], *p[2:]) for p in places}) == 1

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
