"""Views: which matrices a tensor holds (transposed, sliced, cut into gates, experts or kernel positions).

:func:`views_of` chooses the views of a tensor by its name, its shape and what its format says. A view is a few array
operations and a sentence that names them; it copies only where numpy has to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.io.checkpoint_file import Hint
from strati.io.roles import Role, is_raw, modules

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import Tensor
    from strati.io.roles import Names

Step = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class View:
    """A way to see a tensor as matrices of one shape.

    Attributes:
        text: Says which matrix of the tensor this is.
        rows: Rows of one matrix (outputs, where the tensor maps inputs to outputs).
        cols: Columns of one matrix.
        steps: What is done to the array: ``transpose`` (axes), ``reshape`` (shape), ``take`` (index on the first
            axis), ``rows`` (start, stop), ``every`` (first row, step), ``heads`` (number of heads, parts per head,
            which part).
        count: How many matrices there are.
        index: Which one of a stack of matrices this is; ``None`` where the tensor is no stack.
    """

    text: str
    rows: int
    cols: int
    steps: tuple[Step, ...] = ()
    count: int = 1
    index: int | None = None

    def turned(self) -> View:
        """The same for matrices that are stored inputs first, seen outputs first."""
        text = f"{self.text}, transposed (stored inputs x outputs)".removeprefix("as stored, ")
        return replace(
            self, text=text, rows=self.cols, cols=self.rows, steps=(*self.steps, ("transpose", (1, 0)))
        )

    def matrices(self, array: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """The matrices, one at a time."""
        return _matrices(array, self.steps)

    def of_part(self, matrix: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """The same, of the one matrix of the stack that was read alone: what is done behind taking it."""
        taken = [step for step, _ in self.steps].index("take")
        return _matrices(matrix, self.steps[taken + 1 :])


def _matrices(array: NDArray[Any], steps: tuple[Step, ...]) -> Iterator[NDArray[Any]]:
    for step, numbers in steps:
        array = _apply(array, step, numbers)
    for place in np.ndindex(*array.shape[:-2]):
        yield array[place]


def _apply(array: NDArray[Any], step: str, numbers: tuple[int, ...]) -> NDArray[Any]:
    if step == "transpose":
        return array.transpose(numbers)
    if step == "reshape":
        return array.reshape(numbers)
    if step == "take":
        taken: NDArray[Any] = array[numbers[0]]
        return taken
    if step == "rows":
        return array[numbers[0] : numbers[1]]
    if step == "every":
        return array[numbers[0] :: numbers[1]]
    if step == "heads":
        # Rows ordered head by head, each head holding q, k and v: gathering one of them is a copy.
        heads, parts, which = numbers
        cut = array.reshape(heads, parts, array.shape[0] // (heads * parts), array.shape[1])
        return cut[:, which].reshape(-1, array.shape[1])
    raise AssertionError(step)


def views_of(
    names: Names, tensor: Tensor, *, split_qkv: bool, flatten: bool
) -> tuple[str, list[tuple[str, View, Role]]]:
    """The matrices that a tensor holds.

    Args:
        names: The network's names and shapes, which decide what the tensor is.
        tensor: The tensor.
        split_qkv: Cut fused query-key-value matrices into three.
        flatten: View a convolution as one matrix instead of one per kernel position.

    Returns:
        The kind of layer, and for each matrix the suffix of its name, its view and its role.
    """
    hint = names.hints.get(tensor.name, Hint())
    kind, base = _base_view(names, tensor, hint, flatten)
    parts = _parts(names, tensor, names.role(tensor, kind), kind, base, split_qkv)
    if hint.label is not None:
        parts = [
            (suffix, replace(view, text=f"{view.text}, used by {hint.label}"), role)
            for suffix, view, role in parts
        ]
    return kind, parts


_RECURRENT = {4: "lstm", 3: "gru", 1: "rnn"}
EXPERTS = re.compile(r"expert|exps|moe[._]")
"""Found in the names of tensors of a mixture of experts."""


def _base_view(names: Names, tensor: Tensor, hint: Hint, flatten: bool) -> tuple[str, View]:
    """The kind of a tensor and the view of all of it (of a stack: of its first matrix)."""
    shape = tensor.shape
    kind = hint.kind
    count = _gate_count(names, tensor) if kind is None else {"lstm": 4, "gru": 3, "rnn": 1}.get(kind, 0)
    if count and len(shape) == 2:
        return _RECURRENT[count], gates(shape, count, inputs_first=hint.transposed)
    if count:
        return _RECURRENT[count], part_of_stack(shape, 0, "direction")
    if hint.merge is not None:
        return "linear", merged(shape, *hint.merge)
    if kind == "depthwise":
        return kind, depthwise(shape, inputs_first=hint.transposed)
    if kind == "conv" and len(shape) == 2:  # an update of a kernel
        flat = replace(as_stored(shape), text="kernel flattened: outputs x (inputs x positions)")
        return "conv", flat
    if len(shape) == 2:
        embedding = names.role(tensor, "linear") is Role.EMBEDDING or kind == "embedding"
        # Where the format or the module says what the tensor is, it also says how it is stored; a name only hints.
        turned = hint.transposed or (kind is None and names.inputs_first(tensor.name))
        table = embedding and not is_raw(tensor.name)
        view = as_stored(shape).turned() if turned and not table else as_stored(shape)
        return "embedding" if embedding else "linear", view
    split_by_head = names.head_by_head(tensor.name)
    if split_by_head is not None:
        return "linear", per_head(shape, turned=split_by_head[0], out=split_by_head[1])
    if kind == "conv" or (kind is None and _is_kernel(names, tensor)):
        return "conv", kernel(shape, inputs_first=hint.transposed, flatten=flatten)
    if all(side == 1 for side in shape[:-2]):
        embedding = names.role(tensor, "linear") is Role.EMBEDDING
        return "embedding" if embedding else "linear", as_stored(shape)
    return "stack", part_of_stack(shape, 0, "matrix")


def _is_kernel(names: Names, tensor: Tensor) -> bool:
    """Whether a tensor is a convolution ``(out, in, k, ...)`` rather than a stack of matrices ``(n, ..., out, in)``."""
    words = " ".join(modules(names.label(tensor.name)))
    axes = len(tensor.shape)
    if axes > 5 or re.search(r"expert|moe|stack|exps", words):
        return False
    if re.search(r"conv|downsample", words):
        return True
    if names.role(tensor, "linear") is Role.EMBEDDING and all(side == 1 for side in tensor.shape[:-2]):
        return False
    if axes > 3:
        return max(tensor.shape[2:]) <= 64  # no kernel is 65 wide
    bias = names.shape(re.sub(r"(weight|kernel)(:0)?$", r"bias\2", tensor.name))
    if bias is not None:
        return bias == tensor.shape[:1]
    return tensor.shape[2] <= 16 and tensor.shape[2] < min(tensor.shape[:2])


def _gate_count(names: Names, tensor: Tensor) -> int:
    """Gates of a torch recurrent layer: the recurrent matrix is gates x hidden by hidden."""
    match = re.search(r"weight_(ih|hh)(_l[0-9]+(?:_reverse)?)?$", tensor.name)
    if not match or len(tensor.shape) != 2:
        return 0
    recurrent = names.shape(tensor.name[: match.start()] + f"weight_hh{match[2] or ''}") or tensor.shape
    if len(recurrent) != 2 or recurrent[1] == 0 or recurrent[0] != tensor.shape[0]:
        return 0
    ratio, remainder = divmod(recurrent[0], recurrent[1])
    return ratio if remainder == 0 and ratio in _RECURRENT else 0


_QKV = (Role.QUERY, Role.KEY, Role.VALUE)


def _parts(
    names: Names, tensor: Tensor, role: Role, kind: str, base: View, split_qkv: bool
) -> list[tuple[str, View, Role]]:
    """The layers that a tensor makes up: suffix of the name, view, role."""
    if base.index is not None:
        part = "expert" if EXPERTS.search(names.label(tensor.name)) else "matrix"
        part = "direction" if kind in _RECURRENT.values() else part
        turned = names.stack_inputs_first(tensor.name)
        return [
            (f"[{i}]", part_of_stack(tensor.shape, i, part, turned=turned), role)
            for i in range(prod(tensor.shape[:-2]))
        ]
    many = names.experts_in_rows(tensor.name) if kind == "linear" else 0
    if many:
        turned = role is Role.MLP_OUT
        return [(f"[{i}]", part_of_rows(base, i, many, turned=turned), role) for i in range(many)]
    if role is Role.QKV and split_qkv and kind == "linear":
        parts = _split(names, tensor, base)
        if parts:
            return [(f"[{'qkv'[i]}]", view, _QKV[i]) for i, view in enumerate(parts)]
        return [("", replace(base, text=f"{base.text}, not split: how it is fused is not known"), role)]
    return [("", base, role)]


_BY_HEAD = frozenset({"gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon"})
"""Model types whose ``query_key_value`` is ordered head by head, each head holding its q, k and v."""


def _split(names: Names, tensor: Tensor, base: View) -> list[View]:
    """The three views of a fused matrix; none where the file does not say how it is fused."""
    word = modules(tensor.name)[-1]
    heads, groups, width = names.heads()
    if word == "query_key_value":  # ordered head by head: needs the number of heads
        by_head = (names.network.config or {}).get("model_type") in _BY_HEAD
        if by_head and heads and groups == heads and base.rows % (3 * heads) == 0:
            return [part_of_heads(base, i, heads) for i in range(3)]
        return []
    if heads and groups and groups != heads:
        width = width or base.rows // (heads + 2 * groups)
        sizes = (heads * width, groups * width, groups * width)
    elif base.rows % 3 == 0 and (heads or base.rows == 3 * base.cols):
        sizes = (base.rows // 3,) * 3  # else keys and values may have fewer heads than queries
    else:
        return []
    if sum(sizes) != base.rows or word in ("to_kv", "kv", "kv_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        return []
    return [part_of_qkv(base, i, sizes) for i in range(3)]


def as_stored(shape: tuple[int, ...]) -> View:
    """The matrix as it is; leading axes of length 1 are dropped and named."""
    rows, cols = shape[-2:]
    if len(shape) == 2:
        return View("as stored", rows, cols)
    return View(f"the {rows}x{cols} matrix inside {_by(shape)}", rows, cols, (("reshape", (rows, cols)),))


def merged(shape: tuple[int, ...], inputs: int, outputs: int) -> View:
    """Axes that belong together (heads and their width) merged, seen outputs first."""
    text = f"transposed (stored inputs x outputs), from the merged axes of {_by(shape)}"
    return View(text, outputs, inputs, (("reshape", (inputs, outputs)), ("transpose", (1, 0))))


def per_head(shape: tuple[int, ...], *, turned: bool, out: bool) -> View:
    """A projection stored head by head, three axes, as one matrix outputs x inputs.

    Args:
        shape: ``(heads, a, b)``.
        turned: Stored ``(heads, inputs, outputs)`` of each head, as TransformerLens does; else outputs first.
        out: The matrix that leads out of the heads, whose inputs are heads x width, rather than into them.
    """
    heads, a, b = shape
    text = f"{heads} heads side by side, from {_by(shape)}"
    if out:
        steps: tuple[Step, ...] = (("transpose", (2, 0, 1)) if turned else ("transpose", (1, 0, 2)),)
        rows, cols = (b, heads * a) if turned else (a, heads * b)
    else:
        steps = (("transpose", (0, 2, 1)),) if turned else ()
        rows, cols = (heads * b, a) if turned else (heads * a, b)
    return View(text, rows, cols, (*steps, ("reshape", (rows, cols))))


def kernel(shape: tuple[int, ...], *, inputs_first: bool, flatten: bool) -> View:
    """A convolution's kernel: its slices, one per position, or one flattened matrix.

    A kernel with a single input channel (depthwise, or a first layer on grey images) is one matrix either
    way: its slices would have a single singular value each.

    Args:
        shape: ``(out, in, *positions)``, or ``(*positions, in, out)`` with ``inputs_first``.
        inputs_first: Keras' order.
        flatten: One matrix, outputs by inputs x positions.
    """
    if inputs_first:
        (*positions, inputs, outputs) = shape
    else:
        (outputs, inputs, *positions) = shape
    many = prod(positions)
    if flatten or inputs == 1:
        wide = inputs * many
        why = "one input channel, " if inputs == 1 else ""
        text = f"{why}kernel flattened: outputs x (inputs x {_by(positions)} positions)"
        if inputs_first:
            steps: tuple[Step, ...] = (("reshape", (wide, outputs)), ("transpose", (1, 0)))
        else:
            steps = (("reshape", (outputs, wide)),)
        return View(text, outputs, wide, steps)
    text = (
        f"{_by(positions)} kernel slices of outputs x inputs, pooled"
        if many > 1
        else "kernel of one position"
    )
    k = len(positions)
    axes = (*range(k), k + 1, k) if inputs_first else (*range(2, k + 2), 0, 1)
    return View(text, outputs, inputs, (("transpose", axes),), many)


def depthwise(shape: tuple[int, ...], *, inputs_first: bool) -> View:
    """One filter per channel: channels by positions."""
    if inputs_first:
        (*positions, inputs, multiplier) = shape
        rows, cols = inputs * multiplier, prod(positions)
        steps: tuple[Step, ...] = (("reshape", (cols, rows)), ("transpose", (1, 0)))
    else:
        rows, cols = shape[0], prod(shape[1:])
        steps = (("reshape", (rows, cols)),)
    return View("depthwise kernel: channels x positions", rows, cols, steps)


def part_of_stack(shape: tuple[int, ...], index: int, what: str, *, turned: bool = False) -> View:
    """One matrix out of a stack of them, seen outputs first; ``turned`` where they are stored inputs first."""
    rows, cols = shape[-2:]
    many = prod(shape[:-2])
    steps: tuple[Step, ...] = (("reshape", (many, rows, cols)), ("take", (index,)))
    view = View(f"{what} {index} of {many}, stacked in one tensor", rows, cols, steps, index=index)
    return view.turned() if turned else view


def part_of_rows(whole: View, index: int, many: int, *, turned: bool) -> View:
    """One of ``many`` experts that a matrix holds below each other; ``turned`` where each is stored inputs first."""
    rows = whole.rows // many
    start = index * rows
    text = f"expert {index} of {many}: rows {start} to {start + rows - 1}"
    view = View(text, rows, whole.cols, (*whole.steps, ("rows", (start, start + rows))))
    return view.turned() if turned else view


def half_of_rows(whole: View, which: int, word: str, *, alternating: bool) -> View:
    """One of the two matrices that a fused one holds: a half of its rows, or every other row."""
    rows = whole.rows // 2
    if alternating:
        place = f"{'even' if which == 0 else 'odd'} rows"
        step: Step = ("every", (which, 2))
    else:
        place = f"rows {which * rows} to {(which + 1) * rows - 1}"
        step = ("rows", (which * rows, (which + 1) * rows))
    text = f"{word}: {place} of the fused matrix, {whole.text}"
    return View(text, rows, whole.cols, (*whole.steps, step), index=whole.index)


def gates(shape: tuple[int, ...], count: int, *, inputs_first: bool) -> View:
    """The gates of a recurrent layer, stacked as stored."""
    view = View(f"{count} gates stacked" if count > 1 else "as stored", shape[0], shape[1])
    return view.turned() if inputs_first else view


def part_of_qkv(whole: View, which: int, sizes: tuple[int, int, int]) -> View:
    """The query, key or value rows of a fused matrix (seen outputs first)."""
    start = sum(sizes[:which])
    letter = "qkv"[which]
    text = f"{letter}: rows {start} to {start + sizes[which] - 1} of the fused matrix"
    if whole.steps:
        text += f", {whole.text}"
    return View(text, sizes[which], whole.cols, (*whole.steps, ("rows", (start, start + sizes[which]))))


def part_of_heads(whole: View, which: int, heads: int) -> View:
    """The query, key or value rows of a fused matrix that is ordered head by head."""
    text = f"{'qkv'[which]}: gathered from {heads} heads of the fused matrix"
    return View(text, whole.rows // 3, whole.cols, (*whole.steps, ("heads", (heads, 3, which))))


def _by(shape: tuple[int, ...] | list[int]) -> str:
    return "x".join(str(side) for side in shape)
