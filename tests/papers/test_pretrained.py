"""The tables and figures of ``reproduce pretrained``, on networks small enough to run here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from strati.intervene.planning.config import StudyConfig
from strati.intervene.planning.networks import CifarResNet, Transformer
from strati.intervene.planning.tasks import StudyData
from strati.intervene.study import study
from strati.papers.robust_and_critical.pretrained import _equal_earth, _finished
from strati.papers.robust_and_critical.pretrained_tables import (
    FIGURE_METRICS,
    PretrainedCase,
    case_figures,
    case_rows,
)
from strati.run.store import Finished, Store


def case(performance: str) -> PretrainedCase:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    plan = StudyConfig(
        interventions=("rerandomise",), draws=3, init="pytorch", performance=performance, batch=8
    )
    if performance == "accuracy":
        images = rng.integers(0, 255, (16, 3, 8, 8), np.uint8)
        data = StudyData("images", 10, images[:0], None, images, rng.integers(0, 10, 16))
        model = {"resnet20": CifarResNet(8, 8).eval()}
        return PretrainedCase(
            "resnet20", model, plan, "3 draws", "table 2", ("figure 5", "figure 8"), data=data
        )
    tokens = rng.integers(0, 30, (4, 9))
    data = StudyData("tokens", 30, tokens[:0], None, tokens, None)
    language = {"smollm2": Transformer(30, 16, 1, 2, 16).eval()}
    return PretrainedCase(
        "smollm2", language, plan, "3 draws", "table 3", ("figure 6", "figure 11"), data=data
    )


@pytest.mark.parametrize(("performance", "table"), [("accuracy", "table 2"), ("perplexity", "table 3")])
def test_tables_and_figures_are_in_the_papers_form(performance: str, table: str, tmp_path: Path) -> None:
    one = case(performance)
    found = study(dict(one.models), data=one.data, config=one.config, out=tmp_path)
    rows = {row.what: row for row in case_rows(one, found)}
    where = f"{table}, {one.name}"
    parameters = sum(p.numel() for p in next(iter(one.models.values())).parameters())
    assert rows[f"{where}: parameters"].ours == f"{parameters / 1e6:.1f}M"
    loss, second = rows[f"{where}: loss"].ours, rows[f"{where}: {performance}"].ours
    assert isinstance(loss, float) and isinstance(second, float)
    if performance == "perplexity":
        assert np.exp(loss) == pytest.approx(second, rel=1e-2)
        assert rows[f"{where}: perplexity"].paper == "GPT-2-Large: 19.436"
    else:
        logits = next(iter(one.models.values()))(one.data.inputs(one.data.x_test)).detach()
        want = torch.nn.functional.cross_entropy(logits, torch.from_numpy(one.data.y_test))
        assert loss == pytest.approx(float(want), abs=1e-3)
        assert second == pytest.approx(100 * float((logits.argmax(1).numpy() == one.data.y_test).mean()))
    assert "+-" in str(rows[f"{where}: mean layer alpha"].ours)
    for metric in FIGURE_METRICS:
        figure = one.figures[0] if metric == "alpha" else one.figures[1]
        assert f"{figure}, {one.name}: {metric}, mean rho/tau over layers" in rows
        assert "n " in rows[f"{figure}, {one.name}: {metric}, all points rho/tau"].note
    assert all(Path(path).stat().st_size > 1000 for path in case_figures(one, found, tmp_path))


def test_only_a_finished_study_stands_for_the_quick_one(tmp_path: Path) -> None:
    assert not _finished(tmp_path)
    about = {"identity": "x", "name": "study", "units": 2, "performance": {"name": "loss"}}
    row = {"network": "n", "layer": "l", "intervention": "intact", "draw": 0}
    with Store(tmp_path / "study.sqlite", about=about) as store:
        store.put(Finished("a", "a", {"rows": [row | {"status": "done"}]}))
    assert not _finished(tmp_path)
    with Store(tmp_path / "study.sqlite") as store:
        store.put(Finished("b", "b", {"rows": [row | {"status": "failed", "draw": 1}]}))
    assert _finished(tmp_path)


def test_the_projection_keeps_areas() -> None:
    """Equal Earth is an equal-area projection: small squares anywhere keep their areas in proportion."""
    areas = []
    for latitude in (0.0, 40.0, 75.0):
        step = 0.01
        corners = torch.tensor(
            [[latitude, 10.0], [latitude + step, 10.0], [latitude, 10.0 + step]], dtype=torch.float64
        )
        origin, north, east = _equal_earth(corners)
        area = torch.linalg.det(torch.stack([east - origin, north - origin]))
        areas.append(float(area) / np.cos(np.deg2rad(latitude + step / 2)))
    assert np.ptp(areas) < 1e-3 * np.mean(areas)


def test_a_users_own_language_model_gets_its_line(tmp_path: Path) -> None:
    """A tiny GPT-2 saved as a Hugging Face directory, token ids as data: the paper's form, no stand-in."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from strati.papers.robust_and_critical.own import pretrained_own

    torch.manual_seed(0)
    settings = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(settings).save_pretrained(tmp_path / "tiny")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 50, 400))
    found = pretrained_own(tmp_path / "tiny", tmp_path / "tokens.npy", quick=True, folder=tmp_path / "out")
    rows = {row.what: row for row in found.rows}
    loss = rows["table 3, tiny: loss"]
    assert loss.paper is None and loss.before is None
    assert loss.ours == pytest.approx(np.log(50), abs=0.2)  # untrained: uniform over the vocabulary
    assert found.mode == "quick" and len(found.figures) == 2
    assert rows["tiny: layers by class"].note == "0 points failed"


def test_images_by_class_go_to_a_resnet_of_the_users(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image")
    from strati.papers.robust_and_critical.own import pretrained_own

    torch.manual_seed(0)
    settings = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2
    )
    transformers.ResNetForImageClassification(settings).eval().save_pretrained(tmp_path / "resnet")
    rng = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            image.fromarray(pixels).save(tmp_path / "images" / label / f"{number}.png")
    found = pretrained_own(tmp_path / "resnet", tmp_path / "images", quick=True, folder=tmp_path / "out")
    assert {row.what for row in found.rows} >= {
        "table 2, resnet: accuracy",
        "table 2, resnet: mean layer alpha",
    }


def test_the_papers_networks_are_known_by_their_shape() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from strati.papers.robust_and_critical.own import _paper_name

    with torch.device("meta"):
        small = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        vit = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
        other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3))
    assert _paper_name(small, "x") == "GPT-2"
    assert _paper_name(vit, "x") == "ViT"
    assert _paper_name(other, "x") is None
