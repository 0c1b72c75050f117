"""Studies and audits as text: the answer first, then the numbers it comes from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from strati.core.display import Column, NextCommand, table
from strati.interventions.audit.evidence import LEAST
from strati.interventions.compress.costs import UNIT, CostScale

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.interventions.audit.audit import Audit
    from strati.interventions.audit.verdicts import Verdict
    from strati.interventions.study import Study

_ORDER = ("use", "use-with-care", "distinguish-only", "do-not-use", "unknown")
_NAMED = 4
"""Metrics that a line names before it counts the rest."""
_LONGEST = 80
"""Characters of metrics in the first sentence."""
_PLANNED = ("truncate", "quantise", "prune", "drop", "drop-experts", "merge-experts")


def performance_text(name: str, value: float | None, *, digits: int = 3) -> str:
    """A performance as people write it: a share as a percentage, anything else with three digits.

    Examples:
        >>> performance_text("accuracy", 0.98765), performance_text("loss", 0.031415), performance_text("loss", None)
        ('98.8 %', '0.0314', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:.1f} %" if name in UNIT else f"{value:.{digits}g}"


def study_summary(study: Study) -> RenderableType:
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


def audit_summary(audit: Audit) -> RenderableType:
    """Which metrics to use, grouped by verdict; where points are too few, one line and how many are needed."""
    from rich.console import Group
    from rich.text import Text

    pooled = [verdict for verdict in audit.verdicts if verdict.intervention is None]
    points = [r for r in audit.study.rows if r["status"] == "done" and r["intervention"] != "intact"]
    lines: list[Any] = [Text(line) for line in (*_order_lines(audit), *_answer(audit, pooled, points))]
    if audit.orders:
        lines.append(_order_table(audit))
    judged = [verdict for verdict in pooled if verdict.recommendation != "unknown"]
    if judged:
        lines.append(_metric_table(audit, judged))
    if len({(row.intervention, row.setting) for row in audit.layers}) <= _NAMED:
        lines.append(_layer_table(audit))
    if audit.failed:
        lines.append(Text(f"{audit.failed} of {audit.study.units} points failed and are left out"))
    return Group(*lines)


def _order_lines(audit: Audit) -> list[str]:
    """For each intervention the score that orders its layers or blocks best, or that none does."""
    lines = []
    for kind in dict.fromkeys(row.intervention for row in audit.orders):
        rows = [row for row in audit.orders if row.intervention == kind and row.across != "settings"]
        if not rows:
            continue
        best = rows[0]
        if best.significant:
            low, high = best.spearman_ci
            rho = f"rho {best.spearman:.2f}, {low:.2f} to {high:.2f}"
            lines.append(f"{kind}: choose {best.across} by {best.metric} ({rho}).")
        else:
            name = audit.study.performance["name"]
            lines.append(f"{kind}: no score is shown to order the {best.n} {best.across} like the {name}.")
    return lines


def _order_table(audit: Audit) -> Any:
    """The strongest scores of each intervention."""
    columns = (
        *(Column("intervention", keep=True), Column("orders"), Column("score", keep=True)),
        *(Column("rho", right=True, keep=True), Column("interval", right=True), Column("best", right=True)),
    )
    cells = []
    for kind, across in dict.fromkeys((row.intervention, row.across) for row in audit.orders):
        rows = [row for row in audit.orders if (row.intervention, row.across) == (kind, across)]
        for row in rows[:_NAMED]:
            best = "yes" if row.as_good_as_best else "no"
            cells.append((kind, across, row.metric, _number(row.spearman), _number(row.spearman_ci), best))
    title = f"rank correlation of scores with the loss of {audit.study.performance['name']}"
    return table(columns, cells, title=f"{title}; best: as good as the strongest")


def audit_sentences(audit: Audit) -> list[str]:
    """One sentence per metric, the useful ones first."""
    pooled = [verdict for verdict in audit.verdicts if verdict.intervention is None]
    return [v.text for v in sorted(pooled, key=lambda v: _ORDER.index(v.recommendation))]


def points_needed(metrics: int, strong: float, rate: float) -> int:
    """Points within layers from which a correlation of ``strong`` counts beside that many metrics.

    Fisher's ``atanh(rho)`` has standard error ``1 / sqrt(n - 3)``; three questions are put to each metric.

    Examples:
        >>> points_needed(24, 0.5, 0.02)
        47
    """
    from scipy import stats

    quantile = float(stats.norm.ppf(1.0 - rate / (6.0 * max(metrics, 1))))
    return math.ceil((quantile / math.atanh(strong)) ** 2 + 3.0)


def _answer(audit: Audit, verdicts: list[Verdict], points: list[Any]) -> list[str]:
    """The metrics by verdict, or that there are too few points."""
    groups = {advice: [v for v in verdicts if v.recommendation == advice] for advice in _ORDER}
    networks, layers = len({p["network"] for p in points}), len({p["layer"] for p in points})
    if len(groups["unknown"]) == len(verdicts):
        needed = points_needed(len(verdicts), audit.config.strong, audit.config.false_recommendation_rate)
        size = f"{len(points)} points, {networks} network{_s(networks)}, {layers} layer{_s(layers)}"
        more = f"About {max(needed, len(points) + LEAST)} points are needed: raise draws, or study several networks."
        return [f"Too few measurements to judge any metric ({size}).", more]
    parts = [f"Use: {_with_rho(groups['use'])}." if groups["use"] else "No metric can be recommended."]
    if groups["use-with-care"]:
        parts.append(f"Use with care: {_names(groups['use-with-care'])}.")
    if groups["distinguish-only"]:
        parts.append(f"Only distinguishes the interventions: {_names(groups['distinguish-only'])}.")
    if groups["do-not-use"]:
        parts.append(f"Do not use: {_names(groups['do-not-use'])}.")
    if groups["unknown"]:
        parts.append(f"Cannot tell: {len(groups['unknown'])}.")
    return parts


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _with_rho(verdicts: list[Verdict]) -> str:
    named = sorted(verdicts, key=lambda v: -abs(v.spearman_within_interventions or 0.0))
    words: list[str] = []
    for verdict in named:
        word = f"{verdict.metric} (rho {_number(verdict.spearman_within_interventions)})"
        if words and len(", ".join([*words, word])) > _LONGEST:
            break
        words.append(word)
    return ", ".join(words) + (f", {len(named) - len(words)} more" if len(named) > len(words) else "")


def _names(verdicts: list[Verdict]) -> str:
    words = ", ".join(v.metric for v in verdicts[:_NAMED])
    return words + (f", {len(verdicts) - _NAMED} more" if len(verdicts) > _NAMED else "")


def _metric_table(audit: Audit, verdicts: list[Verdict]) -> Any:
    rhos = {r.metric: r for r in audit.metrics if r.layer is None and r.intervention is None}
    columns = (
        Column("metric", keep=True),
        Column("verdict", keep=True),
        Column("rho", right=True, keep=True),
        Column("all points", right=True),
        Column("interval", right=True),
        Column("within layers", right=True),
    )
    ordered = sorted(
        verdicts,
        key=lambda v: (
            _ORDER.index(v.recommendation),
            -abs(v.spearman_within_interventions or 0.0),
            -abs(rhos[v.metric].spearman or 0.0),
        ),
    )
    cells = []
    for v in ordered:
        row = rhos[v.metric]
        numbers = (v.spearman_within_interventions, row.spearman, row.spearman_ci, row.spearman_within)
        cells.append((v.metric, v.recommendation, *map(_number, numbers)))
    name, coverage = audit.study.performance["name"], f"{100 * audit.config.confidence:g} %"
    title = f"rank correlation with {name}; the verdict rests on rho, the strongest within one intervention"
    return table(columns, cells, title=f"{title} (-: on all points, interval of {coverage} coverage)")


def _layer_table(audit: Audit) -> Any:
    """What each layer retains of its performance, one column per intervention and setting."""
    kinds = list(dict.fromkeys((row.intervention, row.setting) for row in audit.layers))
    heads = [kind if setting is None else f"{kind} {setting}" for kind, setting in kinds]
    by_place = {(row.layer, row.intervention, row.setting): row for row in audit.layers}
    cells = [
        (layer, *(_retained(by_place.get((layer, *kind))) for kind in kinds))
        for layer in dict.fromkeys(row.layer for row in audit.layers)
    ]
    columns = [Column("layer", keep=True), *(Column(head, right=True) for head in heads)]
    return table(columns, cells, title="performance retained by layer")


def _retained(row: Any) -> str:
    if row is None or row.retained is None:
        return "-"
    return f"{100 * row.retained:.0f} % {row.layer_class or ''}".rstrip()


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value[0]:.2f} to {value[1]:.2f}" if isinstance(value, tuple) else f"{value:.2f}"
