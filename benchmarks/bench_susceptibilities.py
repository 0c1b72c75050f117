"""Susceptibilities of parts of a transformer to rows of data, by ``strati influence`` and by devinterp 2.0.1.

    python benchmarks/bench_susceptibilities.py

The GPT-2 of ``bench_devinterp`` on 16 of its windows. Both tools run SGLD at the same ``nbeta``, ``gamma`` and step,
with all windows in each minibatch, and vary the weights of one part. Compared is ``Cov(L, l_j)`` over the draws, with
``L`` the mean loss and ``l_j`` that of window ``j``; devinterp's from the losses it records at every fifth step, with
the error from the spread over chains. Printed are the means, the correlation over windows, and the distances in
standard errors of both, near 1 in mean square where the two agree.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

import strati
from bench_devinterp import ORACLE, language, trained

ROWS, CHAINS, DRAWS, BURN_IN = 16, 8, 200, 60
NBETA, GAMMA, STEP = 100.0, 2000.0, 2e-4
PARTS = ("transformer.h.0.attn", "transformer.h.0.mlp", "transformer.h.1.mlp")

SCRIPT = """
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


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    config = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = language(256, 64)
    model = trained(config, ids)
    ids = ids[:ROWS]
    ours = strati.influence(
        model, "cross_entropy", ids, kind="susceptibility", parts={part: f"{part}.*" for part in PARTS},
        sampler="sgld", nbeta=NBETA, gamma=GAMMA, step=STEP, batch=ROWS, chains=CHAINS, draws=DRAWS, seed=0,
    )  # fmt: skip
    print(
        f"susceptibilities of a GPT-2 to {ROWS} windows, {CHAINS} chains of {DRAWS} steps, nbeta {NBETA:g}, "
        f"gamma {GAMMA:g}, step {STEP:g}"
    )
    if not ORACLE.exists():
        print("devinterp: .venv-oracles is absent, comparison left out")
        return
    for place, (part, chains) in enumerate(devinterp(config, model.state_dict(), ids).items()):
        values, errors = ours.values[place], ours.stderr[place]
        theirs = np.mean(chains, axis=0)
        spread = np.std(chains, axis=0, ddof=1) / np.sqrt(len(chains))
        distance = (values - theirs) / np.hypot(errors, spread)
        print(
            f"  {part:22s} strati {values.mean():.3e} +- {errors.mean():.1e}, devinterp {theirs.mean():.3e} +- "
            f"{spread.mean():.1e}\n    correlation over windows {np.corrcoef(values, theirs)[0, 1]:.3f}, distance in "
            f"errors: mean square {np.mean(distance**2):.2f}, largest {np.abs(distance).max():.1f}"
        )


def devinterp(config: dict, state: dict, ids: torch.Tensor) -> dict[str, list[list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder) / "case.pt"
        settings = {"nbeta": NBETA, "gamma": GAMMA, "step": STEP, "chains": CHAINS, "draws": DRAWS}
        torch.save(
            settings
            | {"config": config, "state": state, "ids": ids, "parts": list(PARTS), "burn_in": BURN_IN},
            case,
        )
        done = subprocess.run([ORACLE, "-c", SCRIPT, case], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise SystemExit(f"devinterp failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(lines[0].removeprefix("RESULT"))


if __name__ == "__main__":
    main()
