"""Which tensors of a checkpoint are one quantised weight together, and the checkpoint with them decoded.

The scheme is told by the tensors' names, types and shapes, and by ``quantization_config`` where there is one. Where the
two disagree, or the scheme is not known, the tensors are listed as skipped with its name: a guess would be a number
about nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.io.checkpoint_file import Quantisation, RawCheckpoint, Skipped, Tensor
from strati.io.layers import auxiliary_reason
from strati.io.quantised import bnb as bitsandbytes
from strati.io.quantised import compressed, gptq_awq, scaled
from strati.io.quantised.codes import Decoded, Packed, SchemeMismatchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

DECODED = frozenset(
    {
        "gptq",
        "awq",
        "bitsandbytes",
        "fp8",
        "finegrained_fp8",
        "fbgemm_fp8",
        "compressed-tensors",
        "mxfp4",
        "modelopt",
    }
)
"""Values of ``quant_method`` whose tensors are decoded; others are named and skipped."""

_TOLD = {
    "fp8": frozenset({"fp8", "finegrained-fp8", "fbgemm-fp8", "compressed-tensors", "modelopt"}),
    "int8": frozenset({"compressed-tensors", "modelopt"}),
}
"""Configurations under which weights of a small type with a scale are found; other schemes have their own."""

_STEP = f".{bitsandbytes.STATE}"


def decoded(contents: RawCheckpoint) -> RawCheckpoint:
    """The same checkpoint with its quantised weights as tensors of their own, read when asked for.

    A checkpoint without any comes back as it is.
    """
    found = _Found(contents)
    found.search()
    if not found.packed and not found.skipped:
        return contents
    owner = {member: packed for packed in found.packed for member in packed.members}
    gone = {skipped.name for skipped in found.skipped}
    tensors: list[Tensor] = []
    placed: set[str] = set()
    skipped = list(contents.unread)
    for tensor in contents.tensors:
        packed = owner.get(tensor.name)
        if packed is None:
            if tensor.name not in gone:
                tensors.append(tensor)
            continue
        if packed.name not in placed:
            placed.add(packed.name)
            nbytes = sum(found.tensors[member].nbytes for member in packed.members)
            dtype = _dtype(packed, found.tensors.get(packed.name))
            tensors.append(Tensor(packed.name, packed.shape, dtype, nbytes, quantised=True))
        if tensor.name != packed.name:
            skipped.append(Skipped(tensor.name, f"part of {packed.name} ({packed.scheme}), decoded there"))
    reader = _Reader(contents, {packed.name: packed for packed in found.packed})
    kinds = {p.name: Quantisation(p.scheme, p.bits, p.group) for p in found.packed}
    hints = {p.name: p.hint for p in found.packed if p.hint is not None}
    return replace(
        contents,
        tensors=tuple(tensors),
        read=reader.read,
        read_part=reader.part,
        rounding=reader.rounding,
        unread=(*skipped, *found.skipped),
        hints={**contents.hints, **hints},
        quantisation={**contents.quantisation, **kinds},
    )


def _dtype(packed: Packed, stored: Tensor | None) -> str:
    if stored is not None and stored.dtype.startswith("float8"):
        return stored.dtype
    return packed.scheme if any(c.isdigit() for c in packed.scheme) else f"{packed.scheme}-{packed.bits}bit"


class _Reader:
    """Reads tensors, decoding the quantised ones; of a stack of experts one at a time."""

    def __init__(self, contents: RawCheckpoint, packed: Mapping[str, Packed]) -> None:
        self._plain = contents
        self._packed = packed
        self._shapes = {tensor.name: tensor.shape for tensor in contents.tensors}

    def read(self, name: str) -> NDArray[Any]:
        packed = self._packed.get(name)
        if packed is None:
            return self._plain.read(name)
        if len(packed.shape) == 2 or not packed.stacked:
            return self._decode(packed, None).values
        parts = [self._decode(packed, index).values for index in range(prod(packed.shape[:-2]))]
        return np.stack(parts).reshape(packed.shape)

    def part(self, name: str, index: int) -> NDArray[Any]:
        packed = self._packed.get(name)
        if packed is not None and packed.stacked:
            return self._decode(packed, index).values
        whole = self.read(name)
        chosen: NDArray[Any] = whole.reshape(-1, *whole.shape[-2:])[index]
        return chosen

    def rounding(self, name: str, index: int | None) -> NDArray[Any] | None:
        packed = self._packed.get(name)
        if packed is None:
            return self._plain.rounding(name, index) if self._plain.rounding is not None else None
        several = len(packed.shape) > 2
        if packed.stacked or not several:
            part = self._decode(packed, index if several else None)
            return np.broadcast_to(part.variance, part.values.shape)
        whole = np.broadcast_to(self._decode(packed, None).variance, packed.shape)
        return whole if index is None else whole.reshape(-1, *whole.shape[-2:])[index]

    def _decode(self, packed: Packed, index: int | None) -> Decoded:
        lead = packed.shape[:-2]

        def get(name: str) -> NDArray[Any]:
            whole = self._plain.read(name)
            if index is None or self._shapes[name][: len(lead)] != lead:
                return whole
            taken: NDArray[Any] = whole.reshape(-1, *whole.shape[len(lead) :])[index]
            return taken

        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # damaged scales: the layer is reported as not finite
            return packed.decode(get)


class _Found:
    """The quantised weights of a checkpoint, and the tensors of those that cannot be decoded."""

    def __init__(self, contents: RawCheckpoint) -> None:
        self.contents = contents
        self.tensors = {tensor.name: tensor for tensor in contents.tensors}
        self.packed: list[Packed] = []
        self.skipped: list[Skipped] = []
        self._taken: set[str] = set()
        config = contents.config or {}
        told = config.get("quantization_config", config.get("compression_config"))
        self.config: Mapping[str, Any] = told if isinstance(told, Mapping) else {}
        method = self.config.get("quant_method", "")
        self.method = method.lower().replace("_", "-") if isinstance(method, str) else ""
        self._modules: dict[str, dict[str, Tensor]] = {}
        for tensor in contents.tensors:
            prefix, _, word = tensor.name.rpartition(".")
            self._modules.setdefault(prefix, {})[word] = tensor

    def search(self) -> None:
        """Look for every scheme in turn; what one has taken the next does not see."""
        known = {name.replace("_", "-") for name in DECODED}
        if self.method and self.method not in known:
            self._unknown()
            return
        for make in (
            self._words,
            self._bitsandbytes,
            self._compressed,
            self._sparse,
            self._nvfp4,
            self._microscaling,
            self._scaled,
        ):
            for name, scheme, members, build in make():
                self._try(name, scheme, members, build)

    def _try(self, name: str, scheme: str, members: list[str], build: Callable[[], Packed]) -> None:
        if any(member in self._taken for member in members):
            return
        try:
            self._agree(scheme)
            packed = build()
            if packed.name in self.tensors and packed.name not in packed.members:
                raise SchemeMismatchError("there is another tensor of its name")
        except SchemeMismatchError as problem:
            for member in members:
                self.skipped.append(Skipped(member, f"{name}: stored by {scheme}, not decoded: {problem}"))
            self._taken.update(members)
            return
        self.packed.append(packed)
        self._taken.update(packed.members)

    def _agree(self, scheme: str) -> None:
        """Refuse tensors of one scheme under the configuration of another."""
        told = _TOLD.get(scheme, frozenset({scheme}))
        if self.method and self.method not in told:
            raise SchemeMismatchError(
                f"its tensors are those of {scheme}, its configuration says {self.method}"
            )

    def _words(self) -> Iterator[_Candidate]:
        for prefix, parts in self._modules.items():
            if "qweight" not in parts or "scales" not in parts or len(parts["qweight"].shape) < 2:
                continue
            if len(parts["scales"].shape) != len(parts["qweight"].shape) or parts["qweight"].dtype != "int32":
                continue
            name = f"{prefix}.weight"
            describe = gptq_awq.awq if gptq_awq.is_awq(parts) else gptq_awq.gptq
            members = [parts[w].name for w in ("qweight", "qzeros", "scales", "g_idx") if w in parts]

            def build(prefix: str = prefix, parts: Any = parts, describe: Any = describe) -> Packed:
                packed: Packed = describe(prefix, parts, self.config)
                return packed

            yield name, describe.__name__, members, build

    def _bitsandbytes(self) -> Iterator[_Candidate]:
        for tensor in self.contents.tensors:
            name, step, _ = tensor.name.partition(_STEP)
            if not step or name not in self.tensors:
                continue
            parts = {"": self.tensors[name], tensor.name[len(name) + 1 :]: tensor}
            beside = {word: f"{name}.{word}" for word in bitsandbytes.BESIDE}
            parts |= {word: self.tensors[full] for word, full in beside.items() if full in self.tensors}
            members = [part.name for part in parts.values()]

            def build(name: str = name, parts: Any = parts) -> Packed:
                return bitsandbytes.find_4bit(name, parts, self.contents.read)

            yield name, "bitsandbytes", members, build
        for prefix, words in self._modules.items():
            if "SCB" in words and "weight" in words and words["weight"].dtype == "int8":
                weight, scale = words["weight"], words["SCB"]
                layout = words.get("weight_format")

                def build8(
                    weight: Tensor = weight, scale: Tensor = scale, layout: Tensor | None = layout
                ) -> Packed:
                    return bitsandbytes.find_8bit(weight.name, weight, scale, layout, self.contents.read)

                members = [part.name for part in (weight, scale, layout) if part is not None]
                yield f"{prefix}.weight", "bitsandbytes", members, build8

    def _compressed(self) -> Iterator[_Candidate]:
        for prefix, parts in self._modules.items():
            if "weight_packed" in parts and len(parts["weight_packed"].shape) >= 2:
                members = [parts[word].name for word in compressed.WORDS if word in parts]

                def build(prefix: str = prefix, parts: Any = parts) -> Packed:
                    return compressed.find(prefix, parts, self.config, self.contents.read)

                yield f"{prefix}.weight", "compressed-tensors", members, build

    def _sparse(self) -> Iterator[_Candidate]:
        """What compressed-tensors keeps of a weight with many zeros; not decoded."""
        for prefix, parts in self._modules.items():
            words = [w for w in ("compressed", "bitmask", "shape", "row_offsets", "meta") if w in parts]
            if {"compressed", "bitmask"} <= set(words):

                def build() -> Packed:
                    raise SchemeMismatchError("it is kept as a mask of bits and what is not zero")

                yield f"{prefix}.weight", "compressed-tensors", [parts[word].name for word in words], build

    def _nvfp4(self) -> Iterator[_Candidate]:
        for prefix, parts in self._modules.items():
            weight = parts.get("weight")
            if (
                weight is not None
                and weight.dtype == "uint8"
                and {"weight_scale", "weight_scale_2"} <= set(parts)
            ):
                members = [parts[word].name for word in compressed.MODELOPT]

                def build(prefix: str = prefix, parts: Any = parts) -> Packed:
                    return compressed.find_modelopt(prefix, parts)

                yield f"{prefix}.weight", "modelopt", members, build

    def _microscaling(self) -> Iterator[_Candidate]:
        for tensor in self.contents.tensors:
            name = tensor.name.removesuffix("_blocks")
            scales = self.tensors.get(f"{name}_scales")
            if name != tensor.name and scales is not None and tensor.dtype == "uint8":

                def build(name: str = name, blocks: Tensor = tensor, scales: Tensor = scales) -> Packed:
                    return compressed.mxfp4_blocks(name, blocks, scales)

                yield name, "mxfp4", [tensor.name, scales.name], build

    def _scaled(self) -> Iterator[_Candidate]:
        for tensor in self.contents.tensors:
            if tensor.name in self.contents.quantisation:
                continue  # decoded already, with the configuration of its own part of a pipeline
            small = tensor.dtype.startswith("float8_") and tensor.dtype != "float8_e8m0fnu"
            if (
                len(tensor.shape) < 2
                or not (small or tensor.dtype == "int8")
                or auxiliary_reason(tensor.name)
            ):
                continue
            scale = next(
                (self.tensors[n] for n in (tensor.name + s for s in scaled.SCALES) if n in self.tensors), None
            )
            if scale is None and not small:
                continue
            zero = self.tensors.get(f"{tensor.name}_zero_point")
            members = [part.name for part in (tensor, scale, zero) if part is not None]
            scheme = "fp8" if small else "int8"

            def build(
                weight: Tensor = tensor,
                scale: Tensor | None = scale,
                zero: Tensor | None = zero,
                scheme: str = scheme,
            ) -> Packed:
                return scaled.find(weight, scale, zero, self.method or scheme, self.config)

            yield tensor.name, scheme, members, build

    def _unknown(self) -> None:
        """Tensors of modules that hold codes of a scheme that is not decoded."""
        method = self.config["quant_method"]
        reason = f"quantised by {method}, a scheme that is not decoded"
        for parts in self._modules.values():
            coded = any(not tensor.floating and tensor.size > 1 for tensor in parts.values())
            named = any(auxiliary_reason(word) not in (None, "a bias") for word in parts)
            if coded or named:
                self.skipped += [Skipped(t.name, reason) for word, t in parts.items() if word != "bias"]


_Candidate = tuple[str, str, list[str], Callable[[], Packed]]
