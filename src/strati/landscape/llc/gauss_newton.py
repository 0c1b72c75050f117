"""What the curvature at the minimum alone says about the learning coefficient, in closed form.

For a quadratic loss with Hessian eigenvalues ``h_i`` and localisation ``gamma``,
``lambda(nbeta) = 1/2 sum_i nbeta h_i / (nbeta h_i + gamma)`` at every temperature at once. It is a second opinion
beside the sampler: where they differ, excursions leave the quadratic region. Also the factorised Hessian of eq. 37.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import digamma
from torch import Tensor, nn
from torch.func import jacrev, vmap

from strati.core.errors import UnsupportedError
from strati.landscape.llc.config import DENSE_LIMIT
from strati.landscape.objective import Objective, gauss_newton_matrix, metric_jacobian

if TYPE_CHECKING:
    from strati.core.results import FloatArray


_NUMBERS = 100_000_000  # in a Jacobian that is held whole


def closed_form(curvature: FloatArray, nbeta: float, gamma: float) -> float:
    """``1/2 sum_i nbeta h_i / (nbeta h_i + gamma)``.

    Args:
        curvature: Eigenvalues ``h_i`` of the Hessian of the loss.
        nbeta: Inverse temperature.
        gamma: Localisation.

    Examples:
        >>> closed_form(np.array([1.0, 0.0]), 1e4, 1.0)
        0.49995...
    """
    stiff = nbeta * np.maximum(curvature, 0.0)
    return float(0.5 * (stiff / (stiff + gamma)).sum())


def matching_scale(coefficient: float, nbeta: float) -> float:
    """The loss scale that a temperature sees: ``exp(digamma(lambda + 1)) / nbeta``.

    ``nbeta <L>`` is the average of ``lambda(eps)`` under the weight ``V(eps) exp(-nbeta eps)``, for ``V ~ eps^lambda``
    a Gamma distribution of shape ``lambda + 1``, whose geometric mean this is: near ``1/nbeta`` for
    ``lambda = 1/2``, near ``lambda/nbeta`` for a large ``lambda``.

    Examples:
        >>> round(matching_scale(0.5, 1.0), 3), round(matching_scale(100.0, 1.0), 1)
        (1.037, 100.5)
    """
    return float(np.exp(digamma(coefficient + 1.0)) / nbeta)


def temperature_for(epsilon: float, curvature: FloatArray, gamma: float) -> float:
    """The inverse temperature that sees the loss scale ``epsilon``, were the loss quadratic."""

    def gap(log_nbeta: float) -> float:
        nbeta = float(np.exp(log_nbeta))
        return float(np.log(matching_scale(closed_form(curvature, nbeta, gamma), nbeta) / epsilon))

    centre = -np.log(epsilon)
    return float(np.exp(brentq(gap, centre - 2, centre + np.log(len(curvature) + 10.0) + 2)))


def curvature_spectrum(objective: Objective) -> FloatArray | None:
    """Eigenvalues of the Gauss-Newton matrix of a named loss, ascending; ``None`` if there are too many.

    Examples:
        >>> from strati.landscape.objective import behavioural_loss
        >>> loss = behavioural_loss(nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [2.0]]))
        >>> curvature_spectrum(loss)
        array([5.])
    """
    flat = objective.flat
    if objective.name is None:
        return None
    kind = "mse" if objective.name.squared else "kl"
    if flat.size <= DENSE_LIMIT:
        values = torch.linalg.eigvalsh(gauss_newton_matrix(flat, objective.x, kind=kind))
        spectrum: FloatArray = np.maximum(values.double().cpu().numpy(), 0.0)
        return spectrum
    # Many parameters but few data: the same eigenvalues, but for zeros, from products between the data.
    if objective.target.numel() > DENSE_LIMIT or objective.target.numel() * flat.size > _NUMBERS:
        return None
    jacobian, samples = metric_jacobian(flat, flat.theta, objective.x, kind=kind)
    scale = 2.0 / objective.rows if kind == "mse" else 1.0 / samples
    few = np.maximum(torch.linalg.eigvalsh(scale * (jacobian @ jacobian.T)).double().cpu().numpy(), 0.0)
    return np.concatenate([np.zeros(max(0, flat.size - len(few))), few])


def factorised_hessian(model: nn.Sequential, x: Tensor) -> Tensor:
    """Eq. 37: the Hessian of the behavioural loss as one Kronecker product per layer, nothing between layers.

    Block ``l`` is ``2 K^l (x) G^l`` with ``G`` the Gram matrix of the layer's inputs (bias folded in) and ``K`` that
    of the output's Jacobians with respect to its preactivations.

    Args:
        model: Linear layers with biases and elementwise activations in sequence.
        x: Inputs.

    Returns:
        ``(N, N)``, parameters ordered as in :class:`~strati.landscape.objective.FlatModel`.

    Raises:
        UnsupportedError: The module is not such a sequence.
    """
    stages = list(model)
    linears = [i for i, s in enumerate(stages) if isinstance(s, nn.Linear)]
    if not linears or any(stages[i].bias is None for i in linears):
        raise UnsupportedError(
            "model", "the factorised Hessian needs a Sequential of Linear layers with biases"
        )
    blocks = []
    inputs = x
    for position, stage in enumerate(stages):
        if isinstance(stage, nn.Linear):
            with torch.no_grad():
                before = stage(inputs)
            rest = nn.Sequential(*stages[position + 1 :])
            jacobian = vmap(jacrev(lambda p, rest=rest: rest(p[None])[0]))(before).detach()
            folded = torch.cat([inputs, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
            gram = folded.T @ folded / len(x)
            back = torch.einsum("nki,nkj->ij", jacobian, jacobian) / len(x)
            blocks.append(_reordered(2 * torch.kron(back, gram), stage.in_features, stage.out_features))
        with torch.no_grad():
            inputs = stage(inputs)
    matrix: Tensor = torch.block_diag(*blocks)
    return matrix


def _reordered(block: Tensor, inputs: int, outputs: int) -> Tensor:
    """From (output, input with bias last) to all weights first, then the biases."""
    index = torch.arange(outputs * (inputs + 1)).reshape(outputs, inputs + 1)
    order = torch.cat([index[:, :inputs].reshape(-1), index[:, inputs]])
    return block[order][:, order]
