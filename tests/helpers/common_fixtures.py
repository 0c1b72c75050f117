"""Set-up and fixtures of all tests: threads kept in check, reproducible examples, real data beside the project."""

from __future__ import annotations

import os
import shutil

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import plugin  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# A slow moment of the machine is no failure; what takes too long is cut off by the suite's own limit.
# The same examples in every run; STRATI_EXPLORE=1 looks for new ones.
settings.register_profile("strati", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("explore" if os.environ.get("STRATI_EXPLORE") else "strati")

SHARED = plugin.HOME.parent / "shared" / "data"
_described = plugin.describe_reproductions()  # removed with this module


@pytest.fixture(scope="session", autouse=True)
def one_process() -> Iterator[None]:
    """Work stays in this process where a test does not say how many: a worker would import torch for a tiny network."""
    with mock.patch("strati.jobs.store.cores", return_value=1):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data that lies beside the project; the test skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the real data beside the project (../shared/data) are absent")
    return SHARED


@pytest.fixture(scope="session")
def dropped_net(shared_data: Path) -> Path:
    """The public puzzle of dropped-neural-net."""
    folder = shared_data / "dropped-net"
    if not folder.is_dir():
        pytest.skip("the puzzle data (../shared/data/dropped-net) are absent")
    return folder


CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, headless, talking to nobody; the test skips where it is absent."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the path; install it to test the page (apt-get install chromium)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is absent: pip install 'strati[dev]'"
    )
    with playwright.sync_playwright() as driver:
        chrome = driver.chromium.launch(executable_path=chromium, headless=True, args=CHROMIUM_FLAGS)
        yield chrome
        chrome.close()
