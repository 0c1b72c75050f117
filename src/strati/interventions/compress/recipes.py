"""Plans as recipes of compression tools: each layer's bits or sparsity, in the words of the tool that will apply it.

All recipes are JSON (modelopt's is YAML), made without the tool being installed. Layers that a plan keeps are named as
exceptions where the tool would otherwise change them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError
from strati.interventions.compress.curves import KEEP
from strati.interventions.kinds import read_setting

if TYPE_CHECKING:
    from strati.interventions.compress.plan import Plan


@dataclass(frozen=True)
class WeightScheme:
    """How the weights of a layer are quantised; without a group, all inputs of an output share a scale."""

    bits: int
    group: int | None = None
    symmetric: bool = False


def schemes_of(plan: Plan, form: str) -> dict[str, WeightScheme]:
    """Layer -> scheme, of the layers that a plan quantises.

    Raises:
        BadInputError: The plan does not quantise, or keeps every layer.
    """
    if plan.action != "quantise":
        raise BadInputError(
            form, f"has bits, a plan of {plan.action} has none; make a plan of the action quantise"
        )
    schemes = {}
    for layer in plan.layers:
        if layer.choice != KEEP:
            values = read_setting(layer.choice)
            group = int(values.get("group", layer.cols))
            symmetric = bool(values.get("symmetric", False))
            schemes[layer.name] = WeightScheme(
                int(values["bits"]), group if group < layer.cols else None, symmetric
            )
    if not schemes:
        raise BadInputError(form, "the plan keeps every layer as it is; there is nothing to export")
    return schemes


def llm_compressor(plan: Plan) -> dict[str, Any]:
    """A recipe of llm-compressor: GPTQ, AWQ or rounding for a plan of bits, SparseGPT or Wanda for one of sparsity."""
    if plan.action == "prune":
        return {"strati_stage": _pruning_modifiers(plan)}
    groups = _config_groups(schemes_of(plan, "llm-compressor"))
    methods = {read_setting(layer.choice).get("method") for layer in plan.layers if layer.choice != KEEP}
    modifiers = {"gptq": "GPTQModifier", "awq": "AWQModifier"}
    modifier = (
        modifiers.get(str(next(iter(methods))), "QuantizationModifier")
        if len(methods) == 1
        else "GPTQModifier"
    )
    return {
        "strati_stage": {"strati_modifiers": {modifier: {"config_groups": groups, "ignore": _kept(plan)}}}
    }


def _pruning_modifiers(plan: Plan) -> dict[str, Any]:
    layers: dict[tuple[str, float, str], list[str]] = {}
    for layer in plan.layers:
        if layer.choice == KEEP:
            continue
        values = read_setting(layer.choice)
        pattern = str(values.get("pattern", "0:0"))
        keep, _, size = pattern.partition(":")
        share = float(values["share"]) if "share" in values else 1.0 - int(keep) / int(size)
        modifiers = {"wanda": "WandaPruningModifier", "sparsegpt": "SparseGPTModifier"}
        modifier = modifiers.get(str(values.get("method")), "SparseGPTModifier")
        layers.setdefault((modifier, share, pattern), []).append(layer.name)
    if not layers:
        raise BadInputError(
            "llm-compressor", "the plan keeps every layer as it is; there is nothing to export"
        )
    return {
        f"group{number}_modifiers": {
            modifier: {"sparsity": share, "mask_structure": pattern, "targets": names}
        }
        for number, ((modifier, share, pattern), names) in enumerate(layers.items())
    }


def compressed_tensors(plan: Plan) -> dict[str, Any]:
    """The ``quantization_config`` of compressed-tensors, as ``config.json`` of a quantised checkpoint has it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": _config_groups(schemes_of(plan, "compressed-tensors")),
        "ignore": _kept(plan),
    }


def _config_groups(schemes: dict[str, WeightScheme]) -> dict[str, Any]:
    layers: dict[WeightScheme, list[str]] = {}
    for name, scheme in schemes.items():
        layers.setdefault(scheme, []).append(name)
    return {
        f"group_{number}": {
            "targets": names,
            "weights": {
                "num_bits": scheme.bits,
                "type": "int",
                "symmetric": scheme.symmetric,
                "strategy": "channel" if scheme.group is None else "group",
                **({} if scheme.group is None else {"group_size": scheme.group}),
            },
        }
        for number, (scheme, names) in enumerate(layers.items())
    }


def gptqmodel(plan: Plan) -> dict[str, Any]:
    """Arguments of GPTQModel's ``QuantizeConfig``, exceptions from the commonest scheme in ``dynamic``."""
    schemes = schemes_of(plan, "gptqmodel")
    common = _commonest(schemes)
    # A key is a pattern to GPTQModel: anchored, so that block 1 is not block 11.
    dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in _kept(plan)}
    for name, scheme in schemes.items():
        if scheme != common:
            dynamic[f"+:^{re.escape(name)}$"] = _arguments(scheme)
    return _arguments(common) | {"dynamic": dynamic}


def auto_round(plan: Plan) -> dict[str, Any]:
    """Arguments of ``AutoRound``: ``scheme``, and ``layer_config`` with the bits of every layer."""
    schemes = schemes_of(plan, "auto-round")
    layers = {name: _arguments(scheme) for name, scheme in schemes.items()}
    return {
        "scheme": _arguments(_commonest(schemes)),
        "layer_config": layers | {name: {"bits": 16} for name in _kept(plan)},
    }


def modelopt(plan: Plan) -> dict[str, Any]:
    """The configuration of modelopt's ``mtq.quantize``; its integer levels are always symmetric."""
    quantisers = [{"quantizer_name": "*", "enable": False}]
    for name, scheme in schemes_of(plan, "modelopt").items():
        along = {"axis": 0} if scheme.group is None else {"block_sizes": {"-1": scheme.group}}
        about = {"num_bits": scheme.bits, **along}
        quantisers.append({"quantizer_name": f"{name}.weight_quantizer", "cfg": about, "enable": True})
    return {"quant_cfg": quantisers, "algorithm": "max"}


def torchao(plan: Plan) -> dict[str, Any]:
    """The ``FqnToConfig`` of torchao as ``torchao.core.config.config_from_dict`` reads it.

    Raises:
        BadInputError: A layer has more than 8 bits.
    """
    configs: dict[str, Any] = {}
    for name, scheme in schemes_of(plan, "torchao").items():
        if scheme.bits > 8:
            raise BadInputError("torchao", f"has integers of 1 to 8 bits; {name} has {scheme.bits}")
        along = (
            ("PerAxis", {"axis": 0}) if scheme.group is None else ("PerGroup", {"group_size": scheme.group})
        )
        configs[name] = _versioned(
            "IntxWeightOnlyConfig",
            {
                "weight_dtype": {"_type": "torch.dtype", "_data": f"int{scheme.bits}"},
                "granularity": _versioned(*along),
                "mapping_type": {
                    "_type": "MappingType",
                    "_data": "SYMMETRIC" if scheme.symmetric else "ASYMMETRIC",
                },
            },
            version=2,
        )
    return _versioned("FqnToConfig", {"fqn_to_config": configs})


def _versioned(name: str, fields: dict[str, Any], *, version: int = 1) -> dict[str, Any]:
    return {"_type": name, "_version": version, "_data": fields}


def _arguments(scheme: WeightScheme) -> dict[str, Any]:
    return {"bits": scheme.bits, "group_size": scheme.group or -1, "sym": scheme.symmetric}


def _commonest(schemes: dict[str, WeightScheme]) -> WeightScheme:
    listed = list(schemes.values())
    return max(dict.fromkeys(listed), key=listed.count)


def _kept(plan: Plan) -> list[str]:
    return [layer.name for layer in plan.layers if layer.choice == KEEP]


RECIPES: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "llm-compressor": llm_compressor,
    "gptqmodel": gptqmodel,
    "auto-round": auto_round,
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "torchao": torchao,
}
"""Formats of ``plan.export`` that compression tools load."""
