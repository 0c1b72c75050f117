"""The picture of results that have none of their own."""

from __future__ import annotations

import pandas as pd
import pytest

import strati
from strati import embedded
from strati.report.plots import plot_table


def test_a_panel_for_each_of_the_first_numbers() -> None:
    table = pd.DataFrame({"layer": ["a", "b"], "cost": [1.0, None], "saves": [3, 4], "kept": [True, False]})
    figure = plot_table(table, title="plan")
    assert [axis.get_xlabel() for axis in figure.axes] == ["cost", "saves"]
    assert [bar.get_width() for bar in figure.axes[1].patches] == [3, 4]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b"]


def test_words_are_counted_and_nothing_is_said() -> None:
    figure = plot_table(pd.DataFrame({"layer": ["a", "b", "c"], "code": ["x", "x", "y"]}))
    assert [bar.get_width() for bar in figure.axes[0].patches] == [2, 1]
    assert plot_table(pd.DataFrame({"layer": []})).axes[0].texts[0].get_text() == "nothing to show"


@pytest.mark.parametrize("verb", ["inspect", "check"])
def test_results_without_a_picture_of_their_own_draw_their_table(verb: str) -> None:
    figure = getattr(strati, verb)(embedded.path("digits-mlp.safetensors")).plot()
    assert len(figure.axes) >= 1
