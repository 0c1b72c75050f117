"""A transformer's learning coefficient on tokens by ``strati llc`` and by devinterp 2.0.1, at the same settings.

    python benchmarks/bench_devinterp.py [--quick] [--only compare|steps|susceptibilities] [--size 0|1] [--picture FILE]

Same network, data, ``nbeta``, ``gamma``, chains, draws and minibatch for both; devinterp (from .venv-oracles, ``make
oracles``) gets the step that strati calibrates, and as many steps before the first draw that counts. For each tool:
the mean over draws with the spread over seeds; CPU seconds of an estimate, strati's calibration included; effective
samples (bulk ESS of ArviZ) of the loss over the same 32 windows at every second draw (the time of these evaluations
is not counted; devinterp makes them in a second run with the same seed); CPU time and gradients per effective sample.
The loss of minibatches, whose noise hides the chain's memory, has another ESS, which is printed beside it.

Then both tools at the step, a half, a quarter and an eighth of it. A Langevin step of finite length and the noise of
minibatches heat. strati's integrator avoids the first and its correction takes off the second to first order, devinterp
leaves both in, so devinterp's values approach strati's.

Last, susceptibilities ``Cov(L, l_j)`` of three parts to 16 windows, which are all in each minibatch; those of devinterp
from the losses that it records at every fifth step, with the error from the spread over chains. Where the tools agree,
the distances in standard errors of both are near 1 in root mean square.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import arviz
import numpy as np
import torch
import transformers

import strati
from strati.landscape.llc import tuning
from strati.landscape.llc.config import LLCConfig
from strati.landscape.llc.llc import draw
from strati.landscape.llc.traces import standard_error
from strati.landscape.objective import Objective, objective

ORACLE = Path(__file__).resolve().parents[1] / ".venv-oracles" / "bin" / "python"
GAMMA, BATCH, CHAINS, STRIDE, WINDOWS = 3500.0, 16, 4, 2, 32
SUSCEPTIBILITY = {"nbeta": 100.0, "gamma": 2000.0, "step": 2e-4, "chains": 8, "draws": 200}
ROWS, BURN_IN = 16, 60
PARTS = ("transformer.h.0.attn", "transformer.h.0.mlp", "transformer.h.1.mlp")

SCRIPT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, transformers
torch.set_num_threads(1)
from datasets import Dataset
from devinterp.slt.llc import compute_llc
from devinterp.slt.sampling import sample
case = torch.load(sys.argv[1])
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**case["config"])).eval()
model.load_state_dict(case["state"])
def dataset(ids):
    return Dataset.from_dict({"input_ids": ids.tolist()}).with_format("torch")
shared = dict(
    n_beta=case["nbeta"], localization=case["gamma"], num_chains=case["chains"], batch_size=case["batch"],
    device="cpu", num_init_loss_batches=len(case["ids"]) // case["batch"])
out = []
for run in case["runs"]:
    start = time.process_time()
    samples = sample(model, dataset(case["ids"]), {}, lr=run["step"], num_draws=run["steps"],
                     init_seed=1000 * (run["seed"] + 1), **shared)
    found = compute_llc(samples)
    seconds = time.process_time() - start
    trace = found.loss_trace.values[:, run["skipped"]:]
    record = {"seconds": seconds, "loss": trace.tolist(), "llc": case["nbeta"] * float(trace.mean() - found.init_loss)}
    if run["observed"]:
        windows = case["ids"][: case["windows"]]
        samples = sample(
            model, dataset(case["ids"]), {"same": (dataset(windows), len(windows) // case["batch"])}, lr=run["step"],
            num_draws=(run["steps"] - run["skipped"]) // case["stride"], num_burnin_steps=run["skipped"],
            num_steps_bw_draws=case["stride"], init_seed=1000 * (run["seed"] + 1), **shared)
        (name,) = [n for n in samples.dataset.data_vars if n.startswith("loss_")]
        losses = samples.dataset[name]
        record["observed"] = losses.mean(dim=[d for d in losses.dims if d not in ("chain", "draw")]).values.tolist()
    out.append(record)
print("RESULT" + json.dumps(out))
"""


SUSCEPTIBILITY_SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch, transformers
torch.set_num_threads(1)
from datasets import Dataset
from devinterp.slt.sampling import sample
case = torch.load(sys.argv[1])
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**case["config"])).eval()
model.load_state_dict(case["state"])
ids = case["ids"]
data = Dataset.from_dict({"input_ids": ids.tolist()}).with_format("torch")
out = {}
for part in case["parts"]:
    masks = {name: None for name, _ in model.named_parameters() if name.startswith(part)}
    tree = sample(
        model, data, {"all": (data, 1)}, lr=case["step"], n_beta=case["nbeta"], localization=case["gamma"],
        param_masks=masks, num_chains=case["chains"], num_draws=case["draws"] // 5, num_steps_bw_draws=5,
        num_burnin_steps=case["burn_in"], batch_size=len(ids), num_init_loss_batches=1, device="cpu", init_seed=7)
    seen = np.asarray(tree.dataset["input_ids_all"].values)
    while seen.ndim > 2:
        seen = seen[0]
    order = [int(np.flatnonzero((seen == row.numpy()).all(1))[0]) for row in ids]
    losses = tree.dataset["loss_all"].values.mean(-1)[:, :, order]
    mean = losses.mean(-1)
    covariances = [np.mean((m - m.mean())[:, None] * (l - l.mean(0)), 0) * len(m) / (len(m) - 1)
                   for m, l in zip(mean, losses)]
    out[part] = np.stack(covariances).tolist()
print("RESULT" + json.dumps(out))
"""


class Case(NamedTuple):
    """A trained transformer, its tokens, and the temperature at which it is sampled."""

    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    ids: torch.Tensor
    loss: Objective
    nbeta: float

    def settings(self, **options: Any) -> LLCConfig:
        """Settings that both tools share."""
        return LLCConfig(
            sampler="sgld", nbeta=self.nbeta, gamma=GAMMA, chains=CHAINS, batch=BATCH, max_rhat=1e9, **options
        )


class SameWindows:
    """Observer that evaluates the loss of the same windows at every draw that it sees."""

    def __init__(self, case: Case) -> None:
        self.part = case.loss.part(slice(0, WINDOWS))
        self.losses: dict[int, list[float]] = {}
        self.seconds = 0.0

    def restart(self) -> None:
        """Forget all draws so far."""
        self.losses = {}

    def observe(self, first: int, offsets: torch.Tensor) -> None:
        """Evaluate the loss at the chains' offsets."""
        start = time.process_time()
        with torch.no_grad():
            for chain, offset in enumerate(offsets, first):
                self.losses.setdefault(chain, []).append(float(self.part(self.part.flat.theta + offset)))
        self.seconds += time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["compare", "steps", "susceptibilities"], help="one of the tables")
    parser.add_argument("--size", type=int, choices=[0, 1], help="the small or the large network alone")
    parser.add_argument("--picture", type=Path, help="draw the table over steps into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(
        f"learning coefficient of a GPT-2 on 256 windows of 64 tokens, {CHAINS} chains, minibatches of {BATCH} windows"
    )
    seeds, draws = (1, 100) if options.quick else (3, 200)
    for place, (width, layers) in enumerate(((64, 2), (160, 3))):
        if options.size not in (None, place) or (options.quick and place > 0):
            continue
        case = trained_case(width, layers)
        print(f"{case.loss.flat.size} parameters, nbeta {case.nbeta:.4g}, gamma {GAMMA:g}")
        step = None
        if options.only in (None, "compare"):
            step = compare(case, seeds, draws if place == 0 else draws // 2)
        if place == 0 and options.only in (None, "steps"):
            over_steps(case, step, draws, options.picture)
        if place == 0 and options.only in (None, "susceptibilities"):
            susceptibilities(case)


def trained_case(width: int, layers: int) -> Case:
    config = {"vocab_size": 256, "n_positions": 64, "n_embd": width, "n_layer": layers, "n_head": 4}
    config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = language(256, 64)
    model = trained(config, ids)
    loss = objective(model, "cross_entropy", (ids[:, :-1], ids[:, 1:]))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Case(config, state, ids, loss, loss.count / math.log(loss.count))


def compare(case: Case, seeds: int, draws: int) -> float:
    """Print values, CPU time and effective samples of both tools; returns the step."""
    records = []
    for seed in range(seeds):
        settings = case.settings(draws=draws, seed=seed)
        stride, tuning.POSITION_STRIDE = tuning.POSITION_STRIDE, STRIDE
        observer = SameWindows(case)
        start = time.process_time()
        traces = draw(case.loss, case.loss.flat.theta, settings, observer=observer)
        seconds = time.process_time() - start - observer.seconds
        tuning.POSITION_STRIDE = stride
        records.append(
            {
                "llc": float(traces.lambda_trace().mean()),
                "seconds": seconds,
                "loss": traces.excess[0] + traces.baseline,
                "observed": [observer.losses[chain] for chain in sorted(observer.losses)],
                "gradients": traces.gradients,
            }
        )
    assert traces.step is not None
    skipped = traces.warmup + max(0, draws // 2 - traces.warmup)
    steps = draws + skipped
    print(f"  step {traces.step:.3g}, {skipped} steps and then {draws} draws a chain, {seeds} seeds")
    row("strati", records)
    if not ORACLE.exists():
        print("  devinterp: .venv-oracles is absent, comparison left out")
        return traces.step
    runs = [
        {"step": traces.step, "steps": steps, "skipped": skipped, "seed": s, "observed": True}
        for s in range(seeds)
    ]
    theirs = [{**record, "gradients": CHAINS * steps} for record in devinterp(case, runs)]
    row("devinterp", theirs)
    ours_cost, their_cost = (cost(group, "observed") for group in (records, theirs))
    print(f"  CPU time per effective sample of strati over that of devinterp: {ours_cost / their_cost:.2f}")
    minibatch = cost(records, "loss") / cost(theirs, "loss")
    print(f"  the same with effective samples of the minibatches' loss: {minibatch:.2f}")
    return traces.step


def cost(records: list[dict[str, Any]], name: str) -> float:
    """CPU seconds per effective sample, over all seeds."""
    return sum(record["seconds"] for record in records) / sum(effective(record[name]) for record in records)


def effective(trace: Any) -> float:
    """Bulk effective sample size of ArviZ on (chain, draw) axes."""
    return float(arviz.ess(np.asarray(trace, dtype=float)))


def row(name: str, records: list[dict[str, Any]]) -> None:
    values = [record["llc"] for record in records]
    spread = f", spread {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
    samples = sum(effective(record["observed"]) for record in records)
    gradients = sum(record["gradients"] for record in records)
    print(
        f"  {name:10s} {np.mean(values):7.2f}{spread}; {np.mean([r['seconds'] for r in records]):.1f} s an estimate, "
        f"{1000 * sum(r['seconds'] for r in records) / gradients:.1f} ms a gradient; "
        f"{samples / len(records):.0f} effective samples, {gradients / samples:.1f} gradients each"
    )


def over_steps(case: Case, step: float | None, draws: int, picture: Path | None) -> None:
    """Print the values of both tools at the step, a half, a quarter and an eighth of it."""
    if step is None:
        step = draw(case.loss, case.loss.flat.theta, case.settings(draws=4)).step
        assert step is not None
    shares = (1.0, 0.5, 0.25, 0.125)
    ours = []
    for share in shares:
        settings = case.settings(draws=draws, step=share * step, warmup=draws)
        trace = draw(case.loss, case.loss.flat.theta, settings).lambda_trace()
        ours.append((float(trace.mean()), standard_error(trace) or math.nan))
    runs = [
        {"step": share * step, "steps": 2 * draws, "skipped": draws, "seed": 0, "observed": False}
        for share in shares
    ]
    theirs = (
        [record["llc"] for record in devinterp(case, runs)] if ORACLE.exists() else [math.nan] * len(shares)
    )
    print(f"  share of the step {step:.3g}   strati            devinterp   ({draws} draws a chain)")
    for share, (value, error), other in zip(shares, ours, theirs, strict=True):
        print(f"  {share:<25g} {value:7.2f} +- {error:<6.2g} {other:9.2f}")
    if picture is not None:
        draw_steps(picture, [share * step for share in shares], ours, theirs)


def susceptibilities(case: Case) -> None:
    """Print ``Cov(L, l_j)`` of both tools on some windows, for parts whose weights alone vary."""
    ids = case.ids[:ROWS]
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**case.config)).eval()
    model.load_state_dict(case.state)
    parts = {part: f"{part}.*" for part in PARTS}
    shared: dict[str, Any] = {"kind": "susceptibility", "sampler": "sgld", "batch": ROWS, "seed": 0}
    ours = strati.influence(model, "cross_entropy", ids, parts=parts, **shared, **SUSCEPTIBILITY)
    settings = ", ".join(f"{name} {number:g}" for name, number in SUSCEPTIBILITY.items())
    print(f"  susceptibilities to {ROWS} windows: {settings}")
    if not ORACLE.exists():
        print("  devinterp: .venv-oracles is absent, comparison left out")
        return
    network = {"config": case.config, "state": case.state, "ids": ids}
    theirs = oracle(
        SUSCEPTIBILITY_SCRIPT, {**SUSCEPTIBILITY, **network, "parts": list(PARTS), "burn_in": BURN_IN}
    )
    for part, values, errors in zip(PARTS, ours.values, ours.stderr, strict=True):
        other = np.mean(theirs[part], axis=0)
        spread = np.std(theirs[part], axis=0, ddof=1) / math.sqrt(len(theirs[part]))
        distance = (values - other) / np.hypot(errors, spread)
        print(
            f"  {part:20s} strati {values.mean():.3e} +- {errors.mean():.1e}, devinterp {other.mean():.3e} +- "
            f"{spread.mean():.1e}\n    correlation over windows {np.corrcoef(values, other)[0, 1]:.3f}, distance in "
            f"errors: root mean square {math.sqrt(np.mean(distance**2)):.2f}, largest {np.abs(distance).max():.1f}"
        )


def draw_steps(path: Path, steps: list[float], ours: list[tuple[float, float]], theirs: list[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.0, 3.2), layout="constrained")
    values, errors = zip(*ours, strict=True)
    axes.errorbar(
        steps, values, yerr=[2 * e for e in errors], fmt="o-", capsize=3, label="strati (two errors)"
    )
    axes.plot(steps, theirs, "s--", label="devinterp 2.0.1")
    axes.set_xlim(left=0)
    axes.set_xlabel("step")
    axes.set_ylabel("learning coefficient")
    axes.legend(frameon=False)
    figure.savefig(path)


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


def trained(config: dict[str, Any], ids: torch.Tensor) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        picked = ids[torch.randint(len(ids), (16,))]
        optimiser.zero_grad()
        model(picked, labels=picked).loss.backward()
        optimiser.step()
    return model.eval()


def devinterp(case: Case, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shared = {"nbeta": case.nbeta, "gamma": GAMMA, "chains": CHAINS, "batch": BATCH, "stride": STRIDE}
    network = {"config": case.config, "state": case.state, "ids": case.ids, "windows": WINDOWS}
    records: list[dict[str, Any]] = oracle(SCRIPT, {**shared, **network, "runs": runs})
    return records


def oracle(script: str, case: dict[str, Any]) -> Any:
    """What a script prints in the environment of devinterp."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.pt"
        torch.save(case, path)
        done = subprocess.run([ORACLE, "-c", script, path], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise SystemExit(f"devinterp failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(lines[0].removeprefix("RESULT"))


if __name__ == "__main__":
    main()
