"""The large-scale experiment of robust-and-critical-layers on the pretrained networks that are available.

Re-randomisation of every layer, ten draws each: ResNet-20 on CIFAR-10, a ViT trained here on CIFAR-10, stories15M on
TinyStories, SmolLM2-135M on WikiText, the three GeoCLIP location MLPs. Tables 2 and 3 and figures 5, 6, 8-11 in the
paper's form; its own networks (ResNet-34, ViT-B/16, GPT-2, GPT-2-Large) run through the same code (``own``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, StratiError
from strati.core.plugins import require
from strati.core.results import Flag, Tick
from strati.interventions.study import load_study, study
from strati.interventions.study_config import STORE, StudyConfig
from strati.io.llama_gguf import llama_from_gguf
from strati.jobs.engine import cores
from strati_reproductions import zoo
from strati_reproductions.datasets import external_data, wikitext_tokens
from strati_reproductions.pictures import drawn
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.robust_and_critical.pretrained_tables import (
    PretrainedCase,
    case_captions,
    case_figures,
    case_rows,
)
from strati_reproductions.robust_and_critical.vit_cifar import EPOCHS, MEAN, STD, images, trained_vit

if TYPE_CHECKING:
    from torch import nn


_IMAGES, _TOKENS = 2000, 256
"""What each changed layer is measured on (vision transformer: half); the tables' own lines are of all the data."""


def pretrained(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Run (or resume) all studies; a network that is not available is left out with its reason.

    Quick: two draws, fewer images, tokens and places, and every third block of SmolLM2; but a full study that is
    already finished in the same folder is shown instead. The rows say what was run.
    """
    require("torch", "torch", "running pretrained networks")
    rows: list[Row] = []
    figures: list[str] = []
    warnings: list[Flag] = []
    captions: dict[str, str] = {}
    cases: dict[str, Callable[[bool, int], PretrainedCase]] = {
        "stories15m": _stories15m,
        "stories15m_initial": _stories15m_initial,
        "geoclip": _geoclip,
        "resnet20": _resnet20,
        "vit": partial(_vit, folder=folder, tick=tick),
        "smollm2": _smollm2,
    }
    for name, make in cases.items():
        full = folder / f"full-seed-{seed}" / name
        small = quick and not _finished(full)
        try:
            case = make(small, seed)
        except StratiError as error:
            warnings.append(Flag("left-out", str(error)))
            continue
        place = folder / f"quick-seed-{seed}" / name if small else full
        measured: dict[str, Any] = {"evaluate": case.evaluate, "data": case.data}
        run: dict[str, Any] = {"workers": cores(), "resume": "the same command"}
        measured_study = (
            load_study(place)  # finished before, by any version of strati
            if _finished(place)
            else study(case.models, **measured, config=case.config, out=place, tick=tick, **run)
        )
        rows += case_rows(case, measured_study)
        figures += drawn(case_figures, case, measured_study, place)
        captions |= case_captions(case)
    if not rows:
        raise BadInputError(
            "pretrained", "none of the networks is available: " + "; ".join(w.text for w in warnings)
        )
    title = "Re-randomised layers of pretrained networks: robust-and-critical-layers, section 5"
    return Reproduction("pretrained", title, tuple(rows), tuple(figures), tuple(warnings), captions=captions)


def _finished(place: Path) -> bool:
    if not (place / STORE).is_file():
        return False
    there = load_study(place)
    return there.done + there.failed == there.units


def _config(draws: int, seed: int, performance: str, batch: int, **options: Any) -> StudyConfig:
    return StudyConfig(
        interventions=("rerandomise",),
        draws=draws,
        seed=seed,
        performance=performance,
        batch=batch,
        **options,
    )


def _resnet20(quick: bool, seed: int) -> PretrainedCase:
    from strati.interventions.tasks import StudyData

    path = external_data("resnet20-cifar10", "resnet20-12fca82f.th")
    with np.load(zoo.path("cifar10")) as file:
        x, y = file["x_test"], file["y_test"]
    x = np.ascontiguousarray(np.moveaxis(x, -1, 1)) if x.shape[-1] == 3 else x
    count = 1000 if quick else _IMAGES
    scale = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    all_images = StudyData("images", 10, x[:0], None, x, y, **scale)
    from strati_reproductions.trained.networks import open_resnet

    model = open_resnet(path)
    draws = 2 if quick else 10
    return PretrainedCase(
        "resnet20",
        {"resnet20": model},
        _config(draws, seed, "accuracy", 250),
        data=replace(all_images, x_test=x[:count], y_test=y[:count]),
        whole=None if quick else all_images,
        size=f"{draws} draws, {count} images for each",
        table="table 2",
        figures=("figure 5 left", "figure 8"),
    )


def _vit(quick: bool, seed: int, *, folder: Path, tick: Tick) -> PretrainedCase:
    """A vision transformer trained here; quick ones for an epoch on some images."""
    from strati.interventions.tasks import StudyData

    epochs, rows, count, draws = (1, 2560, 500, 2) if quick else (EPOCHS, None, _IMAGES // 2, 10)
    file = folder / f"vit-seed-{seed}-{epochs}-epochs.pt"
    model = trained_vit(file, seed=seed, epochs=epochs, rows=rows, tick=tick)
    x, y = (images()[name] for name in ("x_test", "y_test"))
    all_images = StudyData("images", 10, x[:0], None, x, y, mean=MEAN, std=STD)
    name = "vit-cifar10"
    return PretrainedCase(
        name,
        {name: model},
        _config(draws, seed, "accuracy", 250, init="normal"),
        data=replace(all_images, x_test=x[:count], y_test=y[:count]),
        whole=None if quick else all_images,
        size=f"trained here, {epochs} epochs on CIFAR-10; {draws} draws, {count} images for each",
        table="table 2",
        figures=("figure 5 right", "figure 9"),
    )


def _stories15m(quick: bool, seed: int) -> PretrainedCase:
    from strati.interventions.tasks import IGNORED, StudyData
    from strati.io.to_module import as_module
    from strati_reproductions.zoo.llama2c import Tokenizer

    home = zoo.path("stories15m")
    tokenizer = Tokenizer(home / "tokenizer.bin")
    text = external_data("tinystories", "tinystories_sample.txt").read_text("utf-8")
    stories = [tokenizer.encode(s.strip())[:256] for s in text.split("<|endoftext|>") if s.strip()]
    x = np.full((len(stories), max(map(len, stories))), IGNORED)
    for row, story in zip(x, stories, strict=True):
        row[: len(story)] = story
    draws = 2 if quick else 10
    return PretrainedCase(
        "stories15m",
        {"stories15m": as_module(home)},
        _config(draws, seed, "loss", 5, init="moments", layers=("model.layers.*",)),
        data=StudyData("tokens", 32000, x[:0], None, x, None),
        size=f"{draws} draws, {len(stories)} stories",
        table="table 3",
        figures=("figure 6", "figure 10"),
    )


def _stories15m_initial(quick: bool, seed: int) -> PretrainedCase:
    """The same network, drawn from the distribution that such a network starts from instead of the layer's moments."""
    case = _stories15m(quick, seed)
    return replace(
        case,
        name="stories15m-initial",
        models={"stories15m-initial": next(iter(case.models.values()))},
        config=replace(case.config, init="normal"),
        figures=("figure 6, initial distribution", "figure 10, initial distribution"),
    )


def _smollm2(quick: bool, seed: int) -> PretrainedCase:
    from strati.interventions.tasks import StudyData

    path = zoo.path("smollm2")
    tokens = wikitext_tokens(path, 2048)
    model = llama_from_gguf(path)
    # two windows of 1024 tokens, GPT-2's context: the measured 17.6 is of these (one of 2048 gives 13.4)
    windows = tokens.reshape(2, 1024)
    part = tokens[: 512 if quick else _TOKENS][None]
    settings: Any = model.config
    all_windows = StudyData("tokens", int(settings.vocab_size), windows[:0], None, windows, None)
    layers = tuple(f"model.layers.{block}.*" for block in range(0, 30, 3 if quick else 1))
    draws = 2 if quick else 10
    return PretrainedCase(
        "smollm2",
        {"smollm2": model.eval()},
        _config(draws, seed, "perplexity", 1, layers=layers),
        data=replace(all_windows, x=part[:0], x_test=part),
        whole=None if quick else all_windows,
        size=f"{draws} draws, {part.size} tokens for each, {len(layers)} of 30 blocks",
        table="table 3",
        figures=("figure 6", "figure 11"),
    )


def _geoclip(quick: bool, seed: int) -> PretrainedCase:
    """No labels come with these: performance is the mean cosine between changed and intact embeddings."""
    import torch

    from strati.io.network import open as open_network

    home = zoo.path("geoclip")
    file = open_network(home / "location_encoder.pth")
    places = np.loadtxt(home / "coordinates.csv", delimiter=",", skiprows=1)[:: 1000 if quick else 100]
    tensors = {t.name: torch.from_numpy(np.array(file.read(t.name))) for t in file.tensors}
    models, inputs = {}, {}
    for number in range(3):
        models[f"geoclip-{number}"], inputs[number] = _geoclip_mlp(
            tensors, number, torch.from_numpy(places).float()
        )
    evaluate = _Cosine(models, list(inputs.values()))
    draws = 2 if quick else 10
    measure = {"higher_is_better": True, "chance": 0.0}
    return PretrainedCase(
        "geoclip",
        models,
        _config(draws, seed, "cosine to the intact output", 1000, init="pytorch", **measure),
        evaluate=evaluate,
        size=f"{draws} draws, {len(places)} places",
        table="no counterpart",
        figures=("alpha", "other metrics"),
    )


class _Cosine:
    """Mean cosine between a changed network's outputs and the intact ones'; knows a network by its untouched layers."""

    def __init__(self, models: dict[str, nn.Module], inputs: list[Any]) -> None:
        import torch

        self._known = []
        for model, x in zip(models.values(), inputs, strict=True):
            with torch.no_grad():
                self._known.append((_marks(model), x, model(x)))

    def __call__(self, model: nn.Module) -> float:
        import torch

        marks = _marks(model)
        _, x, intact = max(
            self._known, key=lambda known: sum(a == b for a, b in zip(known[0], marks, strict=True))
        )
        with torch.no_grad():
            return float(torch.nn.functional.cosine_similarity(model(x), intact).mean())


def _marks(model: nn.Module) -> list[float]:
    return [float(p.detach().flatten()[0]) for p in model.parameters()]


def _geoclip_mlp(tensors: dict[str, Any], number: int, places: Any) -> tuple[nn.Module, Any]:
    """One location encoder as a plain chain, and its inputs: random Fourier features of projected coordinates."""
    import torch
    from torch import nn

    of_encoder = {k: v for k, v in tensors.items() if k.startswith(f"LocEnc{number}.")}
    frequencies = next(v for k, v in of_encoder.items() if v.ndim == 2 and v.shape[1] == 2)
    weights = {k: v for k, v in of_encoder.items() if v.ndim == 2 and v.shape[1] != 2}
    layers: list[nn.Module] = []
    for name, weight in weights.items():
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight.data, linear.bias.data = weight, of_encoder[name.removesuffix("weight") + "bias"]
        layers += [linear, nn.ReLU()]
    projected = 2 * torch.pi * _equal_earth(places) @ frequencies.T
    return nn.Sequential(*layers[:-1]).eval(), torch.cat([projected.cos(), projected.sin()], 1)


def _equal_earth(places: Any) -> Any:
    """The Equal Earth projection (Savric, Patterson, Jenny 2018) of latitude and longitude."""
    import torch

    a1, a2, a3, a4 = 1.340264, -0.081106, 0.000893, 0.003796
    latitude, longitude = torch.deg2rad(places[:, 0]), torch.deg2rad(places[:, 1])
    theta = torch.asin(3**0.5 / 2 * torch.sin(latitude))
    slope = 9 * a4 * theta**8 + 7 * a3 * theta**6 + 3 * a2 * theta**2 + a1
    east = 2 * 3**0.5 * longitude * torch.cos(theta) / (3 * slope)
    north = a4 * theta**9 + a3 * theta**7 + a2 * theta**3 + a1 * theta
    return torch.stack([east, north], 1) * (66.50336 / 180)  # GeoCLIP's own scale
