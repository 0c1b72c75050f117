"""Curvature of a loss without dense matrices: top eigenvalues, trace, spectral density, effective parameters.

Products with a vector are those of ``curvature_products``. Eigenvalues
come from block Lanczos with full orthogonalisation (a repeated eigenvalue is found as often as the block is wide), the
trace from Hutch++ (Meyer et al. 2021), the density from stochastic Lanczos quadrature (Ubaru et al. 2017).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Flag, Result, Tick, silent
from strati.core.rng import derive
from strati.evaluate.models import on_device
from strati.io.to_module import as_module
from strati.jobs.progress import as_ticker
from strati.landscape.curvature_products import CurvatureMatrix as CurvatureMatrix
from strati.landscape.curvature_products import Products
from strati.landscape.llc.parts import layer_names
from strati.landscape.objective import Loss, collect, objective

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.option_types import CurvatureOptions
    from strati.core.results import FloatArray
    from strati.io.network import Openable

EXACT_UP_TO = 600
"""Parameters up to which the matrix is computed whole, column by column, and every number is exact."""

_DOUBLE_UP_TO = 20_000  # parameters whose products are computed in double precision
_BLOCK_MARGIN = 4  # columns of a block beyond the eigenvalues asked for
_MOST_FLOPS = (
    4e12  # of all products: a minute or two; beyond it fewer products are made, on rows drawn at random
)
_PRODUCT = 6.3  # cost of a product in passes through the network: 2.1 gradients of three passes
_MOST_BYTES = 1 << 30  # that the Krylov space may take
_CONVERGED = 1e-5  # residual over the largest eigenvalue in size
_Nodes = tuple["FloatArray", "FloatArray"]
_SCALES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the largest eigenvalue


@dataclass(frozen=True)
class _Effort:
    """How many products are made: columns of the Krylov space, of the trace, probes of the density and their depth."""

    columns: int = 400
    trace: int = 60
    probes: int = 8
    depth: int = 40

    @property
    def products(self) -> int:
        return self.columns + self.trace + self.probes * self.depth


@dataclass(frozen=True)
class LayerCurvature:
    """The diagonal block of one layer: its largest eigenvalue, trace and share of negative eigenvalues."""

    name: str
    parameters: int
    top: float
    top_residual: float
    trace: float
    trace_stderr: float
    negative: float


@dataclass(frozen=True)
class Curvature(Result):
    """Eigenvalues of the curvature of a mean loss.

    Attributes:
        matrix: ``hessian``, ``gauss-newton`` or ``fisher``.
        parameters: How many vary.
        top: The largest eigenvalues, descending.
        top_residuals: ``|A v - lambda v|`` of each: an eigenvalue lies within that distance.
        trace: Sum of the eigenvalues.
        trace_stderr: Its standard error; 0.0 where it is exact.
        density: ``(eigenvalue, weight)``, weights adding up to 1.
        effective: ``(epsilon, N_eff, stderr)``: ``sum h / (h + epsilon)`` over the positive eigenvalues. The error
            holds the spread over probes and the change from half the depth of Lanczos.
        lowest: The least eigenvalue, or the least Ritz value, which lies above it.
        negative: Share of the eigenvalues below zero by more than a millionth of the largest in size.
        negative_stderr: Its standard error over probes; 0.0 where it is exact.
        condition: Largest over least eigenvalue in size, where all are known and none vanishes.
        products: Products with a vector that were computed.
        layers: With ``per_layer`` the diagonal block of each layer.
        warnings: What a reader must know.
    """

    verb: ClassVar[str] = "curvature"
    computed: ClassVar[Mapping[str, str]] = {"density": "density_rows", "effective": "effective_rows"}

    matrix: str
    parameters: int
    top: list[float]
    top_residuals: list[float]
    trace: float
    trace_stderr: float
    density: tuple[tuple[float, float], ...]
    effective: tuple[tuple[float, float, float], ...]
    products: int
    lowest: float
    negative: float
    negative_stderr: float
    condition: float | None
    layers: tuple[LayerCurvature, ...] = ()
    warnings: tuple[Flag, ...] = ()

    @property
    def density_rows(self) -> list[dict[str, float]]:
        """``density`` as in the JSON form."""
        return [{"eigenvalue": value, "weight": weight} for value, weight in self.density]

    @property
    def effective_rows(self) -> list[dict[str, float]]:
        """``effective`` as in the JSON form."""
        return [{"epsilon": e, "value": value, "stderr": error} for e, value, error in self.effective]

    def frame(self) -> pd.DataFrame:
        """One line per top eigenvalue, or with ``per_layer`` one per layer."""
        import pandas as pd

        if self.layers:
            return pd.DataFrame([dataclasses.asdict(layer) for layer in self.layers])
        return pd.DataFrame({"eigenvalue": self.top, "residual": self.top_residuals})

    def summary(self) -> RenderableType:
        """The largest eigenvalue and the trace, the top eigenvalues, effective parameters over scales."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import Column, table

        largest = self.top[0]
        first = (
            f"The largest eigenvalue of the {self.matrix} is {largest:.3g} ({self.parameters:,} parameters)."
        )
        error = "exact" if self.trace_stderr == 0 else f"+- {self.trace_stderr:.2g}"
        lines = [
            first,
            f"Trace {self.trace:.4g} ({error}); {self.negative:.1%} of the eigenvalues are negative, "
            f"the lowest is {self.lowest:.3g}.",
        ]
        lines.append("top eigenvalues: " + ", ".join(f"{value:.3g}" for value in self.top[:8]))
        rows = [(f"{e:.3g}", f"{value:.4g}", f"{error:.2g}") for e, value, error in self.effective]
        drawn = table([Column(name, right=True) for name in ("epsilon", "effective parameters", "+-")], rows)
        if self.layers:
            names = ("parameters", "largest", "trace", "+-", "negative")
            drawn = table(
                ["layer", *(Column(name, right=True) for name in names)],
                (
                    (
                        layer.name,
                        layer.parameters,
                        f"{layer.top:.3g}",
                        f"{layer.trace:.3g}",
                        f"{layer.trace_stderr:.2g}",
                        f"{layer.negative:.1%}",
                    )
                    for layer in self.layers
                ),
            )
        return Group(*(Text(line) for line in lines), drawn, *(Text(flag.text) for flag in self.warnings))


@dataclass(frozen=True)
class CurvatureConfig:
    """Options of :func:`curvature`.

    Attributes:
        matrix: ``hessian``, ``gauss-newton`` or ``fisher``.
        top: How many of the largest eigenvalues.
        epsilons: Scales of ``effective``; five decades below the largest eigenvalue by default.
        layers: Vary only these weights.
        per_layer: Also the diagonal block of each layer.
        rows: Rows of data to use, drawn at random; by default as many as a minute or two allow.
        seed: Random seed of the probes and of the rows.
        device: Where to compute; where the model is by default.
    """

    matrix: str = "hessian"
    top: int = 10
    epsilons: Sequence[float] | None = None
    layers: str | Sequence[str] | None = None
    per_layer: bool = False
    rows: int | None = None
    seed: int = 0
    device: str | None = None


def curvature(
    model: Openable,
    loss: Loss,
    data: Any,
    *,
    config: CurvatureConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[CurvatureOptions],
) -> Curvature:
    """Estimate the spectrum of the curvature of a mean loss at a module's parameters.

    ``N_eff(eps) = sum_i h_i / (h_i + eps)`` over the positive eigenvalues. The Gauss-Newton matrix is
    ``J^T H_out J`` with ``J`` the Jacobian of the outputs and ``H_out`` the Hessian of the loss in them; for squared
    errors and cross-entropies it is the Fisher matrix.

    Args:
        model: Whatever names a network.
        loss: A name or a function of (output, target), as for :func:`strati.llc`.
        data: As for :func:`strati.llc`.
        config: Options; keywords of the same names win.
        tick: Called after each product.
        **options: Fields of :class:`CurvatureConfig`.

    Raises:
        BadInputError: No such matrix, the data do not fit, or the loss has no second derivatives.

    References:
        Meyer, Musco, Musco, Woodruff, Hutch++ (2021); Ubaru, Chen, Saad, SIAM J. Matrix Anal. 38 (2017);
        Ghorbani, Krishnan, Xiao (2019).

    Examples:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> result = curvature(model, "behavioural-mse", torch.tensor([[1.0], [2.0]]), top=1)
        >>> result.top, result.trace, result.trace_stderr  # 2 mean(x^2)
        ([5.0], 5.0, 0.0)
    """
    settings = resolve(CurvatureConfig, config, options, of=curvature)
    kind = _checked(settings)
    network = on_device(as_module(model), settings.device)
    dtype = torch.float64 if sum(p.numel() for p in network.parameters()) <= _DOUBLE_UP_TO else None
    x, y = collect(data, network)
    names = layer_names(network, settings.layers) if settings.per_layer else []
    pair, effort, flags = _affordable(network, loss, (x, y), settings, 1 + len(names))
    ticker = as_ticker(tick)
    ticker.expect(effort.products * (1 + len(names)))

    def spectrum(layers: str | Sequence[str] | None, top: int) -> Curvature:
        mean = objective(network, loss, pair, layers=layers, dtype=dtype)
        products = Products(mean, kind, done=lambda: ticker("products"))
        return _spectrum(products, dataclasses.replace(settings, top=top), effort)

    total = spectrum(settings.layers, settings.top)
    blocks = []
    for name in names:
        block = spectrum([name], 1)
        blocks.append(
            LayerCurvature(
                name,
                block.parameters,
                block.top[0],
                block.top_residuals[0],
                block.trace,
                block.trace_stderr,
                block.negative,
            )
        )
    return dataclasses.replace(total, layers=tuple(blocks), warnings=(*total.warnings, *flags))


def _affordable(
    network: nn.Module, loss: Loss, data: tuple[Any, Any], settings: CurvatureConfig, matrices: int
) -> tuple[Any, _Effort, tuple[Flag, ...]]:
    """The rows to use, how many products to make, and what a reader must know of that."""
    x, y = data
    count = len(next(iter(x.values()))) if isinstance(x, Mapping) else len(x)
    few = _taken(x, y, slice(0, 2))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            size = objective(network, loss, few, layers=settings.layers).flat.size
    except BadInputError:
        objective(network, loss, _taken(x, y, slice(None)), layers=settings.layers)  # says it of all rows
        raise
    # The loss is computed twice, on the way to an objective.
    pass_flops = counter.get_total_flops() / 2 / min(count, 2)
    effort = _Effort(columns=size, trace=0, probes=0) if size <= EXACT_UP_TO else _Effort()
    budget = _MOST_FLOPS / matrices
    cost = _PRODUCT * pass_flops
    if effort.products * cost * min(count, settings.rows or count) > budget and size > EXACT_UP_TO:
        effort = _Effort(columns=12 * (settings.top + _BLOCK_MARGIN), trace=30, probes=4, depth=24)
    rows = settings.rows or max(2, int(budget / max(1.0, effort.products * cost)))
    if rows >= count:
        return _taken(x, y, slice(None)), effort, ()
    generator = torch.Generator().manual_seed(derive(settings.seed, "rows"))
    places = torch.randperm(count, generator=generator)[:rows].sort().values
    text = f"computed on {rows:,} of {count:,} rows, drawn at random"
    more = "" if settings.rows else f" so that it takes a minute or two; rows={count} (--rows) takes all"
    return _taken(x, y, places), effort, (Flag("sampled-rows", text + more),)


def _taken(x: Any, y: Any, rows: slice | Tensor) -> Any:
    """Some rows of inputs, with their targets if there are any."""
    inputs = {name: part[rows] for name, part in x.items()} if isinstance(x, Mapping) else x[rows]
    return inputs if y is None else (inputs, y[rows])


def _spectrum(products: Products, settings: CurvatureConfig, effort: _Effort) -> Curvature:
    count = min(settings.top, products.size)
    condition = None
    if products.size <= EXACT_UP_TO:
        values, residuals = _dense(products)
        every = np.full(len(values), 1 / len(values))
        nodes = halves = [(values, every)]
        trace, error = float(values.sum()), 0.0
        warnings: tuple[Flag, ...] = ()
        sizes = np.abs(values)
        if sizes.min() > len(sizes) * np.finfo(float).eps * sizes.max():
            condition = float(sizes.max() / sizes.min())
    else:
        generator = torch.Generator().manual_seed(derive(settings.seed, "curvature"))
        values, residuals = _largest(products, count, generator, effort.columns)
        trace, error = _hutch(products, generator, effort.trace // 3)
        nodes, halves = _quadrature(products, generator, effort.probes, effort.depth)
        warnings = _unconverged(values[:count], residuals[:count])
    scale = max(float(np.abs(values).max()), np.finfo(float).tiny)
    epsilons = (
        [s * scale for s in _SCALES] if settings.epsilons is None else list(map(float, settings.epsilons))
    )
    largest = max(float(np.abs(value).max()) for value, _ in nodes)
    negative = [float(weight[value < -1e-6 * largest].sum()) for value, weight in nodes]
    return Curvature(
        matrix=str(settings.matrix),
        parameters=products.size,
        top=[float(v) for v in values[:count]],
        top_residuals=[float(r) for r in residuals[:count]],
        trace=trace,
        trace_stderr=error,
        density=tuple(
            (float(v), float(w) / len(nodes))
            for value, weight in nodes
            for v, w in zip(value, weight, strict=True)
        ),
        effective=tuple((e, *_effective(nodes, halves, e, products.size)) for e in epsilons),
        products=products.count,
        lowest=min(float(value.min()) for value, _ in nodes),
        negative=float(np.mean(negative)),
        negative_stderr=_error(negative),
        condition=condition,
        warnings=warnings,
    )


def _checked(settings: CurvatureConfig) -> CurvatureMatrix:
    matrix, top, epsilons, rows = settings.matrix, settings.top, settings.epsilons, settings.rows
    if matrix not in set(CurvatureMatrix):
        raise BadInputError("matrix", f"no such matrix {matrix!r}; there are: {', '.join(CurvatureMatrix)}")
    for name, number in (("top", top), ("rows", rows)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise BadInputError(name, f"must be a whole number of at least 1, not {number!r}")
    if epsilons is not None and not all(math.isfinite(e) and e > 0 for e in epsilons):
        raise BadInputError("epsilons", "must be positive numbers")
    return CurvatureMatrix(matrix)


def _dense(products: Products) -> tuple[FloatArray, FloatArray]:
    """All eigenvalues, descending, and the residuals of their vectors."""
    matrix = products.block(
        torch.eye(products.size, dtype=products.theta.dtype, device=products.theta.device)
    )
    matrix = (matrix + matrix.T) / 2
    values, vectors = torch.linalg.eigh(matrix.double())
    residuals = torch.linalg.vector_norm(matrix.double() @ vectors - vectors * values, dim=0)
    return _array(values.flip(0)), _array(residuals.flip(0))


def _largest(
    products: Products, count: int, generator: torch.Generator, columns: int
) -> tuple[FloatArray, FloatArray]:
    """The algebraically largest eigenvalues, descending, and their residuals, by block Lanczos."""
    width = min(count + _BLOCK_MARGIN, products.size)
    each = products.size * products.theta.element_size() * 2
    most = max(width, min(products.size, max(columns, 3 * width), int(_MOST_BYTES / each)))
    basis = torch.linalg.qr(products.random_signs(width, generator))[0]
    images = products.block(basis)
    while True:
        small = basis.T @ images
        values, vectors = torch.linalg.eigh(((small + small.T) / 2).double())
        leading = vectors.flip(1)[:, :count].to(basis.dtype)
        ritz_values = values.flip(0)[:count]
        difference = images @ leading - (basis @ leading) * ritz_values.to(basis.dtype)
        residuals = torch.linalg.vector_norm(difference, dim=0).double()
        enough = bool((residuals <= _CONVERGED * values.abs().max()).all())
        left = min(width, most - basis.shape[1])
        if enough or left < 1:
            return _array(ritz_values), _array(residuals)
        following = images[:, -left:]
        for _ in range(2):
            following = following - basis @ (basis.T @ following)
        following, factor = torch.linalg.qr(following)
        if float(factor.diagonal().abs().min()) <= 1e-10 * float(values.abs().max()):
            # The space is invariant: go on from a random direction outside it.
            following = products.random_signs(left, generator)
            for _ in range(2):
                following = torch.linalg.qr(following - basis @ (basis.T @ following))[0]
        basis = torch.cat([basis, following], dim=1)
        images = torch.cat([images, products.block(following)], dim=1)


def _hutch(products: Products, generator: torch.Generator, part: int) -> tuple[float, float]:
    """The trace and its standard error, by Hutch++: exact on a sketched subspace, sampled on the rest."""
    basis = torch.linalg.qr(products.block(products.random_signs(part, generator)))[0]
    inside = float((basis * products.block(basis)).sum())
    probes = products.random_signs(part, generator)
    probes = probes - basis @ (basis.T @ probes)
    samples = _array((probes * products.block(probes)).sum(0))
    return inside + float(samples.mean()), float(samples.std(ddof=1)) / math.sqrt(part)


def _quadrature(
    products: Products, generator: torch.Generator, probes: int, depth: int
) -> tuple[list[_Nodes], list[_Nodes]]:
    """Nodes and weights of the spectral density seen by each random vector, and those at half the depth.

    As many vectors as memory allows go side by side, each with a Krylov space of its own.
    """
    columns = max(2, int(_MOST_BYTES / (products.size * products.theta.element_size())))
    depth = min(depth, products.size, columns)
    together = max(1, min(probes, columns // depth))
    full: list[_Nodes] = []
    shallow: list[_Nodes] = []
    for start in range(0, probes, together):
        number = min(together, probes - start)
        vectors = torch.cat([products.random_signs(1, generator) for _ in range(number)], dim=1)
        basis, diagonal, beside = [vectors / math.sqrt(products.size)], [], []
        for step in range(depth):
            image = products.block(basis[-1])
            diagonal.append(_array((basis[-1] * image).sum(0)))
            if step + 1 == depth:
                break
            for _ in range(2):
                for vector in basis:
                    image -= vector * (vector * image).sum(0)
            size = image.norm(dim=0)
            beside.append(_array(size))
            basis.append(image / size.clamp(min=1e-300))
        for alpha, beta in zip(np.stack(diagonal, 1), np.stack(beside, 1), strict=True):
            # A space that is invariant ends there.
            small = np.flatnonzero(beta <= 1e-10 * np.abs(alpha).max())
            length = int(small[0]) + 1 if small.size else depth
            full.append(_nodes(alpha[:length], beta[: length - 1]))
            half = max(1, length // 2)
            shallow.append(_nodes(alpha[:half], beta[: half - 1]))
    return full, shallow


def _nodes(diagonal: FloatArray, beside: FloatArray) -> _Nodes:
    values, vectors = scipy.linalg.eigh_tridiagonal(diagonal, beside)
    return values, vectors[0] ** 2


def _effective(nodes: list[_Nodes], halves: list[_Nodes], epsilon: float, size: int) -> tuple[float, float]:
    """``N_eff`` and its error: over the probes, and what half the depth changes."""

    def each(probes: list[_Nodes]) -> list[float]:
        return [size * float((w * v.clip(0) / (v.clip(0) + epsilon)).sum()) for v, w in probes]

    deep, shallow = each(nodes), each(halves)
    value = float(np.mean(deep))
    return value, math.hypot(_error(deep), value - float(np.mean(shallow)))


def _error(samples: list[float]) -> float:
    """Standard error of a mean; 0 for one exact value."""
    return float(np.std(samples, ddof=1)) / math.sqrt(len(samples)) if len(samples) > 1 else 0.0


def _unconverged(values: FloatArray, residuals: FloatArray) -> tuple[Flag, ...]:
    loose = int((residuals > _CONVERGED * np.abs(values).max()).sum())
    if not loose:
        return ()
    return (
        Flag(
            "unconverged", f"{loose} of {len(values)} top eigenvalues have not converged; see their residuals"
        ),
    )


def _array(tensor: Tensor) -> FloatArray:
    values: FloatArray = tensor.detach().double().cpu().numpy()
    return values
