"""The documentation as a site: it builds strictly, and opened from disk its search finds things without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = {
    "install": "Install strati",
    "hugging face": "Hugging Face",
    "huggingface": "Models",
    "--data": "data",
    "gpu": "GPU",
    "lineage": "lineage",
    "noise-like": "noise-like",
    "rounding floor": "floor",
}
"""What a reader types, and a word that a heading or text of the first results must contain."""


@pytest.mark.slow
@pytest.mark.browser
def test_the_site_builds_strictly_and_is_searched_offline(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("src", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
    subprocess.run(command, cwd=tmp_path, check=True)
    requested: list[str] = []
    for query, word in QUESTIONS.items():
        page = browser.new_page()
        page.on("request", lambda request: requested.append(request.url))
        page.goto((tmp_path / "site" / "start" / "tour.html").as_uri())
        assert page.locator(".md-footer__link").count() == 2, "previous and next page"
        assert page.locator(".md-code__button, .md-clipboard").count() > 0, "copy buttons"
        page.locator(".md-search__button").click()
        page.locator("input:visible").last.fill(query)
        page.locator("ol.h > li").first.wait_for()
        texts = page.locator("ol.h > li").all_inner_texts()[:5]
        assert any(word.lower() in text.lower() for text in texts), (query, texts)
        page.close()
    assert [url for url in requested if not url.startswith(("file:", "data:", "blob:"))] == []
