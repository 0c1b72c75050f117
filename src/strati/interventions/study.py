"""The intervention study: every layer re-initialised and re-randomised, performance and metrics recorded.

:func:`study` runs one, from a spec or on modules in memory; :class:`Study` is its rows. What the rows say of the
metrics is ``audit``.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from strati.core import plugins
from strati.core.display import Column, NextCommand, natural, table
from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.plugins import require
from strati.core.results import Result, Tick, silent
from strati.interventions.study_config import (
    EXPERT_TOKENS,
    FEW_TOKENS,
    FORMAT,
    STORE,
    CostScale,
    StudyCall,
    StudyConfig,
    StudyOrigin,
    is_spec,
    override,
    performance_text,
)
from strati.interventions.study_spec import read_spec
from strati.jobs.engine import Outcome
from strati.jobs.store import Finished, Run, Store, drive, interruptible, open_store, shared_folder

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType
    from torch import nn

    from strati.core.option_types import StudyOptions
    from strati.interventions.evaluator import Evaluate
    from strati.interventions.study_job import Job, StudyBody
    from strati.schemas.json_types import Failure

FIRST_COLUMNS = (
    *("network", "layer", "intervention", "setting", "draw", "type", "status", "reason", "initialiser"),
    *("performance", "performance_stderr", "intact_performance"),
)
NO_METRICS = frozenset(
    {
        *FIRST_COLUMNS,
        "groups",
        *("learning_coefficient_stderr", "hessian_trace_stderr", "traps_stderr", "alpha_hill_stderr"),
        *("alpha_farms_stderr", "level_spacing_stderr"),
        "calibration_tokens",
        "warning",
    }
)
"""What a row holds beside metrics; ``groups`` are its scores by groups of examples, for paired comparisons."""
_PLANNED = ("truncate", "quantise", "prune", "drop", "drop-experts", "merge-experts")
"""Interventions that a plan is made of."""


@dataclass(frozen=True)
class Study(Result):
    """The rows of a study: one per (network, layer, intervention, setting, draw).

    ``origin`` says where its networks and data are, ``body`` holds them while they are in memory; plans use both.
    """

    verb: ClassVar[str] = "study"
    key_columns: ClassVar[tuple[str, ...]] = (
        "network",
        "layer",
        "intervention",
        "setting",
        "draw",
        "performance",
        "performance_stderr",
        "intact_performance",
    )
    omitted: ClassVar[tuple[str, ...]] = ("rows", "origin", "body")
    computed: ClassVar[tuple[str, ...]] = ("done", "failed", "failures", "calibration", "warnings")

    name: str
    performance: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    units: int
    store: str | None = None
    origin: StudyOrigin = field(default_factory=StudyOrigin, repr=False, compare=False)
    body: StudyBody | None = field(default=None, repr=False, compare=False)

    @property
    def done(self) -> int:
        """How many points are measured."""
        return sum(row["status"] == "done" for row in self.rows)

    @property
    def failed(self) -> int:
        """How many points failed."""
        return sum(row["status"] == "failed" for row in self.rows)

    @property
    def failures(self) -> list[Failure]:
        """Why points failed, and how many for that reason."""
        reasons = Counter(row["reason"] for row in self.rows if row["status"] == "failed")
        return [{"reason": reason, "count": count} for reason, count in sorted(reasons.items())[:50]]

    @property
    def calibration(self) -> dict[str, Any] | None:
        """How many rows of data the input covariances come from, if some were kept apart."""
        return None if self.origin.calibration is None else {"rows": self.origin.calibration}

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics recorded."""
        columns = dict.fromkeys(name for row in self.rows for name in row)
        return tuple(name for name in columns if name not in NO_METRICS)

    @property
    def warnings(self) -> list[dict[str, str]]:
        """What a reader must know: layers and experts that saw few calibration tokens, experts that were not reached.

        The codes are ``few-tokens``, ``few-expert-tokens`` and ``stacked-experts``.
        """
        warnings = []
        few = {
            row["layer"]: row["calibration_tokens"] for row in self.rows if row.get("warning") == FEW_TOKENS
        }
        if few:
            least = min(few, key=lambda name: few[name])
            text = (
                f"{len(few)} layers saw fewer calibration tokens than they have inputs (least: {least}, "
                f"{few[least]} tokens); give more calibration data"
            )
            warnings.append({"code": FEW_TOKENS, "text": text})
        experts = [row["layer"] for row in self.rows if row.get("warning") == EXPERT_TOKENS]
        if experts:
            warnings.append(expert_warning(experts))
        stacked = self.origin.stacked_experts
        if stacked:
            text = (
                f"{len(stacked)} layers of experts store their experts in one tensor (first: {stacked[0]}) and are "
                "left alone; remove experts with drop-experts or merge-experts"
            )
            warnings.append({"code": "stacked-experts", "text": text})
        return warnings

    def frame(self) -> pd.DataFrame:
        """All rows, sorted by (network, layer, intervention, setting, draw)."""
        import pandas as pd

        ordered = sorted(self.rows, key=row_key)
        aware = [c for c in ("calibration_tokens", "warning") if any(c in row for row in self.rows)]
        return pd.DataFrame(list(ordered), columns=[*FIRST_COLUMNS, *aware, *self.metrics])

    def summary(self) -> RenderableType:
        """Performance of each layer under each intervention."""
        return _summary(self)

    def plot(self, *, metric: str | Sequence[str] | None = None, **options: Any) -> Any:
        """Performance against a metric, one panel per layer, as figures 2 to 11 of the paper."""
        from strati.report.plots.study import scatter

        return scatter(self, metric, **options)


def expert_warning(layers: Sequence[str]) -> dict[str, str]:
    """The warning that layers of experts are left alone, because too few calibration tokens reached them."""
    names = list(dict.fromkeys(layers))
    text = (
        f"{len(names)} layers of experts saw fewer calibration tokens than they have inputs and are left alone "
        f"(first: {names[0]}); give more calibration data"
    )
    return {"code": EXPERT_TOKENS, "text": text}


def study(
    model: str | Path | Mapping[str, Any] | StudyCall | nn.Module,
    *,
    out: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    evaluate: Evaluate | None = None,
    data: Any = None,
    tick: Tick = silent,
    config: StudyConfig | None = None,
    **options: Unpack[StudyOptions],
) -> Study:
    """Change every layer of a network, one at a time, and record what happens.

    Args:
        model: A spec (a TOML file, a built-in name, a mapping); or, with ``evaluate`` or ``data``, whatever names a
            network, or a mapping of names to such.
        out: The folder of the store: a stopped study resumes there. Without it nothing is kept.
        engine: Where the work is done: ``local`` (processes) or ``ray``.
        address: With ``engine="ray"``, an existing cluster.
        evaluate: For networks: a function of the network that returns its performance. Whether more is better must be
            known: by the measure's name (``performance="loss"``, or the function's own name) or ``higher_is_better=``.
            A network with all weights zero must not score better than the intact one.
        data: For networks, instead of ``evaluate``: whatever names data with labels, or token ids; performance is then
            the accuracy on them (perplexity for tokens), everything before the changed layer is computed once, and the
            metrics that need data are recorded too. A module in half or double precision is computed in
            float32; with ``evaluate`` it stays as it is.
        tick: Called after each unit of work, with its name.
        config: All options in one :class:`StudyConfig`.
        **options: Fields of :class:`StudyConfig` by name; they win over ``config`` and over what a spec says.

    Returns:
        The rows.

    Raises:
        BadInputError: A spec with an unknown key, data that do not fit, a folder that holds another study, or a study
            in which every point failed.
        StoppedError: Ctrl-C.

    Examples:
        >>> import torch, strati
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(64, 4)
        >>> y = net(x).argmax(1)  # by its own labels the network is perfect
        >>> measured = study(net, data=(x, y), interventions=strati.truncate(rank=[1, 2]))
        >>> measured.units, measured.done, float(measured.frame()["performance"].max())
        (6, 6, 1.0)
    """
    require("torch", "torch", "an intervention study")
    from strati.interventions.study_job import make_job

    config = resolve(StudyConfig, config, options, of=study)
    config.check()
    config = replace(config, plugins={**plugins.load_all(plugins.METRICS), **config.plugins})
    has_measure = evaluate is not None or data is not None
    if not is_spec(model, has_measure=has_measure):
        return _run(make_job(model, evaluate, data, config), out, config.run(tick, engine, address))
    if has_measure:
        raise BadInputError("study", "evaluate and data are for networks; a spec names its own")
    call = model if isinstance(model, StudyCall) else read_spec(model)  # type: ignore[arg-type]
    call = override(call, config, set(options))
    run = call.config.run(tick, engine, address, workers=0)
    training = None
    with ExitStack() as stack:
        if call.trains:
            folder = Path(out or stack.enter_context(tempfile.TemporaryDirectory()))
            with interruptible(lambda: 0, run):
                networks, initial = call.model.train(folder, run)
            training = call.model.document
            call = StudyCall(call.name, networks, call.model.data, replace(call.config, initial=initial))
        job = make_job(call.model, None, call.data, call.config, name=call.name, training=training)
        return _run(job, out, run)


def study_in_cache(model: Any, data: Any, config: StudyConfig, out: str | Path | None, tick: Tick) -> Study:
    """A study of a network, stored in a folder given, or in the cache under the hash of all that it depends on.

    A network in memory is not looked for in the cache, and its study is not stored without a folder.
    """
    from strati.interventions.study_job import make_job

    config.check()
    job = make_job(model, None, data, config)
    stored = all(network.path is not None for network in job.origin.networks.values())
    folder = out if out is not None or not stored else cache_folder() / job.identity[:32]
    return _run(job, folder, config.run(tick))


def cache_folder() -> Path:
    """Where studies are stored that no folder was given for (``XDG_CACHE_HOME``, default ``~/.cache``)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "strati" / "studies"


def load_study(folder: str | Path) -> Study:
    """The study kept in a folder, as far as it got.

    Raises:
        BadInputError: There is no study, or its store is damaged.
    """
    path = Path(folder) / STORE
    if not Path(folder).is_dir():
        raise BadInputError(folder, "no such folder; give the folder of a study")
    with Store(path) as store:
        about = store.about()
        layout = about.get("format", 1)
        if layout != FORMAT:
            remedy = "update strati" if layout > FORMAT else "run the study again in another folder"
            raise BadInputError(
                folder, f"holds rows of format {layout}, this strati reads {FORMAT}; {remedy}"
            )
        origin = StudyOrigin.from_plain(about["origin"])
        return Study(about["name"], about["performance"], _rows(store), about["units"], str(path), origin)


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows are sorted by: network, layer, intervention, setting and draw, numbers in names by their size."""
    setting = "" if row.get("setting") is None else str(row["setting"])
    names = (row["network"], row["layer"], row["intervention"], setting)
    return (*(natural(str(name)) for name in names), row.get("draw", 0))


def _summary(study: Study) -> RenderableType:
    """The most sensitive layer, the intact performance, and a table with one column per setting."""
    from rich.console import Group
    from rich.text import Text

    rows = study.frame()
    done = rows[rows["status"] == "done"]
    changed = done[done["intervention"] != "intact"]
    name = str(study.performance["name"])
    lines: list[Any] = [Text(_most_sensitive(study, changed)), Text(_intact_line(study, rows))]
    lines += [table(columns, cells, title=title) for title, columns, cells in _tables(study, changed, name)]
    lines += [Text(f"{warning['code']}: {warning['text']}") for warning in study.warnings]
    if study.origin.without_blocks:
        lines.append(Text("drop: the network has no residual blocks, so none was dropped"))
    if study.failed:
        reasons = rows[rows["status"] == "failed"]["reason"].value_counts()
        lines += [Text(f"failed {count} times: {reason}") for reason, count in reasons.head(5).items()]
    if study.store is not None:
        folder = study.store.removesuffix("/study.sqlite")
        plannable = any(kind in set(changed["intervention"]) for kind in _PLANNED)
        lines.append(Text(f"stored in {folder}"))
        following = f"plan {folder} --budget loss=+2%" if plannable else f"audit {folder}"
        lines.append(NextCommand((f"strati {following}",)))
    return Group(*lines)


def _most_sensitive(study: Study, changed: pd.DataFrame) -> str:
    """The layer that loses most, and what was done to it."""
    if not len(changed):
        return f"{study.name}: no changed layer was measured"
    better = bool(study.performance["higher_is_better"])
    keys = [changed["layer"], changed["intervention"], changed["setting"].fillna("")]
    means = changed.groupby(keys)["performance"].mean()
    worst: Any = means.idxmin() if better else means.idxmax()
    name = str(study.performance["name"])
    text = performance_text(name, float(means[worst]))
    return f"Most sensitive: {worst[0]}, {name} {text} after {' '.join(filter(None, worst[1:]))}."


def _intact_line(study: Study, rows: pd.DataFrame) -> str:
    name = str(study.performance["name"])
    intact = {r["network"]: r["intact_performance"] for r in study.rows if r["status"] == "done"}
    mean = sum(intact.values()) / len(intact) if intact else None
    examples = study.origin.data.rows
    where = f" on {examples:,} rows" if examples else ""
    networks = rows["network"].nunique()
    of = f", mean of {networks} networks" if networks > 1 else _intact_interval(study, name, examples)
    counts = f"{study.done} points measured"
    counts += f", {study.units - study.done} of {study.units} missing" if study.done < study.units else ""
    return f"Intact {name}: {performance_text(name, mean)}{of}{where}; {counts}."


def _intact_interval(study: Study, name: str, examples: int | None) -> str:
    """The 95 % interval of the intact network's performance, in parentheses; nothing where its error is not defined."""
    row = next((r for r in study.rows if r["intervention"] == "intact" and r["status"] == "done"), {})
    error, value = row.get("performance_stderr"), row.get("performance")
    if error is None or value is None:
        return ""
    scale = CostScale(name, bool(study.performance["higher_is_better"]), value, examples=examples)
    ends = scale.interval(0.0, error / value if name == "perplexity" else error, 1.96)
    low, high = (performance_text(name, end).removesuffix(" %") for end in ends)
    return f" ({low} to {high})"


def _tables(
    study: Study, changed: pd.DataFrame, name: str
) -> list[tuple[str, list[Column], list[tuple[str, ...]]]]:
    """One table per intervention with settings, and one for all interventions without."""
    plain = changed[changed["setting"].isna()]
    parts: list[tuple[str, pd.DataFrame, str]] = []
    if len(plain):
        parts.append((f"{name} after changing one layer", plain, "intervention"))
    for kind in dict.fromkeys(changed[changed["setting"].notna()]["intervention"]):
        kind_rows = changed[(changed["intervention"] == kind) & changed["setting"].notna()]
        parts.append((f"{name} after {kind} of one layer", kind_rows, "setting"))
    tables = []
    for title, part, by in parts:
        heads = list(dict.fromkeys(row[by] for row in study.rows if row[by] in set(part[by])))
        heads.sort(key=lambda head: _leading_number(str(head)))
        means = part.groupby(["layer", by])["performance"].agg(["mean", "sem", "size"])
        cells = [
            (str(layer), *(_cell(name, means, (layer, head)) for head in heads))
            for layer in dict.fromkeys(part["layer"])
        ]
        option, words = _headings([str(head) for head in heads])
        columns = [Column("layer", keep=True), *(Column(word, right=True) for word in words)]
        tables.append((f"{title}, by {option}" if option else title, columns, cells))
    return tables


def _headings(settings: list[str]) -> tuple[str, list[str]]:
    """The option that all settings have alone, and its values; else no option and the settings as they are."""
    options = {setting.partition("=")[0] for setting in settings}
    if len(options) == 1 and all("=" in setting and "," not in setting for setting in settings):
        return options.pop(), [setting.partition("=")[2] for setting in settings]
    return "", settings


def _leading_number(setting: str) -> float:
    """The first number of a setting, to order columns by; zero where there is none."""
    words = setting.partition("=")[2].partition(",")[0]
    try:
        return float(words)
    except ValueError:
        return 0.0


def _cell(name: str, means: pd.DataFrame, key: Any) -> str:
    if key not in means.index:
        return "-"
    row = means.loc[key]
    text = performance_text(name, float(row["mean"]))
    spread = "" if row["size"] < 2 else f" +- {performance_text(name, float(row['sem']), digits=2)}"
    return f"{text}{spread}"


def _run(job: Job, out: str | Path | None, run: Run) -> Study:
    with ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        alone = stack.enter_context(shared_folder(folder))
        about = {"name": job.name, "performance": job.performance, "units": job.points}
        about["origin"] = asdict(job.origin)
        store = stack.enter_context(
            open_store(folder / STORE, identity=job.identity, layout=FORMAT, about=about)
        )
        stack.enter_context(interruptible(lambda: sum(r["status"] == "done" for r in _rows(store)), run))
        list(store.units())  # a damaged row is found now, not after hours
        job.write_data(folder)
        done = store.keys(failed=not run.retry)
        units = [unit for unit in job.units if unit.key not in done]
        run.expect(len(units))

        def keep(outcome: Outcome) -> Finished:
            unit, reason = outcome.unit, outcome.reason
            rows = outcome.value if reason is None else job.failed_rows(unit, reason)
            return Finished(unit.key, unit.name, {"rows": rows}, reason)

        drive(store, job.body, units if alone else units[::-1], keep, run)
        for evaluator in job.body.evaluators.values():
            evaluator.forget()
        place = None if out is None else str(folder / STORE)
        measured_study = Study(
            job.name, job.performance, _rows(store), job.points, place, job.origin, job.body
        )
        _check_done(measured_study)
        return measured_study


def _check_done(measured_study: Study) -> None:
    """A study without one changed layer that could be measured is no study.

    Raises:
        BadInputError: There is none; the reason is the commonest one.
    """
    changed = [row for row in measured_study.rows if row["intervention"] != "intact"]
    if changed and not any(row["status"] == "done" for row in changed):
        reasons = Counter(str(row["reason"]) for row in changed)
        reason, count = reasons.most_common(1)[0]
        why = f"every point failed, all {len(changed)} changed layers; {count} of them: {reason}"
        raise BadInputError(measured_study.store or measured_study.name, why)


def _rows(store: Store) -> tuple[dict[str, Any], ...]:
    return tuple(sorted((row for unit in store.units() for row in unit.value.get("rows", ())), key=row_key))
