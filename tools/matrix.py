"""Build sdist and wheel, check them, and try the wheel in clean environments: `make matrix`.

    python tools/matrix.py [--python 3.12]... [--cell plain-oldest]...

For every interpreter named (default: those of Python 3.11 to 3.13 that are there, pyenv's among them): a new
environment, the wheel, and the command that needs it, or an import. The package alone with the oldest versions that
pyproject.toml allows, the newest there are, and the pinned ones; then every extra alone and all together, pinned. The
pinned torch is a wheel for Python 3.11 alone, so extras that need torch are tried there; the oldest versions have no
wheels for 3.13. Prints one line per cell; exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "src" / "strati" / "embedded" / "digits-mlp.safetensors"
TORCH = "torch==2.13.0"
SCAN = "strati scan {model} -q"
PLAIN = (SCAN, "strati --version --verbose", "strati compare {model} {first} -q")
CELLS = {
    "plain": ("", "pinned", PLAIN),
    "plain-oldest": ("", "oldest", PLAIN),
    "plain-newest": ("", "newest", PLAIN),
    "plot": ("plot", "pinned", ("python -c \"import strati; strati.scan('{model}')['0'].plot()\"",)),
    "gguf": ("gguf", "pinned", ("python -c 'import gguf'", SCAN)),
    "keras": ("keras", "pinned", ("python -c 'import h5py'", SCAN)),
    "flax": ("flax", "pinned", ("python -c 'import msgpack'", SCAN)),
    "images": ("images", "pinned", ("python -c 'import PIL'", SCAN)),
    "parquet": ("parquet", "pinned", ("python -c 'import pyarrow'", SCAN)),
    "arviz": ("arviz", "pinned", ("python -c 'import arviz'", SCAN)),
    "ray": ("ray", "pinned", ("python -c 'import ray'", SCAN)),
    "torch": ("torch", "pinned", ("strati degeneracy {model} --data {data} -q",)),
    "transformers": (
        "transformers",
        "pinned",
        ("python -c 'import transformers, strati; strati.as_module'",),
    ),
    "all": ("all", "pinned", ("strati demo --out demo -q",)),
}
"""Cell -> extra, versions of what it needs, what must work with it alone."""
NEEDS_TORCH = ("torch", "transformers", "all")
VERSIONS = ("3.11", "3.12", "3.13")
OLD = ("3.11", "3.12")


def main(words: list[str]) -> int:
    """Build, check, try."""
    parser = argparse.ArgumentParser(description="Try the built wheel in clean environments.")
    parser.add_argument("--python", action="append", help="an interpreter, or a version like 3.12")
    parser.add_argument("--cell", action="append", choices=list(CELLS))
    asked = parser.parse_args(words)
    names = asked.python or VERSIONS
    pythons = [path for name in names if (path := found(name))]
    if not pythons:
        print(f"no interpreter of {', '.join(names)} was found", file=sys.stderr)
        return 1
    for name in names:
        if not found(name):
            print(f"Python {name}: not tried, it is not there", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        failed = 0
        for python in pythons:
            version = run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
            for cell in asked.cell or CELLS:
                extra, versions, commands = CELLS[cell]
                if extra in NEEDS_TORCH and version != "3.11":
                    print(f"Python {version} [{cell}]: not tried, the pinned torch is for 3.11", flush=True)
                    continue
                if versions == "oldest" and version not in OLD:
                    print(f"Python {version} [{cell}]: not tried, numpy 2.0 has no wheel for it", flush=True)
                    continue
                limits = limits_of(versions, Path(folder))
                reason = tried(python, wheel, extra, limits, commands, Path(folder) / f"{version}-{cell}")
                print(f"Python {version} [{cell}]: {reason or 'ok'}", flush=True)
                failed += bool(reason)
    return 1 if failed else 0


def found(name: str) -> str | None:
    """An interpreter by path or version, if it is there and runs (pyenv's shims may stand for one not chosen)."""
    candidates = [shutil.which(name), shutil.which(f"python{name}")]
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates += [str(path) for path in sorted(root.glob(f"{name}.*/bin/python"))]
    for path in candidates:
        if (
            path
            and subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0
        ):
            return path
    return None


def limits_of(versions: str, folder: Path) -> list[str]:
    """What pip is told about versions."""
    if versions == "newest":
        return []
    if versions == "pinned":
        return ["-c", str(ROOT / "constraints.txt")]
    file = folder / "oldest.txt"
    file.write_text(run([sys.executable, str(ROOT / "tools" / "oldest.py")]))
    return ["-c", str(file)]


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
    # W002: the embedded network and its initial weights are two Hugging Face directories with one tokenizer.
    run([str(tools / "bin" / "check-wheel-contents"), "--ignore", "W002", str(wheel)])
    print(f"built and checked: {', '.join(path.name for path in made)}", flush=True)
    return wheel


def tried(
    python: str, wheel: Path, extra: str, limits: list[str], commands: tuple[str, ...], place: Path
) -> str:
    """Why a cell fails; empty where it works."""
    try:
        run([python, "-m", "venv", str(place)])
        inside = str(place / "bin" / "python")
        if extra in NEEDS_TORCH:
            run([inside, "-m", "pip", "-q", "install", TORCH])
        target = f"strati[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        run([inside, "-m", "pip", "-q", "install", *limits, target])
        for command in commands:
            home = MODEL.parent
            filled = command.format(
                model=MODEL, first=home / "digits-mlp-init.safetensors", data=home / "digits.npz"
            )
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
