"""A checkpoint as a runnable ``nn.Module``, if the file alone determines the architecture.

These can be rebuilt: a multilayer perceptron, whose architecture follows from the shapes of its tensors (you name the
activation function); ResNets and vision transformers with the names of torchvision or timm, and CIFAR ResNets
(``vision_models``); a residual network that ``strati reassemble`` wrote; a Llama in a GGUF file; a transformer in a
local Hugging Face directory, whose ``config.json`` names the class; a PEFT adapter with its base on this machine.
Nothing is downloaded, no code from the checkpoint runs, and transformers are loaded from safetensors only. For other
networks, ONNX graphs among them, build or convert the module and pass it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

import numpy as np

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.options import resolve
from strati.core.plugins import require
from strati.core.results import Tick, silent
from strati.io.adapters.merge import adapted_module, is_adapter
from strati.io.in_memory import check_values, is_module

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from strati.core.option_types import ModuleOptions
    from strati.io.network import Network, Openable

ActivationName = Literal["relu", "leaky_relu", "tanh", "sigmoid", "gelu", "silu", "identity"]
_CLASSES = {
    "relu": "ReLU",
    "leaky_relu": "LeakyReLU",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "gelu": "GELU",
    "silu": "SiLU",
    "identity": "Identity",
}
_ADVICE = "build the nn.Module yourself and pass it"
_TOO_MANY_ORDERS = 12


@dataclass(frozen=True)
class ModuleConfig:
    """Options of :func:`as_module`.

    Attributes:
        activation: The nonlinearity between the layers of a multilayer perceptron; files do not hold it.
        heads: Attention heads of a vision transformer, where its width does not tell.
    """

    activation: ActivationName = "relu"
    heads: int | None = None

    def __post_init__(self) -> None:
        """Refuse a nonlinearity that is not known."""
        if self.activation not in get_args(ActivationName):
            names = ", ".join(get_args(ActivationName))
            raise BadInputError(self.activation, f"no such activation; there are: {names}")


def as_module(
    model: Openable,
    *,
    config: ModuleConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[ModuleOptions],
) -> nn.Module:
    """Rebuild the network of a checkpoint, in evaluation mode.

    Half-precision weights are computed with in float32; double ones stay double.

    Args:
        model: Whatever names a network (:func:`strati.open`). A module is returned as it is.
        config: Options; keywords of the same names win.
        tick: Called when the network is rebuilt, with its path.
        **options: Fields of :class:`ModuleConfig`.

    Returns:
        A module whose parameters have the checkpoint's names, or the transformers model.

    Raises:
        UnsupportedError: The tensors are not those of a network that can be rebuilt from them, or the transformer is of
            a kind transformers does not know by itself.
        BadInputError: The file or directory is broken.

    Examples:
        >>> from strati import embedded
        >>> [type(layer).__name__ for layer in as_module(embedded.path("digits-mlp.safetensors"))]
        ['Linear', 'ReLU', 'Linear', 'ReLU', 'Linear']
    """
    require("torch", "torch", "running a network")
    settings = resolve(ModuleConfig, config, options, of=as_module)
    from strati.io.network import open

    if is_module(model):
        check_values(model)
        tick(type(model).__name__)
        return model
    network = open(model)
    module = network.module if network.module is not None else _rebuilt(network, settings)
    tick(str(network.path))
    return module


def _rebuilt(network: Network, settings: ModuleConfig) -> nn.Module:
    if network.parts or (network.contents.adapters and is_adapter(network)):
        return adapted_module(network, lambda base: as_module(base, config=settings))
    folder = Path(network.path)
    config = network.config or {}
    if not network.in_memory and folder.is_dir() and ("model_type" in config or "architectures" in config):
        return _transformer(folder, network)
    if network.format == "gguf" and config.get("general.architecture") == "llama":
        from strati.io.llama_gguf import llama_from_gguf

        return llama_from_gguf(network)
    if network.format == "onnx":
        raise UnsupportedError(
            network.path,
            "holds an ONNX graph, which strati does not run; convert it, module = onnx2torch.convert('FILE.onnx')"
            " (pip install onnx2torch), and pass the module",
        )
    return _from_tensors(network, settings.activation, settings.heads)


def _from_tensors(network: Network, activation: str, heads: int | None) -> nn.Module:
    """A network whose names and shapes say what it is."""
    from torch import nn

    from strati.io import vision_models as vision
    from strati.io.in_memory import load_arrays

    shapes = {tensor.name: tensor.shape for tensor in network.tensors}
    convolved = any(len(shape) == 4 for shape in shapes.values())
    if convolved and (vision.is_resnet(shapes) or vision.is_vit(shapes)):
        model = vision.resnet(shapes) if vision.is_resnet(shapes) else vision.vit(shapes, heads)
        double = any(t.dtype == "float64" for t in network.tensors)
        arrays = {name: np.asarray(network.read(name), np.float64 if double else None) for name in shapes}
        if not double:
            arrays = {name: _real(a) if network[name].floating else a for name, a in arrays.items()}
        load_arrays(model.double() if double else model, arrays, network.path)
        return model.eval()
    if _is_residual(network):
        return _residual_module(network, getattr(nn, _CLASSES[activation])())
    return _perceptron(network, activation)


_RESIDUAL_NAME = re.compile(r"(blocks\.\d+\.(inp|out)|last)\.(weight|bias)")


def _is_residual(network: Network) -> bool:
    """Whether a checkpoint is a residual network as ``strati reassemble --out`` writes it."""
    names = [tensor.name for tensor in network.tensors]
    return any(name.startswith("blocks.") for name in names) and all(
        _RESIDUAL_NAME.fullmatch(name) for name in names
    )


def _residual_module(network: Network, activation: nn.Module) -> nn.Module:
    """Residual blocks ``x + out(act(inp(x)))``, then ``last``, in evaluation mode."""
    from torch import nn

    class Block(nn.Module):
        """``x + out(act(inp(x)))``."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.inp = _linear(network, f"{name}.inp")
            self.activation = activation
            self.out = _linear(network, f"{name}.out")

        def forward(self, x: Tensor) -> Tensor:
            """The stream with the block's contribution added."""
            output: Tensor = x + self.out(self.activation(self.inp(x)))
            return output

    count = 1 + max(int(t.name.split(".")[1]) for t in network.tensors if t.name.startswith("blocks."))
    model = nn.Sequential()
    model.add_module("blocks", nn.Sequential(*(Block(f"blocks.{i}") for i in range(count))))
    model.add_module("last", _linear(network, "last"))
    return model.eval()


def _linear(network: Network, name: str) -> nn.Linear:
    from torch import from_numpy, nn

    weight = from_numpy(network.read(f"{name}.weight").copy())
    biased = any(tensor.name == f"{name}.bias" for tensor in network.tensors)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=biased, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    if biased:
        linear.bias.data.copy_(from_numpy(network.read(f"{name}.bias").copy()))
    return linear


def _perceptron(network: Network, activation: str) -> nn.Module:
    from torch import nn, no_grad, tensor

    linears: list[tuple[str, nn.Module]] = []
    for name, weight, bias in _line_up(network):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear = linear.double() if weight.dtype == np.float64 else linear
        with no_grad():
            linear.weight.copy_(tensor(weight))
            if bias is not None:
                linear.bias.copy_(tensor(bias))
        linear.__dict__["checkpoint_name"] = name  # where it cannot be the module's name, reports use this
        linears.append((name, linear))
    kind = getattr(nn, _CLASSES[activation]) if activation != "identity" else None
    nested = _nested(linears, kind) or _nested([(n.replace(".", "_"), m) for n, m in linears], kind)
    assert nested is not None, "flat names always fit"
    return nested.eval()


def _nested(linears: list[tuple[str, nn.Module]], activation: type[nn.Module] | None) -> nn.Sequential | None:
    """Containers inside containers, so that every layer has its dotted name; ``None`` where the order forbids it."""
    from torch import nn

    root = nn.Sequential()
    taken = {name for name, _ in linears}
    for index, (name, linear) in enumerate(linears):
        *above, leaf = name.split(".")
        here = root
        for word in above:
            inner = here._modules.get(word)
            if inner is None and (not word or hasattr(here, word)):
                return None
            if inner is None:
                inner = nn.Sequential()
                here.add_module(word, inner)
            elif not isinstance(inner, nn.Sequential) or next(reversed(here._modules)) != word:
                return None  # data would have to come back to a container they have left
            here = inner
        if not leaf or hasattr(here, leaf):
            if above:
                return None
            leaf = f"layer_{leaf}"
        here.add_module(leaf, linear)
        if activation is not None and index + 1 < len(linears):
            follows = str(int(leaf) + 1) if leaf.isdigit() else ""
            free = follows and ".".join([*above, follows]) not in taken
            here.add_module(follows if free else f"act{index}", activation())
    return root


def _line_up(network: Network) -> list[tuple[str, NDArray[Any], NDArray[Any] | None]]:
    """Name, weight (out, in) and bias of each layer, in the order the data pass through them."""
    where = network.path
    tensors = {t.name: t for t in network.tensors}
    weights = [t for t in tensors.values() if len(t.shape) == 2]
    vectors = {t.name: t for t in tensors.values() if len(t.shape) == 1}
    for other in tensors.values():
        if len(other.shape) not in (1, 2) and other.size > 1:
            raise UnsupportedError(
                other.name, f"has shape {other.shape}, which is not of a multilayer perceptron; {_ADVICE}"
            )
    if not weights:
        raise BadInputError(where, "holds no linear layer; there is nothing to count")
    for tensor in weights:
        if not tensor.floating:
            raise UnsupportedError(tensor.name, f"holds {tensor.dtype}, not real weights; {_ADVICE}")
    shapes = [(t.name, (t.shape[0], t.shape[1])) for t in weights]
    biases = {t.name: vectors[b].shape[0] for t in weights if (b := _bias(t.name, vectors)) is not None}
    order, transposed = _order(shapes, biases, where)
    layers: list[tuple[str, NDArray[Any], NDArray[Any] | None]] = []
    for name in order:
        weight = _real(network.read(name))
        weight = np.ascontiguousarray(weight.T) if transposed else weight
        bias = _bias(name, vectors)
        if bias is not None and biases[name] != weight.shape[0]:
            raise BadInputError(bias, f"has {biases[name]} values for {weight.shape[0]} outputs; broken file")
        values = None if bias is None else _real(network.read(vectors.pop(bias).name)).astype(weight.dtype)
        if not (np.isfinite(weight).all() and (values is None or np.isfinite(values).all())):
            raise BadInputError(name, "holds values that are not finite; repair the checkpoint first")
        layers.append((_stem(name) or f"layer{len(layers)}", weight, values))
    if vectors:
        left = next(iter(vectors))
        raise UnsupportedError(left, f"belongs to no linear layer (a normalisation?); {_ADVICE}")
    return layers


def _real(values: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(values, dtype=np.float64 if values.dtype == np.float64 else np.float32)


def _order(
    shapes: list[tuple[str, tuple[int, int]]], biases: dict[str, int], where: object
) -> tuple[list[str], bool]:
    """The order in which the matrices fit one behind the other, and whether they are stored (in, out)."""
    by_name = sorted(
        shapes, key=lambda item: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", item[0])]
    )
    kernels = all(name.rsplit("/")[-1].split(".")[-1].startswith("kernel") for name, _ in shapes)
    ways = (True, False) if kernels else (False, True)
    fitting = [t for t in ways if all(shape[t] == biases.get(name, shape[t]) for name, shape in shapes)]
    for transposed in fitting or ways:
        for candidate in (by_name, shapes):
            if _fits([shape for _, shape in candidate], transposed):
                return [name for name, _ in candidate], transposed
    for transposed in fitting or ways:
        order = _search(by_name, transposed)
        if order is not None:
            return order, transposed
    raise UnsupportedError(
        where,
        f"its matrices do not fit one behind the other, so it is not a multilayer perceptron; {_ADVICE}",
    )


def _fits(shapes: list[tuple[int, int]], transposed: bool) -> bool:
    if transposed:
        return all(a[1] == b[0] for a, b in pairwise(shapes))
    return all(a[0] == b[1] for a, b in pairwise(shapes))


def _search(shapes: list[tuple[str, tuple[int, int]]], transposed: bool) -> list[str] | None:
    """The one order that fits, if names do not give it; ``None`` if there is none or more than one."""
    if len(shapes) > _TOO_MANY_ORDERS:
        return None
    orders: list[list[str]] = []

    def extend(taken: list[str], width: int | None) -> None:
        if len(taken) == len(shapes):
            orders.append(taken)
            return
        for name, (rows, cols) in shapes:
            first, last = (rows, cols) if transposed else (cols, rows)
            if name not in taken and width in (None, first) and len(orders) < 2:
                extend([*taken, name], last)

    extend([], None)
    return orders[0] if len(orders) == 1 else None


def _stem(name: str) -> str:
    return re.sub(r"[._/]?(weight|kernel|w)(:0)?$", "", name, flags=re.IGNORECASE)


def _bias(weight: str, vectors: dict[str, Any]) -> str | None:
    """The bias of a weight: the same name with another last word, as every framework spells it."""
    pairs = (("weight", "bias"), ("kernel", "bias"), ("Weight", "Bias"), ("W", "b"), ("w", "b"))
    for mine, theirs in pairs:
        head, separator, tail = weight.rpartition(mine)
        name = f"{head}{theirs}{tail}"
        if separator and name in vectors:
            return name
    return None


def _transformer(folder: Path, network: Network) -> nn.Module:
    """The transformers model of a local directory; everything it could do beyond reading it is switched off."""
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedError(
            folder, "holds no safetensors weights; convert it first: pickled weights are not taken"
        )
    transformers = require("transformers", "transformers", "running a Hugging Face model")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(
            folder / "config.json", f"is not readable JSON ({type(error).__name__})"
        ) from None
    names = config.get("architectures") if isinstance(config, dict) else None
    class_name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "AutoModel"
    kind = getattr(transformers, class_name, None)
    if not isinstance(kind, type) or not hasattr(kind, "from_pretrained"):
        raise UnsupportedError(
            class_name, f"is not a model class of transformers, and code beside it is not run; {_ADVICE}"
        )
    with quiet_transformers(transformers):
        try:
            model, report = kind.from_pretrained(
                str(folder),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation="eager",
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInputError(folder, f"transformers cannot load it ({reason})") from error
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise BadInputError(
            folder, f"lacks {len(missing)} weights of {class_name}, first {missing[0]}; the files do not fit"
        )
    loaded: nn.Module = model.eval()
    return loaded


@contextmanager
def quiet_transformers(transformers: Any) -> Iterator[None]:
    """Keep transformers without bars and warnings, its settings put back afterwards."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
