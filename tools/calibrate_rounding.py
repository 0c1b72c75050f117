"""How much error quantisers leave, against what their step predicts: the bounds above which ``compare`` names a layer.

    python tools/calibrate_rounding.py           # stories15M's matrices, its own inputs: a minute or two
    python tools/calibrate_rounding.py --made    # made weights and inputs only: seconds, no file needed
    python tools/calibrate_rounding.py --kinds   # which kinds of update ``compare`` names, by dtype and size
    python tools/calibrate_rounding.py --merges  # z-scores of the weights of merges, by dtype and way of rounding

The ratio is that of ``RoundingError``: root mean square error over ``step / sqrt(12)``. Rounding to the nearest code
gives 1. GPTQ moves what a rounding lost into the weights not rounded yet, so its entries lie further off although the
outputs lie closer: its ratio grows with the correlation of the inputs. Rounding down instead, the mildest mistake there
is, doubles the error. ``WORSE`` and ``WORSE_COMPENSATED`` in ``strati.comparison.pair_update`` lie between what right
layers reach and where wrong ones begin, which the last line prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strati.core.rng import stream

Array = NDArray[np.float64]
Coded = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]

SETTINGS = ((3, 32), (3, 128), (4, 32), (4, 128), (4, None), (8, 128))
"""Bits and group; without a group a row has one step."""
DAMPING = 0.01


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--made", action="store_true", help="Made weights and inputs only.")
    parser.add_argument("--kinds", action="store_true", help="Rates of the kinds of update.")
    parser.add_argument("--merges", action="store_true", help="Errors of the weights of merges.")
    parser.add_argument("--draws", type=int, default=16, help="Updates for each shape and way of adding.")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.kinds or asked.merges:
        if asked.kinds:
            print_kinds(asked.seed, asked.draws)
        if asked.merges:
            print_merges(asked.seed, asked.draws)
        return
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


UPDATES = (
    "LoRA of rank 8",
    "LoRA of rank 1",
    "full, 1/k",
    "full, exp(-k/5)",
    "full, flat",
    "rank 2 and noise of 30 %",
    "1 % pruned",
)
SIZES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
SHAPES = ((112, 96), (64, 144))


def print_kinds(seed: int, draws: int) -> None:
    """The share of updates that are called low-rank, dense and undecided; ``rounding`` is counted as an error."""
    from collections import Counter

    from strati.comparison.update import update_between

    print("| update | dtype | " + " | ".join(f"{size:g}" for size in SIZES) + " |")
    print("| --- | --- |" + " --- |" * len(SIZES))
    for update in UPDATES:
        for name, dtype in dtypes().items():
            cells = []
            for size in SIZES if "pruned" not in update else SIZES[:1]:
                kinds: Counter[str] = Counter()
                for draw in range(draws):
                    for shape in SHAPES:
                        rng = stream(seed, "kinds", update, name, str(size), str(draw), str(shape))
                        for before, after in versions(rng, update, shape, size, dtype):
                            kinds[str(update_between(before, after, rng=rng).rank.kind)] += 1
                total = sum(kinds.values())
                cells.append(", ".join(f"{kind} {n / total:.0%}" for kind, n in kinds.most_common()))
            print(f"| {update} | {name} | {' | '.join(cells)} |", flush=True)


def dtypes() -> dict[str, Any]:
    """The dtypes that weights are stored in."""
    import ml_dtypes

    return {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def versions(
    rng: np.random.Generator, update: str, shape: tuple[int, int], size: float, dtype: Any
) -> Iterator[tuple[Any, Any]]:
    """A matrix and its later self: the update added to the stored weights, and to their master copy."""
    master = 0.02 * rng.normal(size=shape)
    stored = master.astype(dtype)
    if "pruned" in update:
        sizes = np.abs(stored.astype(np.float64))
        yield stored, np.where(sizes < np.quantile(sizes, 0.01), 0, stored.astype(np.float64)).astype(dtype)
        return
    if "LoRA" in update:
        rank = int(update.split()[-1])
        change = rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))
    elif "noise" in update:
        change = rng.normal(size=(shape[0], 2)) @ rng.normal(size=(2, shape[1])) / np.sqrt(2)
        change += 0.3 * rng.normal(size=shape)
    else:
        left, values, right = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
        number = np.arange(1, len(values) + 1)
        spectra = {"flat": values, "1/k": 1 / number, "exp(-k/5)": np.exp(-number / 5)}
        change = (left * spectra[update.removeprefix("full, ")]) @ right
    change *= size * np.linalg.norm(master) / np.linalg.norm(change)
    for start in (stored.astype(np.float64), master):
        yield stored, (start + change).astype(dtype)


SHARES = ((0.9, 0.1), (0.7, 0.3), (0.5, 0.5), (0.6, 0.3, 0.1), (0.25, 0.25, 0.25, 0.25))


def print_merges(seed: int, draws: int) -> None:
    """Z-scores of the weights of merges of two to four parents, residuals, and residuals without the last parent."""
    from strati.comparison.merging import mixture

    print(
        "| dtype | rounded | parents differ by | z, rms | z, most | residual, most | parent missing, least | hidden |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, dtype in dtypes().items():
        for way in ("the sum", "each product", "the running sum", "the parents, later"):
            for apart in (0.06, 0.01, 0.003):
                scores, residuals, missing, hidden = [], [], [], []
                for draw in range(draws):
                    rng = stream(seed, "merges", name, way, str(apart), str(draw))
                    shares = SHARES[draw % len(SHARES)]
                    base = 0.02 * rng.normal(size=(128, 96))
                    parents = [base + apart * 0.02 * rng.normal(size=base.shape) for _ in shares]
                    stored = [p.astype(dtype) for p in parents]
                    merge = merged(shares, parents if "parents" in way else stored, way, dtype)
                    estimate: Any = mixture(stored, merge)
                    residuals.append(estimate.residual)
                    triples = zip(estimate.weights, shares, estimate.stderr, strict=True)
                    scores += [(w - true) / error for w, true, error in triples]
                    if len(shares) > 2:
                        rest: Any = mixture(stored[:-1], merge)
                        missing.append(rest.residual)
                        hidden.append(rest.hidden)
                rms, most = np.sqrt(np.mean(np.square(scores))), np.max(np.abs(scores))
                cells = (
                    f"{rms:.2f} | {most:.1f} | {max(residuals):.3f} | {min(missing):.3f} | {max(hidden):.2f}"
                )
                print(f"| {name} | {way} | {apart:.1%} | {cells} |", flush=True)


def merged(shares: tuple[float, ...], parents: list[Any], way: str, dtype: Any) -> Any:
    """A merge, rounded as the name says."""
    terms = [w * p.astype(np.float64) for w, p in zip(shares, parents, strict=True)]
    if way in ("each product", "the running sum"):
        terms = [term.astype(dtype).astype(np.float64) for term in terms]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
        if way == "the running sum":
            total = total.astype(dtype).astype(np.float64)
    return total.astype(dtype)


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

    from strati.evaluate.hooks import Site, capture
    from strati.io.to_module import as_module
    from strati_reproductions import zoo

    torch.manual_seed(seed)
    model: Any = as_module(zoo.path("stories15m"))
    start = torch.ones((16, 1), dtype=torch.long)
    tokens = model.generate(start, do_sample=True, top_k=0, max_length=128, min_length=128, pad_token_id=0)
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers." in n]
    seen: dict[str, Array] = {}

    def keep(place: Site, value: torch.Tensor) -> torch.Tensor:
        seen[place.module] = value.reshape(-1, value.shape[-1]).double().numpy()
        return value

    with torch.no_grad(), capture(model, [Site(name, "input") for name in linear], keep):
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
