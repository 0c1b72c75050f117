"""The documentation as a site: it builds strictly, and opened from disk its search finds things without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.browser
def test_the_site_builds_strictly_and_is_searched_offline(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    asked: list[str] = []
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("rounding floor")
    page.wait_for_selector(".md-search-result__item")
    assert "rounding" in page.locator(".md-search-result__item").first.inner_text().lower()
    page.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
