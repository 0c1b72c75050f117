"""The attention-only transformer, its stages, and the kinds of its heads."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from strati.landscape.llc.parts import PartModel, head_entries
from strati_reproductions.claims import CLAIMS
from strati_reproductions.in_context.head_roles import (
    _weight_rows,
    previous_token_attention,
    previous_token_weights,
    separation,
)
from strati_reproductions.in_context.model import AttentionOnly, bigram_loss, rotate
from strati_reproductions.in_context.refined import Refined, _kind_rows, head_kinds
from strati_reproductions.in_context.stages import Measurement, Size, batch_rows, measure

SIZE = Size(40, 16, 2, 24, 4, 10, 3, 2, 8, 10, 2)


@pytest.fixture
def model() -> AttentionOnly:
    torch.manual_seed(0)
    return AttentionOnly(SIZE.vocabulary, SIZE.width, SIZE.heads)


def test_outputs_depend_on_earlier_tokens_alone_and_follow_from_the_attention(model: AttentionOnly) -> None:
    x = torch.randint(SIZE.vocabulary, (3, SIZE.context))
    changed = x.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % SIZE.vocabulary
    torch.testing.assert_close(model(x)[:, :12], model(changed)[:, :12])
    residual = model.embed_tokens(x)
    for layer, weights in zip(model.layers, model.attention(x), strict=True):
        assert not weights.triu(1).any()
        value = layer.v_proj(layer.norm(residual)).unflatten(-1, (SIZE.heads, -1)).transpose(1, 2)
        residual = residual + layer.o_proj((weights @ value).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(model(x), model.lm_head(model.norm(residual)))


def test_attention_does_not_depend_on_where_a_window_begins(model: AttentionOnly) -> None:
    """Positions are relative: among equal tokens the scores depend on the distance alone."""
    x = torch.full((1, SIZE.context), 3)
    query, key, _ = model.layers[0]._heads(model.embed_tokens(x))
    scores = query @ key.transpose(-1, -2)
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(-distance, dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_heads_can_be_varied_one_by_one(model: AttentionOnly) -> None:
    head = PartModel(model, head_entries(model, (1, 1)))
    each = SIZE.width // SIZE.heads * SIZE.width
    biases = 2 * (SIZE.width // SIZE.heads)
    assert sum(p.numel() for p in head.parameters()) == 4 * each + biases
    x = torch.randint(SIZE.vocabulary, (2, SIZE.context))
    torch.testing.assert_close(head(x), model(x))


def test_measures_of_an_untrained_model(model: AttentionOnly) -> None:
    held_out = np.random.default_rng(0).integers(0, SIZE.vocabulary, (8, SIZE.context + 1))
    point = measure(model, held_out, SIZE, 7)
    rows = torch.from_numpy(held_out)
    loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    assert point.step == 7 and point.loss == pytest.approx(loss.item(), rel=1e-5)
    assert len(point.previous_token) == len(point.induction) == SIZE.heads
    assert max(point.previous_token + point.induction) < 0.3


def test_the_loss_of_bigrams_is_the_entropy_of_a_chain() -> None:
    """Of a chain that goes on with probability 0.9 and stays otherwise: 0.9 ln(1/0.9) + 0.1 ln 10 nats."""
    rng = np.random.default_rng(0)
    text = np.cumsum(rng.random(200_000) < 0.9) % 5
    exact = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert bigram_loss(text[:150_000], text[150_000:].reshape(-1, 100), 5) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(("low", "verdict"), [(4.0, "held"), (9.0, "did not hold"), (None, "not tested")])
def test_induction_heads_are_compared_with_the_others_of_their_layer(low: float | None, verdict: str) -> None:
    stage = Measurement(0, 1.0, 0.0, (0.9, 0.1), (0.6, 0.0))
    coefficients = {
        "0.0": (1.0, 0.1),
        "0.1": (2.0, 0.1),
        "1.0": None if low is None else (low, 0.1),
        "1.1": (8.0, 0.1),
    }
    rows = [row.record() for row in _kind_rows(Refined(0, coefficients), head_kinds(stage))]
    claim = next(c for c in CLAIMS if c.entry == "refined-coefficients")
    assert claim.verdict(rows) == verdict


def test_half_of_a_batch_repeats_and_the_others_are_text() -> None:
    text = np.arange(1000) % SIZE.vocabulary
    rows = batch_rows(text, SIZE, np.random.default_rng(0))
    assert rows.shape == (SIZE.batch, SIZE.context + 1)
    for row in rows[: SIZE.batch // 2]:
        assert any((row[period:] == row[:-period]).all() for period in range(8, SIZE.context // 2 + 1))
    steps = np.diff(rows[SIZE.batch // 2 :], axis=1) % SIZE.vocabulary
    assert (steps == 1).all()


@pytest.mark.parametrize("planted", ["0.0", "0.1", "1.1"])
def test_a_planted_previous_token_head_has_the_largest_share_by_weights_and_by_attention(
    model: AttentionOnly, planted: str, tmp_path: Path
) -> None:
    layer, head = map(int, planted.split("."))
    turned = 4 * rotate(torch.ones(1, 1, 2, 8))[0, 0]
    part = slice(8 * head, 8 * head + 8)
    with torch.no_grad():
        model.layers[layer].q_proj.bias[part] = turned[0]
        model.layers[layer].k_proj.bias[part] = turned[1]
    held_out = np.random.default_rng(0).integers(0, SIZE.vocabulary, (8, SIZE.context + 1))
    attention = previous_token_attention(model, held_out)
    weights = previous_token_weights(model, tmp_path)
    assert max(attention, key=lambda name: attention[name]) == planted
    kinds = dict.fromkeys(attention, "other")
    facts = _weight_rows(attention, weights, kinds)[-1].facts
    assert facts["same"] and facts["weights"] == planted


@pytest.mark.parametrize(("other", "verdict"), [(0.1, "held"), (0.5, "did not hold"), (None, "not tested")])
def test_separation_of_heads_by_their_contrasts(other: float | None, verdict: str) -> None:
    kinds = {"0.0": "previous token", "1.0": "induction", "1.1": "other"}
    contrasts = {"0.0": (0.4, 0.02), "1.0": (0.6, 0.02)}
    if other is not None:
        contrasts["1.1"] = (other, 0.02)
    claim = [c for c in CLAIMS if c.entry == "head-roles"][1]
    assert claim.verdict([separation(contrasts, kinds).record()]) == verdict
