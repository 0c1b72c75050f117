"""Whole comparisons on real checkpoints: fine-tuning, small against large, series; and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import run_strati
from safetensors.numpy import load_file, save_file

import strati
from strati import embedded
from strati.comparison.summary import percent
from strati.core.errors import BadInputError

INITIAL, TRAINED = embedded.path("digits-mlp-init.safetensors"), embedded.path("digits-mlp.safetensors")


@pytest.fixture(scope="module")
def trained() -> dict[str, np.ndarray]:
    return load_file(TRAINED)


def test_initial_against_trained() -> None:
    result = strati.compare(INITIAL, TRAINED)
    assert result.matched_by == "name"
    assert [layer.name for layer in result.layers] == ["0.weight", "2.weight", "4.weight"]
    a, b = load_file(INITIAL), load_file(TRAINED)
    for layer in result.layers:
        before, after = (t[layer.name].astype(np.float64) for t in (a, b))
        assert layer.relative_change == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before))
        values = np.linalg.svd(after - before, compute_uv=False) ** 2
        assert layer.update_stable_rank == pytest.approx(values.sum() / values.max(), rel=1e-9)
        assert layer.metrics["frobenius_norm"][1] == pytest.approx(np.linalg.norm(after), rel=1e-6)
    assert result.layers[0].metrics["phase"] == ("random-like", "bulk+spikes")
    assert result.movement.moved == result.movement.shared == 6


def test_json_form() -> None:
    found = json.loads(strati.compare(INITIAL, TRAINED).to_json())
    assert found["schema"] == "strati.compare/1"
    assert len(found["networks"]) == 2
    needed = {
        "name",
        "role",
        "metrics",
        "spectral_distance",
        "relative_change",
        "update_stable_rank",
        "subspace_overlap",
    }
    assert needed <= set(found["layers"][0])
    assert len(found["layers"][0]["metrics"]["alpha"]) == 2
    assert "eigenvalues" not in found["layers"][0]
    assert found["series"] is None
    kept = json.loads(strati.compare(INITIAL, TRAINED, eigenvalues=True).to_json())
    assert len(kept["layers"][0]["eigenvalues"][1]) == 64


def test_identical_networks() -> None:
    result = strati.compare(TRAINED, TRAINED)
    assert result.movement is not None
    assert result.movement.moved == 0
    assert all(layer.spectral_distance == 0 and layer.relative_change == 0 for layer in result.layers)
    assert {layer.update_kind for layer in result.layers} == {"untouched"}


def test_one_low_rank_update_is_found_where_it_is(trained: dict[str, np.ndarray], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    changed = dict(trained)
    step = 0.1 * rng.standard_normal((64, 2)) @ rng.standard_normal((2, 96))
    changed["2.weight"] = (trained["2.weight"] + step).astype(np.float32)
    save_file(changed, tmp_path / "tuned.safetensors")
    result = strati.compare(TRAINED, tmp_path / "tuned.safetensors")
    by_name = {layer.name: layer for layer in result.layers}
    assert (by_name["2.weight"].update_rank, by_name["2.weight"].update_kind) == (2, "low-rank")
    assert by_name["0.weight"].relative_change == 0
    assert by_name["0.weight"].update_kind == "untouched"
    assert (result.movement.moved, result.movement.shared) == (1, 6)


def test_series(trained: dict[str, np.ndarray], tmp_path: Path) -> None:
    start = load_file(INITIAL)
    paths = []
    for i, t in enumerate(np.linspace(0, 1, 5)):
        mixed = {k: ((1 - t) * start[k] + t * trained[k]).astype(np.float32) for k in start}
        paths.append(tmp_path / f"step-{i}.safetensors")
        save_file(mixed, paths[-1])
    result = strati.compare(*paths, series=True)
    assert result.series is not None
    assert result.series.labels == tuple(f"step-{i}" for i in range(5))
    layer = result.series.layers[0]
    assert layer.phase[0] == "random-like"
    assert layer.leaves_random_like is not None
    assert layer.relative_change[0] == 0
    assert list(layer.relative_change) == sorted(layer.relative_change)
    assert not result.warnings
    backwards = strati.compare(*paths[::-1], series=True)
    assert [flag.code for flag in backwards.warnings] == ["out-of-order"]


def test_small_against_large(tmp_path: Path) -> None:
    def save(blocks: int, width: int, prefix: str) -> Path:
        rng = np.random.default_rng(blocks)
        tensors = {}
        for i in range(blocks):
            for part in ("attn.q_proj", "mlp.up_proj"):
                tensors[f"{prefix}.{i}.{part}.weight"] = rng.standard_normal((width, width)).astype(
                    np.float32
                )
        path = tmp_path / f"{blocks}.safetensors"
        save_file(tensors, path)
        return path

    result = strati.compare(save(3, 40, "layers"), save(7, 60, "layers"))
    assert result.matched_by == "role, block and place"
    assert result.layers[0].relative_change is None
    assert result.layers[0].spectral_distance is not None
    assert {flag.code for flag in result.warnings} == {"unmatched-layers", "shapes-differ"}
    assert result.layers[-1].partner[0].startswith("layers.6.")


def test_nan_weights_never_crash(trained: dict[str, np.ndarray], tmp_path: Path) -> None:
    broken = dict(trained)
    broken["0.weight"] = np.where(np.eye(96, 64) > 0, np.nan, trained["0.weight"]).astype(np.float32)
    save_file(broken, tmp_path / "broken.safetensors")
    result = strati.compare(TRAINED, tmp_path / "broken.safetensors")
    first = result.layers[0]
    assert first.relative_change is None
    assert [flag.code for flag in first.warnings] == ["not-finite"]
    assert result.layers[1].relative_change == 0
    json.loads(result.to_json())


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    save_file({"conv.weight": np.ones((4, 4, 3, 3), np.float32)}, tmp_path / "conv.safetensors")
    with pytest.raises(BadInputError, match="corresponds"):
        strati.compare(TRAINED, tmp_path / "conv.safetensors")
    with pytest.raises(BadInputError, match="two networks"):
        strati.compare(TRAINED)


def test_pictures(tmp_path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    strati.compare(INITIAL, TRAINED).plot().savefig(tmp_path / "a.svg")
    strati.compare(INITIAL, TRAINED, series=True).plot().savefig(tmp_path / "b.svg")
    assert (tmp_path / "a.svg").stat().st_size > 5000
    assert (tmp_path / "b.svg").stat().st_size > 5000


def test_the_verb(tmp_path: Path) -> None:
    files = [
        "--json",
        str(tmp_path / "c.json"),
        "--export",
        str(tmp_path / "c.csv"),
        "--html",
        str(tmp_path / "c.html"),
    ]
    done = run_strati("compare", INITIAL, TRAINED, *files)
    assert done.returncode == 0, done.stderr
    assert "random-like → learned" in done.stdout
    assert len(done.stdout.split(". ")[0]) <= 100
    assert "\nnext: strati " in done.stdout
    assert json.loads((tmp_path / "c.json").read_text())["layers"][0]["eigenvalues"]
    assert (tmp_path / "c.csv").read_text().startswith("name,role,block,spectral_distance")
    assert "<!doctype html>" in (tmp_path / "c.html").read_text()[:100].lower()


@pytest.mark.slow
def test_minilm_and_its_descendant_move_as_measured() -> None:
    from strati_reproductions import zoo

    try:
        base, tuned = zoo.path("minilm"), zoo.path("minilm-tuned")
    except BadInputError as error:
        pytest.skip(str(error))
    moved = strati.compare(base, tuned).movement
    assert moved is not None
    assert (moved.moved, moved.shared) == (101, 103)
    assert moved.median_relative_change == pytest.approx(0.011, abs=0.001)
    assert set(moved.untouched) == {"pooler.dense.weight", "pooler.dense.bias"}


def resnet(path: Path, blocks: int, seed: int = 0) -> Path:
    """A CIFAR ResNet of 6 n + 2 layers by its names and shapes, narrow, with its stem and head."""
    rng = np.random.default_rng(seed)
    widths = (4, 8, 16)
    shapes = {"conv1.weight": (4, 3, 3, 3)}
    before = 4
    for stage, width in enumerate(widths, 1):
        for block in range(blocks):
            shapes[f"layer{stage}.{block}.conv1.weight"] = (width, before, 3, 3)
            shapes[f"layer{stage}.{block}.conv2.weight"] = (width, width, 3, 3)
            before = width
    shapes["linear.weight"] = (10, 16)
    save_file({f"module.{k}": rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}, path)
    return path


def test_resnet_32_against_56_pairs_what_belongs_together(tmp_path: Path) -> None:
    result = strati.compare(resnet(tmp_path / "32.safetensors", 5), resnet(tmp_path / "56.safetensors", 9))
    assert len(result.layers) == 32
    for layer in json.loads(result.to_json())["layers"]:
        (partner,) = layer["partner"]
        mine, other = layer["name"].removeprefix("module."), partner.removeprefix("module.")
        if mine.startswith("layer"):
            assert mine.split(".")[0] == other.split(".")[0]
            assert mine.split(".")[2] == other.split(".")[2]
        else:
            assert mine == other
        assert layer["relative_change"] is not None  # all shapes agree, as they must for the right partners
    assert {u.network for u in result.unmatched} == {1}
    assert len(result.unmatched) == 24


def test_partners_and_errors_are_in_the_table(tmp_path: Path) -> None:
    from rich.console import Console

    result = strati.compare(resnet(tmp_path / "20.safetensors", 3), resnet(tmp_path / "32.safetensors", 5))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(result.summary())
    shown = captured.get()
    row = next(line for line in shown.split("\n") if line.strip().startswith("layer2.1.conv2"))
    assert "layer2.2.conv2" in row
    frame = result.frame()
    assert frame["partner"].iloc[0] == "module.conv1.weight"
    assert "alpha_stderr_1" in frame.columns
    assert "few-eigenvalues" in frame["warnings"].iloc[0]


def test_warnings_of_either_network_are_kept(trained: dict[str, np.ndarray], tmp_path: Path) -> None:
    flat = dict(trained)
    flat["2.weight"] = np.full_like(trained["2.weight"], 0.5)
    save_file(flat, tmp_path / "flat.safetensors")
    layer = strati.compare(TRAINED, tmp_path / "flat.safetensors").layers[1]
    constant = [flag for flag in layer.warnings if flag.code == "constant"]
    assert [flag.text.split(":")[0] for flag in constant] == ["network 1"]


def test_the_size_line_is_of_layers_alone() -> None:
    """Biases change too; the range in line 2 is that of the layers."""
    result = strati.compare(INITIAL, TRAINED)
    sizes = [layer.relative_change for layer in result.layers]
    line = result.lines()[1]
    for share in (min(sizes), float(np.median(sizes)), max(sizes)):
        assert percent(share, 2) in line


def test_a_phase_that_is_not_known_is_not_random_like(trained: dict[str, np.ndarray], tmp_path: Path) -> None:
    start = load_file(INITIAL)
    broken = dict(trained)
    broken["0.weight"] = np.full_like(trained["0.weight"], np.nan)
    save_file(start, tmp_path / "step-0.safetensors")
    save_file(broken, tmp_path / "step-1.safetensors")
    result = strati.compare(tmp_path / "step-0.safetensors", tmp_path / "step-1.safetensors", series=True)
    assert result.series is not None
    assert result.series.layers[0].phase == ("random-like", None)
    assert "0.weight ends random-like" not in result.text()
    assert "0.weight was last random-like; its last phase is not known" in result.text()


def test_options_follow_the_one_rule() -> None:
    config = strati.configs.CompareConfig(eigenvalues=True)
    assert "eigenvalues" in strati.compare(INITIAL, TRAINED, config=config).to_dict()["layers"][0]
    assert (
        "eigenvalues"
        not in strati.compare(INITIAL, TRAINED, config=config, eigenvalues=False).to_dict()["layers"][0]
    )
    with pytest.raises(BadInputError, match="did you mean 'series'"):
        strati.compare(INITIAL, TRAINED, serie=True)
    with pytest.raises(BadInputError, match="merge"):
        strati.compare(INITIAL, TRAINED, INITIAL, series=True, merge=True)


def test_a_folder_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strati.comparison import pair_update

    plain = strati.compare(INITIAL, TRAINED).to_json()
    assert strati.compare(INITIAL, TRAINED, out=tmp_path / "run", workers=1).to_json() == plain
    assert {p.name for p in (tmp_path / "run").glob("*.sqlite")} == {"spectra.sqlite", "updates.sqlite"}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(pair_update, "update_between", refuse)
    assert strati.compare(INITIAL, TRAINED, out=tmp_path / "run", workers=1).to_json() == plain
    with pytest.raises(BadInputError, match="out="):
        strati.compare(INITIAL, TRAINED, engine="ray")


def test_a_stopped_comparison_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second update never comes the first time; the first one is not computed again."""
    from strati.comparison import pair_update

    real = pair_update.update_between
    done: list[tuple[int, ...]] = []

    def once(a: np.ndarray, b: np.ndarray, **options: object) -> object:
        if done:
            raise KeyboardInterrupt
        done.append(a.shape)
        return real(a, b, **options)

    monkeypatch.setattr(pair_update, "update_between", once)
    with pytest.raises((KeyboardInterrupt, strati.StratiError)):
        strati.compare(INITIAL, TRAINED, out=tmp_path / "run", workers=1)
    counted: list[tuple[int, ...]] = []

    def count(a: np.ndarray, b: np.ndarray, **options: object) -> object:
        counted.append(a.shape)
        return real(a, b, **options)

    monkeypatch.setattr(pair_update, "update_between", count)
    result = strati.compare(INITIAL, TRAINED, out=tmp_path / "run", workers=1)
    assert len(counted) == 2
    assert result.to_json() == strati.compare(INITIAL, TRAINED).to_json()


def test_workers_and_processes_change_nothing(tmp_path: Path) -> None:
    one = strati.compare(INITIAL, TRAINED, workers=1).to_json()
    assert strati.compare(INITIAL, TRAINED, workers=3).to_json() == one
    assert strati.compare(INITIAL, TRAINED, workers=2, out=tmp_path / "run").to_json() == one


def test_several_networks_are_never_in_memory_at_once(tmp_path: Path) -> None:
    import tracemalloc

    import scipy.stats  # noqa: F401 - imports are no part of what is measured

    rng = np.random.default_rng(0)
    paths = []
    for n in range(4):
        paths.append(tmp_path / f"step-{n}.safetensors")
        layers = {
            f"layers.{i}.fc.weight": rng.standard_normal((160, 160)).astype(np.float32) for i in range(40)
        }
        save_file(layers, paths[-1])
    strati.compare(*paths[:2], layers="block:0")  # imports are no part of it
    tracemalloc.start()
    strati.compare(*paths, workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one = 40 * 160 * 160 * 4
    assert peak < 1.5 * one, f"{peak / one:.2f} networks"


def layers_of(seed: int, *shapes: tuple[int, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"fc{i}.weight": rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}


def test_unrelated_networks_are_called_unrelated() -> None:
    """Two draws of random weights, and two whose units share a mean but no order."""
    shapes = (96, 64), (64, 96), (10, 64)
    first, second = layers_of(0, *shapes), layers_of(1, *shapes)
    result = strati.compare(first, second)
    assert result.related is False
    assert result.to_dict()["related"] is False
    assert "unrelated" in result.lines()[0]
    pattern = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    shifted = [{"fc0.weight": net["fc0.weight"] + pattern} for net in (first, second)]
    assert strati.compare(*shifted).related is not True


def test_related_networks_are_not_called_unrelated(trained: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    far = {k: (w + 3 * w.std() * rng.standard_normal(w.shape)).astype(w.dtype) for k, w in trained.items()}
    for other in (TRAINED, far, {k: w.astype(np.float16) for k, w in trained.items()}):
        assert strati.compare(trained, other).related is True
    assert strati.compare(INITIAL, TRAINED).related is True
    # The same weights in another basis: equal spectra, no common entry. Nothing can be said.
    turned = {"fc.weight": np.linalg.qr(rng.standard_normal((96, 96)))[0] @ trained["0.weight"]}
    assert strati.compare({"fc.weight": trained["0.weight"]}, turned).related is None
    assert strati.compare(layers_of(0, (30, 20)), layers_of(1, (20, 40))).related is None


def test_only_new_warnings_are_in_the_table(trained: dict[str, np.ndarray]) -> None:
    flat = dict(trained) | {"2.weight": np.full_like(trained["2.weight"], 0.5)}
    result = strati.compare(INITIAL, flat)
    by_name = {layer.name: layer for layer in result.layers}
    assert "constant" in by_name["2.weight"].new_warnings
    assert "noise-like" in {flag.code for flag in by_name["0.weight"].warnings}
    assert "noise-like" not in by_name["0.weight"].new_warnings


def test_progress_counts_the_layers_that_are_analysed() -> None:
    """Fused matrices are taken apart, so that there are more units than stored matrices."""
    from strati.jobs.progress import Ticker

    rng = np.random.default_rng(0)
    names = [f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    apart = {name: rng.standard_normal((24, 24)).astype(np.float32) for name in names}
    fused = {"transformer.h.0.attn.c_attn.weight": np.concatenate(list(apart.values())).astype(np.float32)}
    done: list[str] = []
    totals: list[int] = []
    strati.compare(apart, fused, tick=Ticker(done.append, totals.append))
    assert totals == [len(done)]
