"""Fixtures shared by all tests: real data beside the project, threads kept in check."""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# A slow moment of the machine is no failure; what takes too long is cut off by the suite's own limit.
# The same examples in every run; STRATI_EXPLORE=1 looks for new ones.
settings.register_profile("strati", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("explore" if os.environ.get("STRATI_EXPLORE") else "strati")

# Scripts that are run by hand, in environments of their own.
collect_ignore_glob = ["spectra/oracle/*.py", "network/oracle/*.py", "fuzz/*.py"]

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


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
