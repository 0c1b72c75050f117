"""Counts for networks that are not plain chains: every layer with a matrix is watched while the data pass through.

Each use of a layer at each position is one more datum for its factors (``layer_statistics``). Freedom inside a layer
(``d_in d_out - rG rK``) holds for any network around it. Freedom between layers is counted where a symmetry of the
network is known and seen to hold (``symmetries``), and between the values and outputs of attention heads.
Weights that are tied are not analysed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.results import Flag, Tick, silent
from strati.evaluate.hooks import Precision, Site, capture, on_output
from strati.io.layers import select_names
from strati.landscape.counts import exact as exactly
from strati.landscape.counts.layer_statistics import (
    Convolution,
    HeadWeights,
    LayerStatistics,
    find_attention,
    value_used,
    watch,
)
from strati.landscape.counts.ranks import EPS, TWIN, pairs_above, perturb
from strati.landscape.counts.result import (
    Degeneracy,
    DegeneracyConfig,
    ProblemSize,
    assemble,
    probe_warning,
    should_compute_exact,
    undecided,
)
from strati.landscape.counts.symmetries import Symmetries, find_symmetries
from strati.landscape.jacobians import Probes, vector_jacobian_product
from strati.landscape.mlp.statistics_pass import MOST_OUTPUTS
from strati.landscape.mlp.structure import AtEpsilon, LayerCount
from strati.landscape.objective import FlatModel, run

T = TypeVar("T")
PROBES = 8
BATCH_VALUES = 4_000_000
NOISE_ROWS = 4
FOUND = "75 to 100 % (with convolutions 28 to 95 %)"
"""Share of the free directions that the structural count finds in small networks with skips, convolutions, norms and
attention, whose exact rank is known; from ``benchmarks/bench_counts.py``."""


def count_module(
    model: nn.Module,
    x: Tensor,
    refusal: UnsupportedError,
    config: DegeneracyConfig,
    *,
    tick: Tick = silent,
) -> Degeneracy:
    """Count the free directions of a network that is not a plain chain.

    Args:
        model: The network.
        x: Data, rows first; integers are token ids.
        refusal: Why it is not a chain.
        config: Options of :func:`strati.degeneracy`.
        tick: Called after each batch.

    Raises:
        UnsupportedError: It holds trained layers that are not understood.
        BadInputError: There is no linear layer, or the data do not fit.
    """
    epsilon = config.epsilon
    if not any(True for _ in model.parameters()):
        raise BadInputError("model", "has no linear layer; there is nothing to count")
    flat = FlatModel(model, dtype=torch.float64)
    inputs = flat.inputs(x)
    if not isinstance(inputs, Tensor):
        raise BadInputError("data", "give one array, rows first")
    layers, skipped = _find(flat.module, refusal, whole=epsilon is not None)
    shapes = {w.name: (w.outputs, w.inputs - w.bias) for w in layers}
    attention = find_attention(flat.module, shapes)
    with torch.no_grad(), Precision() as met:
        values = run(flat, flat.theta, inputs[:1])[0].numel()
    rounding = float(torch.finfo(met.coarsest).eps)
    step = TWIN * rounding / EPS
    probes = Probes(PROBES, MOST_OUTPUTS, config.seed, law="normal")
    _measure_noise(flat, inputs[:NOISE_ROWS], layers, probes, step)
    _stream(flat, inputs, layers, attention, values, probes, tick, near=epsilon is not None)
    skipped += [(w.name, "never called as a layer on these data") for w in layers if w.uses == 0]
    layers = [w for w in layers if w.uses > 0]
    uncertain = [w.name for w in layers if not w.settle()]
    selected = set(select_names([w.name for w in layers], config.layers))
    is_subset = len(selected) < len(layers)  # freedom between layers needs them all to vary
    layers = [w for w in layers if w.name in selected]
    symmetries = Symmetries() if is_subset else find_symmetries(flat, inputs, layers, rounding)
    rows = [_count(w, attention, symmetries, int(inputs.shape[0]), epsilon) for w in layers]
    named_parameters = {k: p for k, p in flat.module.named_parameters() if p.is_floating_point()}
    parameters = (
        sum(w.inputs * w.outputs for w in layers)
        if is_subset
        else sum(p.numel() for p in named_parameters.values())
    )
    warnings = [_bound(refusal, symmetries)]
    if values > MOST_OUTPUTS:
        warnings.append(probe_warning(uncertain))
    if open_ones := [w.name for w in layers if not w.decided]:
        warnings.append(undecided(open_ones))
    ranks = least = None
    data = int(inputs.shape[0])
    total = values * data
    complete = is_subset or flat.size == parameters
    if complete and should_compute_exact(config.exact, parameters, total):
        ranks = _exact(
            flat, inputs, layers, warnings, step, epsilon, required=config.exact is True, rest=not is_subset
        )
    elif flat.size == parameters and config.exact is None:
        least = _or_reason(
            lambda: exactly.least_rank(
                parameters,
                values,
                data,
                lambda n: exactly.module_rows(flat.module, inputs[:n], [list(flat.names)], step=step)[0],
            ),
            warnings,
            required=False,
        )
    size = ProblemSize(parameters, 0, data, total, least)
    return assemble(
        rows, size, ranks, epsilon=epsilon, warnings=warnings, skipped=skipped, elsewhere=symmetries.elsewhere
    )


def _bound(refusal: UnsupportedError, found: Symmetries) -> Flag:
    """What kind of bound this is, and how loose it may be."""
    kinds = f" ({', '.join(found.kinds)})" if found.kinds else ""
    text = (
        f"{refusal.what} is no plain MLP: free directions are counted inside layers and by symmetries between "
        f"them{kinds}; in small networks this finds {FOUND} of them"
    )
    return Flag("not-a-chain", text)


def _find(
    model: nn.Module, refusal: UnsupportedError, *, whole: bool
) -> tuple[list[LayerStatistics], list[tuple[str, str]]]:
    """The layers to watch, and the parameters that are left alone."""
    layers: list[LayerStatistics] = []
    skipped: list[tuple[str, str]] = []
    uses: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            uses[id(p)] = uses.get(id(p), 0) + 1
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        is_supported = isinstance(module, nn.Linear | nn.Embedding | Convolution)
        if any(uses[id(p)] > 1 for p in parameters.values()):
            skipped.append((name, "its weights are tied to another layer's"))
        elif is_supported or type(module).__name__ == "Conv1D":
            layers.append(watch(name, module, whole=whole))
        elif all(p.ndim <= 1 for p in parameters.values()):
            skipped.append((name, f"{type(module).__name__}: elementwise weights"))
        elif any(True for _ in module.children()):
            skipped.append((name, "parameters outside any layer"))
        else:
            raise UnsupportedError(
                name,
                f"a layer of type {type(module).__name__} is not supported; linear layers, 1-d and 2-d "
                "convolutions, embeddings and normalisations are",
            )
    if not any(w.tokens is None for w in layers):
        raise BadInputError("model", "has no linear layer; there is nothing to count") from refusal
    return layers, skipped


@contextmanager
def _watching(
    model: nn.Module, layers: list[LayerStatistics], take: Any
) -> Iterator[list[tuple[LayerStatistics, Tensor]]]:
    """Every use of every layer: its input goes to ``take``, its output is kept to be differentiated by."""
    by_name = {w.name: w for w in layers}
    outputs: list[tuple[LayerStatistics, Tensor]] = []

    def visit(place: Site, tensor: Tensor) -> Tensor:
        watched = by_name[place.module]
        if place.side == "input":
            take(watched, tensor)
            return tensor
        tracked = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        outputs.append((watched, tracked))
        return tracked.clone()  # what follows may write into it in place

    places = [Site(w.name, side) for w in layers for side in ("input", "output")]
    with capture(model, places, visit):
        yield outputs


def _stream(
    flat: FlatModel,
    x: Tensor,
    layers: list[LayerStatistics],
    attention: list[HeadWeights],
    values: int,
    probes: Probes,
    tick: Tick,
    *,
    near: bool,
) -> None:
    """Pass the data through once, forwards for activations and backwards for Jacobians."""
    patterns = {layer.name: layer for layer in attention}
    latest: dict[str, Tensor] = {}

    def add_jacobian(name: str, output: Any) -> None:
        if name in patterns:
            patterns[name].add(output, latest.get(patterns[name].values))
        else:
            latest[name] = output

    step = max(1, BATCH_VALUES // (values + 1))
    for start in range(0, x.shape[0], step):
        with (
            _watching(flat.module, layers, LayerStatistics.take) as outputs,
            on_output(flat.module, [*patterns, *(layer.values for layer in attention if near)], add_jacobian),
            torch.enable_grad(),
        ):
            result = run(flat, flat.theta, x[start : start + step])
            if not bool(torch.isfinite(result).all()):
                raise BadInputError(
                    "model", "its outputs are not finite on these data; check weights and data"
                )
            for number, watched, slope in _slopes(result, outputs, probes, start):
                watched.add_jacobian(slope, last=number == 0 and not probes.exact(result))
        tick(f"{min(start + step, x.shape[0])} data")


def _slopes(
    result: Tensor, outputs: list[tuple[LayerStatistics, Tensor]], probes: Probes, start: int
) -> Iterator[tuple[int, LayerStatistics, Tensor]]:
    """For every probe and use of a layer: the gradient with respect to its output."""
    wanted_ones = [(w, t) for w, t in outputs if w.jacobians]
    if not wanted_ones or not result.requires_grad:
        return
    tensors = [t for _, t in wanted_ones]
    for number, slopes in enumerate(
        vector_jacobian_product(result, tensors, probes.of(result, "jacobians", start))
    ):
        for (watched, _), slope in zip(wanted_ones, slopes, strict=True):
            if slope is not None:
                yield number, watched, slope


def _measure_noise(
    flat: FlatModel, x: Tensor, layers: list[LayerStatistics], probes: Probes, step: float
) -> None:
    """Rows of activations and Jacobians against those of a network and data a little away."""
    generator = torch.Generator().manual_seed(probes.seed)
    near = perturb(flat.theta, generator, step), perturb(x, generator, step)
    compared = []
    for theta, rows in ((flat.theta, x), near):
        taken: list[tuple[LayerStatistics, list[Tensor]]] = []
        keep = lambda w, t, taken=taken: taken.append((w, w.rows_in(t)))  # noqa: E731
        with _watching(flat.module, layers, keep) as outputs, torch.enable_grad():
            result = run(flat, theta, rows)
            heard = [(w, w.rows_out(s)) for _, w, s in _slopes(result, outputs, probes, 0)]
        compared.append((taken, heard))
    for kind, (first, second) in enumerate(zip(*compared, strict=True)):
        for (watched, original), (_, twin) in zip(first, second, strict=True):
            factors = watched.jacobians if kind else watched.activations
            for factor, a, b in zip(factors, original, twin, strict=False):
                factor.compare(a, b)


def _count(
    watched: LayerStatistics,
    attention: list[HeadWeights],
    found: Symmetries,
    data: int,
    epsilon: float | None,
) -> LayerCount:
    ranks = watched.ranks()
    each = watched.outputs // watched.groups
    extra = found.between.get(watched.name, 0)
    used, synchrony = sum(s * t for s, t in ranks) - extra, extra
    blocks: tuple[tuple[int, ...], ...] = ()
    alike: int | None = None
    there: int | None = None
    for layer in attention:
        if layer.values == watched.name and watched.activations and watched.jacobians:
            factors = watched.matrix(), watched.activations[0], watched.jacobians[0]
            bound, shared, blocks = value_used(layer, *factors)
            fused = extra if layer.start else 0  # then the symmetries are those of its queries and keys
            near = None if epsilon is None else layer.blocks_within(epsilon)
            if near is not None:
                above, _, together = value_used(layer, *factors, near)
                there, alike = min(used, above - fused), len(together)
            used, synchrony = min(used, bound - fused), fused + max(synchrony - fused, shared)
    size = watched.inputs * watched.outputs
    return LayerCount(
        name=watched.name or type(watched.module).__name__,
        inputs=watched.inputs - watched.bias,
        outputs=watched.outputs,
        bias=watched.bias,
        activation_rank=max(s for s, _ in ranks),
        jacobian_rank=sum(t for _, t in ranks),
        hidden_jacobian_rank=None,
        dead=0,
        synchronised_blocks=len(blocks),
        free_from_activations=sum(each * (watched.inputs - s) for s, _ in ranks),
        free_from_jacobians=sum(watched.inputs * (each - t) for _, t in ranks),
        free_from_firing=0,
        free_from_synchrony=synchrony,
        free=size - max(0, used),
        blocks=blocks,
        at_epsilon=None
        if epsilon is None
        else _at(watched, max(0, used if there is None else min(used, there)), data, epsilon, alike),
    )


def _at(watched: LayerStatistics, used: int, data: int, epsilon: float, alike: int | None) -> AtEpsilon:
    """At a loss scale; eigenvalues that were not computed count as large."""
    inputs_seen = heard = above = 0
    is_measured = bool(watched.activations) and bool(watched.jacobians)
    for group, (s, t) in enumerate(watched.ranks()):
        g = k = None
        if watched.activations:
            g = torch.linalg.eigvalsh(watched.activations[group].gram() / max(1, watched.uses))
        if watched.jacobians:
            k = torch.linalg.eigvalsh(watched.jacobians[group].gram() / data)
        inputs_seen = max(inputs_seen, s if g is None else int((g > epsilon).sum()))
        heard += t if k is None else int((k > epsilon).sum())
        if g is not None and k is not None:
            above += pairs_above(g, k, epsilon)
    free = watched.inputs * watched.outputs - (min(used, above) if is_measured else used)
    return AtEpsilon(inputs_seen, heard, alike, free)


def _exact(
    flat: FlatModel,
    x: Tensor,
    layers: list[LayerStatistics],
    warnings: list[Flag],
    step: float,
    epsilon: float | None,
    *,
    required: bool,
    rest: bool,
) -> exactly.ExactRanks | None:
    """Exact ranks, the parameters of no watched layer taken as one last layer (with ``rest``)."""
    inside = {id(p): w.name for w in layers for p in w.module.parameters(recurse=False)}
    parts: dict[str | None, list[str]] = {name: [] for name in [*(w.name for w in layers), None]}
    for name, p in flat.module.named_parameters():
        parts[inside.get(id(p))].append(name)
    if not parts[None] or not rest:
        del parts[None]
    named = dict(flat.module.named_parameters())
    sizes = [sum(named[n].numel() for n in part) for part in parts.values()]

    def ranks() -> exactly.ExactRanks:
        rows, values, data = exactly.module_rows(flat.module, x, list(parts.values()), step=step)
        return exactly.exact_ranks(rows, sizes, values, data, epsilon=epsilon)

    return _or_reason(ranks, warnings, required=required)


def _or_reason(compute: Callable[[], T | None], warnings: list[Flag], *, required: bool) -> T | None:
    """What needs the Jacobian, or ``None`` with a warning where that cannot be taken."""
    try:
        return compute()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if required:
            raise UnsupportedError(
                "exact", f"its Jacobian cannot be taken ({reason}); ask for the structural count"
            ) from error
        warnings.append(Flag("no-exact", f"the exact rank could not be computed ({reason})"))
        return None
