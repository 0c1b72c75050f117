r"""Adapters of the kohya and LyCORIS formats: LoRA, LoHa and LoKr in single files, and PEFT's LoHa and LoKr.

Every update is written as a product of two matrices, so that it is treated like a LoRA (arXiv 2309.14859):

- LoRA: ``lora_up`` times ``lora_down``; with ``lora_mid`` (Tucker) the kernel goes into the right factor.
- LoHa: :math:`(A_1 B_1) \circ (A_2 B_2)`. The rows of the left factor are Kronecker products of the rows of
  :math:`A_1` and :math:`A_2`, the columns of the right one those of :math:`B_1` and :math:`B_2`.
- LoKr: :math:`W_1 \otimes W_2`, where either may be a product: :math:`(L_1 R_1) \otimes (L_2 R_2) = (L_1 \otimes L_2)
  (R_1 \otimes R_2)`.

The scale is ``alpha`` over the rank of the stored factors. A LoKr without factors, and files without ``alpha``, are not
scaled. Kohya writes module names with underscores instead of dots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.io.adapters.lora import AdapterUpdate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import RawCheckpoint, Tensor

    Matrix = NDArray[Any]
    Factors = tuple[Matrix, Matrix]
    Parts = Mapping[str, Tensor]

PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_down|lora_up|lora_mid|lora\.down|lora\.up|hada_w[12]_[ab]|hada_t[12]"
    r"|lokr_w[12](?:_[ab])?|lokr_t2|alpha|dora_scale)(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?$"
)
"""Names of the tensors of such an adapter."""

_PREFIX = re.compile(r"^(?:lycoris|lora)_(?:unet_|te[123]?_|transformer_)?")
_WORDS = re.compile(
    r"(?<![a-z])(self_attn|attn[0-9]?|mlp|ff|net|text_model|encoder|attentions|self_attention|model)_(?=[a-z0-9])"
)


def dotted(module: str) -> str:
    """Kohya's name of a module with dots, as far as numbers and common words show them.

    Examples:
        >>> dotted("lora_unet_down_blocks_0_attentions_1_transformer_blocks_0_attn1_to_q")
        'down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_q'
        >>> dotted("lora_te_text_model_encoder_layers_11_mlp_fc1")
        'text_model.encoder.layers.11.mlp.fc1'
    """
    if "." in module:
        return module
    name = re.sub(r"_([0-9]+)(?=_|$)", r".\1", _PREFIX.sub("", module))
    name = re.sub(r"(\.[0-9]+)_", r"\1.", name)
    while (split := _WORDS.sub(r"\1.", name)) != name:
        name = split
    return name


def lycoris_update(
    contents: RawCheckpoint,
    name: str,
    parts: Parts,
    settings_scale: Callable[[], float | None] | None,
    adapter: str | None = None,
) -> AdapterUpdate | None:
    """The update that some tensors make.

    Args:
        contents: Reads them.
        name: The module that they belong to.
        parts: The tensors, by the words of :data:`PART`.
        settings_scale: The scale from PEFT's settings; ``None`` for files that carry ``alpha``.
        adapter: The adapter's name, where a model holds several.

    Returns:
        ``None`` where a tensor is missing or the shapes do not fit together.
    """
    parts = {word.replace(".", "_"): tensor for word, tensor in parts.items()}
    if any(0 in tensor.shape for tensor in parts.values()):
        return None
    kinds = ((_lora, "lora_down"), (_loha, "hada_w1_a"), (_lokr, "lokr_"))
    for build, word in kinds:
        if any(part.startswith(word) for part in parts):
            made = build(parts)
            break
    else:
        return None
    if made is None:
        return None
    rows, cols, rank, stored_rank, shape, combine = made
    magnitude = parts.get("dora_scale")
    if magnitude is not None and (magnitude.shape[:1] != (rows,) or magnitude.size != rows):
        return None  # lengths of columns instead of rows

    def factors() -> Factors:
        left, right = combine({word: contents.read(tensor.name) for word, tensor in parts.items()})
        return left, right

    return AdapterUpdate(
        f"{name}.weight",
        rows,
        cols,
        rank,
        settings_scale() if settings_scale is not None else _scale(contents, parts, stored_rank),
        factors,
        shape,
        None if magnitude is None else lambda: contents.read(magnitude.name).reshape(-1),
        adapter=adapter,
    )


def _scale(contents: RawCheckpoint, parts: Parts, stored_rank: int | None) -> float | None:
    tensor = parts.get("alpha")
    if tensor is None or stored_rank is None:
        return 1.0
    alpha = (
        float(np.asarray(contents.read(tensor.name), np.float64).reshape(-1)[0]) if tensor.size else math.nan
    )
    return alpha / stored_rank if math.isfinite(alpha) else None


_Made = tuple[
    int, int, int, int | None, tuple[int, ...] | None, Callable[[Mapping[str, Any]], tuple[Any, Any]]
]


def _lora(parts: Parts) -> _Made | None:
    down, up, mid = (parts.get(word) for word in ("lora_down", "lora_up", "lora_mid"))
    if down is None or up is None or len(down.shape) < 2 or len(up.shape) < 2:
        return None
    rank, rows = down.shape[0], up.shape[0]
    if up.size != rows * (mid.shape[0] if mid is not None else rank):
        return None
    if mid is None:
        shape = (rows, *down.shape[1:]) if len(down.shape) > 2 else None

        def product(tensors: Mapping[str, Any]) -> Factors:
            return tensors["lora_up"].reshape(rows, rank), tensors["lora_down"].reshape(rank, -1)

        return rows, down.size // rank, rank, rank, shape, product
    if len(mid.shape) < 3 or mid.shape[1] != rank:
        return None

    def tucker(tensors: Mapping[str, Any]) -> Factors:
        down_matrix = tensors["lora_down"].reshape(rank, -1)
        return tensors["lora_up"].reshape(rows, -1), _with_kernel(tensors["lora_mid"], down_matrix)

    inputs = down.size // rank
    kernel = mid.shape[2:]
    return rows, inputs * math.prod(kernel), mid.shape[0], rank, (rows, inputs, *kernel), tucker


def _loha(parts: Parts) -> _Made | None:
    words = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    if not all(word in parts and len(parts[word].shape) == 2 for word in words):
        return None
    tucker = "hada_t1" in parts
    if tucker and ("hada_t2" not in parts or len(parts["hada_t1"].shape) < 3):
        return None
    shapes = [parts[word].shape for word in words]
    rank = shapes[1][0]
    if tucker:
        rows, inputs, kernel = shapes[0][1], shapes[1][1], parts["hada_t1"].shape[2:]
        fits = shapes[2][1] == rows and shapes[3][1] == inputs and parts["hada_t2"].shape[2:] == kernel
    else:
        (rows, first), (_, inputs), kernel = shapes[0], shapes[1], ()
        fits = first == rank and shapes[2] == (rows, shapes[3][0]) and shapes[3][1] == inputs
    if not fits:
        return None
    cols = inputs * math.prod(kernel)

    def hadamard(tensors: Mapping[str, Any]) -> Factors:
        pairs = []
        for side in "12":
            left, right = (np.asarray(tensors[f"hada_w{side}_{end}"], np.float32) for end in "ab")
            pairs.append((left.T, _with_kernel(tensors[f"hada_t{side}"], right)) if tucker else (left, right))
        (a1, b1), (a2, b2) = pairs
        if a1.shape[1] * a2.shape[1] >= min(rows, cols):
            return (a1 @ b1) * (a2 @ b2), np.eye(cols, dtype=np.float32)
        left = (a1[:, :, None] * a2[:, None, :]).reshape(rows, -1)
        return left, (b1[:, None, :] * b2[None, :, :]).reshape(-1, cols)

    full = min(rank * shapes[3][0], rows, cols)
    return rows, cols, full, rank, (rows, inputs, *kernel) if tucker else None, hadamard


def _lokr(parts: Parts) -> _Made | None:
    sizes: list[tuple[int, int]] = []
    kernel: tuple[int, ...] = ()
    stored_rank = None
    for side in "12":
        dense, left, right, core = (
            parts.get(f"lokr_{word}") for word in (f"w{side}", f"w{side}_a", f"w{side}_b", f"t{side}")
        )
        if dense is not None and len(dense.shape) >= 2:
            sizes.append((dense.shape[0], dense.shape[1]))
            kernel = dense.shape[2:]
            continue
        if left is None or right is None or len(left.shape) != 2 or len(right.shape) != 2:
            return None
        stored_rank = stored_rank or right.shape[0]
        if core is not None and len(core.shape) > 2:
            sizes.append((left.shape[1], right.shape[1]))
            kernel = core.shape[2:]
        elif left.shape[1] == right.shape[0]:
            sizes.append((left.shape[0], right.shape[1]))
        else:
            return None
    rows, inputs = sizes[0][0] * sizes[1][0], sizes[0][1] * sizes[1][1]
    cols = inputs * math.prod(kernel)

    def kronecker(tensors: Mapping[str, Any]) -> Factors:
        (left_1, right_1), (left_2, right_2) = (_lokr_factors(tensors, side) for side in "12")
        return np.kron(left_1, left_2), np.kron(right_1, right_2)

    # The kernel belongs to the columns of the second side.
    matrices = (sizes[0], (sizes[1][0], sizes[1][1] * math.prod(kernel)))
    ranks = [_side_rank(parts, side, size) for side, size in zip("12", matrices, strict=True)]
    shape = (rows, inputs, *kernel) if kernel else None
    return rows, cols, min(ranks[0] * ranks[1], rows, cols), stored_rank, shape, kronecker


def _side_rank(parts: Parts, side: str, size: tuple[int, int]) -> int:
    right = parts.get(f"lokr_w{side}_b")
    return min(size) if right is None else min(*size, right.shape[0])


def _lokr_factors(tensors: Mapping[str, Any], side: str) -> Factors:
    """Two factors of one side; of a stored matrix itself and an identity, on its shorter side."""
    if f"lokr_w{side}" in tensors:
        stored = np.asarray(tensors[f"lokr_w{side}"], np.float32)
        matrix = stored.reshape(stored.shape[0], -1)
        rows, cols = matrix.shape
        identity = np.eye(min(rows, cols), dtype=np.float32)
        return (identity, matrix) if rows <= cols else (matrix, identity)
    left, right = (np.asarray(tensors[f"lokr_w{side}_{end}"], np.float32) for end in "ab")
    core = tensors.get(f"lokr_t{side}")
    return (left, right) if core is None else (left.T, _with_kernel(core, right))


def _with_kernel(core: Matrix, right: Matrix) -> Matrix:
    """The right factor of a Tucker decomposition: the core's kernel contracted with the inputs."""
    kernel = np.asarray(core, np.float32)
    contracted: Matrix = np.einsum(
        "ijk,jn->ink", kernel.reshape(*kernel.shape[:2], -1), np.asarray(right, np.float32)
    )
    flat: Matrix = contracted.reshape(kernel.shape[0], -1)
    return flat
