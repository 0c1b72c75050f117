"""Which sensitivity score orders layers like the measured loss: the tables of docs/scores.md.

    python tools/score_table.py FOLDER [NETWORK ...]    # measures; studies are kept in FOLDER and resumed
    python tools/score_table.py --page                  # writes the tables of docs/scores.md from docs/scores.json

Four networks: stories15M, ResNet-20, the embedded transformer and a mixture of experts that is trained here on the
first part of the embedded text. Scores come from one part of the data, the loss from another part. The settings are
few and the data small, so that the command takes minutes on one core; the intervals say what that costs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strati import embedded
from strati import interventions as iv
from strati.interventions.audit.audit import AuditConfig
from strati.interventions.audit.orders import OrderRow, order_rows
from strati.interventions.study import study
from strati.interventions.tasks import StudyData
from strati.io.to_module import as_module
from strati_reproductions.acting.subjects import ActingCase, resnet20, stories15m

LENGTH = 64
DOCS = Path(__file__).resolve().parents[1] / "docs"
STORED, PAGE = DOCS / "scores.json", DOCS / "scores.md"
BEGIN, END = "<!-- tables: python tools/score_table.py --page -->\n", "<!-- end of the tables -->\n"
LAYER_SCORES = (
    *("fisher_gradient", "kl_direct", "aumann_shapley", "higgs", "hessian_trace", "activation_error"),
    *("snr", "relative_distance", "sqnr", "gptq_error", "wanda_score", "kurtosis", "outlier_ratio"),
    *("alpha", "alpha_hill", "alpha_farms", "stable_rank", "traps", "erg_gap", "localisation"),
)
BLOCK_SCORES = ("angular_distance", "block_influence", "alpha", "alpha_hill", "alpha_farms", "stable_rank")
EXPERT_SCORES = ("reap", "routing_frequency")
SHOWN = {*LAYER_SCORES, *BLOCK_SCORES, *EXPERT_SCORES}
ACTIONS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "quantise": (iv.quantise(bits=[3, 2]), "layers", LAYER_SCORES),
    "prune": (iv.prune(share=[0.6]), "layers", LAYER_SCORES),
    "truncate": (iv.truncate(parameters=[0.5]), "layers", LAYER_SCORES),
    "drop": (iv.drop(), "blocks", BLOCK_SCORES),
}


def shakespeare(folder: Path) -> ActingCase:
    """The embedded transformer on the embedded play."""
    from strati.interventions.tasks import study_data

    model: Any = as_module(embedded.path("shakespeare"))
    data = study_data(embedded.path("tempest.txt"), model, LENGTH)
    return _halves("embedded transformer", model, data.x_test[:48], data.outputs, ("*",))


def mixture(folder: Path) -> ActingCase:
    """A small Mixtral (4 layers of width 64, 8 experts, 2 per token) trained on the bytes of the embedded play."""
    import transformers

    raw = np.frombuffer(embedded.path("tempest.txt").read_bytes(), np.uint8).astype(np.int64)
    rows = raw[: len(raw) // LENGTH * LENGTH].reshape(-1, LENGTH)
    training, held_out = rows[:-96], rows[-96:-48]
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        bos_token_id=0, eos_token_id=0, output_router_logits=True, router_aux_loss_coef=0.01,
    )  # fmt: skip
    model: Any = transformers.MixtralForCausalLM(config)
    path = folder / "mixture.pt"
    if not path.is_file():
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
        rng = np.random.default_rng(0)
        for _ in range(400):
            tokens = torch.from_numpy(training[rng.integers(0, len(training), 16)])
            loss = model(tokens, labels=tokens).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))
    model.config.output_router_logits = False
    return _halves("mixture of experts", model.eval(), held_out, 256, ("*",))


def _halves(name: str, model: Any, rows: Any, outputs: int, layers: tuple[str, ...]) -> ActingCase:
    data = StudyData("tokens", outputs, rows[:0], None, rows, None)
    half = len(rows) // 2
    first, second = (replace(data, x_test=part) for part in (rows[:half], rows[half:]))
    size = f"{half} rows each"
    return ActingCase(name, model, first, second, layers, 8, size, True)


NETWORKS = {
    "shakespeare": shakespeare,
    "mixture": mixture,
    "resnet20": lambda folder: resnet20(folder, True, 0),
    "stories15m": lambda folder: stories15m(folder, True, 0),
}


def orders(name: str, folder: Path) -> list[OrderRow]:
    """How the scores on one part of the data order the losses on the other."""
    case = NETWORKS[name](folder)
    changes = [action for action, _, _ in ACTIONS.values()]
    if name == "mixture":
        changes.append(iv.drop_experts(expert=range(8)))
    # Rows x are the calibration rows, from which all scores come; the loss is measured on the test rows.
    data = replace(case.test, x=case.plan.x_test, y=case.plan.y_test)
    measured = study(
        case.model, data=data, performance="loss", batch=case.batch, interventions=changes, layers=case.layers,
        metrics="all", htsr=True, out=folder / name, tick=lambda word: print(name, word, file=sys.stderr, flush=True),
    )  # fmt: skip
    table = measured.frame()
    points = table[(table["status"] == "done") & (table["intervention"] != "intact")].reset_index(drop=True)
    return order_rows(points, measured.metrics, measured.performance, AuditConfig())


def is_shown(row: OrderRow) -> bool:
    """Whether a table has the row: orders of settings are shown for experts only."""
    return row.metric in SHOWN and (row.across != "settings" or row.intervention == "drop-experts")


def cell(row: dict[str, Any] | None) -> str:
    """A correlation with its interval; bold where it is as good as the best of its column."""
    if row is None:
        return "-"
    low, high = row["spearman_ci"]
    text = f"{row['spearman']:.2f} ({low:.2f} to {high:.2f})"
    return f"**{text}**" if row["as_good_as_best"] and row["significant"] else text


def tables(stored: dict[str, list[dict[str, Any]]]) -> str:
    """One table per action: scores in lines, networks in columns."""
    parts = {action: (across, scores) for action, (_, across, scores) in ACTIONS.items()}
    parts["drop-experts"] = ("settings", EXPERT_SCORES)
    lines: list[str] = []
    for action, (across, scores) in parts.items():
        by_network = {
            name: {
                row["metric"]: row for row in rows if (row["intervention"], row["across"]) == (action, across)
            }
            for name, rows in stored.items()
        }
        shown = [name for name in stored if by_network[name]]
        counts = [f"{name} ({next(iter(by_network[name].values()))['n']})" for name in shown]
        lines += ["", f"| {action}: score | {' | '.join(counts)} |", f"| --- |{' --- |' * len(shown)}"]
        lines += [
            f"| `{score}` | {' | '.join(cell(by_network[name].get(score)) for name in shown)} |"
            for score in scores
        ]
    return "\n".join([*lines, "", ""])


def filled(page: str, stored: dict[str, list[dict[str, Any]]]) -> str:
    """The page with its tables made from the stored numbers."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + tables(stored) + END + rest.partition(END)[2]


def main() -> int:
    """Measure the networks named and store their rows, or write the page."""
    stored = json.loads(STORED.read_text()) if STORED.is_file() else {}
    if sys.argv[1] == "--page":
        PAGE.write_text(filled(PAGE.read_text(), stored))
        return 0
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(NETWORKS)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        stored[name] = [asdict(row) for row in orders(name, folder) if is_shown(row)]
        STORED.write_text(json.dumps({n: stored[n] for n in NETWORKS if n in stored}, indent=1) + "\n")
    print(tables(stored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
