"""Errors, text, results, random streams and files: what everything else stands on."""

from __future__ import annotations

import json
import os
import pickle
import stat
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strati.core.display import as_html, printable
from strati.core.errors import BadInputError, MissingExtraError, StratiError
from strati.core.files import check_writable, export_table, write_atomic
from strati.core.plugins import require
from strati.core.results import Flag, Result, jsonable
from strati.core.rng import derive, stream


class TestText:
    @given(st.text(max_size=400), st.integers(10, 200))
    def test_printable_is_one_bounded_line_without_hidden_characters(self, text: str, limit: int) -> None:
        shown = printable(text, limit)
        assert len(shown) <= limit
        assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
        shown.encode("utf-8")

    @given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=100))
    def test_plain_text_is_left_alone(self, text: str) -> None:
        assert printable(text) == text

    def test_html(self) -> None:
        assert as_html("<script>\u202e'\"&") == "&lt;script&gt;\\u202e&#x27;&quot;&amp;"


class TestErrors:
    def test_they_survive_a_trip_between_processes(self) -> None:
        error = pickle.loads(pickle.dumps(BadInputError("file", "why")))
        assert (type(error), str(error)) == (BadInputError, "file: why")

    def test_a_newline_cannot_make_a_second_line(self) -> None:
        assert "\n" not in str(StratiError("a\nb", "c\nd"))

    def test_missing_extra_names_the_extra(self) -> None:
        with pytest.raises(MissingExtraError, match=r"strati\[keras\]"):
            require("no_such_module_at_all", "keras", "reading Keras files")
        assert require("json", "none", "x") is json


@dataclass(frozen=True)
class Sample(Result):
    verb: ClassVar[str] = "sample"
    value: float

    def payload(self) -> dict[str, Any]:
        return {"value": self.value, "flags": (Flag("a", "b"),), "array": np.array([1, 2])}

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame({"<b>": ["<script>alert(1)</script>"], "value": [self.value]})

    def summary(self) -> str:
        return "a sample"


class TestResults:
    def test_json_starts_with_the_schema_and_has_no_nan(self, tmp_path: Path) -> None:
        text = Sample(float("nan")).to_json(tmp_path / "a.json")
        assert list(json.loads(text))[:2] == ["schema", "strati"]
        assert json.loads(text)["schema"] == "strati.sample/1"
        assert json.loads((tmp_path / "a.json").read_text())["value"] is None

    def test_notebook_form_is_escaped(self) -> None:
        shown = Sample(1.0)._repr_html_()
        assert "<script>" not in shown
        assert "&lt;script&gt;" in shown
        assert "<b>" not in shown

    @given(st.recursive(st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text()), st.lists))
    def test_jsonable_always_makes_valid_json(self, value: Any) -> None:
        json.dumps(jsonable(value), allow_nan=False)

    def test_what_is_not_json_is_an_error(self) -> None:
        with pytest.raises(TypeError):
            jsonable(object())


class TestStreams:
    def test_names_decide(self) -> None:
        assert derive(0, "a", "b") != derive(0, "ab")
        assert derive(0, 1) != derive(0, "1")
        assert derive(1, "a") != derive(0, "a")
        assert stream(3, "x").integers(1 << 40) == stream(3, "x").integers(1 << 40)


class TestFiles:
    def test_whole_or_not_at_all(self, tmp_path: Path) -> None:
        target = tmp_path / "a.txt"
        write_atomic(target, "first")
        write_atomic(target, b"second")
        assert target.read_text() == "second"
        assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
        assert stat.S_IMODE(target.stat().st_mode) & 0o400

    def test_a_full_disk_leaves_nothing_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(BadInputError, match="No space left"):
            write_atomic(tmp_path / "a.txt", "text")
        assert list(tmp_path.iterdir()) == []

    def test_places_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(BadInputError, match="directory"):
            check_writable(tmp_path)
        with pytest.raises(BadInputError, match="does not exist"):
            check_writable(tmp_path / "no" / "a")
        with pytest.raises(BadInputError, match="cannot be written"):
            write_atomic(tmp_path / "no" / "a", "x")

    def test_tables(self, tmp_path: Path) -> None:
        table = pd.DataFrame({"a": [1, 2], "b": [0.5, None]})
        export_table(table, tmp_path / "t.csv")
        export_table(table, tmp_path / "t.parquet")
        assert (tmp_path / "t.csv").read_text() == "a,b\n1,0.5\n2,\n"
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "t.parquet"), table)
        with pytest.raises(BadInputError, match=r"\.csv or \.parquet"):
            export_table(table, tmp_path / "t.xlsx")
