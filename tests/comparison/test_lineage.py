"""Lineage: valid p-values for independent networks, children of every kind, trees, bad input."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_strati
from scipy.stats import binomtest

import strati
from strati import embedded
from strati.comparison.independence import SMALLEST, chains, compare_chains, log_tail, pooled_pvalue
from strati.core.errors import BadInputError

Weights = dict[str, np.ndarray[Any, Any]]
WIDTHS = (64, 48, 48, 10)


@cache
def trained(seed: int, many: int, steps: int = 120) -> list[Weights]:
    """Networks trained independently on the digits, all at once: gradient descent with momentum on ReLU networks."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    inputs, classes = (digits.data / 16).astype(np.float32), np.eye(10, dtype=np.float32)[digits.target]
    rng = np.random.default_rng(seed)
    weights = [
        (rng.standard_normal((many, o, i)) * np.sqrt(2 / i)).astype(np.float32) for i, o in pairwise(WIDTHS)
    ]
    speeds = [np.zeros_like(w) for w in weights]
    for _ in range(steps):
        rows = rng.integers(len(inputs), size=64)
        layers = [np.broadcast_to(inputs[rows].T, (many, WIDTHS[0], 64))]
        for n, w in enumerate(weights):
            layers.append(w @ layers[-1])
            if n < len(weights) - 1:
                layers[-1] = np.maximum(layers[-1], 0)
        exponentials = np.exp(layers[-1] - layers[-1].max(axis=1, keepdims=True))
        error = (exponentials / exponentials.sum(axis=1, keepdims=True) - classes[rows].T) / 64
        for n in reversed(range(len(weights))):
            gradient = error @ layers[n].transpose(0, 2, 1)
            error = (weights[n].transpose(0, 2, 1) @ error) * (layers[n] > 0)
            speeds[n] = 0.9 * speeds[n] - 0.1 * gradient
            weights[n] = weights[n] + speeds[n]
    return [{f"{2 * n}.weight": w[m] for n, w in enumerate(weights)} for m in range(many)]


def renumbered(network: Weights, seed: int = 0) -> Weights:
    """The same function with its hidden units in another order."""
    rng = np.random.default_rng(seed)
    first, second = (rng.permutation(n) for n in WIDTHS[1:3])
    a, b, c = network.values()
    return {"0.weight": a[first], "2.weight": b[second][:, first], "4.weight": c[:, second]}


def noisy(network: Weights, size: float = 0.2, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        name: (w + size * w.std() * rng.standard_normal(w.shape)).astype(np.float32)
        for name, w in network.items()
    }


def pruned(network: Weights) -> Weights:
    return {name: np.where(np.abs(w) > np.median(np.abs(w)), w, 0) for name, w in network.items()}


def quantised(network: Weights, bits: int = 4) -> Weights:
    top = 2 ** (bits - 1) - 1
    steps = {name: np.abs(w).max(axis=1, keepdims=True) / top for name, w in network.items()}
    return {name: (np.rint(w / steps[name]) * steps[name]).astype(np.float32) for name, w in network.items()}


def with_lora(network: Weights, rank: int = 2, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    child = dict(network)
    for name in ("0.weight", "2.weight"):
        rows, columns = network[name].shape
        update = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))
        child[name] = (network[name] + 1.5 * network[name].std() * update).astype(np.float32)
    return child


def with_new_layer(network: Weights, name: str = "2.weight") -> Weights:
    fresh = np.random.default_rng(9).standard_normal(network[name].shape) * network[name].std()
    return network | {name: fresh.astype(np.float32)}


def test_fixed_points_of_random_permutations_have_their_distribution() -> None:
    """Against all permutations of six, and sums of two of them."""
    from itertools import permutations

    counts = np.array([sum(i == p for i, p in enumerate(order)) for order in permutations(range(6))])
    for k in range(7):
        assert np.exp(log_tail([(6, 6)], k)) == pytest.approx((counts >= k).mean(), rel=1e-9)
    both = (counts[:, None] + counts).ravel()
    for k in (1, 3, 5, 12):
        assert np.exp(log_tail([(6, 6), (6, 6)], k)) == pytest.approx((both >= k).mean(), rel=1e-9)


def test_injections_have_their_distribution() -> None:
    from itertools import permutations

    counts = np.array([sum(i == p for i, p in enumerate(order)) for order in permutations(range(6), 4)])
    for k in range(5):
        assert np.exp(log_tail([(4, 6)], k)) == pytest.approx((counts >= k).mean(), rel=1e-9)


def test_pvalues_of_independently_trained_networks_are_valid() -> None:
    """60 disjoint pairs: more small p-values than the level allows have a chance of 1 in 1000 for a valid test."""
    networks = [chains(strati.open(network)) for network in trained(3, 120)]
    pvalues = [
        pooled_pvalue(compare_chains(a[0], b[0])) for a, b in zip(networks[::2], networks[1::2], strict=True)
    ]
    for level in (0.01, 0.05, 0.1):
        small = sum(p <= level for p in pvalues)
        assert binomtest(small, len(pvalues), level, alternative="greater").pvalue > 1e-3


def test_two_trainings_are_unrelated() -> None:
    first, second = trained(3, 120)[:2]
    family = strati.lineage(first, second)
    pair = family.pairs[0]
    assert pair.related is False and pair.kind == "unrelated" and pair.direction is None
    assert family.tree == () and family.lines()[0].startswith("nothing in common, p = ")


CHILDREN = {
    "renumbered": (renumbered, "identical", None),
    "noise": (noisy, "fine-tuned", None),
    "renumbered noise": (lambda n: renumbered(noisy(n)), "fine-tuned", None),
    "pruned": (pruned, "pruned", "a-to-b"),
    "renumbered pruned": (lambda n: renumbered(pruned(n)), "pruned", "a-to-b"),
    "quantised": (quantised, "quantised", "a-to-b"),
    "8 bits": (lambda n: quantised(n, 8), "quantised", "a-to-b"),
    "lora": (with_lora, "lora", "a-to-b"),
    "half": (lambda n: {k: w.astype(np.float16) for k, w in n.items()}, "converted", "a-to-b"),
    "copy": (dict, "identical", None),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_children_are_recognised(name: str) -> None:
    make, kind, direction = CHILDREN[name]
    parent = trained(3, 120)[0]
    pair = strati.lineage(parent, make(parent)).pairs[0]
    assert pair.related is True and pair.pvalue is not None and pair.pvalue < 1e-6
    assert (pair.kind, pair.direction) == (kind, direction)
    assert pair.renumbered == name.startswith("renumbered")
    back = strati.lineage(make(parent), parent).pairs[0]
    assert (back.kind, back.direction) == (kind, {"a-to-b": "b-to-a"}.get(str(direction)))


def test_new_layers_are_named() -> None:
    parent = trained(3, 120)[0]
    pair = strati.lineage(parent, with_new_layer(parent)).pairs[0]
    assert pair.kind == "partly-retrained" and pair.new_layers == ("2.weight",) and pair.direction is None


def test_a_rotated_network_is_undecided() -> None:
    """A basis that destroys the signal leaves the spectra: no answer, never "unrelated"."""
    rng = np.random.default_rng(0)
    parent = {"0.weight": rng.standard_normal((64, 32)), "2.weight": rng.standard_normal((32, 64))}
    turn = np.linalg.qr(rng.standard_normal((32, 32)))[0]
    child = {"0.weight": parent["0.weight"] @ turn, "2.weight": turn.T @ parent["2.weight"]}
    for one in (child, noisy(child)):
        pair = strati.lineage(parent, one).pairs[0]
        assert pair.related is None and pair.kind == "undecided"


def transformer(blocks: int, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    shapes = {"mlp.up_proj": (96, 32), "mlp.gate_proj": (96, 32), "mlp.down_proj": (32, 96)}
    return {
        f"model.layers.{n}.{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for n in range(blocks)
        for name, shape in shapes.items()
    }


def test_units_of_gated_blocks_are_matched_whatever_their_signs() -> None:
    parent = transformer(2)
    rng = np.random.default_rng(1)
    child = dict(parent)
    for n in range(2):
        order, signs = rng.permutation(96), rng.choice([-1.0, 1.0], 96).astype(np.float32)
        names = [f"model.layers.{n}.mlp.{x}_proj.weight" for x in ("up", "gate", "down")]
        child[names[0]] = parent[names[0]][order] * signs[:, None]
        child[names[1]] = parent[names[1]][order]
        child[names[2]] = parent[names[2]][:, order] * signs
    pair = strati.lineage(parent, child).pairs[0]
    assert pair.related and pair.shared_blocks == 2 and pair.kind == "identical" and pair.renumbered


def test_a_dropped_block_is_noticed() -> None:
    parent = transformer(4)
    left = {0: 0, 2: 1, 3: 2}
    child = {
        name.replace(f"layers.{n}.", f"layers.{m}."): w
        for n, m in left.items()
        for name, w in parent.items()
        if f"layers.{n}." in name
    }
    pair = strati.lineage(parent, child).pairs[0]
    assert pair.kind == "pruned" and pair.direction == "a-to-b"
    assert [block.a for block in pair.blocks] == ["model.layers.0", "model.layers.2", "model.layers.3"]


def family() -> tuple[dict[str, Weights], set[frozenset[str]]]:
    """Two roots with their descendants, and the edges between them."""
    one, two, alone = trained(3, 120)[:3]
    members = {"one": one, "two": two, "alone": alone}
    members["one-tuned"] = noisy(one, 0.15, 1)
    members["one-later"] = noisy(members["one-tuned"], 0.1, 2)
    members["one-other"] = noisy(one, 0.15, 3)
    members["one-4bit"] = quantised(one)
    members["one-later-pruned"] = pruned(members["one-later"])
    members["merge"] = {
        name: 0.4 * members["one-later"][name] + 0.6 * members["one-other"][name] for name in one
    }
    members["two-lora"] = with_lora(two)
    members["two-tuned"] = noisy(two, 0.1, 5)
    members["two-half"] = {name: w.astype(np.float16) for name, w in two.items()}
    edges = "one one-tuned, one-tuned one-later, one one-other, one one-4bit, one-later one-later-pruned"
    edges += ", one-later merge, one-other merge, two two-lora, two two-tuned, two two-half"
    return members, {frozenset(edge.split()) for edge in edges.split(", ")}


def saved(members: dict[str, Weights], folder: Path) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir()
    for name, weights in members.items():
        save_file({k: np.ascontiguousarray(w) for k, w in weights.items()}, folder / f"{name}.safetensors")
    return folder


def test_a_family_is_recovered_edge_by_edge(tmp_path: Path) -> None:
    members, edges = family()
    completed = run_strati(
        "lineage", saved(members, tmp_path / "nets"), "--json", tmp_path / "f.json", expect=0
    )
    assert completed.stdout.splitlines()[0] == "12 networks: 2 families, 1 without relatives."
    written = json.loads((tmp_path / "f.json").read_text())
    names = {str(tmp_path / "nets" / f"{name}.safetensors"): name for name in members}
    tree = {frozenset((names[e["parent"]], names[e["child"]])): e for e in written["tree"]}
    assert set(tree) == edges
    directed = {(names[e["parent"]], names[e["child"]], e["kind"]) for e in written["tree"] if e["directed"]}
    assert directed == {
        ("one", "one-4bit", "quantised"),
        ("one-later", "one-later-pruned", "pruned"),
        ("one-later", "merge", "merged"),
        ("one-other", "merge", "merged"),
        ("two", "two-lora", "lora"),
        ("two", "two-half", "converted"),
    }
    merge = next(pair for pair in written["pairs"] if pair["weights"])
    assert sorted(merge["weights"]) == pytest.approx([0.4, 0.6], abs=0.01)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    one = trained(3, 120)[0]
    wide = {"0.weight": np.ones((30, 20), np.float32), "2.weight": np.ones((10, 30), np.float32)}
    bare = {"embedding.weight": np.ones((30, 20), np.float32)}
    folder = saved({"one": one, "wide": wide, "bare": bare}, tmp_path / "nets")
    for words in (["one"], ["one", "wide"], ["one", "bare"], ["one", "absent"]):
        completed = run_strati("lineage", *(folder / f"{word}.safetensors" for word in words))
        assert completed.returncode == 2 and completed.stdout == ""
        assert completed.stderr.startswith("strati: error: ") and completed.stderr.count("\n") == 1
    with pytest.raises(BadInputError, match="level"):
        strati.lineage(one, one, level=0.5)


def test_pvalues_stay_above_zero_and_results_are_plain_json() -> None:
    parent = transformer(6)
    pair = strati.lineage(parent, parent).to_dict()["pairs"][0]
    assert pair["pvalue"] == SMALLEST and pair["kind"] == "identical" and len(pair["blocks"]) == 6
    assert set(pair["blocks"][0]) >= {"a", "b", "agreement", "pvalue"}


def test_units_without_weights_are_no_evidence() -> None:
    """Ties that were broken by number would look like agreement."""
    rng = np.random.default_rng(0)
    first, second = (
        {"0.weight": rng.standard_normal((64, 20)), "2.weight": rng.standard_normal((10, 64))}
        for _ in range(2)
    )
    for network in (first, second):
        network["0.weight"][20:50], network["2.weight"][:, 20:50] = 0, 0
    assert strati.lineage(first, second).pairs[0].related is not True
    nothing = {name: np.zeros_like(w) for name, w in first.items()}
    equal = {name: np.ones_like(w) for name, w in first.items()}
    for network in (nothing, equal):
        assert strati.lineage(first, network).pairs[0].related is not True


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_weights_that_are_not_finite_leave_the_rest(wrong: float) -> None:
    parent = trained(3, 120)[0]
    child = {name: w.copy() for name, w in parent.items()}
    child["0.weight"][3, 4] = wrong
    assert strati.lineage(parent, child).pairs[0].related is True


@pytest.mark.parametrize("factor", [1e-25, 1e25])
def test_units_rescaled_by_relu_are_found(factor: float) -> None:
    parent = trained(3, 120)[0]
    scales = np.exp(np.random.default_rng(0).standard_normal(48)).astype(np.float32)
    child = parent | {
        "0.weight": parent["0.weight"] * scales[:, None],
        "2.weight": parent["2.weight"] / scales,
    }
    pair = strati.lineage(parent, child).pairs[0]
    assert pair.related and pair.distance is not None and pair.distance < 1e-3
    sized = {name: (w * factor).astype(np.float32) for name, w in parent.items()}
    assert strati.lineage(parent, sized).pairs[0].related is True


def test_an_adapter_file_has_a_direction() -> None:
    result = strati.lineage(embedded.path("shakespeare-lora"), embedded.path("shakespeare"))
    (pair,) = result.pairs
    assert (pair.kind, pair.rank, pair.direction, pair.direction_by) == ("lora", 4, "b-to-a", "adapter-file")
    assert result.networks[0] == str(embedded.path("shakespeare-lora"))
    assert [(edge.parent, edge.directed) for edge in result.tree] == [
        (str(embedded.path("shakespeare")), True)
    ]


def test_the_direction_names_its_evidence() -> None:
    rng = np.random.default_rng(0)
    a = {
        "0.weight": rng.normal(size=(64, 20)).astype(np.float32),
        "2.weight": rng.normal(size=(20, 64)).astype(np.float32),
    }
    coarse = {name: w.astype(np.float16) for name, w in a.items()}
    grid = {name: (np.round(w * 4) / 4).astype(np.float32) for name, w in a.items()}
    sparse = {name: np.where(np.abs(w) < 0.5, 0, w) for name, w in a.items()}
    for other, kind, evidence in (
        (coarse, "converted", "finer-dtype"),
        (grid, "quantised", "grid"),
        (sparse, "pruned", "zeros-or-units"),
    ):
        (pair,) = strati.lineage(a, other).pairs
        assert (pair.kind, pair.direction, pair.direction_by) == (kind, "a-to-b", evidence)
        assert pair.scheme == ("grid" if kind == "quantised" else None)
    (pair,) = strati.lineage(a, {n: w + rng.normal(size=w.shape) * 0.1 for n, w in a.items()}).pairs
    assert (pair.direction, pair.direction_by) == (None, None)


@pytest.mark.thorough
def test_pairs_are_kept_and_resumed_with_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, _ = family()
    few = {name: members[name] for name in ("one", "two", "one-tuned", "one-4bit", "two-half")}
    folder = saved(few, tmp_path / "nets")
    plain = strati.lineage(folder, workers=1).to_dict()
    assert strati.lineage(folder, workers=3).to_dict() == plain
    names: list[str] = []
    assert strati.lineage(folder, out=tmp_path / "out", workers=2, tick=names.append).to_dict() == plain
    assert len(names) == 10
    from strati.comparison import lineage as module

    def refuse(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(module, "_pair", refuse)
    assert strati.lineage(folder, out=tmp_path / "out", workers=1).to_dict() == plain


def test_a_stopped_lineage_says_how_to_resume_ctrl_c(tmp_path: Path) -> None:
    from strati.core.errors import StoppedError

    members, _ = family()
    folder = saved({name: members[name] for name in ("one", "two", "alone")}, tmp_path / "nets")
    done: list[str] = []

    def stop(name: str) -> None:
        done.append(name)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(StoppedError, match="2 done"):
        strati.lineage(folder, out=tmp_path / "out", workers=1, tick=stop)
    more: list[str] = []
    strati.lineage(folder, out=tmp_path / "out", workers=1, tick=more.append)
    assert len(more) == 1


@pytest.mark.thorough
def test_many_networks_are_screened_by_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten roots, a permuted, noisy child of each: only the ten related pairs are looked at closely."""
    from strati.comparison import lineage as module

    def gated(seed: int) -> Weights:
        rng = np.random.default_rng(seed)
        shapes = {"mlp.up_proj": (200, 100), "mlp.gate_proj": (200, 100), "mlp.down_proj": (100, 200)}
        return {
            f"model.layers.{n}.{name}.weight": (rng.gamma(2, size=(shape[0], 1)) * rng.normal(size=shape))
            for n in range(2)
            for name, shape in shapes.items()
        }

    def child(network: Weights, seed: int) -> Weights:
        order = np.random.default_rng(seed).permutation(200)
        moved = {k: w[:, order] if "down" in k else w[order] for k, w in network.items()}
        return noisy(moved, 0.3, seed)

    roots = [gated(seed) for seed in range(10)]
    networks = [*roots, *(child(root, seed) for seed, root in enumerate(roots))]
    looked: list[object] = []
    full = module._pair
    monkeypatch.setattr(module, "_pair", lambda a, b, c: (looked.append((a, b)), full(a, b, c))[1])
    family_of_twenty = strati.lineage(*networks, workers=1)
    related = {(p.a, p.b) for p in family_of_twenty.pairs if p.related}
    names = family_of_twenty.networks
    assert related == {(names[n], names[n + 10]) for n in range(10)}
    assert all(p.kind in ("unrelated", "undecided") for p in family_of_twenty.pairs if not p.related)
    assert (
        10 <= len(looked) < 80
    )  # a fifth of the 180 unrelated pairs are looked at by chance, with standard error 5
    assert len(family_of_twenty.families()) == 10
