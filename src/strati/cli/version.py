"""``strati --version --verbose``: what a bug report needs, without importing any of it."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from strati._version import __version__


def details() -> str:
    """Version, system and the installed packages among those that strati uses, one per line.

    Examples:
        >>> details().splitlines()[0].startswith("strati ")
        True
    """
    lines = [f"strati {__version__}", f"Python {platform.python_version()} ({sys.executable})"]
    lines += [f"{platform.platform()}, {os.cpu_count()} processors"]
    for name in dict.fromkeys(re.split(r"[^\w.-]", need)[0] for need in requires("strati") or ()):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} not installed")
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HF_HOME", "STRATI_DATA")
    lines += [f"{name}={os.environ[name]}" for name in variables if name in os.environ]
    return "\n".join(lines)
