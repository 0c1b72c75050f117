"""Which tensors of a checkpoint form one quantised weight together, and the checkpoint with these weights decoded.

The scheme follows from the tensors' names, types and shapes, and from ``quantization_config`` if there is one. If the
two disagree, or the scheme is not known, the tensors are listed as skipped with the scheme's name: a guess would give
numbers without meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.io.checkpoint_file import Quantisation, RawCheckpoint, Skipped, Tensor
from strati.io.layers import auxiliary_reason
from strati.io.quantised import bnb, compressed, gptq_awq, scaled
from strati.io.quantised.codes import Decoded, Packed, SchemeMismatchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOAT8 = frozenset({"fp8", "finegrained-fp8", "fbgemm-fp8", "compressed-tensors", "modelopt"})
DECODED = _FLOAT8 | {"gptq", "awq", "bitsandbytes", "mxfp4"}
"""Values of ``quant_method`` (with hyphens) whose tensors are decoded; others are named and skipped."""

_UNPACKED = frozenset({"float16", "bfloat16", "float32", "float64"})

_METHODS = {
    "fp8": _FLOAT8,
    "int8": frozenset({"compressed-tensors", "modelopt"}),
}
"""Values of ``quant_method`` for weights of a small type with a scale; any other scheme has its own name only."""

_Candidate = tuple[str, str, list[str], Callable[[], Packed]]
"""A weight that may be stored by a scheme: its name, the scheme, the tensors, and a function that describes it."""


def decoded(contents: RawCheckpoint) -> RawCheckpoint:
    """The same checkpoint with each quantised weight as one tensor, decoded when it is read.

    A checkpoint without quantised weights is returned unchanged.
    """
    if contents.config is None and all(tensor.dtype in _UNPACKED for tensor in contents.tensors):
        return contents  # every scheme stores codes in integers or in floats of 8 bits
    search = _Search(contents)
    search.run()
    if not search.packed and not search.skipped:
        return contents
    owner = {member: packed for packed in search.packed for member in packed.members}
    not_decoded = {skipped.name for skipped in search.skipped}
    tensors: dict[str, Tensor] = {}
    skipped = list(contents.unread)
    for tensor in contents.tensors:
        packed = owner.get(tensor.name)
        if packed is None:
            if tensor.name not in not_decoded:
                tensors[tensor.name] = tensor
            continue
        if packed.name not in tensors:
            nbytes = sum(search.tensors[member].nbytes for member in packed.members)
            dtype = _dtype(packed, search.tensors.get(packed.name))
            tensors[packed.name] = Tensor(packed.name, packed.shape, dtype, nbytes, quantised=True)
        if tensor.name != packed.name:
            skipped.append(Skipped(tensor.name, f"part of {packed.name} ({packed.scheme}), decoded there"))
    reader = _Reader(contents, {packed.name: packed for packed in search.packed})
    schemes = {p.name: Quantisation(p.scheme, p.bits, p.group) for p in search.packed}
    hints = {p.name: p.hint for p in search.packed if p.hint is not None}
    return replace(
        contents,
        tensors=tuple(tensors.values()),
        read=reader.read,
        read_part=reader.part,
        rounding=reader.rounding,
        unread=(*skipped, *search.skipped),
        hints={**contents.hints, **hints},
        quantisation={**contents.quantisation, **schemes},
    )


def _dtype(packed: Packed, stored: Tensor | None) -> str:
    if stored is not None and stored.dtype.startswith("float8"):
        return stored.dtype
    return packed.scheme if any(c.isdigit() for c in packed.scheme) else f"{packed.scheme}-{packed.bits}bit"


class _Reader:
    """Reads tensors and decodes the quantised ones; of a stack of experts one at a time."""

    def __init__(self, contents: RawCheckpoint, packed: Mapping[str, Packed]) -> None:
        self._stored = contents
        self._packed = packed
        self._shapes = {tensor.name: tensor.shape for tensor in contents.tensors}

    def read(self, name: str) -> NDArray[Any]:
        packed = self._packed.get(name)
        if packed is None:
            return self._stored.read(name)
        if len(packed.shape) == 2 or not packed.stacked:
            return self._decode(packed, None).values
        parts = [self._decode(packed, index).values for index in range(prod(packed.shape[:-2]))]
        return np.stack(parts).reshape(packed.shape)

    def part(self, name: str, index: int) -> NDArray[Any]:
        packed = self._packed.get(name)
        if packed is None:
            return self._stored.matrix(name, index)
        if packed.stacked:
            return self._decode(packed, index).values
        matrix: NDArray[Any] = self.read(name).reshape(-1, *packed.shape[-2:])[index]
        return matrix

    def rounding(self, name: str, index: int | None) -> NDArray[Any] | None:
        packed = self._packed.get(name)
        if packed is None:
            return self._stored.rounding(name, index) if self._stored.rounding is not None else None
        several = len(packed.shape) > 2
        if packed.stacked or not several:
            part = self._decode(packed, index if several else None)
            return np.broadcast_to(part.variance, part.values.shape)
        variance = np.broadcast_to(self._decode(packed, None).variance, packed.shape)
        return variance if index is None else variance.reshape(-1, *variance.shape[-2:])[index]

    def _decode(self, packed: Packed, index: int | None) -> Decoded:
        lead = packed.shape[:-2]

        def get(name: str) -> NDArray[Any]:
            stored = self._stored.read(name)
            if index is None or self._shapes[name][: len(lead)] != lead:
                return stored
            part: NDArray[Any] = stored.reshape(-1, *stored.shape[len(lead) :])[index]
            return part

        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # damaged scales: the layer is reported as not finite
            return packed.decode(get)


class _Search:
    """Finds the quantised weights of a checkpoint, and the tensors of those that cannot be decoded."""

    def __init__(self, contents: RawCheckpoint) -> None:
        self.tensors = {tensor.name: tensor for tensor in contents.tensors}
        self.packed: list[Packed] = []
        self.skipped: list[Skipped] = []
        self._contents = contents
        self._used: set[str] = set()
        settings = contents.config or {}
        config = settings.get("quantization_config", settings.get("compression_config"))
        self._config: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
        method = self._config.get("quant_method", "")
        self._method = method.lower().replace("_", "-") if isinstance(method, str) else ""
        self._modules: dict[str, dict[str, Tensor]] = {}
        for tensor in contents.tensors:
            prefix, _, word = tensor.name.rpartition(".")
            self._modules.setdefault(prefix, {})[word] = tensor

    def run(self) -> None:
        """Look for every scheme in turn; a tensor belongs to the first that uses it."""
        if self._method and self._method not in DECODED:
            self._skip_unknown_scheme()
            return
        for candidates in (self._bitsandbytes_4bit, self._in_modules, self._mxfp4, self._scaled):
            for name, scheme, members, describe in candidates():
                self._add(name, scheme, members, describe)

    def _add(self, name: str, scheme: str, members: list[str], describe: Callable[[], Packed]) -> None:
        if any(member in self._used for member in members):
            return
        try:
            if self._method and self._method not in _METHODS.get(scheme, frozenset({scheme})):
                raise SchemeMismatchError(
                    f"its tensors are those of {scheme}, its configuration says {self._method}"
                )
            packed = describe()
            if packed.name in self.tensors and packed.name not in packed.members:
                raise SchemeMismatchError("there is another tensor of its name")
        except SchemeMismatchError as problem:
            reason = f"{name}: stored by {scheme}, not decoded: {problem}"
            self.skipped += [Skipped(member, reason) for member in members]
            self._used.update(members)
            return
        self.packed.append(packed)
        self._used.update(packed.members)

    def _bitsandbytes_4bit(self) -> Iterator[_Candidate]:
        for tensor in self._contents.tensors:
            name, state, _ = tensor.name.partition(f".{bnb.STATE}")
            if not state or name not in self.tensors:
                continue
            parts = {"": self.tensors[name], tensor.name[len(name) + 1 :]: tensor}
            companions = {word: f"{name}.{word}" for word in bnb.BESIDE}
            parts |= {word: self.tensors[full] for word, full in companions.items() if full in self.tensors}
            members = [part.name for part in parts.values()]
            yield name, "bitsandbytes", members, partial(bnb.find_4bit, name, parts, self._contents.read)

    def _in_modules(self) -> Iterator[_Candidate]:
        """Schemes that name their tensors by the last word."""
        config, read = self._config, self._contents.read
        for prefix, parts in self._modules.items():
            weight = parts.get("weight")
            dtype = None if weight is None else weight.dtype
            words: tuple[str, ...]
            describe: Callable[[], Packed]
            if gptq_awq.is_packed(parts):
                find = gptq_awq.awq if gptq_awq.is_awq(parts) else gptq_awq.gptq
                scheme, words = find.__name__, gptq_awq.WORDS
                describe = partial(find, prefix, parts, config)
            elif weight is not None and "SCB" in parts and dtype == "int8":
                scheme, words = "bitsandbytes", ("weight", "SCB", "weight_format")
                layout = parts.get("weight_format")
                describe = partial(bnb.find_8bit, weight.name, weight, parts["SCB"], layout, read)
            elif "weight_packed" in parts and len(parts["weight_packed"].shape) >= 2:
                scheme, words = "compressed-tensors", compressed.WORDS
                describe = partial(compressed.find, prefix, parts, config, read)
            elif {"compressed", "bitmask"} <= parts.keys():
                scheme, words = "compressed-tensors", compressed.SPARSE
                describe = compressed.refuse_sparse
            elif dtype == "uint8" and {"weight_scale", "weight_scale_2"} <= parts.keys():
                scheme, words = "modelopt", compressed.MODELOPT
                describe = partial(compressed.small_floats, prefix, parts, compressed.MODELOPT, {4})
            else:
                continue
            yield f"{prefix}.weight", scheme, [parts[w].name for w in words if w in parts], describe

    def _mxfp4(self) -> Iterator[_Candidate]:
        for tensor in self._contents.tensors:
            name = tensor.name.removesuffix("_blocks")
            scales = self.tensors.get(f"{name}_scales")
            if name != tensor.name and scales is not None and tensor.dtype == "uint8":
                describe = partial(compressed.mxfp4_blocks, name, tensor, scales)
                yield name, "mxfp4", [tensor.name, scales.name], describe

    def _scaled(self) -> Iterator[_Candidate]:
        for tensor in self._contents.tensors:
            if tensor.name in self._contents.quantisation:
                continue  # decoded already, with the configuration of its own part of a pipeline
            float8 = tensor.dtype.startswith("float8_") and tensor.dtype != "float8_e8m0fnu"
            if (
                len(tensor.shape) < 2
                or not (float8 or tensor.dtype == "int8")
                or auxiliary_reason(tensor.name)
            ):
                continue
            names = (tensor.name + suffix for suffix in scaled.SCALES)
            scale = next((self.tensors[name] for name in names if name in self.tensors), None)
            if scale is None and not float8:
                continue
            zero = self.tensors.get(f"{tensor.name}_zero_point")
            members = [part.name for part in (tensor, scale, zero) if part is not None]
            scheme = "fp8" if float8 else "int8"
            describe = partial(scaled.find, tensor, scale, zero, self._method or scheme, self._config)
            yield tensor.name, scheme, members, describe

    def _skip_unknown_scheme(self) -> None:
        """Skip the tensors of modules that hold codes of a scheme that is not decoded."""
        reason = f"quantised by {self._config['quant_method']}, a scheme that is not decoded"
        for parts in self._modules.values():
            codes = any(not tensor.floating and tensor.size > 1 for tensor in parts.values())
            scales = any(
                auxiliary_reason(word) is not None for word in parts if not word.endswith(("bias", "biases"))
            )
            if codes or scales:
                self.skipped += [Skipped(t.name, reason) for word, t in parts.items() if word != "bias"]
