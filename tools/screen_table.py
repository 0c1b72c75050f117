"""Plans screened by the Fisher score beside full plans, on the embedded transformer: the table of docs/scores.md.

Give the number of windows of 64 tokens: ``python tools/screen_table.py [WINDOWS]``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from strati import embedded, plan
from strati.interventions.tasks import study_data
from strati.io.to_module import as_module

BUDGETS = (("quantise", "bits=4"), ("quantise", "bits=3"), ("prune", "parameters=0.5"))


def main() -> int:
    """Print one line per budget: the losses of both plans on the same data, and the share that was measured."""
    windows = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    model: Any = as_module(embedded.path("shakespeare"))
    data = study_data(embedded.path("tempest.txt"), model, 64)
    data = replace(data, x_test=data.x_test[:windows])
    print(
        "| plan | loss, full | loss, screened | settings measured | answer |\n| --- | --- | --- | --- | --- |"
    )
    for action, budget in BUDGETS:
        options: dict[str, Any] = {
            "budget": budget,
            "action": action,
            "performance": "loss",
            "combinations": 4,
        }
        full, screened = plan(model, data=data, **options), plan(model, data=data, screen="fisher", **options)
        interval = f"{full.predicted['low']:.3f} to {full.predicted['high']:.3f}"
        losses = f"{full.predicted['measured']:.3f} ({interval}) | {screened.predicted['measured']:.3f}"
        about = screened.screen or {}
        share = f"{about['measured']} of {about['settings']} ({100 * about['fraction']:.0f} %)"
        print(f"| {action} {budget} | {losses} | {share} | {screened.verdict} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
