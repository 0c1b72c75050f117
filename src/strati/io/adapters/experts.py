r"""LoRA of a parameter (PEFT's ``target_parameters``): experts that are fused in one tensor, each with its update.

The factors of all experts lie in one pair of tensors: ``A`` is ``(experts r) x in``, expert after expert; ``B`` is
``out x (r experts)``, the experts of a direction side by side. Several parameters of one module are wrapped one inside
the other, which the name shows (``experts.base_layer.lora_A``) but not which parameter it is: PEFT wraps them in the
order in which the module declares them, the map into the experts before the map out of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strati.io.adapters.lora import AdapterUpdate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.adapters.recognise import PatternTable
    from strati.io.checkpoint_file import RawCheckpoint, Tensor

_APART = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""What the parts of a fused tensor are called where a file keeps every expert apart, in the order of their rows."""

_INNER = ".base_layer"
_LAST = ("down", "out", "w2", "c_proj")


def parameter_updates(
    contents: RawCheckpoint,
    module: str,
    a: Tensor,
    b: Tensor,
    options: Mapping[str, Any],
    ranks: PatternTable,
) -> list[AdapterUpdate] | None:
    """The updates of every expert, or the one of a plain parameter; scales are left out.

    Args:
        contents: Reads the factors.
        module: The module that the factors belong to, with a ``.base_layer`` for each wrapper around them.
        a: The factor of the inputs.
        b: The factor of the outputs.
        options: ``adapter_config.json``.
        ranks: Its ``rank_pattern``.

    Returns:
        ``None`` where the adapter does not target a parameter of this module.
    """
    plain = module
    while plain.endswith(_INNER):
        plain = plain.removesuffix(_INNER)
    words = parameters_of(plain, options)
    depth = (len(module) - len(plain)) // len(_INNER)
    if not words or depth >= len(words) or len(a.shape) != 2 or len(b.shape) != 2:
        return None
    name = f"{plain}.{words[len(words) - 1 - depth]}"
    rank = ranks.value(name)
    rank = options.get("r") if rank is None else rank
    if type(rank) is not int or rank < 1 or a.shape[0] % rank:
        return None
    experts, rows, cols = a.shape[0] // rank, b.shape[0], a.shape[1]
    if experts == 1:
        return [AdapterUpdate(name, rows, cols, rank, None, _factors(contents, a, b, 1, 0))]
    return [
        AdapterUpdate(name, rows, cols, rank, None, _factors(contents, a, b, experts, i), expert=i)
        for i in range(experts)
    ]


def parameters_of(module: str, options: Mapping[str, Any]) -> list[str]:
    """The parameters of a module that an adapter targets, in the order in which PEFT wraps them.

    Examples:
        >>> told = {"target_parameters": ["experts.down_proj", "experts.gate_up_proj", "router.weight"]}
        >>> parameters_of("model.layers.0.mlp.experts", told)
        ['gate_up_proj', 'down_proj']
    """
    targets = options.get("target_parameters")
    parameters = []
    for target in targets if isinstance(targets, list | tuple | set) else ():
        place, _, word = str(target).rpartition(".")
        if place and word and (module == place or module.endswith(f".{place}")):
            parameters.append(word)
    return sorted(dict.fromkeys(parameters), key=lambda word: (any(last in word for last in _LAST), word))


def split_by_expert(update: AdapterUpdate, names: Mapping[str, str]) -> list[tuple[str, AdapterUpdate]]:
    """An expert's update as those of the weights that a file keeps for it apart; empty where it has none.

    Args:
        update: The update of one expert of a fused tensor.
        names: Bare names of the base's tensors -> their names.

    Examples:
        >>> import numpy as np
        >>> zeros = AdapterUpdate("experts.gate_up_proj", 4, 3, 1, None, lambda: (np.arange(4)[:, None], 0), expert=7)
        >>> names = {f"experts.7.{word}.weight": f"experts.7.{word}.weight" for word in ("gate_proj", "up_proj")}
        >>> [(target, part.rows, part.factors()[0][:, 0].tolist()) for target, part in split_by_expert(zeros, names)]
        [('experts.7.gate_proj.weight', 2, [0, 1]), ('experts.7.up_proj.weight', 2, [2, 3])]
    """
    module, _, word = update.name.rpartition(".")
    for words in _APART.get(word, ()):
        candidates = [names.get(f"{module}.{update.expert}.{part_word}.weight") for part_word in words]
        targets = [target for target in candidates if target is not None]
        if len(targets) == len(words) and update.rows % len(words) == 0:
            size = update.rows // len(words)
            return [(target, _rows(update, i * size, size)) for i, target in enumerate(targets)]
    return []


def _rows(update: AdapterUpdate, start: int, size: int) -> AdapterUpdate:
    def factors() -> tuple[NDArray[Any], NDArray[Any]]:
        left, right = update.factors()
        return left[start : start + size], right

    return replace(update, rows=size, factors=factors, expert=None)


def _factors(contents: RawCheckpoint, a: Tensor, b: Tensor, experts: int, index: int) -> Any:
    def factors() -> tuple[NDArray[Any], NDArray[Any]]:
        right = contents.read(a.name).reshape(experts, -1, a.shape[1])[index]
        left = contents.read(b.name).reshape(b.shape[0], -1, experts)[:, :, index]
        return left, right

    return factors
