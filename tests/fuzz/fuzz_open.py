"""Fuzz the parsers: any bytes may be refused by one line, none may do anything else.

Run by ``make fuzz`` (needs atheris): ``python tests/fuzz/fuzz_open.py -max_total_time=120``.
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


def corpus(folder: Path) -> None:
    """Write one valid file of every format, the seeds that the fuzzer changes."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
    import makers

    for name, data in makers.seeds(folder).items():
        (folder / name).write_bytes(bytes([ENDINGS.index(Path(name).suffix)]) + data)


def main() -> None:
    """Hand the target and its seeds to atheris."""
    import atheris

    with atheris.instrument_imports(include=["strati"]):
        import strati.network.formats.gguf
        import strati.network.formats.npz
        import strati.network.formats.onnx
        import strati.network.formats.safetensors
        import strati.network.formats.torch
        import strati.network.open  # noqa: F401

    def target(data: bytes) -> None:
        # HDF5 is opened in a process of its own: too slow here, and not our code.
        if not data[1:].startswith(b"\x89HDF"):
            one_input(data)

    with tempfile.TemporaryDirectory() as folder:
        corpus(Path(folder))
        atheris.Setup([*sys.argv, folder], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
