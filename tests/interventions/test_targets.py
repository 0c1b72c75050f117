"""Interventions through the study: rows, settings, draws, blocks, failures, resuming, standard errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError, StoppedError
from strati.interventions.blocks import find_blocks
from strati.interventions.study import load_study, study
from strati.interventions.study_spec import read_spec
from strati.interventions.tasks import ScoreAccumulator, StudyData, make_task, standard_error
from strati_reproductions.trained.networks import MLP, CifarResNet, Transformer

RNG = np.random.default_rng(0)
ALL = [
    strati.truncate(rank=[1, 3], energy=0.9),
    *(strati.signal_only(), strati.noise_only(), strati.remove_quasi_null()),
    *(strati.remove_small(1), strati.remove_large(1)),
    strati.quantise(bits=[4, 2], group=4),
    strati.prune(share=0.5, pattern="2:4"),
    *(strati.zero(), strati.permute_entries(), strati.scale(0.5), strati.noise([0.1, 1.0])),
]


def mlp() -> tuple[nn.Module, StudyData]:
    torch.manual_seed(0)
    data = StudyData("rows", 5, np.empty(0), None, RNG.standard_normal((60, 12)), RNG.integers(0, 5, 60))
    return MLP([12, 9, 5]).eval(), data


def language() -> tuple[nn.Module, StudyData]:
    torch.manual_seed(0)
    data = StudyData("tokens", 40, np.empty(0), None, RNG.integers(0, 40, (6, 9)), None)
    return Transformer(40, 16, 3, 2, 16).eval(), data


def images() -> tuple[nn.Module, StudyData]:
    torch.manual_seed(0)
    pixels = RNG.integers(0, 256, (6, 3, 16, 16), np.uint8)
    return CifarResNet(14, 4).eval(), StudyData(
        "images", 10, np.empty(0), None, pixels, RNG.integers(0, 10, 6)
    )


@pytest.mark.parametrize("make", [mlp, language, images])
def test_every_intervention_on_every_kind_of_network(make: Any) -> None:
    model, data = make()
    found = study(model, data=data, performance="loss", batch=4, interventions=ALL, draws=2, spectral=False)
    table = found.frame()
    assert found.failed == 0 and found.done == found.units
    layers = table["layer"].nunique()
    counts = table.groupby("intervention").size()
    assert counts["truncate"] == 3 * layers and counts["quantise"] == 2 * layers
    assert (
        counts["permute-entries"] == 2 * layers and counts["noise"] == 4 * layers and counts["zero"] == layers
    )
    settings = set(table[table["intervention"] == "quantise"]["setting"])
    assert settings == {"bits=4,group=4", "bits=2,group=4"}
    assert table[table["intervention"] == "zero"]["setting"].isna().all()
    keys = table[["network", "layer", "intervention", "setting", "draw"]].fillna("")
    assert not keys.duplicated().any()
    # by hand: the row of one setting is the loss of the network changed in memory
    layer = table["layer"].iloc[-1]
    task = make_task(data, "loss", 4)
    with strati.quantised(model, {layer: "bits=2,group=4"}), torch.no_grad():
        total = sum(task.add_up(task.output(model, x), y) for x, y in task.batches)
        count = sum(task.count(y) for _, y in task.batches)
    row = table[(table["layer"] == layer) & (table["setting"] == "bits=2,group=4")].iloc[0]
    assert row["performance"] == pytest.approx(total / count, rel=1e-5)
    assert table[table["intervention"] != "intact"]["activation_error"].notna().all()


@pytest.mark.parametrize("make", [language, images])
def test_dropped_blocks_and_runs_of_them(make: Any) -> None:
    model, data = make()
    found = study(model, data=data, performance="loss", batch=4, interventions=strati.drop(run=[1, 2]))
    table = found.frame()
    assert found.failed == 0 and set(table["type"]) == {"block"}
    runs = table[table["setting"] == "run=2"]
    assert 0 < len(runs) < (table["setting"] == "run=1").sum()
    task = make_task(data, "loss", 4)
    blocks = find_blocks(model, lambda: task.output(model, task.batches[0][0][:1]))
    for name in runs["layer"]:
        names = next(b for b in blocks if b.name == name).members[:2]
        with strati.dropped(model, names), torch.no_grad():
            total = sum(task.add_up(task.output(model, x), y) for x, y in task.batches)
            count = sum(task.count(y) for _, y in task.batches)
        assert runs[runs["layer"] == name]["performance"].item() == pytest.approx(total / count, rel=1e-6)
    influence = table[table["setting"].notna()]["block_influence"]
    assert influence.between(0, 2).all()


def test_drop_needs_blocks() -> None:
    model, data = mlp()
    with pytest.raises(BadInputError, match="no residual block"):
        study(model, data=data, interventions=strati.drop())


def test_block_influence_by_hand() -> None:
    model, data = language()
    table = study(model, data=data, performance="loss", batch=6, interventions="drop").frame()
    seen: list[torch.Tensor] = []
    hook = model.get_submodule("blocks.1").register_forward_hook(lambda _m, a, o: seen.extend([a[0], o]))
    with torch.no_grad():
        model(torch.from_numpy(data.x_test))
    hook.remove()
    cosines = torch.nn.functional.cosine_similarity(seen[0], seen[1], dim=-1).double()
    row = table[(table["layer"] == "blocks.1") & (table["intervention"] == "drop")].iloc[0]
    assert row["block_influence"] == pytest.approx(1 - float(cosines.mean()), abs=1e-6)
    assert row["angular_distance"] == pytest.approx(float(torch.arccos(cosines).mean()) / np.pi, abs=1e-5)


def test_data_based_scores_by_their_definitions() -> None:
    model, data = mlp()
    table = study(model, data=data, interventions=strati.prune(share=0.5), batch=25).frame()
    x = data.x_test.astype(np.float32)
    w = model.fc1.weight.detach().numpy().astype(float)
    d = np.where(np.abs(w) < np.sort(np.abs(w), axis=None)[w.size // 2], -w, 0.0)
    row = table[(table["layer"] == "fc1") & (table["intervention"] == "prune")].iloc[0]
    assert row["activation_error"] == pytest.approx(
        np.linalg.norm(d @ x.T) / np.linalg.norm(w @ x.T), rel=1e-5
    )
    norms = np.linalg.norm(x, axis=0)
    assert row["wanda_score"] == pytest.approx(
        (np.abs(d) * norms).sum() / (np.abs(w) * norms).sum(), rel=1e-5
    )
    h = 2 * x.T.astype(float) @ x / len(x)
    inverse = np.linalg.inv(h + 0.01 * np.diag(h).mean() * np.eye(12))
    assert row["gptq_error"] == pytest.approx((d**2 / np.diag(inverse)).sum(), rel=1e-5)


def test_functions_of_the_user_and_their_failures() -> None:
    model, data = mlp()

    def flip(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return weight * rng.choice([-1.0, 1.0], weight.shape)

    def wrong(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return weight[1:]

    def raises(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        raise RuntimeError("no luck")

    found = study(model, data=data, interventions=[flip, wrong, raises, strati.zero()], draws=3)
    table = found.frame()
    assert (table["intervention"] == "flip").sum() == 6 and found.failed == 12
    reasons = set(table[table["status"] == "failed"]["reason"])
    assert reasons == {
        "intervention wrong: returned shape (8, 12), not (9, 12)",
        "intervention wrong: returned shape (4, 9), not (5, 9)",
        "intervention raises: raised RuntimeError: no luck",
    }
    assert table[table["intervention"] == "flip"]["performance"].nunique() > 1


def test_swapping_every_layer_in_turn_from_another_network() -> None:
    model, data = mlp()
    torch.manual_seed(1)
    other = MLP([12, 9, 5]).eval()
    table = study(model, data=data, performance="loss", interventions=strati.swap(other)).frame()
    swapped = table[table["intervention"] == "swap"]
    with strati.swapped(model, other, ["fc2"]), torch.no_grad():
        logits = model(torch.from_numpy(data.x_test.astype(np.float32)))
        want = float(nn.functional.cross_entropy(logits, torch.from_numpy(data.y_test)))
    assert swapped[swapped["layer"] == "fc2"]["performance"].item() == pytest.approx(want, rel=1e-6)
    with pytest.raises(BadInputError, match="does not match: fc1"):
        study(model, data=data, interventions=strati.swap(MLP([12, 8, 5])))


SPEC: dict[str, Any] = {
    "network": {"source": "fcn", "hidden": [12, 10]},
    "data": {"name": "digits", "train": 200, "test": 60},
    "train": {"epochs": 2, "batch": 50},
    "interventions": {
        "kinds": ["zero", "rerandomise"],
        "truncate": {"rank": [1, 4]},
        "permute-entries": {"draws": 2},
    },
    "metrics": {"spectral": False},
}


def test_a_spec_with_tables(tmp_path: Path) -> None:
    found = study(SPEC, out=tmp_path / "a")
    counts = found.frame().groupby("intervention").size()
    assert dict(counts) == {"intact": 3, "rerandomise": 3, "permute-entries": 6, "truncate": 6, "zero": 3}
    seen: list[str] = []

    def stop(name: str) -> None:
        seen.append(name)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(StoppedError):
        study(SPEC, out=tmp_path / "b", tick=stop)
    study(SPEC, out=tmp_path / "b")
    assert load_study(tmp_path / "b").frame().equals(found.frame())
    only = read_spec(SPEC | {"interventions": {"quantise": {"bits": 4}}})
    assert [one.name for one in only.config.interventions] == ["quantise"]


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"truncat": {"rank": 1}}, "interventions.truncat: no such intervention; did you mean 'truncate'"),
        ({"truncate": {"rnk": 1}}, "truncate.rnk: no such option; truncate has rank, energy, parameters"),
        ({"truncate": {}}, "needs settings: rank or energy"),
        ({"kinds": ["truncate"]}, "'truncate' needs settings"),
        ({"swap": {}}, "needs checkpoint"),
        ({"quantise": {"bits": [4, "3"]}}, "quantise.bits: must be a whole number, not '3'"),
    ],
)
def test_wrong_tables_are_one_line(section: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInputError, match=word) as caught:
        read_spec(SPEC | {"interventions": section})
    assert "\n" not in str(caught.value)


def test_standard_errors_are_over_sequences() -> None:
    model, data = language()
    task = make_task(data, "loss", 4)
    tally = ScoreAccumulator(task)
    with torch.no_grad():
        for x, y in task.batches:
            tally.add(task.output(model, x), y)
        logits = model(torch.from_numpy(data.x_test))
    each = nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 40), torch.from_numpy(data.x_test)[:, 1:].reshape(-1), reduction="none"
    )
    by_sequence = each.reshape(6, -1).mean(1).numpy()
    scores = tally.result()
    assert scores.mean == pytest.approx(by_sequence.mean(), rel=1e-6)
    assert np.allclose(scores.groups, by_sequence, rtol=1e-5)
    assert scores.stderr == pytest.approx(by_sequence.std(ddof=1) / np.sqrt(6), rel=1e-5)
    rows = study(model, data=data, performance="loss", batch=4, interventions="zero").frame()
    intact = rows[rows["intervention"] == "intact"]["performance_stderr"].iloc[0]
    assert intact == pytest.approx(scores.stderr)
    assert standard_error([1.0, float("nan")]) is None


def test_weights_that_cannot_be_written_in_place_are_one_line() -> None:
    with torch.inference_mode():
        loaded = nn.Sequential(nn.Linear(6, 5))
    with strati.truncated(loaded, {"0": 2}):  # loaded in inference mode: written in it
        assert int(torch.linalg.matrix_rank(loaded[0].weight)) == 2
    shared = nn.Sequential(nn.Linear(6, 5))
    shared[0].weight = nn.Parameter(torch.randn(1, 6).expand(5, 6))
    before = shared[0].weight.clone()
    with (
        pytest.raises(BadInputError, match="cannot be written in place") as caught,
        strati.zeroed(shared, "0"),
    ):
        pass
    assert "\n" not in str(caught.value) and torch.equal(shared[0].weight, before)
    empty = nn.Sequential(nn.Linear(6, 5, device="meta"))
    with pytest.raises(BadInputError, match="no values"), strati.zeroed(empty, "0"):
        pass
