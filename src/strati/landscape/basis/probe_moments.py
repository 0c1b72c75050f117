"""Jacobian moments of any differentiable network by backward passes from random probes.

Positions of a sequence (and pixels of a feature map) count as data. Probes are those of ``jacobians``: unit vectors,
and exact results, where the target has few values. Activations are read at sites: the residual stream, hidden layers
of MLPs, or modules by name. Plain chains of linear layers have closed forms in ``mlp.basis_moments``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.results import Flag
from strati.evaluate.batches import whole_inputs
from strati.evaluate.hooks import Site, capture
from strati.evaluate.models import output_tensor, takes_tokens
from strati.io.layers import select_names
from strati.landscape.basis.result import BasisConfig
from strati.landscape.basis.whitening import Moments, MomentStream
from strati.landscape.jacobians import MatrixEstimate, Probes, SplitHalfEstimate, vector_jacobian_product

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
        config: Where and how to read.
        device: Where to compute; where the model is by default.
    """

    def __init__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        config: BasisConfig,
        *,
        device: torch.device | None = None,
    ) -> None:
        double = sum(p.numel() for p in model.parameters()) <= DOUBLE_PARAMETERS
        self.dtype = torch.float64 if double else torch.float32
        model_device = next(model.parameters(), x).device
        self.device = model_device if device is None else device
        self._model = copy.deepcopy(model).to(self.device, self.dtype).eval().requires_grad_(False)
        tokens = not x.is_floating_point()
        self._x = x.to(self.device) if tokens else x.to(self.device, self.dtype)
        self._sites = _chosen(find_sites(self._model, config.sites, tokens=tokens), config.layers)
        halves = -(-len(x) // 2)  # two batches at least: their difference tells the error of the probes
        self._batch = min(config.batch, halves)
        self._probes = Probes(config.probes, config.probes, config.seed)
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
        sums = [SplitHalfEstimate() for _ in sites]
        rows = [0] * len(sums)
        exact = False
        for start in self._starts():
            tensors = self._run(start)
            target = target_of(tensors)
            exact = self._probes.exact(target)
            read = [tensors[site] for site in sites]
            for gradients in vector_jacobian_product(target, read, self._probes.of(target, *names, start)):
                for k, (gradient, colour) in enumerate(zip(gradients, colours, strict=True)):
                    if gradient is None:
                        gradient = torch.zeros_like(read[k])
                    white = self._white(gradient, colour)
                    sums[k].add(start // self._batch, _array(white.T @ white))
            for k, tensor in enumerate(read):
                rows[k] += tensor[..., 0].numel()
        return tuple(each.result(count, exact=exact) for each, count in zip(sums, rows, strict=True))

    def edges(self, site: int, following: FloatArray, inverse: FloatArray) -> MatrixEstimate:
        """``E_ji = mean_x (d fhat_j / d fhat_i)^2``, summed over positions, by one backward pass per ``j``.

        With several positions the sum over target positions is taken by random signs, unbiased.
        """
        c, into = self._tensor(following), self._tensor(inverse)
        sums = SplitHalfEstimate()
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
            sums.add(start // self._batch, _array(share))
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
        return range(0, len(self._x), self._batch)

    def _run(self, start: int, *, gradients: bool = True) -> list[torch.Tensor]:
        return self._forward(self._x[start : start + self._batch], gradients=gradients)

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


RESIDUAL, MLP = "residual", "mlp"
_DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "w2", "lin2", "wo", "output.dense")
_ELEMENTWISE = (
    nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.Softplus, nn.Identity, nn.Dropout,
)  # fmt: skip


def _chosen(places: tuple[Site, ...], layers: str | Sequence[str] | None) -> tuple[Site, ...]:
    """The places that the patterns choose, in their order; the input and the output are always read."""
    if layers is None:
        return places
    inner = [site for site in places[:-1] if site.module]
    names = set(select_names([site.name for site in inner], layers, whole_blocks=True))
    return tuple(site for site in places if site not in inner or site.name in names)


def find_sites(model: nn.Module, sites: str | Sequence[str] | None, *, tokens: bool) -> tuple[Site, ...]:
    """The sites of a model in order, the output last.

    Args:
        model: The network.
        sites: As in :class:`BasisConfig`.
        tokens: The inputs are token numbers, so that site 0 is what enters the first block.

    Raises:
        BadInputError: A name is not a module's.
        UnsupportedError: No blocks are recognised.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> [site.name for site in find_sites(net, None, tokens=False)]
        ['input', '1', 'output']
    """
    last = Site("", "output")
    first = [] if tokens else [Site("", "input")]
    if isinstance(sites, str) and sites not in (RESIDUAL, MLP):
        sites = [sites]
    if sites is None and isinstance(model, nn.Sequential) and not tokens:
        return (*first, *_children(model)[:-1], last)
    if sites is None or isinstance(sites, str):
        blocks = _blocks(model)
        start = [Site(blocks[0], "input")] if tokens else first
        if sites == MLP:
            return (*start, *(_hidden(model, block) for block in blocks), last)
        return (*start, *(Site(block) for block in blocks), last)
    submodules = dict(model.named_modules())
    named = [
        Site(name.removesuffix(":input"), "input") if name.endswith(":input") else Site(name)
        for name in sites
    ]
    for site in named:
        if site.module not in submodules or site.module == "":
            raise BadInputError(
                site.module, "no module of the network has this name; see model.named_modules()"
            )
    return (*first, *named, last)


def as_data(x: Any, model: nn.Module | None = None) -> torch.Tensor:
    """Data of any kind as one tensor, rows first; whole numbers become floats unless the model takes tokens.

    Tokens in one dimension are cut into windows.

    Raises:
        BadInputError: Fewer than two rows, not numbers, not finite, or too large to be squared.

    Examples:
        >>> as_data([[1, 2], [3, 4]]).dtype, as_data([[1, 2], [3, 4]], nn.Embedding(5, 2)).dtype
        (torch.float64, torch.int64)
        >>> as_data(torch.arange(300), nn.Embedding(300, 2)).shape
        torch.Size([2, 128])
    """
    tokens = model is not None and takes_tokens(model)
    data = whole_inputs(x, model if tokens else None, of="a basis").cpu()
    if len(data) < 2:
        what = "windows of tokens" if tokens else "rows"
        raise BadInputError("data", f"holds fewer than two {what}; a basis needs activations that vary")
    if not data.is_floating_point():
        return data.long() if tokens else data.double()
    return data


def _children(model: nn.Sequential) -> list[Site]:
    """The children of a sequential network, an elementwise one counted to the module before it."""
    flat: list[tuple[str, nn.Module]] = []

    def walk(prefix: str, module: nn.Sequential) -> None:
        for name, child in module.named_children():
            if isinstance(child, nn.Sequential):
                walk(f"{prefix}{name}.", child)
            else:
                flat.append((f"{prefix}{name}", child))

    walk("", model)
    sites: list[Site] = []
    for name, child in flat:
        if isinstance(child, (*_ELEMENTWISE, nn.Flatten)) and sites:
            sites.pop()
        sites.append(Site(name))
    return sites


def _blocks(model: nn.Module) -> list[str]:
    """The blocks of a residual network or transformer, of all its stages, in the order of the network.

    A stage is a list whose children are composite modules of one class. The class with the most parameters in such
    lists is that of the blocks (not that with the most modules: a stage may hold one block only), and every list that
    holds nothing else is a stage.
    """
    stages: dict[type[nn.Module], list[list[str]]] = {}
    weight: dict[type[nn.Module], int] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [
            (f"{name}.{child}" if name else child, block)
            for child, block in module.named_children()
            if next(block.children(), None) is not None and next(block.parameters(), None) is not None
        ]
        for kind in {type(block) for _, block in children} - {nn.Sequential, nn.ModuleList}:
            same_kind = [child for child, block in children if type(block) is kind]
            stages.setdefault(kind, []).append(same_kind)
            size = sum(
                p.numel() for child, block in children if type(block) is kind for p in block.parameters()
            )
            weight[kind] = weight.get(kind, 0) + size
    if not stages:
        raise UnsupportedError(
            type(model).__name__,
            "neither a chain of linear layers nor a list of blocks; name the modules to read with sites",
        )
    shells = {
        kind for kind in stages if all(_is_shell(model, name) for stage in stages[kind] for name in stage)
    }
    blocks = {kind: names for kind, names in stages.items() if kind not in shells} or stages
    outer = [
        kind for kind in blocks if not any(_inside(blocks[kind], blocks[k]) for k in blocks if k is not kind)
    ]
    best = max(outer or blocks, key=lambda kind: weight[kind])
    return [block for stage in blocks[best] for block in stage]


def _is_shell(model: nn.Module, name: str) -> bool:
    """Whether a module does nothing but hold one list of others, as a stage holds its blocks."""
    children = list(model.get_submodule(name).children())
    return len(children) == 1 and isinstance(children[0], nn.ModuleList | nn.Sequential)


def _inside(inner: list[list[str]], outer: list[list[str]]) -> bool:
    """Whether all modules of some lists lie inside modules of others, as layers lie in blocks."""
    others = tuple(f"{name}." for stage in outer for name in stage)
    return all(name.startswith(others) for stage in inner for name in stage)


def _hidden(model: nn.Module, block: str) -> Site:
    """The hidden layer of a block's MLP: what enters its last projection."""
    inside = [name for name, _ in model.get_submodule(block).named_modules() if name]
    candidates = [name for name in inside if "attn" not in name and "attention" not in name]
    for down in _DOWN:
        for name in candidates:
            if name == down or name.endswith(f".{down}"):
                return Site(f"{block}.{name}", "input")
    linears = [n for n in candidates if isinstance(model.get_submodule(f"{block}.{n}"), nn.Linear)]
    if len(linears) >= 2:
        return Site(f"{block}.{linears[-1]}", "input")
    raise UnsupportedError(block, "has no MLP that is recognised; name its projection as a site, NAME:input")
