"""A transformer's learning coefficient on tokens by ``strati track`` and by devinterp 2.0.1, at the same settings.

    python benchmarks/bench_devinterp.py [--quick]

Same network, data, ``nbeta``, ``gamma``, step size, chains, steps and minibatch for both (devinterp runs from
.venv-oracles, ``make oracles``); for every seed the value and the CPU seconds of one estimate. Printed are the mean,
the spread over seeds, the error that strati states, and the CPU seconds. devinterp averages over all steps, those on
the way from the start included; its value after as many as strati leaves out stands beside it. devinterp leaves in what
the length of the step adds to the loss; strati's value without its correction for that stands beside it too (one seed).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import strati
from strati.landscape.llc.sgld import Steps

ORACLE = Path(__file__).resolve().parents[1] / ".venv-oracles" / "bin" / "python"

SCRIPT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, transformers
torch.set_num_threads(1)
from datasets import Dataset
from devinterp.slt.llc import llc
case = torch.load(sys.argv[1])
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**case["config"])).eval()
model.load_state_dict(case["state"])
data = Dataset.from_dict({"input_ids": case["ids"].tolist()}).with_format("torch")
out = []
for seed in range(case["seeds"]):
    start = time.process_time()
    found = llc(
        model, data, {}, lr=case["step"], n_beta=case["nbeta"], localization=case["gamma"],
        num_chains=case["chains"], num_draws=case["steps"], batch_size=case["batch"], device="cpu",
        num_init_loss_batches=len(case["ids"]) // case["batch"], init_seed=1000 * (seed + 1))
    seconds = time.process_time() - start
    settled = found.loss_trace.isel(step=slice(case["left_out"], None)).mean() - found.init_loss
    out.append({"llc": float(found.llc_mean), "settled": case["nbeta"] * float(settled), "seconds": seconds})
print("RESULT" + json.dumps(out))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print("learning coefficient of a GPT-2 on 256 windows of 64 tokens, 4 chains, minibatches of 16 windows")
    for width, layers in ((64, 2),) if quick else ((64, 2), (128, 3)):
        compared(width, layers, seeds=3 if quick else 5, draws=100 if quick else 200)


def compared(width: int, layers: int, *, seeds: int, draws: int) -> None:
    config = {"vocab_size": 256, "n_positions": 64, "n_embd": width, "n_layer": layers, "n_head": 4}
    config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = language(256, 64)
    model = trained(config, ids)
    size = sum(p.numel() for p in model.parameters())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    values, errors, seconds = [], [], []
    estimate = partial(
        strati.track,
        [state],
        data=(ids[:, :-1], ids[:, 1:]),
        model=model,
        what="llc",
        loss="cross_entropy",
        draws=draws,
        batch=16,
    )
    for seed in range(seeds):
        start = time.process_time()
        run = estimate(seed=seed)
        seconds.append(time.process_time() - start)
        level = next(s for s in run.curves if s.what == "llc")
        values.append(level.values[0])
        errors.append(level.stderr[0])
        settings = run.settings
    steps = draws + draws // 2
    print(
        f"{size} parameters: nbeta {settings['nbeta']:.4g}, gamma {settings['gamma']:g}, "
        f"step {settings['step']:.3g}, {steps} steps a chain, {seeds} seeds"
    )
    known = [v for v in values if v is not None]
    stated = float(np.mean([e for e in errors if e is not None]))
    row("strati", known, seconds, f", error stated {stated:.2g}")
    with heated():
        level = next(s for s in estimate(seed=0).curves if s.what == "llc")
    print(f"  strati, uncorrected        {level.values[0]:8.2f}, error stated {level.stderr[0]:.2g}")
    if not ORACLE.exists():
        print("  devinterp: .venv-oracles is absent, comparison left out")
        return
    theirs = devinterp(config, state, ids, settings, steps, seeds)
    spent = [t["seconds"] for t in theirs]
    row("devinterp, all steps", [t["llc"] for t in theirs], spent)
    row("devinterp, settled steps", [t["settled"] for t in theirs], spent)
    ratio = float(np.median(seconds) / np.median(spent))
    print(f"  CPU of strati over that of devinterp: {ratio:.2f}, calibration of the step included")


@contextmanager
def heated() -> Iterator[None]:
    """SGLD without the correction for the length of its step, as devinterp has it."""
    corrected = Steps.advance

    def advance(self: Steps, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        value, heating = corrected(self, *given)
        return value, torch.zeros_like(heating)

    Steps.advance = advance  # type: ignore[method-assign]
    try:
        yield
    finally:
        Steps.advance = corrected  # type: ignore[method-assign]


def row(name: str, values: list[float], seconds: list[float], more: str = "") -> None:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
    print(
        f"  {name:26s} {np.mean(values):8.2f}, spread over seeds {spread:.2g}{more}; "
        f"{np.median(seconds):.1f} s of CPU an estimate"
    )


def language(rows: int, length: int) -> torch.Tensor:
    """Windows of a random language in which every token has four successors, one of them likely."""
    generator = torch.Generator().manual_seed(0)
    after = torch.randint(256, (256, 4), generator=generator)
    chances = torch.tensor([0.7, 0.15, 0.1, 0.05])
    ids = torch.randint(256, (rows, 1), generator=generator)
    for _ in range(length):
        picked = torch.multinomial(chances.expand(rows, 4), 1, generator=generator)
        ids = torch.cat([ids, after[ids[:, -1]].gather(1, picked)], 1)
    return ids[:, 1:]


def trained(config: dict, ids: torch.Tensor) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        picked = ids[torch.randint(len(ids), (16,))]
        optimiser.zero_grad()
        model(picked, labels=picked).loss.backward()
        optimiser.step()
    return model.eval()


def devinterp(
    config: dict, state: dict, ids: torch.Tensor, settings: dict, steps: int, seeds: int
) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder) / "case.pt"
        kept = {name: settings[name] for name in ("nbeta", "gamma", "step", "chains", "batch")}
        left_out = steps - settings["draws"]
        torch.save(
            kept
            | {
                "config": config,
                "state": state,
                "ids": ids,
                "steps": steps,
                "left_out": left_out,
                "seeds": seeds,
            },
            case,
        )
        done = subprocess.run([ORACLE, "-c", SCRIPT, case], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise SystemExit(f"devinterp failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(lines[0].removeprefix("RESULT"))


if __name__ == "__main__":
    main()
