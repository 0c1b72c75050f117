"""Installing a package that adds to strati, without pip: metadata in a folder on the path is all it takes."""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoints, PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

HOME = Path(__file__).resolve().parents[2]


def describe(folder: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of a distribution with these entry points into a folder."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), "")
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()


def describe_reproductions() -> TemporaryDirectory[str] | None:
    """Let tests find the entry points of this checkout's ``reproductions/``, also in subprocesses.

    Metadata are written where the package is not installed, or was installed with other entry points.
    """
    project = tomllib.loads((HOME / "reproductions" / "pyproject.toml").read_text())["project"]
    groups: Mapping[str, Mapping[str, str]] = project["entry-points"]
    wanted = {(group, name, value) for group, named in groups.items() for name, value in named.items()}
    try:
        installed = distribution(project["name"]).entry_points
    except PackageNotFoundError:
        installed = EntryPoints()
    if {(entry.group, entry.name, entry.value) for entry in installed} == wanted:
        return None
    folder = TemporaryDirectory(prefix="strati-entry-points-")
    describe(Path(folder.name), project["name"], groups)
    source = str(HOME / "reproductions" / "src")
    sys.path.insert(0, folder.name)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*([before] if before else []), source, folder.name])
    return folder
