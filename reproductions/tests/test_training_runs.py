"""Trainings that are followed: stopped and resumed they give the same weights; the quick entries run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from strati.core.errors import BadInputError
from strati_reproductions.checkpointed_training import Training, checkpoint, load, trained
from strati_reproductions.grokking.modular_addition import Adder, SmallAdder, table, whole_table_loss
from strati_reproductions.registry import reproduce
from strati_reproductions.superposition.superposition import polygon


def test_an_interrupted_training_gives_the_same_weights(tmp_path: Path) -> None:
    x, y = table(5, 0.5, 0)[0]

    def run(folder: Path, *ends: int) -> nn.Module:
        for end in ends:
            torch.manual_seed(0)
            plan = Training(end, (0, 4, 12), rate=1e-2, decay=1.0)
            trained(folder, SmallAdder(5, width=4, hidden=8), whole_table_loss(x, y), plan)
        return load(SmallAdder(5, width=4, hidden=8), checkpoint(folder, 12))

    whole, parts = run(tmp_path / "a", 12), run(tmp_path / "b", 3, 7, 12)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert checkpoint(tmp_path / "b", 4).exists()


def test_a_training_that_has_reached_its_end_is_not_gone_on_with(tmp_path: Path) -> None:
    x, y = table(5, 0.5, 0)[0]
    plan = Training(50, tuple(range(0, 51, 5)), rate=1e-2)
    seen: list[int] = []

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        seen.append(step)
        return whole_table_loss(x, y)(model, step)

    for _ in range(2):
        torch.manual_seed(0)
        paths = trained(tmp_path, SmallAdder(5), loss, plan, done=lambda model: len(seen) >= 10)
    assert len(paths) == 3
    assert len(seen) == 10


def test_the_transformer_attends_as_a_plain_one_does() -> None:
    """Keys and values computed once per symbol and place against attention written out."""
    torch.manual_seed(0)
    model = Adder(7, width=8, heads=2, hidden=12).double()
    x = torch.tensor([[0, 3], [6, 6], [2, 5]])
    tokens = torch.cat([x, torch.full((3, 1), 7)], 1)
    stream = model.embed(tokens) + model.position.weight
    q, k, v = (
        p(stream).unflatten(-1, (2, 4)).transpose(1, 2) for p in (model.q_proj, model.k_proj, model.v_proj)
    )
    seen = (q @ k.transpose(-1, -2) / 2.0).softmax(-1) @ v  # the last place sees all three
    last = stream[:, -1] + model.o_proj(seen.transpose(1, 2).flatten(-2)[:, -1])
    last = last + model.fc2(torch.relu(model.fc1(last)))
    torch.testing.assert_close(model(x), model.head(last))


@pytest.mark.parametrize("corners", [3, 4, 5, 6])
def test_polygons_are_told_apart(corners: int) -> None:
    angles = 0.3 + np.arange(corners) * 2 * np.pi / corners
    weight = np.zeros((2, 6))
    weight[:, :corners] = np.stack([np.cos(angles), np.sin(angles)])
    assert polygon(weight) == (corners, True)
    weight[:, 0] = [np.cos(1.1), np.sin(1.1)]
    assert polygon(weight)[1] is False or corners == 6


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "grokking",
        "superposition",
        "in-context",
        "quasi-null-training",
        "fcn-checkpoints",
        "effective-parameters-over-training",
    ],
)
def test_the_quick_entries_run_and_draw(name: str, tmp_path: Path) -> None:
    try:
        result = reproduce(name, quick=True, folder=tmp_path)
    except BadInputError as error:
        if "fetch" not in str(error) and "absent" not in str(error):
            raise
        pytest.skip(f"the text cannot be had here: {error}")
    assert len(result.rows) >= 3
    assert all(Path(picture).stat().st_size > 5000 for picture in result.figures)
    assert result.figures
