"""Shares of sparsity by the tail exponent of the spectrum: AlphaPruning and FARMS.

AlphaPruning (Lu et al., arXiv:2410.10912): the exponent of a matrix is the maximum-likelihood one of the eigenvalues
above a start near the peak of their histogram on a logarithmic scale; blocks, not matrices, get a share, by the mean
exponent of their matrices: linear between (1 - epsilon) and (1 + epsilon) of the mean share, epsilon 0.3. FARMS (Hu et
al., arXiv:2506.06280) pools the eigenvalues of square submatrices first, so that the exponent does not depend on the
shape of the matrix, and takes Hill's exponent of their upper half.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strati import embedded
from strati.core.errors import StratiError
from strati.core.plugins import require
from strati.core.results import Flag, Tick
from strati.interventions.evaluator import Evaluator
from strati.interventions.input_covariance import CalibrationInputs
from strati.interventions.targets import as_matrix, find_targets, values_of
from strati.interventions.tasks import make_task, study_data
from strati.io.roles import blocks
from strati.io.to_module import as_module
from strati_reproductions.acting.claims import against
from strati_reproductions.acting.subjects import ActingCase, resnet20, stories15m
from strati_reproductions.registry import Reproduction, Row

EPSILON = 0.3
SPARSITIES = (0.5, 0.7)
PRUNERS = {"magnitude": "", "Wanda": ",method=wanda", "SparseGPT": ",method=sparsegpt"}
"""How the entries of a matrix are chosen, and the setting that asks for it."""
_BINS = 100
_PLACES = 4
"""Places of a window along each side of a matrix that is longer than the window."""


def alpha_pruning(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Blocks pruned by AlphaPruning's and FARMS' shares against the same share everywhere, on unseen data.

    Entries are chosen by magnitude, by Wanda and by SparseGPT; the covariances of the last two come from calibration
    rows that the loss is not measured on. Quick: the embedded transformer only.
    """
    require("torch", "torch", "acting on networks")
    cases = {"embedded transformer": _embedded} | (
        {} if quick else {"ResNet-20": resnet20, "stories15M": stories15m}
    )
    rows: list[Row] = []
    warnings: list[Flag] = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in cases.items():
        try:
            rows += compared(make(folder, quick, seed))
        except StratiError as error:
            warnings.append(Flag("left-out", f"{name}: {error}"))
        tick(name)
    title = "Sparsity of blocks by the tail exponent of their spectra"
    return Reproduction("alpha-pruning", title, tuple(rows), (), tuple(warnings))


def compared(case: ActingCase) -> list[Row]:
    """The losses of one network at each sparsity: shares of AlphaPruning, of FARMS, and the same share everywhere."""
    targets = find_targets(case.model, case.layers)
    matrices = {t.name: as_matrix(values_of(case.model, t)[0], t.kind) for t in targets}
    exponents = {
        "AlphaPruning": {n: peak_exponent(eigenvalues_of(m)) for n, m in matrices.items()},
        "FARMS": {n: median_exponent(window_eigenvalues(m)) for n, m in matrices.items()},
    }
    numbers = blocks([f"{name}.weight" for name in matrices])
    places = {n: n if numbers[f"{n}.weight"] is None else numbers[f"{n}.weight"] for n in matrices}
    sizes = {name: matrix.size for name, matrix in matrices.items()}
    task = make_task(case.test, "loss", case.batch)
    calibration = CalibrationInputs(case.model, replace(case.plan, x=case.plan.x_test).calibration_batches())
    evaluator = Evaluator(case.name, case.model, task=task, calibration=calibration)
    rows = [Row(f"{case.name}: loss, intact", None, round(evaluator.now().performance, 4))]
    for pruner, sparsity in itertools.product(PRUNERS, SPARSITIES):
        what = f"{case.name}, {pruner}, {sparsity:.0%} pruned: loss"
        setting = PRUNERS[pruner]
        even = evaluator.measure("prune", dict.fromkeys(sizes, f"share={sparsity}{setting}"))
        for method, by_layer in exponents.items():
            shares = block_shares(by_layer, places, sizes, sparsity)
            pruned = evaluator.measure("prune", {n: f"share={s:.6f}{setting}" for n, s in shares.items()})
            rows.append(Row(f"{what}, {method}", "below even", *against(pruned, even)))
        rows.append(Row(f"{what}, even spread", None, round(even.performance, 4)))
    return rows


def _embedded(_folder: Path, _quick: bool, _seed: int) -> ActingCase:
    model: Any = as_module(embedded.path("shakespeare"))
    data = study_data(embedded.path("tempest.txt"), model, 64)
    plan, test = (replace(data, x_test=data.x_test[i : i + 64]) for i in (0, 64))
    return ActingCase(
        "embedded transformer", model, plan, test, ("model.layers.*",), 16, "64 windows of 64 tokens", True
    )


def peak_exponent(eigenvalues: NDArray[Any]) -> float:
    """The exponent of the tail that starts near the peak of the histogram of logarithms.

    The start is the eigenvalue between 0.95 and 1.5 times the left end of the fullest of 100 bins with the least
    Kolmogorov-Smirnov distance; the exponent is ``1 + n / sum(log(x / start))``.

    Examples:
        >>> x = np.random.default_rng(0).pareto(1.5, 5000) + 1.0  # exponent 2.5, starts at its peak
        >>> round(float(peak_exponent(x)), 1)
        2.5
    """
    x = np.sort(eigenvalues[eigenvalues > 1e-5 * eigenvalues.max()])
    logs = np.log(x)
    counts, edges = np.histogram(logs, _BINS)
    peak = float(np.exp(edges[int(np.argmax(counts))]))
    starts = np.flatnonzero((x[:-1] > 0.95 * peak) & (x[:-1] < 1.5 * peak))
    best, exponent = np.inf, float("nan")
    for start in starts if len(starts) else [len(x) // 2]:
        n = len(x) - start
        total = float((logs[start:] - logs[start]).sum())
        if total <= 0:
            continue
        alpha = 1 + n / total
        fitted = 1 - (x[start:] / x[start]) ** (1 - alpha)
        distance = float(np.abs(fitted - np.arange(n) / n).max())
        if distance < best:
            best, exponent = distance, alpha
    return exponent


def median_exponent(eigenvalues: NDArray[Any]) -> float:
    """Hill's exponent of the upper half of the eigenvalues, which FARMS uses.

    Examples:
        >>> x = np.random.default_rng(0).pareto(1.5, 5000) + 1.0
        >>> round(median_exponent(x), 1)
        2.5
    """
    x = np.sort(eigenvalues)[len(eigenvalues) // 2 :]
    return float(1 + len(x) / np.log(x / x[0]).sum())


def eigenvalues_of(matrix: NDArray[Any]) -> NDArray[np.float64]:
    """Eigenvalues of ``W^T W`` that differ from zero by shape."""
    return np.linalg.svd(np.asarray(matrix, float), compute_uv=False) ** 2


def window_eigenvalues(matrix: NDArray[Any]) -> NDArray[np.float64]:
    """Eigenvalues of square windows of half the shorter side, evenly placed and overlapping, pooled.

    Examples:
        >>> window_eigenvalues(np.eye(8, 16)).shape  # two places by four places of 4 x 4 windows
        (32,)
    """
    side = max(2, min(matrix.shape) // 2)
    places = [
        np.unique(np.linspace(0, length - side, min(_PLACES, max(1, length // side))).astype(int))
        for length in matrix.shape
    ]
    windows = [matrix[i : i + side, j : j + side] for i in places[0] for j in places[1]]
    return np.concatenate([eigenvalues_of(window) for window in windows])


def block_shares(
    exponents: Mapping[str, float], blocks: Mapping[str, Any], sizes: Mapping[str, int], sparsity: float
) -> dict[str, float]:
    """The share of each layer that is pruned: one share per block, larger where the mean exponent is larger.

    Examples:
        >>> shares = block_shares({"a": 2.0, "b": 4.0}, {"a": 0, "b": 1}, {"a": 10, "b": 10}, 0.5)
        >>> {name: round(share, 3) for name, share in shares.items()}
        {'a': 0.35, 'b': 0.65}
    """
    means = {
        block: float(np.mean([exponents[name] for name in sizes if blocks[name] == block]))
        for block in {blocks[name] for name in sizes}
    }
    least, span = min(means.values()), (max(means.values()) - min(means.values())) or 1.0
    raw = {name: 1 - EPSILON + 2 * EPSILON * (means[blocks[name]] - least) / span for name in sizes}
    factor = sparsity * sum(sizes.values()) / sum(raw[name] * sizes[name] for name in sizes)
    return {name: min(factor * share, 1.0) for name, share in raw.items()}
