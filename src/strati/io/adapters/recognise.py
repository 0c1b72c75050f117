r"""The low-rank updates among a checkpoint's tensors, as tensors of their own.

PEFT names them ``X.lora_A.weight`` and ``X.lora_B.weight`` in files, with the adapter's name before ``weight`` in
memory, ``lora_embedding_A`` and ``B`` for embeddings, ``lora_magnitude_vector`` for DoRA. The scale follows from
``adapter_config.json``: ``lora_alpha``, ``alpha_pattern``, ``use_rslora``. Updates of a parameter instead of a module
(``target_parameters``: experts fused in one tensor) are in ``experts.py``, the kohya and LyCORIS formats in
``lycoris.py``. Patterns of ``rank_pattern`` and ``alpha_pattern`` are regular expressions out of an untrusted file:
``regex`` matches them with a limit on the time, and sizes and repetitions are limited before they are compiled,
because ``x{4000000000}`` alone takes gigabytes. AdaLoRA adds a vector: the update is :math:`s\,B\,\mathrm{diag}(E)\,A`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.results import Flag
from strati.io.adapters.experts import parameter_updates
from strati.io.adapters.lora import AdapterUpdate
from strati.io.adapters.lycoris import PART as LYCORIS_PART
from strati.io.adapters.lycoris import dotted, lycoris_update
from strati.io.checkpoint_file import Hint, RawCheckpoint, Skipped, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

ADAPTER_KINDS = ("LORA", "DORA", "ADALORA", "LOHA", "LOKR")
"""Kinds of PEFT adapter that are read."""

_LONGEST = 250  # characters of a pattern, and of a name that is matched
_MOST_REPEATS = 10_000  # product of all numbers in {m,n}
_SECONDS = 0.25
_REPEAT = re.compile(r"\{([0-9]{1,4})(?:,([0-9]{0,4}))?\}")
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_E|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?$"
)
_PREFIX = "base_model.model."
_MARKED = re.compile(r"\.(?:lora|hada|lokr|alpha|dora)")  # faster than the whole pattern
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to initialise an adapter that take the first update out of the base's weights."""


def updates(contents: RawCheckpoint) -> RawCheckpoint:
    """The same checkpoint with every pair of factors as one tensor, their product; others come back as they are."""
    made: dict[str, tuple[AdapterUpdate, tuple[str, ...]]] = {}
    parts = _grouped(contents, _PART)
    several = len({adapter for _, adapter in parts}) > 1
    for (module, adapter), tensors in parts.items():
        short = {word.removeprefix("lora_").removeprefix("embedding_"): t for word, t in tensors.items()}
        for update in _updates(contents, module, adapter, short, AdapterSettings.of(contents, adapter)):
            name = f"{update.name}[{adapter}]" if several else update.name
            name = name if update.expert is None else f"{name}[{update.expert}]"
            made[name] = (update, tuple(t.name for t in tensors.values()))
    for (module, adapter), tensors in _grouped(contents, LYCORIS_PART).items():
        options = AdapterSettings.of(contents, adapter)
        name = dotted(module.removeprefix(_PREFIX))
        scale = partial(options.scale_by_setting, name) if options.options.get("alpha") is not None else None
        lycoris = lycoris_update(contents, name, tensors, scale, adapter)
        if lycoris is not None:
            made[lycoris.name] = (lycoris, tuple(tensor.name for tensor in tensors.values()))
    return _replaced(contents, made) if made else contents


def _grouped(
    contents: RawCheckpoint, pattern: re.Pattern[str]
) -> dict[tuple[str, str | None], dict[str, Tensor]]:
    """The tensors whose names match, by module and adapter, then by the word of their part."""
    parts: dict[tuple[str, str | None], dict[str, Tensor]] = {}
    for tensor in contents.tensors:
        match = pattern.fullmatch(tensor.name) if _MARKED.search(tensor.name) else None
        if match is not None and tensor.floating:
            parts.setdefault((match["module"], match["adapter"]), {})[match["part"]] = tensor
    return parts


def settings(contents: RawCheckpoint, adapter: str | None) -> Mapping[str, Any]:
    """``adapter_config.json``, or what a model in memory knows of one of its adapters."""
    config = contents.config or {}
    configs_by_adapter = config.get("adapter_configs")
    if isinstance(configs_by_adapter, Mapping) and adapter in configs_by_adapter:
        config = {"adapter_config": configs_by_adapter[adapter]}
    adapter_config = config.get("adapter_config")
    return adapter_config if isinstance(adapter_config, Mapping) else {}


class AdapterSettings:
    """``adapter_config.json``, its patterns ready to be matched."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.ranks = PatternTable(options.get("rank_pattern"))
        self._alphas = PatternTable(options.get("alpha_pattern"))

    @classmethod
    def of(cls, contents: RawCheckpoint, adapter: str | None) -> AdapterSettings:
        """The settings of one of a checkpoint's adapters."""
        return cls(settings(contents, adapter))

    def _number(self, table: PatternTable, module: str, setting: str) -> float | None:
        """A number by pattern, or else the setting for all modules; ``None`` where there is none that can be used."""
        by_pattern = table.value(module)
        number = self.options.get(setting) if by_pattern is None else by_pattern
        plain = isinstance(number, int | float) and not isinstance(number, bool)
        return float(number) if table.readable and plain and -1e30 < number < 1e30 else None  # type: ignore[arg-type, operator]

    def scale(self, module: str, rank: int) -> float | None:
        """What an update is multiplied by; ``None`` where the settings do not say."""
        alpha = self._number(self._alphas, module, "lora_alpha")
        if alpha is None:
            return None
        if (
            self.options.get("peft_type") == "ADALORA"
        ):  # scaled by the rank at the start, whatever is left of it
            start = self.options.get("init_r")
            return alpha / (start + 1e-5) if type(start) is int and start > 0 else None
        return alpha / (math.sqrt(rank) if self.options.get("use_rslora") else rank)

    def scale_by_setting(self, module: str) -> float | None:
        """``alpha`` over ``r`` of PEFT's LoHa and LoKr."""
        alpha, rank = self._number(self._alphas, module, "alpha"), self._number(self.ranks, module, "r")
        return alpha / rank if alpha is not None and rank else None


def _updates(
    contents: RawCheckpoint,
    module: str,
    adapter: str | None,
    parts: Mapping[str, Tensor],
    options: AdapterSettings,
) -> Iterator[AdapterUpdate]:
    if not {"A", "B"} <= set(parts):
        return
    a, b = parts["A"], parts["B"]
    name = module.removeprefix(_PREFIX)
    embedding = "lora_embedding_A" in a.name
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[0] != b.shape[1] or 0 in a.shape or 0 in b.shape:
        return
    fused = parameter_updates(contents, name, a, b, options.options, options.ranks)
    if fused is not None:
        for update in fused:
            yield replace(update, scale=options.scale(update.name, update.rank), adapter=adapter)
        return
    rank = a.shape[0]
    gains = parts.get("E")
    if gains is not None and gains.size != rank:
        return
    wide, tall = a.size // rank, b.size // rank
    if any(side != 1 for side in b.shape[2:]):
        return

    def factors() -> tuple[NDArray[Any], NDArray[Any]]:
        right, left = contents.read(a.name).reshape(rank, wide), contents.read(b.name).reshape(tall, rank)
        if gains is not None:
            right = contents.read(gains.name).reshape(rank, 1).astype(np.float32) * right.astype(np.float32)
        return (right.T, left.T) if embedding else (left, right)

    rows, cols = (wide, tall) if embedding else (tall, wide)
    magnitude = parts.get("magnitude_vector")
    yield AdapterUpdate(
        f"{name}.weight",
        rows,
        cols,
        rank,
        options.scale(name, rank),
        factors,
        (b.shape[0], *a.shape[1:]) if len(a.shape) > 2 else None,
        None if magnitude is None else lambda: contents.read(magnitude.name).reshape(-1),
        bool(options.options.get("fan_in_fan_out")) and not embedding,
        adapter,
        embedding,
    )


def _hint(update: AdapterUpdate) -> Hint:
    """An update is outputs first whatever the network's layout; its label is the weight it belongs to."""
    if update.expert is None:
        kernel = update.shape is not None and len(update.shape) > 2
        return Hint(kind="conv" if kernel else "linear", label=update.name)
    module, _, word = update.name.rpartition(".")
    return Hint(kind="linear", label=f"{module}.{update.expert}.{word}")


def _replaced(
    contents: RawCheckpoint, made: Mapping[str, tuple[AdapterUpdate, tuple[str, ...]]]
) -> RawCheckpoint:
    owners: dict[str, list[str]] = {}
    for name, (_, members) in made.items():
        for member in members:
            owners.setdefault(member, []).append(name)
    taken = {tensor.name for tensor in contents.tensors if tensor.name not in owners}
    renamed = {name: name if name not in taken else f"{name}[update]" for name in made}
    tensors: list[Tensor] = []
    skipped = list(contents.unread)
    placed: set[str] = set()
    for tensor in contents.tensors:
        names = owners.get(tensor.name)
        if names is None:
            tensors.append(tensor)
            continue
        for name in names:
            if name not in placed:
                placed.add(name)
                update = made[name][0]
                nbytes = tensor.nbytes // len(names)
                tensors.append(Tensor(renamed[name], (update.rows, update.cols), tensor.dtype, nbytes))
        skipped.append(Skipped(tensor.name, f"a factor of the update of {made[names[0]][0].name}"))
    by_name = {renamed[name]: update for name, (update, _) in made.items()}

    def read(name: str) -> NDArray[Any]:
        update = by_name.get(name)
        return contents.read(name) if update is None else update.product()

    return replace(
        contents,
        tensors=tuple(tensors),
        read=read,
        unread=tuple(skipped),
        adapters=by_name,
        hints={**contents.hints, **{name: _hint(update) for name, update in by_name.items()}},
        warnings=(*contents.warnings, *_warnings(contents, list(by_name.values()))),
    )


def _warnings(contents: RawCheckpoint, adapter_updates: list[AdapterUpdate]) -> Iterator[Flag]:
    if any(update.scale is None for update in adapter_updates):
        text = "no adapter_config.json says how the updates are scaled; they are shown as B A, unscaled"
        yield Flag("adapter-scale-unknown", text)
    if any(update.magnitude is not None for update in adapter_updates):
        text = "DoRA rescales the merged weight, which needs the base: the updates shown are s B A alone"
        yield Flag("dora-without-base", text)
    for adapter in dict.fromkeys(update.adapter for update in adapter_updates):
        start = settings(contents, adapter).get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            text = (
                f"the adapter was initialised by {start}, which changes the base's weights: base + update is not "
                "what the network computes; save it with path_initial_model_for_weight_conversion"
            )
            yield Flag("adapter-changed-base", text)


def matches(pattern: str, name: str) -> bool | None:
    r"""Whether a module's name ends in a match of the pattern, as PEFT asks: ``(.*\.)?(pattern)$``.

    Returns:
        ``None`` where the pattern is too long, takes too long, or is none that PEFT's settings need.

    Examples:
        >>> matches("q_proj", "model.layers.0.q_proj"), matches("proj", "model.layers.0.q_proj")
        (True, False)
        >>> matches(r"layers\.(0|1)\..*_proj", "model.layers.1.self_attn.v_proj")
        True
        >>> matches("x{4000000000}", "x"), matches("(?=x)y", "y")
        (None, None)
    """
    import regex

    repeats = math.prod(max(int(m[1]), int(m[2] or 1), 1) for m in _REPEAT.finditer(pattern))
    plain = _REPEAT.sub("", pattern).replace("(?:", "(").replace(r"\{", "")
    if max(len(pattern), len(name)) > _LONGEST or repeats > _MOST_REPEATS or "(?" in plain or "{" in plain:
        return None
    try:
        return regex.match(rf"(.*\.)?({pattern})$", name, timeout=_SECONDS) is not None
    except (regex.error, TimeoutError):
        return None


class PatternTable:
    """Values by patterns; the first pattern that matches decides.

    Examples:
        >>> table = PatternTable({"k_proj": 2, "q_proj": 7, "(?=x)": 1})
        >>> table.value("layers.0.q_proj"), table.readable, table.value("layers.0.v_proj"), table.readable
        (7, True, None, False)
    """

    def __init__(self, table: object) -> None:
        self._table = table if isinstance(table, Mapping) else {}
        self.readable = True
        """Whether every pattern that was tried could be matched; once one could not, none is tried any more."""

    def value(self, name: str) -> object:
        """What the table gives a module; ``None`` where no pattern matches."""
        for pattern, value in self._table.items() if self.readable else ():
            matched = matches(str(pattern), name)
            if matched is None:
                self.readable = False
                return None
            if matched:
                return value
        return None
