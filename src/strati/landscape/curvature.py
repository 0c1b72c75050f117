"""Curvature of a loss without dense matrices: top eigenvalues, trace, spectral density, effective parameters.

Products of the Hessian or Gauss-Newton matrix with a vector cost a few gradients, reverse over reverse. Eigenvalues
come from block Lanczos with full orthogonalisation (a repeated eigenvalue is found as often as the block is wide), the
trace from Hutch++ (Meyer et al. 2021), the density from stochastic Lanczos quadrature (Ubaru et al. 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vjp

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Flag, Result, Tick, silent
from strati.core.rng import derive
from strati.evaluate.models import on_device
from strati.io.to_module import as_module
from strati.landscape.objective import Loss, Objective, objective

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.option_types import CurvatureOptions
    from strati.core.results import FloatArray
    from strati.io.network import Openable
    from strati.schemas.json_types import CurvatureFields

EXACT_UP_TO = 600
"""Parameters up to which the matrix is computed whole, column by column, and every number is exact."""

_DOUBLE_UP_TO = 20_000  # parameters whose products are computed in double precision
_PROBES, _DEPTH = 8, 40  # of the density
_TRACE_PRODUCTS = 60
_BLOCK_MARGIN = 4  # columns of a block beyond the eigenvalues asked for
_MOST_COLUMNS = 400  # of the Krylov space
_MOST_BYTES = 1 << 30  # that the Krylov space may take
_CONVERGED = 1e-5  # residual over the largest eigenvalue in size
_SCALES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the largest eigenvalue


class CurvatureMatrix(StrEnum):
    """Which matrix: second derivatives of the loss, or ``J^T H_out J``; the Fisher matrix is the latter."""

    HESSIAN = "hessian"
    GAUSS_NEWTON = "gauss-newton"
    FISHER = "fisher"


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
        effective: ``(epsilon, N_eff, stderr)``: ``sum h / (h + epsilon)`` over the positive eigenvalues.
        products: Products with a vector that were computed.
        warnings: What a reader must know.
    """

    verb: ClassVar[str] = "curvature"

    matrix: str
    parameters: int
    top: list[float]
    top_residuals: list[float]
    trace: float
    trace_stderr: float
    density: tuple[tuple[float, float], ...]
    effective: tuple[tuple[float, float, float], ...]
    products: int
    warnings: tuple[Flag, ...] = ()

    @property
    def negative(self) -> float:
        """Share of the eigenvalues that lie below zero by more than a millionth of the largest in size."""
        largest = max((abs(value) for value, _ in self.density), default=0.0)
        return float(sum(weight for value, weight in self.density if value < -1e-6 * largest))

    def payload(self) -> CurvatureFields:
        """The interface's fields, residuals and the number of products."""
        return {
            "matrix": self.matrix,
            "parameters": self.parameters,
            "trace": self.trace,
            "trace_stderr": self.trace_stderr,
            "top": self.top,
            "top_residuals": self.top_residuals,
            "density": [{"eigenvalue": value, "weight": weight} for value, weight in self.density],
            "effective": [
                {"epsilon": e, "value": value, "stderr": error} for e, value, error in self.effective
            ],
            "negative": self.negative,
            "products": self.products,
            "warnings": self.warnings,
        }

    def frame(self) -> pd.DataFrame:
        """One line per top eigenvalue."""
        import pandas as pd

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
            f"Trace {self.trace:.4g} ({error}); {self.negative:.1%} of the eigenvalues are negative.",
        ]
        lines.append("top eigenvalues: " + ", ".join(f"{value:.3g}" for value in self.top[:8]))
        rows = [(f"{e:.3g}", f"{value:.4g}", f"{error:.2g}") for e, value, error in self.effective]
        drawn = table([Column(name, right=True) for name in ("epsilon", "effective parameters", "+-")], rows)
        return Group(*(Text(line) for line in lines), drawn, *(Text(flag.text) for flag in self.warnings))


@dataclass(frozen=True)
class CurvatureConfig:
    """Options of :func:`curvature`.

    Attributes:
        matrix: ``hessian``, ``gauss-newton`` or ``fisher``.
        top: How many of the largest eigenvalues.
        epsilons: Scales of ``effective``; five decades below the largest eigenvalue by default.
        layers: Vary only these weights.
        seed: Random seed of the probes.
        device: Where to compute; where the model is by default.
    """

    matrix: str = "hessian"
    top: int = 10
    epsilons: Sequence[float] | None = None
    layers: str | Sequence[str] | None = None
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
        tick: Called after each stage.
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
    kind = _checked(settings.matrix, settings.top, settings.epsilons)
    network = on_device(as_module(model), settings.device)
    size = sum(p.numel() for p in network.parameters())
    whole = objective(
        network, loss, data, layers=settings.layers, dtype=torch.float64 if size <= _DOUBLE_UP_TO else None
    )
    product = _Product(whole, kind)
    count = min(settings.top, product.size)
    exact = product.size <= EXACT_UP_TO
    if exact:
        values, residuals = _dense(product)
        nodes = [(values, np.full(len(values), 1 / len(values)))]
        trace, error = float(values.sum()), 0.0
        warnings: tuple[Flag, ...] = ()
    else:
        generator = torch.Generator().manual_seed(derive(settings.seed, "curvature"))
        values, residuals = _largest(product, count, generator)
        tick("top eigenvalues")
        trace, error = _hutch(product, generator)
        tick("trace")
        nodes = [_quadrature(product, generator) for _ in range(_PROBES)]
        tick("density")
        warnings = _unconverged(values[:count], residuals[:count])
    scale = max(float(np.abs(values).max()), np.finfo(float).tiny)
    epsilons = (
        [s * scale for s in _SCALES] if settings.epsilons is None else list(map(float, settings.epsilons))
    )
    return Curvature(
        matrix=str(kind),
        parameters=product.size,
        top=[float(v) for v in values[:count]],
        top_residuals=[float(r) for r in residuals[:count]],
        trace=trace,
        trace_stderr=error,
        density=tuple(
            (float(v), float(w) / len(nodes))
            for value, weight in nodes
            for v, w in zip(value, weight, strict=True)
        ),
        effective=tuple((e, *_effective(nodes, e, product.size)) for e in epsilons),
        products=product.count,
        warnings=warnings,
    )


def _checked(matrix: str, top: int, epsilons: Sequence[float] | None) -> CurvatureMatrix:
    if matrix not in set(CurvatureMatrix):
        raise BadInputError("matrix", f"no such matrix {matrix!r}; there are: {', '.join(CurvatureMatrix)}")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise BadInputError("top", f"must be a whole number of at least 1, not {top!r}")
    if epsilons is not None and not all(math.isfinite(e) and e > 0 for e in epsilons):
        raise BadInputError("epsilons", "must be positive numbers")
    return CurvatureMatrix(matrix)


class _Product:
    """Products of a curvature matrix with vectors, reverse over reverse; counts them."""

    def __init__(self, whole: Objective, kind: CurvatureMatrix) -> None:
        self.whole, self.theta = whole, whole.flat.theta
        self.size, self.count = whole.flat.size, 0
        if kind is CurvatureMatrix.FISHER and whole.name is None:
            raise BadInputError(
                "matrix", "fisher needs a loss known by name; use gauss-newton for your own loss"
            )
        self._apply = self._hessian if kind is CurvatureMatrix.HESSIAN else self._gauss_newton
        try:
            probe = self._apply(torch.ones_like(self.theta))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise BadInputError("loss", f"has no second derivatives ({reason})") from error
        if not bool(torch.isfinite(probe).all()):
            raise BadInputError("loss", "its second derivatives are not finite at the given parameters")

    def __call__(self, vector: Tensor) -> Tensor:
        self.count += 1
        return self._apply(vector).detach()

    def block(self, columns: Tensor) -> Tensor:
        return torch.stack([self(column) for column in columns.T], dim=1)

    def _hessian(self, vector: Tensor) -> Tensor:
        slope: Callable[[Tensor], Tensor] = grad(lambda t: self.whole(t).reshape(()))
        product: Tensor = grad(lambda t: (slope(t) * vector).sum())(self.theta)
        return product

    def _gauss_newton(self, vector: Tensor) -> Tensor:
        output, pull = _pullback(lambda t: self.whole.flat(t, self.whole.x), self.theta)
        # Two pullbacks make a pushforward: J^T u is linear in u, and its pullback of v is J v.
        _, push = _pullback(pull, torch.zeros_like(output))
        loss, target = self.whole.loss, self.whole.target
        slope: Callable[[Tensor], Tensor] = grad(lambda o: loss(o, target).reshape(()))
        _, bend = _pullback(slope, output.detach())
        return pull(bend(push(vector)))

    def random_signs(self, columns: int, generator: torch.Generator) -> Tensor:
        signs = torch.randint(0, 2, (self.size, columns), generator=generator)
        return (2 * signs - 1).to(self.theta)


def _pullback(
    function: Callable[[Tensor], Tensor], point: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The value of a function of one tensor, and the product of a cotangent with its Jacobian."""
    parts: tuple[Any, ...] = vjp(function, point)
    value, pull = parts[0], parts[1]
    return value, lambda cotangent: pull(cotangent)[0]


def _dense(product: _Product) -> tuple[FloatArray, FloatArray]:
    """All eigenvalues, descending, and the residuals of their vectors."""
    matrix = product.block(torch.eye(product.size, dtype=product.theta.dtype, device=product.theta.device))
    matrix = (matrix + matrix.T) / 2
    values, vectors = torch.linalg.eigh(matrix.double())
    residuals = torch.linalg.vector_norm(matrix.double() @ vectors - vectors * values, dim=0)
    return _array(values.flip(0)), _array(residuals.flip(0))


def _largest(product: _Product, count: int, generator: torch.Generator) -> tuple[FloatArray, FloatArray]:
    """The algebraically largest eigenvalues, descending, and their residuals, by block Lanczos."""
    width = min(count + _BLOCK_MARGIN, product.size)
    each = product.size * product.theta.element_size() * 2
    most = max(width, min(product.size, max(_MOST_COLUMNS, 3 * width), int(_MOST_BYTES / each)))
    basis = torch.linalg.qr(product.random_signs(width, generator))[0]
    images = product.block(basis)
    while True:
        small = basis.T @ images
        values, vectors = torch.linalg.eigh(((small + small.T) / 2).double())
        chosen = vectors.flip(1)[:, :count].to(basis.dtype)
        found = values.flip(0)[:count]
        rest = images @ chosen - (basis @ chosen) * found.to(basis.dtype)
        residuals = torch.linalg.vector_norm(rest, dim=0).double()
        enough = bool((residuals <= _CONVERGED * values.abs().max()).all())
        left = min(width, most - basis.shape[1])
        if enough or left < 1:
            return _array(found), _array(residuals)
        following = images[:, -left:]
        for _ in range(2):
            following = following - basis @ (basis.T @ following)
        following, factor = torch.linalg.qr(following)
        if float(factor.diagonal().abs().min()) <= 1e-10 * float(values.abs().max()):
            # The space is invariant: go on from a random direction outside it.
            following = product.random_signs(left, generator)
            for _ in range(2):
                following = torch.linalg.qr(following - basis @ (basis.T @ following))[0]
        basis = torch.cat([basis, following], dim=1)
        images = torch.cat([images, product.block(following)], dim=1)


def _hutch(product: _Product, generator: torch.Generator) -> tuple[float, float]:
    """The trace and its standard error, by Hutch++: exact on a sketched subspace, sampled on the rest."""
    part = _TRACE_PRODUCTS // 3
    basis = torch.linalg.qr(product.block(product.random_signs(part, generator)))[0]
    inside = float((basis * product.block(basis)).sum())
    probes = product.random_signs(part, generator)
    probes = probes - basis @ (basis.T @ probes)
    samples = _array((probes * product.block(probes)).sum(0))
    return inside + float(samples.mean()), float(samples.std(ddof=1)) / math.sqrt(part)


def _quadrature(product: _Product, generator: torch.Generator) -> tuple[FloatArray, FloatArray]:
    """Nodes and weights of the spectral density seen by one random vector."""
    depth = max(
        2, min(_DEPTH, product.size, int(_MOST_BYTES / (product.size * product.theta.element_size())))
    )
    vector = product.random_signs(1, generator)[:, 0]
    vector = vector / vector.norm()
    basis, diagonal, beside = [vector], [], []
    for _ in range(depth):
        image = product(basis[-1])
        diagonal.append(float(basis[-1] @ image))
        stacked = torch.stack(basis, dim=1)
        for _ in range(2):
            image = image - stacked @ (stacked.T @ image)
        size = float(image.norm())
        if size <= 1e-10 * max(abs(d) for d in diagonal) or len(diagonal) == depth:
            break
        beside.append(size)
        basis.append(image / size)
    tridiagonal = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    values, vectors = np.linalg.eigh(tridiagonal)
    return values, vectors[0] ** 2


def _effective(nodes: list[tuple[FloatArray, FloatArray]], epsilon: float, size: int) -> tuple[float, float]:
    """``N_eff`` and its standard error over the probes."""
    each = []
    for values, weights in nodes:
        positive = np.clip(values, 0, None)
        each.append(size * float((weights * positive / (positive + epsilon)).sum()))
    error = float(np.std(each, ddof=1)) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    return float(np.mean(each)), error


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
