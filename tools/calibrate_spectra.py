"""Error rates of ``spectrum`` on matrices and tails of known making, as the docs state them.

    python tools/calibrate_spectra.py coverage [--draws 100]    # of alpha +- 1.96 alpha_stderr
    python tools/calibrate_spectra.py noise [--draws 200]       # spikes, tails and warnings in noise of many kinds
    python tools/calibrate_spectra.py kernels [--draws 100]     # spikes in convolutions with taps of unequal size
    python tools/calibrate_spectra.py truncation [--draws 400]  # level and power of tpl_pvalue

Each row has random streams of its own, so the numbers do not depend on what else is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import ml_dtypes
import numpy as np
from scipy import stats

import strati
from strati.core.rng import stream
from strati.spectra.spectrum import spectrum
from strati.spectra.tail_tests import truncation_pvalue
from strati.spectra.tails import fit_tail

Rng = np.random.Generator
SHARP: dict[str, Callable[[Rng, int, float], np.ndarray]] = {
    "pure power law": lambda r, n, a: r.pareto(a - 1, n) + 1,
    "flat body, then a power law": lambda r, n, a: np.where(
        r.random(n) < 0.5, r.uniform(0.2, 1, n), r.pareto(a - 1, n) + 1
    ),
    "lognormal, upper 10 % a power law": lambda r, n, a: lognormal_with_tail(r, n, a, 1.0, 0.1),
    "lognormal, upper 30 % a power law": lambda r, n, a: lognormal_with_tail(r, n, a, 0.5, 0.3),
}
GRADUAL: dict[str, Callable[[Rng, int, float], np.ndarray]] = {
    "Student's t, sizes": lambda r, n, a: np.abs(r.standard_t(a - 1, n)),
    "Frechet": lambda r, n, a: r.weibull(a - 1, n) ** -1.0,
    "Burr (c = 2)": lambda r, n, a: np.sqrt(np.expm1(r.exponential(2 / (a - 1), n))),
    "Burr (c = 1/2)": lambda r, n, a: np.expm1(r.exponential(0.5 / (a - 1), n)) ** 2,
    "Lomax": lambda r, n, a: r.pareto(a - 1, n),
    "log-gamma (k = 2)": lambda r, n, a: np.exp(r.gamma(2, 1 / (a - 1), n)),
    "inverse gamma": lambda r, n, a: 1 / r.gamma(a - 1, 1, n),
    "stable, sizes": lambda r, n, a: np.abs(stable(r, n, a - 1)),
}
SIZES, EXPONENTS = (100, 300, 1000, 4000), (2.0, 3.0, 5.0)
STABLE_EXPONENTS = (1.5, 2.0, 2.5)
"""Of stable laws: their tails have exponents below 3."""
NOISE: dict[str, Callable[[Rng, tuple[int, int]], np.ndarray]] = {
    "Gaussian": lambda r, s: r.normal(size=s),
    "uniform": lambda r, s: r.uniform(-1, 1, s),
    "Laplace": lambda r, s: r.laplace(size=s),
    "Student's t, 5 degrees": lambda r, s: r.standard_t(5, s),
    "Gaussian in fp8 (e4m3)": lambda r, s: r.normal(size=s).astype(ml_dtypes.float8_e4m3fn),
    "Gaussian in fp8 (e5m2)": lambda r, s: r.normal(size=s).astype(ml_dtypes.float8_e5m2),
    "Gaussian in int4, one scale": lambda r, s: lattice(r.normal(size=s), 7),
    "Gaussian in int3, one scale": lambda r, s: lattice(r.normal(size=s), 3),
    "identity + 0.1 Gaussian": lambda r, s: np.eye(*s) + 0.1 * r.normal(size=s) / np.sqrt(s[1]),
    "identity + 0.05 entries": lambda r, s: np.eye(*s) + 0.05 * r.normal(size=s),
    "20 % of rows zero": lambda r, s: r.normal(size=s) * (r.random(s[0]) > 0.2)[:, None],
    "rows of lognormal size": lambda r, s: r.normal(size=s) * r.lognormal(0, 0.5, s[0])[:, None],
    "columns of lognormal size": lambda r, s: r.normal(size=s) * r.lognormal(0, 0.5, s[1]),
    "90 % zeros": lambda r, s: r.normal(size=s) * (r.random(s) > 0.9),
    "AR(0.2) along rows": lambda r, s: autoregressive(r.normal(size=s).T, 0.2).T,
    "AR(0.2) along columns": lambda r, s: autoregressive(r.normal(size=s), 0.2),
    "AR(0.7) along columns": lambda r, s: autoregressive(r.normal(size=s), 0.7),
    "rows 2 apart correlated": lambda r, s: apart(r.normal(size=(s[0] + 2, s[1])), 2, 0.2),
    "columns 8 apart correlated": lambda r, s: apart(r.normal(size=(s[1] + 8, s[0])), 8, 0.2).T,
    "rows in groups of 4": lambda r, s: r.normal(size=s) + 0.5 * grouped(r.normal(size=s), 4),
    "AR(0.2) along both": lambda r, s: autoregressive(autoregressive(r.normal(size=s), 0.2).T, 0.2).T,
}
SHAPES = ((128, 128), (400, 100), (150, 300))
TAPS: dict[str, Callable[[Rng, int], np.ndarray]] = {
    "equal": lambda r, taps: np.ones(taps),
    "centre x 1.1": lambda r, taps: centre(taps, 1.1),
    "centre x 1.5": lambda r, taps: centre(taps, 1.5),
    "centre x 3": lambda r, taps: centre(taps, 3.0),
    "lognormal": lambda r, taps: r.lognormal(0, 0.5, taps),
    "half masked": lambda r, taps: (np.arange(taps) <= taps // 2).astype(np.float64),
}
"""Sizes of a kernel's taps."""
KERNELS = ((64, 64, 3, 3), (16, 16, 3, 3), (32, 16, 5, 5), (64, 3, 7, 7), (96, 40, 5))
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
IDENTITY_NOISE = (1e-4, 1e-3, 0.01, 0.1)
TOLD = {"structured-noise", "heavy-entries"}
"""Warnings that say that the level of the spikes is that of other noise, or does not hold."""


def centre(taps: int, factor: float) -> np.ndarray:
    """Taps of which the middle one is larger."""
    sizes = np.ones(taps)
    sizes[taps // 2] = factor
    return sizes


def kernel(rng: Rng, shape: tuple[int, ...], name: str) -> np.ndarray:
    """The weights of a convolution: noise with taps of unequal size."""
    sizes = TAPS[name](rng, int(np.prod(shape[2:]))).reshape(shape[2:])
    weights: np.ndarray = (rng.normal(size=shape) * sizes).astype(np.float32)
    return weights


def kernel_rates(name: str, shape: tuple[int, ...], draws: int) -> dict[str, float]:
    """Shares of draws of one kind of kernel with spikes, with quasi-null directions, and with the warning.

    Directions of taps that are zero are null; only further ones count.
    """
    counts = {"spikes": 0, "quasi-null": 0, "structured-noise": 0}
    for number in range(draws):
        weights = kernel(stream(19, "kernel", name, *shape, number), shape, name)
        sp = strati.scan({"conv.weight": weights})["conv"]
        counts["spikes"] += (sp.metrics()["spikes"] or 0) > 0
        zeros = int(np.sum(~weights.any(axis=(0, 1)))) * min(shape[:2])
        counts["quasi-null"] += (sp.quasi_null or 0) > zeros
        counts["structured-noise"] += any(flag.code == "structured-noise" for flag in sp.warnings)
    return {what: count / draws for what, count in counts.items()}


def identity_kernel(rng: Rng, shape: tuple[int, ...], noise: float) -> np.ndarray:
    """Noise with an identity in the middle tap."""
    weights: np.ndarray = noise * rng.normal(size=shape)
    weights[(slice(None), slice(None), *(size // 2 for size in shape[2:]))] += np.eye(*shape[:2])
    return weights


def identity_nulls(shape: tuple[int, ...], dtype: type, draws: int) -> tuple[float, float]:
    """Quasi-null directions of identity kernels with noise, per kernel, and those of their slices on their own."""
    together, alone = [], []
    for noise in IDENTITY_NOISE:
        for number in range(draws):
            weights = identity_kernel(stream(32, *shape, str(noise), number), shape, noise).astype(dtype)
            together.append(strati.scan({"conv.weight": weights})["conv"].quasi_null or 0)
            slices = weights.reshape(*shape[:2], -1).transpose(2, 0, 1)
            alone.append(sum(spectrum(matrix).quasi_null or 0 for matrix in slices))
    return float(np.mean(together)), float(np.mean(alone))


def lattice(W: np.ndarray, levels: int) -> np.ndarray:
    """Weights rounded to ``2 levels + 1`` multiples of one step."""
    step = np.abs(W).max() / levels
    rounded: np.ndarray = np.round(W / step) * step
    return rounded


def autoregressive(W: np.ndarray, r: float) -> np.ndarray:
    """Independent rows made to follow each other with correlation ``r``."""
    made = W.copy()
    for i in range(1, len(made)):
        made[i] = r * made[i - 1] + np.sqrt(1 - r**2) * made[i]
    return made


def apart(W: np.ndarray, places: int, r: float) -> np.ndarray:
    """Independent rows made to follow those so many places before them."""
    made: np.ndarray = W[places:] + r * W[:-places]
    return made


def grouped(W: np.ndarray, count: int) -> np.ndarray:
    """Rows of which so many neighbours are the same."""
    same: np.ndarray = np.repeat(W[::count], count, axis=0)[: len(W)]
    return same


def stable(r: Rng, n: int, mu: float) -> np.ndarray:
    """Symmetric stable values (Chambers, Mallows and Stuck 1976)."""
    angle, size = r.uniform(-np.pi / 2, np.pi / 2, n), r.exponential(1, n)
    made: np.ndarray = np.sin(mu * angle) / np.cos(angle) ** (1 / mu)
    return made * (np.cos(angle - mu * angle) / size) ** ((1 - mu) / mu)


def lognormal_with_tail(r: Rng, n: int, a: float, sigma: float, share: float) -> np.ndarray:
    """A lognormal body up to its quantile ``1 - share``, a power law beyond."""
    start = float(np.exp(sigma * stats.norm.ppf(1 - share)))
    body = np.exp(sigma * stats.norm.ppf((1 - share) * r.random(n)))
    return np.where(r.random(n) < share, start * (r.pareto(a - 1, n) + 1), body)


def coverage(
    make: Callable[[Rng, int, float], np.ndarray], name: str, draws: int
) -> dict[str, tuple[float, float]]:
    """Least and largest share over sizes and exponents: intervals that cover (ours, the formula's), warnings.

    ``told``: covered, or warned of as a gradual tail. ``ratio``: the median stated error over the spread of alpha.
    """
    shares: dict[str, list[float]] = {"stderr": [], "told": [], "gradual": [], "formal_stderr": []}
    ratios = []
    for size in SIZES:
        for alpha in STABLE_EXPONENTS if name.startswith("stable") else EXPONENTS:
            count = dict.fromkeys(shares, 0)
            alphas, errors = [], []
            for number in range(draws):
                values = np.sort(make(stream(7, "coverage", name, size, alpha, number), size, alpha))
                tail = fit_tail(values[values > 0])
                assert tail is not None
                alphas.append(tail.alpha)
                errors.append(tail.stderr)
                inside = abs(tail.alpha - alpha) <= 1.96 * tail.stderr
                count["stderr"] += inside
                count["told"] += inside or tail.gradual
                count["gradual"] += tail.gradual
                count["formal_stderr"] += abs(tail.alpha - alpha) <= 1.96 * tail.formal_stderr
            for which, found in shares.items():
                found.append(count[which] / draws)
            ratios.append(float(np.median(errors) / np.sqrt(np.mean((np.array(alphas) - alpha) ** 2))))
    return {which: (min(found), max(found)) for which, found in (shares | {"ratio": ratios}).items()}


def noise_rates(name: str, shape: tuple[int, int], draws: int) -> dict[str, float]:
    """Shares of draws of one kind of noise with spikes, a tail of the entries, or a warning.

    ``unwarned`` are spikes without a warning that the noise is not independent entries of one variance.
    """
    counts = {"spikes": 0, "unwarned": 0, "heavy": 0, "noise-like": 0, "structured-noise": 0}
    for number in range(draws):
        W = NOISE[name](stream(11, "noise", name, *shape, number), shape)
        sp = spectrum(W if W.dtype != np.float64 else W.astype(np.float32))
        codes = {flag.code for flag in sp.warnings}
        spiked = (sp.metrics()["spikes"] or 0) > 0
        counts["spikes"] += spiked
        counts["unwarned"] += spiked and not codes & TOLD
        counts["heavy"] += sp.phase == "heavy-tailed"
        for code in ("noise-like", "structured-noise"):
            counts[code] += code in codes
    return {what: count / draws for what, count in counts.items()}


def truncation(size: int, cutoff: float, draws: int, alpha: float = 2.5) -> float:
    """Share of tails of this size, cut off at so many times their start, whose truncation has p below 0.05."""
    rng, below = stream(0, "truncation", str(size), str(cutoff)), 0
    for _ in range(draws):
        values = np.empty(0)
        while values.size < size:
            pure = rng.pareto(alpha - 1, 4 * size) + 1
            values = np.append(values, pure[rng.random(pure.size) < np.exp(-(pure - 1) / cutoff)])
        below += truncation_pvalue(values[:size]) < 0.05
    return below / draws


def main() -> None:
    """Print the rates that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["coverage", "noise", "kernels", "truncation"])
    parser.add_argument("--draws", type=int)
    parser.add_argument("--kinds", nargs="+", default=list(NOISE), choices=NOISE, metavar="KIND")
    parser.add_argument(
        "--laws", nargs="+", default=[*SHARP, *GRADUAL], choices=SHARP | GRADUAL, metavar="LAW"
    )
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{m}" for n, m in SHAPES], metavar="NxM")
    options = parser.parse_args()
    if options.what == "truncation":
        draws, cutoffs = options.draws or 400, (float("inf"), 30.0, 10.0, 4.0)
        print(
            f"share of p-values below 0.05 by size and cut-off over the start of the tail; {draws} draws each"
        )
        for size in (50, 100, 300, 1000):
            print(f"{size:5d}" + "".join(f"  {c:g}: {truncation(size, c, draws):.2f}" for c in cutoffs))
        return
    if options.what == "coverage":
        draws = options.draws or 100
        listed = [", ".join(f"{value:g}" for value in of) for of in (SIZES, EXPONENTS, STABLE_EXPONENTS)]
        print(
            f"share of 95 % intervals that cover alpha: {listed[0]} values; alpha {listed[1]} (stable: {listed[2]});"
        )
        print(f"{draws} draws each; least to largest")
        names = {
            "stderr": "alpha_stderr",
            "told": "or gradual-tail",
            "gradual": "gradual-tail",
            "formal_stderr": "(alpha-1)/sqrt(n)",
            "ratio": "stated/real error",
        }
        print(f"{'':42s}" + "".join(f"{title:>18s}" for title in names.values()))
        for title, laws in (("sharp", SHARP), ("gradual", GRADUAL)):
            for name, make in laws.items():
                if name not in options.laws:
                    continue
                found = coverage(make, name, draws)
                cells = [f"{low:.2f} to {high:.2f}" for low, high in (found[which] for which in names)]
                print(f"{title + ': ' + name:42s}" + "".join(f"{cell:>18s}" for cell in cells), flush=True)
        return
    if options.what == "kernels":
        draws = options.draws or 100
        print(f"share of {draws} draws of noise kernels with spikes, quasi-null directions, structured-noise")
        for name in TAPS:
            for shape in KERNELS:
                rates = kernel_rates(name, shape, draws)
                cells = "".join(f"{rate:>10.3f}" for rate in rates.values())
                print(f"{name:14s}{'x'.join(map(str, shape)):14s}{cells}", flush=True)
        print(
            "mean number of quasi-null directions of an identity kernel with noise of 1e-4 to 0.1, and of its slices"
        )
        for shape in KERNELS:
            for dtype in DTYPES:
                together, alone = identity_nulls(shape, dtype, max(draws // 20, 1))
                print(
                    f"{np.dtype(dtype).name:14s}{'x'.join(map(str, shape)):14s}{together:>10.3f}{alone:>10.3f}",
                    flush=True,
                )
        return
    draws = options.draws or 200
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    print(f"share of {draws} draws of noise, {', '.join(options.shapes)}: least to largest over the shapes")
    print("unwarned: spikes without a warning that the noise has structure or heavy entries")
    names = ("spikes", "unwarned", "heavy", "noise-like", "structured-noise")
    print(f"{'':28s}" + "".join(f"{name:>18s}" for name in names))
    for name in options.kinds:
        rates = [noise_rates(name, (n, m), draws) for n, m in shapes]
        cells = [f"{min(r[k] for r in rates):.3f} to {max(r[k] for r in rates):.3f}" for k in names]
        print(f"{name:28s}" + "".join(f"{cell:>18s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
