"""The study of real networks, on the embedded digits: training is kept, counts and the trend are what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import strati
from strati import embedded
from strati.core.results import silent
from strati_reproductions.degeneracy.real_networks import (
    SHARE,
    _embedded,
    points,
    sample_stories,
    scale_of,
    snapshots,
    trend,
)


@pytest.fixture(scope="module")
def digits():
    with np.load(embedded.path("digits.npz")) as data:
        x, y = torch.tensor(data["x"]).float(), torch.tensor(data["y"]).long()
        return x / x.max(), y


def test_training_is_kept_and_counted(digits, tmp_path):
    x, y = digits
    kept = snapshots((x, y), 20, 3, tmp_path, silent, width=24)
    assert [label for label, _ in kept] == [
        "initial",
        "1 epoch",
        "50 steps",
        "20 epochs",
    ]  # six steps an epoch
    again = snapshots((x, y), 20, 3, tmp_path, lambda _: pytest.fail("trained again"), width=24)
    assert all(torch.equal(a(x), b(x)) for (_, a), (_, b) in zip(kept, again, strict=True))
    series = points(kept, x[:300], (x, y), silent)
    assert series[-1].accuracy > series[0].accuracy + 20
    for point, (_, model) in zip(series, kept, strict=True):
        own = strati.degeneracy(model, x[:300], exact=False)
        assert point.count.free == own.free
        assert point.count.epsilon == pytest.approx(scale_of(model, x[:300]))
        assert 0 <= point.fixed <= own.parameters
    used = [sum(c.parameters - c.free for c in p.count.layers) for p in series]
    row = trend(series)
    assert f"to first order (x{used[-1] / used[0]:.3g})" in row.note
    assert ("falls to first order" in row.note) == (used[-1] < used[0])
    assert row.ours in ("yes", "no", "depends on the loss scale")


def test_the_loss_scale_is_a_share_of_the_variance_of_the_outputs(digits):
    model = torch.nn.Linear(64, 3)
    outputs = model(digits[0][:256]).detach().double().numpy()
    assert scale_of(model, digits[0]) == pytest.approx(SHARE * outputs.var(axis=0).sum())


def test_the_embedded_network_uses_more_and_needs_less_after_training():
    rows = list(_embedded(silent))
    numbers = [int(str(row.ours).split(" of ")[0].replace(",", "")) for row in rows]
    at_scale = [int(row.note.split("; ")[1].split(" at ")[0].replace(",", "")) for row in rows]
    assert numbers[0] < numbers[1] < 13_098
    assert at_scale[1] < at_scale[0] / 5


def test_stories_are_tokens_and_the_same_for_a_seed():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=20, n_positions=8)).eval()
    told = sample_stories(model, 3, 6, 1)
    assert told.shape == (3, 6) and told.min() >= 0 and told.max() < 20
    assert torch.equal(told, sample_stories(model, 3, 6, 1))
