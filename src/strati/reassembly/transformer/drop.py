"""Take a transformer apart: numbered tensors in random order, names gone; the answer is kept elsewhere."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.errors import BadInputError
from strati.options import resolve
from strati.reassembly.transformer.blueprint import Blueprint, Slot, blueprint_of
from strati.reassembly.transformer.disguise import disguise
from strati.reassembly.transformer.pieces import UNTOLD, TransformerPieces, canonical, stored
from strati.reassembly.transformer.sources import PieceSource, source_of
from strati.rng import stream
from strati.run.files import check_writable, write_atomic
from strati.types import Result, Tick, silent

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.bin",
              "special_tokens_map.json", "generation_config.json", "preprocessor_config.json")  # fmt: skip


@dataclass(frozen=True)
class DropConfig:
    """How hard the puzzle is.

    Attributes:
        hide_roles: Do not tell the roles of pieces; only shapes and weights do then.
        permute: Permute neurons, heads, and rows of v with columns of out; turn q and k rows, block by block.
        rescale: Change scales and signs wherever the network does not change.
        seed: Random seed.
    """

    hide_roles: bool = False
    permute: bool = False
    rescale: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Dropped(Result):
    """A network taken apart.

    Attributes:
        pieces: The pieces, if they were kept in memory.
        folder: Where they lie otherwise.
        count: How many there are.
        blueprint: The architecture.
        answer: Which piece is what.
        left_out: Tensors that were not taken.
    """

    verb: ClassVar[str] = "reassemble"

    pieces: TransformerPieces | None
    count: int
    blueprint: Blueprint
    answer: Mapping[str, Any]
    left_out: tuple[str, ...]
    folder: Path | None

    def payload(self) -> dict[str, Any]:
        """The answer: which piece is what."""
        return dict(self.answer)

    def frame(self) -> pd.DataFrame:
        """One line per block."""
        import pandas as pd

        return pd.DataFrame(self.answer["blocks"])

    def summary(self) -> RenderableType:
        """How many pieces of what."""
        from rich.text import Text

        told = "roles not told" if self.answer["drop"]["hide_roles"] else "roles told"
        where = f", in {self.folder}" if self.folder else ""
        lines = [f"{self.count} pieces of {self.blueprint.blocks} blocks, {told}{where}"]
        if self.left_out:
            lines.append(
                f"left out   {len(self.left_out)} tensors of the decoder, {self.left_out[0]} and others"
            )
        return Text("\n".join(lines))


def drop(
    model: object,
    out: str | Path | None = None,
    *,
    answer: str | Path | None = None,
    config: DropConfig | None = None,
    tick: Tick = silent,
    **options: Any,
) -> Dropped:
    """Take a transformer apart into unlabelled tensors.

    Args:
        model: A path, a :class:`~strati.network.open.Network`, a module in memory or a state dict.
        out: An empty or new folder for the pieces; in memory by default.
        answer: A file for the answer, outside of ``out``.
        config: How hard; single options may be given as keywords instead, which win.
        tick: Called after each piece.
        options: Fields of :class:`DropConfig`.

    Raises:
        BadInputError: The folder is not empty, or the answer would lie in it.
        UnsupportedError: No transformer whose roles strati knows.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> shapes = {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "mlp.c_fc": (8, 32), "mlp.c_proj": (32, 8)}
        >>> state = {f"h.{k}.{m}.weight": rng.normal(size=s) for k in (0, 1) for m, s in shapes.items()}
        >>> dropped = drop({**state, "wte.weight": rng.normal(size=(5, 8))}, network={"n_head": 2}, seed=3)
        >>> len(dropped.pieces.arrays), sorted(dropped.answer["blocks"][0])
        (9, ['down', 'out', 'qkv', 'up'])
    """
    network = options.pop("network", None)
    chosen = resolve(DropConfig, config, options, of=drop)
    place = None if out is None else _empty(Path(out))
    if answer is not None and place is not None and Path(answer).resolve().parent == place.resolve():
        raise BadInputError(answer, "would lie among the pieces; write the answer elsewhere")
    source = source_of(model)
    if network is not None:
        source = PieceSource(source.name, source.shapes, source.read, network, source.left_out)
    blueprint = blueprint_of(source.shapes, source.config, where=source.name)
    places = [(slot, number) for slot in blueprint.block for number in range(blueprint.blocks)]
    everything: list[tuple[Slot, int | None]] = [*places, *((slot, None) for slot in blueprint.whole)]
    order = stream(chosen.seed, "drop", "order").permutation(len(everything))
    number_of = {everything[k]: number for number, k in enumerate(order.tolist())}
    tensors = (
        (number_of[slot, block], UNTOLD if chosen.hide_roles else slot.role, values)
        for slot, block, values in _tensors(source, blueprint, chosen)
    )
    pieces = None
    if place is None:
        kept = {number: (role, values) for number, role, values in tensors}
        told = {number: role for number, (role, _) in kept.items() if role != UNTOLD}
        arrays = {number: values for number, (_, values) in kept.items()}
        pieces = TransformerPieces(arrays, told, source.config, blueprint)
    else:
        _write_all(place, source, blueprint, len(everything), tensors, tick)
    dropped = Dropped(
        pieces,
        len(everything),
        blueprint,
        _answer(blueprint, number_of, source, chosen),
        source.left_out,
        place,
    )
    if answer is not None:
        dropped.to_json(answer)
    return dropped


def _tensors(
    source: PieceSource, blueprint: Blueprint, config: DropConfig
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
            parts = disguise(parts, blueprint, rng, permute=config.permute, rescale=config.rescale)
            raw = {slot: stored(parts, slot, blueprint).astype(values.dtype) for slot, values in raw.items()}
        for slot, values in raw.items():
            yield slot, number, values


def _answer(
    blueprint: Blueprint,
    number_of: Mapping[tuple[Slot, int | None], int],
    source: PieceSource,
    config: DropConfig,
) -> dict[str, Any]:
    blocks: list[dict[str, int]] = [{} for _ in range(blueprint.blocks)]
    vectors: list[dict[str, int]] = [{} for _ in range(blueprint.blocks)]
    whole: dict[str, int] = {}
    for (slot, block), number in number_of.items():
        if block is None:
            whole[slot.role] = number
        else:
            (blocks if slot.matrix else vectors)[block][slot.role] = number
    embedding = whole.pop("embedding", None)
    return {
        "blocks": blocks,
        "vectors": vectors,
        "embedding": embedding,
        "head": whole.pop("head", embedding if blueprint.tied else None),
        "others": whole,
        "drop": {"hide_roles": config.hide_roles, "permute": config.permute, "rescale": config.rescale,
                 "seed": config.seed, "network": source.name},
    }  # fmt: skip


def _empty(place: Path) -> Path:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise BadInputError(place, "is not an empty folder; give a new one for the pieces")
    return place


def _write_all(
    place: Path,
    source: PieceSource,
    blueprint: Blueprint,
    count: int,
    tensors: Iterable[tuple[int, str, NDArray[Any]]],
    tick: Tick,
) -> None:
    """All files into a folder beside the wanted one, which takes its name when it is complete."""
    from safetensors.numpy import save_file

    check_writable(place)
    digits = len(str(count - 1))
    with tempfile.TemporaryDirectory(dir=place.resolve().parent, prefix=f".{place.name}.") as scratch:
        made = Path(scratch) / "pieces"
        made.mkdir()
        for number, role, values in tensors:
            save_file({role: np.ascontiguousarray(values)}, made / f"piece_{number:0{digits}d}.safetensors")
            tick(f"piece {number}")
        write_atomic(made / "config.json", json.dumps(dict(source.config), indent=1) + "\n")
        write_atomic(made / "blueprint.json", json.dumps(blueprint.to_dict(), indent=1) + "\n")
        _copy_tokenizer(source, made)
        made.replace(place)


def _copy_tokenizer(source: PieceSource, place: Path) -> None:
    for name in _TOKENIZER:
        if source.folder is not None and (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, place / name)
