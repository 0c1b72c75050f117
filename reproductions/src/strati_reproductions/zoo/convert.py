"""Turning fetched files into what strati reads: ``.npz`` for data, Hugging Face directories for networks.

Each function works in the item's folder, leaves the result there, removes the raw files, and checks a number
that is known of the data before it is believed.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from strati.core.errors import BadInputError
from strati.core.plugins import require
from strati_reproductions.zoo.llama2c import split_and_convert


def mnist(folder: Path) -> None:
    """The four idx files as ``mnist.npz``."""
    _idx_to_npz(folder, "mnist.npz", mean=0.1307)


def fashion_mnist(folder: Path) -> None:
    """The four idx files as ``fashion-mnist.npz``."""
    _idx_to_npz(folder, "fashion-mnist.npz", mean=0.2860)


def cifar10(folder: Path) -> None:
    """Six PNGs of 10,000 rows of 1,024 RGB pixels and two label files as ``cifar10.npz``."""
    image: Any = require("PIL.Image", "plot", "reading CIFAR-10's pictures")
    image.MAX_IMAGE_PIXELS = None

    def pixels(name: str) -> np.ndarray[Any, Any]:
        with image.open(folder / name) as picture:
            return np.asarray(picture.convert("RGB")).reshape(10000, 32, 32, 3)

    train = np.concatenate([pixels(f"train{i}.png") for i in range(1, 6)])
    labels = {
        k: np.array(json.loads((folder / f"{k}.json").read_text()), dtype=np.int64) for k in ("train", "test")
    }
    _save(folder, "cifar10.npz", train, labels["train"], pixels("test.png"), labels["test"])
    _check(folder, train[..., 0].mean() / 255, 0.49140)


def stories15m(folder: Path) -> None:
    """llama2.c's file as a Hugging Face Llama directory, its tokenizer beside it."""
    raw = folder / "llama2.data"
    split_and_convert(raw, folder)
    raw.unlink()


def _idx_to_npz(folder: Path, name: str, mean: float) -> None:
    parts = {n: _idx(folder / n) for n in ("train-images", "train-labels", "t10k-images", "t10k-labels")}
    train = parts["train-images"]
    _save(
        folder,
        name,
        train,
        parts["train-labels"].astype(np.int64),
        parts["t10k-images"],
        parts["t10k-labels"].astype(np.int64),
    )
    _check(folder, train.mean() / 255, mean)


def _idx(path: Path) -> np.ndarray[Any, Any]:
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    rank = raw[3]
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank))
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)


def _save(folder: Path, name: str, x: Any, y: Any, x_test: Any, y_test: Any) -> None:
    for raw in list(folder.iterdir()):
        raw.unlink()
    np.savez(folder / name, x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def _check(what: Path, found: float, expected: float) -> None:
    if abs(found - expected) > 6e-5:
        raise BadInputError(what.name, f"its mean is {found:.5f}, not the known {expected:.4f}; not used")
