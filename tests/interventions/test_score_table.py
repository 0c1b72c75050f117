"""The tables of docs/scores.md are those of the stored numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import score_table  # noqa: E402


def test_the_page_has_the_stored_numbers() -> None:
    stored = json.loads(score_table.STORED.read_text())
    page = score_table.PAGE.read_text()
    assert score_table.filled(page, stored) == page


def test_four_networks_four_actions_and_every_score() -> None:
    stored = json.loads(score_table.STORED.read_text())
    assert set(stored) == set(score_table.NETWORKS)
    for name, rows in stored.items():
        # of a convolution's pooled slices these are not defined
        undefined = {"alpha_farms", "traps", "localisation"} if name == "resnet20" else set()
        metrics = {(row["intervention"], row["metric"]) for row in rows if row["across"] != "settings"}
        for action, (_, _, scores) in score_table.ACTIONS.items():
            assert {score for score in scores if (action, score) not in metrics} <= undefined
