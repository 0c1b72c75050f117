"""One rule for every public function: what comes by position, ``config=None``, ``tick=``, options by name."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tooling import tool

import strati
from strati.core.errors import BadInputError
from strati.core.results import silent

POSITIONAL = {
    "apply": ["plan", "model"],
    "as_module": ["model"],
    "audit": ["study"],
    "check": ["model", "base"],
    "compare": ["models"],
    "curvature": ["model", "loss", "data"],
    "degeneracy": ["model", "data"],
    "effective_parameters": ["model", "data"],
    "influence": ["model", "loss", "data"],
    "inspect": ["model"],
    "interaction_basis": ["model", "data", "kind"],
    "learning_coefficient": ["potential", "theta"],
    "lineage": ["models"],
    "llc": ["model", "loss", "data"],
    "modules": ["graph"],
    "plan": ["study"],
    "reassemble": ["pieces", "x", "y"],
    "scan": ["model"],
    "sparsify": ["model", "data"],
    "spectrum": ["W"],
    "study": ["model"],
    "track": ["checkpoints"],
}
"""Every function that computes, and its positional parameters."""

PLAIN = {"extract_adapter", "interaction_graph", "load_factored", "load_study", "open", "write_report"}
"""Functions that only read or write what they are given, and one whose options are all in its signature."""


def functions() -> dict[str, Callable[..., Any]]:
    """Public functions; interventions as settings and networks changed in memory describe, they do not compute."""
    found = {name: getattr(strati, name) for name in dir(strati) if not name.startswith("_")}
    homes = ("strati.interventions.kinds", "strati.interventions.context")
    return {n: f for n, f in found.items() if inspect.isfunction(f) and f.__module__ not in homes}


def config_of(function: Callable[..., Any]) -> type:
    """The config class, from the annotation ``NameConfig | None``."""
    text = str(inspect.signature(function).parameters["config"].annotation)
    name, _, rest = text.partition(" | ")
    assert rest == "None", text
    kind = getattr(strati.configs, name)
    assert isinstance(kind, type)
    return kind


def test_the_list_is_complete() -> None:
    assert set(functions()) == set(POSITIONAL) | PLAIN


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_what_comes_by_position_and_what_by_name(name: str) -> None:
    parameters = inspect.signature(functions()[name]).parameters.values()
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    assert by_position == POSITIONAL[name]
    assert not any(p.kind is p.POSITIONAL_ONLY for p in parameters)
    assert [p.kind for p in parameters][-1] is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_config_and_tick(name: str) -> None:
    parameters = inspect.signature(functions()[name]).parameters
    assert parameters["config"].default is None
    assert parameters["tick"].default is silent
    kind = config_of(functions()[name])
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        for field in dataclasses.fields(kind)
    ), "every option has a default, and it stands in the config"
    fields = {field.name for field in dataclasses.fields(kind)}
    assert not fields & set(parameters), "a default would stand in two places"


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_an_unknown_keyword_is_refused_with_the_nearest_name(name: str) -> None:
    """A letter too many at the end of a known option; without any option the rest of the keywords is listed."""
    function = functions()[name]
    field = next((field.name for field in dataclasses.fields(config_of(function))), "")
    given: dict[str, Any] = {"plan": {"budget": "parameters=0.5"}, "apply": {"out": "nowhere"}}.get(name, {})
    with pytest.raises(BadInputError) as caught:
        function(*usable(name), **given, **{f"{field}x": 1})
    assert f"no option '{field}x'" in str(caught.value)
    assert (f"'{field}'" if field else "there are") in str(caught.value)
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_keywords_beside_the_config_are_known_too(name: str) -> None:
    """``lyers=`` is told of ``layers=``, which is no field of the config."""
    function = functions()[name]
    own = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    given: dict[str, Any] = {"plan": {"budget": "parameters=0.5"}, "apply": {"out": "nowhere"}}.get(name, {})
    fields = {field.name for field in dataclasses.fields(config_of(function))}
    for keyword in own:
        wrong = keyword[0] + keyword[2:]
        if len(keyword) < 4 or wrong in {*fields, *own}:
            continue
        with pytest.raises(BadInputError, match=f"no option '{wrong}'; did you mean '{keyword}'"):
            function(*usable(name), **given, **{wrong: 1})


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_a_config_of_another_kind_is_refused(name: str) -> None:
    @dataclasses.dataclass(frozen=True)
    class Other:
        pass

    given: dict[str, Any] = {"plan": {"budget": "parameters=0.5"}, "apply": {"out": "nowhere"}}.get(name, {})
    with pytest.raises(BadInputError, match="config must be a"):
        functions()[name](*usable(name), **given, config=Other())


def usable(name: str) -> list[Any]:
    """Small inputs that each function accepts."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    x = torch.randn(30, 3, dtype=torch.float64)
    weights = {"fc.weight": np.eye(4, 3)}
    if name == "modules":
        return [strati.interaction_graph(strati.interaction_basis(net, x))]
    if name in ("audit", "plan"):
        return [strati.study(net.float(), data=(x.float(), net.float()(x.float()).argmax(1)))]
    chosen: dict[str, list[Any]] = {
        "apply": ["plan.json", net],
        "as_module": [net],
        "check": [weights],
        "compare": [weights, weights],
        "curvature": [net, "behavioural-mse", x],
        "degeneracy": [net, x],
        "effective_parameters": [net, x],
        "influence": [net, "behavioural-mse", x],
        "inspect": [weights],
        "interaction_basis": [net, x],
        "learning_coefficient": [lambda t: (t**2).sum(), torch.zeros(2)],
        "lineage": [net, net],
        "llc": [net, "behavioural-mse", x],
        "reassemble": ["pieces"],
        "scan": [weights],
        "sparsify": [net, x.numpy()],
        "spectrum": [np.eye(4, 3)],
        "study": [net],
        "track": [[weights, weights]],
    }
    return chosen[name]


def test_ticks_are_called() -> None:
    """What takes no time by itself says that it is done, too."""
    graph = usable("modules")[0]
    for name, call in {
        "modules": lambda tick: strati.modules(graph, tick=tick),
        "sparsify": lambda tick: strati.sparsify(*usable("sparsify"), tick=tick),
        "spectrum": lambda tick: strati.spectrum(*usable("spectrum"), tick=tick),
        "inspect": lambda tick: strati.inspect(*usable("inspect"), tick=tick),
        "as_module": lambda tick: strati.as_module(*usable("as_module"), tick=tick),
        "scan": lambda tick: strati.scan(*usable("scan"), tick=tick),
        "audit": lambda tick: strati.audit(*usable("audit"), tick=tick),
    }.items():
        seen: list[str] = []
        typing.cast(Callable[..., Any], call)(seen.append)
        assert seen, name
        assert all(isinstance(text, str) for text in seen), name


@pytest.mark.parametrize("name", sorted(POSITIONAL))
def test_a_value_of_the_wrong_type_is_refused_in_one_line(name: str) -> None:
    """Numbers that are words, words that are numbers, and what is not a number."""
    function = functions()[name]
    given: dict[str, Any] = {"plan": {"budget": "parameters=0.5"}, "apply": {"out": "nowhere"}}.get(name, {})
    wrong = {"int": "many", "float": float("nan"), "bool": "yes", "str": 3}
    words = usable(name)
    for field in dataclasses.fields(config_of(function)):
        if str(field.type) not in wrong:
            continue
        with pytest.raises(BadInputError, match=f"option '{field.name}' must be ") as caught:
            function(*words, **given, **{field.name: wrong[str(field.type)]})
        assert str(caught.value).startswith(f"{name}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["check", "compare", "scan", "study", "track"])
def test_jobs_is_another_name_of_workers(name: str) -> None:
    with pytest.raises(BadInputError, match="workers"):
        functions()[name](*usable(name), jobs="two")


VERBS = {
    "basis": ("BasisConfig", "ModulesConfig", "SparsifyConfig", "ModuleConfig"),
    "degeneracy": ("DegeneracyConfig", "LLCConfig", "ModuleConfig"),
    "scan": ("ScanConfig", "SpectrumConfig"),
} | {
    verb: (f"{verb.capitalize()}Config",)
    for verb in ("inspect", "compare", "check", "study", "audit", "plan")
}
VERBS |= {verb: (f"{verb.capitalize()}Config",) for verb in ("apply", "lineage", "track", "reassemble")}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_commands_defaults_are_the_configs(verb: str) -> None:
    """Those that an option states; the others are left to the function."""
    import click

    from strati.cli.main import strati as group

    fields: dict[str, Any] = {}
    for name in VERBS[verb]:
        for field in dataclasses.fields(getattr(strati.configs, name)):
            fields.setdefault(field.name, field.default)
    found = group.get_command(click.Context(group), verb)
    assert found is not None
    for option in found.params:
        value = option.default() if callable(option.default) else option.default
        if option.name not in fields or isinstance(value, type(None)) or "UNSET" in repr(value):
            continue
        assert value == fields[option.name] or not (value or fields[option.name]), option.name


def test_option_types_are_generated_from_the_configs() -> None:
    generator = tool("option_types")
    assert generator.TARGET.read_text() == generator.text(), "run tools/option_types.py"


USER_SCRIPT = """
import strati

strati.scan("model.safetensors", level=0.01, workers=2)
strati.scan("model.safetensors", levle=0.01)
strati.llc("model.safetensors", "mse", "data.npz", chains=4)
strati.llc("model.safetensors", "mse", "data.npz", chanis=4)
strati.compare("a", "b", workers="two")
"""


def test_type_checkers_find_misspelt_and_mistyped_options(tmp_path: Path) -> None:
    """The user's view: mypy on a script, against the installed package's own annotations."""
    script = tmp_path / "script.py"
    script.write_text(USER_SCRIPT)
    source = str(Path(strati.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", "--ignore-missing-imports",
         "--cache-dir", str(Path(source).parent / ".mypy_cache"), str(script)],
        capture_output=True, text=True, check=False, env={**os.environ, "MYPYPATH": source},
    )  # fmt: skip
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines() if "error" in line]
    assert sorted(set(lines)) == [5, 7, 8], done.stdout
    assert "levle" in done.stdout and "chanis" in done.stdout


def test_few_names_and_those_of_the_interface() -> None:
    assert len(strati.__all__) - 1 <= 60
    assert "open" not in strati.__all__ and strati.open is not None
    for name in ("truncate", "quantise", "prune", "drop", "swap", "truncated"):
        assert getattr(strati, name) is getattr(strati.interventions, name)
    assert strati.configs.LLCConfig is strati.LLCConfig


def test_every_result_has_a_table_of_key_columns() -> None:
    """``.table`` is a part of ``.frame()``, and is not empty where the frame is not."""
    study = usable("plan")[0]
    net, x = usable("degeneracy")
    results = [study, strati.audit(study), strati.degeneracy(net, x), strati.inspect(net), strati.scan(net)]
    results += [strati.compare(net, net), strati.interaction_basis(net, x), strati.check(net)]
    for result in results:
        frame, table = result.frame(), result.table
        assert set(table.columns) <= set(frame.columns), result.verb
        assert len(table) == len(frame) and 0 < len(table.columns) <= 12, result.verb
        assert all(column in frame for column in result.key_columns), result.verb
