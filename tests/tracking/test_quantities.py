"""Scales, counts and interventions over a run; runs that are odd: gaps, repeats, vanishing layers, broken files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import strati


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def test_counts_are_those_of_degeneracy(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    full = network()
    bare = network()
    with torch.no_grad():
        bare[0].weight[2:] = 0  # three hidden units that the inputs no longer move
        bare[0].bias[2:] = 0
    run = strati.track([full.state_dict(), bare.state_dict()], data=data, model=full, what="counts")
    curves = {(s.what, s.layer): s.values for s in run.curves}
    for place, model in enumerate((full, bare)):
        expected = strati.degeneracy(model, data[0]).to_dict()
        assert curves["free", None][place] == expected["free"]
        assert curves["effective", None][place] == expected["effective"]
    assert curves["free", None][1] > curves["free", None][0]


@pytest.mark.slow
def test_scales_are_those_of_effective_parameters(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = network()
    x = data[0][:20]
    run = strati.track([model.state_dict()], data=x, model=model, what="scales", scales=(0.1, 1.0), seed=3)
    expected = strati.effective_parameters(model, x, scales=[0.1, 1.0], seed=3).to_dict()["scales"]
    curves = {s.what: s for s in run.curves}
    for row in expected:
        found = curves[f"effective_parameters[{row['epsilon']:g}]"].values[0]
        assert found == (pytest.approx(row["effective"]) if row["effective"] is not None else None)
        if row["effective"] is None:
            assert any("effective_parameters" in f["quantity"] and f["reason"] for f in run.failed)


def test_interventions_zero_each_layer(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = network()
    run = strati.track([model.state_dict()], data=data, model=model, what="interventions")
    curves = {(s.what, s.layer): s.values[0] for s in run.curves}
    with torch.no_grad():
        intact = float((model(data[0]).argmax(1) == data[1]).float().mean())
        constant = float((model[2].bias.argmax() == data[1]).float().mean())
    assert curves["intact", None] == pytest.approx(intact)
    zeroed = {layer: value for (what, layer), value in curves.items() if what == "zeroed"}
    assert set(zeroed) == {"0.weight", "2.weight"} or set(zeroed) == {"0", "2"}
    assert zeroed[next(k for k in zeroed if k.startswith("2"))] == pytest.approx(constant)


def test_an_odd_run(tmp_path: Path) -> None:
    """Steps missing, one repeated after a restart, one file cut off, one layer gone and one new: all in one result."""
    rng = np.random.default_rng(0)
    steps = [0, 100, 200, 500, 600, 700, 800, 900, 1000, 1100, 1200]
    for step in steps:
        weights = {"a.weight": torch.tensor(rng.normal(size=(16, 8)) * (1 + step / 500))}
        if step < 600:
            weights["old.weight"] = torch.tensor(rng.normal(size=(16, 8)))
        else:
            weights["new.weight"] = torch.tensor(rng.normal(size=(16, 8)))
        save_file(weights, tmp_path / f"step-{step}.safetensors")
    again = tmp_path / "restarted-500.safetensors"
    again.write_bytes((tmp_path / "step-500.safetensors").read_bytes())
    cut = tmp_path / "step-650.safetensors"
    cut.write_bytes((tmp_path / "step-600.safetensors").read_bytes()[:300])
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    run = strati.track(tmp_path, what="spectra")
    assert list(run.steps) == [0, 100, 200, 500, 500, 600, 650, 700, 800, 900, 1000, 1100, 1200]
    assert [f["checkpoint"] for f in run.failed] == ["step-650.safetensors"]
    curves = {(s.what, s.layer): s.values for s in run.curves}
    assert curves["stable_rank", "old.weight"][5:] == (None,) * 8
    assert curves["stable_rank", "new.weight"][:5] == (None,) * 5
    assert curves["spectral_norm", "a.weight"][3] == curves["spectral_norm", "a.weight"][4]
    assert curves["spectral_norm", "a.weight"][6] is None
    json.loads(run.to_json())  # no NaN anywhere
    drawn = {d["layer"]: d["values"] for d in run.spectra["layers"]}
    assert drawn["old.weight"][6] is None
    assert len(drawn["a.weight"][0]) == len(run.spectra["ranks"])
    top = float(np.linalg.svd(_read(tmp_path / "step-0.safetensors"), compute_uv=False)[0] ** 2)
    assert drawn["a.weight"][0][-1] / 100 == pytest.approx(np.log10(top), abs=0.006)


def _read(path: Path) -> np.ndarray:
    from safetensors.numpy import load_file

    return load_file(path)["a.weight"]


def test_the_picture_has_a_panel_per_quantity_and_the_spectra() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    rng = np.random.default_rng(0)
    run = strati.track([{"a.weight": rng.normal(size=(16, 8)) * (1 + k)} for k in range(4)], what="spectra")
    figure = run.plot()
    whats = {s.what for s in run.curves}
    assert len(figure.axes) == len(whats) + 1
    assert len(figure.axes[-1].lines) == 4  # one spectrum per checkpoint


def test_groups_seconds_and_heads_on_the_command_line(tmp_path: Path, data: tuple) -> None:
    from strati.cli.main import strati as verbs

    folder = tmp_path / "run"
    folder.mkdir()
    for step in (0, 1):
        save_file(network(step).state_dict(), folder / f"step-{step}.safetensors")
    np.savez(tmp_path / "d.npz", x=data[0].numpy(), y=data[1].numpy(), kind=np.arange(40) % 2)
    words = [str(folder), "--data", str(tmp_path / "d.npz"), "--what", "llc", "--out", str(tmp_path / "o")]
    words += [
        "--activation",
        "tanh",
        "--chains",
        "2",
        "--draws",
        "60",
        "--data-groups",
        "kind",
        "--loss",
        "behavioural-mse",
    ]
    result = CliRunner().invoke(verbs, ["track", *words, "--json", str(tmp_path / "t.json")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "t.json").read_text())
    assert {"llc", "llc[0]", "llc[1]", "llc_change"} <= {s["what"] for s in found["series"]}
    assert found["settings"]["draws"] == 60
