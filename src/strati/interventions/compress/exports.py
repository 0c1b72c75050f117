"""A plan as other tools read it: recipes of compression tools, PEFT's rank patterns, llama.cpp's types, CSV."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError
from strati.core.files import check_writable, write_atomic
from strati.core.options import nearest
from strati.interventions.compress.curves import KEEP
from strati.interventions.compress.recipes import RECIPES
from strati.interventions.kinds import read_setting

if TYPE_CHECKING:
    from strati.interventions.compress.plan import Plan, PlannedLayer

FORMATS = ("peft", "llama.cpp", *RECIPES, "csv", "json")


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


_TYPES = {1: "iq1_m", 2: "q2_k", 3: "q3_k", 4: "q4_k", 5: "q5_k", 6: "q6_k", 8: "q8_0", 16: "f16"}
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
        kind = _TYPES.get(_bits(layer), "q8_0" if _bits(layer) < 16 else "f16")
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
