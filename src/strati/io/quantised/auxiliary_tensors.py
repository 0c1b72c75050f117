"""Tensors that stand beside weights and are none: scales, zero points, indices, tables, biases of experts, states."""

from __future__ import annotations

import re

_SCALES = re.compile(
    r"(?:^|[._])(?:scales?|scale_inv|scales_inv|qscales?|q_scale|q_scale_max|scb|absmax|nested_absmax|quant_map"
    r"|nested_quant_map|global_scale|scale_2|scale_packed|weight_format|codebooks?|s_channel|s_group|scb_stats)$",
    re.IGNORECASE,
)
_ZEROS = re.compile(r"(?:^|[._])(?:qzeros|zeros?|zero_points?|scaled_zeros)$")
_INDEX = re.compile(r"(?:^|[._])(?:g_idx|perm|q_perm|q_invperm|q_groups|q_group_map|workspace)$")
_STATE = re.compile(r"quant_state\.bitsandbytes__|(?:^|[._])(?:weight_shape|quant_state)$")
_BIAS = re.compile(r"(?:^|[._])(?:bias(?:es)?|e_score_correction_bias)$")
_TOKENS = re.compile(r"trainable_tokens_(?:delta|original)(?:\.[^.]+)?$")
_MAMBA = re.compile(r"(?:^|\.)(?:A_logs?|A_b_log|A_re|A_im|A_real|A_imag|log_A_real|dt_bias|ssm_a)$")
_DECAY = re.compile(r"(?:^|\.)(?:time_(?:decay|faaaa|first)|(?:query|key|diagonal)_decay|slope_rate)$")


def auxiliary_reason(name: str) -> str | None:
    """Why a tensor of that name is no weight, however many dimensions it has; ``None`` if it may be one.

    Examples:
        >>> auxiliary_reason("model.layers.0.mlp.up_proj.scales")
        'scales of a quantised weight'
        >>> auxiliary_reason("backbone.layers.3.mixer.A_log"), auxiliary_reason("fc1.weight")
        ("a state-space model's decay rates", None)
    """
    for pattern, reason in (
        (_SCALES, "scales of a quantised weight"),
        (_ZEROS, "zero points of a quantised weight"),
        (_INDEX, "an index that a quantised weight is ordered by"),
        (_STATE, "a quantised weight's description of itself"),
        (_BIAS, "a bias"),
        (_TOKENS, "rows that an adapter puts in place of an embedding's"),
        (_MAMBA, "a state-space model's decay rates"),
        (_DECAY, "a linear attention's decay rates"),
    ):
        if pattern.search(name):
            return reason
    return None
