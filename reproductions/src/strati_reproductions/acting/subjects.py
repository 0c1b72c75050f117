"""The four networks of the tables, each with data to calibrate on, other data to plan on and others to judge by.

A fully connected network on MNIST (trained here), ResNet-20 on CIFAR-10, stories15M on stories sampled from itself
(only five real ones come with it), and MiniLM as what it is used for: finding the paragraph that a passage is from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from strati.core.files import write_atomic
from strati.core.plugins import require
from strati.interventions.study_spec import read_spec
from strati.interventions.tasks import StudyData
from strati.io.in_memory import load_arrays
from strati.io.to_module import as_module
from strati_reproductions import zoo
from strati_reproductions.datasets import external_data
from strati_reproductions.trained.networks import open_resnet
from strati_reproductions.trained.spec import pack, unpack
from strati_reproductions.trained.training import train


@dataclass(frozen=True)
class ActingCase:
    """A network, data to plan on, other data to judge by, and the layers that may be changed.

    ``calibration`` has the inputs for the covariances of data-aware edits, which are neither planned on nor judged by.
    """

    name: str
    model: nn.Module
    plan: StudyData
    test: StudyData
    layers: tuple[str, ...]
    batch: int
    size: str
    blocks: bool
    calibration: NDArray[Any] | None = None


def fcn_mnist(folder: Path, quick: bool, seed: int) -> ActingCase:
    """784-5x512-10 trained for two epochs; plans on 5,000 test images, judged by the other 5,000."""
    spec = read_spec("fcn-mnist-adam").model
    spec = replace(spec, seed=seed, network=replace(spec.network, count=1, together=1))
    data = spec.data
    path = folder / "fcn-mnist.npz"
    if not path.is_file():
        write_atomic(path, pack(train(spec, data, [0])[0]))
    model = spec.untrained()
    load_arrays(model, unpack(path.read_bytes()), path)
    # The first half of MNIST's test images is harder than the second: mixed, so that both parts are alike.
    order = np.random.default_rng(seed).permutation(len(data.x_test))
    assert data.y_test is not None
    data = replace(data, x_test=data.x_test[order], y_test=data.y_test[order])
    few = 2000 if quick else 5000
    return ActingCase(
        "FCN on MNIST", model.eval(), _part(data, 0, few), _part(data, few, 4000 if quick else 10_000), ("*",), 1000,
        f"plan on {few} images", False, data.x[: 500 if quick else 2000],
    )  # fmt: skip


def resnet20(folder: Path, quick: bool, seed: int) -> ActingCase:
    """ResNet-20 on CIFAR-10's test images; the first 2,000, on which the rules of planning were made, stay out."""
    with np.load(zoo.path("cifar10")) as file:
        x, y, training = file["x_test"], file["y_test"], file["x_train"][: 100 if quick else 400]
    order = 2000 + np.random.default_rng(seed).permutation(len(x) - 2000)
    x, y = x[order], y[order]
    if x.shape[-1] == 3:
        x, training = (np.ascontiguousarray(np.moveaxis(images, -1, 1)) for images in (x, training))
    scale = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    data = StudyData("images", 10, x[:0], None, x, y, **scale)
    path = external_data("resnet20-cifar10", "resnet20-12fca82f.th")
    model = open_resnet(path)
    few, many = (120, 480) if quick else (1200, 3600)
    return ActingCase(
        "ResNet-20", model, _part(data, 0, few), _part(data, few, few + many), ("*",), 100,
        f"plan on {few} images, judged by {many}", True, training,
    )  # fmt: skip


def stories15m(folder: Path, quick: bool, seed: int) -> ActingCase:
    """stories15M on sequences sampled from it at temperature 1."""
    home = zoo.path("stories15m")
    model: Any = as_module(home)
    few, many, length = (8, 16, 24) if quick else (60, 120, 32)
    tokens = sampled(model, few + many, length, seed, folder / f"stories-{few}-{many}-{length}-{seed}.npy")
    calibration = sampled(
        model,
        64 if quick else 512,
        length,
        seed + 1000,
        folder / f"stories-calibration-{length}-{seed}-{quick}.npy",
    )
    data = StudyData("tokens", 32_000, tokens[:0], None, tokens, None)
    return ActingCase(
        "stories15M", model, _part(data, 0, few), _part(data, few, few + many), ("model.layers.*",), 8,
        f"plan on {few} sampled sequences of {length} tokens, judged by {many}", True, calibration,
    )  # fmt: skip


def sampled(model: Any, rows: int, length: int, seed: int, path: Path) -> NDArray[Any]:
    """Sequences that a language model generates at temperature 1 from the start token; computed once."""
    if not path.is_file():
        torch.manual_seed(seed)
        start = torch.ones((rows, 1), dtype=torch.long)
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}
        np.save(path, model.generate(start, max_length=length, min_length=length, **options).numpy())
    tokens: NDArray[Any] = np.load(path)
    return tokens


class Retrieval(nn.Module):
    """Scores of passages against paragraphs: cosines of mean-pooled embeddings over a temperature of 0.05."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("anchors", torch.zeros(0))

    def embed(self, tokens: Tensor) -> Tensor:
        """Unit vectors of passages."""
        hidden = self.encoder(tokens).last_hidden_state.mean(1)
        return nn.functional.normalize(hidden, dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (passages, paragraphs)."""
        anchors: Any = self.anchors
        scores: Tensor = self.embed(tokens) @ anchors.T / 0.05
        return scores


def minilm(folder: Path, quick: bool, seed: int) -> ActingCase:
    """MiniLM-L6: which WikiText paragraph does a passage of 32 tokens continue?"""
    transformers = require("transformers", "transformers", "MiniLM")
    home = zoo.path("minilm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home, local_files_only=True)
    few, many = (32, 96) if quick else (64, 192)
    both = _passages(tokenizer, "test.txt", few + many)
    calibration = _passages(tokenizer, "valid.txt", 32 if quick else 256).reshape(-1, 32)
    model = Retrieval(as_module(home)).eval()
    with torch.inference_mode():
        model.anchors = torch.cat(
            [model.embed(torch.from_numpy(part)) for part in np.split(both[:, :32], 8)]
        ).clone()
    data = StudyData("tokens", len(both), both[:0], None, both[:, 32:], np.arange(len(both)))
    return ActingCase(
        "MiniLM", model, _part(data, 0, few), _part(data, few, few + many), ("encoder.encoder.layer.*",), 32,
        f"plan on {few} passages, judged by {many}", True, calibration,
    )  # fmt: skip


def _passages(tokenizer: Any, file: str, count: int) -> NDArray[Any]:
    """The first 64 tokens of the first paragraphs of WikiText that have as many."""
    passages = []
    for paragraph in external_data("wikitext", file).read_text("utf-8").split("\n"):
        ids = tokenizer(paragraph, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= 64:
            passages.append(ids[:64])
        if len(passages) == count:
            break
    return np.array(passages)


CASES: dict[str, Callable[[Path, bool, int], ActingCase]] = {
    "fcn-mnist": fcn_mnist,
    "resnet20": resnet20,
    "stories15m": stories15m,
    "minilm": minilm,
}


def _part(data: StudyData, start: int, end: int) -> StudyData:
    labels = None if data.y_test is None else data.y_test[start:end]
    return replace(data, x=data.x[:0], y=None, x_test=data.x_test[start:end], y_test=labels)
