"""Jacobian moments of any differentiable network by backward passes from random probes.

Positions of a sequence (and pixels of a feature map) count as data. Hooks are those of ``recorder``, probes those of
``probes``: unit vectors, and exact results, where the target has few values. Plain chains of linear layers have closed
forms in ``basis_chain``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.results import Flag
from strati.evaluate.hooks import Site, capture
from strati.evaluate.models import output_tensor
from strati.landscape.basis.sites import Reading, find_sites
from strati.landscape.basis.whitening import Moments, MomentStream
from strati.landscape.jacobians import Halves, MatrixEstimate, Probes, pulled_back

if TYPE_CHECKING:
    from strati.core.results import FloatArray

DOUBLE_PARAMETERS = 3_000_000
"""Networks up to this size run in double precision."""
WIDEST_OUTPUT = 2048
"""A wider output is read in an orthonormal frame of the last linear map's range."""


class ProbeBackend:
    """A network with its data, read at sites through hooks.

    Args:
        model: Any module that gives a tensor (or logits); a copy is used, in evaluation mode.
        x: Inputs, floats or token numbers.
        reading: Where and how to read.
        seed: Seed of the random probes.
        device: Where to compute; where the model is by default.
    """

    def __init__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        reading: Reading,
        *,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        double = sum(p.numel() for p in model.parameters()) <= DOUBLE_PARAMETERS
        self.dtype = torch.float64 if double else torch.float32
        model_device = next(model.parameters(), x).device
        self.device = model_device if device is None else device
        self._model = copy.deepcopy(model).to(self.device, self.dtype).eval().requires_grad_(False)
        tokens = not x.is_floating_point()
        self._x = x.to(self.device) if tokens else x.to(self.device, self.dtype)
        self._sites = reading.choose(find_sites(self._model, reading.sites, tokens=tokens))
        halves = -(-len(x) // 2)  # two batches at least: their difference tells the error of the probes
        self._reading = replace(reading, batch=min(reading.batch, halves))
        self._probes = Probes(reading.probes, reading.probes, seed)
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
        inside = [name for name in self.names if name not in ("input", "output")]
        if inside:
            text = (
                f"read at {len(inside)} places, {inside[0]} to {inside[-1]}; other modules lie between them"
            )
            self.notes: tuple[Flag, ...] = (Flag("read-at", text),)
        else:
            self.notes = ()

    def moments(self, *, centre: bool) -> tuple[Moments, ...]:
        """Mean and second moment of the activations at every site."""
        streams = [MomentStream(centre=centre) for _ in self._sites]
        for start in self._starts():
            for each, tensor in zip(streams, self._run(start, gradients=False), strict=True):
                each.add(_array(tensor.reshape(-1, tensor.shape[-1])))
        return tuple(each.finish() for each in streams)

    def to_next(self, site: int, colour: FloatArray, following: FloatArray) -> MatrixEstimate:
        """``mean_x J^T J`` in white coordinates, ``J`` from this site to the next one's basis."""
        c = self._tensor(following)
        (moments,) = self._pulled(("next", site), [site], [colour], lambda tensors: tensors[site + 1] @ c.T)
        return moments

    def to_output(self, colours: Sequence[FloatArray]) -> tuple[MatrixEstimate, ...]:
        """``mean_x J^T J`` in white coordinates, ``J`` from each site (but the last) to the output."""
        return self._pulled(("output",), range(len(colours)), colours, lambda tensors: tensors[-1])

    def _pulled(
        self,
        names: tuple[object, ...],
        sites: Sequence[int],
        colours: Sequence[FloatArray],
        target_of: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> tuple[MatrixEstimate, ...]:
        """``mean_x J^T J`` in white coordinates for some sites and one target, with its error."""
        sums = [Halves() for _ in sites]
        rows = [0] * len(sums)
        exact = False
        for start in self._starts():
            tensors = self._run(start)
            target = target_of(tensors)
            exact = self._probes.exact(target)
            read = [tensors[site] for site in sites]
            for gradients in pulled_back(target, read, self._probes.of(target, *names, start)):
                for k, (gradient, colour) in enumerate(zip(gradients, colours, strict=True)):
                    if gradient is None:
                        gradient = torch.zeros_like(read[k])
                    white = self._white(gradient, colour)
                    sums[k].add(start // self._reading.batch, _array(white.T @ white))
            for k, tensor in enumerate(read):
                rows[k] += tensor[..., 0].numel()
        return tuple(each.result(count, exact=exact) for each, count in zip(sums, rows, strict=True))

    def edges(self, site: int, following: FloatArray, inverse: FloatArray) -> MatrixEstimate:
        """``E_ji = mean_x (d fhat_j / d fhat_i)^2``, summed over positions, by one backward pass per ``j``.

        With several positions the sum over target positions is taken by random signs, unbiased.
        """
        c, into = self._tensor(following), self._tensor(inverse)
        sums = Halves()
        alone = True
        for start in self._starts():
            tensors = self._run(start)
            target = tensors[site + 1] @ c.T
            alone = target[0, ..., 0].numel() == 1
            signs = self._probes.random(tuple(target.shape[:-1]), target, "edges", site, start)
            rows = []
            for j in range(len(following)):
                (gradient,) = torch.autograd.grad(target[..., j], tensors[site], signs, retain_graph=True)
                rows.append((gradient @ into).double().square().flatten(0, -2).sum(0))
            share = torch.stack(rows) if rows else torch.zeros(0, inverse.shape[1])
            sums.add(start // self._reading.batch, _array(share))
        return sums.result(self.count, exact=alone or not len(following))

    def silent(self, site: int) -> FloatArray:
        """No neurons are known to be silent in a network of any kind."""
        return np.zeros((0, self.widths[site]))

    def activations(self, site: int) -> Iterator[FloatArray]:
        """The activations of a site, batch by batch, as they lie (data, positions, width)."""
        for start in self._starts():
            yield _array(self._run(start, gradients=False)[site])

    def outputs(self, site: int, rows: FloatArray, start: int = 0) -> FloatArray:
        """The outputs of the data from ``start`` on when the activations of a site are ``rows``."""
        return _array(self._replaced(site, rows, start)[-1])

    def onward(self, site: int, rows: FloatArray, start: int = 0) -> FloatArray:
        """The next site's activations of the data from ``start`` on when those of a site are ``rows``."""
        return _array(self._replaced(site, rows, start)[site + 1])

    def _replaced(self, site: int, rows: FloatArray, start: int) -> list[torch.Tensor]:
        value = self._tensor(rows)
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
        captured: dict[int, torch.Tensor] = {}
        numbers = {site: number for number, site in enumerate(self._sites[:-1])}

        def read(site: Site, tensor: torch.Tensor) -> torch.Tensor:
            number, rows = numbers[site], _rows(tensor)
            if replace is not None and replace[0] == number:
                rows = replace[1].reshape(rows.shape)
            elif gradients and number == 0:
                rows = rows.detach().requires_grad_()
            captured[number] = rows
            return _unrows(rows, tensor)

        inside = [site for site in numbers if site.module]
        with (
            capture(self._model, inside, read) if inside else nullcontext(),
            torch.set_grad_enabled(gradients),
        ):
            for site in numbers:
                if not site.module:
                    x = read(site, x)
            output = output_tensor(self._model(x))
        missing = [site.name for k, site in enumerate(self._sites[:-1]) if k not in captured]
        if missing:
            raise BadInputError(missing[0], "is not used when the network runs; name another site to read")
        return [*(captured[k] for k in range(len(self._sites) - 1)), output]

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
                "network", "its output on the first row of data is not finite; check weights and data"
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
        small = nn.Linear(
            head.in_features, len(upper), bias=head.bias is not None, dtype=self.dtype, device=self.device
        )
        with torch.no_grad():
            small.weight.copy_(upper[:, : head.in_features])
            if head.bias is not None:
                small.bias.copy_(upper[:, -1])
        self._model.set_submodule(name, small.requires_grad_(False))
        projected = self._forward(self._x[:1], gradients=False)[-1].double() @ frame.T
        if not torch.allclose(projected, output.double(), rtol=1e-3, atol=1e-4 * float(output.abs().max())):
            raise UnsupportedError("output", f"is {width} wide and more than a linear map of {name}'s input")
        return _array(frame)

    def _tensor(self, array: FloatArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, self.dtype)

    def _white(self, gradient: torch.Tensor, colour: FloatArray) -> torch.Tensor:
        return (gradient.reshape(-1, gradient.shape[-1]) @ self._tensor(colour)).double()


def _array(tensor: torch.Tensor) -> FloatArray:
    result: FloatArray = tensor.detach().double().cpu().numpy()
    return result


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Width last: feature maps (data, channels, height, width) have their channels moved."""
    return tensor.movedim(1, -1) if tensor.ndim == 4 else tensor


def _unrows(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return rows.movedim(-1, 1) if like.ndim == 4 else rows
