"""Studies from Python: rows, failures, resuming, plugged-in metrics, checkpoints."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError, StoppedError
from strati.interventions.study import load_study, study
from strati.interventions.study_config import STORE, StudyConfig, builtin_names
from strati.interventions.study_spec import read_spec
from strati.interventions.tasks import make_task
from strati_reproductions.trained.networks import MLP

TINY: dict[str, Any] = {
    "name": "tiny",
    "network": {"source": "fcn", "count": 2, "together": 2, "hidden": [12, 10]},
    "data": {"name": "digits", "train": 300, "test": 100},
    "train": {"epochs": 3, "batch": 50},
    "interventions": {"draws": 2},
}


def tiny(**sections: dict[str, Any]) -> dict[str, Any]:
    return TINY | {name: TINY.get(name, {}) | keys for name, keys in sections.items()}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> strati.interventions.study.Study:  # type: ignore[name-defined]
    return study(TINY, out=tmp_path_factory.mktemp("calm"))


def test_every_point_has_its_row(calm: Any) -> None:
    table = calm.frame()
    assert calm.units == calm.done == len(table) == 2 * 3 * (1 + 1 + 2)
    counts = table.groupby(["network", "layer", "intervention"]).size()
    assert set(counts[:, :, "rerandomise"]) == {2} and set(counts[:, :, "reinitialise"]) == {1}
    keys = list(table[["network", "layer", "intervention", "draw"]].itertuples(index=False))
    assert keys == sorted(keys)
    assert table["alpha"].notna().all() and table["js_divergence"].notna().all()
    intact = table[table["intervention"] == "intact"]
    assert (intact["performance"] == intact["intact_performance"]).all() and (intact["distance"] == 0).all()
    assert table["initialiser"].str.startswith("pytorch: U(-").sum() == 12


def test_a_row_can_be_recomputed_by_hand(calm: Any) -> None:
    folder = Path(calm.store).parent
    tensors = dict(np.load(folder / "networks" / "network-001.npz"))
    spec = read_spec(TINY)
    from strati_reproductions.trained.networks import initialise

    task = make_task(spec.model.data, "accuracy", 1000)
    model = MLP([64, 12, 10, 10])
    initialise(model, 0, 1)
    first = model.fc2.weight.detach().clone(), model.fc2.bias.detach().clone()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in tensors.items()})
    moved = float(torch.linalg.norm((first[0] - model.fc2.weight.detach()).double()))
    model.fc2.weight.data, model.fc2.bias.data = first
    with torch.no_grad():
        accuracy = float((model(task.batches[0][0]).argmax(1) == task.batches[0][1]).float().mean())
    table = calm.frame().set_index(["network", "layer", "intervention", "draw"])
    row = table.loc[("network-001", "fc2", "reinitialise", 0)]
    assert row["performance"] == pytest.approx(accuracy)
    assert row["distance"] == pytest.approx(moved, rel=1e-5)
    assert row["alpha"] == strati.spectrum(first[0].numpy()).metrics()["alpha"]


def test_the_same_spec_gives_the_same_rows_and_another_seed_others(calm: Any, tmp_path: Path) -> None:
    assert study(TINY).frame().equals(calm.frame())
    assert not study(TINY | {"seed": 1}).frame().equals(calm.frame())


def test_two_processes_give_the_same_rows(calm: Any) -> None:
    assert study(TINY, workers=2).frame().equals(calm.frame())


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_gives_the_same_rows(calm: Any) -> None:
    assert study(TINY, engine="ray", workers=2).frame().equals(calm.frame())


def test_stopped_and_resumed_it_is_the_same(calm: Any, tmp_path: Path) -> None:
    seen: list[str] = []

    def stop(name: str) -> None:
        seen.append(name)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(StoppedError, match="stopped, 8 done: resume with"):
        study(TINY, out=tmp_path, tick=stop)
    assert study(TINY, out=tmp_path).frame().equals(calm.frame())
    assert load_study(tmp_path).frame().equals(calm.frame())


def test_lost_and_damaged_network_files_are_trained_again(calm: Any, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        study(TINY, out=tmp_path, tick=lambda name: (_ for _ in ()).throw(KeyboardInterrupt))
    (tmp_path / "networks" / "network-000.npz").unlink()
    (tmp_path / "networks" / "network-001.npz").write_bytes(b"half")
    assert study(TINY, out=tmp_path).frame().equals(calm.frame())


def test_a_folder_holds_one_study(calm: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="another study"):
        study(TINY | {"seed": 5}, out=Path(calm.store).parent)
    (tmp_path / STORE).write_bytes(b"")
    with pytest.raises(BadInputError, match="empty file"):
        study(TINY, out=tmp_path)


def test_rows_of_another_format_are_not_mixed(calm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strati.interventions.study.FORMAT", 5)
    with pytest.raises(BadInputError, match="rows of format 4, this strati writes format 5; choose another"):
        study(TINY, out=Path(calm.store).parent)
    for layout, remedy in ((1, "update strati"), (5, "run the study again")):
        monkeypatch.setattr("strati.interventions.study.FORMAT", layout)
        with pytest.raises(BadInputError, match=f"rows of format 4, this strati reads {layout}; {remedy}"):
            load_study(Path(calm.store).parent)


def test_json_and_summary(calm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(calm.to_json())
    assert found["schema"] == "strati.study/1"
    assert (found["units"], found["done"], found["failed"], found["store"]) == (24, 24, 0, calm.store)
    from rich import print as show

    show(calm.summary())
    assert "24 points measured" in capsys.readouterr().out
    assert "network-000" in calm._repr_html_()


# --- modules in memory ---


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


PLAN = StudyConfig(interventions=("reinitialise", "rerandomise"), draws=3, spectral=False)


def test_an_evaluate_function_that_fails_now_and_then() -> None:
    calls: list[int] = []

    def evaluate(model: nn.Module) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return float("nan") if len(calls) == 5 else 0.5

    found = study(module(), evaluate=evaluate, higher_is_better=True, config=PLAN)
    table = found.frame()
    assert (found.units, found.done, found.failed) == (8, 6, 2)
    reasons = set(table[table["status"] == "failed"]["reason"])
    assert reasons == {"evaluate raised RuntimeError: out of luck", "performance is nan"}
    assert strati.audit(found).failed == 2
    assert {f["reason"] for f in found.to_dict()["failures"]} == reasons


def test_the_callers_module_is_left_alone_and_seen_changed() -> None:
    model = module()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen: list[torch.Tensor] = []

    def evaluate(changed: nn.Module) -> float:
        seen.append(torch.cat([p.detach().flatten() for p in changed.parameters()]).clone())
        return 1.0

    study(model, evaluate=evaluate, higher_is_better=True, config=PLAN)
    seen = [
        weights for weights in seen if weights.any()
    ]  # without the one that was zeroed to check the direction
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert len({tuple(t.tolist()) for t in seen}) == 7  # intact and two layers of three draws
    first = seen[0]
    for other in seen[1:]:
        assert 0 < int((first != other).sum()) <= 56


def test_metrics_of_the_user() -> None:
    plugins = {
        "trace": lambda w: float(np.trace(w[:3, :3])),
        "overlap": lambda intact, changed: float((intact * changed).sum()),
        "broken": lambda w: 1 / 0,
    }
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    found = study(module(), data=(x, module()(x).argmax(1)), config=PLAN, plugins=plugins).frame()
    assert found["trace"].notna().all() and found["overlap"].notna().all() and found["broken"].isna().all()
    assert found["reason"].str.contains("metric broken raised ZeroDivisionError").all()
    assert (found["status"] == "done").all()
    with pytest.raises(BadInputError, match="takes one matrix"):
        study(module(), data=(x, module()(x).argmax(1)), config=PLAN, plugins={"m": lambda a, b, c: 0})


def test_reinitialise_puts_the_initial_values_back() -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    model = module()
    y = model(x).argmax(1)
    plan = StudyConfig(
        interventions=("reinitialise",),
        spectral=False,
        initial=module(),
    )
    table = study(model, data=(x, y), config=plan).frame()
    assert (table["performance"] == 1.0).all() and (table["distance"] == 0.0).all()
    with pytest.raises(BadInputError, match="needs the network's initial values"):
        study(model, data=(x, y), config=replace(plan, initial=None))
    for wrong, word in (
        (nn.Sequential(nn.Linear(6, 7)), r"is \(7, 6\) there"),
        ({}, "holds no tensors"),
    ):
        with pytest.raises(BadInputError, match=word):
            study(model, data=(x, y), config=replace(plan, initial=wrong))


def test_several_modules_by_name_and_a_lower_is_better_measure() -> None:
    plan = replace(PLAN, performance="loss")
    found = study({"a": module(), "b": module()}, evaluate=lambda m: 1.0, config=plan)
    assert set(found.frame()["network"]) == {"a", "b"}
    assert found.performance["higher_is_better"] is False


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "needs one of evaluate"),
        ({"data": (np.zeros((4, 5), np.float32), np.zeros(4, int))}, "do not fit the network"),
        ({"data": (np.zeros((4, 6), np.float32), np.full(4, 9))}, "label 9, but only 3 outputs"),
        ({"data": (np.zeros((4, 6), np.float32), np.zeros(3, int))}, "as many rows"),
        ({"data": 5}, "is a int; give arrays"),
    ],
)
def test_wrong_calls(options: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInputError, match=word):
        study(module(), **options)


def perplexity(model: nn.Module) -> float:
    """Lower for the network as it is than for any other."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(8 * model(x), module()(x).argmax(1)).exp())


def test_the_direction_of_a_users_measure_is_known_or_asked_for() -> None:
    with pytest.raises(BadInputError, match="say whether more is better: higher_is_better=True or False"):
        study(module(), evaluate=lambda m: perplexity(m), config=PLAN)
    named = study(module(), evaluate=perplexity, config=PLAN)
    told = study(module(), evaluate=lambda m: perplexity(m), higher_is_better=False, config=PLAN)
    assert named.performance["name"] == "perplexity" and told.performance["name"] == "performance"
    for found in (named, told):
        assert found.performance["higher_is_better"] is False
        assert {row.layer_class for row in strati.audit(found).layers} <= {"critical", "mixed"}
    with pytest.raises(BadInputError, match="contradicts the measure's name 'perplexity'"):
        study(module(), evaluate=perplexity, higher_is_better=True, config=PLAN)


def test_a_network_without_weights_must_not_be_better() -> None:
    model = module()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(
        BadInputError, match="with all its weights zero, which would be better if more is better"
    ):
        study(model, evaluate=lambda m: perplexity(m), higher_is_better=True, config=PLAN)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_measure_that_fails_without_weights_says_why_the_direction_was_not_checked() -> None:
    """The weights are as before, and the study goes on."""

    def score(model: nn.Module) -> float:
        size = sum(float(p.detach().abs().sum()) for p in model.parameters())
        return 1.0 if size > 0 else 1 // 0

    model = module()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.warns(RuntimeWarning, match="weights zero .ZeroDivisionError: .*higher is better could not"):
        found = study(model, evaluate=score, higher_is_better=True, config=PLAN, draws=1)
    assert found.units == 4 and all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_options_by_name_win_over_the_config_and_the_spec() -> None:
    assert study(TINY, draws=3, layers="fc1", spectral=False, workers=1).units == 2 * 1 * (1 + 1 + 3)
    assert study(module(), evaluate=lambda m: 1.0, higher_is_better=True, config=PLAN, draws=1).units == 4
    with pytest.raises(BadInputError, match="no option 'drawz'; did you mean 'draws'"):
        study(TINY, drawz=3)
    for options, word in (({"draws": 0}, "at least 1"), ({"init": "gpt"}, "did you mean 'gpt2'")):
        with pytest.raises(BadInputError, match=word):
            study(TINY, **options)


# --- specs ---


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (tiny(train={"epoks": 3}), "unknown key 'epoks' in .train.; did you mean 'epochs'"),
        ({"trian": {}}, "unknown key 'trian'; did you mean 'train'"),
        (tiny(train={"epochs": "three"}), "train.epochs must be a whole number"),
        (tiny(train={"epochs": True}), "must be a whole number, not True"),
        (tiny(train={"batch": 0}), "train.batch must be at least 1"),
        (tiny(network={"source": "mpl"}), "did you mean 'mlp'"),
        (tiny(network={"hidden": []}), "must be a list"),
        (tiny(interventions={"kinds": ["rerandomize"]}), "did you mean 'rerandomise'"),
        (tiny(data={"path": "x.npz"}), "both a name and a path"),
        ({"network": {"source": "mlp"}}, "needs a name"),
        ({"network": 3, "data": {"name": "digits"}}, "is a section"),
        (tiny(measure={"performance": "perplexity"}), "perplexity needs text"),
        (tiny(network={"source": "transformers"}), "network.path is missing"),
        (tiny(network={"source": "resnet"}), "needs images"),
        (tiny(network={"source": "transformer", "width": 32}), "needs text"),
        (tiny(data={"name": "nosuchset"}), "no such data set"),
        (tiny(interventions={"layers": ["conv*"]}), "matches no layer"),
        (tiny(data={"mean": [float("nan")]}), "data.mean must be a number"),
        (tiny(data={"std": [float("inf")]}), "data.std must be a number"),
        (tiny(measure={"chance": float("nan")}), "measure.chance must be a number"),
        (tiny(network={"hidden": [65_536, 65_536]}), "too many to train here"),
        (tiny(network={"source": "transformer", "width": 65_536, "depth": 1000}), "too many to train here"),
    ],
)
def test_a_wrong_spec_is_one_line(spec: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInputError, match=word) as caught:
        study(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000 + "]" * 5000, "seed = " + "9" * 10_000, "seed = 1\nseed = 2"]
)
def test_a_file_that_is_no_spec_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=r"not TOML|not a spec") as caught:
        read_spec(path)
    assert "\n" not in str(caught.value)


def test_built_in_specs_are_valid() -> None:
    assert {"fcn-digits", "fcn-mnist"} <= set(builtin_names())
    for name in builtin_names():
        assert read_spec(name).name == name


def test_a_training_that_diverges_is_an_error(tmp_path: Path) -> None:
    diverging = tiny(train={"optimiser": "sgd", "rate": 1e6, "epochs": 2})
    with pytest.raises(BadInputError, match=r"training: .*training diverged; lower train.rate"):
        study(diverging, out=tmp_path)


def test_a_study_in_which_every_point_failed_is_an_error(tmp_path: Path) -> None:
    def broken(weight: Any, rng: Any) -> Any:
        raise ValueError("no such edit")

    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(BadInputError, match=r"every point failed, all 2 .*no such edit"):
        study(module(), data=(x, module()(x).argmax(1)), interventions=(broken,), out=tmp_path)
    found = load_study(tmp_path)
    assert (found.units, found.failed) == (4, 2)
    with pytest.raises(BadInputError, match="no changed layer has been measured"):
        strati.audit(found)


def test_a_reason_is_never_empty() -> None:
    calls: list[int] = []

    def accuracy(model: nn.Module) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise StopIteration
        return 0.5

    table = study(module(), evaluate=accuracy, config=PLAN).frame()
    (reason,) = table[table["status"] == "failed"]["reason"]
    assert re.fullmatch(
        r"evaluate raised StopIteration without a message at test_studies.py:\d+, in accuracy", reason
    )


def test_counts_of_degeneracy_say_what_a_change_did_to_the_layer() -> None:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    narrow = module()
    with torch.no_grad():
        narrow[0].weight[1:] = narrow[0].weight[:1]  # all neurons alike but for the bias
        narrow[0].bias.zero_()
    plan = StudyConfig(
        interventions=("reinitialise", "rerandomise"), draws=1, spectral=False, degeneracy=True, samples=60
    )
    table = (
        study(narrow, data=(x, narrow(x).argmax(1)), config=plan).frame().set_index(["layer", "intervention"])
    )
    before, after = table.loc[("0", "intact")], table.loc[("0", "rerandomise")]
    assert before["output_rank"] < after["output_rank"]
    assert before["free_directions"] > after["free_directions"]
    assert (
        before["activation_rank"] == after["activation_rank"]
    )  # of its inputs, which the change cannot touch
    assert pd.isna(table.loc[("2", "intact")]["output_rank"])  # nothing follows the last layer


def test_frames_are_written_and_read_alike(calm: Any, tmp_path: Path) -> None:
    from strati.core.files import export_table

    for ending in ("csv", "parquet"):
        export_table(calm.frame(), tmp_path / f"rows.{ending}")
    found = pd.read_parquet(tmp_path / "rows.parquet")
    assert list(found.columns) == list(pd.read_csv(tmp_path / "rows.csv").columns)
    assert len(found) == 24
