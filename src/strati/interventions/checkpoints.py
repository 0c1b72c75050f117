"""The networks of a study by spec: local checkpoints, and networks that an installed package trains on the spot."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from numpy.typing import NDArray
from torch import nn

from strati.core import plugins
from strati.core.errors import BadInputError, MissingExtraError, UnsupportedError
from strati.interventions.initialisers import Scheme
from strati.interventions.study_spec import NetworkSpec, Spec

if TYPE_CHECKING:
    from strati.interventions.tasks import StudyData
    from strati.io.to_module import ActivationName


class TrainedNetworks(Protocol):
    """What a package adds to ``strati.networks``: how networks of one source are made and trained."""

    def build(self, spec: NetworkSpec, shape: tuple[int, ...], outputs: int, context: int) -> nn.Module:
        """An untrained network for inputs of one shape and so many outputs."""

    def initialise(self, model: nn.Module, seed: int, network: int) -> None:
        """Draw the initial values of the n-th network of a study."""

    def train(self, spec: Spec, data: StudyData, numbers: Sequence[int]) -> list[dict[str, NDArray[Any]]]:
        """The trained tensors of these networks of a study, by name."""


def trained_networks(source: str) -> TrainedNetworks:
    """How networks of a source are made and trained.

    Raises:
        MissingExtraError: No installed package knows the source.
    """
    networks: TrainedNetworks | None = plugins.load(plugins.NETWORKS, source)
    if networks is None:
        raise MissingExtraError(
            f"network.source {source!r}", f"training networks for a study {plugins.REPRODUCTIONS}"
        )
    return networks


def in_single(model: nn.Module) -> nn.Module:
    """A module in half or double precision as a copy in single precision, in which a study's data are."""
    others = any(p.is_floating_point() and p.dtype.itemsize != 4 for p in model.parameters())
    return copy.deepcopy(model).float() if others else model


def open_checkpoint(path: str, spec: NetworkSpec) -> nn.Module:
    """A local checkpoint as a module in evaluation mode.

    Args:
        path: The file, or a local Hugging Face directory.
        spec: Its kind: ``resnet`` is a residual network of the CIFAR kind, everything else goes by its content.

    Raises:
        BadInputError: The file is broken, or its tensors are not those of the network.
    """
    from strati.io.to_module import as_module

    if spec.source != "resnet":
        return in_single(as_module(path, activation=cast("ActivationName", spec.activation))).eval()
    try:
        model = in_single(as_module(path)).eval()
    except UnsupportedError:
        model = nn.Module()  # something else, which is said below
    if not (hasattr(model, "conv1") and isinstance(getattr(model, "linear", None), nn.Linear)):
        raise BadInputError(
            path, "not a residual network of the CIFAR kind: conv1.weight or linear.weight is missing"
        )
    model.scheme = Scheme("kaiming")  # type: ignore[assignment]  # what such networks are drawn from
    return model
