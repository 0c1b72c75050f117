"""Jacobian moments of any differentiable network by backward passes from random probes.

Positions of a sequence (and pixels of a feature map) count as data. A probe ``v`` of random signs gives
``E[(v^T J)^T (v^T J)] = J^T J``; where the target has few coordinates and one position the probes are its unit
vectors and the result is exact. Plain chains of linear layers have closed forms in ``basis_chain``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from strati.errors import BadInputError, UnsupportedError
from strati.landscape.interactions.basis_chain import Estimate
from strati.landscape.interactions.sites import Reading, Site, find_sites, first_tensor
from strati.landscape.interactions.whitening import Moments, MomentStream
from strati.rng import derive

if TYPE_CHECKING:
    from strati.types import FloatArray

DOUBLE_PARAMETERS = 3_000_000
"""Networks up to this size run in double precision."""
WIDEST_OUTPUT = 2048
"""A wider output is read in an orthonormal frame of the last linear map's range."""


class ProbeMachine:
    """A network with its data, read at sites through hooks.

    Args:
        model: Any module that gives a tensor (or logits); a copy is used, in evaluation mode.
        x: Inputs, floats or token numbers.
        reading: Where and how to read.
        seed: Seed of the random probes.
    """

    def __init__(self, model: nn.Module, x: torch.Tensor, reading: Reading, *, seed: int = 0) -> None:
        double = sum(p.numel() for p in model.parameters()) <= DOUBLE_PARAMETERS
        self.dtype = torch.float64 if double else torch.float32
        self._model = copy.deepcopy(model).to(self.dtype).eval().requires_grad_(False)
        tokens = not x.is_floating_point()
        self._x = x if tokens else x.to(self.dtype)
        self._sites = find_sites(self._model, reading.sites, tokens=tokens)
        halves = -(-len(x) // 2)  # two batches at least: their difference tells the error of the probes
        self._reading, self._seed = replace(reading, batch=min(reading.batch, halves)), seed
        self.frame: FloatArray | None = None
        trial = self._try()
        if not tokens and len(self._sites) > 2 and trial[-2].data_ptr() == trial[-1].data_ptr():
            self._sites = (*self._sites[:-2], self._sites[-1])  # the last block's output is the output
            del trial[-2]
        if trial[-1].shape[-1] > WIDEST_OUTPUT:
            self.frame = self._narrow(trial[-1])
        self.names = tuple(site.name for site in self._sites)
        outputs = trial[-1].shape[-1] if self.frame is None else self.frame.shape[1]
        self.widths = (*(t.shape[-1] for t in trial[:-1]), outputs)
        self.count = len(x)

    def moments(self, *, centre: bool) -> tuple[Moments, ...]:
        """Mean and second moment of the activations at every site."""
        streams = [MomentStream(centre=centre) for _ in self._sites]
        for start in self._starts():
            for each, tensor in zip(streams, self._run(start, gradients=False), strict=True):
                each.add(tensor.reshape(-1, tensor.shape[-1]).double().numpy())
        return tuple(each.finish() for each in streams)

    def to_next(self, site: int, colour: FloatArray, following: FloatArray) -> Estimate:
        """``mean_x J^T J`` in white coordinates, ``J`` from this site to the next one's basis."""
        sums = _Halves()
        c = self._tensor(following)
        for start in self._starts():
            tensors = self._run(start)
            target = tensors[site + 1] @ c.T
            for probe in self._probes(target, "next", site, start):
                (gradient,) = torch.autograd.grad(target, tensors[site], probe, retain_graph=True)
                sums.add(start // self._reading.batch, 0, self._white(gradient, colour))
        return sums.result(0, exact=self._exact(target))

    def to_output(self, colours: Sequence[FloatArray]) -> tuple[Estimate, ...]:
        """``mean_x J^T J`` in white coordinates, ``J`` from each site (but the last) to the output."""
        sums = _Halves()
        for start in self._starts():
            tensors = self._run(start)
            target = tensors[-1]
            for probe in self._probes(target, "output", start):
                gradients = torch.autograd.grad(target, tensors[:-1], probe, retain_graph=True)
                for site, (gradient, colour) in enumerate(zip(gradients, colours, strict=True)):
                    sums.add(start // self._reading.batch, site, self._white(gradient, colour))
        return tuple(sums.result(site, exact=self._exact(target)) for site in range(len(colours)))

    def edges(self, site: int, following: FloatArray, inverse: FloatArray) -> Estimate:
        """``E_ji = mean_x (d fhat_j / d fhat_i)^2``, summed over positions, by one backward pass per ``j``.

        With several positions the sum over target positions is taken by random signs, unbiased.
        """
        c, into = self._tensor(following), self._tensor(inverse)
        halves = np.zeros((2, len(following), inverse.shape[1]))
        for start in self._starts():
            tensors = self._run(start)
            target = tensors[site + 1] @ c.T
            signs = self._signs((*target.shape[:-1],), "edges", site, start)
            for j in range(len(following)):
                (gradient,) = torch.autograd.grad(target[..., j], tensors[site], signs, retain_graph=True)
                rows = (gradient @ into).double().square()
                halves[(start // self._reading.batch) % 2, j] += rows.sum(
                    dim=tuple(range(rows.ndim - 1))
                ).numpy()
        total = halves.sum(axis=0)
        if np.prod(target.shape[1:-1], dtype=int) == 1:
            return Estimate(total / self.count)
        return Estimate(total / self.count, _spread(halves[0], halves[1], total))

    def silent(self, site: int) -> FloatArray:
        """No neurons are known to be silent in a network of any kind."""
        return np.zeros((0, self.widths[site]))

    def activations(self, site: int) -> Iterator[FloatArray]:
        """The activations of a site, batch by batch, as they lie (data, positions, width)."""
        for start in self._starts():
            yield self._run(start, gradients=False)[site].double().numpy()

    def outputs(self, site: int, rows: FloatArray, start: int = 0) -> FloatArray:
        """The outputs of the data from ``start`` on when the activations of a site are ``rows``."""
        return self._replaced(site, rows, start)[-1].double().numpy()

    def onward(self, site: int, rows: FloatArray, start: int = 0) -> FloatArray:
        """The next site's activations of the data from ``start`` on when those of a site are ``rows``."""
        return self._replaced(site, rows, start)[site + 1].double().numpy()

    def _replaced(self, site: int, rows: FloatArray, start: int) -> list[torch.Tensor]:
        value = torch.from_numpy(rows).to(self.dtype)
        x = self._x[start : start + len(rows)]
        return self._forward(x, gradients=False, replace=(site, value))

    def _starts(self) -> range:
        return range(0, len(self._x), self._reading.batch)

    def _run(self, start: int, *, gradients: bool = True) -> list[torch.Tensor]:
        return self._forward(self._x[start : start + self._reading.batch], gradients=gradients)

    def _forward(
        self, x: torch.Tensor, *, gradients: bool, replace: tuple[int, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Activations at every site, width last; gradients flow from site 0 on."""
        seen: dict[int, torch.Tensor] = {}

        def read(site: int, tensor: torch.Tensor) -> torch.Tensor:
            rows = _rows(tensor)
            if replace is not None and replace[0] == site:
                rows = replace[1].reshape(rows.shape)
            elif gradients and site == 0:
                rows = rows.detach().requires_grad_()
            seen[site] = rows
            return _unrows(rows, tensor)

        with ExitStack() as stack, torch.set_grad_enabled(gradients):
            for number, site in enumerate(self._sites[:-1]):
                if site.module == "":
                    x = read(number, x)
                    continue
                handle = _hook(self._model.get_submodule(site.module), site, number, read)
                stack.callback(handle.remove)
            output = first_tensor(self._model(x))
        missing = [site.name for k, site in enumerate(self._sites[:-1]) if k not in seen]
        if missing:
            raise BadInputError(missing[0], "is not used when the network runs; name another site")
        return [*(seen[k] for k in range(len(self._sites) - 1)), output]

    def _try(self) -> list[torch.Tensor]:
        """One datum through the network, so that a misfit is said before any work."""
        try:
            tensors = self._forward(self._x[:1], gradients=False)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise BadInputError(
                "data", f"the network cannot take them: {str(error).splitlines()[0]}"
            ) from None
        if not torch.isfinite(tensors[-1]).all():
            raise BadInputError(
                "network", "its output on the first datum is not finite; check weights and data"
            )
        return tensors

    def _narrow(self, output: torch.Tensor) -> FloatArray:
        """Read a wide output in an orthonormal frame of its range: the head ``W = Q R`` is replaced by ``R``.

        The Gram matrices of outputs and Jacobians are the same in the frame ``Q``, at a fraction of the work.
        """
        width = output.shape[-1]
        heads = [
            (name, module)
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear) and module.out_features == width > module.in_features
        ]
        if not heads:
            raise UnsupportedError("output", f"is {width} wide with no linear map to it; read fewer outputs")
        name, head = heads[-1]
        matrix = head.weight.detach().double()
        if head.bias is not None:
            matrix = torch.cat([matrix, head.bias.detach().double()[:, None]], dim=1)
        frame, upper = torch.linalg.qr(matrix)
        small = nn.Linear(head.in_features, len(upper), bias=head.bias is not None, dtype=self.dtype)
        with torch.no_grad():
            small.weight.copy_(upper[:, : head.in_features])
            if head.bias is not None:
                small.bias.copy_(upper[:, -1])
        self._model.set_submodule(name, small.requires_grad_(False))
        found = self._forward(self._x[:1], gradients=False)[-1].double() @ frame.T
        if not torch.allclose(found, output.double(), rtol=1e-3, atol=1e-4 * float(output.abs().max())):
            raise UnsupportedError("output", f"is {width} wide and more than a linear map of {name}'s input")
        result: FloatArray = frame.numpy()
        return result

    def _exact(self, target: torch.Tensor) -> bool:
        positions = int(np.prod(target.shape[1:-1], dtype=int))
        return positions == 1 and target.shape[-1] <= self._reading.probes

    def _probes(self, target: torch.Tensor, *names: object) -> Iterator[torch.Tensor]:
        if self._exact(target):
            for k in range(target.shape[-1]):
                probe = torch.zeros_like(target)
                probe[..., k] = 1.0
                yield probe
            return
        scale = self._reading.probes**-0.5
        for number in range(self._reading.probes):
            yield self._signs(tuple(target.shape), *names, number) * scale

    def _signs(self, shape: tuple[int, ...], *names: object) -> torch.Tensor:
        generator = torch.Generator().manual_seed(derive(self._seed, *names))
        return torch.randint(0, 2, shape, generator=generator).to(self.dtype) * 2 - 1

    def _tensor(self, array: FloatArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.dtype)

    def _white(self, gradient: torch.Tensor, colour: FloatArray) -> torch.Tensor:
        return (gradient.reshape(-1, gradient.shape[-1]) @ self._tensor(colour)).double()


class _Halves:
    """Sums of ``g^T g`` over even and odd batches: their difference tells the error."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], FloatArray] = {}
        self._rows: dict[tuple[int, int], int] = {}

    def add(self, batch: int, key: int, rows: torch.Tensor) -> None:
        gram = (rows.T @ rows).numpy()
        half = (key, batch % 2)
        self._sums[half] = self._sums[half] + gram if half in self._sums else gram
        self._rows[key, batch] = len(rows)  # the same for every probe of a batch

    def result(self, key: int, *, exact: bool) -> Estimate:
        first = self._sums[key, 0]
        second = self._sums.get((key, 1))
        total = first if second is None else first + second
        error = 0.0 if exact else float("nan") if second is None else _spread(first, second, total)
        rows = sum(count for (site, _), count in self._rows.items() if site == key)
        return Estimate(total / rows, error)


def _spread(first: FloatArray, second: FloatArray, total: FloatArray) -> float:
    """Relative standard error of a sum from its two halves, each brought to its own total."""
    shares = (np.abs(first).sum(), np.abs(second).sum())
    if min(shares) <= 0:
        return float("nan")
    difference = first / shares[0] - second / shares[1]
    return float(np.linalg.norm(difference) * sum(shares) / np.linalg.norm(total) / 2)


def _hook(module: nn.Module, site: Site, number: int, read: Any) -> torch.utils.hooks.RemovableHandle:
    if site.side == "output":

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            changed = read(number, first_tensor(output))
            return changed if isinstance(output, torch.Tensor) else type(output)((changed, *output[1:]))

        return module.register_forward_hook(after)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (read(number, args[0]), *args[1:]), kwargs
        key = next(k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and v.is_floating_point())
        return args, kwargs | {key: read(number, kwargs[key])}

    return module.register_forward_pre_hook(before, with_kwargs=True)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Width last: feature maps (data, channels, height, width) have their channels moved."""
    return tensor.movedim(1, -1) if tensor.ndim == 4 else tensor


def _unrows(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return rows.movedim(-1, 1) if like.ndim == 4 else rows
