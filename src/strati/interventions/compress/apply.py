"""``strati.apply``: the network that a plan makes, written in the format it came in, and measured.

Everything is written into a folder beside the target and moved into place when it is whole; the original is only read.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, overload

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.plugins import require
from strati.core.results import Result, Tick, silent
from strati.interventions.compress.budget import ACTIONS
from strati.interventions.compress.plan import Plan
from strati.interventions.study import Study, expert_warning, load_study

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType
    from torch import nn

    from strati.core.option_types import ApplyOptions
    from strati.interventions.evaluator import Evaluator

_SPARE = 1.05
"""Free space needed, as a multiple of the weights' size."""


@dataclass(frozen=True)
class Applied(Result):
    """A network that was written: where, how large, and predicted beside measured."""

    verb: ClassVar[str] = "apply"

    written: str
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    predicted: Mapping[str, Any]
    measured: Mapping[str, Any]
    action: str
    performance: Mapping[str, Any]
    seconds_before: float | None = None
    seconds_after: float | None = None
    healed: Mapping[str, Any] | None = None
    warnings: tuple[Mapping[str, str], ...] = ()

    def frame(self) -> pd.DataFrame:
        """Before and after."""
        import pandas as pd

        rows = [
            {"what": "parameters", "before": self.parameters_before, "after": self.parameters_after},
            {"what": "bytes", "before": self.bytes_before, "after": self.bytes_after},
        ]
        return pd.DataFrame(rows)

    def summary(self) -> RenderableType:
        """What was written, and predicted beside measured."""
        from strati.interventions.compress.summary import applied_summary

        return applied_summary(self)


@dataclass(frozen=True)
class ApplyConfig:
    """Options of :func:`apply`.

    Attributes:
        factored: Truncated layers as two matrices, with a module map (:func:`strati.load_factored` reads it), where
            that is smaller.
        packed: Layers that the plan quantises as packed integers with scales, in the layout of compressed-tensors,
            which transformers and vLLM load. For a Hugging Face directory and plain or GPTQ quantisation.
        heal: Steps of training of a LoRA on three quarters of the data after compression; 0 trains nothing. It is
            written as the PEFT adapter ``adapter`` beside the compressed weights, which stay as they are; a module that
            is returned has it merged.
        calibration: Data for the input covariances of data-aware edits, which are computed again, layer by layer, on
            the network already changed. Default: the study's own.
    """

    factored: bool = False
    packed: bool = False
    heal: int = 0
    calibration: Any = None


@overload
def apply(
    plan: Plan | Mapping[str, Any] | str | Path,
    model: Any,
    *,
    out: None = None,
    data: Any = None,
    config: ApplyConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[ApplyOptions],
) -> nn.Module: ...


@overload
def apply(
    plan: Plan | Mapping[str, Any] | str | Path,
    model: Any,
    *,
    out: str | Path,
    data: Any = None,
    config: ApplyConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[ApplyOptions],
) -> Applied: ...


def apply(
    plan: Plan | Mapping[str, Any] | str | Path,
    model: Any,
    *,
    out: str | Path | None = None,
    data: Any = None,
    config: ApplyConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[ApplyOptions],
) -> Applied | nn.Module:
    """Make the network of a plan: write it and measure it, or return it as a module.

    Args:
        plan: A plan, its JSON, or the file of that.
        model: The network the plan was made for, whatever names it. A safetensors file, a Hugging Face directory, a
            torch or ``.npz`` file is written in its own format, what is in memory as ``model.safetensors``.
        out: A new folder, never the original's; for the action ``adapt`` it also gets the folder ``adapter``, which
            PEFT loads onto the base. Without it nothing is written, and the changed module is returned.
        data: What to measure on; by default the study's own data. Only with ``out``.
        config: Options; keywords of the same names win.
        tick: Called when the network is written, and when it is measured.
        **options: Fields of :class:`ApplyConfig`.

    Returns:
        With ``out``: where the network is, sizes, and predicted beside measured performance. Without: the changed
        module; the one given stays as it is.

    Raises:
        BadInputError: A plan for another network, a folder that is not empty or is the original's, a full disk. Nothing
            is left behind.
        UnsupportedError: A format or change that cannot be written.

    Examples:
        >>> import torch, strati
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x = torch.randn(100, 8)
        >>> measured = strati.study(net, data=(x, net(x).argmax(1)), spectral=False,
        ...                         interventions=strati.quantise(bits=[2, 4]))
        >>> smaller = apply(strati.plan(measured, budget="bits=4", action="quantise"), net)
        >>> bool((smaller[0].weight != net[0].weight).any())
        True
    """
    require("torch", "torch", "applying a plan")
    settings = resolve(ApplyConfig, config, options, of=apply)
    from strati.interventions.compress.checkpoint_writer import Edits, open_network_of
    from strati.interventions.compress.heal import heal
    from strati.io.to_module import as_module

    plan_document = _wanted(plan)
    study = plan.study if isinstance(plan, Plan) else _study_of(plan_document)
    source = _file_of(model)
    if out is not None:
        _check_place(Path(out), source)
    module = as_module(model) if source is None else open_network_of(source, study)
    _check_network(plan_document, module, source)
    before = _weight_bytes(source) if source is not None else _module_bytes(module)
    _check_settings(settings, plan_document, source)
    edits = Edits(plan_document, module, study, settings)
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            edits.write(source, Path(folder))
            made = edits.reopen(Path(folder), source, study)
        if settings.heal:
            evaluator = _evaluator(plan_document, study, module, made, data)
            heal(made, None if evaluator is None else evaluator.task, settings.heal, tick)[0].merge()
        return made
    with _new_folder(Path(out), before) as folder:
        edits.write(source, folder)
        after = _weight_bytes(folder)
        if edits.action == "adapt":
            edits.write_adapter(folder / "adapter")
        tick("written")
        made = edits.reopen(folder, source, study)
        evaluator = _evaluator(plan_document, study, module, made, data)
        measured = _measure(plan_document, evaluator)
        task = None if evaluator is None else evaluator.task
        seconds = _seconds(module, made, task) if edits.factors else (None, None)
        tick("measured")
        healed = None
        if settings.heal:
            lora, healed = heal(made, task, settings.heal, tick)
            lora.write(folder / "adapter", str(out))
    return Applied(
        written=str(out),
        parameters_before=edits.parameters_before,
        parameters_after=edits.parameters_after,
        bytes_before=before,
        bytes_after=after,
        predicted=dict(plan_document["predicted"]),
        measured=measured,
        action=str(plan_document["action"]),
        performance=dict(plan_document["performance"]),
        seconds_before=seconds[0],
        seconds_after=seconds[1],
        healed=healed,
        warnings=(expert_warning(edits.left_alone),) if edits.left_alone else (),
    )


def _wanted(plan: Any) -> dict[str, Any]:
    if isinstance(plan, Plan):
        return plan.to_dict()
    if isinstance(plan, Mapping):
        return check_plan(dict(plan))
    return load_plan(plan)


def load_plan(path: str | Path) -> dict[str, Any]:
    """The JSON of a plan.

    Raises:
        BadInputError: It is not there, or no plan.
    """
    place = Path(path)
    try:
        payload = json.loads(place.read_text("utf-8"))
    except OSError as error:
        raise BadInputError(path, f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise BadInputError(path, "is not JSON; give the JSON file of a plan") from None
    return check_plan(payload, path)


def check_plan(payload: Any, path: str | Path = "plan") -> dict[str, Any]:
    """The JSON of a plan, if it is one.

    Raises:
        BadInputError: It is not.
    """
    if not isinstance(payload, dict) or payload.get("schema") != "strati.plan/1":
        raise BadInputError(path, "is not a plan; give the JSON file of a plan")
    layers = payload.get("layers")
    if not isinstance(layers, list) or not all(
        isinstance(x, dict) and {"name", "choice"} <= set(x) for x in layers
    ):
        raise BadInputError(path, "is a damaged plan: its layers have no names or choices")
    if payload.get("action") not in ACTIONS:
        raise BadInputError(path, f"is a plan of an unknown action {payload.get('action')!r}")
    return payload


def _study_of(plan_document: Mapping[str, Any]) -> Study | None:
    store = (plan_document.get("study") or {}).get("store")
    if store is None or not Path(store).is_file():
        return None
    return load_study(Path(store).parent)


def _file_of(model: Any) -> Path | None:
    """The file or folder whose format the changed network is written in; ``None`` for a network in memory."""
    from strati.io.adapters.merge import is_adapter
    from strati.io.in_memory import is_module
    from strati.io.network import open as open_network

    if is_module(model):
        return None
    network = open_network(model)
    rewritable = not network.in_memory and not network.parts and not is_adapter(network)
    return Path(network.path) if rewritable else None


def _check_place(out: Path, source: Path | None) -> None:
    if source is not None:
        original, place = source.resolve(), out.resolve()
        folder = original if source.is_dir() else original.parent
        if place == original or (source.is_dir() and (folder in place.parents or place in folder.parents)):
            raise BadInputError(out, "would write over the original network; choose a new folder")
        if place == folder:
            raise BadInputError(out, "is the original network's folder; choose a new one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInputError(out, "exists and is not an empty folder; choose a new one")
    if not out.resolve().parent.is_dir():
        raise BadInputError(out, f"its folder {out.resolve().parent} does not exist; create it first")
    if not os.access(out.resolve().parent, os.W_OK):
        raise BadInputError(
            out, f"its folder {out.resolve().parent} cannot be written to; choose another place"
        )


def _check_settings(settings: ApplyConfig, plan_document: Mapping[str, Any], source: Path | None) -> None:
    if settings.heal < 0:
        raise BadInputError("heal", f"is a number of training steps from 0, not {settings.heal}")
    if settings.heal and plan_document["action"] == "adapt":
        raise BadInputError("heal", "is for compressed networks; the action adapt writes an adapter itself")
    if not settings.packed:
        return
    if plan_document["action"] != "quantise":
        raise BadInputError(
            "packed", f"is for quantised layers; the plan's action is {plan_document['action']}"
        )
    if source is None or not (source / "config.json").is_file():
        raise BadInputError("packed", "needs a Hugging Face directory: its config says how layers are packed")


def _check_network(plan_document: Mapping[str, Any], module: nn.Module, source: Path | None) -> None:
    from strati.interventions.targets import weights_digest

    hashes = [n["hash"] for n in plan_document.get("networks", ()) if isinstance(n, Mapping) and "hash" in n]
    if hashes and weights_digest(module) not in hashes:
        what = source if source is not None else "model"
        raise BadInputError(what, "is another network than the plan was made for (its weights differ)")


@contextmanager
def _new_folder(out: Path, size: int) -> Iterator[Path]:
    """A folder that becomes ``out`` when all went well, and nothing otherwise."""
    parent = out.resolve().parent
    free = shutil.disk_usage(parent).free
    if free < _SPARE * size:
        why = f"not enough space: {size * _SPARE / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free"
        raise BadInputError(out, why)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name[:40]}.", dir=parent))
    try:
        yield folder
        for file in (path for path in folder.rglob("*") if path.is_file()):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)
        if out.is_dir():
            out.rmdir()
        folder.rename(out)
    except OSError as error:
        why = f"cannot be written ({error.strerror or error}); nothing was left behind"
        raise BadInputError(out, why) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _evaluator(
    plan_document: Mapping[str, Any], study: Study | None, module: nn.Module, made: nn.Module, data: Any
) -> Evaluator | None:
    """The written network with the data to measure it on: those given, or the study's; ``None`` without any."""
    from strati.interventions.evaluator import Evaluator, as_task, open_evaluators
    from strati.interventions.targets import to_float32

    if data is not None:
        made = to_float32(made)
        task = as_task(data, study or Study("plan", plan_document["performance"], (), 0), made)
        return Evaluator("written", made, task=task)
    evaluators = open_evaluators(study, model=module) if study is not None else []
    if not evaluators:
        return None
    made = made if evaluators[0].task is None else to_float32(made)
    return Evaluator("written", made, task=evaluators[0].task, evaluate=evaluators[0].evaluate)


def _measure(plan_document: Mapping[str, Any], evaluator: Evaluator | None) -> dict[str, Any]:
    from scipy import stats

    from strati.interventions.study_config import CostScale

    if evaluator is None:
        reason = "the study's data are not at hand; give data"
        return {"performance": None, "low": None, "high": None, "reason": reason}
    about = plan_document["performance"]
    measurement = evaluator.now()
    scale = CostScale(
        str(about["name"]),
        bool(about["higher_is_better"]),
        measurement.performance,
        examples=measurement.examples,
        chance=about.get("chance"),
    )
    low = high = None
    if measurement.stderr is not None:
        low, high = scale.interval(0.0, measurement.stderr, float(stats.norm.ppf(0.975)))
    return {"performance": measurement.performance, "low": low, "high": high}


def _seconds(before: nn.Module, after: nn.Module, task: Any) -> tuple[float | None, float | None]:
    """Time of one forward pass of both on the first batch, in turns, the shortest of five: other work only adds."""
    import torch

    from strati.interventions.targets import to_float32

    if task is None:
        return None, None
    before = to_float32(before)
    inputs = task.batches[0][0]
    times: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for _ in range(5):
            for model, durations in zip((before, after), times, strict=True):
                start = time.perf_counter()
                task.output(model, inputs)
                durations.append(time.perf_counter() - start)
    return min(times[0]), min(times[1])


def _weight_bytes(source: Path) -> int:
    if source.is_file():
        return source.stat().st_size
    endings = (".safetensors", ".npz", ".pt", ".pth", ".bin", ".th")
    return sum(p.stat().st_size for p in source.iterdir() if p.suffix in endings)


def _module_bytes(model: nn.Module) -> int:
    return sum(v.numel() * v.element_size() for v in model.state_dict().values())
