"""Plans screened by the Fisher score: the same outcome as the full plan from fewer measurements."""

from __future__ import annotations

import pytest

import strati
from strati.core.errors import BadInputError

MODEL, DATA = strati.embedded.path("digits-mlp.safetensors"), strati.embedded.path("digits.npz")


@pytest.mark.parametrize(("action", "budget"), [("quantise", "bits=3"), ("prune", "parameters=0.3")])
def test_a_screened_plan_lies_within_the_interval_of_the_full_one(action: str, budget: str) -> None:
    options = {"budget": budget, "action": action, "performance": "loss", "combinations": 2}
    full = strati.plan(MODEL, data=DATA, **options)  # type: ignore[arg-type]
    screened = strati.plan(MODEL, data=DATA, screen="fisher", **options)  # type: ignore[arg-type]
    assert full.predicted["low"] <= screened.predicted["measured"] <= full.predicted["high"]
    assert screened.size["planned"] <= screened.size["budget"] * (1 + 1e-9)
    about = screened.screen
    assert about is not None and about["settings"] == sum(len(c["points"]) - 1 for c in full.curves)
    assert 0 < about["measured"] < about["settings"]
    assert about["fraction"] == pytest.approx(about["measured"] / about["settings"])
    assert full.screen is None and screened.to_dict()["screen"]["score"] == "fisher_gradient"


def test_what_cannot_be_screened_is_one_line() -> None:
    with pytest.raises(BadInputError, match="fisher"):
        strati.plan(MODEL, data=DATA, budget="bits=3", screen="hessian")
