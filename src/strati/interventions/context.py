"""Networks changed in memory for as long as a ``with`` block lasts.

``with truncated(model, {"fc1": 4}): ...``: within, the layers named have the changed weights; afterwards the old ones
are back, whatever happened. Keys are layer names or patterns (:mod:`strati.io.layers`); a value is the setting,
as a number (``4``), as text (``"bits=4,group=64"``) or as a mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.interventions.edits import tensors_of
from strati.interventions.evaluator import Evaluator
from strati.interventions.input_covariance import SequentialInputs
from strati.interventions.kinds import KINDS, read_setting
from strati.interventions.study_config import StudyConfig
from strati.interventions.targets import chosen_names, find_targets, tied_names
from strati.interventions.targets import dropped as identity_blocks
from strati.interventions.tasks import calibration_data
from strati.io.to_module import as_module

if TYPE_CHECKING:
    from torch import nn

    from strati.io.network import Openable

Settings = Mapping[str, Any]


def truncated(
    model: Openable, settings: Settings, *, calibration: Any = None
) -> AbstractContextManager[nn.Module]:
    """Layers with only their leading singular directions: ``{"fc1": 4, "fc2": "energy=0.9"}``.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(6, 5))
        >>> with truncated(net, {"0": 2}):
        ...     int(torch.linalg.matrix_rank(net[0].weight))
        2
        >>> int(torch.linalg.matrix_rank(net[0].weight))
        5
    """
    return intervened(model, "truncate", settings, calibration=calibration)


def quantised(
    model: Openable, settings: Settings, *, calibration: Any = None
) -> AbstractContextManager[nn.Module]:
    """Layers rounded to nearest: ``{"fc1": 4, "blocks.*": "bits=3,group=64"}``."""
    return intervened(model, "quantise", settings, calibration=calibration)


def pruned(
    model: Openable, settings: Settings, *, calibration: Any = None
) -> AbstractContextManager[nn.Module]:
    """Layers without their smallest entries: ``{"fc1": 0.5, "fc2": "2:4"}``."""
    return intervened(model, "prune", settings, calibration=calibration)


def scaled(model: Openable, settings: Settings) -> AbstractContextManager[nn.Module]:
    """Layers multiplied by a number: ``{"fc1": 0.5}``."""
    return intervened(model, "scale", settings)


def zeroed(model: Openable, layers: Sequence[str]) -> AbstractContextManager[nn.Module]:
    """Layers whose weight is zero."""
    return intervened(model, "zero", dict.fromkeys(_listed(layers)))


def swapped(
    model: Openable, source: Any, layers: Sequence[str] = ("*",)
) -> AbstractContextManager[nn.Module]:
    """Layers with the values they have in another network (a path, a module, or tensors by name)."""
    return intervened(model, "swap", dict.fromkeys(_listed(layers)), source=source)


@contextmanager
def dropped(model: Openable, blocks: Sequence[str]) -> Iterator[nn.Module]:
    """Residual blocks that are the identity, by name.

    Raises:
        BadInputError: There is no module of that name.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        >>> with dropped(net, ["0", "1"]):
        ...     net(torch.ones(1, 3)).tolist()
        [[1.0, 1.0, 1.0]]
    """
    model = as_module(model)
    names = dict(model.named_modules())
    for name in _listed(blocks):
        if name not in names:
            raise BadInputError(name, f"no such block; {nearest(name, [n for n in names if n])}")
    with ExitStack() as stack:
        for name in _listed(blocks):
            stack.enter_context(identity_blocks(model, [name], tuple_length(model, name)))
        yield model


@contextmanager
def intervened(
    model: Openable,
    name: str,
    settings: Settings,
    *,
    source: Any = None,
    seed: int = 0,
    calibration: Any = None,
) -> Iterator[nn.Module]:
    """Layers changed by any of strati's interventions on weights; the changes undo themselves.

    Args:
        model: Whatever names a network; a module is changed in place, of anything else the module made of it is given.
        name: The intervention: ``truncate``, ``signal-only``, ``permute-entries``, ...
        settings: Layer name or pattern -> setting; a later key wins over an earlier one.
        source: The other network, for ``swap`` and ``adapt``.
        seed: Random seed, where chance is involved.
        calibration: Data for data-aware settings (``"rank=4,metric=inputs"``, ``"bits=4,method=gptq"``); every layer
            reads what the layers changed before it give.

    Raises:
        BadInputError: An unknown intervention or layer, or a setting out of range.
    """
    model = as_module(model)
    tied = tied_names(model)  # a shared weight may be called by any of its names
    named = {tied.get(key.removesuffix(".weight"), key): value for key, value in settings.items()}
    names = [target.name for target in find_targets(model)]
    choices: dict[str, dict[str, Any]] = {}
    for key, value in named.items():
        choices |= dict.fromkeys(chosen_names(names, key), _setting(name, value))
    if name in KINDS and KINDS[name].source and source is None:
        raise BadInputError(name, "needs source: the other network")
    inputs = None
    if calibration is not None:
        rows = calibration_data(calibration, model, StudyConfig.context)
        inputs = SequentialInputs(model, rows.calibration_batches())
    others = {} if source is None else {name: tensors_of(source)}
    evaluator = Evaluator("model", model, calibration=inputs, others=others)
    with evaluator.changed(name, {key: choices[key] for key in names if key in choices}, seed):
        yield model


def tuple_length(model: nn.Module, name: str) -> int:
    """The length of the tuple a block returns by its class's own word; 0 for a tensor."""
    import typing

    module = model.get_submodule(name)
    try:
        returns = typing.get_type_hints(type(module).forward).get("return")
    except (NameError, TypeError):  # annotations that cannot be read say nothing
        return 0
    origin = typing.get_origin(returns)
    return max(1, len([a for a in typing.get_args(returns) if a is not Ellipsis])) if origin is tuple else 0


_MAIN: dict[str, dict[type, str]] = {
    "truncate": {int: "rank"},
    "adapt": {int: "rank"},
    "damp-intruders": {float: "factor", int: "factor"},
    "quantise": {int: "bits"},
    "prune": {float: "share", int: "share"},
    "scale": {float: "factor", int: "factor"},
    "noise": {float: "size", int: "size"},
    "remove-small": {int: "k"},
    "remove-large": {int: "k"},
}


def _setting(name: str, value: Any) -> dict[str, Any]:
    if name not in KINDS:
        raise BadInputError(name, f"no such intervention; {nearest(name, KINDS)}")
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return {"pattern": value} if name == "prune" and "=" not in value else read_setting(value)
    option = _MAIN.get(name, {}).get(type(value))
    if option is None:
        raise BadInputError(
            name, f"{value!r} is not a setting; write it as text, such as 'rank=4' or 'energy=0.9'"
        )
    return {option: value}


def _listed(names: Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
