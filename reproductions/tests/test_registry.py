"""Every reproduction can be found, called and told apart; the slow ones run under ``make test-long``."""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest

from strati.core.errors import BadInputError
from strati.core.results import silent
from strati_reproductions.registry import ENTRIES, Reproduction, Row, reproduce
from strati_reproductions.rows import COLUMNS


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_has_its_function(name: str) -> None:
    module, _, function = ENTRIES[name].function.partition(":")
    body = getattr(importlib.import_module(f"strati_reproductions.{module}"), function)
    assert list(inspect.signature(body).parameters) == ["quick", "seed", "folder", "tick"]
    assert body.__doc__
    assert ENTRIES[name].summary
    assert ENTRIES[name].paper


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(BadInputError, match="fine-tuning"):
        reproduce("no-such-figure")


def test_rows_compare_the_paper_with_our_number() -> None:
    result = Reproduction("x", "A title", (Row("a", 1.5, float("nan"), "note"), Row("b", None, "text")))
    found = json.loads(result.to_json())
    assert found["schema"] == "strati.reproduce/1"
    first = {name: found["rows"][0][name] for name in ("what", "paper", "ours", "note")}
    assert first == {"what": "a", "paper": 1.5, "ours": None, "note": "note"}
    assert set(COLUMNS) == set(result.frame())
    assert found["rows"][0]["mode"] is None
    full = json.loads(replace(result, mode="full", captions={"figure-1": "look"}).to_json())
    assert {row["mode"] for row in full["rows"]} == {"full"} and full["captions"] == {"figure-1": "look"}


@pytest.mark.parametrize(
    ("row", "agrees"),
    [
        (Row("within the digits printed", 0.58, 0.5837), "yes"),
        (Row("within two errors", 4.82, 4.84, error=0.01), "yes"),
        (Row("beyond them, explained", 4.82, 4.86, "why", error=0.01), "no"),
        (Row("beyond them, not explained", 4.82, 4.86, error=0.01), "open"),
        (Row("beyond them, a note that is no explanation", 4.82, 4.86, "why", unexplained=True), "open"),
        (Row("theory where the paper has none", None, 0.51, theory=0.5, error=0.01), "yes"),
        (Row("measured before is no yardstick", None, 7.0, before=9.0), None),
        (Row("whole numbers", 66, 67, ""), "open"),
        (Row("words", "about 280", 239), None),
        (Row("the paper's network comes first", 1.0, 5.0, paper_network=1.0), "yes"),
        (Row("the same words", "21 swaps, 0.1", "21 swaps, 0.1"), "yes"),
    ],
)
def test_rows_say_whether_they_agree(row: Row, agrees: str | None) -> None:
    assert row.agrees == agrees


def test_a_reproduction_says_how_it_was_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from strati_reproductions.dropped_net import figures

    body = lambda **_: Reproduction("x", "t", ())  # noqa: E731
    monkeypatch.setattr(figures, "dropped_net_figures", body)
    found = reproduce("dropped-net-figures", quick=True, seed=3, folder=tmp_path)
    assert (found.mode, found.seed) == ("quick", 3)
    assert reproduce("dropped-net-figures", folder=tmp_path).mode == "full"


def test_training_series_follows_layers_out_of_randomness(tmp_path: Path) -> None:
    from strati_reproductions.eigenspectra.over_training import mlp_run

    _, paths = mlp_run(tmp_path, seed=0, quick=True, count=24, batch=64, tick=silent)
    assert len(paths) >= 20
    from strati.comparison.compare import compare

    series = compare(paths[0], paths[12], paths[-1], series=True).series
    assert series is not None
    assert series.layers[0].phase[0] == "random-like"
    assert series.layers[0].leaves_random_like is not None


@pytest.mark.long
@pytest.mark.parametrize("name", ["rank-collapse", "training-series"])
def test_experiments_on_the_embedded_network_run(name: str, tmp_path: Path) -> None:
    result = reproduce(name, quick=True, folder=tmp_path)
    assert len(result.rows) >= 5
    assert all(row.ours is not None for row in result.rows)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["quasi-null", "roles", "fine-tuning", "five-trainings", "vision-and-language"]
)
def test_claims_on_real_networks_run(name: str, tmp_path: Path) -> None:
    try:
        result = reproduce(name, quick=True, folder=tmp_path)
    except BadInputError as error:
        pytest.skip(f"a network cannot be fetched here: {error}")
    assert result.rows


@pytest.mark.long
@pytest.mark.parametrize("name", ["same-token", "remove-quasi-null"])
def test_experiments_on_stories15m_run(name: str, tmp_path: Path, shared_data: Path) -> None:
    try:
        result = reproduce(name, quick=True, folder=tmp_path)
    except BadInputError as error:
        pytest.skip(f"the network cannot be fetched here: {error}")
    assert result.rows
