"""``strati --version --verbose``: what a bug report needs, without importing any of it."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from strati._version import __version__

_PACKAGES = (
    *(
        "numpy",
        "scipy",
        "pandas",
        "safetensors",
        "ml_dtypes",
        "click",
        "rich",
        "cloudpickle",
        "threadpoolctl",
    ),
    *(
        "torch",
        "transformers",
        "huggingface_hub",
        "peft",
        "gguf",
        "h5py",
        "matplotlib",
        "pillow",
        "ray",
        "pyarrow",
        "arviz",
    ),
)


def details() -> str:
    """Version, system and installed packages, one per line.

    Examples:
        >>> details().splitlines()[0].startswith("strati ")
        True
    """
    lines = [f"strati {__version__}", f"Python {platform.python_version()} ({sys.executable})"]
    lines += [f"{platform.platform()}, {os.cpu_count()} processors"]
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} not installed")
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "HF_HOME", "STRATI_DATA")
    lines += [f"{name}={os.environ[name]}" for name in variables if name in os.environ]
    return "\n".join(lines)
