"""The sampler's options on the command line: what ``LLCConfig`` has, nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from strati.cli.main import strati
from strati.core.options import default
from strati.landscape.llc import estimate as estimation
from strati.landscape.llc import extrapolate
from strati.landscape.llc.config import LLCConfig


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("sampling")
    rng = np.random.default_rng(0)
    save_file(
        {
            "0.weight": rng.normal(size=(4, 3)).astype("float32"),
            "0.bias": rng.normal(size=4).astype("float32"),
            "2.weight": rng.normal(size=(3, 4)).astype("float32"),
            "2.bias": rng.normal(size=3).astype("float32"),
        },
        folder / "model.safetensors",
    )
    np.savez(folder / "data.npz", x=rng.normal(size=(60, 3)).astype("float32"), y=rng.integers(0, 3, 60))
    return str(folder / "model.safetensors"), str(folder / "data.npz")


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(strati, ["degeneracy", *words])
    return done.exit_code, done.output


def test_options_reach_the_sampler(files, tmp_path):
    model, data = files
    target = tmp_path / "out.json"
    words = ["--llc", "--sampler", "hmc", "--chains", "6", "--draws", "40", "--warmup", "20"]
    words += ["--gamma", "30", "--nbeta", "50", "--structural", "--quiet"]
    code, _ = run(model, "--data", data, *words, "--json", str(target))
    assert code == 0
    llc = json.loads(target.read_text())["llc"]
    assert (llc["chains"], llc["draws"], llc["gamma"], llc["nbeta"]) == (6, 40, 30.0, 50.0)
    assert {"asymptotic_low", "asymptotic_high", "warnings"} <= set(llc)


def test_a_training_loss_is_sampled_where_there_are_targets(files, tmp_path):
    model, data = files
    target = tmp_path / "out.json"
    words = ["--llc", "--loss", "cross_entropy", "--chains", "4", "--draws", "20", "--structural", "--quiet"]
    code, _ = run(model, "--data", data, *words, "--json", str(target))
    llc = json.loads(target.read_text())["llc"]
    assert code == 0 and llc["estimate"] is None and "not at a minimum" in llc["reason"]


def test_help_shows_the_defaults_of_the_config():
    _, text = run("--help")
    text = re.sub(r"\s+", " ", text)
    for name in ("sampler", "max_rhat"):
        flag = "--" + name.replace("_", "-")
        shown = text[text.index(flag) :].split("[default: ", 1)[1]
        assert shown.startswith(str(default(LLCConfig, name))), name


def test_messages_advise_only_what_there_is():
    """Every option that a reason advises is a field of the config and an option of the command."""
    _, text = run("--help")
    known = {f.name for f in fields(LLCConfig)}
    source = "".join(Path(m.__file__).read_text() for m in (estimation, extrapolate))
    advised = re.findall(
        r"(?:more|larger|longer|smaller|lower|set) (draws|gamma|nbeta|warm-up|step|chains)", source
    )
    assert len(set(advised)) >= 4
    for name in {a.replace("-", "") for a in advised}:
        assert name in known and f"--{name}" in text


@pytest.mark.parametrize(
    "words", [["--gamma", "0"], ["--chains", "1"], ["--sampler", "metropolis"], ["--loss", "x"]]
)
def test_bad_options_are_one_line(files, words):
    model, data = files
    code, text = run(model, "--data", data, "--llc", *words)
    assert code == 2 and "Traceback" not in text
