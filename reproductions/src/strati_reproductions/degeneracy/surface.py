"""Modules that were found, seen from outside: what others read of them, and how many parameters each uses.

Section 5.2 of degeneracy-in-the-loss-landscape: a module's free directions are free for the whole network only as far
as they leave its *interaction surface* alone, the directions inside it that another module reads. The parameters of a
module are the weights between its own directions; its effective parameters those of the constrained loss of eq. 31, or
of eq. 32 with the strength of each reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.options import resolve
from strati.core.results import Tick, silent
from strati.landscape.basis.modules import Modules
from strati.landscape.mlp.basis_moments import ChainBackend
from strati_reproductions.degeneracy.constrained import ConstrainedLoss

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class SurfaceNode:
    """A direction of a module that another one reads.

    Attributes:
        layer: Index of its layer in the basis.
        direction: Its number there.
        weight: ``w``: root of the summed squared edges into the other module.
    """

    layer: int
    direction: int
    weight: float


@dataclass(frozen=True)
class InteractionSurface:
    """What one module shows to another.

    Attributes:
        first: The module that is read.
        second: The one that reads; ``None`` for all others.
        nodes: What is read, strongest first.
    """

    first: int
    second: int | None
    nodes: tuple[SurfaceNode, ...]

    def size(self, epsilon: float) -> float:
        """``sum_i max(0, 1 - 2 ln w_i / ln eps)``: how many full constraints the readings are worth (eq. 34).

        Args:
            epsilon: The loss scale, between 0 and 1. Readings of ``w >= 1`` count in full.

        Examples:
            >>> surface = InteractionSurface(0, 1, (SurfaceNode(1, 0, 1.0), SurfaceNode(1, 1, 0.1)))
            >>> round(surface.size(1e-4), 6)               # one full reading and one of eps^(1/4)
            1.5
        """
        if not 0 < epsilon < 1:
            raise BadInputError("epsilon", "must be a loss scale between 0 and 1")
        powers = [
            float(np.log(min(node.weight, 1.0)) / np.log(epsilon)) for node in self.nodes if node.weight > 0
        ]
        return float(sum(max(0.0, 1 - 2 * k) for k in powers))

    def frame(self) -> pd.DataFrame:
        """One line per node."""
        import pandas as pd

        return pd.DataFrame([vars(node) for node in self.nodes], columns=["layer", "direction", "weight"])


@dataclass(frozen=True)
class SurfaceConfig:
    """Options of :func:`interaction_surface`.

    Attributes:
        epsilon: Cutoff: squared edges below it are no reading. Default: the one the modules were found with.
    """

    epsilon: float | None = None

    def __post_init__(self) -> None:
        """Refuse a cutoff that is none."""
        if self.epsilon is not None and not 0 <= self.epsilon < np.inf:
            raise BadInputError("epsilon", "must be a cutoff on squared edges, zero or positive")


def interaction_surface(
    modules: Modules,
    first: int,
    second: int | None = None,
    *,
    config: SurfaceConfig | None = None,
    tick: Tick = silent,
    **options: Any,
) -> InteractionSurface:
    """The directions of one module that another one reads, and how strongly.

    Args:
        modules: From :func:`strati.modules`.
        first: The module that is read, by its ``id``.
        second: The one that reads; by default all that is not in the first.
        config: Options; keywords of the same names win.
        tick: Called when done.
        options: Fields of :class:`SurfaceConfig`.

    Raises:
        BadInputError: No such module or option.

    Examples:
        >>> from strati import interaction_basis, interaction_graph, modules
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
        >>> basis = interaction_basis(net, torch.randn(50, 3, dtype=torch.float64))
        >>> found = modules(interaction_graph(basis), epsilon=1e-6)
        >>> interaction_surface(found, 0, 1).nodes          # a linear network falls apart into independent lines
        ()
    """
    settings = resolve(SurfaceConfig, config, options, of=interaction_surface)
    labels = [np.asarray(row) for row in _labels(modules, first, second)]
    cutoff = modules.epsilon if settings.epsilon is None else settings.epsilon
    nodes = []
    for site, edges in enumerate(modules.graph.edges):
        readers = labels[site + 1] != first if second is None else labels[site + 1] == second
        strong = np.where(edges > cutoff, edges, 0.0)[readers]
        for direction in np.flatnonzero(labels[site] == first):
            strength = float(np.sqrt(strong[:, direction].sum()))
            if strength > 0:
                nodes.append(SurfaceNode(site, int(direction), strength))
    tick("interaction surface")
    return InteractionSurface(first, second, tuple(sorted(nodes, key=lambda node: -node.weight)))


def _labels(modules: Modules, *asked: int | None) -> tuple[tuple[int, ...], ...]:
    if not isinstance(modules, Modules):
        raise BadInputError("modules", f"is a {type(modules).__name__}; find them with strati.modules first")
    ids = [module.id for module in modules.modules]
    for number in asked:
        if number is not None and number not in ids:
            raise BadInputError(f"module {number}", f"there is none; there are {len(ids)}, from 0 on")
    return modules.labels


@dataclass(frozen=True)
class ModuleParameters:
    """How many parameters a module uses.

    Attributes:
        module: Its ``id``.
        parameters: Weights between its own directions.
        effective: ``N_eff`` of the constrained loss: its surface held in place.
        unconstrained: ``N_eff`` with only its own outputs held in place.
        surface: What others read of it.
        loss: The constrained loss, for :func:`strati.learning_coefficient` (``2 lambda`` is ``N_eff`` at a scale).
    """

    module: int
    parameters: int
    effective: int
    unconstrained: int
    surface: InteractionSurface
    loss: ConstrainedLoss


@dataclass(frozen=True)
class ModuleParametersConfig:
    """Options of :func:`module_parameters`.

    Attributes:
        weighted: Weigh every node by how strongly it is read (eq. 32) instead of all alike (eq. 31).
        epsilon: Cutoff: squared edges below it are no reading. Default: the one the modules were found with.
    """

    weighted: bool = False
    epsilon: float | None = None


def module_parameters(
    modules: Modules,
    module: int,
    *,
    config: ModuleParametersConfig | None = None,
    tick: Tick = silent,
    **options: Any,
) -> ModuleParameters:
    """The effective parameters of a module that was found, with what others read of it held in place.

    Its parameters are the weights ``T`` between its own directions, ``W_l + P_{l+1} T C_l`` with ``C_l`` the rows of
    the basis and ``P_{l+1}`` the columns of its inverse that belong to the module; all else stays fixed. ``effective``
    is the rank of the Hessian of eq. 31 in them.
    Reference: degeneracy-in-the-loss-landscape, section 5.2.2.

    Args:
        modules: From :func:`strati.modules`, of a chain of linear layers and activations.
        module: Which one, by its ``id``.
        config: Options; keywords of the same names win.
        tick: Called when done.
        options: Fields of :class:`ModuleParametersConfig`.

    Raises:
        BadInputError: No such module or option.
        UnsupportedError: The network is not a chain; name the part by layers, with ``strati.constrained_loss``.

    Examples:
        >>> from strati import interaction_basis, interaction_graph, modules
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 2, bias=False)).double()
        >>> basis = interaction_basis(net, torch.randn(50, 3, dtype=torch.float64))
        >>> found = module_parameters(modules(interaction_graph(basis), epsilon=1e-6), 0)
        >>> found.parameters, found.effective       # two weights in a line: only their product matters
        (2, 1)
    """
    settings = resolve(ModuleParametersConfig, config, options, of=module_parameters)
    surface = interaction_surface(modules, module, epsilon=settings.epsilon)
    machine = getattr(modules.graph.basis, "machine", None)
    if not isinstance(machine, ChainBackend):
        raise UnsupportedError(
            "modules", "are not those of a plain chain; name the part by layers: strati.constrained_loss"
        )
    loss = _loss(modules, module, surface, machine, weighted=settings.weighted)
    tick("module parameters")
    return ModuleParameters(
        module, int(loss.theta.numel()), loss.rank(), loss.without_nodes().rank(), surface, loss
    )


def _loss(
    modules: Modules, module: int, surface: InteractionSurface, machine: ChainBackend, *, weighted: bool
) -> ConstrainedLoss:
    layers = modules.graph.basis.layers
    members = [np.flatnonzero(np.asarray(row) == module) for row in modules.labels]
    reading = [torch.from_numpy(layer.matrix[member]) for layer, member in zip(layers, members, strict=True)]
    writing = [
        torch.from_numpy(layer.inverse[:, member]) for layer, member in zip(layers, members, strict=True)
    ]
    shapes = [(len(b), len(a)) for a, b in pairwise(members)]
    nodes = [node for node in surface.nodes if 0 < node.layer < len(layers) - 1]  # inputs do not change

    def features(theta: Tensor, x: Tensor) -> Tensor:
        changes = torch.split(theta, [rows * columns for rows, columns in shapes])
        values, f = [x], x
        for site, stage in enumerate(machine.stages):
            moved = (f @ reading[site].T) @ changes[site].reshape(shapes[site]).T @ writing[site + 1].T
            f = stage.activation(stage.preactivations(f) + moved)
            values.append(f)
        outputs_of_module = values[-1] @ reading[-1].T
        surface_values = [
            values[n.layer] @ torch.from_numpy(layers[n.layer].matrix[n.direction]) for n in nodes
        ]
        if not surface_values:
            return outputs_of_module
        return torch.cat([outputs_of_module, torch.stack(surface_values, dim=1)], dim=1)

    theta = torch.zeros(sum(rows * columns for rows, columns in shapes), dtype=torch.float64)
    x = machine.inputs
    with torch.no_grad():
        target = features(theta, x)
    outputs = len(members[-1])
    strengths = [node.weight if weighted else 1.0 for node in nodes]
    weights = torch.tensor([1.0] * outputs + strengths, dtype=torch.float64)
    return ConstrainedLoss(features, theta, x, target, outputs, weights)
