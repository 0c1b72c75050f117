"""Learning coefficients of parts: each layer in turn, attention heads, groups of the data.

A part's coefficient varies its weights alone, all others held at their values (weight-refined, Wang et al. 2024); a
group's looks at its rows of the data alone (data-refined). Settings that depend on the network as a whole (``gamma``)
are chosen once, so that the values can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from strati.core.errors import BadInputError
from strati.core.results import Flag, Result, Tick, silent
from strati.evaluate.models import takes_tokens
from strati.io.layers import module_name
from strati.io.roles import Role, blocks, role_of
from strati.landscape.llc.estimate import LearningCoefficient
from strati.landscape.objective import FlatModel

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.schemas.json_types import PartsFields

Head = tuple[int, int]
"""Block and head, both from 0."""

_ATTENTION = (Role.QUERY, Role.KEY, Role.VALUE, Role.QKV, Role.ATTENTION_OUT)


@dataclass(frozen=True)
class PartCoefficients(Result):
    """Learning coefficients of several parts of one network.

    Attributes:
        parts: By the part's name, in the network's order.
    """

    verb: ClassVar[str] = "llc-parts"

    parts: Mapping[str, LearningCoefficient]

    def __getitem__(self, name: str) -> LearningCoefficient:
        """The coefficient of one part."""
        if name not in self.parts:
            raise BadInputError(name, f"no such part; there are: {', '.join(self.parts)}")
        return self.parts[name]

    def payload(self) -> PartsFields:
        """The fields of each part's coefficient, and its name; what a reader must know about all of them."""
        parts = [{"part": name, **part.payload()} for name, part in self.parts.items()]
        return {"parts": parts, "warnings": self.warnings}

    @property
    def warnings(self) -> tuple[Flag, ...]:
        """``different-settings`` where the parts do not have one ``nbeta`` and ``gamma``."""
        flag = different_settings(list(self.parts.values()))
        return () if flag is None else (flag,)

    def frame(self) -> pd.DataFrame:
        """One line per part."""
        import pandas as pd

        columns = (
            "estimate",
            "stderr",
            "nbeta",
            "gamma",
            "asymptotic",
            "asymptotic_stderr",
            "rhat",
            "ess",
            "reason",
        )
        rows = [
            {"part": name, "parameters": coefficient.traces.parameters}
            | {column: getattr(coefficient, column) for column in columns}
            for name, coefficient in self.parts.items()
        ]
        return pd.DataFrame(rows, columns=["part", "parameters", *columns])

    def summary(self) -> RenderableType:
        """The largest part, then all of them as a table with their settings."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import Column, table

        names = ("parameters", "lambda", "+-", "nbeta", "gamma")
        drawn = table(
            ["part", *(Column(name, right=True) for name in names)],
            (
                (
                    name,
                    part.traces.parameters,
                    part.estimate,
                    part.stderr,
                    f"{part.nbeta:.4g}",
                    f"{part.gamma:.4g}",
                )
                for name, part in self.parts.items()
            ),
        )
        values = {name: part.estimate for name, part in self.parts.items() if part.estimate is not None}
        first = f"{len(values)} of {len(self.parts)} parts have a learning coefficient"
        if values:
            largest = max(values, key=lambda name: values[name])
            first += f"; the largest is {values[largest]:.3g} ({largest})"
        return Group(Text(first + "."), drawn, *(Text(flag.text) for flag in self.warnings))

    def plot(self, **options: Any) -> Any:
        """Values of the parts with their errors."""
        from strati.report.plots.landscape import plot_parts

        return plot_parts(self, **options)


def different_settings(coefficients: Sequence[LearningCoefficient]) -> Flag | None:
    """What a reader must know where coefficients beside one another have different ``nbeta`` or ``gamma``."""
    nbetas, gammas = ({f"{getattr(c, name):.4g}" for c in coefficients} for name in ("nbeta", "gamma"))
    if len(nbetas) <= 1 and len(gammas) <= 1:
        return None
    spread = [
        f"{name} {', '.join(sorted(v, key=float))}"
        for name, v in (("nbeta", nbetas), ("gamma", gammas))
        if len(v) > 1
    ]
    return Flag(
        "different-settings", f"these coefficients cannot be compared: they have {' and '.join(spread)}"
    )


def layer_names(model: nn.Module, layers: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """The modules that hold parameters, in order; those that ``layers`` means where it is given.

    Examples:
        >>> layer_names(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
        ('0', '2')
    """
    return tuple(dict.fromkeys(module_name(name) for name in FlatModel(model, layers=layers).names))


def each(
    names: Sequence[str], run: Callable[[str], LearningCoefficient], tick: Tick = silent
) -> PartCoefficients:
    """Run one estimate per part."""
    coefficients = {}
    for name in names:
        coefficients[name] = run(name)
        tick(name)
    return PartCoefficients(coefficients)


def data_groups(groups: Any, rows: int) -> Iterator[tuple[str, Tensor]]:
    """Row numbers by label, labels in the order of their first row.

    Raises:
        BadInputError: There are not as many labels as rows.

    Examples:
        >>> [(name, rows.tolist()) for name, rows in data_groups(["a", "b", "a"], 3)]
        [('a', [0, 2]), ('b', [1])]
    """
    if not isinstance(groups, Iterable) or isinstance(groups, str):
        raise BadInputError("groups", "must be a list with one label per row")
    labels = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(labels) != rows:
        raise BadInputError("groups", f"{len(labels)} labels for {rows} rows; give one label per row")
    for label in dict.fromkeys(labels):
        yield str(label), torch.tensor([i for i, other in enumerate(labels) if other == label])


def rows_of(data: Any, index: Tensor) -> Any:
    """Some rows of ``x``, of ``(x, y)``, or of keyword inputs."""
    if isinstance(data, tuple):
        return tuple(rows_of(part, index) for part in data)
    if isinstance(data, Mapping):
        return {name: rows_of(part, index) for name, part in data.items()}
    return torch.as_tensor(data)[index]


def number_of_rows(x: Any) -> int:
    """How many rows inputs have."""
    return len(next(iter(x.values()))) if isinstance(x, Mapping) else len(x)


class PartModel(nn.Module):
    """A network as a function of some of its weights, all others fixed.

    Args:
        model: Any module.
        entries: Numbers of the entries that vary, by the name of the (flattened) parameter; see :func:`head_entries`.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, entries: Mapping[str, Tensor]) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # not a submodule: its parameters stay its own
        self.places = dict(entries)
        self.held = nn.ParameterDict()
        for name, index in self.places.items():
            value = dict(model.named_parameters())[name].detach().reshape(-1)[index]
            self.held[_key(name)] = nn.Parameter(value.clone())
        self.main_input_name = "input_ids" if takes_tokens(model) else "x"
        self.train(model.training)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """The model's output with the varied weights in place."""
        weights = {}
        parameters = dict(self.model.named_parameters())
        for name, index in self.places.items():
            original = parameters[name].detach()
            part = self.held[_key(name)]
            flat = original.reshape(-1).to(part.dtype).index_put((index,), part)
            weights[name] = flat.reshape(original.shape)
        dtype = next(iter(self.held.values())).dtype
        others = (*parameters.items(), *self.model.named_buffers())
        fixed = {n: t.detach().to(dtype) for n, t in others if t.is_floating_point()}
        return functional_call(self.model, fixed | weights, args, keywords)


def head_entries(model: nn.Module, head: Head) -> dict[str, Tensor]:
    """Which entries of which flattened parameters belong to one head: its rows of q, k, v, its columns of the output.

    Keys and values that several heads share are left out.

    Raises:
        BadInputError: There is no such head, or the number of heads is not known.
    """
    block, number = head
    count, shared = head_counts(model)
    if not 0 <= number < count:
        raise BadInputError("heads", f"no head {number}; there are {count}, from 0 to {count - 1}")
    parameters = dict(model.named_parameters())
    numbers = blocks(list(parameters))
    entries: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        role = role_of(f"{module_name(name)}.weight", numbers[name])
        if numbers[name] != block or role not in _ATTENTION:
            continue
        transposed = type(model.get_submodule(module_name(name))).__name__ == "Conv1D"
        entries[name] = _entries(parameter, role, number, count, shared, transposed=transposed)
    if not entries:
        with_attention = attention_blocks(model)
        span = (
            f"blocks with attention are {with_attention[0]} to {with_attention[-1]}"
            if with_attention
            else "no attention was recognised"
        )
        raise BadInputError("heads", f"no attention weights in block {block}; {span}")
    return {name: index for name, index in entries.items() if len(index)}


def attention_blocks(model: nn.Module) -> list[int]:
    """Numbers of the blocks that have attention weights."""
    numbers = blocks([name for name, _ in model.named_parameters()])
    return sorted({b for name, b in numbers.items() if b is not None and role_of(name, b) in _ATTENTION})


def _entries(
    parameter: Tensor, role: Role, head: int, count: int, shared: int, *, transposed: bool
) -> Tensor:
    index = torch.arange(parameter.numel()).reshape(parameter.shape)
    if transposed and index.ndim == 2:
        index = index.T  # (outputs, inputs), as a linear layer has it
    if role is Role.ATTENTION_OUT:
        if index.ndim == 1:
            return index[:0]  # the bias of the output belongs to no head
        return index.reshape(len(index), count, -1)[:, head].reshape(-1)
    if role is Role.QKV:
        third = index.reshape(3, count, -1, *index.shape[1:]) if shared == count else None
        if third is None:
            raise BadInputError("heads", "fused q, k, v with shared keys and values are not supported")
        return third[:, head].reshape(-1)
    if role is not Role.QUERY and shared != count:
        return index.reshape(-1)[:0]  # keys and values that heads share belong to none of them
    return index.reshape(count, -1, *index.shape[1:])[head].reshape(-1)


def head_counts(model: nn.Module) -> tuple[int, int]:
    """How many attention heads a block has, and how many of keys and values.

    Raises:
        BadInputError: The number of heads is not known.
    """
    config = getattr(model, "config", model)
    for name in ("num_attention_heads", "n_head", "n_heads", "num_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count > 0:
            shared = getattr(config, "num_key_value_heads", None)
            return count, shared if isinstance(shared, int) and shared > 0 else count
    raise BadInputError(
        "heads", "the number of heads is not known: the model has no config.num_attention_heads"
    )


def _key(name: str) -> str:
    return name.replace(".", "/")
