"""Rules that decide from the rows of a reproduction whether a claim holds.

A rule reads rows by their keys and typed facts, never by their text. It gives ``None`` where the rows do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Rows = Sequence[Mapping[str, Any]]
Outcome = bool | Literal["partly"] | None
"""What a rule reads from the rows; ``None`` where they do not decide."""
_LEVEL = 0.05


def _rows_of(rows: Rows, key: str, **facts: object) -> list[Mapping[str, Any]]:
    """The rows of a key whose facts have these values."""
    return [
        row
        for row in rows
        if row.get("key") == key and all(row["facts"].get(name) == value for name, value in facts.items())
    ]


def all_ours(rows: Rows, key: str, test: Callable[[float], bool], **facts: object) -> bool | None:
    """Whether our number passes a test in all rows of a key; ``None`` where there is no such row."""
    numbers = [row["ours"] for row in _rows_of(rows, key, **facts) if isinstance(row["ours"], int | float)]
    return all(test(float(number)) for number in numbers) if numbers else None


def _one(rows: Rows, key: str) -> float | None:
    numbers = [row["ours"] for row in _rows_of(rows, key) if isinstance(row["ours"], int | float)]
    return float(numbers[0]) if numbers else None


def within_the_papers_share(rows: Rows) -> Outcome:
    """Whether 1 to 6 % of every network's eigenvalues are quasi-null; in part where that holds of some layers."""
    measured = _rows_of(rows, "quasi-null-share")
    if not measured:
        return None
    shares = [float(row["ours"] if row["ours"] is not None else row["paper_network"]) for row in measured]
    if all(1 <= share <= 6 for share in shares):
        return True
    return "partly" if any(row["facts"]["most"] >= 1 for row in measured) else False


def mostly(rows: Rows, key: str) -> Outcome:
    """Whether what a row counts holds in all cases; in part where it holds in more than half of them."""
    counts = [(row["facts"]["count"], row["facts"]["of"]) for row in _rows_of(rows, key)]
    if not counts:
        return None
    if all(count == of for count, of in counts):
        return True
    return "partly" if all(2 * count > of for count, of in counts) else False


def only_the_first_loses_much(rows: Rows) -> bool | None:
    """Whether the first layer alone is not robust: the paper's word for it is critical, but it gives no bounds."""
    layers = [row["facts"] for row in _rows_of(rows, "accuracy-after", intervention="reinitialise")]
    return all((f["class"] == "robust") != (f["layer"] == "fc1") for f in layers) if layers else None


def spectra_stay(rows: Rows) -> bool | None:
    """Whether alpha and the spectra move by less than 0.5 at every weight decay up to 10."""
    answers = [
        all_ours(rows, key, lambda v: v < 0.5, decay=decay)
        for decay in (0.1, 1.0, 10.0)
        for key in ("alpha-change", "spectral-distance")
    ]
    return None if None in answers else all(answers)


def mlp_is_smaller(rows: Rows, metric: str) -> bool | None:
    """Whether MLP layers have the smaller value beyond chance in every network."""
    tests = [row["facts"] for row in _rows_of(rows, "mlp-against-attention", metric=metric)]
    return all(f["smaller"] and f["pvalue"] < _LEVEL for f in tests) if tests else None


def larger_is_smaller(rows: Rows, key: str) -> bool | None:
    """Whether the larger network's value is smaller in attention and in MLP layers, beyond chance."""
    tests = [row["facts"] for row in _rows_of(rows, key)]
    return all(f["effect"] < 0 and f["pvalue"] < _LEVEL for f in tests) if tests else None


def removal_changes_nothing(rows: Rows) -> bool | None:
    """Whether the loss without quasi-null directions differs by less than 0.01."""
    intact, changed = _one(rows, "loss-intact"), _one(rows, "loss-without-quasi-null")
    return None if intact is None or changed is None else abs(changed - intact) < 0.01


def alpha_predicts_nothing(rows: Rows, *, vit: bool) -> bool | None:
    """Whether the mean correlation of alpha over layers is below 0.2, in vision transformers or in the others."""
    correlations = [
        row["ours"]
        for row in _rows_of(rows, "mean-correlation", metric="alpha", statistic="Spearman")
        if str(row["facts"]["network"]).startswith("vit-") == vit
    ]
    return all(abs(float(rho)) < 0.2 for rho in correlations) if correlations else None


def sparser_than(rows: Rows, other: str) -> bool | None:
    """Whether the interaction basis needs fewer edges than another one on every network."""
    edges: dict[str, dict[str, float]] = {}
    for row in _rows_of(rows, "edges"):
        edges.setdefault(row["facts"]["network"], {})[row["facts"]["basis"]] = float(row["ours"])
    return all(bases["interaction"] < bases[other] for bases in edges.values()) if edges else None


def behavioural_is_no_lower(rows: Rows) -> bool | None:
    """Whether the behavioural coefficient is at least that of the training loss, to 0.05."""
    training, behavioural = _one(rows, "lambda-training"), _one(rows, "lambda-behavioural")
    return None if training is None or behavioural is None else behavioural >= training - 0.05


def complete(rows: Rows, key: str, **facts: object) -> bool | None:
    """Whether what a row counts holds in all cases, and there is a case."""
    counts = [row["facts"] for row in _rows_of(rows, key, **facts)]
    return all(f["count"] == f["of"] > 0 for f in counts) if counts else None


def all_agree(rows: Rows, key: str) -> bool | None:
    """Whether all rows of a key agree with the paper or the theory."""
    answers = [row["agrees"] for row in _rows_of(rows, key) if row.get("agrees")]
    return all(answer == "yes" for answer in answers) if answers else None


def one_variant_is_exact(rows: Rows) -> bool | None:
    """Whether a variant gives all numbers of table 1 of dropped-neural-net."""
    counts = [row["facts"]["exact"] for row in _rows_of(rows, "table-1-variants")]
    return None if not counts else counts[0] > 0


def changes_with_the_scale(rows: Rows) -> bool | None:
    """Whether the coefficients at the smallest and the largest scale are the paper's, and surely differ."""
    ends = [row for row in _rows_of(rows, "lambda-at-scale") if row["paper"] is not None]
    if len(ends) != 2:
        return None
    apart = abs(ends[0]["ours"] - ends[1]["ours"])
    return apart > 5 * math.hypot(*(row["error"] for row in ends)) and all(r["agrees"] == "yes" for r in ends)


def only_decay_generalises(rows: Rows) -> bool | None:
    """Whether every run with weight decay generalises and the one without is wrong more often than right."""
    with_decay = complete(rows, "runs-that-generalise")
    without = [row["facts"]["accuracy"] for row in _rows_of(rows, "accuracy-without-decay")]
    return None if with_decay is None or not without else with_decay and without[0] < 0.5


def coefficient_falls(rows: Rows) -> bool | None:
    """Whether the learning coefficient ends below its peak by more than five errors, in every run with weight decay."""
    runs = [row["facts"] for row in _rows_of(rows, "peak-and-end", decay=True)]
    if not runs or not all("peak" in f for f in runs):
        return None
    return all(f["peak"] - f["end"] > 5 * math.hypot(f["peak_error"], f["end_error"]) for f in runs)


def stages_in_order(rows: Rows) -> bool | None:
    """Whether all stages appear in their order."""
    stages = sorted((row["facts"] for row in _rows_of(rows, "stage")), key=lambda f: f["stage"])
    if not stages:
        return None
    steps = [f["step"] for f in stages]
    return None not in steps and steps == sorted(steps)


def induction_is_lower(rows: Rows) -> bool | None:
    """Whether every induction head has a lower coefficient than the others; ``None`` where no such head formed."""
    facts = [row["facts"] for row in _rows_of(rows, "induction-lower")]
    return facts[0]["lower"] if facts else None


def generalising_is_lower(rows: Rows) -> bool | None:
    """Whether every run with decay ends below the run without, by more than two errors."""
    facts = [row["facts"] for row in _rows_of(rows, "peak-and-end") if "end" in row["facts"]]
    ends, alone = ([f for f in facts if f["decay"] is decay] for decay in (True, False))
    if not ends or not alone:
        return None
    limit, error = alone[0]["end"], alone[0]["end_error"]
    return all(f["end"] + 2 * math.hypot(f["end_error"], error) < limit for f in ends)


def previous_token_head_is_found(rows: Rows) -> bool | None:
    """Whether weights and attention name the same previous-token head."""
    facts = [row["facts"] for row in _rows_of(rows, "previous-by-weights")]
    return bool(facts[0]["same"]) if facts else None


def susceptibilities_separate(rows: Rows) -> bool | None:
    """Whether the heads of the induction circuit are separated; ``None`` where none formed."""
    facts = [row["facts"] for row in _rows_of(rows, "separation")]
    return facts[0]["separate"] if facts else None


def pairs_are_separated(rows: Rows) -> bool | None:
    """Whether every pair scores higher than every other combination."""
    pairs, others = _one(rows, "pairs-least"), _one(rows, "non-pairs-greatest")
    return None if pairs is None or others is None else pairs > others


def both_tables_agree(rows: Rows) -> bool | None:
    """Whether all numbers of tables 2 and 3 agree."""
    answers = [all_agree(rows, f"table-{number}") for number in (2, 3)]
    return None if None in answers else all(answers)


def grid_reaches_the_table(rows: Rows) -> Outcome:
    """Whether a training of the grid gives all numbers of table 1 within two errors; in part with few networks."""
    closest = [row["facts"] for row in _rows_of(rows, "closest-training")]
    if not closest:
        return None
    if not closest[0]["within"]:
        return False
    return True if closest[0]["networks"] >= closest[0]["planned"] else "partly"


def coefficient_follows_size(rows: Rows) -> Outcome:
    """Whether coefficient and size have rank correlations of 0.8; in part where some have."""
    close = [row["facts"]["rho"] >= 0.8 for row in _rows_of(rows, "law")]
    return None if not close else True if all(close) else "partly" if any(close) else False


def coefficient_predicts_best(rows: Rows) -> Outcome:
    """Whether the coefficient explains more of left-out trainings than number and size of the weights do."""
    shares: dict[str, dict[tuple[str, float], float]] = {}
    for f in (row["facts"] for row in _rows_of(rows, "prediction")):
        shares.setdefault(f["predictor"], {})[f["edit"], f["tolerance"]] = f["share"]
    ours, others = (shares.get(name, {}) for name in ("lambda", "number and size of the weights"))
    better = [share > others[case] for case, share in ours.items() if case in others]
    return None if not better else True if all(better) else "partly" if any(better) else False


def layers_follow_their_coefficient(rows: Rows) -> Outcome:
    """Whether the audit recommends the coefficient at every setting; in part where only the correlation is clear."""
    advice = [
        row["facts"]["recommendation"] for row in _rows_of(rows, "layer-audit", metric="learning_coefficient")
    ]
    clear = [row["facts"]["low"] > 0 for row in _rows_of(rows, "layer-law", per_weight=True)]
    if not advice or not clear:
        return None
    return True if set(advice) == {"use"} else "partly" if all(clear) else False


def comes_first(rows: Rows, signal: str) -> Outcome:
    """Whether a signal comes before every fall of the test accuracy; ``None`` where no accuracy fell."""
    facts = [row["facts"] for row in _rows_of(rows, "heralded", signal=signal)]
    if not facts or not facts[0]["of"]:
        return None
    return True if facts[0]["count"] == facts[0]["of"] else "partly" if facts[0]["count"] else False


def smallest_cost_more(rows: Rows) -> Outcome:
    """Whether removing the smallest decile costs more than a middle one by two errors; in part in some networks."""
    gaps = [row["facts"] for row in _rows_of(rows, "smallest-against-bulk", group="all matrices")]
    above = [f["gap"] > 2 * f["error"] for f in gaps]
    return None if not above else True if all(above) else "partly" if any(above) else False


def smallest_overlap_more(rows: Rows) -> Outcome:
    """Whether the smallest decile overlaps with the inputs more than the middle ones do, beyond chance."""
    tests = [row["facts"] for row in _rows_of(rows, "smallest-overlap", group="all matrices")]
    above = [f["factor"] > 1 and f["pvalue"] < _LEVEL for f in tests]
    return None if not above else True if all(above) else "partly" if any(above) else False
