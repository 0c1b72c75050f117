"""Made-up results in the shape of each verb's JSON: for layout, sizes and hostile content, never for numbers.

The sections themselves are tested on what the real verbs return (``tests/report/conftest.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strati.spectra.marchenko_pastur import ppf

ROLES = ("attention.q", "attention.k", "attention.v", "attention.out", "mlp.in", "mlp.out")
PHASES = ("random-like", "bleeding-out", "bulk+spikes", "bulk-decay", "heavy-tailed", "rank-collapse")


def head(verb: str) -> dict[str, Any]:
    return {"schema": f"strati.{verb}/1", "strati": "0.0.0"}


def spectrum(rng: np.random.Generator, rows: int, cols: int, heavy: float) -> np.ndarray:
    """A random bulk and, by ``heavy``, a share of eigenvalues beyond it; drawn from the law, no matrix needed."""
    m, n = min(rows, cols), max(rows, cols)
    bulk = n * 0.02**2 * ppf((np.arange(m) + rng.random(m)) / m, n / m)
    tail = int(heavy * m / 8)
    if tail:
        bulk[-tail:] = bulk[-1] * (1 + rng.pareto(2.0, tail))
    return np.sort(bulk)


def layer(
    name: str, role: str, rows: int, cols: int, eigenvalues: np.ndarray, **extra: Any
) -> dict[str, Any]:
    """One layer of a scan, its numbers computed plainly from its eigenvalues."""
    m, n = min(rows, cols), max(rows, cols)
    sigma = float(np.sqrt(np.median(eigenvalues) / n))
    minus, plus = (n * (sigma * (1 + sign * np.sqrt(m / n))) ** 2 for sign in (-1, 1))
    xmin = float(eigenvalues[int(0.8 * m)])
    tail = eigenvalues[eigenvalues >= xmin]
    alpha = float(1 + len(tail) / np.log(tail / xmin).sum())
    top, total = float(eigenvalues[-1]), float(eigenvalues.sum())
    spikes = int((eigenvalues > 1.05 * plus).sum())
    share = eigenvalues / total
    return {
        "name": name, "role": role, "block": None, "kind": "linear", "rows": rows, "cols": cols, "aspect": n / m,
        "parameters": rows * cols, "hard_rank": m, "stable_rank": total / top,
        "entropy": float(-(share * np.log(share)).sum() / np.log(m)),
        "frobenius_norm": total**0.5, "spectral_norm": top**0.5,
        "alpha": alpha, "alpha_stderr": (alpha - 1) / len(tail) ** 0.5, "xmin": xmin, "ks_distance": 0.05,
        "tail_size": len(tail), "alpha_weighted": alpha * np.log10(top), "log_alpha_norm": 1.0, "mu": 2 * (alpha - 1),
        "mp_sigma": sigma, "mp_lambda_minus": minus, "mp_lambda_plus": plus, "mp_soft_rank": plus / top,
        "mp_ks_distance": 0.04, "spikes": spikes, "quasi_null": int((eigenvalues < 0.8 * minus).sum()),
        "phase": PHASES[0] if not spikes else PHASES[2] if spikes < m / 20 else PHASES[4],
        "phase_evidence": f"{spikes} of {m} eigenvalues beyond the edge", "view": "the tensor as it is",
        "warnings": [] if spikes else [{"code": "noise-like", "text": "the random bulk explains the spectrum"}],
        "eigenvalues": eigenvalues.tolist(),
    } | extra  # fmt: skip


def scan(layers: int = 24, size: int = 96, *, exact: int = 24) -> dict[str, Any]:
    """A transformer's worth of layers; beyond the first ``exact`` ones spectra are jittered copies."""
    rng = np.random.default_rng(3)
    made: list[dict[str, Any]] = []
    spectra: list[tuple[int, int, np.ndarray]] = []
    for i in range(layers):
        rows, cols = size * (4 if i % 6 == 4 else 1), size * (4 if i % 6 == 5 else 1)
        if i < exact:
            spectra.append((rows, cols, spectrum(rng, rows, cols, heavy=(i / exact) ** 1.5)))
        rows, cols, values = spectra[i % len(spectra)]
        values = np.sort(values * np.exp(rng.normal(0, 0.01, len(values))))
        role = ROLES[i % 6]
        name = f"encoder.layer.{i // 6}.{role}.weight"
        made.append(layer(name, role, rows, cols, values, block=i // 6))
    parameters = sum(item["parameters"] for item in made)
    network = {
        "path": "models/sample.safetensors",
        "format": "safetensors",
        "parameters": parameters,
        "tensors": 2 * layers,
    }
    skipped = [{"name": "encoder.layer.0.norm.weight", "reason": "one-dimensional"}]
    return head("scan") | {"network": network, "layers": made, "skipped": skipped}


def hostile(text: str) -> list[dict[str, Any]]:
    """Every verb's result with ``text`` wherever a name from a file can stand."""
    rng = np.random.default_rng(0)
    one = layer(
        text, text, 32, 32, spectrum(rng, 32, 32, 0.5), phase=text, view=text, kind=text, phase_evidence=text
    )
    one["warnings"] = [{"code": text, "text": text}]
    two = layer(text + "2", "linear", 32, 32, spectrum(rng, 32, 32, 0.5))
    network = {"path": text, "format": text, "parameters": 2048, "tensors": 2}
    point = {
        "network": text,
        "layer": text,
        "intervention": text,
        "draw": 0,
        "performance": 0.5,
        "metrics": {text: 1.0},
    }
    course = {"name": text, "role": text, "phase": [text, text], "alpha": [2.0, 3.0], "leaves_random_like": 1}
    correlation = {"metric": text, "layer": None, "spearman": 0.1, "spearman_ci": [-0.2, 0.4], "kendall": 0.1,
                   "kendall_ci": [-0.2, 0.3], "rmse": 0.2, "rmse_ci": [0.1, 0.3], "n": 9}  # fmt: skip
    return [
        head("scan")
        | {"network": network, "layers": [one, two], "skipped": [{"name": text, "reason": text}]},
        head("inspect") | {"network": network, "layers": [one], "skipped": []},
        head("compare")
        | {
            "networks": [{"path": text}, {"path": text + "b"}],
            "summary_text": text,
            "roles": [],
            "layers": [
                {
                    "name": text,
                    "role": text,
                    "metrics": {"alpha": [2.0, 3.0], text: [1.0, 2.0]},
                    "relative_change": 0.1,
                }
            ],
            "series": {"labels": [text, text], "layers": [course]},
        },
        head("audit")
        | {
            "metrics": [correlation],
            "failed": 0,
            "points": [point, point | {"performance": 0.7}],
            "layers": [
                {
                    "layer": text,
                    "intervention": text,
                    "performance_mean": 0.5,
                    "performance_sem": 0.1,
                    "class": text,
                }
            ],
            "performance": {"name": text, "intact": 0.9, "chance": 0.1, "higher_is_better": True},
            "verdicts": [
                {
                    "metric": "alpha",
                    "invariant": True,
                    "separates_robust_from_critical": False,
                    "predicts_performance": False,
                    "tells_reinitialised_from_rerandomised": False,
                    "text": text,
                }
            ],
        },
        head("study") | {"units": 4, "done": 4, "failed": 0, "store": text},
        head("degeneracy")
        | {
            "layers": [{"name": text, "inputs": 3, "outputs": 4, "free": 2, "free_from_activations": 1}],
            "parameters": 12,
            "free": 2,
            "effective": 10,
            "sentence": text,
            "llc": {"estimate": None, "reason": text, "traces": [[1.0, 2.0], [2.0, 1.0]]},
            "scales": [{"epsilon": 0.1, "lambda": 2.0, "stderr": 0.1, "effective": 4.0, "gauss_newton": 4.1}],
        },
        head("basis")
        | {
            "kind": text,
            "layers": [{"name": text, "directions": 2, "eigenvalues": [1.0, 0.5]}] * 2,
            "edges": [{"layer": 0, "source": 0, "target": 1, "strength": 1.0}],
            "modules": [{"id": text, "members": [[0, 0], [1, 1]]}],
        },
        head("reassemble")
        | {
            "permutation": [0, 1, 2],
            "mse": 0.1,
            "exact": False,
            "pairing": {"separated": False},
            "in_pieces": [0],
            "out_pieces": [1],
            "seed_order": {"method": text, "mse": 0.2},
            "rounds": [],
            "score_matrix": [[1.0]],
            "progression": [
                {"stage": text, "order": [0], "mse": 0.1},
                {"stage": text, "order": [0], "mse": 0.1},
            ],
        },
        head("reproduce")
        | {
            "name": text,
            "title": text,
            "rows": [{"what": text, "paper": text, "ours": 1.0, "note": text}],
            "warnings": [{"code": text, "text": text}],
        },
        head("llc")
        | {
            "estimate": 1.0,
            "reason": text,
            "traces": [[1.0, 2.0]],
            "ladder": [{"nbeta": 2.0, "lambda": 1.0}],
        },
        head("scales") | {"parameters": 9, "scales": [{"epsilon": 0.1, "lambda": 2.0, "stderr": 0.1}]},
        head("llc-parts") | {"parts": [{"part": text, "estimate": 1.0, "stderr": 0.1, "reason": text}]},
        head("estimate") | {"seconds": 3.0, "layers": [{"name": text}], "sentence": text},
        head("demo")
        | {"folder": text, "report": text, "steps": [{"title": text, "command": text, "seconds": 1.0}]},
        head("sparsify") | {"weights": 9, "zeros_after": 3, "layers": [{"name": text, "weights": 9}]},
        head("reassemble-make")
        | {"folder": text, "recipe": {text: text}, "loss": 0.1, "permutation": [0, 1]},
        head("lineage")
        | {
            "pairs": [{"a": text, "b": text, "kind": text, "pvalue": 0.5, "blocks": []}],
            "tree": [{"parent": text}],
        },
        head("curvature")
        | {
            "matrix": text,
            "parameters": 9,
            "trace": 1.0,
            "trace_stderr": 0.1,
            "top": [1.0],
            "density": [{"eigenvalue": 1.0, "weight": 1.0}],
            "effective": [{"epsilon": 0.1, "value": 2.0, "stderr": 0.1}],
        },
        head("influence")
        | {
            "kind": text,
            "rows": [text, 1],
            "labels": [text, text],
            "values": [[1.0, None], [None, 2.0]],
            "stderr": [[0.1, None], [None, 0.2]],
            "reason": text,
            "waic": 1.0,
            "fluctuation": 0.5,
        },
        head("shuffle-transformer") | {"blocks": [{text: 1}], "vectors": [{text: 2}]},
        head("reassemble-transformer")
        | {"blocks": [{text: 1}], "pairs": [{"a": 1, "b": 2, "right_by": text}]},
        head("correspond") | {"correspond": [{"block": 0, "partner": 1, "likeness": 0.5}]},
        head("shuffle") | {"folder": text, "blocks": [{text: 1}], "permutation": [0]},
        head("identify")
        | {
            "piece": text,
            "name": text,
            "sure": False,
            "candidates": [{"name": text, "role": text, "block": None, "likeness": 0.5}],
            "correspond": [{"block": 0, "partner": 1, "likeness": 0.5}],
        },
        head("track")
        | {
            "steps": [0, 1],
            "series": [{"what": text, "layer": text, "values": [1.0, 2.0], "stderr": None}],
            "changes": [{"what": text, "layer": text, "step": 1, "low": 0, "high": 1, "pvalue": 0.1}],
        },
        head("plan")
        | {
            "action": text,
            "budget": text,
            "layers": [{"name": text, "choice": text, "saves": 1, "cost": 0.1}],
        },
        head("apply") | {"written": text, "parameters_before": 9, "parameters_after": 8},
        head("check") | {"passed": False, "found": [{"layer": text, "code": text, "text": text}]},
    ]
