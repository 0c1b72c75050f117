"""What ``compare``, ``check`` and ``lineage`` print on a terminal of 80 columns."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from command import run_strati
from safetensors.numpy import save_file

import strati
from strati import embedded
from strati.comparison.summary import short_names
from strati.core.display import as_text

START, TRAINED, ADAPTER = (embedded.path(f"shakespeare{end}") for end in ("-init", "", "-lora"))


@pytest.fixture(scope="module")
def trained() -> strati.Comparison:
    return strati.compare(START, TRAINED, layers="block:0")


def lines_of(result: strati.Result, width: int = 80) -> list[str]:
    return as_text(result.summary(), width=width).splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_lines_fit_and_the_columns_stay(trained: strati.Comparison, width: int) -> None:
    lines = lines_of(trained, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    headings = ("layer", "changed", "update", "same leading", *(["state"] if width >= 80 else []))
    assert all(heading in text for heading in headings)
    assert "model.layers" not in "\n".join(line for line in lines if "%  dense" in line)


def test_a_common_factor_is_no_folded_norm(trained: strati.Comparison) -> None:
    """The norms of a new network are all 1; those of the trained one shrink its weights."""
    assert {layer.aligned for layer in trained.layers} == {None}


def test_an_update_larger_than_the_weights_has_no_intruders(trained: strati.Comparison) -> None:
    assert all(layer.relative_change > 1 and not layer.intruders for layer in trained.layers)


def test_the_next_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i}.mlp.{k}_proj.weight" for i in range(2) for k in ("up", "down")]
    base = {name: rng.normal(size=(32, 32)).astype(np.float32) for name in names}
    tuned = {
        name: w + np.float32(0.01) * rng.normal(size=w.shape).astype(np.float32) for name, w in base.items()
    }
    tuned[names[2]] *= np.float32(1.5)
    monkeypatch.chdir(tmp_path)
    save_file(base, "a.safetensors")
    save_file(tuned, "b.safetensors")
    for verb in ("compare", "lineage", "check"):
        arguments = (
            ("b.safetensors", "--base", "a.safetensors")
            if verb == "check"
            else ("a.safetensors", "b.safetensors")
        )
        run = run_strati(verb, *arguments)
        following = run.stdout.splitlines()[-1]
        assert following.startswith("next: strati ") and "--help" not in following
        command = shlex.split(following.removeprefix("next: strati "))
        assert run_strati(*command).returncode in (0, 3)
        if verb == "compare":
            assert command == ["scan", "b.safetensors", "--layers", names[2].removesuffix(".weight")]


def test_an_adapter_has_a_next_command() -> None:
    result = strati.compare(TRAINED, ADAPTER, layers="block:0")
    assert result.networks[1].adapter == str(ADAPTER)
    assert "scan" in lines_of(result, 400)[-1]
    assert lines_of(result)[-1].startswith("next: strati ")


def test_short_names_stay_different() -> None:
    stages = ["layer1.0.conv1.weight", "layer2.0.conv1.weight"]
    assert short_names(stages) == [name.removesuffix(".weight") for name in stages]
    assert short_names(["model.layers.3.mlp.up_proj.weight", "lm_head.weight"]) == [
        "3.mlp.up_proj",
        "lm_head",
    ]
