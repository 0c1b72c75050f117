"""Real results of every verb, made by the command line on the embedded network, small enough for every test run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
from safetensors.numpy import load_file, save_file

from strati import embedded
from strati.cli.main import strati

STUDY = """
name = "two-small-networks"
[network]
source = "fcn"
count = 2
together = 2
hidden = [16, 16]
[data]
name = "digits"
[train]
epochs = 5
batch = 64
optimiser = "adam"
rate = 1e-3
[measure]
performance = "accuracy"
[interventions]
kinds = ["reinitialise", "rerandomise"]
draws = 1
[metrics]
degeneracy = false
samples = 32
"""


def make(home: Path) -> dict[str, Path]:
    """Run the verbs into ``home``; returns what ``strati report`` takes, by name."""
    model = str(embedded.path("digits-mlp.safetensors"))
    initial = str(embedded.path("digits-mlp-init.safetensors"))
    data = str(embedded.path("digits.npz"))
    (home / "study.toml").write_text(STUDY)
    names = ("inspect", "scan", "compare", "series", "study", "degeneracy", "basis", "pieces", "reproduce")
    names += ("llc", "parts", "scales", "sparsify", "made", "report", "plan", "apply", "estimate", "coded")
    found = {name: home / f"{name}.json" for name in names}
    run("inspect", model, "--json", found["inspect"])
    run("scan", model, "--eigenvalues", "--json", found["scan"])
    run("scan", model, "--estimate", "--json", found["estimate"])
    run("scan", coded(home), "--eigenvalues", "--json", found["coded"])
    run("compare", initial, model, "--eigenvalues", "--json", found["compare"])
    run("compare", "--series", *checkpoints(home), "--json", found["series"])
    run("study", home / "study.toml", "--out", home / "study", "--json", found["study"])
    degeneracy(found)
    run("basis", model, "--data", data, "--rows", "200", "--compare", "--json", found["basis"])
    run(
        "basis",
        model,
        "--data",
        data,
        "--rows",
        "200",
        "--sparsify",
        home / "sparse.safetensors",
        "--json",
        found["sparsify"],
    )
    run("reassemble", "--make", home / "dropped", "--blocks", "4", "--json", found["made"])
    run("reassemble", home / "dropped", home / "dropped" / "data.csv", "--json", found["pieces"])
    reproduce(found["reproduce"])
    run("report", found["scan"], "-o", home / "page.html", "--json", found["report"])
    acting(found)
    return found | {"audit": home / "study"}


def run(*words: str | Path) -> None:
    strati.main([*map(str, words), "--quiet"], standalone_mode=False)


def coded(home: Path) -> Path:
    """The embedded network with its matrices in four bits and a step per row."""
    tensors = {}
    for name, weight in load_file(embedded.path("digits-mlp.safetensors")).items():
        if weight.ndim == 2:
            step = np.abs(weight).max(axis=1, keepdims=True) / 7
            tensors |= {name: np.round(weight / step).astype(np.int8), f"{name}_scale": step}
        else:
            tensors[name] = weight
    save_file(tensors, home / "coded.safetensors")
    return home / "coded.safetensors"


def checkpoints(home: Path) -> list[Path]:
    """The embedded network trained anew from its initial weights, saved as it goes."""
    import torch

    weights = load_file(embedded.path("digits-mlp-init.safetensors"))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 96),
        torch.nn.ReLU(),
        torch.nn.Linear(96, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    with np.load(embedded.path("digits.npz")) as arrays:
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    files = []
    for step in range(201):
        if step % 25 == 0:
            files.append(home / f"step-{step:03d}.safetensors")
            save_file(
                {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}, files[-1]
            )
        rows = torch.randint(len(y), (64,))
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    return files


def degeneracy(found: dict[str, Path]) -> None:
    """Counts, chains and scales of a network of six hidden neurons: sampling the embedded one takes minutes."""
    import torch

    from strati.landscape.counts.degeneracy import degeneracy as count
    from strati.landscape.llc.llc import llc
    from strati.landscape.llc.scales import effective_parameters

    torch.manual_seed(0)
    with np.load(embedded.path("digits.npz")) as arrays:
        x, y = torch.from_numpy(arrays["x"][:400]), torch.from_numpy(arrays["y"][:400])
    model = torch.nn.Sequential(torch.nn.Linear(64, 6), torch.nn.ReLU(), torch.nn.Linear(6, 10))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    few = {"chains": 4, "draws": 20, "warmup": 10}
    chains = llc(model, "behavioural-mse", x, sampler="sgld", ladder=False, **few)
    scales = effective_parameters(model, x, scales=[1e-2, 1e-1, 1.0], **few)
    replace(count(model, x.numpy()), llc=chains, scales=scales).to_json(found["degeneracy"])
    chains.to_json(found["llc"])
    more = {"chains": 4, "draws": 200, "warmup": 50}
    llc(model, "behavioural-mse", x, sampler="sgld", ladder=False, per_layer=True, **more).to_json(
        found["parts"]
    )
    scales.to_json(found["scales"])


def acting(found: dict[str, Path]) -> None:
    """A plan for the embedded network from truncations measured here, and the network that it makes."""
    import strati as package

    with np.load(embedded.path("digits.npz")) as arrays:
        data = arrays["x"][:400], arrays["y"][:400]
    model = package.as_module(embedded.path("digits-mlp.safetensors"))
    study = package.study(model, data=data, interventions=[package.truncate(rank=[2, 8, 32])])
    plan = package.plan(study, budget="parameters=0.8", action="truncate")
    plan.to_json(found["plan"])
    package.apply(plan, model, out=found["apply"].with_suffix("")).to_json(found["apply"])


def reproduce(target: Path) -> None:
    """A reproduction as the command runs it, on layers of 48 x 48 instead of 512 x 512 for speed."""
    from strati_reproductions.registry import reproduce as run
    from strati_reproductions.robust_and_critical.alpha_random import alphas

    with mock.patch.object(alphas, "__defaults__", (48,)):
        run("alpha-of-random-layers", quick=True, folder=target.parent).to_json(target)
