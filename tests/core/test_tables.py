"""The one table: what is kept and what gives way on narrow terminals; text from files is text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import strati
from strati.core.display import Column, as_text, table

COLUMNS = (
    Column("layer", keep=True),
    *(Column(f"number {i}", right=True) for i in range(8)),
    Column("warnings", keep=True),
)


def rows(count: int = 5) -> list[tuple[object, ...]]:
    return [(f"encoder.layer.{i}.mlp.fc1", *np.arange(8) * 1.5, "noise-like") for i in range(count)]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_names_and_warnings_stay_and_numbers_give_way(width):
    text = as_text(table(COLUMNS, rows()), width=width)
    assert all(f"encoder.layer.{i}.mlp.fc1" in text for i in range(5))
    assert text.count("noise-like") == 5
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert ("not shown" in text) == (width < 160)
    if width == 80:
        assert "number 0" in text.splitlines()[0]
        assert "number 7" in text.split("not shown")[1]


def test_what_gives_first():
    columns = [Column("layer", keep=True), Column("first", gives=1), Column("second")]
    text = as_text(table(columns, [["x" * 30, "y" * 20, "z" * 20]]), width=60)
    assert "second" in text.splitlines()[0]
    assert "first" not in text.splitlines()[0]


def test_names_are_folded_and_never_cut():
    name = "a.very.long.name." * 6
    text = as_text(table(["layer", "n"], [[name, 1]]), width=50)
    assert "".join(text.split()).count("a.very.long.name.") == 6


def test_text_is_text():
    text = as_text(table(["layer"], [["[red]x[/red]"], ["\x1b[31mred"], ["[0.1, 0.2]"]]), width=80)
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
    assert "[0.1, 0.2]" in text


CELLS = st.one_of(st.none(), st.floats(), st.integers(), st.text(max_size=20))


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5))
def test_any_cells_fit(cells):
    text = as_text(table(["a", "b", "c"], cells), width=60)
    assert all(cell_len(line) <= 60 for line in text.splitlines())


def test_many_rows_are_counted():
    assert "100 more rows" in as_text(table(["n"], [[i] for i in range(500)]))


def test_long_text_is_shortened_in_the_middle():
    text = as_text("\n".join(str(i) for i in range(100)), lines=10).splitlines()
    assert len(text) == 11
    assert (text[0], text[-1]) == ("0", "99")


def test_a_results_repr_is_its_summary(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    scan = strati.scan(
        {f"h.{i}.mlp.fc1.weight": np.random.default_rng(i).normal(size=(20, 10)) for i in range(200)}
    )
    assert repr(scan) == str(scan)
    assert len(repr(scan).splitlines()) <= 41
    assert "h.0.mlp.fc1" in repr(scan)
    assert "<table" in scan._repr_html_()
    assert "Scan(" not in repr(scan)


def test_a_spectrum_says_its_shape_phase_and_first_numbers():
    W = np.random.default_rng(0).normal(size=(20, 30))
    told = repr(strati.spectrum(W))
    assert told.startswith("Spectrum(30 x 20; learned; bleeding-out; alpha 2.")
    assert "stable_rank" in told and "\n" not in told
    assert repr(strati.spectrum(np.full((5, 4), np.nan))) == "Spectrum(5 x 4; broken; warnings: not-finite)"
    html = strati.spectrum(W)._repr_html_()
    assert html.startswith("<table>") and "stable_rank" in html
