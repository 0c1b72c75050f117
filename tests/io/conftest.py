"""Seeds of every format, made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))


class Seeds(dict[str, bytes]):
    """Bytes by name, with a short repr: hypothesis prints the arguments of a failing test."""

    def __repr__(self) -> str:
        return f"{len(self)} seeds"


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    import makers

    return Seeds(makers.seeds(tmp_path_factory.mktemp("seeds")))
