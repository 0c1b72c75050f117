"""The tables and figures of ``reproduce pretrained``, on networks small enough to run here."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from strati.interventions.study import study
from strati.interventions.study_config import FORMAT, StudyConfig, StudyOrigin
from strati.interventions.tasks import StudyData
from strati.jobs.store import Finished, Store
from strati_reproductions.robust_and_critical.pretrained import _equal_earth, _finished
from strati_reproductions.robust_and_critical.pretrained_tables import (
    FIGURE_METRICS,
    PretrainedCase,
    case_captions,
    case_figures,
    case_rows,
)
from strati_reproductions.rows import caption
from strati_reproductions.trained.networks import CifarResNet, Transformer


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
    where = f"{table}, {one.label}"
    assert one.label in ("resnet20 (for ResNet34)", "smollm2 (for GPT-2-Large)")
    parameters = sum(p.numel() for p in next(iter(one.models.values())).parameters())
    assert rows[f"{where}: parameters"].ours == f"{parameters / 1e6:.1f}M"
    loss, second = rows[f"{where}: loss"].ours, rows[f"{where}: {performance}"].ours
    assert isinstance(loss, float) and isinstance(second, float)
    if performance == "perplexity":
        assert np.exp(loss) == pytest.approx(second, rel=1e-2)
        assert rows[f"{where}: perplexity"].paper == "19.436 (GPT-2-Large)"
    else:
        logits = next(iter(one.models.values()))(one.data.inputs(one.data.x_test)).detach()
        want = torch.nn.functional.cross_entropy(logits, torch.from_numpy(one.data.y_test))
        assert loss == pytest.approx(float(want), abs=1e-3)
        assert second == pytest.approx(100 * float((logits.argmax(1).numpy() == one.data.y_test).mean()))
    alpha = rows[f"{where}: mean layer alpha"]
    assert isinstance(alpha.ours, float) and alpha.error is not None and "+-" in str(alpha.paper)
    for metric in FIGURE_METRICS:
        start = f"{one.figures[0] if metric == 'alpha' else one.figures[1]}, {one.label}: {metric}"
        if metric == "alpha":
            assert rows[f"{start}, mean Spearman over layers"].paper == one.paper.spearman  # type: ignore[union-attr]
            assert isinstance(rows[f"{start}, mean RMSE of the line over layers"].ours, float)
        else:
            assert str(rows[f"{start}, mean rho / tau / RMSE over layers"].ours).count(" / ") == 2
        assert "n " in rows[f"{start}, all points rho / tau / RMSE"].note
    drawn = case_figures(one, found, tmp_path)
    assert [Path(path).suffix for path in drawn] == [".png", ".svg"] * 2
    assert all(Path(path).stat().st_size > 1000 for path in drawn)
    assert all(caption(Path(path).name, case_captions(one)) for path in drawn)
    changed = (found.frame()["intervention"] == "rerandomise").sum()
    assert Path(drawn[0]).with_suffix(".csv").read_text().count("re-randomised") == changed


@pytest.mark.parametrize("performance", ["accuracy", "perplexity"])
def test_the_line_of_the_table_is_of_all_the_data_though_the_draws_are_of_a_part(
    performance: str, tmp_path: Path
) -> None:
    one = case(performance)
    data = one.data
    labels = None if data.y_test is None else data.y_test[:2]
    part = replace(one, data=replace(data, x_test=data.x_test[:2], y_test=labels), whole=data)
    tables = []
    for name, which in (("all", one), ("part", part)):
        found = study(dict(which.models), data=which.data, config=which.config, out=tmp_path / name)
        rows = {row.what: row.ours for row in case_rows(which, found)}
        tables.append([rows[f"{one.table}, {one.label}: {m}"] for m in ("loss", performance)])
        tables.append([float(found.frame()["intact_performance"].mean())])
    assert tables[0] == pytest.approx(tables[2], abs=2e-3)
    assert tables[1] != tables[3]


def test_only_a_finished_study_stands_for_the_quick_one(tmp_path: Path) -> None:
    assert not _finished(tmp_path)
    about = {"identity": "x", "name": "study", "units": 2, "format": FORMAT, "performance": {"name": "loss"}}
    about["origin"] = asdict(StudyOrigin())
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


@pytest.mark.slow
def test_a_users_own_language_model_gets_its_line(tmp_path: Path) -> None:
    """A tiny GPT-2 saved as a Hugging Face directory, token ids as data: the paper's form, no stand-in."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from strati_reproductions.robust_and_critical.user_model import pretrained_own

    torch.manual_seed(0)
    settings = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(settings).save_pretrained(tmp_path / "tiny")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 50, 400))
    found = pretrained_own(tmp_path / "tiny", tmp_path / "tokens.npy", quick=True, folder=tmp_path / "out")
    rows = {row.what: row for row in found.rows}
    loss = rows["table 3, tiny: loss"]
    assert loss.paper is None and loss.before is None
    assert loss.ours == pytest.approx(np.log(50), abs=0.2)  # untrained: uniform over the vocabulary
    assert found.mode == "quick" and len(found.figures) == 4
    assert rows["tiny: layers by class"].note == "0 points failed"


@pytest.mark.slow
def test_images_by_class_go_to_a_resnet_of_the_users(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image")
    from strati_reproductions.robust_and_critical.user_model import pretrained_own

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
    from strati_reproductions.robust_and_critical.user_model import _paper_name

    with torch.device("meta"):
        small = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        vit = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
        other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3))
    assert _paper_name(small) == "GPT-2"
    assert _paper_name(vit) == "ViT"
    assert _paper_name(other) is None


def _saved(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Tensors of these shapes at random, small, norms and their variances near one."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    ones = (
        "norm1.weight",
        "norm2.weight",
        "norm.weight",
        "ln.weight",
        "ln_1.weight",
        "ln_2.weight",
        "running_var",
    )
    tensors = {
        name: (
            np.ones(shape)
            if name.endswith((*ones, "bn1.weight", "bn2.weight"))
            else 0.1 * rng.normal(size=shape)
        )
        for name, shape in shapes.items()
    }
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, path)
    return path


def torchvision_vit(width: int = 192) -> dict[str, tuple[int, ...]]:
    block = "encoder.layers.encoder_layer_0"
    vectors = [f"{block}.ln_1", f"{block}.ln_2", "encoder.ln"]
    found: dict[str, tuple[int, ...]] = {
        "class_token": (1, 1, width), "conv_proj.weight": (width, 3, 4, 4), "conv_proj.bias": (width,),
        "encoder.pos_embedding": (1, 5, width), "heads.head.weight": (4, width), "heads.head.bias": (4,),
        f"{block}.self_attention.in_proj_weight": (3 * width, width),
        f"{block}.self_attention.in_proj_bias": (3 * width,),
        f"{block}.self_attention.out_proj.weight": (width, width), f"{block}.self_attention.out_proj.bias": (width,),
        f"{block}.mlp.0.weight": (32, width), f"{block}.mlp.0.bias": (32,),
        f"{block}.mlp.3.weight": (width, 32), f"{block}.mlp.3.bias": (width,),
    }  # fmt: skip
    return found | {f"{name}.{kind}": (width,) for name in vectors for kind in ("weight", "bias")}


def torchvision_resnet() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"conv1.weight": (8, 3, 7, 7), "fc.weight": (4, 64), "fc.bias": (4,)}
    norms = {"bn1": 8}
    inputs = 8
    for stage, width in enumerate((8, 16, 32, 64), 1):
        block = f"layer{stage}.0"
        found |= {
            f"{block}.conv1.weight": (width, inputs, 3, 3),
            f"{block}.conv2.weight": (width, width, 3, 3),
        }
        norms |= {f"{block}.bn1": width, f"{block}.bn2": width}
        if width != inputs:
            found[f"{block}.downsample.0.weight"] = (width, inputs, 1, 1)
            norms[f"{block}.downsample.1"] = width
        inputs = width
    for name, width in norms.items():
        found |= {f"{name}.{kind}": (width,) for kind in ("weight", "bias", "running_mean", "running_var")}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timm", "torchvision", "resnet"])
def test_files_named_by_timm_and_torchvision_get_their_line(kind: str, tmp_path: Path) -> None:
    from strati.io.to_module import as_module
    from strati.io.vision_models import Timm, TorchVision
    from strati_reproductions.robust_and_critical.user_model import HALF, IMAGENET, _scale, pretrained_own
    from strati_reproductions.robust_and_critical.vit_cifar import shapes

    side = 8 if kind == "torchvision" else 32
    named = {"timm": shapes(192, 1, 4), "torchvision": torchvision_vit(), "resnet": torchvision_resnet()}[
        kind
    ]
    file = _saved(tmp_path / f"{kind}.safetensors", named)
    rng = np.random.default_rng(1)
    x = rng.integers(0, 255, (12, side, side, 3), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=x, y=rng.integers(0, 4, 12))
    found = pretrained_own(file, tmp_path / "data.npz", quick=True, folder=tmp_path / "out")
    rows = {row.what: row for row in found.rows}
    assert isinstance(rows[f"table 2, {file.name}: accuracy"].ours, float)
    assert rows[f"{file.name}: layers by class"].note == "0 points failed"
    drawn = {Path(path).name for path in found.figures}
    figures = ("5-left", "8") if kind == "resnet" else ("5-right", "9")
    assert {f"figure-{n}-{file.name}.png" for n in figures} <= drawn
    network = as_module(file)
    assert isinstance(network, Timm | TorchVision) is (kind != "resnet")
    assert _scale(network, file) == (HALF if kind == "timm" else IMAGENET)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}'
    )
    assert _scale(network, file) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))


def test_a_training_of_the_vit_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strati_reproductions.robust_and_critical import vit_cifar

    rng = np.random.default_rng(0)
    data = {
        "x_train": rng.integers(0, 255, (12, 3, 32, 32), dtype=np.uint8),
        "y_train": rng.integers(0, 10, 12),
    }
    monkeypatch.setattr(vit_cifar, "images", lambda: data)
    whole = vit_cifar.trained_vit(tmp_path / "a.pt", seed=0, epochs=6)
    stopped: list[str] = []

    def stop(text: str) -> None:
        stopped.append(text)
        if len(stopped) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vit_cifar.trained_vit(tmp_path / "b.pt", seed=0, epochs=6, tick=stop)
    again = vit_cifar.trained_vit(tmp_path / "b.pt", seed=0, epochs=6, tick=stopped.append)
    assert len(stopped) == 6
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
