"""Products of the Hessian or Gauss-Newton matrix of a mean loss with vectors, reverse over reverse.

The pass through the network is made once and its graph is kept, so that a product costs about two gradients instead of
three. Where the graph of all data would not fit into memory, the data are passed in pieces, and the graph of a piece
serves all vectors of a block. How many rows fit is measured: the tensors that the graph of one row saves are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

import torch
from torch import Tensor
from torch.func import grad, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from strati.core.errors import BadInputError
from strati.evaluate.batches import NO_LABEL
from strati.landscape.objective import LossName, Objective

_GRAPH_BYTES = 1 << 30  # of the tensors that a graph saves


class CurvatureMatrix(StrEnum):
    """Which matrix: second derivatives of the loss, or ``J^T H_out J``; the Fisher matrix is the latter."""

    HESSIAN = "hessian"
    GAUSS_NEWTON = "gauss-newton"
    FISHER = "fisher"


class Products:
    """Products of a curvature matrix with vectors; ``count`` says how many there were.

    Args:
        objective: A mean loss.
        kind: Which matrix.
        graph_bytes: What the graph of a pass may save; larger ones are computed in pieces.
        done: Called after each product.

    Raises:
        BadInputError: The loss has no second derivatives, or they are not finite.
    """

    def __init__(
        self,
        objective: Objective,
        kind: CurvatureMatrix,
        *,
        graph_bytes: int = _GRAPH_BYTES,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self.objective, self.theta = objective, objective.flat.theta
        self.size, self.count, self._done = objective.flat.size, 0, done
        if kind is CurvatureMatrix.FISHER and objective.name is None:
            raise BadInputError(
                "matrix", "fisher needs a loss known by name; use gauss-newton for your own loss"
            )
        self._prepare = self._hessian if kind is CurvatureMatrix.HESSIAN else self._gauss_newton
        self._graph: Callable[[Tensor], Tensor] | None = None
        try:
            self._pieces = list(self._cut(graph_bytes))
            probe = self._apply(torch.ones_like(self.theta)[:, None])
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise BadInputError("loss", f"has no second derivatives ({reason})") from error
        if not bool(torch.isfinite(probe).all()):
            raise BadInputError("loss", "its second derivatives are not finite at the given parameters")

    def __call__(self, vector: Tensor) -> Tensor:
        """The product with one vector."""
        return self.block(vector[:, None])[:, 0]

    def block(self, columns: Tensor) -> Tensor:
        """The product with each column of a matrix."""
        products = self._apply(columns)
        self.count += columns.shape[1]
        return products

    def random_signs(self, columns: int, generator: torch.Generator) -> Tensor:
        """Columns of random signs."""
        signs = torch.randint(0, 2, (self.size, columns), generator=generator)
        return (2 * signs - 1).to(self.theta)

    def _apply(self, columns: Tensor) -> Tensor:
        vectors = columns.T.contiguous()
        total = torch.zeros_like(vectors)
        for piece, weight in self._pieces:
            product = self._graph or self._prepare(piece, weight)
            if len(self._pieces) == 1:
                self._graph = product
            for number, vector in enumerate(vectors):
                total[number] += product(vector).detach()
                if piece is self._pieces[-1][0]:
                    self._done()
        return total.T

    def _cut(self, graph_bytes: int) -> Iterator[tuple[Objective, float]]:
        """Pieces of the data and their weights in the mean loss; a loss of the caller's is computed whole."""
        objective = self.objective
        rows = objective.rows
        if objective.name is not None:
            rows = max(1, int(graph_bytes / max(1, self._saved_bytes(objective.part(slice(0, 1))))))
        if rows >= objective.rows:
            yield objective, 1.0
            return
        for start in range(0, objective.rows, rows):
            piece = objective.part(slice(start, start + rows))
            share = _terms(piece) / _terms(objective)
            if share > 0:
                yield piece, share

    def _saved_bytes(self, piece: Objective) -> int:
        """What the graph of a piece saves beside the parameters."""
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            graph = self._prepare(piece, 1.0)
        del graph
        parameters = self.theta.nbytes
        return sum(size for size in sizes.values() if size != parameters)

    def _hessian(self, piece: Objective, weight: float) -> Callable[[Tensor], Tensor]:
        leaf = self.theta.detach().clone().requires_grad_(True)
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivatives
            loss = weight * piece(leaf).reshape(())
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        if not slope.requires_grad:  # the loss is linear
            return torch.zeros_like
        return lambda vector: _pulled(slope, leaf, vector)

    def _gauss_newton(self, piece: Objective, weight: float) -> Callable[[Tensor], Tensor]:
        leaf = self.theta.detach().clone().requires_grad_(True)
        with sdpa_kernel(SDPBackend.MATH):
            output = piece.flat(leaf, piece.x)
        # J^T u is linear in u, and its derivative in u times v is J v: two reverse passes make a forward one.
        cotangent = torch.zeros_like(output, requires_grad=True)
        (pulled,) = torch.autograd.grad(output, leaf, cotangent, create_graph=True)
        bend = _output_hessian(piece, output.detach())
        return lambda vector: weight * _pulled(output, leaf, bend(_pulled(pulled, cotangent, vector)))


def _pulled(value: Tensor, leaf: Tensor, cotangent: Tensor) -> Tensor:
    (product,) = torch.autograd.grad(
        value, leaf, cotangent, retain_graph=True, materialize_grads=True, allow_unused=True
    )
    return product.detach()


def _terms(piece: Objective) -> int:
    """How many terms the mean of a named loss has."""
    if piece.name is LossName.CROSS_ENTROPY and not piece.target.is_floating_point():
        return int((piece.target != NO_LABEL).sum())
    return piece.rows


def _output_hessian(piece: Objective, output: Tensor) -> Callable[[Tensor], Tensor]:
    """Products with the Hessian of the loss in the outputs: in closed form for named losses, block by block.

    ``2/n`` for squared errors, ``(diag(p) - p p^T)/n`` for a prediction ``p``: nothing grows with the square of the
    number of classes.
    """
    if piece.name is None:
        slope: Callable[[Tensor], Tensor] = grad(lambda o: piece.loss(o, piece.target).reshape(()))
        pull: Callable[[Tensor], tuple[Tensor]] = vjp(slope, output)[1]
        return lambda vector: pull(vector)[0]
    if piece.name.squared:
        return lambda vector: 2 / output.shape[0] * vector
    chance = torch.softmax(output, dim=-1)
    count = output.numel() // output.shape[-1]
    if piece.name is LossName.CROSS_ENTROPY and not piece.target.is_floating_point():
        labelled = (piece.target != NO_LABEL).reshape(output.shape[:-1])
        count = int(labelled.sum())
        weight = labelled[..., None].to(output.dtype) / count
    else:
        weight = torch.full_like(chance[..., :1], 1 / count)
    return lambda vector: weight * chance * (vector - (chance * vector).sum(dim=-1, keepdim=True))
