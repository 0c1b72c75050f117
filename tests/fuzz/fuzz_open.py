"""Fuzz the parsers: any bytes may be refused by one line, none may do anything else.

Run by ``make fuzz`` (needs atheris): ``python tests/fuzz/fuzz_open.py -max_total_time=120``.
The first byte chooses the ending, the rest is the file; or it chooses a table that says what a folder is (an adapter's
settings, an index, a pipeline's parts, quantisation), the rest is that table, and valid weights lie beside it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import makers

ENDINGS = (".safetensors", ".npz", ".pt", ".onnx", ".gguf", ".h5", ".bin", "", ".msgpack", ".keras")
KINDS = (*ENDINGS, *makers.FOLDERS)


def chosen(name: str) -> bytes:
    """The first byte of an input that stands for the file ``name``."""
    return bytes([KINDS.index(name if name in makers.FOLDERS else Path(name).suffix)])


def one_input(data: bytes) -> str:
    """Open a file of these bytes and read every layer of it; what was said about it."""
    import strati

    with tempfile.TemporaryDirectory() as folder:
        kind = KINDS[data[0] % len(KINDS) if data else 0]
        path = Path(folder) / (kind if kind in makers.FOLDERS else f"model{kind}")
        path.write_bytes(data[1:])
        if kind in makers.FOLDERS:
            makers.folder_around(kind, Path(folder))
            path = Path(folder)
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
    with tempfile.TemporaryDirectory() as scratch:
        seeds = makers.seeds(Path(scratch))
    for name, data in seeds.items():
        (folder / name).write_bytes(chosen(name) + data)


def main() -> None:
    """Hand the target and its seeds to atheris."""
    import atheris

    with atheris.instrument_imports(include=["strati"]):
        import strati.io.adapters.recognise
        import strati.io.formats.flax_msgpack
        import strati.io.formats.gguf_file
        import strati.io.formats.hf_directory
        import strati.io.formats.numpy_file
        import strati.io.formats.onnx_file
        import strati.io.formats.safetensors_file
        import strati.io.formats.torch_file
        import strati.io.network
        import strati.io.quantised.recognise  # noqa: F401

    def target(data: bytes) -> None:
        # HDF5 (in a .keras archive too) is opened in a process of its own: too slow here, and not our code.
        if not data[1:].startswith(b"\x89HDF") and b"model.weights.h5" not in data:
            one_input(data)

    with tempfile.TemporaryDirectory() as folder:
        corpus(Path(folder))
        atheris.Setup([*sys.argv, folder], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
