"""How much error quantisers leave, against what their step predicts: the bounds above which ``compare`` names a layer.

    python tools/calibrate_rounding.py           # stories15M's matrices, its own inputs: a minute or two
    python tools/calibrate_rounding.py --made    # made weights and inputs only: seconds, no file needed

The ratio is that of ``RoundingError``: root mean square error over ``step / sqrt(12)``. Rounding to the nearest code
gives 1. GPTQ moves what a rounding lost into the weights not rounded yet, so its entries lie further off although the
outputs lie closer: its ratio grows with the correlation of the inputs. Rounding down instead, the mildest mistake there
is, doubles the error. ``WORSE`` and ``WORSE_COMPENSATED`` in ``strati.spectra.comparing.pairs`` lie between what right
layers reach and where wrong ones begin, which the last line prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strati.rng import stream

Array = NDArray[np.float64]
Coded = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]

SETTINGS = ((3, 32), (3, 128), (4, 32), (4, 128), (4, None), (8, 128))
"""Bits and group; without a group a row has one step."""
DAMPING = 0.01


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--made", action="store_true", help="Made weights and inputs only.")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print("| weights and inputs | bits | group | matrices | to the nearest | as GPTQ | rounded down |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    most = {"nearest": 0.0, "gptq": 0.0}
    least = np.inf
    for name, cases in sources(asked.seed, asked.made):
        for bits, group in SETTINGS:
            found = [ratios(weight, inputs, bits, group) for weight, inputs in cases]
            ranges = {how: (min(r[how] for r in found), max(r[how] for r in found)) for how in found[0]}
            cells = " | ".join(f"{low:.2f} to {high:.2f}" for low, high in ranges.values())
            print(f"| {name} | {bits} | {group or 'row'} | {len(found)} | {cells} |", flush=True)
            for how in most:
                most[how] = max(most[how], ranges[how][1])
            least = min(least, ranges["down"][0])
    print(f"\nright layers reach {most['nearest']:.2f} (nearest) and {most['gptq']:.2f} (GPTQ); "
          f"wrong ones begin at {least:.2f}")  # fmt: skip


def sources(seed: int, made: bool) -> Iterator[tuple[str, list[tuple[Array, Array]]]]:
    """Weights and the layer's inputs."""
    for power in (0.0, 0.5, 1.0, 2.0):
        rng = stream(seed, "rounding", str(power))
        yield f"Gaussian, inputs' spectrum k^-{power:g}", [made_case(rng, power) for _ in range(4)]
    if not made:
        yield "stories15M, its own inputs", list(stories15m(seed))


def made_case(rng: np.random.Generator, power: float) -> tuple[Array, Array]:
    """Gaussian weights whose inputs have covariance eigenvalues ``k^-power`` in random directions."""
    rows, columns = 128, 256
    axes = np.linalg.qr(rng.normal(size=(columns, columns)))[0]
    inputs = rng.normal(size=(2000, columns)) * np.arange(1, columns + 1) ** (-power / 2) @ axes.T
    return rng.normal(scale=0.02, size=(rows, columns)), inputs


def stories15m(seed: int) -> Iterator[tuple[Array, Array]]:
    """Every linear layer of its blocks, on 16 sequences of 128 tokens sampled from it."""
    import torch

    from strati import zoo
    from strati.landscape.recorder import Site, recording
    from strati.network.module import as_module

    torch.manual_seed(seed)
    model: Any = as_module(zoo.path("stories15m"))
    start = torch.ones((16, 1), dtype=torch.long)
    tokens = model.generate(start, do_sample=True, top_k=0, max_length=128, min_length=128, pad_token_id=0)
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers." in n]
    seen: dict[str, Array] = {}

    def keep(place: Site, value: torch.Tensor) -> torch.Tensor:
        seen[place.module] = value.reshape(-1, value.shape[-1]).double().numpy()
        return value

    with torch.no_grad(), recording(model, [Site(name, "input") for name in linear], keep):
        model(tokens)
    for name in linear:
        yield model.get_submodule(name).weight.detach().double().numpy(), seen[name]


def ratios(weight: Array, inputs: Array, bits: int, group: int | None) -> dict[str, float]:
    """Of each way to make codes for a weight."""
    made = {
        "nearest": rounded(weight, bits, group),
        "gptq": rounded(weight, bits, group, inputs=inputs),
        "down": rounded(weight, bits, group, down=True),
    }
    return {how: ratio(weight, coded) for how, coded in made.items()}


def ratio(weight: Array, coded: Coded) -> float:
    """Root mean square error over what rounding to the nearest code leaves."""
    codes, steps, zeros = coded
    width = weight.shape[1] // steps.shape[1]
    step = np.repeat(steps, width, axis=1)
    error = (codes - np.repeat(zeros, width, axis=1)) * step - weight
    return float(np.sqrt(np.square(error).mean() / (np.square(step.astype(np.float64)).mean() / 12)))


def rounded(
    weight: Array, bits: int, group: int | None, *, inputs: Array | None = None, down: bool = False
) -> Coded:
    """Codes, steps and zero points: to the nearest code, always down, or as GPTQ does (later weights make it up)."""
    left = np.asarray(weight, np.float64).copy()
    width = group if group and left.shape[1] % group == 0 else left.shape[1]
    top = 2**bits - 1
    codes = np.zeros(left.shape, np.int64)
    steps, zeros = (np.zeros((left.shape[0], left.shape[1] // width)) for _ in range(2))
    factor = None
    if inputs is not None:
        gram = inputs.T @ inputs / len(inputs)
        gram += DAMPING * np.trace(gram) / len(gram) * np.eye(len(gram))
        factor = np.linalg.cholesky(np.linalg.inv(gram)).T
    for j in range(left.shape[1]):
        g = j // width
        if j % width == 0:
            part = left[:, j : j + width]
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            steps[:, g] = (high - low) / top
            zeros[:, g] = np.clip(np.round(-low / steps[:, g]), 1, top)
        place = left[:, j] / steps[:, g] + zeros[:, g]
        codes[:, j] = np.clip(np.floor(place) if down else np.round(place), 0, top)
        if factor is not None:
            error = (left[:, j] - (codes[:, j] - zeros[:, g]) * steps[:, g]) / factor[j, j]
            left[:, j:] -= np.outer(error, factor[j, j:])
    return codes, steps.astype(np.float32), zeros.astype(np.int64)


if __name__ == "__main__":
    main()
