"""Where in a network activations are read: the residual stream, MLP hidden layers, or modules by name.

Only finds and names the places; reading activations and Jacobians there is ``basis_probes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strati.core.errors import BadInputError, UnsupportedError
from strati.evaluate.batches import whole_inputs
from strati.evaluate.hooks import Site
from strati.evaluate.models import takes_tokens
from strati.io.layers import select_names

RESIDUAL, MLP = "residual", "mlp"
_DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "w2", "lin2", "wo", "output.dense")
_ELEMENTWISE = (
    nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.Softplus, nn.Identity, nn.Dropout,
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """How a network that is not a plain chain is read.

    Args:
        sites: ``"residual"`` (the stream between blocks), ``"mlp"`` (each block's MLP hidden layer), or names
            of modules, ``"NAME"`` for what comes out and ``"NAME:input"`` for what goes in. ``None`` takes
            the children of a sequential network, else the residual stream.
        probes: Random probes per datum where the exact Jacobian would take more backward passes.
        batch: Data per forward pass.
        layers: Patterns that choose among the places found; the input and the output are always read.
    """

    sites: str | Sequence[str] | None = None
    probes: int = 32
    batch: int = 64
    layers: str | Sequence[str] | None = None

    def choose(self, places: tuple[Site, ...]) -> tuple[Site, ...]:
        """The places that the patterns choose, in their order."""
        if self.layers is None:
            return places
        inner = [site for site in places[:-1] if site.module]
        names = set(select_names([site.name for site in inner], self.layers, whole_blocks=True))
        return tuple(site for site in places if site not in inner or site.name in names)


def find_sites(model: nn.Module, sites: str | Sequence[str] | None, *, tokens: bool) -> tuple[Site, ...]:
    """The sites of a model in order, the output last.

    Args:
        model: The network.
        sites: As in :class:`Reading`.
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
