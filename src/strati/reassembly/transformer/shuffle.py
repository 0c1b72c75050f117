"""Take a transformer apart into numbered tensors without names, and write which piece is what.

Llamas in GGUF files get transformers' names and order of rotary rows; everything else keeps its names. Of an
encoder-decoder the encoder is taken.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.files import check_writable, write_atomic
from strati.core.options import resolve
from strati.core.results import Result, Tick, silent
from strati.core.rng import stream
from strati.io.layers import is_buffer
from strati.io.llama_gguf import as_transformers
from strati.io.network import open as open_network
from strati.reassembly.transformer.blueprint import Blueprint, Slot, blueprint_of
from strati.reassembly.transformer.pieces import TransformerPieces, canonical, stored
from strati.reassembly.transformer.symmetries import apply_random_symmetry, has_known_symmetries

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from strati.io.network import Openable
    from strati.schemas.json_types import ShuffleFields


@dataclass(frozen=True)
class PieceSource:
    """A network's tensors, read when asked for, and its configuration.

    Attributes:
        name: What messages call it.
        shapes: Names and shapes of the tensors.
        read: Reads one.
        config: ``config.json``, or one made from what the file says.
        left_out: Tensors that are not taken, for the record.
        folder: The Hugging Face directory it came from, whose tokenizer goes with it.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], NDArray[Any]]
    config: Mapping[str, Any]
    left_out: tuple[str, ...] = field(default=())
    folder: Path | None = None


def source_of(model: Openable) -> PieceSource:
    """The tensors of a path, a :class:`~strati.io.network.Network`, a module in memory or a state dict.

    Raises:
        BadInputError: It is none of these, or cannot be read.
        UnsupportedError: It is a GGUF file of another architecture than Llama.
    """
    network = open_network(model)
    if network.format == "gguf":
        llama = as_transformers(network)
        shapes = {name: network[stored_name].shape for name, stored_name in llama.names.items()}
        return PieceSource(str(network.path), shapes, llama.read, llama.config)
    shapes = {
        t.name: t.shape
        for t in network.tensors
        if t.floating and t.shape and 0 not in t.shape and t.name not in network.ties and not is_buffer(t)
    }
    folder = network.path if network.path.is_dir() and not network.in_memory else None
    config = dict(network.config or {})
    if config and network.ties:
        config["tie_word_embeddings"] = True
    return _one_stack(PieceSource(str(network.path), shapes, network.read, config, folder=folder))


def _one_stack(source: PieceSource) -> PieceSource:
    """Of an encoder-decoder the encoder alone: cross-attention is no part of a block that strati puts back."""
    encoder = [n for n in source.shapes if re.search(r"(^|\.)encoder\.", n)]
    decoder = [n for n in source.shapes if re.search(r"(^|\.)decoder\.", n)]
    if not encoder or not any(re.search(r"\.\d+\.", n) for n in decoder):
        return source
    encoder_shapes = {n: source.shapes[n] for n in encoder}
    left = tuple(n for n in source.shapes if n not in encoder_shapes)
    return PieceSource(source.name, encoder_shapes, source.read, source.config, left, source.folder)


_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.bin",
              "special_tokens_map.json", "generation_config.json", "preprocessor_config.json")  # fmt: skip


@dataclass(frozen=True)
class ShuffleConfig:
    """How hard the puzzle is.

    Attributes:
        permute: Permute neurons, heads, and rows of v with columns of out; turn q and k rows, block by block.
        rescale: Change scales and signs wherever the network does not change.
        seed: Random seed.
    """

    permute: bool = False
    rescale: bool = False
    seed: int = 0


@dataclass(frozen=True)
class ShuffledCheckpoint(Result):
    """A network taken apart.

    Attributes:
        pieces: The pieces, if they were kept in memory.
        folder: Where they lie otherwise.
        count: How many there are.
        blueprint: The architecture.
        answer: Which piece is what.
        left_out: Tensors that were not taken.
    """

    verb: ClassVar[str] = "shuffle-transformer"

    pieces: TransformerPieces | None
    count: int
    blueprint: Blueprint
    answer: Mapping[str, Any]
    left_out: tuple[str, ...]
    folder: Path | None

    def payload(self) -> ShuffleFields:
        """The answer: which piece is what."""
        return cast("ShuffleFields", dict(self.answer))

    def frame(self) -> pd.DataFrame:
        """One line per block."""
        import pandas as pd

        return pd.DataFrame(self.answer["blocks"])

    def summary(self) -> RenderableType:
        """How many pieces of what."""
        from rich.text import Text

        where = f" to {self.folder}" if self.folder else " in memory"
        lines = [f"Wrote {self.count} unlabelled pieces of {self.blueprint.blocks} blocks{where}."]
        if self.left_out:
            lines.append(f"Left out {len(self.left_out)} tensors of the decoder, such as {self.left_out[0]}.")
        return Text("\n".join(lines))


def shuffle_transformer(
    model: Openable,
    out: str | Path | None = None,
    *,
    answer: str | Path | None = None,
    config: ShuffleConfig | None = None,
    tick: Tick = silent,
    **options: Any,
) -> ShuffledCheckpoint:
    """Take a transformer apart into unlabelled tensors.

    Args:
        model: A path, a :class:`~strati.io.network.Network`, a module in memory or a state dict.
        out: An empty or new folder for the pieces; in memory by default.
        answer: A file for the answer, outside of ``out``.
        config: How hard; single options may be given as keywords instead, which win.
        tick: Called after each piece.
        options: Fields of :class:`ShuffleConfig`.

    Raises:
        BadInputError: The folder is not empty, or the answer would lie in it.
        UnsupportedError: No transformer whose roles strati knows.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> shapes = {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "mlp.c_fc": (8, 32), "mlp.c_proj": (32, 8)}
        >>> state = {f"h.{k}.{m}.weight": rng.normal(size=s) for k in (0, 1) for m, s in shapes.items()}
        >>> state["wte.weight"] = rng.normal(size=(5, 8))
        >>> dropped = shuffle_transformer(state, network={"n_head": 2}, seed=3)
        >>> len(dropped.pieces.arrays), sorted(dropped.answer["blocks"][0])
        (9, ['down', 'out', 'qkv', 'up'])
    """
    network = options.pop("network", None)
    settings = resolve(ShuffleConfig, config, options, of=shuffle_transformer)
    place = None if out is None else Path(out)
    if place is not None:
        check_places(place, answer)
    source = source_of(model)
    if network is not None:
        source = replace(source, config=network)
    if not source.config:
        raise UnsupportedError(source.name, "has no config.json beside it; give the Hugging Face directory")
    if (settings.permute or settings.rescale) and not has_known_symmetries(source.config):
        kind = source.config.get("model_type")
        raise UnsupportedError(
            source.name,
            f"strati does not know which permutations and scales a {kind!r} allows; leave them out",
        )
    blueprint = blueprint_of(source.shapes, source.config, where=source.name)
    places = [(slot, number) for slot in blueprint.block for number in range(blueprint.blocks)]
    everything: list[tuple[Slot, int | None]] = [*places, *((slot, None) for slot in blueprint.whole)]
    order = stream(settings.seed, "drop", "order").permutation(len(everything))
    number_of = {everything[k]: number for number, k in enumerate(order.tolist())}
    tensors = (
        (number_of[slot, block], slot.role, values)
        for slot, block, values in _tensors(source, blueprint, settings)
    )
    pieces = None
    if place is None:
        roles: dict[int, str] = {}
        arrays: dict[int, NDArray[Any]] = {}
        for number, role, values in tensors:
            roles[number], arrays[number] = role, values
        pieces = TransformerPieces(arrays, roles, source.config, blueprint)
    else:
        named = ((number, {role: values}) for number, role, values in tensors)
        write_pieces(place, len(everything), named, tick, partial(_write_beside, source, blueprint))
    dropped = ShuffledCheckpoint(
        pieces,
        len(everything),
        blueprint,
        _answer(blueprint, number_of, source, settings),
        source.left_out,
        place,
    )
    if answer is not None:
        dropped.to_json(answer)
    return dropped


def _tensors(
    source: PieceSource, blueprint: Blueprint, config: ShuffleConfig
) -> Iterator[tuple[Slot, int | None, NDArray[Any]]]:
    for slot in blueprint.whole:
        yield slot, None, np.asarray(source.read(slot.name))
    for number in range(blueprint.blocks):
        raw = {slot: np.asarray(source.read(slot.name.format(number))) for slot in blueprint.block}
        if config.permute or config.rescale:
            parts: dict[str, NDArray[Any]] = {}
            for slot, values in raw.items():
                parts |= {r: v.astype(np.float64) for r, v in canonical(values, slot, blueprint).items()}
            rng = stream(config.seed, "drop", "disguise", number)
            parts = apply_random_symmetry(
                parts, blueprint, rng, permute=config.permute, rescale=config.rescale
            )
            raw = {slot: stored(parts, slot, blueprint).astype(values.dtype) for slot, values in raw.items()}
        for slot, values in raw.items():
            yield slot, number, values


def _answer(
    blueprint: Blueprint,
    number_of: Mapping[tuple[Slot, int | None], int],
    source: PieceSource,
    config: ShuffleConfig,
) -> dict[str, Any]:
    blocks: list[dict[str, int]] = [{} for _ in range(blueprint.blocks)]
    vectors: list[dict[str, int]] = [{} for _ in range(blueprint.blocks)]
    global_numbers: dict[str, int] = {}
    for (slot, block), number in number_of.items():
        if block is None:
            global_numbers[slot.role] = number
        else:
            (blocks if slot.matrix else vectors)[block][slot.role] = number
    embedding = global_numbers.pop("embedding", None)
    return {
        "blocks": blocks,
        "vectors": vectors,
        "embedding": embedding,
        "head": global_numbers.pop("head", embedding if blueprint.tied else None),
        "others": global_numbers,
        "drop": {"permute": config.permute, "rescale": config.rescale,
                 "seed": config.seed, "network": source.name},
    }  # fmt: skip


def check_places(folder: Path, answer: str | Path | None) -> None:
    """Refuse a folder that is not empty, and an answer that would lie in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(folder, "is not an empty folder; give a new one for the pieces")
    if answer is not None and Path(answer).resolve().parent == folder.resolve():
        raise BadInputError(answer, "would lie among the pieces; write the answer elsewhere")
    check_writable(folder)


def write_pieces(
    folder: Path,
    count: int,
    pieces: Iterable[tuple[int, Mapping[str, NDArray[Any]]]],
    tick: Tick,
    more: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write numbered pieces (and more) into a folder beside the wanted one, which takes its name when complete."""
    from safetensors.numpy import save_file

    digits = len(str(count - 1))
    with tempfile.TemporaryDirectory(dir=folder.resolve().parent, prefix=f".{folder.name}.") as scratch:
        made = Path(scratch) / "pieces"
        made.mkdir()
        for number, tensors in pieces:
            save_file(
                {name: np.ascontiguousarray(values) for name, values in tensors.items()},
                made / f"piece_{number:0{digits}d}.safetensors",
            )
            tick(f"piece {number}")
        more(made)
        made.replace(folder)


def _write_beside(source: PieceSource, blueprint: Blueprint, folder: Path) -> None:
    """Write the configuration, the blueprint and the tokenizer beside the pieces."""
    write_atomic(folder / "config.json", json.dumps(dict(source.config), indent=1) + "\n")
    write_atomic(folder / "blueprint.json", json.dumps(blueprint.to_dict(), indent=1) + "\n")
    for name in _TOKENIZER:
        if source.folder is not None and (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)
