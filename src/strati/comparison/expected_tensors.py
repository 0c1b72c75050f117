"""The tensors that a network should have: by ``config.json``, by the index, and by what its other blocks have.

Only names, shapes and byte counts are used. Blocks are compared where they are built alike: a container of numbered
modules whose tensors have the same shapes. Stages of convolutional networks are not, and nothing is expected of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.comparison.damage import Finding
from strati.io.adapters.merge import is_adapter
from strati.io.layers import is_buffer

if TYPE_CHECKING:
    from strati.io.checkpoint_file import Tensor
    from strati.io.network import Network

Shape = tuple[int, ...]
_NUMBER = re.compile(r"(?:^|(?<=[./]))([0-9]{1,6})[./]")
_SHARD = re.compile(r".+-[0-9]{5}-of-[0-9]{5}\.[a-z]+")
_BUFFER = re.compile(
    r"(?:^|[./])(?:inv_freq|position_ids|token_type_ids|masked_bias|num_batches_tracked"
    r"|relative_position_index|(?:sin|cos)_cached|rotary_(?:sin|cos)|freqs_(?:cis|sin|cos))(?::0)?$"
)
_ONLY_IN_ONE_BLOCK = ("relative_attention_bias.weight",)  # T5 shares the table of its first block
_FIRST_BLOCK_DIFFERS = frozenset({"modernbert", "modernbert-decoder"})  # no norm before the first attention
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_FEWEST_TENSORS = 3  # tensors that a block has at least


@dataclass(frozen=True)
class Expectation:
    """What was expected and is not there, or is there and was not expected.

    Attributes:
        findings: ``missing-tensors``, ``unexpected-tensors``, ``size-mismatch`` and ``stale-shard``.
        missing_matrices: Number of weight matrices that are missing.
    """

    findings: tuple[Finding, ...]
    missing_matrices: int


def is_known_buffer(tensor: Tensor) -> bool:
    """Whether a tensor is a table that frameworks store beside the weights: rotary angles, masks, positions."""
    return bool(_BUFFER.search(tensor.name)) or is_buffer(tensor)


def expectation(network: Network) -> Expectation:
    """Hold the names and shapes of a network against what its configuration and its blocks imply.

    Examples:
        >>> import numpy as np, strati
        >>> names = ("attn.q_proj", "attn.k_proj", "mlp.fc1")
        >>> tensors = {f"h.{b}.{n}.weight": np.eye(2) for b in range(4) for n in names}
        >>> del tensors["h.2.attn.k_proj.weight"]
        >>> [(finding.layer, finding.code) for finding in expectation(strati.open(tensors)).findings]
        [('h.2.attn.k_proj.weight', 'missing-tensors')]
    """
    notes = _Notes()
    for flag in network.contents.warnings:
        if flag.code == "stale-shard":
            notes.findings.append(Finding(None, "stale-shard", flag.text))
        elif flag.code == "unlisted-tensors":
            notes.findings.append(Finding(None, "unexpected-tensors", flag.text))
    if not is_adapter(network) and not _SHARD.fullmatch(network.path.name):
        shapes: dict[str, Shape | None] = {skipped.name: None for skipped in network.contents.unread}
        shapes |= {t.name: t.shape for t in network.tensors if not is_known_buffer(t)}
        shapes = {
            name.replace(".base_layer.", "."): shape for name, shape in shapes.items()
        }  # PEFT's wrapper
        config = network.config or {}
        containers = _containers(shapes, config)
        for container in containers:
            container.compare(notes, config)
        _of_family(shapes, containers, config, notes)
    _total_size(network, notes)
    return Expectation(tuple(dict.fromkeys(notes.findings)), len(notes.matrices))


@dataclass
class _Notes:
    findings: list[Finding] = field(default_factory=list)
    names: set[tuple[str, str]] = field(default_factory=set)
    matrices: set[str] = field(default_factory=set)

    def add(self, name: str, code: str, text: str) -> None:
        if (name, code) not in self.names:
            self.names.add((name, code))
            self.findings.append(Finding(name, code, text))

    def missing(self, name: str, shape: Shape | None, text: str) -> None:
        if shape is not None and len(shape) > 1:
            self.matrices.add(name)
        self.add(name, "missing-tensors", text)


@dataclass
class _Container:
    """Numbered modules behind one prefix: ``model.layers.`` with the tensors of each block."""

    prefix: str
    blocks: dict[int, dict[str, Shape | None]]
    count: int | None = None  # blocks that the configuration says there are
    shapes: dict[str, Shape | None] = field(default_factory=dict)  # of a block's tensors, in most blocks

    def compare(self, notes: _Notes, config: Mapping[str, Any]) -> None:
        self._missing_blocks(notes)
        many = len(self.blocks)
        if many < 2 or (many == 2 and self.count is None):
            return
        holders = {
            name: [b for b, block_shapes in self.blocks.items() if name in block_shapes]
            for name in self.shapes
        }
        common = {name for name, numbers in holders.items() if len(numbers) >= max(many - 1, 1)}
        if many == 2:
            common = {name for name in common if not name.endswith(_ONLY_IN_ONE_BLOCK)}
        for number, block_shapes in self.blocks.items():
            extra = {name.split(".")[0] for name in block_shapes if name not in common}
            absent = sorted(common - set(block_shapes))
            first_differs = number == min(self.blocks) and config.get("model_type") in _FIRST_BLOCK_DIFFERS
            for name in absent if not first_differs else []:
                child = name.split(".")[0]
                replaced = extra and not any(other.split(".")[0] == child for other in block_shapes)
                if child not in extra and not replaced:
                    text = f"is in {len(holders[name])} other block{'s' if many > 2 else ''}, but not in block {number}"
                    notes.missing(f"{self.prefix}{number}.{name}", self.shapes[name], text)
            if many >= 3:
                self._shapes(notes, number, block_shapes)
        if many >= 4:
            inner = sorted(self.blocks)[1:-1]
            for name, numbers in holders.items():
                if len(numbers) == 1 and numbers[0] in inner:
                    text = f"only block {numbers[0]} of {many} has it"
                    notes.add(f"{self.prefix}{numbers[0]}.{name}", "unexpected-tensors", text)

    def _missing_blocks(self, notes: _Notes) -> None:
        start = min(self.blocks)
        start = start if self.count is None and start <= 1 else 0
        stop = self.count if self.count is not None else max(self.blocks) + 1
        if self.count is None and len(self.blocks) < 3:
            return
        for number in sorted(set(range(start, stop)) - set(self.blocks)):
            why = (
                f"config.json says {self.count} blocks"
                if self.count is not None
                else "its neighbours are there"
            )
            text = f"block {number} is missing with {len(self.shapes)} tensors; {why}"
            notes.missing(f"{self.prefix}{number}", None, text)
            notes.matrices |= {
                f"{self.prefix}{number}.{name}"
                for name, shape in self.shapes.items()
                if shape and len(shape) > 1
            }
        for number in sorted(set(self.blocks) - set(range(stop))):
            text = f"config.json says {self.count} blocks, this is block {number}"
            notes.add(f"{self.prefix}{number}", "unexpected-tensors", text)

    def _shapes(self, notes: _Notes, number: int, block_shapes: Mapping[str, Shape | None]) -> None:
        for name, shape in block_shapes.items():
            usual = self.shapes.get(name)
            if number == min(self.blocks) and len(usual or ()) > 2:
                continue  # the first block of a convolutional stage takes the channels of the stage before it
            if shape is not None and usual is not None and shape != usual:
                text = f"has the shape {_text(shape)}, in the other blocks {_text(usual)}"
                notes.add(f"{self.prefix}{number}.{name}", "size-mismatch", text)

    def uniform(self) -> bool:
        """Whether the blocks are built alike, but for at most one tensor; sets the usual shapes."""
        counted: dict[str, Counter[Shape | None]] = {}
        for block_shapes in self.blocks.values():
            for name, shape in block_shapes.items():
                counted.setdefault(name, Counter())[shape] += 1
        self.shapes = {name: shapes.most_common(1)[0][0] for name, shapes in counted.items()}
        unlike = sum(sum(shapes.values()) - max(shapes.values()) for shapes in counted.values())
        usual = sum(len(self.blocks) == 1 or 2 * sum(s.values()) > len(self.blocks) for s in counted.values())
        return unlike <= 1 and usual >= _FEWEST_TENSORS


def _containers(shapes: Mapping[str, Shape | None], config: Mapping[str, Any]) -> list[_Container]:
    """The outermost containers of blocks that are built alike, and experts and the like inside them."""
    groups: dict[str, dict[int, dict[str, Shape | None]]] = {}
    for name, shape in shapes.items():
        for match in _NUMBER.finditer(name):
            block_shapes = groups.setdefault(name[: match.start()], {}).setdefault(int(match[1]), {})
            block_shapes[name[match.end() :]] = shape
    containers = [_Container(prefix, blocks) for prefix, blocks in groups.items()]
    containers = [container for container in containers if container.uniform()]
    outermost = [c for c in containers if not _NUMBER.search(c.prefix)]
    for container in outermost:
        container.count = _count(config, container.prefix, alone=len(outermost) == 1)
    return containers


def _count(config: Mapping[str, Any], prefix: str, *, alone: bool) -> int | None:
    """The number of blocks that the configuration gives a container; ``None`` where it does not say."""
    if "num_hidden_groups" in config:  # ALBERT stores one block for all
        return None
    keys: tuple[str, ...] = _COUNTS
    nested = [key for key in ("vision_config", "text_config") if isinstance(config.get(key), Mapping)]
    if config.get("is_encoder_decoder") is True:
        side = "decoder" if "decoder" in prefix else "encoder" if "encoder" in prefix else None
        if side is None:
            return None
        extra = ("num_decoder_layers",) if side == "decoder" else ()
        keys = (f"{side}_layers", *extra, "num_layers")
    elif nested:
        part = "vision_config" if re.search("vis", prefix) else "text_config"
        config = config[part] if part in nested else {}
    elif not alone:
        return None
    count = next((config[key] for key in keys if type(config.get(key)) is int), None)
    if count is None:
        count = next(
            (n for key, n in config.items() if key.endswith(".block_count") and type(n) is int), None
        )
    extra_blocks = config.get("num_nextn_predict_layers", 0)
    if count is None or not 0 < count < 10_000 or extra_blocks:
        return None
    return count


def _of_family(
    shapes: Mapping[str, Shape | None],
    containers: list[_Container],
    config: Mapping[str, Any],
    notes: _Notes,
) -> None:
    """Hold a network against the tensors that its ``model_type`` and sizes imply."""
    family = _FAMILIES.get(str(config.get("model_type")))
    outer = [c for c in containers if not _NUMBER.search(c.prefix)]
    if family is None or len(outer) != 1:
        return
    try:
        in_blocks, outside = family(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # the configuration leaves a size out
        return
    prefix = outer[0].prefix
    for number in outer[0].blocks:
        for name, shape in in_blocks.items():
            _hold(shapes, f"{prefix}{number}.{name}", shape, notes)
    stem = prefix.rstrip("./").rpartition(".")[0]
    stem = stem.removesuffix("encoder").rstrip(".")  # BERT's embeddings stand beside its encoder
    for name, shape in outside.items():
        home = stem.removesuffix("model").rstrip(".") if name.startswith("lm_head") else stem
        full = f"{home}.{name}".lstrip(".")
        _hold(shapes, full, shape, notes, rows_may_exceed=True)


def _hold(
    shapes: Mapping[str, Shape | None],
    name: str,
    shape: Shape,
    notes: _Notes,
    *,
    rows_may_exceed: bool = False,
) -> None:
    if name not in shapes:
        notes.missing(name, shape, f"config.json implies it, with the shape {_text(shape)}")
        return
    stored = shapes[name]
    padded = rows_may_exceed and stored is not None and len(stored) == len(shape) == 2
    if stored is None or stored == shape or (padded and stored[0] > shape[0] and stored[1:] == shape[1:]):
        return
    notes.add(name, "size-mismatch", f"has the shape {_text(stored)}, config.json implies {_text(shape)}")


_Shapes = tuple[dict[str, Shape], dict[str, Shape]]


def _weights_and_biases(linear: Mapping[str, Shape], *, outputs: int) -> dict[str, Shape]:
    """Linear layers, each with a bias of as many entries as it has outputs, which are on this axis."""
    shapes = {f"{name}.weight": shape for name, shape in linear.items()}
    return shapes | {f"{name}.bias": (shape[outputs],) for name, shape in linear.items()}


def _llama(config: Mapping[str, Any]) -> _Shapes:
    width, inner, heads = (
        int(config[key]) for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    size = int(config.get("head_dim") or width // heads)
    queries, keys = heads * size, int(config.get("num_key_value_heads") or heads) * size
    rows = {
        "self_attn.q": queries,
        "self_attn.k": keys,
        "self_attn.v": keys,
        "mlp.gate": inner,
        "mlp.up": inner,
    }
    in_blocks: dict[str, Shape] = {f"{name}_proj.weight": (count, width) for name, count in rows.items()}
    in_blocks |= {"self_attn.o_proj.weight": (width, queries), "mlp.down_proj.weight": (width, inner)}
    in_blocks |= {f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    table = (int(config["vocab_size"]), width)
    outside: dict[str, Shape] = {"embed_tokens.weight": table, "norm.weight": (width,)}
    names = config.get("architectures") or ()
    if config.get("tie_word_embeddings") is False and any("ForCausalLM" in str(name) for name in names):
        outside["lm_head.weight"] = table
    return in_blocks, outside


def _gpt2(config: Mapping[str, Any]) -> _Shapes:
    width = int(config["n_embd"])
    inner = int(config.get("n_inner") or 4 * width)
    linear = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    linear |= {"mlp.c_fc": (width, inner), "mlp.c_proj": (inner, width)}
    in_blocks = _weights_and_biases(linear, outputs=1)
    in_blocks |= {f"{name}.{part}": (width,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
    outside: dict[str, Shape] = {f"ln_f.{part}": (width,) for part in ("weight", "bias")}
    tables = {"wte.weight": "vocab_size", "wpe.weight": "n_positions"}
    return in_blocks, outside | {name: (int(config[key]), width) for name, key in tables.items()}


def _bert(config: Mapping[str, Any]) -> _Shapes:
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    linear = {f"attention.self.{name}": (width, width) for name in ("query", "key", "value")}
    linear |= {"attention.output.dense": (width, width), "output.dense": (width, inner)}
    linear |= {"intermediate.dense": (inner, width)}
    tables = {"word": "vocab_size", "position": "max_position_embeddings", "token_type": "type_vocab_size"}
    outside: dict[str, Shape] = {
        f"embeddings.{name}_embeddings.weight": (int(config[key]), width) for name, key in tables.items()
    }
    return _weights_and_biases(linear, outputs=0), outside


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], _Shapes]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
    "gpt2": _gpt2,
    "bert": _bert,
}
"""Tensors by ``model_type``: names and shapes in a block, and outside of the blocks."""


def _total_size(network: Network, notes: _Notes) -> None:
    """Hold the bytes of all tensors against ``total_size`` of the index."""
    index = network.path
    if index.is_dir():
        if (index / "model.safetensors").exists():
            return
        index = index / "model.safetensors.index.json"
    if not index.name.endswith(".safetensors.index.json") or not index.is_file():
        return
    total = _stated_total(index)
    if total is None or network.contents.quantisation or network.contents.unread:
        return
    stored = sum(tensor.nbytes for tensor in network.tensors)
    # Converting the dtype often leaves the old number behind, and tied tables were counted twice.
    twice = {t.nbytes for t in network.tensors if len(t.shape) == 2 and not _NUMBER.search(t.name)}
    rescaled = any(stored * a == total * b for a, b in ((1, 1), (1, 2), (2, 1), (1, 4), (4, 1)))
    if not rescaled and abs(total - stored) not in twice:
        text = f"the tensors have {stored:,} bytes, the index says {total:,}"
        notes.findings.append(Finding(None, "size-mismatch", text))


def _stated_total(index: Path) -> int | None:
    metadata = json.loads(index.read_text(encoding="utf-8")).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():  # some writers store 1.6e10
        return int(total)
    return total if type(total) is int else None


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "()"
