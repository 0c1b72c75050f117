"""What is recorded of a changed layer beside performance: data-free metrics, distances, and what the data say.

Data-free: every number of :meth:`strati.Spectrum.metrics`. With data: activation disagreement and Jensen-Shannon
divergence between the outputs of the intact and the changed layer (robust-and-critical-layers, section 4.3).
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.errors import BadInputError, StratiError, UnsupportedError
from strati.interventions.kinds import run_length, unit_of
from strati.interventions.targets import Change, Target, as_matrices, as_matrix, find_targets, values_of
from strati.interventions.tasks import IGNORED

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from strati.interventions.evaluator import Evaluator
    from strati.interventions.study_config import StudyConfig
    from strati.interventions.tasks import Task


Plugin = Callable[..., float]
"""``matrix -> number`` or ``(intact matrix, changed matrix) -> number``."""


def spectral_metrics(
    matrix: NDArray[Any] | Sequence[NDArray[Any]], *, htsr: bool = False, seed: int = 0
) -> dict[str, float | None]:
    """All numbers of the spectrum of a matrix, or of several whose eigenvalues are pooled, by the names of ``scan``.

    With ``htsr`` also those of ``scan --htsr``; ``seed`` is that of their permutations.

    Examples:
        >>> found = spectral_metrics(np.diag([3.0, 4.0]))
        >>> found["frobenius_norm"], found["spectral_norm"]
        (5.0, 4.0)
    """
    from strati.spectra.spectrum import spectrum

    numbers = spectrum(matrix, htsr=htsr, seed=seed).metrics()
    return {name: value for name, value in numbers.items() if _is_number(value)}


def distances(
    intact: tuple[NDArray[Any], NDArray[Any] | None], changed: tuple[NDArray[Any], NDArray[Any] | None]
) -> dict[str, float | None]:
    """How far the weight was moved: ``||W' - W||_F``, and the same relative to ``||W||_F``.

    Examples:
        >>> distances((np.eye(2), None), (np.zeros((2, 2)), None))["relative_distance"]
        1.0
    """
    before, after = intact[0].astype(float), changed[0].astype(float)
    moved, size = float(np.linalg.norm(after - before)), float(np.linalg.norm(before))
    return {"distance": moved, "relative_distance": moved / size if size > 0 else None}


class Disagreement:
    """Activation disagreement and Jensen-Shannon divergence of two layers' outputs, added up over batches.

    Disagreement is the mean over data and neurons of ``[O > 0] != [M > 0]`` in percent; divergence the mean over
    data of ``JS(softmax(O), softmax(M))`` in nats.

    Examples:
        >>> import torch
        >>> both = Disagreement(1)
        >>> both.add(torch.tensor([[1.0, -1.0]]), torch.tensor([[[1.0, 1.0]]]))
        >>> both.result(0)["activation_disagreement"]
        50.0
    """

    def __init__(self, changes: int) -> None:
        self._differ, self._divergence = np.zeros(changes), np.zeros(changes)
        self._neurons, self._rows = np.zeros(changes), np.zeros(changes)

    def add(self, intact: Tensor, changed: Tensor) -> None:
        """A batch: the intact outputs (rows, neurons) and those of every change (changes, rows, neurons)."""
        for i, outputs in enumerate(changed):
            self.add_one(i, intact, outputs)

    def add_one(self, change: int, intact: Tensor, outputs: Tensor) -> None:
        """A batch of one change."""
        import torch

        self._differ[change] += int(((intact > 0) != (outputs > 0)).sum())
        p, q = torch.softmax(intact.float(), -1), torch.softmax(outputs.float(), -1)
        both = (p + q).clamp_(min=torch.finfo(p.dtype).tiny)
        # With d = (p - q)/(p + q) the terms are p ln(1 + d) + q ln(1 - d): differences of logarithms lose the digits of
        # small divergences. At d = 1 the second is 0 ln 0; the largest float32 below 1 makes it zero.
        d = ((p - q) / both).clamp_(-1 + 2.0**-23, 1 - 2.0**-23)
        each = p * torch.log1p(d) + q * torch.log1p(-d)
        self._divergence[change] += 0.5 * float(each.sum(dtype=torch.float64))
        self._neurons[change] += intact.numel()
        self._rows[change] += intact.shape[0]

    def result(self, change: int) -> dict[str, float | None]:
        """The two numbers of one change; not defined when an output was not finite."""
        if self._rows[change] == 0:
            return {"activation_disagreement": None, "js_divergence": None}
        divergence = float(self._divergence[change] / self._rows[change])
        return {
            "activation_disagreement": 100.0 * float(self._differ[change] / self._neurons[change]),
            "js_divergence": max(0.0, divergence) if math.isfinite(divergence) else None,
        }


def as_rows(output: Tensor, kind: str) -> Tensor:
    """A layer's output as (data, neurons): pixels of a convolution are neurons, tokens are data."""
    if kind == "conv":
        return output.reshape(output.shape[0], -1)
    return output.reshape(-1, output.shape[-1])


def degeneracy_metrics(model: torch.nn.Module, x: Tensor) -> dict[str, dict[str, float | None]]:
    """What ``degeneracy`` counts on the data, by layer: its ranks and free directions.

    ``activation_rank`` is of what goes into the layer, which no change of the layer itself can alter; ``output_rank``
    is of what the next layer gets, ``jacobian_rank`` of how the network's output depends on the layer's.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> found = degeneracy_metrics(net, torch.eye(3))
        >>> sorted(found), found["0"]["output_rank"] == found["2"]["activation_rank"]
        (['0', '2'], True)
    """
    from strati.landscape.counts.degeneracy import degeneracy

    try:
        layers = degeneracy(model, x, exact=False).layers
    except UnsupportedError:  # networks that cannot be counted have no such columns
        return {}
    by_layer: dict[str, dict[str, float | None]] = {}
    for layer, after in zip(layers, (*layers[1:], None), strict=True):
        follows = after is not None and after.inputs == layer.outputs
        by_layer[layer.name] = {
            "activation_rank": float(layer.activation_rank),
            "output_rank": float(after.activation_rank) if after is not None and follows else None,
            "jacobian_rank": float(layer.jacobian_rank),
            "free_directions": float(layer.free),
        }
    return by_layer


def check_plugins(plugins: Mapping[str, Plugin]) -> dict[str, int]:
    """How many matrices each metric of the user's takes, one or two.

    Raises:
        BadInputError: A metric takes another number of arguments, or is not a function.
    """
    arguments = {}
    for name, function in plugins.items():
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise BadInputError(f"metric {name}", "is not a function with a readable signature") from None
        needed = [
            p
            for p in parameters
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(needed) not in (1, 2):
            raise BadInputError(f"metric {name}", "takes one matrix, or the intact and the changed one")
        arguments[name] = len(needed)
    return arguments


def plugin_metrics(
    plugins: Mapping[str, Plugin], intact: NDArray[Any], changed: NDArray[Any]
) -> tuple[dict[str, float | None], list[str]]:
    """The user's metrics of one changed matrix; one that raises is not defined there, with a note saying why."""
    takes = check_plugins(plugins)
    numbers: dict[str, float | None] = {}
    notes = []
    for name, function in plugins.items():
        try:
            numbers[name] = float(function(changed) if takes[name] == 1 else function(intact, changed))
        except Exception as error:  # the user's function: the row keeps its other numbers
            numbers[name] = None
            notes.append(f"metric {name} raised {type(error).__name__}: {error}")
    return numbers, notes


def _is_number(entry: Any) -> bool:
    return entry is None or (isinstance(entry, int | float | np.number) and not isinstance(entry, bool))


_MOST_ROWS = 16_384
"""Rows of a batch that count, evenly spread: a convolution has one for every pixel."""
_DAMPING = 0.01
_OUTLIER = 5.0
"""OWL's M: an outlier is that many times the layer's mean."""


class LayerBaselines:
    """Second moments of a layer's inputs, and the scores of its changes by them.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> target = Target("0", "linear", "linear", (1, 2), False)
        >>> scores = LayerBaselines(net, target)
        >>> scores.add(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # the second input is never used
        >>> w = net[0].weight.detach().numpy().copy()
        >>> w[0, 1] = 0.0
        >>> scores.of(Change("zero", 0, w, None, ""))["activation_error"]
        0.0
    """

    def __init__(self, model: nn.Module, target: Target) -> None:
        self.target = target
        self._module: Any = model.get_submodule(target.name)
        self._weight = as_matrix(values_of(model, target)[0], target.kind).astype(np.float64)
        side = self._weight.shape[0 if target.kind == "embedding" else 1]
        diagonal = target.kind == "embedding"
        self._moments: NDArray[np.float64] = np.zeros(side if diagonal else (side, side))
        self._rows = 0
        self._inverse: NDArray[np.float64] | None = None

    def add(self, inputs: Tensor, _output: Tensor | None = None) -> None:
        """A batch of what goes into the layer."""
        if self.target.kind == "embedding":
            tokens = inputs.reshape(-1)
            self._moments += np.bincount(tokens.numpy(), minlength=len(self._moments))
            self._rows += len(tokens)
            return
        rows = self._as_rows(inputs)
        if rows is None:
            return
        rows = rows[:: max(1, -(-len(rows) // _MOST_ROWS))].double()
        self._moments += (rows.T @ rows).numpy()
        self._rows += len(rows)

    def of(self, change: Change) -> dict[str, float | None]:
        """The scores of a change; those of the inputs are not defined where none were seen."""
        d = as_matrix(change.values, self.target.kind).astype(np.float64) - self._weight
        if self._rows == 0 or not np.isfinite(self._moments).all():
            unknown = ("activation_error", "wanda_score", "gptq_error", "snr", "outlier_ratio")
            return self._of_weights(d) | dict.fromkeys(unknown)
        w, h = self._weight, self._moments / self._rows
        if self.target.kind == "embedding":
            error, size = _weighted_rows(d, h), _weighted_rows(w, h)
            norms = np.sqrt(h)[:, None]
            curvature = 2 * h[:, None] + 2 * _DAMPING * h.mean()
        else:
            error, size = (float(np.einsum("ij,ij->", m @ h, m)) for m in (d, w))
            norms = np.sqrt(np.diag(h))[None]
            curvature = 1.0 / self._inverse_diagonal(h)[None]
        importance = np.abs(w) * norms
        lost, total = float((np.abs(d) * norms).sum()), float(importance.sum())
        outliers = importance > _OUTLIER * importance.mean()
        return self._of_weights(d) | {
            "snr": 10 * math.log10(size / error) if error > 0 and size > 0 else None,
            "outlier_ratio": 100.0 * float(outliers.mean()),
            "activation_error": math.sqrt(max(error, 0.0) / size) if size > 0 else None,
            "wanda_score": lost / total if total > 0 else None,
            "gptq_error": float((d**2 * curvature).sum()),
        }

    def _of_weights(self, d: NDArray[np.float64]) -> dict[str, float | None]:
        w = self._weight
        centred = w - w.mean()
        variance, lost, size = float((centred**2).mean()), float((d**2).sum()), float((w**2).sum())
        return {
            "sqnr": 10 * math.log10(size / lost) if lost > 0 and size > 0 else None,
            "kurtosis": float((centred**4).mean()) / variance**2 - 3 if variance > 0 else None,
        }

    def _inverse_diagonal(self, h: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._inverse is None:
            mean = float(np.diag(h).mean()) or 1.0
            damped = 2 * h + 2 * _DAMPING * mean * np.eye(len(h))
            self._inverse = np.diag(np.linalg.inv(damped)).copy()
        return self._inverse

    def _as_rows(self, inputs: Tensor) -> Tensor | None:
        if self.target.kind != "conv":
            return inputs.reshape(-1, inputs.shape[-1])
        module = self._module
        if inputs.ndim != 4 or module.groups != 1 or isinstance(module.padding, str):
            return None
        # Every pixel is a row: few images are enough, and unfolding all would cost many times their memory.
        per_image = max(1, inputs.shape[2] * inputs.shape[3] // (module.stride[0] * module.stride[1]))
        few = inputs[: max(1, 4 * _MOST_ROWS // per_image)]
        patches = functional.unfold(few, module.kernel_size, module.dilation, module.padding, module.stride)
        return patches.transpose(1, 2).reshape(-1, patches.shape[1])


class BlockInfluence:
    """How far each run of blocks turns its input, measured in one pass of the intact network."""

    def __init__(self, model: nn.Module, task: Task, target: Target) -> None:
        self.target = target
        self._sums = dict.fromkeys(target.members, 0.0)
        self._angles = dict.fromkeys(target.members, 0.0)
        self._count = 0
        self._measure(model, task)

    def of(self, change: Change) -> dict[str, float | None]:
        """The influence and the angular distance of the blocks changed together."""
        if not self._count:
            return {"block_influence": None, "angular_distance": None}
        last = change.blocks[-1]
        return {
            "block_influence": 1.0 - self._sums[last] / self._count,
            "angular_distance": self.angular_distance(last),
        }

    def angular_distance(self, last: str) -> float:
        """The angle between what enters the first block and what leaves ``last``, over pi, averaged over tokens."""
        return self._angles[last] / self._count

    @torch.inference_mode()
    def _measure(self, model: nn.Module, task: Task) -> None:
        first: list[Tensor] = []
        turned: dict[str, Tensor] = {}

        def start(_module: Any, args: Any, options: Any) -> None:
            first[:] = [args[0] if args else next(iter(options.values()))]

        hooks: list[Any] = [
            model.get_submodule(self.target.name).register_forward_pre_hook(start, with_kwargs=True)
        ]
        for name in self.target.members:

            def end(_module: Any, _args: Any, output: Any, name: str = name) -> None:
                first_output = output[0] if isinstance(output, tuple) else output
                turned[name] = _cosines(first[0], first_output)

            hooks.append(model.get_submodule(name).register_forward_hook(end))
        try:
            for inputs, _ in task.batches:
                turned.clear()
                task.output(model, inputs)
                real = inputs != IGNORED if not inputs.is_floating_point() else None
                for name, cosines in turned.items():
                    counted = cosines[real] if real is not None and real.shape == cosines.shape else cosines
                    self._sums[name] += float(counted.sum(dtype=torch.float64))
                    angles = torch.arccos(counted.double().clamp(-1.0, 1.0)) / math.pi
                    self._angles[name] += float(angles.sum())
                self._count += counted.numel() if turned else 0
        finally:
            for hook in hooks:
                hook.remove()


def _cosines(before: Tensor, after: Tensor) -> Tensor:
    """One cosine per token, or per image."""
    if before.ndim == 4:
        before, after = before.flatten(1), after.flatten(1)
    return functional.cosine_similarity(before.float(), after.float(), dim=-1)


def _weighted_rows(matrix: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    return float((matrix**2).sum(1) @ weights)


Metrics = Mapping[str, float | None]
_LOSS = "behavioural-kl"
_CHAINS, _DRAWS = 8, 50  # errors of a few percent: layers differ by far more


def trained_metrics(evaluator: Evaluator, target: Target, config: StudyConfig) -> dict[str, float | None]:
    """Counts and learning coefficient of a trained layer, where the study asks for them and there are data."""
    counts = dict(_counts(evaluator, config).get(target.name, {}))
    return counts | (_coefficient(evaluator, target.name, config) if not target.composite else {})


def block_metrics(evaluator: Evaluator, target: Target, config: StudyConfig) -> dict[str, Metrics]:
    """The metrics of every block of a stack that a run of blocks from ``target`` on may hold, by name."""
    longest = max(
        run_length(intervention.name, dict(s))
        for intervention in config.interventions
        if unit_of(intervention.name) == "block"
        for s in intervention.settings
    )
    for name in target.members[:longest]:
        if name not in evaluator.inside:
            evaluator.inside[name] = _of_block(evaluator, name, config)
    return {name: evaluator.inside[name] for name in target.members[:longest]}


def mean_metrics(parts: Sequence[Metrics]) -> dict[str, float | None]:
    """The mean of each metric over the parts that have it; ``None`` where none has.

    Examples:
        >>> mean_metrics([{"alpha": 2.0, "mu": None}, {"alpha": 4.0, "mu": None}])
        {'alpha': 3.0, 'mu': None}
    """
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        defined = [value for part in parts if (value := part.get(name)) is not None and np.isfinite(value)]
        means[name] = float(np.mean(defined)) if defined else None
    return means


def learning_coefficient(
    model: nn.Module, inputs: Tensor, weights: str, *, seed: int = 0, **options: Any
) -> tuple[float | None, float | None]:
    """The local learning coefficient of the network's behaviour when only some weights vary, and its standard error.

    The loss is the mean Kullback-Leibler divergence from the trained network's own answers: the trained weights are
    a minimum of it, whatever they were trained on. All layers of a network are localised alike. Not defined where the
    chains do not mix; nor where the network cannot be sampled, and then a warning says why.

    Examples:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3))
        >>> value, error = learning_coefficient(net, torch.randn(60, 2), "0", chains=4, draws=100)
        >>> 0 < value < 4.5  # below half of its nine weights
        True
    """
    from strati.landscape.llc.config import LLCConfig
    from strati.landscape.llc.llc import llc
    from strati.landscape.llc.posterior import default_gamma
    from strati.landscape.objective import FlatModel

    x = inputs if inputs.is_floating_point() else inputs.clamp(min=0)
    try:
        options.setdefault("gamma", default_gamma(FlatModel(model).theta))
        config = LLCConfig(ladder=False, seed=seed, **options)
        estimate = llc(model, _LOSS, x, layers=[weights], config=config)
    except StratiError as error:  # the study goes on without this number
        warnings.warn(f"no learning coefficient of {weights}: {error}", RuntimeWarning, stacklevel=2)
        return None, None
    return estimate.estimate, estimate.stderr


def _of_block(evaluator: Evaluator, name: str, config: StudyConfig) -> Metrics:
    layers = [t for t in find_targets(evaluator.model) if t.name.startswith(f"{name}.")]
    counts = _counts(evaluator, config)
    parts: list[dict[str, float | None]] = []
    for layer in layers:
        weight = values_of(evaluator.model, layer)[0]
        matrices = as_matrices(weight, layer.kind)
        spectral = spectral_metrics(matrices, htsr=config.htsr, seed=config.seed) if config.spectral else {}
        parts.append(spectral | dict(counts.get(layer.name, {})))
    return mean_metrics(parts) | _coefficient(evaluator, f"{name}.*", config)


def _counts(evaluator: Evaluator, config: StudyConfig) -> Mapping[str, Metrics]:
    if not config.degeneracy or evaluator.task is None:
        return {}
    if evaluator.counts is None:
        evaluator.counts = degeneracy_metrics(evaluator.model, evaluator.task.batches[0][0][: config.samples])
    return evaluator.counts


def _coefficient(evaluator: Evaluator, weights: str, config: StudyConfig) -> dict[str, float | None]:
    if not config.learning_coefficient or evaluator.task is None:
        return {}
    inputs = evaluator.task.batches[0][0][: config.samples]
    estimate, error = learning_coefficient(
        evaluator.model, inputs, weights, seed=config.seed, chains=_CHAINS, draws=_DRAWS
    )
    return {"learning_coefficient": estimate, "learning_coefficient_stderr": error}
