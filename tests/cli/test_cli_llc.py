"""``strati llc``: the answer first, settings that can be repeated, names of arrays, token ids, missing estimates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file

import strati
from strati.cli.main import strati as program
from strati.core.errors import BadInputError
from strati.landscape.llc.estimate import NoEstimate, NoEstimateWarning


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("llc")
    rng = np.random.default_rng(0)
    weights = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)}
    save_file({k: rng.normal(size=s).astype("float32") for k, s in weights.items()}, folder / "m.safetensors")
    images, labels = rng.normal(size=(60, 3)).astype("float32"), rng.integers(0, 3, 60)
    np.savez(folder / "named.npz", images=images, labels=labels)
    return str(folder / "m.safetensors"), str(folder / "named.npz")


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(program, ["llc", *words])
    return done.exit_code, done.stdout, done.stderr


QUICK = ["--chains", "4", "--draws", "60", "--warmup", "15"]


def test_the_answer_comes_first_and_the_next_command_last(files):
    model, data = files
    code, out, _ = run(model, "--data", data, "--inputs", "images", "--loss", "behavioural-mse", *QUICK)
    first, second, *_, last = out.splitlines()
    assert code == 0
    assert first.startswith("Learning coefficient ") and "nbeta 14.7, gamma" in first and len(first) <= 100
    assert second.startswith("95 % interval ")
    assert last.startswith("next: strati degeneracy ")


def test_json_is_what_degeneracy_has_and_the_settings(files, tmp_path):
    model, data = files
    words = ["--data", data, "--inputs", "images", "--loss", "behavioural-mse", *QUICK, "--quiet"]
    assert run(model, *words, "--json", str(tmp_path / "a.json"))[0] == 0
    whole = json.loads((tmp_path / "a.json").read_text())
    done = CliRunner().invoke(
        program, ["degeneracy", model, *words, "--llc", "--structural", "--json", str(tmp_path / "b.json")]
    )
    assert done.exit_code == 0
    part = json.loads((tmp_path / "b.json").read_text())["llc"]
    assert {name: whole[name] for name in part} == part
    assert whole["schema"] == "strati.llc/1"
    assert {"sampler", "nbeta", "gamma", "chains", "draws", "seconds"} <= set(whole["settings"])
    assert whole["settings"]["chains"] == 4 and whole["settings"]["draws"] == 60


def test_a_missing_estimate_says_why_and_what_to_run(files):
    """Random labels: the loss falls nearby, and the training data are the first thing to ask about."""
    model, data = files
    code, out, _ = run(model, "--data", data, "--inputs", "images", "--targets", "labels", *QUICK)
    assert code == 0
    assert out.startswith("No learning coefficient ")
    assert "are these the training data?" in out
    assert out.splitlines()[-1].startswith("next: strati llc ")


def test_a_missing_array_is_named_with_the_option(files):
    model, data = files
    done = CliRunner().invoke(program, ["llc", model, "--data", data])
    assert isinstance(done.exception, BadInputError)
    assert "images, labels" in str(done.exception) and "`inputs`" in str(done.exception)


def test_python_warns_where_there_is_no_estimate():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    data = torch.randn(40, 3), torch.randn(40, 2)
    with pytest.warns(NoEstimateWarning, match="are these the training data"):
        coefficient = strati.llc(model, "mse", data, gamma=1e3, chains=4, draws=40, warmup=10)
    assert coefficient.estimate is None and coefficient.missing is NoEstimate.OFF_MINIMUM
    assert repr(coefficient).startswith("No learning coefficient")


class Bigram(torch.nn.Module):
    """The next token from the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``(rows, places, 5)``."""
        return self.table(tokens)


@pytest.mark.parametrize("as_dict", [False, True])
def test_token_ids_alone_are_enough_for_a_language_model(as_dict: bool, tmp_path: Path):
    from strati.landscape.objective import objective

    torch.manual_seed(0)
    model, tokens = Bigram(), torch.randint(0, 5, (6, 9))
    found = objective(model, "cross_entropy", tokens)
    pairs = objective(model, "cross_entropy", (tokens[:, :-1], tokens[:, 1:]))
    assert found.count == pairs.count == 48
    assert float(found(found.flat.theta)) == pytest.approx(float(pairs(pairs.flat.theta)))
    if as_dict:
        from transformers import GPT2Config, GPT2LMHeadModel

        tiny = GPT2LMHeadModel(GPT2Config(vocab_size=5, n_positions=9, n_embd=4, n_layer=1, n_head=1)).eval()
        mask = torch.ones_like(tokens)
        mask[0, 5:] = 0
        masked = objective(tiny, "cross_entropy", {"input_ids": tokens, "attention_mask": mask})
        assert masked.count == 48 - 4
