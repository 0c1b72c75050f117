"""What a plan does to each tensor of a network, and writing that: in the format it came in, or from memory."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

from strati.comparison.extract_adapter import extract_adapter
from strati.core.errors import BadInputError, UnsupportedError
from strati.interventions.compress.costs import KEEP
from strati.interventions.compress.factored import can_factor, factor_tensors, load_factored, write_map
from strati.interventions.compress.packed import PackedLayer, packed_layer, write_config
from strati.interventions.compress.rewrite_checkpoint import (
    Rewrite,
    find_tensor,
    rewrite_directory,
    rewrite_file,
    write_safetensors,
)
from strati.interventions.edits import truncated_parameters
from strati.interventions.evaluator import Evaluator, open_evaluators
from strati.interventions.expert_removal import remove_experts
from strati.interventions.experts import find_experts
from strati.interventions.input_covariance import ExpertTokensError, SequentialInputs
from strati.interventions.kinds import EXPERT_KINDS, read_setting, reads_inputs
from strati.interventions.targets import (
    Change,
    Target,
    as_matrix,
    find_targets,
    from_matrix,
    put_values,
    to_float32,
    values_of,
)
from strati.interventions.tasks import calibration_data
from strati.interventions.unit_removal import head_count, remove_units, removed_units, zero_units
from strati.io.network import open as open_network
from strati.io.to_module import as_module

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.interventions.compress.apply import ApplyConfig
    from strati.interventions.study import Study


class Edits:
    """What the plan does to each tensor."""

    def __init__(
        self,
        wanted: Mapping[str, Any],
        model: nn.Module,
        study: Study | None,
        settings: ApplyConfig,
    ) -> None:
        self.model, self.action = model, str(wanted["action"])
        self.chosen = {x["name"]: x["choice"] for x in wanted["layers"] if x["choice"] != KEEP}
        layers = {} if study is None else {n: t for n, t in study.origin.layers.items() if t.composite}
        if self.action == "drop":
            blocks = {
                x["name"]: Target(x["name"], "block", "block", (x["cols"],), False, (x["name"],))
                for x in wanted["layers"]
            }
            layers = {**blocks, **layers}
        others: Any = {}
        if self.action == "adapt":
            others = next((w.others for w in open_evaluators(study)), {}) if study is not None else {}
            if not others:
                raise BadInputError(
                    "adapt", "the base network is not at hand; apply with the study in memory or its folder"
                )
        # Data-aware edits are computed on a copy, in which every layer reads what the layers changed before it give.
        aware = any(reads_inputs(tuple(read_setting(c).items())) for c in self.chosen.values() if "=" in c)
        inputs = _calibration(model, study, settings.calibration) if aware else None
        network = model if inputs is None else inputs.model
        self.evaluator = Evaluator("model", network, calibration=inputs, others=others, composites=layers)
        if self.action in EXPERT_KINDS:
            evaluators = open_evaluators(study, model=model) if study is not None else []
            if not evaluators:
                raise BadInputError(
                    self.action, "the study's data are not at hand; apply with the study or its folder"
                )
            self.evaluator = evaluators[0]
        self.experts: dict[str, Change] = {}
        self.units: dict[str, tuple[int, ...]] = {}
        self.weights: dict[str, NDArray[Any]] = {}
        self.factors: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        self.packed: dict[str, PackedLayer] = {}
        self.removed: list[str] = sorted(self.chosen) if self.action == "drop" else []
        self.parameters_before = _parameters(model)
        self.left_alone: list[str] = []
        saved = sum(self._edit(name, choice, settings) for name, choice in list(self.chosen.items()))
        self.reduced: Any = self._reduced() if self.experts or self.units else None
        self.parameters_after = _parameters(self.reduced) if self.units else self.parameters_before - saved

    def _edit(self, name: str, choice: str, settings: ApplyConfig) -> int:
        """Make one layer's change; returns how many parameters that saves.

        An expert that too few tokens reach in the network changed so far is left alone.
        """
        try:
            return self._make(name, choice, settings)
        except ExpertTokensError:
            del self.chosen[name]
            self.left_alone.append(name)
            return 0

    def _make(self, name: str, choice: str, settings: ApplyConfig) -> int:
        target = self.evaluator.target(name)
        if self.action == "drop":
            return sum(p.numel() for p in self.model.get_submodule(name).parameters())
        if settings.packed:
            layer = packed_layer(self.evaluator.edits(target), read_setting(choice))
            if layer is not None:
                self.packed[name] = layer
        if name in self.packed:
            weight = from_matrix(self.packed[name].values, target.kind, target.shape)
            change = Change(self.action, 0, weight, None, "packed integers", choice)
        else:
            change = self.evaluator.change(self.action, name, choice)
        if self.action in EXPERT_KINDS:
            self.experts[name] = change
            return len(change.experts) * target.shape[1]
        edits = self.evaluator.edits(target)
        if self.evaluator.calibration is not None:
            put_values(self.evaluator.model, target, change)
        self.weights[name] = change.values
        setting = read_setting(choice)
        if "unit" in setting:
            count = int(head_count(self.model) or 1) if setting["unit"] == "head" else edits.matrix.shape[1]
            removed = removed_units(count, float(setting["share"]))
            self.units[name] = zero_units(as_matrix(change.values, target.kind), count, removed)
            return 0
        if self.action == "prune":
            return int((values_of(self.model, target)[0] != 0).sum() - (change.values != 0).sum())
        if self.action != "truncate":
            return 0
        directions, rank = edits.truncation(setting)
        rows, cols = directions.matrix.shape
        if settings.factored and can_factor(self.model.get_submodule(name), target, rank):
            second, first = directions.factors(slice(0, rank))
            # Equal shares of the singular values: neither factor's entries grow with the square of the other's.
            size = np.sqrt(np.linalg.norm(second, axis=0) / np.maximum(np.linalg.norm(first, axis=1), 1e-300))
            self.factors[name] = (first * size[:, None], second / np.maximum(size, 1e-300))
        return int(rows * cols - truncated_parameters(rows, cols, rank))

    def write(self, source: Path | None, folder: Path) -> None:
        """The changed network in the format of its source; without one, as ``model.safetensors``."""
        if self.reduced is not None:
            self._write_reduced(source, folder)
        elif source is not None:
            self.write_file(source, folder)
        else:  # a module in memory: its tensors as they are first, then rewritten like any other file
            with tempfile.TemporaryDirectory() as place:
                unchanged = Path(place) / "model.safetensors"
                write_safetensors(unchanged, _tensors(self.model))
                self.write_file(unchanged, folder)

    def _reduced(self) -> Any:
        """A copy of the network without the experts, heads or neurons that the plan removes, its config adjusted.

        Raises:
            UnsupportedError: Layers would have different numbers of them, which no config can say.
        """
        made: Any = copy.deepcopy(self.model)
        if self.units:
            unit = str(read_setting(next(iter(self.chosen.values())))["unit"])
            for name in self.units:
                change = Change("prune", 0, self.weights[name], None, "")
                put_values(made, self.evaluator.target(name), change)
            remove_units(made, self.units, unit, find_targets(made))
            return made
        counts = {
            t.shape[0] - len(getattr(self.experts.get(t.name), "experts", ())) for t in find_experts(made)
        }
        config = getattr(made, "config", None)
        if config is not None and len(counts) > 1:
            raise UnsupportedError(
                self.action, f"layers would have {sorted(counts)} experts; a config has one number"
            )
        for name, change in self.experts.items():
            before = self.evaluator.target(name).shape[0]
            merge = change.intervention == "merge-experts"
            remove_experts(made.get_submodule(name), change.experts, change.scores, merge=merge)
            for key in ("num_local_experts", "num_experts", "n_routed_experts"):
                if getattr(config, key, None) == before:
                    setattr(config, key, before - len(change.experts))
        return made

    def _write_reduced(self, source: Path | None, folder: Path) -> None:

        made: Any = self.reduced
        if source is None or not hasattr(made, "save_pretrained"):
            write_safetensors(folder / "model.safetensors", _tensors(made))
            return
        if not source.is_dir():
            raise UnsupportedError(
                source, "is one file; a network of fewer units needs a directory with a config"
            )
        stored = json.loads((source / "config.json").read_text("utf-8"))
        dtype = str(stored.get("dtype") or stored.get("torch_dtype") or "float32")
        copy.deepcopy(made).to(getattr(torch, dtype)).save_pretrained(folder)
        for file in source.iterdir():
            weights = file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")
            if file.is_file() and not weights and not (folder / file.name).exists():
                shutil.copy2(file, folder / file.name)

    def write_adapter(self, folder: Path) -> None:
        """The updates of an ``adapt`` plan as a PEFT adapter of the base; layers that are kept get full rank."""
        base = {
            name: tensor
            for name, tensor in next(iter(self.evaluator.others.values())).items()
            if name.endswith(".weight")
        }
        state = self.model.state_dict()
        tuned = {
            name: self.weights.get(name.removesuffix(".weight"), _plain(state[name].detach().cpu()))
            for name in base
        }
        ranks = {name: min(tensor.shape) for name, tensor in base.items()}
        ranks |= {
            f"{layer}.weight": int(choice.partition("rank=")[2]) for layer, choice in self.chosen.items()
        }
        extract_adapter(base, tuned, folder, rank=ranks)

    def write_file(self, source: Path, folder: Path) -> None:
        """A file or directory in the format it came in."""
        network = open_network(source)
        rewrite, places = self._rewrite(network)
        if source.is_dir():
            rewrite_directory(source, folder, rewrite)
            if self.removed:
                self._shorten_config(folder)
            if self.packed:
                write_config(folder, self.packed)
        else:
            rewrite_file(network, folder / source.name, rewrite)
        if self.factors:
            write_map(folder, self._map(places))

    def _rewrite(self, network: Any) -> tuple[Rewrite, dict[str, str]]:

        shapes = {t.name: tuple(t.shape) for t in network.tensors if t.floating}
        replace: dict[str, dict[str, Any]] = {}
        places: dict[str, str] = {}
        for layer, new in self.weights.items():
            target = self.evaluator.target(layer)
            name, turned = find_tensor(layer, values_of(self.model, target)[0], shapes, network.read)
            places[layer] = name
            if layer in self.packed:
                dtype = np.asarray(network.read(name)[:0]).dtype
                replace[name] = self.packed[layer].tensors(name.removesuffix(".weight"), dtype)
            elif layer in self.factors:
                replace[name] = factor_tensors(layer, *self.factors[layer], target)
            else:
                replace[name] = {name: new.T if turned else new}
        return Rewrite(replace, self._rename([t.name for t in network.tensors])), places

    def _rename(self, names: Sequence[str]) -> Callable[[str], str | None]:
        """What the tensors of ``names`` are called once blocks are gone: those behind move up.

        Raises:
            UnsupportedError: A block has no number in its name.
            BadInputError: A block's tensors are not among the names.
        """
        stacks: dict[str, list[int]] = {}
        for name in self.removed:
            stack, _, number = name.rpartition(".")
            if not number.isdigit():
                raise UnsupportedError(
                    name, "is a block without a number; it cannot be taken out of the file"
                )
            stacks.setdefault(stack, []).append(int(number))
        heads = {_head(stack, numbers, names): numbers for stack, numbers in stacks.items()}

        def rename(name: str) -> str | None:
            for head, numbers in heads.items():
                number, _, suffix = name[len(head) :].partition(".")
                if name.startswith(head) and number.isdigit():
                    if int(number) in numbers:
                        return None
                    return f"{head}{int(number) - sum(n < int(number) for n in numbers)}.{suffix}"
            return name

        return rename

    def _shorten_config(self, folder: Path) -> None:
        """A Hugging Face config with as many layers as are left."""
        path = folder / "config.json"
        config = json.loads(path.read_text("utf-8"))
        key = next((k for k in ("num_hidden_layers", "n_layer", "num_layers") if k in config), None)
        stacks = {name.rpartition(".")[0] for name in self.removed}
        if key is None or len(stacks) != 1:
            raise UnsupportedError(
                path, "does not say how many blocks there are; dropped blocks cannot be written"
            )
        count = int(config[key])
        gone = {int(name.rpartition(".")[2]) for name in self.removed}
        for name, value in config.items():
            if isinstance(value, list) and len(value) == count and name.startswith(("layer_", "attention_")):
                config[name] = [v for i, v in enumerate(value) if i not in gone]
        config[key] = count - len(gone)
        path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def _map(self, places: Mapping[str, str]) -> dict[str, Any]:
        return {
            layer: {"rank": int(first.shape[0]), "tensor": places[layer]}
            for layer, (first, _) in self.factors.items()
        }

    def reopen(self, folder: Path, source: Path | None, study: Study | None) -> nn.Module:
        """The network as it was written, read back."""
        if self.reduced is not None and (source is None or not source.is_dir()):
            return self.reduced.eval()  # type: ignore[no-any-return]
        if self.factors:
            return load_factored(folder, None if source is not None and source.is_dir() else self.model)
        if source is not None:
            place = folder if source.is_dir() else folder / source.name
            return open_network_of(place, study)

        made = copy.deepcopy(self.model)
        for name in sorted(self.removed, key=lambda n: -int(n.rpartition(".")[2])):
            stack, _, number = name.rpartition(".")
            holder: Any = made.get_submodule(stack)
            del holder[int(number)]
        file = open_network(folder / "model.safetensors")
        state = {
            t.name: torch.from_numpy(np.array(file.read(t.name)).astype(np.float32)) for t in file.tensors
        }
        parameters = made.state_dict()
        for name, value in state.items():
            parameters[name].copy_(value)
        return made.eval()


def _calibration(model: nn.Module, study: Study | None, calibration: Any) -> SequentialInputs:
    """A copy of the network, and calibration data to run through it: those given, or the study's.

    Raises:
        BadInputError: There are none.
    """
    copied = to_float32(copy.deepcopy(model)).eval()
    if calibration is not None:
        context = 128 if study is None else study.origin.context
        return SequentialInputs(copied, calibration_data(calibration, copied, context).calibration_batches())
    stored_inputs = [e.calibration for e in open_evaluators(study, model=model)] if study is not None else []
    if not stored_inputs or stored_inputs[0] is None:
        raise BadInputError(
            "calibration", "the plan's edits need data and the study's are not at hand; give calibration"
        )
    return SequentialInputs(copied, stored_inputs[0].batches)


def _head(stack: str, numbers: Sequence[int], names: Sequence[str]) -> str:
    """What stands before the numbers of a stack's blocks in a file, whose names may have a word more or less in front.

    Examples:
        >>> _head("layer1", [2], ["module.layer1.2.conv1.weight"])
        'module.layer1.'
    """
    ends = [f"{stack}.", f"{stack.partition('.')[2]}."] if stack else [""]
    heads = [end for end in ends if end != "."]
    heads += [name[: name.index(f".{ends[0]}") + 1] + ends[0] for name in names if f".{ends[0]}" in name]
    for head in dict.fromkeys(heads):
        if all(any(name.startswith(f"{head}{n}.") for name in names) for n in numbers):
            return head
    raise BadInputError(
        f"{stack}.{numbers[0]}",
        "no tensor of the file belongs to this block; the plan is for another network",
    )


def open_network_of(source: Path, study: Study | None) -> nn.Module:
    """A checkpoint as a module, opened as the study opened it."""
    networks = [] if study is None else list(study.origin.networks.values())
    activation: Any = networks[0].activation if networks else "relu"
    return to_float32(as_module(source, activation=activation)).eval()


def _parameters(model: Any) -> int:
    return sum({id(p): p.numel() for p in model.parameters()}.values())


def _plain(value: Any) -> NDArray[Any]:

    if value.dtype == torch.bfloat16:
        return value.float().numpy().astype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return value.contiguous().numpy()  # type: ignore[no-any-return]


def _tensors(model: nn.Module) -> dict[str, NDArray[Any]]:
    """The tensors of a module by name; one that two names share is written once."""
    first: dict[int, str] = {}
    tensors = {}
    for name, value in model.state_dict().items():
        if value.numel() < 2 or first.setdefault(value.data_ptr(), name) == name:
            tensors[name] = _plain(value.detach().cpu())
    return tensors
