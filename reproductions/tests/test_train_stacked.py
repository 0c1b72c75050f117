"""Networks trained together are those trained one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strati.core.errors import BadInputError
from strati_reproductions.dropped_net.train_stacked import train_together
from strati_reproductions.dropped_net.trainer import Recipe, train

BASE = Recipe(blocks=3, width=6, hidden=10, rows=50, lr=1e-2, batch=16, optimiser="adam")
RECIPES = [BASE, replace(BASE, optimiser="adamw", weight_decay=1.0), replace(BASE, weight_decay=0.1)]


def data() -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 6)).astype(np.float32)
    y = np.tanh(x[:, 0] * x[:, 1]).astype(np.float32)
    return x, [y, y, (y + x[:, 2]).astype(np.float32)]


@pytest.mark.parametrize("epochs", [1, 12])
def test_each_is_the_network_that_training_it_alone_gives(epochs: int) -> None:
    x, targets = data()
    reached = train_together(RECIPES, x, targets, (epochs,))[epochs]
    together = reached.networks
    assert [len(some) for some in reached.errors] == [min(epochs, 10)] * 3
    assert [some[-1] for some in reached.errors] == pytest.approx([n.loss for n in together], rel=1e-5)
    for recipe, y, found in zip(RECIPES, targets, together, strict=True):
        alone = train(replace(recipe, epochs=epochs), x=x, y=y)
        assert found.loss == pytest.approx(alone.loss, rel=1e-3)
        ours, theirs = ((*n.inner, *n.outer, n.last) for n in (found, alone))
        for (weight, bias), (want, want_bias) in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(weight, want, atol=2e-4)
            np.testing.assert_allclose(bias, want_bias, atol=2e-4)
        np.testing.assert_allclose(found.pred, alone.pred, atol=2e-3)
    assert together[0].loss < 0.8 * float(targets[0].var()) or epochs == 1


def test_a_stopped_training_goes_on_where_it_was(tmp_path: Path) -> None:
    x, targets = data()
    whole = train_together(RECIPES, x, targets, (5, 30))
    ticks: list[str] = []

    def stop(text: str) -> None:
        ticks.append(text)
        if len(ticks) == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_together(RECIPES, x, targets, (5, 30), keep=tmp_path / "a.pt", tick=stop)
    again = train_together(RECIPES, x, targets, (5, 30), keep=tmp_path / "a.pt", tick=ticks.append)
    assert len(ticks) == 14 + 20  # from the tenth epoch
    for length in (5, 30):
        assert whole[length].errors == again[length].errors
        for one, other in zip(whole[length].networks, again[length].networks, strict=True):
            assert one.loss == other.loss and (one.inner[2][0] == other.inner[2][0]).all()
    other = train_together(RECIPES[:2], x, targets[:2], (5,), keep=tmp_path / "a.pt", tick=ticks.append)
    assert (
        len(ticks) == 34 + 5 and len(other[5].networks) == 2
    )  # the file of another training is not gone on from


@pytest.mark.parametrize(
    "change", [{"optimiser": "sgd"}, {"width": 5}, {"norm": True}, {"activation": "gelu"}]
)
def test_what_cannot_be_trained_together_is_refused(change: dict[str, object]) -> None:
    x, targets = data()
    with pytest.raises(BadInputError, match="differ in more"):
        train_together([BASE, replace(BASE, **change)], x, targets[:2], (1,))  # type: ignore[arg-type]
