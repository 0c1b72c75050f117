"""The interaction basis of a network: in every layer, the directions that matter to what comes after.

``f_hat = C (f - mean)``, from degeneracy-in-the-loss-landscape, section 6 and appendix A, with the corrections
in docs/methods/basis.md. Interaction strengths between the directions are ``graph``, modules ``modules``.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack, get_args

import numpy as np
import torch

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.options import resolve
from strati.core.results import Flag, Tick, silent
from strati.evaluate.models import device_of
from strati.io.to_module import as_module
from strati.landscape.basis.probe_moments import ProbeBackend, as_data
from strati.landscape.basis.result import BasisConfig as BasisConfig
from strati.landscape.basis.result import BasisLayer, InteractionBasis, Kind
from strati.landscape.basis.whitening import (
    Moments,
    Whitening,
    diagonalise,
    fix_signs,
    repeated,
    whitening,
)
from strati.landscape.jacobians import MatrixEstimate
from strati.landscape.mlp.basis_moments import ChainBackend
from strati.landscape.mlp.sequential import as_chain

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from strati.core.option_types import BasisOptions
    from strati.core.results import FloatArray
    from strati.io.network import Openable

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-9}
"""Eigenvalues below this share of the largest count as zero, by the precision the network runs in."""
BasisBackend = ChainBackend | ProbeBackend
"""A network with its data, ready to give moments, Jacobian moments and edges."""
LOSES_OUTPUT = 1e-6
"""A layer whose there-and-back changes the outputs by more than this share is flagged."""


def interaction_basis(
    model: Openable,
    data: ArrayLike | torch.Tensor,
    kind: Kind = "interaction",
    *,
    config: BasisConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[BasisOptions],
) -> InteractionBasis:
    r"""The basis of every layer in which activations and Jacobians are diagonal together.

    With ``G = U^T D U`` the second moment of the layer's activations and ``M = mean_x J^T J`` that of the
    Jacobians to the output (``"local"``: to the next layer's basis coordinates), diagonalise
    ``D^{1/2} U M U^T D^{1/2} = V^T Lambda V`` and take ``C = Lambda^{1/2} V D^{-1/2} U``. Directions along which
    the activations do not vary, or which nothing after depends on, are gone. The last layer's basis is PCA.
    Reference: degeneracy-in-the-loss-landscape, section 6 and appendix A, as corrected in docs/methods/basis.md.

    Args:
        model: Whatever names a network: a chain of linear layers and activations (exact closed forms), or any module
            with blocks.
        data: Inputs, one row each; token numbers for a transformer.
        kind: ``"interaction"``, ``"local"``, ``"pca"`` or ``"neuron"``.
        config: Options; keywords of the same names win.
        tick: Called after each layer.
        options: Fields of :class:`BasisConfig`.

    Raises:
        BadInputError: The data do not fit the network, or are not finite, or no such option.
        UnsupportedError: The network is neither a chain nor made of blocks.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
        >>> x = torch.randn(100, 3) @ torch.randn(3, 6)       # inputs in a 3-dimensional space
        >>> [layer.directions for layer in interaction_basis(net, x).layers]
        [3, 2, 2]
    """
    if kind not in get_args(Kind):
        raise BadInputError(kind, f"no such basis; there are: {', '.join(get_args(Kind))}")
    settings = resolve(BasisConfig, config, options, of=interaction_basis)
    machine = build_backend(model, data, settings)
    cut = settings.tolerance
    if cut is None:
        cut = TOLERANCE[getattr(machine, "dtype", torch.float64)]
    moments = machine.moments(centre=settings.centre)
    whites = [whitening(moment, cut) for moment in moments]
    layers = _layers(kind, machine, moments, whites, (cut, settings.epsilon), tick)
    layers = [
        layer if layer.round_trip is not None else _with_round_trip(machine, number, layer)
        for number, layer in enumerate(layers)
    ]
    layers[-1] = _in_frame(layers[-1], machine.frame)
    flags = (*machine.notes, *_warnings(layers))
    return InteractionBasis(
        kind,
        tuple(layers),
        settings.centre,
        cut,
        settings.epsilon,
        machine.count,
        settings.seed,
        flags,
        machine,
    )


def build_backend(model: Openable, x: ArrayLike | torch.Tensor, config: BasisConfig) -> BasisBackend:
    """A network with its data, by closed forms where it is a chain and by backward passes where not."""
    model = as_module(model)
    data = as_data(x, model)
    device = None if config.device is None else device_of(model, config.device)
    anywhere = config.sites is None and config.layers is None
    chain = None
    if anywhere and data.is_floating_point() and not hasattr(model, "config"):
        with suppress(UnsupportedError):
            chain = as_chain(model)
    if chain is None:
        return ProbeBackend(model, data, config, device=device)
    if not all(torch.isfinite(stage.weight).all() for stage in chain.stages):
        raise BadInputError("model", "holds weights that are not finite; repair the checkpoint first")
    return ChainBackend(chain, data, seed=config.seed, device=device)


def _layers(
    kind: Kind,
    machine: BasisBackend,
    moments: tuple[Moments, ...],
    whites: list[Whitening],
    cuts: tuple[float, float],
    tick: Tick,
) -> list[BasisLayer]:
    last = len(machine.widths) - 1
    if kind == "neuron":
        return [_neurons(machine.names[k], moments[k], whites[k]) for k in range(last + 1)]
    final = _principal(machine.names[last], moments[last], whites[last], cuts[1])
    if kind == "pca":
        before = [_principal(machine.names[k], moments[k], whites[k], cuts[1]) for k in range(last)]
        return [*before, final]
    layers = [final]
    grams = machine.to_output([white.colour for white in whites[:-1]]) if kind == "interaction" else None
    for site in range(last - 1, -1, -1):
        gram = grams[site] if grams else machine.to_next(site, whites[site].colour, layers[0].matrix)
        layers.insert(0, _joint(machine, site, moments[site], whites[site], gram, cuts))
        tick(machine.names[site])
    return layers


def _joint(
    machine: BasisBackend,
    site: int,
    moment: Moments,
    white: Whitening,
    gram: MatrixEstimate,
    cuts: tuple[float, float],
) -> BasisLayer:
    """``C = Lambda^(1/2) V D^(-1/2) U`` and its inverse."""
    values, rows, null = diagonalise(gram.value, cuts[0])
    keep = values > cuts[1] if cuts[1] > 0 else np.ones(values.size, dtype=bool)
    values, rows = values[keep], rows[keep]
    root = np.sqrt(values)
    matrix = root[:, None] * (rows @ white.whiten)
    inverse = white.colour @ rows.T / root
    flip = np.where(fix_signs(matrix), -1.0, 1.0)
    groups = repeated(values)
    plain = BasisLayer(
        machine.names[site],
        matrix * flip[:, None],
        inverse * flip,
        values,
        *_means(moment, matrix, inverse),
        white.rank,
        groups,
        gram.error,
    )
    plain = _with_round_trip(machine, site, plain)
    quiet = _quiet(plain.inverse, white.colour @ null.T, machine.silent(site))
    if quiet is None or plain.round_trip is None or plain.round_trip < 1e-20:
        return plain
    mean, offset = _means(moment, plain.matrix, quiet)
    other = _with_round_trip(machine, site, replace(plain, inverse=quiet, mean=mean, offset=offset))
    return min(plain, other, key=lambda layer: layer.round_trip or 0.0)


def _quiet(inverse: FloatArray, null: FloatArray, silent: FloatArray) -> FloatArray | None:
    """Another right inverse, one that leaves silent neurons silent; ``None`` where there is none.

    A dropped direction has no effect at any datum, yet leaving it out moves the activations by a finite step,
    which could wake a neuron that never fires. Adding dropped directions so that silent neurons see no
    coordinate at all keeps them at their mean, below zero; no Jacobian at a datum changes.
    """
    if silent.size == 0 or null.size == 0:
        return None
    step, *_ = np.linalg.lstsq(silent @ null, -silent @ inverse, rcond=1e-8)
    other: FloatArray = inverse + null @ step
    return other


def _principal(name: str, moment: Moments, white: Whitening, epsilon: float) -> BasisLayer:
    keep = white.values > epsilon if epsilon > 0 else np.ones(white.rank, dtype=bool)
    values = white.values[keep]
    rows = white.whiten[keep] * np.sqrt(values)[:, None]
    rows = np.where(fix_signs(rows), -1.0, 1.0)[:, None] * rows
    return BasisLayer(
        name, rows, rows.T.copy(), values, *_means(moment, rows, rows.T), white.rank, repeated(values)
    )


def _neurons(name: str, moment: Moments, white: Whitening) -> BasisLayer:
    variances = (moment.factor**2).sum(axis=0)
    identity = np.eye(len(moment.mean))
    return BasisLayer(
        name, identity, identity.copy(), variances, *_means(moment, identity, identity), white.rank
    )


def _means(moment: Moments, matrix: FloatArray, inverse: FloatArray) -> tuple[FloatArray, FloatArray]:
    """What is subtracted going there, and what is added coming back.

    Without centring nothing is subtracted, but the dropped directions still come back at their mean: at zero
    they could wake neurons that never fire on the data.
    """
    if moment.centred:
        return moment.mean, moment.mean
    return np.zeros_like(moment.mean), moment.mean - inverse @ (matrix @ moment.mean)


def _with_round_trip(machine: BasisBackend, site: int, layer: BasisLayer) -> BasisLayer:
    """Measure what going there and back at this layer does to the outputs."""
    if site == len(machine.widths) - 1:
        changed = total = 0.0
        for rows in machine.activations(site):
            back = layer.backward(layer.forward(rows))
            changed += float(((rows - back) ** 2).sum())
            total += float(((rows - layer.mean) ** 2).sum())
    else:
        changed, total = _output_change(machine, site, layer)
    share = changed / total if layer.directions and total > 0 else 0.0
    return replace(layer, round_trip=share)


def _output_change(machine: BasisBackend, site: int, layer: BasisLayer) -> tuple[float, float]:
    changed, start = 0.0, 0
    outputs = []
    for rows in machine.activations(site):
        before = machine.outputs(site, rows, start)
        after = machine.outputs(site, layer.backward(layer.forward(rows)), start)
        changed += float(((before - after) ** 2).sum())
        outputs.append(before.reshape(-1, before.shape[-1]))
        start += len(rows)
    every = np.concatenate(outputs)
    return changed, float(((every - every.mean(axis=0)) ** 2).sum())


def _in_frame(layer: BasisLayer, frame: FloatArray | None) -> BasisLayer:
    """An output read in an orthonormal frame, put back into its own coordinates."""
    if frame is None:
        return layer
    return replace(
        layer,
        matrix=layer.matrix @ frame.T,
        inverse=frame @ layer.inverse,
        mean=frame @ layer.mean,
        offset=frame @ layer.offset,
    )


def _warnings(layers: list[BasisLayer]) -> tuple[Flag, ...]:
    flags = []
    for layer in layers:
        if layer.directions == 0:
            flags.append(
                Flag("no-directions", f"{layer.name}: nothing varies here, or nothing depends on it")
            )
        if layer.ambiguous:
            sizes = ", ".join(str(len(group)) for group in layer.ambiguous)
            flags.append(
                Flag(
                    "ambiguous",
                    f"{layer.name}: repeated eigenvalues, only the span of {sizes} directions is defined",
                )
            )
        if layer.error > 0:
            flags.append(
                Flag("probes", f"{layer.name}: Jacobians by random probes, relative error {layer.error:.2g}")
            )
        if layer.round_trip is not None and layer.round_trip > LOSES_OUTPUT:
            flags.append(
                Flag(
                    "round-trip",
                    f"{layer.name}: dropping directions changes {layer.round_trip:.2g} of the outputs' variance",
                )
            )
    return tuple(flags)
