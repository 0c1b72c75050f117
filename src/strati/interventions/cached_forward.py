"""Performance of a network under many changes of one layer, computing nothing twice.

What comes before the changed layer is computed once and replayed, and all changes of the layer share one pass. This
gives what full forward passes give. Plain MLPs have a faster way (:class:`strati.interventions.evaluator.ChainProbe`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from strati.interventions.batched_edits import Stacking, agrees, repeated, stacked_outputs
from strati.interventions.metrics import Disagreement, as_rows
from strati.interventions.targets import Change, Target, changed, replaced_forward
from strati.interventions.tasks import Measurement, ScoreAccumulator, Scores, Task, measured

_MOST_BYTES = 400_000_000
"""Recordings kept from one layer to the next."""


def whole_scores(model: nn.Module, task: Task) -> Scores:
    """Scores of a module as it is."""
    tally = ScoreAccumulator(task)
    with torch.inference_mode():
        for inputs, targets in task.batches:
            tally.add(task.output(model, inputs), targets)
    return tally.result()


def whole_performance(model: nn.Module, task: Task) -> float:
    """Performance of a module as it is."""
    return whole_scores(model, task).performance


def measure_module(
    model: nn.Module,
    task: Task,
    target: Target,
    changes: Sequence[Change],
    *,
    activations: bool = True,
    tapes: ActivationCache | None = None,
) -> list[Measurement]:
    """Performance of any module under the changes of one layer, replaying what ran before the layer.

    ``tapes`` of an earlier layer of the same network shorten the recorded pass.
    """
    tapes = tapes or ActivationCache()
    both = Disagreement(len(changes))
    tallies = [ScoreAccumulator(task) for _ in changes]
    with torch.inference_mode():
        for number, (inputs, targets) in enumerate(task.batches):
            run = partial(task.output, model, inputs)
            tape = tapes.record(model, target.name, number, run)
            outcomes = _outputs(model, task, target, changes, tape, inputs, tapes.stacking)
            for i, (logits, heard) in enumerate(outcomes):
                tallies[i].add(logits, targets)
                if activations and tape.output is not None and heard is not None:
                    both.add_one(i, as_rows(tape.output, target.kind), as_rows(heard, target.kind))
    return measured(tallies, both if activations else None)


def _outputs(
    model: nn.Module,
    task: Task,
    target: Target,
    changes: Sequence[Change],
    tape: Recording,
    inputs: Tensor,
    stacking: Stacking,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The network's answers on one batch and the layer's outputs, change by change; several share a pass."""
    size, done = stacking.size(model, target, tape), 0
    while done < len(changes):
        part = changes[done : done + size]
        done += len(part)
        if len(part) == 1:
            yield _alone(model, task, target, part[0], tape, inputs)
        elif stacking.known(target):
            yield from zip(*stacked_outputs(model, task, target, part, tape, inputs), strict=True)
        else:  # the first of a kind: one change both ways
            yield from _tried(model, task, target, part, tape, inputs, stacking)
            size = stacking.size(model, target, tape)


def _tried(
    model: nn.Module,
    task: Task,
    target: Target,
    changes: Sequence[Change],
    tape: Recording,
    inputs: Tensor,
    stacking: Stacking,
) -> list[tuple[Tensor, Tensor | None]]:
    """Some changes in one pass, if that gives the last of them the answers it has alone; otherwise each alone."""
    alone = _alone(model, task, target, changes[-1], tape, inputs)
    answers: list[tuple[Tensor, Tensor | None]] = []
    try:
        answers = list(zip(*stacked_outputs(model, task, target, changes, tape, inputs), strict=True))
    except (
        Exception
    ):  # any code of the network's own: one that does not take a larger batch is measured without
        holds = False
    else:
        holds = agrees(alone[0], answers[-1][0])
    stacking.learn(target, holds, alone[0])
    if holds:
        return answers
    return [*(_alone(model, task, target, c, tape, inputs) for c in changes[:-1]), alone]


def _alone(
    model: nn.Module, task: Task, target: Target, change: Change, tape: Recording, inputs: Tensor
) -> tuple[Tensor, Tensor | None]:
    with changed(model, target, change), tape.replayed() as heard:
        logits = task.output(model, inputs)
    return logits, heard[0] if heard else None


class _Reached(Exception):  # noqa: N818  (no error: the recorded pass has seen all it needs)
    """Ends the recorded pass at the first part that depends on the layer."""


class Recording:
    """The outputs of all parts of a network that do not depend on a given layer, up to the first that does.

    Parts are the modules beside the layer and beside each module around it. Replaying, they return what they
    returned, whatever they contain, so only the layer and what depends on it is computed. Beside what runs before the
    layer this holds its siblings that get the same input, such as the keys and values beside the queries. The recorded
    pass itself ends at the first part that depends on the layer: nothing after it is worth keeping.
    """

    def __init__(self, model: nn.Module, layer: str) -> None:
        self._layer = model.get_submodule(layer)
        self._parts = _parts_around(model, layer)
        self._waiting = set(_siblings(model, layer))
        self._tape: dict[nn.Module, list[Any]] = {}
        self._given: Tensor | None = None  # the layer's input itself; ``input`` is a copy
        self._stack = ExitStack()
        self._reached = False
        self.input: Tensor | None = None
        self.output: Tensor | None = None

    def __enter__(self) -> Recording:
        hooks: list[Any] = [
            self._layer.register_forward_pre_hook(self._reach, with_kwargs=True),
            self._layer.register_forward_hook(self._keep),
            *(part.register_forward_pre_hook(self._enter_part, with_kwargs=True) for part in self._parts),
            *(part.register_forward_hook(self._record) for part in self._parts),
        ]
        for hook in hooks:
            self._stack.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._given = None

    def run(self, forward: Callable[[], object]) -> None:
        """Run the network until something depends on the layer; one that never gets there runs to its end."""
        with suppress(_Reached):
            forward()

    @contextmanager
    def replayed(self, times: int = 1, batch: int = 0) -> Iterator[list[Tensor]]:
        """Within, recorded parts answer from the tape; the list gets the layer's outputs as they come.

        With ``times``, whatever starts with the ``batch`` is repeated as often.
        """
        heard: list[Tensor] = []
        with ExitStack() as stack:
            hook = self._layer.register_forward_hook(lambda _m, _a, output: heard.append(_tensor(output)))
            stack.callback(hook.remove)
            for part, outputs in self._tape.items():
                stack.enter_context(_answering(part, outputs, partial(repeated, times=times, batch=batch)))
            yield heard

    def _reach(self, _module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._reached:  # a layer that is used twice: what comes now depends on it
            raise _Reached
        self._reached = True
        first = inputs[0] if inputs else next(iter(options.values()), None)
        if isinstance(first, Tensor):
            self._given, self.input = first, first.clone()

    def _keep(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.output = _tensor(output).clone()
        if not self._waiting:
            raise _Reached

    def _enter_part(self, _module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._reached and not self._independent((inputs, options)):
            raise _Reached

    def _record(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        # A copy: what follows may add to the tensor in place.
        self._tape.setdefault(module, []).append(_copy(output))
        self._waiting.discard(module)
        if self._reached and not self._waiting:
            raise _Reached

    def _independent(self, arguments: Any) -> bool:
        """Whether a part is given the layer's own input and no other tensor, and it is unchanged."""
        tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
        if self.input is None or not tensors or any(t is not self._given for t in tensors):
            return False
        return torch.equal(tensors[0], self.input)

    @property
    def reached(self) -> bool:
        """Whether the pass got to the layer."""
        return self._reached

    @property
    def size(self) -> int:
        """Bytes on the tape."""
        tensors = tree_leaves(list(self._tape.values()))
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


class ActivationCache:
    """The recordings of the layer measured last, batch by batch: the next layer's recorded pass starts where they end.

    Layers are measured in the network's order, so that without these every layer would run all that is before it.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Recording] = {}
        self._sizes: dict[int, int] = {}

    @cached_property
    def stacking(self) -> Stacking:
        """How many changes of a layer may share a pass."""
        return Stacking()

    def record(self, model: nn.Module, layer: str, batch: int, run: Callable[[], object]) -> Recording:
        """Record one batch up to a layer, with the help of the recording before it."""
        before = self._kept.pop(batch, None)
        self._sizes.pop(batch, None)
        tape = _recorded(model, layer, run, before)
        if not tape.reached and before is not None:  # the layer lies before the one recorded last
            tape = _recorded(model, layer, run, None)
        if sum(self._sizes.values()) + tape.size <= _MOST_BYTES:
            self._kept[batch], self._sizes[batch] = tape, tape.size
        return tape


def _recorded(model: nn.Module, layer: str, run: Callable[[], object], before: Recording | None) -> Recording:
    with ExitStack() as stack:
        if before is not None:
            stack.enter_context(before.replayed())
        tape = stack.enter_context(Recording(model, layer))
        tape.run(run)
    return tape


@contextmanager
def _answering(part: nn.Module, outputs: list[Any], copy: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A module that returns copies of recorded outputs for its first calls, then works again."""
    original: Callable[..., Any] = part.forward
    left = iter(outputs)
    nothing = object()

    def answer(*args: Any, **options: Any) -> Any:
        recorded = next(left, nothing)
        return original(*args, **options) if recorded is nothing else tree_map_only(Tensor, copy, recorded)

    with replaced_forward(part, answer):
        yield


def _tensor(output: Any) -> Tensor:
    """What a layer or block returns: a tensor, or a tuple that starts with it."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def _parts_around(model: nn.Module, layer: str) -> list[nn.Module]:
    parts: list[nn.Module] = []
    words = layer.split(".")
    for depth, word in enumerate(words):
        around = model.get_submodule(".".join(words[:depth]))
        for name, child in around.named_children():
            if name != word:
                parts += _callable_parts(child)
    return list(dict.fromkeys(parts))


def _siblings(model: nn.Module, layer: str) -> list[nn.Module]:
    """The modules in the same parent that may get the layer's own input."""
    around, _, word = layer.rpartition(".")
    children = model.get_submodule(around).named_children()
    return [part for name, child in children if name != word for part in _callable_parts(child)]


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    """A list of modules is never called itself; its members are."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [part for child in module.children() for part in _callable_parts(child)]
    return [module]


def _copy(value: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, value)
