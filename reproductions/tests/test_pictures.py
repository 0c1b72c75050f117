"""Pictures of reproductions: PNG and SVG, with the data that was drawn as a table, and on the page."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from strati.report.runs import read_run
from strati_reproductions.pictures import COLOURS, compress, legend_below, panels, save
from strati_reproductions.rows import Reproduction, Row

matplotlib = pytest.importorskip("matplotlib")


def table(folder: Path, stem: str) -> list[list[str]]:
    return list(csv.reader((folder / f"{stem}.csv").read_text().splitlines()))


def test_what_is_drawn_is_what_the_table_holds(tmp_path: Path) -> None:
    figure, axes = panels(4, columns=4, title="All")
    axes[0].plot([1, 2, 3], [4, 5, 6], label="line")
    axes[0].scatter([7], [8], label="dot")
    axes[1].barh(["a", "b"], [0.25, 0.5])
    axes[2].hist([0.0, 0.0, 1.0], bins=2)
    axes[3].imshow(np.arange(4).reshape(2, 2))
    for axis, name in zip(axes, "wxyz", strict=True):
        axis.set_title(name)
    paths = save(figure, tmp_path, "one")
    assert [Path(p).suffix for p in paths] == [".png", ".svg"]
    rows = table(tmp_path, "one")
    assert rows[0] == ["panel", "series", "x", "y"]
    assert ["w", "line", "2", "5"] in rows and ["w", "dot", "7", "8"] in rows
    assert ["x", "a", "0.25", "a"] in rows and ["x", "b", "0.5", "b"] in rows
    assert ["y", "", "0.25", "2"] in rows and ["y", "", "0.75", "1"] in rows
    assert ["z", "3", "1", "1"] in rows and ["z", "1", "1", "0"] in rows
    assert len(rows) == 1 + 4 + 2 + 2 + 4


def test_large_images_and_long_lines_do_not_make_long_tables(tmp_path: Path) -> None:
    figure, (axis,) = panels(1)
    axis.imshow(np.zeros((100, 100)))
    save(figure, tmp_path, "matrix")
    assert not (tmp_path / "matrix.csv").exists()
    figure, (axis,) = panels(1)
    axis.plot(np.arange(10_000), label="long")
    save(figure, tmp_path, "line")
    rows = table(tmp_path, "line")
    assert len(rows) == 2001 and rows[2][1:] == ["long, every 5 points", "5", "5"]


def test_pictures_are_readable_on_light_and_dark(tmp_path: Path) -> None:
    """Transparent ground, grey text: at least 3 to 1 against white and against the dark theme's ground."""
    from PIL import Image

    figure, axes = panels(2)
    for axis, colour in zip(axes, COLOURS, strict=False):
        axis.plot([0, 1], color=colour, label="a")
    legend_below(figure, axes)
    png, _ = save(figure, tmp_path, "x")
    assert Image.open(png).convert("RGBA").getpixel((0, 0))[3] == 0
    assert len(figure.legends[0].get_texts()) == 1

    def light(rgb: tuple[int, int, int]) -> float:
        parts = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in rgb)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    grey = light((128, 128, 128))
    for ground in ((255, 255, 255), (30, 33, 41)):
        one, two = sorted((light(ground), grey), reverse=True)
        assert (one + 0.05) / (two + 0.05) >= 3


def test_a_compressed_picture_is_smaller_and_looks_the_same(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    image = np.zeros((40, 3000, 4), np.uint8)
    image[:, ::2] = (0, 114, 178, 255)
    image[..., 0] += rng.integers(0, 3, image.shape[:2]).astype(np.uint8)
    file = tmp_path / "wide.png"
    Image.fromarray(image).save(file)
    before = file.stat().st_size
    compress(file)
    assert file.stat().st_size < before
    for _ in range(2):  # the second time changes nothing that can be seen
        with Image.open(file) as packed:
            assert packed.mode == "P" and packed.size == (1200, 16)
            middle = np.asarray(packed.convert("RGBA"))[8].astype(int).mean(axis=0)
        np.testing.assert_allclose(middle[3], 127, atol=12)
        compress(file)


def test_the_page_holds_picture_sentence_and_data(tmp_path: Path) -> None:
    figure, (axis,) = panels(1)
    axis.plot([1, 2], [3, 4], label="line")
    paths = save(figure, tmp_path, "figure-3")
    result = Reproduction(
        "x", "A title", (Row("a", 1.0, 2.0),), paths, captions={"figure-3": "look at the line"}
    )
    (picture,) = read_run(result)["pictures"]
    assert picture["name"] == "figure-3.png"
    assert picture["columns"] == ["panel", "series", "x", "y"]
    assert picture["rows"] == [["", "line", "1", "3"], ["", "line", "2", "4"]] and picture["lines"] == 2


def test_data_beside_a_foreign_result_come_from_its_own_folder(tmp_path: Path) -> None:
    """A CSV that is a link out of the folder does not come onto the page."""
    import json

    home = tmp_path / "inside"
    home.mkdir()
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    for name in ("a", "b"):
        (home / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    (home / "a.csv").symlink_to(tmp_path / "secret.csv")
    (home / "b.csv").write_text("a,b\n1,2\nshort\n")
    result = {"schema": "strati.reproduce/1", "strati": "1", "rows": [], "figures": ["a.png", "b.png"]}
    (home / "result.json").write_text(json.dumps(result))
    first, second = read_run(home / "result.json")["pictures"]
    assert "rows" not in first
    assert (second["rows"], second["lines"]) == ([["1", "2"]], 1)
