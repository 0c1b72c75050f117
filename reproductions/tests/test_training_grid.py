"""The grid of table 1: pooled spread, distances, and groups that continue from their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strati.interventions.study_spec import read_spec
from strati_reproductions.robust_and_critical import training_grid
from strati_reproductions.robust_and_critical.training_grid import PAPER_ERRORS, PAPER_VALUES, Cell


def test_the_pooled_spread_is_that_of_the_networks() -> None:
    """2,000 cells of two networks: the pooled deviation has a relative error of 1.6 %."""
    rng = np.random.default_rng(0)
    deviations = np.array([0.1, 0.2, 0.3, 0.1, 0.2, 0.5])
    values = PAPER_VALUES + deviations * rng.normal(size=(2000, 2, 6))
    cells = training_grid.pooled([Cell("0 to 1", 64, 5, v) for v in values])
    np.testing.assert_allclose(cells[0].spread, deviations, rtol=0.08)
    np.testing.assert_allclose(cells[0].error, cells[0].spread / 2**0.5)


def test_the_distance_is_in_errors_of_the_difference() -> None:
    values = np.stack([PAPER_VALUES, PAPER_VALUES])
    values[:, 2] += 3 * PAPER_ERRORS[2]
    cell = Cell("0 to 1", 64, 5, values)
    assert cell.distance == pytest.approx(3)
    wide = replace(cell, spread=2**0.5 * PAPER_ERRORS)
    assert wide.distance == pytest.approx(3 / 2**0.5)


def test_a_group_is_read_from_its_file(tmp_path: Path) -> None:
    group = {"seconds": 3.0, "lines": {"5": [[1.0] * 6, [2.0] * 6]}}
    (tmp_path / "0-to-1-32-4-to-5.json").write_text(json.dumps(group))
    spec = read_spec("fcn-mnist")
    read = training_grid.trained_group(spec, "0 to 1", 32, (5,), 4, tmp_path, lambda *_: None)
    assert read == group
