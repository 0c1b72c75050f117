"""The attention-only transformer, its stages, and the kinds of its heads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from strati.landscape.llc.parts import PartModel, head_entries
from strati_reproductions.claims import CLAIMS
from strati_reproductions.in_context.model import AttentionOnly, bigram_loss
from strati_reproductions.in_context.refined import Refined, _kind_rows, head_kinds
from strati_reproductions.in_context.stages import Measurement, Size, measure

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
    assert sum(p.numel() for p in head.parameters()) == 4 * each
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
