"""``reproduce pretrained --model PATH --data PATH``: tables 2 and 3 on a network of the user's own.

The paper's networks (ResNet-34 and ViT on ImageNet, GPT-2 and GPT-2-Large on WikiText-103) are not available
everywhere. For one of them, or any other network, this module makes its line of the table and compares it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.core.plugins import require
from strati.core.results import Tick, silent
from strati.interventions.study import study
from strati.interventions.study_config import StudyConfig
from strati.io.data_files import as_windows, read_data, read_images, read_text
from strati.io.to_module import as_module
from strati.io.vision_models import Timm, TorchVision
from strati.jobs.engine import cores
from strati_reproductions.pictures import drawn
from strati_reproductions.registry import ENTRIES
from strati_reproductions.robust_and_critical.pretrained_tables import (
    PretrainedCase,
    case_captions,
    case_figures,
    case_rows,
)
from strati_reproductions.rows import Reproduction

if TYPE_CHECKING:
    from torch import nn

    from strati.interventions.tasks import StudyData

_SIZES = {"images": 10_000, "tokens": 100}
"""Most images, or windows of text, that are used; a quick run uses a twentieth."""
_CONTEXT = 1024
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Mean and deviation of pixels (0 to 1): of most networks on ImageNet, and of timm's and Google's ViTs."""


def pretrained_own(
    model: str | Path,
    data: str | Path,
    *,
    quick: bool = False,
    seed: int = 0,
    folder: Path = Path("out"),
    tick: Tick = silent,
) -> Reproduction:
    """Re-randomise every layer of a network ten times and compare its numbers with the paper's.

    Args:
        model: A checkpoint that :func:`strati.as_module` rebuilds: a Hugging Face directory, or a file with the names
            of timm or torchvision.
        data: For language models ``.txt`` (through the model's own tokenizer) or token ids (``.npy``); for images
            ``.npz`` with ``x`` and ``y``, or a folder of images by class. Pixels (bytes, or 0 to 1) are scaled as the
            network's own files say, else as its family is; values outside 0 to 1 are taken to be scaled already.
        quick: Two draws and a twentieth of the data.
        seed: Seed of the draws.
        folder: Folder of the store and the figures; the same command continues there.
        tick: Called after each unit of work.

    Raises:
        BadInputError: The network cannot be rebuilt, or the data do not fit it.
    """
    require("torch", "torch", "running a pretrained network")
    network: nn.Module = as_module(model).eval()
    inputs = _data(network, model, Path(data), quick)
    language = inputs.kind == "tokens" and inputs.y_test is None
    draws = 2 if quick else 10
    config = StudyConfig(
        interventions=("rerandomise",),
        draws=draws,
        seed=seed,
        performance="perplexity" if language else "accuracy",
        batch=1 if language else 100,
    )
    name = Path(str(model)).name
    case = PretrainedCase(
        name,
        {name: network},
        config,
        data=inputs,
        size=f"{draws} draws, {len(inputs.x_test)} {'windows' if language else 'images'}",
        table="table 3" if language else "table 2",
        figures=_figures(network, language, _paper_name(network)),
        same_as=_paper_name(network),
    )
    mark = hashlib.sha256(f"{Path(str(model)).resolve()} {Path(data).resolve()}".encode()).hexdigest()[:8]
    place = folder / f"own-{name}-{mark}-{'quick' if quick else 'full'}-seed-{seed}"
    measured = study(case.models, data=inputs, config=config, out=place, tick=tick, workers=cores())
    title = f"{name}, every layer re-randomised: robust-and-critical-layers, section 5"
    figures = drawn(case_figures, case, measured, place)
    made = Reproduction(
        "pretrained", title, tuple(case_rows(case, measured)), figures, captions=case_captions(case)
    )
    revision = ENTRIES["pretrained"].revision
    return replace(made, mode="quick" if quick else "full", seed=seed, revision=revision)


def _data(network: nn.Module, model: str | Path, path: Path, quick: bool) -> StudyData:
    from strati.evaluate.models import longest_input
    from strati.interventions.tasks import StudyData

    settings: Any = getattr(network, "config", None)
    if path.suffix in (".txt", ".npy"):
        tokens = read_text(path, model) if path.suffix == ".txt" else read_data(path).x
        longest = longest_input(network) or _CONTEXT
        tokens = as_windows(tokens, min(_CONTEXT, longest)) if tokens.ndim == 1 else tokens
        windows = tokens[: _share("tokens", quick)]
        vocabulary = int(getattr(settings, "vocab_size", 0) or windows.max() + 1)
        return StudyData("tokens", vocabulary, windows[:0], None, windows, None)
    x, y = _images(path, _share("images", quick))
    outputs = int(getattr(settings, "num_labels", 0) or 0)
    colours = x.ndim == 4 and x.shape[1] == 3
    scaled = x.dtype != np.uint8 and bool(x.min() < -0.01 or x.max() > 1.01)
    scale: dict[str, Any] = {}
    if colours and not scaled:
        scale = dict(zip(("mean", "std"), _scale(network, Path(str(model))), strict=True))
    return StudyData("images", max(outputs, int(y.max()) + 1), x[:0], None, x, y, **scale)


def _scale(network: nn.Module, model: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels: from the files beside the weights, else of the network's family."""
    for name, inner, keys in (
        ("preprocessor_config.json", None, ("image_mean", "image_std")),
        ("config.json", "pretrained_cfg", ("mean", "std")),
    ):
        file = (model if model.is_dir() else model.parent) / name
        try:
            fields = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        except (OSError, ValueError) as error:
            raise BadInputError(file, f"cannot be read as JSON ({error})") from error
        try:
            fields = fields.get(inner, {}) if inner else fields
            mean, std = (tuple(float(v) for v in fields[key]) for key in keys)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # says nothing of pixels: the family decides
        if len(mean) == len(std) == 3 and min(std) > 0:
            return mean, std
    return HALF if is_vit(network) and not isinstance(network, TorchVision) else IMAGENET


def is_vit(network: nn.Module) -> bool:
    """Whether a network is a vision transformer, rebuilt here or transformers' own."""
    return isinstance(network, Timm | TorchVision) or "vit" in type(network).__name__.lower()


def _figures(network: nn.Module, language: bool, paper: str | None) -> tuple[str, str]:
    """The paper's figures that this network belongs into."""
    if language:
        return "figure 6", "figure 11" if paper == "GPT-2-Large" else "figure 10"
    return ("figure 5 right", "figure 9") if is_vit(network) else ("figure 5 left", "figure 8")


def _share(kind: str, quick: bool) -> int:
    return _SIZES[kind] // 20 if quick else _SIZES[kind]


def _images(path: Path, most: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images, channels first, and their labels, spread over a folder's classes."""
    if path.is_dir():
        images = read_images(path)
        places = np.unique(np.linspace(0, len(images) - 1, min(most, len(images))).astype(int))
        pairs = [images[int(i)] for i in places]
        if len({pixels.shape for pixels, _ in pairs}) > 1:
            raise BadInputError(path, "the images differ in size; give them the size that the network takes")
        return np.stack([pixels for pixels, _ in pairs]), np.array([label for _, label in pairs])
    read = read_data(path)
    if read.y is None:
        raise BadInputError(path, "has no labels y; give x and y, or a folder of images by class")
    x = read.x
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return x[:most], np.asarray(read.y)[:most]


def _paper_name(network: nn.Module) -> str | None:
    """Which of the paper's networks this is, by its class, depth and size; ``None`` for any other."""
    kind = type(network).__name__.lower()
    settings: Any = getattr(network, "config", None)
    if "gpt2" in kind:
        return {12: "GPT-2", 36: "GPT-2-Large"}.get(int(getattr(settings, "num_hidden_layers", 0) or 0))
    parameters = sum(p.numel() for p in network.parameters())
    if is_vit(network) and 80e6 < parameters < 95e6:
        return "ViT"
    return "ResNet34" if "resnet" in kind and 21e6 < parameters < 22.5e6 else None
