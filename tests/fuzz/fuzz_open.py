"""Fuzz the parsers: any bytes may be refused by one line, none may do anything else.

Run by ``make fuzz`` (needs atheris): ``python tests/fuzz/fuzz_open.py CORPUS -max_total_time=60``.
The first byte chooses the ending, the rest is the file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ENDINGS = (".safetensors", ".npz", ".pt", ".onnx", ".gguf", ".h5", ".bin", "")


def one_input(data: bytes) -> str:
    """Open a file of these bytes and read every layer of it; what was said about it."""
    import strati

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model{ENDINGS[data[0] % len(ENDINGS) if data else 0]}"
        path.write_bytes(data[1:])
        try:
            network = strati.open(path)
            for layer in network.layers():
                for matrix in layer.matrices():
                    assert matrix.shape == layer.shape
            return f"{len(network.layers())} layers, {len(network.skipped())} skipped"
        except strati.StratiError as error:
            assert "\n" not in str(error)
            return str(error)


def main() -> None:
    """Hand the target to atheris."""
    import atheris

    with atheris.instrument_imports(include=["strati"]):
        import strati.network.formats.onnx
        import strati.network.formats.safetensors
        import strati.network.formats.torch
        import strati.network.open  # noqa: F401
    atheris.Setup(sys.argv, lambda data: one_input(data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
