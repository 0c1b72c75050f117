"""Train the embedded network and write it, its initial weights and its data into the package.

An MLP 64-96-64-10 with ReLU on scikit-learn's digits (1797 images of 8x8 pixels, scaled to 0..1), PyTorch's
default initialisation, Adam 1e-3, batches of 64, 60 epochs. Run from the project's root:

    .venv/bin/python tools/make_embedded.py
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

FOLDER = Path(__file__).resolve().parents[1] / "src" / "strati" / "embedded"
WIDTHS = (64, 96, 64, 10)
EPOCHS, BATCH, RATE, SEED, TEST = 60, 64, 1e-3, 0, 360


def build() -> torch.nn.Sequential:
    """The untrained network."""
    torch.manual_seed(SEED)
    layers: list[torch.nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(WIDTHS)):
        layers += [torch.nn.Linear(inputs, outputs)] + ([torch.nn.ReLU()] if i < len(WIDTHS) - 2 else [])
    return torch.nn.Sequential(*layers)


def save(model: torch.nn.Module, name: str, **about: object) -> None:
    """Write the weights as safetensors, what they are in the metadata."""
    tensors = {k: v.detach().numpy().copy() for k, v in model.state_dict().items()}
    save_file(tensors, FOLDER / name, metadata={k: str(v) for k, v in about.items()})


def main() -> None:
    """Train, write, and print the accuracies."""
    torch.set_num_threads(1)
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    x = (digits.data[order] / 16).astype(np.float32)
    y = digits.target[order].astype(np.int64)
    np.savez_compressed(FOLDER / "digits.npz", x=x[TEST:], y=y[TEST:], x_test=x[:TEST], y_test=y[:TEST])

    model = build()
    save(model, "digits-mlp-init.safetensors", state="initial", seed=SEED)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    inputs, targets = torch.from_numpy(x[TEST:]), torch.from_numpy(y[TEST:])
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(targets)).split(BATCH):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimiser.step()
    with torch.no_grad():
        train = float((model(inputs).argmax(1) == targets).double().mean())
        test = float(
            (model(torch.from_numpy(x[:TEST])).argmax(1) == torch.from_numpy(y[:TEST])).double().mean()
        )
    save(
        model,
        "digits-mlp.safetensors",
        state="trained",
        seed=SEED,
        epochs=EPOCHS,
        test_accuracy=round(test, 4),
    )
    print(json.dumps({"train_accuracy": train, "test_accuracy": test}))


if __name__ == "__main__":
    main()
