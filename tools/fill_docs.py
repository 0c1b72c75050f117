"""Put the real output of commands into README.md and the pages below docs/.

A block is filled from the command named in the comment before it:

    <!-- output: strati inspect src/strati/embedded/digits-mlp.safetensors -->
    ```text
    ...
    ```

    .venv/bin/python tools/fill_docs.py [--check] [FILE...]

``--check`` changes nothing and fails where a block is not what its command prints. A command that prints times, takes
minutes or needs large files is marked ``output-once:``: it is filled only while its block is empty, and ``--check``
only looks whether something stands there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOO_LONG = 600
BLOCK = re.compile(r"<!-- (output|output-once): (?P<command>.+?) -->\n```text\n(?P<body>.*?)```\n", re.DOTALL)


def filled(text: str, *, once: bool) -> str:
    """The text with every block replaced by what its command prints."""

    def fill(found: re.Match[str]) -> str:
        fixed = found.group(1) == "output-once"
        if fixed and found["body"].strip():
            return found.group(0)
        if fixed and not once:
            raise SystemExit(f"the block of `{found['command']}` is empty; run tools/fill_docs.py")
        return found.group(0)[: found.start("body") - found.start()] + run(found["command"]) + "```\n"

    return BLOCK.sub(fill, text)


def run(command: str) -> str:
    """What a command prints, trailing blanks removed; an error's exit code is no failure, its line is shown."""
    place = {
        "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=os.environ | place, capture_output=True, text=True, check=False,
        timeout=TOO_LONG,
    )  # fmt: skip
    if done.returncode not in (0, 2):
        raise SystemExit(f"{command}: exit code {done.returncode}: {done.stderr[-500:]}")
    shown = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    return "\n".join(line.rstrip() for line in shown.rstrip().splitlines()) + "\n"


def main(words: list[str]) -> int:
    """Fill, or check."""
    check = "--check" in words
    files = [Path(w).resolve() for w in words if not w.startswith("--")] or [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    stale = 0
    for file in files:
        old = file.read_text()
        new = filled(old, once=not check)
        if new != old and check:
            print(f"{file.relative_to(ROOT)}: a block is not what its command prints; run tools/fill_docs.py")
            stale += 1
        elif new != old:
            file.write_text(new)
            print(f"filled {file.relative_to(ROOT)}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
