"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from common_fixtures import browser as browser
from common_fixtures import dropped_net as dropped_net
from common_fixtures import one_process as one_process
from common_fixtures import shared_data as shared_data

# Scripts that are run by hand, in environments of their own.
collect_ignore_glob = ["spectra/oracle/*.py", "io/oracle/*.py", "fuzz/*.py"]

HERE = Path(__file__).parent
# Files that `make quick` leaves out: sampling, processes that are stopped, whole commands.
THOROUGH = (
    "cli/test_audit.py",
    "cli/test_study.py",
    "interventions/audit/test_audits.py",
    "interventions/compress/test_apply.py",
    "interventions/test_studies.py",
    "landscape/counts/test_degeneracy.py",
    "landscape/basis/test_modules.py",
    "landscape/llc/",
    "reassembly/transformer/",
    "report/test_schemas.py",
    "jobs/test_engines.py",
    "comparison/test_resume_compare.py",
    "spectra/test_noise_edges.py",
    "spectra/test_resume.py",
    "tracking/",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes longer, before items are chosen by their marks."""
    places = [HERE / name for name in THOROUGH]
    for item in items:
        if any(item.path.is_relative_to(place) for place in places):
            item.add_marker(pytest.mark.thorough)
