"""A small run followed: series, settings shared by all checkpoints, resuming, odd runs; the tracker, its callbacks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import strati
from strati import embedded
from strati.core.display import as_text
from strati.core.errors import BadInputError
from strati.tracking.checkpoints import in_order


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Ten checkpoints of a network learning to tell three classes, and its data."""
    folder = tmp_path_factory.mktemp("run")
    model = network()
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    rate = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(10):
        save_file(model.state_dict(), folder / f"ckpt-{10 * step}.safetensors")
        for _ in range(10):
            rate.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            rate.step()
    data = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(data, x=x.numpy(), y=y.numpy())
    return folder, data


def test_checkpoints_in_order(run):
    folder, _ = run
    found = in_order(folder)
    assert [c.step for c in found] == [10.0 * i for i in range(10)]
    assert [c.step for c in in_order(["org/model@step3000", "org/model@step20"])] == [20.0, 3000.0]
    with pytest.raises(BadInputError, match="2 for 1 checkpoints"):
        in_order([{}], [1, 2])


def test_spectra_are_those_of_scan(run):
    folder, _ = run
    found = strati.track(folder, what="spectra")
    scanned = strati.scan(folder / "ckpt-90.safetensors").to_dict()["layers"]
    series = {(s.what, s.layer): s for s in found.curves}
    for row in scanned:
        assert series["stable_rank", row["name"]].values[-1] == row["stable_rank"]
        assert series["alpha", row["name"]].stderr[-1] == row["alpha_stderr"]


def test_loss_and_learning_coefficient_share_their_settings(run):
    folder, data = run
    paths = [folder / f"ckpt-{step}.safetensors" for step in (0, 40, 90)]
    found = strati.track(paths, data=data, what="loss,llc", chains=4, draws=60, gamma=10.0)
    assert found.settings["loss"] == "cross_entropy"
    assert found.settings["gamma"] == 10.0
    assert found.settings["nbeta"] == pytest.approx(120 / np.log(120))
    loss = next(s for s in found.curves if s.what == "loss")
    assert loss.values[0] > loss.values[1] > loss.values[2]
    assert all(e is not None and e > 0 for e in loss.stderr)
    assert set(found.series.columns) == {"step", "what", "layer", "value", "stderr"}


def test_resuming_adding_checkpoints_and_quantities(run, tmp_path):
    folder, data = run
    paths = sorted(folder.iterdir(), key=lambda p: int(p.stem.split("-")[1]))
    done: list[str] = []
    strati.track(paths[:3], what="spectra", data=data, out=tmp_path, tick=done.append)
    assert len(done) == 3
    done.clear()
    strati.track(paths[:5], what="spectra,loss", data=data, out=tmp_path, tick=done.append)
    assert sorted(name.split(": ")[1] for name in done) == ["loss"] * 5 + ["spectra"] * 2
    done.clear()
    again = strati.track(paths[:5], what="spectra,loss", data=data, out=tmp_path, tick=done.append)
    assert done == []
    fresh = strati.track(paths[:5], what="spectra,loss", data=data)
    assert [vars(s) for s in again.curves] == [vars(s) for s in fresh.curves]
    with pytest.raises(BadInputError, match="holds another run"):
        strati.track(paths[:3], what="spectra", data=data, out=tmp_path, seed=7)


def test_data_and_parts_of_the_network_are_added_to_a_run(run, tmp_path):
    """Spectra first, without data; then the loss; then coefficients of layers: nothing is computed twice."""
    folder, data = run
    paths = sorted(folder.iterdir(), key=lambda p: int(p.stem.split("-")[1]))[:2]
    done: list[str] = []
    quick = {"draws": 60, "chains": 2, "gamma": 1e5}
    strati.track(paths, out=tmp_path, tick=done.append)
    assert {name.split(": ")[1] for name in done} == {"spectra"}
    done.clear()
    strati.track(paths, data=data, out=tmp_path, what="spectra,loss", tick=done.append)
    assert [name.split(": ")[1] for name in done] == ["loss"] * 2
    done.clear()
    strati.track(paths, data=data, out=tmp_path, what="llc", tick=done.append, **quick)
    assert [name.split(": ")[1] for name in done] == ["llc"] * 2
    done.clear()
    parts = strati.track(
        paths, data=data, out=tmp_path, what="llc", per_layer=True, tick=done.append, **quick
    )
    assert [name.split(": ")[1] for name in done] == ["llc of layers"] * 2
    fresh = strati.track(paths, data=data, what="llc", per_layer=True, **quick)
    assert [vars(s) for s in parts.curves] == [vars(s) for s in fresh.curves]
    done.clear()
    with np.load(data) as file:
        np.savez(tmp_path / "other.npz", x=file["x"] + 1, y=file["y"])
    strati.track(paths, data=tmp_path / "other.npz", out=tmp_path, what="loss", tick=done.append)
    assert len(done) == 2  # other data are other numbers, never those of the first


def test_a_folder_with_files_that_are_no_checkpoints(tmp_path):
    rng = np.random.default_rng(0)
    for step in (100, 20, 3):
        np.savez(tmp_path / f"step-{step}.npz", **{"fc.weight": rng.normal(size=(12, 8))})
    torch.save({"fc.weight": torch.zeros(12, 8)}, tmp_path / "optimizer.pt")
    found = strati.track(tmp_path, what="spectra")
    assert found.steps == (3.0, 20.0, 100.0)
    (flag,) = found.warnings
    assert flag.code == "left-out" and "optimizer.pt" in flag.text


def test_steps_as_keys_and_one_network_in_a_folder(tmp_path):
    rng = np.random.default_rng(0)
    states = {300: {"a.weight": rng.normal(size=(9, 6))}, 20: {"a.weight": rng.normal(size=(9, 6))}}
    assert strati.track(states, what="spectra").steps == (20.0, 300.0)
    home = tmp_path / "ckpt-7"
    home.mkdir()
    (home / "config.json").write_text("{}")
    (home / "model-00001-of-00002.safetensors").touch()
    (home / "model-00002-of-00002.safetensors").touch()
    assert [(c.step, c.name) for c in in_order(home)] == [(7.0, "ckpt-7")]


def test_unreadable_checkpoints_are_named_and_the_rest_goes_on(run, tmp_path):
    folder, _ = run
    bad = tmp_path / "ckpt-55.safetensors"
    bad.write_bytes(b"nonsense")
    found = strati.track([*folder.iterdir(), bad], what="spectra")
    assert [f["checkpoint"] for f in found.failed] == ["ckpt-55.safetensors"]
    assert found.warnings[0].code == "incomplete"
    assert len(found.steps) == 11
    with pytest.raises(BadInputError, match="nothing could be measured"):
        strati.track([bad], what="spectra")


def test_layers_that_appear_and_repeated_steps():
    rng = np.random.default_rng(0)
    a = {"fc1.weight": rng.normal(size=(20, 10))}
    b = a | {"fc2.weight": rng.normal(size=(20, 10))}
    found = strati.track([a, b, b], steps=[0, 10, 10], what="spectra")
    series = {(s.what, s.layer): s.values for s in found.curves}
    assert series["entropy", "fc2.weight"][0] is None
    assert series["entropy", "fc2.weight"][1] is not None


def test_a_model_of_ones_own_is_filled_with_the_weights(run):
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    y = np.zeros(40, dtype=np.int64)
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        states.append({k: v.clone() for k, v in Own().state_dict().items()})
    found = strati.track(states, data=(x, y), model=Own(), what="loss")
    torch.manual_seed(1)
    with torch.no_grad():
        expected = nn.functional.cross_entropy(Own()(torch.from_numpy(x)), torch.from_numpy(y))
    assert found.curves[0].values[1] == pytest.approx(float(expected), rel=1e-6)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)) ** 2)


def test_the_command(run, tmp_path):
    from strati.cli.main import strati as verbs

    folder, data = run
    words = [str(folder), "--data", str(data), "--what", "spectra,loss", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(verbs, ["track", *words, "--json", str(tmp_path / "t.json")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["schema"] == "strati.track/1"
    assert found["steps"] == [10.0 * i for i in range(10)]
    assert {"what", "layer", "values", "stderr"} == set(found["series"][0])
    assert "10 checkpoints, steps 0 to 90" in result.output


def test_the_tracker_writes_lines_and_never_raises(tmp_path):
    model = nn.Linear(30, 40)
    logged: list[tuple[dict[str, float], int]] = []
    with strati.Tracker(
        model, every=5, out=tmp_path, log=lambda v, s: logged.append((dict(v), s)), share=1
    ) as tracker:
        for step in range(11):
            tracker.step(step)
            tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "track.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 5, 10] == [step for _, step in logged]
    scanned = strati.scan(model).to_dict()["layers"][0]
    assert lines[0]["values"]["weight/stable_rank"] == pytest.approx(scanned["stable_rank"], rel=1e-6)

    def broken(values: Any, step: int) -> None:
        raise RuntimeError("no connection")

    with pytest.warns(RuntimeWarning, match="no connection") as seen:
        tracker = strati.Tracker(model, every=1, log=broken, share=1)
        for step in range(3):
            tracker.step(step)
            tracker.close()
    assert len(seen) == 1


def test_a_scan_under_way_is_not_waited_for():
    import threading

    gate = threading.Event()
    with strati.Tracker(nn.Linear(20, 20), every=1, log=lambda v, s: gate.wait(10), share=1) as tracker:
        for step in range(4):
            tracker.step(step)
        assert tracker.skipped == 3
        gate.set()


def test_the_callback_in_transformers_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from strati.integrations.transformers import StratiCallback

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
        )
        rows = [{"input_ids": torch.arange(8) % 32, "labels": torch.arange(8) % 32} for _ in range(8)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "o"),
            max_steps=4,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        callback = StratiCallback(every=2, out=tmp_path, share=1)
        transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    lines = [json.loads(line)["step"] for line in (tmp_path / "track.jsonl").read_text().splitlines()]
    assert lines[0] == 0
    assert set(lines) <= {0, 2, 4}
    assert len(lines) + callback.tracker.skipped == 3


def _smooth_run(count: int) -> dict[int, dict[str, np.ndarray]]:
    """Random weights that grow a direction over training."""
    rng = np.random.default_rng(0)
    noise, direction = rng.normal(size=(60, 64)), rng.normal(size=60)[:, None] * rng.normal(size=64)
    return {
        100 * k: {"fc.weight": noise + 0.3 * k * direction, "out.weight": noise[:5]} for k in range(count)
    }


def test_a_short_run_is_described_by_its_trajectory_and_not_tested_for_change_points():
    followed = strati.track(_smooth_run(9), what="spectra")
    lines = as_text(followed.summary(), width=80).splitlines()
    assert len(lines[0]) <= 100
    assert any("too few checkpoints (9) to test for change points" in line for line in lines)
    assert any(line.split()[:3] == ["stable", "rank", "fc"] for line in lines)
    assert not followed.breaks
    assert max(map(len, lines)) <= 80
    assert followed.states["fc.weight"][0] == "random-like"
    assert followed.states["fc.weight"][-1] == "learned"
    assert followed.to_dict()["states"] == {k: list(v) for k, v in followed.states.items()}


def test_a_trend_of_the_loss_is_called_a_trend(run):
    folder, data = run
    first = as_text(strati.track(folder, data=data, what="loss").summary(), width=80).splitlines()
    assert "falls from" in first[0]
    assert any(line.startswith("next: strati compare ") for line in first[-3:])


def test_the_learning_coefficient_is_shown_with_its_settings(run):
    folder, data = run
    followed = strati.track(folder, data=data, what="llc", draws=100, chains=2)
    text = as_text(followed.summary(), width=100)
    assert "nbeta" in text and "gamma" in text


def test_arrays_of_the_data_are_chosen_by_name(run, tmp_path):
    from strati.cli.main import strati as group

    folder, data = run
    arrays = np.load(data)
    np.savez(tmp_path / "named.npz", images=arrays["x"], labels=arrays["y"])
    words = ["track", str(folder), "--data", str(tmp_path / "named.npz"), "--what", "loss"]
    names = ["--inputs", "images", "--targets", "labels", "--json", "-"]
    done = CliRunner().invoke(group, [*words, *names, "--out", str(tmp_path / "o")])
    assert done.exit_code == 0, done.output
    (series,) = json.loads(done.output)["series"]
    expected = strati.track(folder, data=data, what="loss").curves[0].values
    assert series["values"] == pytest.approx(list(expected))


def test_curvature_of_every_checkpoint_is_that_of_the_function(run):
    folder, data = run
    paths = sorted(folder.iterdir())[:2]
    found = strati.track(paths, data=data, what="curvature")
    for place, path in enumerate(paths):
        spectrum = strati.curvature(path, "cross_entropy", data, top=1)
        for what in ("top", "trace", "negative"):
            (series,) = (s for s in found.curves if s.what == f"curvature_{what}")
            value = spectrum.top[0] if what == "top" else getattr(spectrum, what)
            assert series.values[place] == pytest.approx(value, rel=1e-6)


def test_token_ids_alone_give_the_loss_of_the_next_token():
    """A language model needs no targets; the losses are those of ``shakespeare-losses.json``."""
    losses = json.loads(embedded.path("shakespeare-losses.json").read_text())
    run = [embedded.path("shakespeare-init"), embedded.path("shakespeare")]
    (series,) = strati.track(run, steps=[0, 1000], data=embedded.path("tempest.txt"), what="loss").curves
    assert series.what == "loss"
    expected = [losses[name]["tempest.txt"] for name in ("initial", "trained")]
    assert list(series.values) == pytest.approx(expected, abs=0.02)
