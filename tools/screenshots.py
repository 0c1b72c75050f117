"""Pictures of the page for the documentation, taken in Chromium: `make screenshots`.

    .venv/bin/python tools/screenshots.py [REPORT.html]

Without an argument the report of ``strati demo`` is made first. Each picture is written to ``docs/images/`` with a
palette (tools/pictures.py).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

from pictures import small

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync"]


@dataclass(frozen=True)
class Shot:
    """One picture: its file, the size of the window, the theme, what to do first."""

    name: str
    width: int = 1400
    height: int = 1060
    theme: str = "light"
    before: Callable[[Page], None] | None = None


def at(section: str) -> Callable[[Page], None]:
    """Scroll to a section."""
    return lambda page: page.evaluate(f"document.getElementById('{section}').scrollIntoView()")


SHOTS = [
    Shot("page"),
    Shot("page-dark", theme="dark"),
    Shot("layers", height=1100, before=at("scan")),
]


def main() -> None:
    """Make the page unless one is given, and take every picture."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("screenshots: no chromium on the path; install it first (apt-get install chromium)")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(sys.argv[1]) if len(sys.argv) > 1 else demo(Path(folder))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
            for shot in SHOTS:
                size = {"width": shot.width, "height": shot.height}
                page = browser.new_page(viewport=size, color_scheme=shot.theme, device_scale_factor=1.25)
                page.goto(report.resolve().as_uri())
                page.wait_for_selector("html[data-ready='1']")
                if shot.before is not None:
                    shot.before(page)
                page.wait_for_timeout(1500)
                target = IMAGES / f"{shot.name}.png"
                target.write_bytes(small(page.screenshot()))
                print(f"{target.relative_to(ROOT)} {target.stat().st_size / 1000:.0f} KB")
                page.close()
            browser.close()


def demo(folder: Path) -> Path:
    """The report of ``strati demo``."""
    command = [sys.executable, "-m", "strati.cli.main", "demo", "--out", str(folder), "--quiet"]
    subprocess.run(command, check=True)
    return folder / "report.html"


if __name__ == "__main__":
    main()
