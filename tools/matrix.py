"""Build sdist and wheel, check them, and try the wheel in clean environments: `make matrix`.

    python tools/matrix.py [PYTHON...]

For every interpreter named (default: those of python3.11 to python3.13 that are there) and every extra alone: a new
environment, the wheel with that extra, and the verb that needs it, or an import. The pinned torch is a wheel for
Python 3.11 alone, so extras that need torch are tried there. Prints one line per cell; exit code 1 if any failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "src" / "strati" / "embedded" / "digits-mlp.safetensors"
TORCH = "torch==2.13.0"
SCAN = f"strati scan {MODEL} -q"
CELLS = {
    "": (SCAN, "strati --version --verbose"),
    "plot": ("python -c \"import strati; strati.scan('{model}')['0'].plot()\"",),
    "gguf": ("python -c 'import gguf'", SCAN),
    "keras": ("python -c 'import h5py'", SCAN),
    "images": ("python -c 'import PIL'", SCAN),
    "parquet": ("python -c 'import pyarrow'", SCAN),
    "torch": ("strati degeneracy {model} --data {data} -q",),
    "transformers": ("python -c 'import transformers, strati; strati.as_module'",),
}
"""Extra -> what must work with it alone."""
NEEDS_TORCH = ("torch", "transformers")


def main(words: list[str]) -> int:
    """Build, check, try."""
    pythons = (
        words
        or [p for v in ("3.11", "3.12", "3.13") if (p := shutil.which(f"python{v}"))]
        or [sys.executable]
    )
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        failed = 0
        for python in pythons:
            version = run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
            for extra, commands in CELLS.items():
                if extra in NEEDS_TORCH and version != "3.11":
                    print(f"Python {version} [{extra}]: not tried, the pinned torch is for 3.11", flush=True)
                    continue
                reason = tried(python, wheel, extra, commands, Path(folder) / f"{version}-{extra or 'plain'}")
                print(f"Python {version} [{extra or 'plain'}]: {reason or 'ok'}", flush=True)
                failed += bool(reason)
    return 1 if failed else 0


def found(name: str) -> str | None:
    """The interpreter of that name, if it is there and runs."""
    path = shutil.which(name)
    works = path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    return path if works else None


def build(folder: Path) -> Path:
    """The wheel, after sdist and wheel were built in an environment of their own and checked."""
    tools = folder / "tools"
    venv.create(tools, with_pip=True)
    python = str(tools / "bin" / "python")
    run([python, "-m", "pip", "-q", "install", "build", "twine", "check-wheel-contents"])
    run([python, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)])
    made = sorted((folder / "dist").iterdir())
    run([python, "-m", "twine", "check", "--strict", *map(str, made)])
    wheel = next(path for path in made if path.suffix == ".whl")
    run([str(tools / "bin" / "check-wheel-contents"), str(wheel)])
    print(f"built and checked: {', '.join(path.name for path in made)}", flush=True)
    return wheel


def tried(python: str, wheel: Path, extra: str, commands: tuple[str, ...], place: Path) -> str:
    """Why a cell fails; empty where it works."""
    try:
        run([python, "-m", "venv", str(place)])
        inside = str(place / "bin" / "python")
        if extra in NEEDS_TORCH:
            run([inside, "-m", "pip", "-q", "install", TORCH])
        target = f"strati[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        run([inside, "-m", "pip", "-q", "install", "-c", str(ROOT / "constraints.txt"), target])
        for command in commands:
            filled = command.format(model=MODEL, data=MODEL.parent / "digits.npz")
            run(["bash", "-c", f'PATH="{place}/bin:$PATH"; cd "{place}"; {filled}'])
    except subprocess.CalledProcessError as error:
        return (error.stderr or error.stdout or "failed").strip().splitlines()[-1]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return ""


def run(command: list[str]) -> str:
    """What a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
