"""Faults put into every small network of the zoo (``tools/fault_table.py``): what is found, and no false alarm."""

from __future__ import annotations

import pytest
from tooling import tool

import strati
from strati.core.errors import StratiError

pytest.importorskip("strati_reproductions")
pytestmark = pytest.mark.slow
table = tool("fault_table")
PLAUSIBLE = ("times", "exponent bit", "a block missing", "of zeros")
"""Faults that leave some networks plausible; docs/check.md has their rates."""


@pytest.fixture(params=table.NETWORKS, scope="module")
def network(request: pytest.FixtureRequest) -> strati.Network:
    try:
        return table.opened(request.param)
    except StratiError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("fault", [*table.FAULTS, *table.NAMES_ONLY])
def test_faults_are_found(network: strati.Network, fault: str) -> None:
    hits = [table.found(*case) for case in table.cases(network, fault)]
    if fault in ("a matrix of zeros", "a norm of zeros") or not any(word in fault for word in PLAUSIBLE):
        assert all(hits)
    elif "exponent bit" in fault:
        assert sum(hits) >= 2  # flipping the bit of an entry above 2 makes it tiny


def test_sound_copies_raise_no_alarm(network: strati.Network) -> None:
    copies = [("as it is", network), *table.sound(network)]
    assert {kind: strati.check(copy, workers=1).found for kind, copy in copies} == {
        kind: () for kind, _ in copies
    }


def test_a_gguf_file_raises_no_alarm() -> None:
    for name in table.LARGE:
        assert strati.check(table.opened(name), workers=1).found == ()
