"""With data: does the rebuilt network predict them, and which permutations of pieces make it agree with its outputs?

The loss is that of the next token for a decoder; with recorded outputs it is the mean squared error to them, for any
network. Recorded outputs are regressed on the effects of all exchanges at once, and a permutation is kept only if the
true error falls: first on as few rows and tokens as fix the permutations, where a run takes a fraction of the time,
then on all of them. Where the outputs are not reached in the end, matrices are left where the weights put them unless
the data explain the change nearly in full. A loss alone decides the direction only. Needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.assignment import assign
from strati.core.errors import BadInputError, UnsupportedError
from strati.core.plugins import require
from strati.core.results import Flag, Tick, silent
from strati.core.rng import stream
from strati.io.to_module import quiet_transformers
from strati.reassembly.residual.search import centred, posterior_means
from strati.reassembly.transformer.blueprint import slots_of, unit_kinds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.reassemble import ReassembleConfig
    from strati.reassembly.transformer.result import TransformerReassembly

    Matrix = NDArray[np.float64]

Socket = tuple[str, int]
"""A place for one piece: the slot's role and the number of the block."""

Move = Mapping[Socket, Socket]
"""Sockets, each with the one whose piece it gets; all others keep theirs."""

Entity = list[tuple[Socket, ...]]
"""What may change places: each member is one socket, or several whose pieces move together."""

EXACT = 1e-9
"""Mean squared error, as a share of the outputs' variance, below which given outputs agree to rounding (float32)."""

_NOT_CAUSAL = ("bert", "roberta", "distilbert")
"""Networks of tokens that do not predict the next one."""

_EXPLAINED = 1e-3
"""Share of the error that moves of matrices may leave to be believed where the outputs are not reached."""

_ENOUGH = 16384
_ROWS, _TOKENS = 2, 12
"""Numbers of the outputs that tell one arrangement from another, several times as many as are regressed at once; rows
and tokens that a decoder is tried on first, where their outputs have so many numbers."""

_ON_STREAM = ("out.bias", "down.bias")
"""Biases that are added to the stream, not to neurons."""

_NOISES = (1.0, 30.0, 1e3)
"""The likeliest noise of the regression times these: the linear picture's own errors are many times larger at first."""

_COORDINATES = 4096
_ROUNDS = 18
_SURE, _DOUBTFUL = 0.97, 0.3
"""Numbers of the outputs used; rounds at most; belief that a piece is in its place, where its margin is sure or not."""


def verified(
    answer: TransformerReassembly, data: Any, outputs: Any, config: ReassembleConfig, *, tick: Tick = silent
) -> TransformerReassembly:
    """Check the answer with data, and repair it by recorded outputs.

    Raises:
        BadInputError: The data do not fit the network, or say nothing (no outputs, and no decoder's next token).
    """
    inputs, targets = _inputs(answer, data, outputs, config)
    model = PlacedModel(answer, inputs, targets)
    began = time.monotonic()

    def late(share: float = 1.0) -> bool:
        return time.monotonic() - began > share * config.seconds

    if targets is not None:
        _repair(model, set(answer.uncertain), late, tick)
    elif any(flag.code == "direction-uncertain" for flag in answer.warnings):
        model.consider(model.reversal())
    warnings = [flag for flag in answer.warnings if flag.code != "direction-uncertain"]
    if late():
        text = "stopped at the time limit: another move may lower the loss; give it more time"
        warnings.append(Flag("time", text))
    elif not model.exact:
        warnings.append(Flag("local", "the order is the best found with these data"))
    blocks, vectors = model.answer()
    moved = {n for old, new in zip(answer.blocks, blocks, strict=True) for r, n in old.items() if n != new[r]}
    return replace(
        answer,
        blocks=blocks,
        vectors=vectors,
        loss=model.loss,
        exact=None if targets is None else model.exact,
        warnings=tuple(warnings),
        uncertain=() if model.exact else tuple(sorted({*answer.uncertain, *moved})),
    )


def answers(answer: TransformerReassembly, data: Any, config: ReassembleConfig) -> NDArray[np.float64]:
    """What the network answers with its pieces where ``answer`` has them: outputs to record, or to compare.

    Raises:
        BadInputError: The data do not fit the network.
    """
    model = PlacedModel(answer, _module_inputs(answer, np.asarray(data), config), None)
    return np.asarray(model.run().double().numpy())


def _repair(model: PlacedModel, doubtful: set[int], late: Callable[..., bool], tick: Tick) -> None:
    inputs, targets = model.inputs, model.targets
    assert targets is not None  # recorded outputs are what this is about
    first, before = dict(model.numbers), model.loss
    model.consider(model.reversal())
    sets = _entity_sets(model)
    few = _fewer(inputs, targets, model.causal)
    if few is not None:
        model.look_at(*few)
        _refine(model, sets, doubtful, lambda: late(0.5))
        model.look_at(inputs, targets)
        tick(f"on {len(few[1])} rows, loss {model.loss:.4g}")
    if not model.exact:
        _refine(model, sets, doubtful, late)
        tick(f"regressed, loss {model.loss:.4g}")
    if not model.exact and model.loss > _EXPLAINED * before:
        at = {number: socket for socket, number in model.numbers.items()}
        model.make({socket: at[n] for socket, n in first.items() if at[n] != socket})
        _refine(model, sets[:1], doubtful, late)


class PlacedModel:
    """The network with its pieces as an answer has them, on some data; it is run from the first changed block on."""

    def __init__(
        self, answer: TransformerReassembly, inputs: Mapping[str, Any], targets: NDArray[Any] | None
    ) -> None:
        import torch

        pieces = answer.pieces
        self.blueprint = pieces.blueprint
        self.causal = pieces.config.get("model_type") not in _NOT_CAUSAL
        self.module = network(pieces.config, answer.tensors(), pieces.where)
        stacks = (
            (name, module)
            for name, module in self.module.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == self.blueprint.blocks
        )
        self._stack = next(((name, list(module)) for name, module in stacks), None)
        if self._stack is None:
            raise BadInputError(pieces.where, f"has no list of {self.blueprint.blocks} blocks")
        self.numbers: dict[Socket, int] = {}
        self.parameters: dict[Socket, Any] = {}
        for block, layer in enumerate(self._stack[1]):
            left = dict(layer.named_parameters())
            for slot in self.blueprint.block:
                number = (answer.blocks if slot.matrix else answer.vectors)[block][slot.role]
                values = np.asarray(pieces.arrays[number], np.float32)
                # transformers may rename parameters: they are found by their values, equal ones by the nearest name
                equal = {
                    name: SequenceMatcher(None, name, slot.name).ratio()
                    for name, parameter in left.items()
                    if np.array_equal(parameter.detach().numpy(), values)
                }
                if not equal:
                    text = "is not in the network that transformers builds from config.json"
                    raise BadInputError(slot.name.format(block), text)
                self.numbers[slot.role, block] = number
                self.parameters[slot.role, block] = left.pop(max(equal, key=equal.__getitem__))
        self.look_at(inputs, targets)

    def look_at(self, inputs: Mapping[str, Any], targets: NDArray[Any] | None) -> None:
        """Use these data from now on."""
        self.inputs, self.targets = dict(inputs), targets
        self.make({})

    @property
    def exact(self) -> bool:
        """Whether recorded outputs agree to rounding."""
        return self.targets is not None and self.loss < EXACT * max(float(np.var(self.targets)), 1e-30)

    def reversal(self) -> Move:
        """All blocks in the reverse order."""
        last = self.blueprint.blocks - 1
        return {(role, k): (role, last - k) for role, k in self.numbers if 2 * k != last}

    def consider(self, move: Move) -> None:
        """Make a move if the true loss falls."""
        self._apply(move)
        loss = self._loss(self.run(min((block for _, block in move), default=0)))
        self._apply({old: new for new, old in move.items()})
        if loss < self.loss * (1 - 1e-6):
            self.make(move)

    def make(self, move: Move) -> None:
        """Make a move, and keep what enters each block then."""
        assert self._stack is not None
        self._apply(move)
        streams: list[Any] = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: streams.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            for layer in self._stack[1]
        ]
        returned: list[Any] = []
        hooks.append(self._stack[1][0].register_forward_hook(lambda _m, _a, out: returned.append(out)))
        self.loss = self._loss(self.run())
        for hook in hooks:
            hook.remove()
        self._streams = [(s,) for s in streams] if isinstance(returned[0], tuple) else streams

    def replaced(self, sockets: Sequence[Socket], others: Sequence[Socket]) -> Any:
        """The output with the pieces of other sockets in these."""
        previous = [self.parameters[socket].data for socket in sockets]
        for socket, values in zip(sockets, [self.parameters[other].data for other in others], strict=True):
            self.parameters[socket].data = values
        output = self.run(min(block for _, block in sockets))
        for socket, values in zip(sockets, previous, strict=True):
            self.parameters[socket].data = values
        return output

    def run(self, start: int = 0) -> Any:
        """The network's output; blocks before ``start`` are not run again."""
        import torch

        from strati.evaluate.models import output_tensor

        assert self._stack is not None
        name, layers = self._stack
        if start:
            layers = [_constant(self._streams[start]), *layers[start:]]
        owner, _, attribute = name.rpartition(".")
        setattr(self.module.get_submodule(owner), attribute, torch.nn.ModuleList(layers))
        with torch.no_grad():
            return output_tensor(self.module(**self.inputs))

    def answer(self) -> tuple[tuple[dict[str, int], ...], tuple[dict[str, int], ...]]:
        """Blocks and vectors as they stand now."""
        blocks, vectors = (
            tuple(
                {s.role: self.numbers[s.role, k] for s in self.blueprint.block if s.matrix is matrix}
                for k in range(self.blueprint.blocks)
            )
            for matrix in (True, False)
        )
        return blocks, vectors

    def _apply(self, move: Move) -> None:
        pieces = {old: (self.parameters[old].data, self.numbers[old]) for old in move.values()}
        for new, old in move.items():
            self.parameters[new].data, self.numbers[new] = pieces[old]

    def _loss(self, output: Any) -> float:
        import torch

        if self.targets is not None:
            loss = float(np.square(output.double().numpy() - self.targets).mean())
        elif not self.causal or "input_ids" not in self.inputs:
            return float("nan")
        else:
            logits = output[:, :-1].reshape(-1, output.shape[-1]).double()
            following = self.inputs["input_ids"][:, 1:].reshape(-1)
            loss = float(torch.nn.functional.cross_entropy(logits, following))
        return loss if np.isfinite(loss) else float("inf")


def _constant(value: Any) -> Any:
    """A module that stands for the blocks before: whatever it is given, it returns what they returned."""
    import torch

    class Constant(torch.nn.Module):
        attention_type = "full_attention"

        def forward(self, *_: Any, **__: Any) -> Any:
            return value

    return Constant()


def _refine(
    model: PlacedModel, sets: Sequence[Sequence[Entity]], doubtful: set[int], late: Callable[[], bool]
) -> None:
    """Rounds of regressions while they lower the error.

    Args:
        model: The network with its recorded outputs.
        sets: What moves as one, in turn.
        doubtful: Pieces whose place the weights do not tell surely.
        late: Whether the time is over.
    """
    idle = 0
    for number in range(_ROUNDS):
        if model.exact or idle == len(sets) or model.blueprint.blocks < 2:
            return
        before = model.loss
        for move in _proposals(model, sets[number % len(sets)], doubtful, late):
            model.consider(move)
        idle = 0 if model.loss < (1 - 1e-3) * before else idle + 1


def _entity_sets(model: PlacedModel) -> list[list[Entity]]:
    """What moves as one: vectors alone; matrices by unit, with and without the biases of its neurons, or alone."""
    slots, blocks = model.blueprint.block, range(model.blueprint.blocks)
    vectors = [slot.role for slot in slots if not slot.matrix]
    units = [list(slots_of(roles, model.blueprint)) for roles in unit_kinds(model.blueprint).values()]
    inner = [[v for v in vectors if v.partition(".")[0] in unit and v not in _ON_STREAM] for unit in units]
    outside = [[v] for v in vectors if not any(v in biases for biases in inner)]
    alone = [[v] for v in vectors]
    with_biases = [unit + biases for unit, biases in zip(units, inner, strict=True)]
    groups = [
        alone,
        units + alone,
        with_biases + outside,
        [[slot.role] for slot in slots if slot.matrix] + alone,
    ]
    distinct = [group for k, group in enumerate(groups) if group and group not in groups[:k]]
    return [[[tuple((r, k) for r in roles) for k in blocks] for roles in group] for group in distinct]


def _proposals(
    model: PlacedModel, entities: Sequence[Entity], doubtful: set[int], late: Callable[[], bool]
) -> Iterator[Move]:
    """Permutations of all entities together, of matrices or vectors alone, and of each entity alone."""
    assert model.targets is not None
    size = model.targets.size
    coordinates = np.sort(stream(0, "reassembly", "outputs").permutation(size)[:_COORDINATES])

    def numbers(output: Any) -> Matrix:
        return np.asarray(output.double().numpy().reshape(-1)[coordinates])

    now = numbers(model.run())
    target = model.targets.reshape(-1)[coordinates].astype(np.float64) - now
    columns, roots, beliefs = [], [], []
    for entity in entities:
        belief = _belief(model, entity, doubtful)
        effect = np.zeros((len(target), *belief.shape))
        for k, j in np.argwhere(~np.eye(len(belief), dtype=bool)):
            if late():
                return
            effect[:, k, j] = numbers(model.replaced(entity[k], entity[j])) - now
        effect = centred(np.nan_to_num(effect, posinf=0.0, neginf=0.0), belief, False)
        target = target + effect.reshape(len(target), -1) @ (np.eye(len(belief)) - belief).reshape(-1)
        beliefs.append(belief)
        roots.append(np.sqrt(belief).reshape(-1))
        columns.append(effect.reshape(len(target), -1) * roots[-1])
    solutions, _ = posterior_means(np.concatenate(columns, axis=1), target, None, _NOISES)
    ends = np.cumsum([root.size for root in roots])
    matrices = {slot.role for slot in model.blueprint.block if slot.matrix}
    moves: dict[str, Move] = {}
    for solution in solutions:
        for reach in (1.0, 2.0, 4.0):
            parts: list[Move] = []
            for entity, belief, root, end in zip(entities, beliefs, roots, ends, strict=True):
                here = np.eye(len(entity))
                target_belief = belief + (root * solution[end - root.size : end]).reshape(here.shape)
                order = assign(here + reach * (target_belief - here)).tolist()
                parts.append(
                    {
                        new: old
                        for k, j in enumerate(order)
                        if j != k
                        for new, old in zip(entity[k], entity[j], strict=True)
                    }
                )
            whole = {new: old for part in parts for new, old in part.items()}
            by_kind = [
                {new: old for new, old in whole.items() if (new[0] in matrices) is matrix}
                for matrix in (True, False)
            ]
            moves |= {str(sorted(move.items())): move for move in (whole, *by_kind, *parts) if move}
    yield from moves.values()


def _belief(model: PlacedModel, entity: Entity, doubtful: set[int]) -> Matrix:
    """Each member's own pieces, the rest evenly over the others."""
    n = len(entity)
    confidence = np.array(
        [_DOUBTFUL if any(model.numbers[s] in doubtful for s in sockets) else _SURE for sockets in entity]
    )
    belief = np.repeat(((1 - confidence) / max(n - 1, 1))[:, None], n, axis=1)
    belief[np.diag_indices(n)] = confidence
    return belief


def _fewer(
    inputs: dict[str, Any], targets: NDArray[Any], causal: bool
) -> tuple[dict[str, Any], NDArray[Any]] | None:
    """The first rows, and of a decoder their first tokens, that have numbers enough; ``None`` if that is most of them.

    What a decoder answers to the first tokens does not depend on those that follow.
    """
    if targets.size < 2 * _ENOUGH:
        return None
    rows, tokens = len(targets), None
    per_row = targets.size // rows
    ids = inputs.get("input_ids")
    if causal and ids is not None and targets.ndim == 3 and targets.shape[:2] == tuple(ids.shape):
        tokens = min(targets.shape[1], max(_TOKENS, -(-_ENOUGH // (_ROWS * targets.shape[2]))))
        per_row = tokens * targets.shape[2]
    rows = min(rows, max(_ROWS if tokens else 1, -(-_ENOUGH // per_row)))
    if 2 * rows * per_row > targets.size:
        return None
    cut = (slice(rows), slice(tokens)) if tokens else (slice(rows),)
    return {k: v if isinstance(v, bool) else v[cut] for k, v in inputs.items()}, targets[cut]


def _inputs(
    answer: TransformerReassembly, data: Any, outputs: Any, config: ReassembleConfig
) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """What the module is called with, and the outputs to agree with."""
    where = answer.pieces.where
    if isinstance(data, str | Path):
        data, outputs = _read(answer, Path(data), outputs, config)
    array = np.asarray(data.detach().cpu().numpy() if hasattr(data, "detach") else data)
    targets = (
        None
        if outputs is None
        else np.asarray(outputs.detach().cpu() if hasattr(outputs, "detach") else outputs)
    )
    kind = answer.pieces.config.get("model_type")
    inputs = _module_inputs(answer, array, config)
    if "pixel_values" in inputs and targets is not None:
        targets = targets[: config.tokens]
    causal = array.dtype.kind in "iu" and kind not in _NOT_CAUSAL
    if targets is None and not causal:
        raise BadInputError(
            where, "this network predicts no next token: give the outputs it recorded with the data"
        )
    rows = len(next(iter(inputs.values())))
    if targets is not None and len(targets) != rows:
        raise BadInputError("data", f"{rows} rows of inputs and {len(targets)} of outputs")
    return inputs, targets


def _module_inputs(
    answer: TransformerReassembly, array: NDArray[Any], config: ReassembleConfig
) -> dict[str, Any]:
    """Token ids, features or images as the module takes them."""
    import torch

    settings = answer.pieces.config
    kind = settings.get("model_type")
    if array.dtype.kind not in "iu":
        if kind == "whisper":
            return {"input_features": torch.from_numpy(array.astype(np.float32))}
        return {"pixel_values": torch.from_numpy(array[: config.tokens].astype(np.float32))}
    vocabulary = settings.get("vocab_size")
    if type(vocabulary) is int and array.size and (array.min() < 0 or array.max() >= vocabulary):
        raise BadInputError(
            "data", f"token ids must lie in 0 to {vocabulary - 1}; are they of another tokenizer?"
        )
    if array.ndim == 1:
        longest = int(settings.get("max_position_embeddings") or settings.get("n_positions") or 256)
        wide = min(longest, config.tokens, len(array))
        rows = max(1, min(len(array), config.tokens) // wide)
        array = array[: rows * wide].reshape(rows, wide)
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(array.astype(np.int64))}
    if kind not in ("bert", "vit", "whisper"):
        inputs["use_cache"] = False
    return inputs


def _read(
    answer: TransformerReassembly, path: Path, outputs: Any, config: ReassembleConfig
) -> tuple[Any, Any]:
    """Token ids of a text through the tokenizer beside the pieces, or arrays of ``.npz``, ``.npy``."""
    from strati.io.data_files import read_data, read_text

    if path.suffix.lower() == ".txt":
        return read_text(path, answer.pieces.folder)[: config.tokens], outputs
    data = read_data(path, inputs=config.inputs, target=config.target)
    return data.x, data.y if outputs is None else outputs


_AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel")


def network(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], where: object) -> Any:
    """The module with its weights, in float32 and evaluation mode, loaded as a Hugging Face directory would be.

    Raises:
        UnsupportedError: transformers does not know the architecture.
        BadInputError: A tensor is missing.
    """
    empty = empty_network(config, where)
    torch, transformers = (require(name, name, "running a transformer") for name in ("torch", "transformers"))
    state = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in tensors.items()}
    if config.get("model_type") == "whisper":
        state = {n.removeprefix("model.").removeprefix("encoder."): values for n, values in state.items()}
    with quiet_transformers(transformers):
        model, info = type(empty).from_pretrained(
            None, config=empty.config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    missing = [k for k in sorted(info["missing_keys"]) if "pooler" not in k]
    if missing:
        raise BadInputError(where, f"the pieces lack {missing[0]}, which this network needs to run")
    return model.eval()


def empty_network(config: Mapping[str, Any], where: object) -> Any:
    """The module that ``config.json`` describes, without memory for its weights.

    Raises:
        UnsupportedError: transformers does not know it.
    """
    torch = require("torch", "torch", "running a transformer")
    transformers = require("transformers", "transformers", "running a transformer")
    kind = config.get("model_type")
    try:
        made = transformers.AutoConfig.for_model(**config)
    except (ValueError, KeyError, TypeError):
        raise UnsupportedError(where, f"transformers does not know the model type {kind!r}") from None
    with torch.device("meta"):
        if kind == "whisper":
            return transformers.models.whisper.modeling_whisper.WhisperEncoder(made)
        for name in config.get("architectures") or []:
            if isinstance(name, str) and hasattr(transformers, name):
                return getattr(transformers, name)(made)
        for auto in _AUTO:
            try:
                return getattr(transformers, auto).from_config(made)
            except ValueError:  # this kind of network has no such head
                continue
    raise UnsupportedError(where, f"transformers cannot build a {kind!r} from its config.json")
