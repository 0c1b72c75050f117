"""Damage put into real networks and whether ``check`` finds it, and sound networks that must raise no alarm.

    python tools/fault_table.py            # both tables of docs/check.md
    python tools/fault_table.py NAME...    # of some networks only

Every fault is put into the first, a middle and the last tensor that it fits. A cell is the number of times that the
expected code names this tensor, of the number of places. Networks come from the zoo; those that are not there are left
out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import strati
from strati import embedded
from strati.core.errors import StratiError
from strati.io.checkpoint_file import Tensor
from strati.io.network import Network
from strati_reproductions.zoo.fetch import path as zoo_path

Array = NDArray[Any]
_NORM = re.compile(r"norm|(?:^|[._])ln", re.IGNORECASE)
NETWORKS = ("minilm", "minilm-tuned", "stories15m", "whisper", "mobilenetv2", "efficientnet", "cifar-cnn")
NETWORKS += ("mnist-cnn", "textgenrnn", "silero", "spliceai")
LARGE = ("smollm2",)


def opened(name: str) -> Network:
    """A network of the zoo; of several files the first."""
    place = zoo_path(name)
    files = (
        sorted(p for p in place.iterdir() if p.suffix in (".safetensors", ".h5")) if place.is_dir() else []
    )
    single = files and not (place / "config.json").exists()
    return strati.open(files[0] if single else place)


def changed(network: Network, arrays: Mapping[str, Array | None]) -> Network:
    """The network with some tensors replaced, added, or (``None``) left out."""
    names = {tensor.name for tensor in network.tensors}
    tensors = [t for t in network.tensors if arrays.get(t.name, 0) is not None]
    tensors += [
        Tensor(n, a.shape, str(a.dtype), a.nbytes)
        for n, a in arrays.items()
        if a is not None and n not in names
    ]
    sized = tuple(
        t
        if arrays.get(t.name) is None
        else replace(t, shape=arrays[t.name].shape, dtype=str(arrays[t.name].dtype))  # type: ignore[union-attr]
        for t in tensors
    )

    def read(name: str) -> Array:
        array = arrays.get(name)
        return network.read(name) if array is None else array

    return Network(network.path, replace(network.contents, tensors=sized, read=read))


def _filled(start: int, count: int, entry: float) -> Callable[[Array], Array]:
    def fill(array: Array) -> Array:
        array.reshape(-1)[start : start + count] = entry
        return array

    return fill


def _hole(start: int, size: int, entry: float) -> Callable[[Array], Array]:
    """Some bytes of one value, from an offset in bytes."""
    return lambda array: _filled(start // array.itemsize, size // array.itemsize, entry)(array)


def _flipped(array: Array) -> Array:
    flat = array.astype(np.float32).reshape(-1)
    flat.view(np.uint32)[flat.size // 2] ^= np.uint32(1 << 30)
    return flat.reshape(array.shape)


Fault = tuple[str, str, Callable[[Array], Array]]
FAULTS: dict[str, Fault] = {
    "one NaN in a matrix": ("matrix", "not-finite", _filled(7, 1, np.nan)),
    "one infinity in a matrix": ("matrix", "not-finite", _filled(7, 1, np.inf)),
    "a vector of NaN": ("vector", "not-finite", lambda a: np.full_like(a, np.nan)),
    "a matrix of zeros": ("matrix", "constant", np.zeros_like),
    "a matrix of one value": ("matrix", "constant", lambda a: np.full_like(a, 0.02)),
    "a norm of zeros": ("norm", "constant", np.zeros_like),
    "a norm of an inner block times 3": ("inner norm", "odd-one-out", lambda a: a * np.asarray(3, a.dtype)),
    "a matrix times 10": ("in blocks", "odd-one-out", lambda a: a * np.asarray(10, a.dtype)),
    "4 kB of zeros": ("large", "hole", _hole(4096, 4096, 0.0)),
    "8 kB of one value, not aligned": ("large", "hole", _hole(3108, 8192, 0.0123)),
    "an exponent bit flipped": ("matrix", "wild-entry", _flipped),
    "a row cut off": ("in blocks", "size-mismatch", lambda a: a[:-1].copy()),
}
"""Where a fault fits, the code that should name it, and the change."""
NAMES_ONLY = ("a matrix missing", "a block missing", "a matrix copied over another", "a tensor too many")


def _in_blocks(network: Network) -> list[str]:
    """Matrices that at least three blocks of a transformer have alike."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for layer in network.layers():
        if layer.block is not None and layer.role.startswith(("attention", "mlp")):
            head, _, tail = layer.tensor.partition(f".{layer.block}.")
            groups.setdefault((f"{head}|{tail}", network[layer.tensor].shape), []).append(layer.tensor)
    return [name for names in groups.values() if len(names) > 3 for name in names]


def places(network: Network, where: str) -> list[str]:
    """First, middle and last tensor that a fault fits."""
    matrices = [layer.tensor for layer in network.layers() if layer.count == 1]
    plain = {t.name: t for t in network.tensors if t.floating and not t.quantised}
    vectors = {n for n, t in plain.items() if len(t.shape) == 1 and t.size > 1 and "running" not in n}
    norms = [n for n in plain if n in vectors and n.endswith("weight") and _NORM.search(n)]
    numbers = [b for b in (network.names.blocks[n] for n in norms) if b is not None]
    fitting: dict[str, list[str]] = {
        "matrix": [name for name in matrices if name in plain and plain[name].size >= 64],
        "large": [name for name in matrices if name in plain and plain[name].size >= 8192],
        "in blocks": [name for name in _in_blocks(network) if name in plain],
        "vector": [name for name in plain if name in vectors],
        "norm": norms if numbers else [],
        "inner norm": []
        if not numbers
        else [n for n in norms if network.names.blocks[n] in set(numbers) - {0, max(numbers)}],
    }
    names = list(dict.fromkeys(fitting[where]))
    return [names[i] for i in sorted({0, len(names) // 2, len(names) - 1})] if names else []


def cases(network: Network, fault: str) -> Iterator[tuple[str | None, str, Network]]:
    """Damaged copies of a network: the tensor, the code that should name it, and the copy."""
    if fault in FAULTS:
        where, code, change = FAULTS[fault]
        for name in places(network, where):
            yield name, code, changed(network, {name: change(np.array(network.read(name), order="C"))})
        return
    alike = _in_blocks(network)
    picked = places(network, "in blocks")
    last = max((network.names.blocks[name] or 0 for name in alike), default=0)
    for name in picked:
        block = network.names.blocks[name]
        if fault == "a matrix missing":
            yield name, "missing-tensors", changed(network, {name: None})
        elif fault == "a block missing":
            prefix = name.partition(f".{block}.")[0] + f".{block}"
            inside = {t.name: None for t in network.tensors if t.name.startswith(f"{prefix}.")}
            yield prefix, "missing-tensors", changed(network, inside)
        elif fault == "a matrix copied over another":
            twin = next(n for n in alike if n != name and network[n].shape == network[name].shape)
            yield name, "duplicate-tensors", changed(network, {name: np.array(network.read(twin))})
        elif fault == "a tensor too many":
            inner = [n for n in alike if 0 < (network.names.blocks[n] or 0) < last]
            head, number = inner[picked.index(name)].partition(f".{network.names.blocks[inner[0]]}.")[:2]
            stray = f"{head}{number}stray{picked.index(name)}.weight"
            added = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
            yield stray, "unexpected-tensors", changed(network, {stray: added})


def found(name: str | None, code: str, network: Network) -> bool:
    """Whether a check names the tensor (or, of a copy, either of the two) with the code."""
    findings = strati.check(network, workers=1).found
    if code == "duplicate-tensors":
        return any(finding.code == code for finding in findings)
    return any(finding.code == code and finding.layer == name for finding in findings)


def sound(network: Network) -> Iterator[tuple[str, Network]]:
    """Copies of a network that are not damaged."""
    arrays = {t.name: np.array(network.read(t.name)) for t in network.tensors if t.floating}
    matrices = {layer.tensor for layer in network.layers()} & set(arrays)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        with np.errstate(over="ignore"):
            copies = {name: np.clip(a, -6e4, 6e4).astype(dtype) for name, a in arrays.items()}
        yield np.dtype(dtype).name, changed(network, copies)
    yield (
        "pruned",
        changed(
            network,
            {n: np.where(np.abs(arrays[n]) < np.median(np.abs(arrays[n])), 0, arrays[n]) for n in matrices},
        ),
    )
    rounded = {}
    for name in matrices:
        step = np.abs(arrays[name]).max(initial=0) / 127 or 1.0
        rounded[name] = (np.rint(arrays[name] / step) * step).astype(np.float32)
    yield "int8", changed(network, rounded)


def main() -> None:
    """Print both tables."""
    names = sys.argv[1:] or [*NETWORKS, *LARGE]
    networks = {}
    for name in names:
        try:
            networks[name] = opened(name)
        except StratiError as error:
            print(f"{name}: {error}", file=sys.stderr)
    small = {name: network for name, network in networks.items() if name not in LARGE}
    columns = {name: [network] for name, network in small.items() if _in_blocks(network)}
    columns["others"] = [network for name, network in small.items() if name not in columns]
    print(f"| fault | code | {' | '.join(columns)} |")
    print("| --- " * (len(columns) + 2) + "|")
    for fault in (*FAULTS, *NAMES_ONLY):
        cells, code = [], ""
        for group in columns.values():
            hits = [(code := case[1], found(*case))[1] for network in group for case in cases(network, fault)]
            cells.append(f"{sum(hits)}/{len(hits)}" if hits else "")
        print(f"| {fault} | `{code}` | {' | '.join(cells)} |", flush=True)
    print(f"\nOthers: {', '.join(name for name in small if name not in columns)}.")
    alarms, count = [], 0
    extra = {
        p.name: strati.open(p)
        for p in (embedded.path("shakespeare"), embedded.path("digits-mlp.safetensors"))
    }
    for name, network in (networks | extra).items():
        copies = [("as it is", network), *(sound(network) if name not in LARGE else ())]
        for kind, copy in copies:
            count += 1
            alarms += [f"{name}, {kind}: {f.code} {f.layer}" for f in strati.check(copy, workers=1).found]
    print(f"\n{count} sound networks, {len(alarms)} alarms", *alarms, sep="\n")


if __name__ == "__main__":
    main()
