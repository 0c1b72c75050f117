"""An ONNX graph as a runnable ``nn.Module``: what the graph says is run, or it is refused in one line.

A graph that is one line of operations is rebuilt as an ``nn.Sequential``: linear layers (``Gemm``, ``MatMul`` and its
``Add``), convolutions, pooling, normalisation, elementwise functions, arithmetic with constants such as the
normalisation of the inputs, reshaping. Elementwise functions that exporters spell out (GELU by ``Erf``, SiLU by
``Sigmoid`` and ``Mul``) are recognised by their values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from strati.architectures.onnx_modules import ARITHMETIC, UNARY, Arithmetic, Elementwise, Reshape
from strati.errors import BadInputError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.formats.onnx_graph import Operation, Program

_ADVICE = "build the nn.Module yourself and pass it"
_PASSED = ("Identity", "Dropout", "Cast")
_FLOATS = (1, 10, 11, 16)  # float, half, double, bfloat16
_KNOWN: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    lambda: nn.GELU("tanh"),
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Softplus,
    nn.Softsign,
    nn.ReLU6,
)


def onnx_module(program: Program, path: object) -> nn.Module:
    """Rebuild the network of an ONNX graph, in evaluation mode.

    Args:
        program: The graph.
        path: The file it came from, for messages.

    Raises:
        UnsupportedError: The graph is not one line of operations, or has one that is not known; the message names it.
        BadInputError: The file is broken.
    """
    if len(program.inputs) != 1 or len(program.outputs) != 1:
        raise UnsupportedError(
            path,
            f"its graph has {len(program.inputs)} inputs and {len(program.outputs)} outputs, not one each; {_ADVICE}",
        )
    return _named(_Walk(program, path).modules()).eval()


class _Walk:
    """From the input to the output, one operation after the other."""

    def __init__(self, program: Program, path: object) -> None:
        self.path, self.program = path, program
        self.constants = dict(program.constants)
        self.operations = [node for node in program.operations if not self._folded(node)]
        self.users: dict[str, list[Operation]] = {}
        for node in self.operations:
            for name in node.inputs:
                if name and name not in self.constants:
                    self.users.setdefault(name, []).append(node)
        self.found: list[tuple[str | None, nn.Module]] = []

    def modules(self) -> list[tuple[str | None, nn.Module]]:
        """The modules in order, layers with their names."""
        value, (end,) = self.program.inputs[0], self.program.outputs
        for _ in range(len(self.operations) + 1):
            if value == end:
                break
            value = self._step(value)
        if value != end:
            raise self._refuse("the graph does not lead from its input to its output")
        if not any(isinstance(m, nn.Linear | nn.Conv2d | nn.Conv1d) for _, m in self.found):
            raise BadInputError(self.path, "holds no linear layer; there is nothing to run")
        return self.found

    def _step(self, value: str) -> str:
        users = self.users.get(value, [])
        if len(users) == 1 and len(self._data(users[0])) == 1 and len(users[0].inputs) >= 1:
            node = users[0]
            if not _is_elementwise(node) or not self._scalars(node):
                made = self._module(node)
                if made is not None:
                    self.found.append(made)
                return self._bias(node)
        flat = self._dynamic_flatten(value, users)
        if flat is not None:
            self.found.append((None, nn.Flatten()))
            return flat
        return self._function(value)

    def _function(self, value: str) -> str:
        """The elementwise function that begins here: the shortest one, or a longer one that is a known activation."""
        region: list[Operation] = []
        inside = {value}
        best: tuple[str, nn.Module] | None = None
        for node in self.operations:
            if not _is_elementwise(node) or not self._data(node) or node in region:
                continue
            if not all(name in inside or self._scalar(name) for name in node.inputs):
                continue
            region.append(node)
            inside.add(node.outputs[0])
            open_values = [name for name in inside if self._leaves(name, region)]
            if open_values == [node.outputs[0]]:
                numbers = {
                    n: float(self.constants[n]) for o in region for n in o.inputs if n in self.constants
                }
                made = Elementwise(list(region), value, node.outputs[0], numbers)
                known = _recognised(made)
                if known is not None:
                    return self._keep(node.outputs[0], known)
                best = best or (node.outputs[0], _single(region, self) or made)
            if len(region) > 24:
                break
        if best is None:
            users = self.users.get(value, [])
            where = users[0].label if users else "its last value"
            raise self._refuse(f"the graph branches or joins at {where}")
        return self._keep(*best)

    def _keep(self, value: str, module: nn.Module) -> str:
        self.found.append((None, module))
        return value

    def _leaves(self, name: str, region: list[Operation]) -> bool:
        """Whether a value is used outside the region."""
        outside = any(user not in region for user in self.users.get(name, []))
        return outside or name == self.program.outputs[0]

    def _module(self, node: Operation) -> tuple[str | None, nn.Module] | None:
        """The module of a node that has one input besides constants."""
        makers: dict[str, Callable[[Operation], nn.Module]] = {
            "Flatten": self._flatten,
            "Reshape": self._reshape,
            "Conv": self._convolution,
            "BatchNormalization": self._batch_norm,
            "MaxPool": self._pool,
            "AveragePool": self._pool,
            "GlobalAveragePool": lambda _: (
                nn.AdaptiveAvgPool1d(1) if self._axes() == 1 else nn.AdaptiveAvgPool2d(1)
            ),
            "LeakyRelu": lambda n: nn.LeakyReLU(n.attributes.get("alpha", 0.01)),
            "Elu": lambda n: nn.ELU(n.attributes.get("alpha", 1.0)),
            "Celu": lambda n: nn.CELU(n.attributes.get("alpha", 1.0)),
            "Selu": lambda n: _plain(n, self, ("alpha", "gamma"), nn.SELU()),
            "Softsign": lambda _: nn.Softsign(),
            "HardSwish": lambda _: nn.Hardswish(),
            "Mish": lambda _: nn.Mish(),
            "Gelu": lambda n: nn.GELU(n.attributes.get("approximate", "none")),
            "Clip": self._clip,
            "Softmax": self._softmax,
            "LogSoftmax": self._softmax,
        }
        if node.domain not in ("", "ai.onnx"):
            raise self._refuse(f"{node.label} is of the operator set {node.domain}")
        if node.operator in _PASSED:
            if node.attributes.get("to", 1) not in _FLOATS:
                raise self._refuse(f"{node.label} rounds to whole numbers")
            return None
        if node.operator in ("Gemm", "MatMul"):
            return self._linear(node)
        if node.operator in ARITHMETIC:
            return None, self._arithmetic(node)
        if node.operator not in makers:
            raise self._refuse(f"{node.label} is not an operation that can be run here")
        name = self._name(node.inputs[1]) if node.operator == "Conv" else None
        return name, makers[node.operator](node)

    def _linear(self, node: Operation) -> tuple[str, nn.Module]:
        options = node.attributes
        if node.inputs[0] in self.constants or options.get("transA", 0):
            raise self._refuse(f"{node.label} multiplies from the left")
        name = node.inputs[1]
        matrix = self._real(self.constants[name])
        if matrix.ndim != 2:
            raise self._refuse(f"{node.label} has a weight of {matrix.ndim} dimensions")
        weight = matrix if node.operator == "Gemm" and options.get("transB", 0) else matrix.T
        weight = weight * weight.dtype.type(options.get("alpha", 1.0)) if node.operator == "Gemm" else weight
        bias = None
        if node.operator == "Gemm" and len(node.inputs) > 2 and node.inputs[2]:
            bias = self._real(self.constants[node.inputs[2]]) * np.float32(options.get("beta", 1.0))
        if node.operator == "MatMul":
            follower = self._follower(node)
            bias = None if follower is None else self._real(self.constants[follower[1]])
        return self._name(name), _filled(nn.Linear, weight, bias, weight.shape[1], weight.shape[0])

    def _follower(self, node: Operation) -> tuple[str, str] | None:
        """The ``Add`` of a bias behind a ``MatMul``: its output and the bias's name."""
        users = self.users.get(node.outputs[0], [])
        if len(users) != 1 or users[0].operator != "Add" or node.outputs[0] == self.program.outputs[0]:
            return None
        other = [n for n in users[0].inputs if n in self.constants]
        width = self._width(node)
        if (
            len(other) != 1
            or self.constants[other[0]].size != width
            or self.constants[other[0]].shape[-1:] != (width,)
        ):
            return None
        return users[0].outputs[0], other[0]

    def _width(self, node: Operation) -> int:
        return int(self.constants[node.inputs[1]].shape[-1])

    def _bias(self, node: Operation) -> str:
        """Where the walk goes on: behind the bias that belongs to a ``MatMul``."""
        follower = self._follower(node) if node.operator == "MatMul" else None
        return node.outputs[0] if follower is None else follower[0]

    def _arithmetic(self, node: Operation) -> nn.Module:
        (other,) = (n for n in node.inputs if n in self.constants)
        constant = torch.from_numpy(np.array(self._real(self.constants[other])))
        return Arithmetic(node.operator, constant, reverse=node.inputs[0] == other)

    def _flatten(self, node: Operation) -> nn.Module:
        if node.attributes.get("axis", 1) != 1:
            raise self._refuse(f"{node.label} does not keep the batch apart")
        return nn.Flatten()

    def _reshape(self, node: Operation) -> nn.Module:
        shape = [int(n) for n in np.ravel(self.constants[node.inputs[1]])]
        if len(shape) < 2 or shape[1:].count(-1) > 1 or 0 in shape[1:]:
            raise self._refuse(f"{node.label} to {shape} does not keep the batch apart")
        return nn.Flatten() if shape[1:] == [-1] else Reshape(tuple(shape[1:]))

    def _convolution(self, node: Operation) -> nn.Module:
        options, weight = node.attributes, self._real(self.constants[node.inputs[1]])
        dims = weight.ndim - 2
        kind = {1: nn.Conv1d, 2: nn.Conv2d}.get(dims)
        pads = options.get("pads") or [0] * (2 * dims)
        if kind is None or options.get("auto_pad", "NOTSET") != "NOTSET" or pads[:dims] != pads[dims:]:
            raise self._refuse(f"{node.label} pads or moves in a way that is not known")
        bias = self._real(self.constants[node.inputs[2]]) if len(node.inputs) > 2 and node.inputs[2] else None
        groups = options.get("group", 1)
        moves = {"stride": tuple(options.get("strides") or [1] * dims), "padding": tuple(pads[:dims])}
        moves |= {"dilation": tuple(options.get("dilations") or [1] * dims)}
        sizes = (weight.shape[1] * groups, weight.shape[0], weight.shape[2:])
        return _filled(kind, weight, bias, *sizes, groups=groups, **moves)

    def _batch_norm(self, node: Operation) -> nn.Module:
        scale, shift, mean, variance = (
            torch.from_numpy(np.array(self.constants[n])) for n in node.inputs[1:5]
        )
        if node.attributes.get("training_mode", 0):
            raise self._refuse(f"{node.label} was exported for training")
        kind = nn.BatchNorm2d if self._axes() == 2 else nn.BatchNorm1d
        norm = kind(len(scale), eps=node.attributes.get("epsilon", 1e-5))
        norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var = scale, shift, mean, variance
        return norm

    def _axes(self) -> int:
        """How many axes the values have beside the batch and the channels, from the last layer or the first one."""
        for _, made in reversed(self.found):
            if isinstance(made, nn.Linear | nn.Flatten):
                return 0
            if isinstance(made, nn.Conv1d | nn.Conv2d):
                return len(made.kernel_size)
            if isinstance(made, Reshape):
                return len(made.shape) - 1
        ahead = (n for n in self.operations if n.operator in ("Gemm", "MatMul", "Conv", "Flatten", "Reshape"))
        first = next(ahead, None)
        if first is None or first.operator in ("Flatten", "Reshape"):
            return 2  # images
        return self.constants[first.inputs[1]].ndim - 2 if first.operator == "Conv" else 0

    def _pool(self, node: Operation) -> nn.Module:
        options = node.attributes
        size, pads = tuple(options["kernel_shape"]), options.get("pads") or [0, 0, 0, 0]
        same = options.get("auto_pad", "NOTSET") == "NOTSET" and pads[: len(size)] == pads[len(size) :]
        if len(size) != 2 or not same or options.get("dilations", [1, 1]) != [1, 1] or len(node.outputs) != 1:
            raise self._refuse(f"{node.label} pads or moves in a way that is not known")
        moves = (size, tuple(options.get("strides") or [1, 1]), tuple(pads[:2]))
        ceil = bool(options.get("ceil_mode", 0))
        if node.operator == "MaxPool":
            return nn.MaxPool2d(*moves, ceil_mode=ceil)
        return nn.AvgPool2d(
            *moves, ceil_mode=ceil, count_include_pad=bool(options.get("count_include_pad", 0))
        )

    def _clip(self, node: Operation) -> nn.Module:
        ends = [node.attributes.get("min", -math.inf), node.attributes.get("max", math.inf)]
        for i, name in enumerate(node.inputs[1:3]):
            ends[i] = float(self.constants[name]) if name else ends[i]
        if ends == [0.0, math.inf]:
            return nn.ReLU()
        return nn.ReLU6() if ends == [0.0, 6.0] else nn.Hardtanh(*ends)

    def _softmax(self, node: Operation) -> nn.Module:
        if node.attributes.get("axis", -1) not in ((-1, 1) if self._axes() == 0 else (-1,)):
            raise self._refuse(f"{node.label} is not over the last axis")
        return nn.Softmax(-1) if node.operator == "Softmax" else nn.LogSoftmax(-1)

    def _dynamic_flatten(self, value: str, users: list[Operation]) -> str | None:
        """``x.reshape(x.shape[0], -1)`` as older exporters spell it: the shape is computed from the input itself."""
        reshapes = [n for n in users if n.operator == "Reshape" and n.inputs[0] == value]
        if len(reshapes) != 1 or any(n.operator not in ("Reshape", "Shape") for n in users):
            return None
        known = {n.outputs[0] for n in users if n.operator == "Shape"}
        last: Operation | None = None
        for node in self.operations:
            if node.operator in ("Gather", "Unsqueeze", "Concat", "Squeeze", "Slice", "Cast") and all(
                n in known or n in self.constants for n in node.inputs
            ):
                known.add(node.outputs[0])
                last = node if node.outputs[0] == reshapes[0].inputs[1] else last
        if last is None or last.operator != "Concat" or len(last.inputs) != 2:
            return None
        rest = self.constants.get(last.inputs[1])
        return reshapes[0].outputs[0] if rest is not None and np.ravel(rest).tolist() == [-1] else None

    def _folded(self, node: Operation) -> bool:
        """Constants, and what only turns a constant, become constants."""
        if node.operator == "Constant":
            found = [v for k, v in node.attributes.items() if k.startswith("value") and v is not None]
            if not found or isinstance(found[0], str):
                raise self._refuse(f"{node.label} holds no number")
            kind = np.float32 if isinstance(found[0], float) else None
            self.constants[node.outputs[0]] = np.asarray(found[0], kind)
            return True
        turning = ("Identity", "Cast", "Transpose", "Unsqueeze", "Reshape")
        if node.operator not in turning or not all(n in self.constants for n in node.inputs):
            return False
        value = self.constants[node.inputs[0]]
        if node.operator == "Transpose":
            value = value.transpose(node.attributes.get("perm") or None)
        elif node.operator == "Reshape":
            value = value.reshape([int(n) for n in np.ravel(self.constants[node.inputs[1]])])
        elif node.operator == "Unsqueeze":
            axes = node.attributes.get("axes") or np.ravel(self.constants[node.inputs[1]]).tolist()
            value = np.expand_dims(value, tuple(int(a) for a in axes))
        self.constants[node.outputs[0]] = value
        return True

    def _data(self, node: Operation) -> list[str]:
        return [name for name in node.inputs if name and name not in self.constants]

    def _scalar(self, name: str) -> bool:
        return name in self.constants and self.constants[name].size == 1

    def _scalars(self, node: Operation) -> bool:
        return all(self._scalar(name) for name in node.inputs if name in self.constants)

    def _real(self, values: NDArray[Any]) -> NDArray[Any]:
        found = np.asarray(values, np.float64 if values.dtype == np.float64 else np.float32)
        if not np.isfinite(found).all():
            raise BadInputError(self.path, "holds weights that are not finite; repair the checkpoint first")
        return found

    def _name(self, weight: str) -> str:
        """A layer's name: its weight's, or its number where the exporter made that up."""
        stem = re.sub(r"[._/](weight|kernel|W)$", "", weight).replace("/", ".").replace("::", ".").strip(".")
        anonymous = re.fullmatch(r"(onnx\.\w+|[0-9]+|\w*constant\w*|val_[0-9]+)", stem, re.IGNORECASE)
        taken = [name for name, _ in self.found if name is not None]
        return f"layer{len(taken)}" if anonymous or not stem or stem in taken else stem

    def _refuse(self, why: str) -> UnsupportedError:
        return UnsupportedError(self.path, f"{why}; {_ADVICE}")


def _is_elementwise(node: Operation) -> bool:
    return node.operator in UNARY or node.operator in ARITHMETIC


def _single(region: list[Operation], walk: _Walk) -> nn.Module | None:
    """One arithmetic operation with a number needs no function of its own."""
    if len(region) == 1 and region[0].operator in ARITHMETIC and len(walk._data(region[0])) == 1:
        return walk._arithmetic(region[0])
    return None


def _plain(node: Operation, walk: _Walk, names: tuple[str, ...], module: nn.Module) -> nn.Module:
    if any(name in node.attributes for name in names):
        raise walk._refuse(f"{node.label} has numbers of its own")
    return module


def _recognised(made: Elementwise) -> nn.Module | None:
    """The known activation that has the same values."""
    grid = torch.linspace(-9.0, 9.0, 721, dtype=torch.float64)
    with torch.no_grad():
        values = made(grid)
        for kind in _KNOWN:
            module = kind()
            if torch.allclose(module(grid), values, rtol=1e-5, atol=1e-6):
                return module
    return None


def _filled(
    kind: Any, weight: NDArray[Any], bias: NDArray[Any] | None, *sizes: Any, **options: Any
) -> nn.Module:
    """A layer with these values."""
    double = weight.dtype == np.float64
    module: nn.Module = kind(
        *sizes, bias=bias is not None, dtype=torch.float64 if double else None, **options
    )
    layer: Any = module
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.array(weight, order="C")))
        if bias is not None:
            layer.bias.copy_(torch.from_numpy(np.broadcast_to(np.ravel(bias), layer.bias.shape).copy()))
    return module


def _named(modules: list[tuple[str | None, nn.Module]]) -> nn.Sequential:
    """Containers inside containers where the layers' dotted names allow it, else one with the dots replaced."""
    names = [name for name, _ in modules if name is not None]
    flat = nn.Sequential()
    for i, (name, module) in enumerate(modules):
        own = f"{type(module).__name__.lower()}{i}" if name is None else name.replace(".", "_")
        if name is not None:
            module.__dict__["checkpoint_name"] = name
        flat.add_module(own if own and not hasattr(flat, own) else f"{own}_{i}", module)
    heads = {name.rpartition(".")[0] for name in names}
    if len(set(names)) != len(names) or len(heads) != 1 or not (head := heads.pop()):
        return flat
    inner = nn.Sequential()
    for i, (name, module) in enumerate(modules):
        own = f"{type(module).__name__.lower()}{i}" if name is None else name.rpartition(".")[2]
        inner.add_module(own, module)
    for word in reversed(head.split(".")):
        outer = nn.Sequential()
        outer.add_module(word, inner)
        inner = outer
    return inner
