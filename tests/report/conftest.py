"""The page in a real browser, and real results of every verb to draw in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import real_results

from strati.report.page import build_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the real verbs wrote about the embedded network, by name; the study is a folder."""
    return real_results.make(tmp_path_factory.mktemp("real"))


@dataclass
class Opened:
    """A page opened from disk, and everything that should not have happened on it."""

    page: Page
    problems: list[str]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Write results as a page, open it from disk, and at the end hold it to silence.

    No console message, no error, no request but for the file itself, no dialog, no section that failed.
    """
    contexts: list[tuple[BrowserContext, Opened]] = []

    def open_page(
        results: list[dict[str, Any]], width: int = 1280, scheme: str = "light", height: int = 900
    ) -> Opened:
        file = tmp_path / f"page-{len(contexts)}.html"
        file.write_text(build_page(results), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
        )
        context.set_default_timeout(10_000)
        page = context.new_page()
        seen = Opened(page, [])
        page.on("console", lambda message: seen.problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: seen.problems.append(f"error: {error}"))
        page.on(
            "dialog", lambda dialog: (seen.problems.append(f"dialog: {dialog.message}"), dialog.dismiss())
        )
        page.on("request", lambda request: _note(request.url, file.as_uri(), seen.problems))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        contexts.append((context, seen))
        assert page.locator("html").get_attribute("data-ready") == "1"
        return seen

    yield open_page
    for context, seen in contexts:
        failed = [node.inner_text() for node in seen.page.locator("[data-failed]").all()]
        context.close()
        assert seen.problems == []
        assert failed == []


def _note(url: str, own: str, problems: list[str]) -> None:
    # data: and blob: are the page's own pictures on their way to a file.
    if url.split("#")[0] != own and not url.startswith(("data:", "blob:")):
        problems.append(f"request: {url}")
