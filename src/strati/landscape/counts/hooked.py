"""Counts for networks that are not plain chains: every linear layer is watched while the data pass through.

Each use of a layer at each position is one more datum for its Gram matrices. Freedom inside a layer
(``d_in d_out - rG rK``) holds for any network around it; freedom between layers is counted for attention
heads (``heads``). Embeddings are linear layers on one-hot inputs. Weights that are tied are not analysed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strati.errors import BadInputError, UnsupportedError
from strati.landscape.behaviour import FlatModel, run
from strati.landscape.counts import exact as exactly
from strati.landscape.counts.count import Degeneracy, Size, assemble, probed, wanted
from strati.landscape.counts.gram import certified, fold, pairs_above, rank
from strati.landscape.counts.heads import Attention, find_attention, value_used
from strati.landscape.counts.jacobians import MOST_OUTPUTS
from strati.landscape.counts.structure import AtEpsilon, LayerCount
from strati.types import Flag, Tick, silent

MOST_WIDTH = 4096
"""Gram matrices of more directions are not kept; the full rank is assumed, which never overcounts."""

PROBES = 8
BATCH_VALUES = 4_000_000


@dataclass
class Watched:
    """One linear layer while the data stream by; sums over data and positions."""

    name: str
    module: nn.Module
    inputs: int
    outputs: int
    activations: Tensor | None
    jacobians: Tensor | None
    tokens: Tensor | None = None
    uses: int = 0
    last_probe: Tensor | None = None

    @property
    def activation_rank(self) -> int:
        """Rank of the inputs; of an embedding the number of different tokens."""
        if self.tokens is not None:
            return int(self.tokens.sum())
        return min(self.inputs, self.uses) if self.activations is None else rank(self.activations)

    @property
    def jacobian_rank(self) -> int:
        """Rank of the Jacobians, all of the outputs where too wide to know."""
        return self.outputs if self.jacobians is None else rank(self.jacobians)

    def take(self, value: Tensor) -> None:
        """Take in the inputs of one use."""
        if self.tokens is not None:
            self.tokens[value.reshape(-1)] = True
            self.uses += value.numel()
            return
        rows = value.detach().reshape(-1, value.shape[-1]).double()
        self.uses += rows.shape[0]
        if self.activations is not None:
            rows = fold(rows, self.inputs > rows.shape[1])
            self.activations += rows.T @ rows


def count_module(
    model: nn.Module,
    x: Tensor,
    refusal: UnsupportedError,
    *,
    epsilon: float | None = None,
    exact: bool | None = None,
    seed: int = 0,
    tick: Tick = silent,
) -> Degeneracy:
    """Count the free directions of a network that is not a plain chain.

    Args:
        model: The network.
        x: Data, rows first; integers are token ids.
        refusal: Why it is not a chain.
        epsilon: Also count at this loss scale.
        exact: See :func:`strati.landscape.counts.count.degeneracy`.
        seed: Of the probes.
        tick: Called after each batch.

    Raises:
        UnsupportedError: It holds trained layers that are not understood.
        BadInputError: There is no linear layer, or the data do not fit.
    """
    if not any(True for _ in model.parameters()):
        raise BadInputError("model", "has no linear layer; there is nothing to count")
    flat = FlatModel(model, dtype=torch.float64)
    inputs = flat.inputs(x)
    if not isinstance(inputs, Tensor):
        raise BadInputError("data", "give one array, rows first")
    layers, skipped = _find(flat.module, refusal)
    shapes = {w.name: (w.outputs, w.inputs - _bias(w.module)) for w in layers}
    attention = find_attention(flat.module, shapes)
    with torch.no_grad():
        values = run(flat, flat.theta, inputs[:1])[0].numel()
    _stream(flat, inputs, layers, attention, values, seed, tick)
    skipped += [(w.name, "never called as a layer on these data") for w in layers if w.uses == 0]
    layers = [w for w in layers if w.uses > 0]
    uncertain = [w.name for w in layers if not _settle(w)]
    rows = [_count(w, attention, int(inputs.shape[0]), epsilon) for w in layers]
    own = {k: p for k, p in flat.module.named_parameters() if p.is_floating_point()}
    parameters = sum(p.numel() for p in own.values())
    warnings = [
        Flag("not-a-chain", f"{refusal.what}: {refusal.why}; counted inside layers and attention heads only")
    ]
    if values > MOST_OUTPUTS:
        warnings.append(probed(uncertain))
    ranks = None
    total = values * int(inputs.shape[0])
    if flat.size == parameters and wanted(exact, parameters, total):
        ranks = _exact(flat, inputs, layers, warnings, required=exact is True)
    size = Size(parameters, 0, int(inputs.shape[0]), total)
    return assemble(rows, size, ranks, epsilon=epsilon, warnings=warnings, skipped=skipped)


def _find(model: nn.Module, refusal: UnsupportedError) -> tuple[list[Watched], list[tuple[str, str]]]:
    """The layers to watch, and the parameters that are left alone."""
    layers: list[Watched] = []
    skipped: list[tuple[str, str]] = []
    uses: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            uses[id(p)] = uses.get(id(p), 0) + 1
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        if any(uses[id(p)] > 1 for p in own.values()):
            skipped.append((name, "its weights are tied to another layer's"))
        elif isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":
            layers.append(_watch(name or type(model).__name__, module))
        elif all(p.ndim <= 1 for p in own.values()) and "Batch" not in type(module).__name__:
            skipped.append((name, f"{type(module).__name__}: elementwise weights"))
        elif any(True for _ in module.children()):
            skipped.append((name, "parameters outside any layer"))
        else:
            raise UnsupportedError(
                name,
                f"a layer of type {type(module).__name__} is not supported; linear layers and embeddings are",
            )
    if not any(w.tokens is None for w in layers):
        raise BadInputError("model", "has no linear layer; there is nothing to count") from refusal
    return layers, skipped


def _watch(name: str, module: nn.Module) -> Watched:
    weight: Tensor = module.weight  # type: ignore[assignment]
    if isinstance(module, nn.Embedding):
        tokens = torch.zeros(weight.shape[0], dtype=torch.bool)
        return Watched(
            name, module, int(weight.shape[0]), int(weight.shape[1]), None, _square(weight.shape[1]), tokens
        )
    outputs, inputs = weight.shape if isinstance(module, nn.Linear) else weight.T.shape
    inside = inputs + _bias(module)
    return Watched(name, module, inside, outputs, _square(inside), _square(outputs))


def _square(size: int) -> Tensor | None:
    return torch.zeros(size, size, dtype=torch.float64) if size <= MOST_WIDTH + 1 else None


def _bias(module: nn.Module) -> int:
    return int(getattr(module, "bias", None) is not None)


def _stream(
    flat: FlatModel,
    x: Tensor,
    layers: list[Watched],
    attention: list[Attention],
    values: int,
    seed: int,
    tick: Tick,
) -> None:
    """Pass the data through once, forwards for activations and backwards for Jacobians."""
    generator = torch.Generator().manual_seed(seed)
    step = max(1, BATCH_VALUES // (values + 1))
    for start in range(0, x.shape[0], step):
        with _watching(flat.module, layers, attention) as outputs, torch.enable_grad():
            result = run(flat, flat.theta, x[start : start + step])
            if not bool(torch.isfinite(result).all()):
                raise BadInputError(
                    "model", "its outputs are not finite on these data; check weights and data"
                )
            _backwards(result, outputs, generator)
        tick(f"{start + step} data")


def _backwards(result: Tensor, outputs: list[tuple[Watched, Tensor]], generator: torch.Generator) -> None:
    flat = result.reshape(result.shape[0], -1)
    exact = flat.shape[1] <= MOST_OUTPUTS
    wanted = [(w, t) for w, t in outputs if w.jacobians is not None]
    if not wanted or not result.requires_grad:
        return
    rounds = flat.shape[1] if exact else PROBES
    for index in range(rounds):
        if exact:
            target = flat[:, index].sum()
        else:
            probe = torch.randn(flat.shape, generator=generator, dtype=flat.dtype) / PROBES**0.5
            target = (flat * probe).sum()
        slopes = torch.autograd.grad(
            target, [t for _, t in wanted], retain_graph=index + 1 < rounds, allow_unused=True
        )
        for (watched, _), slope in zip(wanted, slopes, strict=True):
            if slope is not None and watched.jacobians is not None:
                rows = slope.reshape(-1, slope.shape[-1])
                if not exact and index == 0:
                    before = 0.0 if watched.last_probe is None else watched.last_probe
                    watched.last_probe = before + rows.T @ rows
                else:
                    watched.jacobians += rows.T @ rows


def _settle(watched: Watched) -> bool:
    """Put the probes of a layer together; whether they tell its rank."""
    if watched.last_probe is None or watched.jacobians is None:
        return True
    watched.jacobians, certain = certified(watched.jacobians, watched.last_probe)
    return certain


@contextmanager
def _watching(
    model: nn.Module, layers: list[Watched], attention: list[Attention]
) -> Iterator[list[tuple[Watched, Tensor]]]:
    """Hooks on the layers, taken off again whatever happens."""
    outputs: list[tuple[Watched, Tensor]] = []
    handles = []

    def watch(watched: Watched) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            watched.take(args[0])
            tracked = output if output.requires_grad else output.detach().requires_grad_()
            outputs.append((watched, tracked))
            return tracked.clone()  # what follows may write into it in place

        return hook

    try:
        handles += [w.module.register_forward_hook(watch(w)) for w in layers]
        modules = dict(model.named_modules())
        for one in attention:
            handles.append(modules[one.name].register_forward_hook(lambda _, __, out, one=one: one.add(out)))
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _count(watched: Watched, attention: list[Attention], data: int, epsilon: float | None) -> LayerCount:
    seen, slopes = watched.activation_rank, watched.jacobian_rank
    used, synchrony = seen * slopes, 0
    blocks: tuple[tuple[int, ...], ...] = ()
    for one in attention:
        if one.values == watched.name and watched.activations is not None and watched.jacobians is not None:
            bound, synchrony, blocks = value_used(
                one, _matrix(watched), watched.activations, watched.jacobians
            )
            used = min(used, bound)
    size = watched.inputs * watched.outputs
    return LayerCount(
        name=watched.name,
        inputs=watched.inputs - _bias(watched.module),
        outputs=watched.outputs,
        bias=bool(_bias(watched.module)),
        activation_rank=seen,
        jacobian_rank=slopes,
        hidden_jacobian_rank=None,
        dead=0,
        synchronised_blocks=len(blocks),
        free_from_activations=watched.outputs * (watched.inputs - seen),
        free_from_jacobians=watched.inputs * (watched.outputs - slopes),
        free_from_firing=0,
        free_from_synchrony=synchrony,
        free=size - used,
        blocks=blocks,
        at_epsilon=None if epsilon is None else _at(watched, used, data, epsilon),
    )


def _at(watched: Watched, used: int, data: int, epsilon: float) -> AtEpsilon:
    """At a loss scale; eigenvalues that were not computed count as large."""
    large = torch.tensor([float("inf")], dtype=torch.float64)
    g = (
        large
        if watched.activations is None
        else torch.linalg.eigvalsh(watched.activations / max(1, watched.uses))
    )
    k = large if watched.jacobians is None else torch.linalg.eigvalsh(watched.jacobians / data)
    above = used
    if watched.activations is not None and watched.jacobians is not None:
        above = min(used, pairs_above(g, k, epsilon))
    ranks = [
        full if values is large else int((values > epsilon).sum())
        for values, full in ((g, watched.activation_rank), (k, watched.jacobian_rank))
    ]
    return AtEpsilon(ranks[0], ranks[1], None, watched.inputs * watched.outputs - above)


def _matrix(watched: Watched) -> Tensor:
    """The layer's matrix with its bias as last column, ``(outputs, inputs)``."""
    module = watched.module
    weight: Tensor = module.weight.detach().double()  # type: ignore[operator]
    weight = weight if isinstance(module, nn.Linear) else weight.T
    if not _bias(module):
        return weight
    bias: Tensor = module.bias.detach().double()  # type: ignore[operator]
    return torch.cat([weight, bias[:, None]], 1)


def _exact(
    flat: FlatModel, x: Tensor, layers: list[Watched], warnings: list[Flag], *, required: bool
) -> exactly.ExactRanks | None:
    """Exact ranks, the parameters of no watched layer taken as one last layer."""
    inside = {id(p): w.name for w in layers for p in w.module.parameters(recurse=False)}
    parts: dict[str, list[str]] = {name: [] for name in [*(w.name for w in layers), ""]}
    for name, p in flat.module.named_parameters():
        parts[inside.get(id(p), "")].append(name)
    if not parts[""]:
        del parts[""]
    named = dict(flat.module.named_parameters())
    sizes = [sum(named[n].numel() for n in part) for part in parts.values()]
    try:
        rows, values, data = exactly.module_rows(flat.module, x, list(parts.values()))
        return exactly.exact_ranks(rows, sizes, values, data)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if required:
            raise UnsupportedError(
                "exact", f"its Jacobian cannot be taken ({reason}); leave --exact out"
            ) from error
        warnings.append(Flag("no-exact", f"the exact rank could not be computed ({reason})"))
        return None
