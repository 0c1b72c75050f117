"""A plan as other tools read it: recipes of compression tools, PEFT rank patterns, llama.cpp types, CSV.

Recipes are JSON (that of modelopt is YAML), made without the tool being installed. Layers that a plan keeps are named
as exceptions where the tool would otherwise change them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError
from strati.core.files import check_writable, write_atomic
from strati.core.options import nearest
from strati.interventions.compress.costs import KEEP
from strati.interventions.kinds import read_setting

if TYPE_CHECKING:
    from strati.interventions.compress.plan import Plan, PlannedLayer


def export(plan: Plan, path: str | Path, form: str) -> None:
    """Write a plan in another tool's form.

    Raises:
        BadInputError: An unknown form, one that the plan's action does not have, or a file that cannot be written.
    """
    if form not in FORMATS:
        raise BadInputError(str(form), f"no such format; {nearest(str(form), FORMATS)}")
    check_writable(path)
    if form == "json":
        plan.to_json(path)
    elif form == "csv":
        write_atomic(path, plan.frame().to_csv(index=False, lineterminator="\n"))
    elif form == "peft" or form in RECIPES:
        recipe = peft(plan) if form == "peft" else RECIPES[form](plan)
        # The axis of modelopt's blocks is a number, which JSON cannot have as a key; unquoted, the file is YAML.
        write_atomic(path, json.dumps(recipe, indent=2).replace('"-1":', "-1:") + "\n")
    else:
        write_atomic(path, llama_cpp(plan))


def peft(plan: Plan) -> dict[str, Any]:
    """Arguments of PEFT's ``LoraConfig``: ranks and alphas by module, and what each was measured to cost.

    ``alpha`` is twice the rank, so that every module's update is scaled alike. A module of rank 0 is left out.
    """
    if plan.action not in ("adapt", "truncate"):
        raise BadInputError(
            "peft", f"has ranks, a plan of {plan.action} does not; make a plan of the action adapt"
        )
    ranks = {layer.name: _rank(layer) for layer in plan.layers}
    used = {name: rank for name, rank in ranks.items() if rank > 0}
    if not used:
        raise BadInputError("peft", "the plan gives every layer rank 0; allow more rank")
    common = max(set(used.values()), key=list(used.values()).count)
    return {
        "r": common,
        "lora_alpha": 2 * common,
        "target_modules": list(used),
        # A name is a pattern to PEFT: anchored, so that block 1 is not block 11.
        "rank_pattern": {f"^{re.escape(name)}$": rank for name, rank in used.items()},
        "alpha_pattern": {f"^{re.escape(name)}$": 2 * rank for name, rank in used.items()},
        "strati": {
            "quantity": plan.quantity,
            "budget": plan.budget,
            "layers": [
                {"name": x.name, "rank": ranks[x.name], "cost": x.cost, "cost_ci": x.cost_ci}
                for x in plan.layers
            ],
        },
    }


LLAMA_TYPES = {1: "iq1_m", 2: "q2_k", 3: "q3_k", 4: "q4_k", 5: "q5_k", 6: "q6_k", 8: "q8_0", 16: "f16"}
_NAMES = (
    (r"^(?:model\.|transformer\.|bert\.|encoder\.)*(?:layers|layer|h)\.(\d+)\.", r"blk.\1."),
    (r"self_attn\.q_proj$", "attn_q"),
    (r"self_attn\.k_proj$", "attn_k"),
    (r"self_attn\.v_proj$", "attn_v"),
    (r"self_attn\.o_proj$", "attn_output"),
    (r"self_attn\.qkv_proj$", "attn_qkv"),
    (r"mlp\.gate_proj$", "ffn_gate"),
    (r"mlp\.up_proj$", "ffn_up"),
    (r"mlp\.down_proj$", "ffn_down"),
    (r"attn\.c_attn$", "attn_qkv"),
    (r"attn\.c_proj$", "attn_output"),
    (r"mlp\.c_fc$", "ffn_up"),
    (r"mlp\.c_proj$", "ffn_down"),
    (r"mlp\.gate_up_proj$", "ffn_up"),
    (r"attention\.self\.query$", "attn_q"),
    (r"attention\.self\.key$", "attn_k"),
    (r"attention\.self\.value$", "attn_v"),
    (r"attention\.output\.dense$", "attn_output"),
    (r"intermediate\.dense$", "ffn_up"),
    (r"output\.dense$", "ffn_down"),
    (r"^(?:model\.embed_tokens|(?:transformer\.)?wte|(?:bert\.)?embeddings\.word_embeddings)$", "token_embd"),
    (r"^lm_head$", "output"),
)


def llama_cpp(plan: Plan) -> str:
    """A script of ``llama-quantize --tensor-type`` options, one per tensor, each with its measured cost.

    The types are llama.cpp's nearest of the same bits; strati measured rounding to nearest, theirs is finer.
    """
    if plan.action != "quantise":
        raise BadInputError(
            "llama.cpp", f"has tensor types, a plan of {plan.action} has no bits; plan quantise"
        )
    lines = ["#!/bin/sh", f"# strati plan: {plan.action}, {plan.budget}", "set -- \\"]
    comments = []
    for layer in plan.layers:
        kind = LLAMA_TYPES.get(_bits(layer), "q8_0" if _bits(layer) < 16 else "f16")
        name = gguf_name(layer.name)
        lines.append(f"  --tensor-type '^{re.escape(name)}\\.weight$={kind}' \\")
        ends = "" if layer.cost_ci is None else f" ({layer.cost_ci[0]:.3g} to {layer.cost_ci[1]:.3g})"
        comments.append(f"# {name}: {layer.choice}, measured cost {layer.cost:.3g}{ends}{_doubt(name)}")
    lines += ['  "$@"', *comments, 'exec llama-quantize "$@"  # arguments: in.gguf out.gguf q4_k_m']
    return "\n".join(lines) + "\n"


def gguf_name(layer: str) -> str:
    """A layer's name as llama.cpp has it.

    Examples:
        >>> gguf_name("model.layers.3.mlp.down_proj")
        'blk.3.ffn_down'
    """
    for pattern, new in _NAMES:
        layer = re.sub(pattern, new, layer)
    return layer


def _doubt(name: str) -> str:
    match = re.fullmatch(r"(blk\.\d+\.(attn|ffn)_[a-z]+)|token_embd|output", name)
    return "" if match else "; llama.cpp may call it otherwise: see gguf-dump"


def _rank(layer: PlannedLayer) -> int:
    if layer.choice == KEEP:
        return min(layer.rows, layer.cols)
    values = read_setting(layer.choice)
    if "rank" in values:
        return int(values["rank"])
    if "parameters" in values:
        from strati.interventions.edits import rank_of_share

        return rank_of_share(layer.rows, layer.cols, float(values["parameters"]))
    raise BadInputError(layer.name, f"{layer.choice} is not a rank; study truncate or adapt with rank=[...]")


def _bits(layer: PlannedLayer) -> int:
    return 16 if layer.choice == KEEP else int(read_setting(layer.choice)["bits"])


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
    groups = config_groups(schemes_of(plan, "llm-compressor"))
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
        "config_groups": config_groups(schemes_of(plan, "compressed-tensors")),
        "ignore": _kept(plan),
    }


def config_groups(schemes: Mapping[str, WeightScheme]) -> dict[str, Any]:
    """Groups of layers with one scheme each, as compressed-tensors names them."""
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
        "scheme": _arguments(_commonest(schemes)) | {"data_type": "int", "act_bits": 16},
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
FORMATS = ("peft", "llama.cpp", *RECIPES, "csv", "json")
