"""The docs' page of reproductions: made from full runs alone, true to its stored tables, and open about old ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tooling

from strati.papers import registry
from strati.papers.claims import CLAIMS
from strati.papers.registry import ENTRIES, sources
from strati.papers.rows import caption

HOME = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(HOME)
    return tooling.tool("reproduce_all")


@pytest.fixture
def table() -> dict[str, Any]:
    row = {"what": "share with alpha in [2, 6]", "paper": None, "ours": 0.17, "note": ""}
    name = "alpha-of-random-layers"
    return {
        "title": "Alphas",
        "mode": "full",
        "seed": 0,
        "sources": sources(name),
        "rows": [row],
        "figures": [],
    }


def test_the_page_is_what_its_tables_give(tool: ModuleType) -> None:
    assert tool.check() == 0
    assert all(found["mode"] == "full" for found in tool.stored().values())
    assert all(row["mode"] == "full" for found in tool.stored().values() for row in found["rows"])


def test_quick_results_do_not_go_in(tool: ModuleType, table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="quick results"):
        tool.page({"alpha-of-random-layers": table | {"mode": "quick"}})


def test_no_stored_table_is_older_than_its_code(tool: ModuleType) -> None:
    """Where this fails, run ``tools/reproduce_all.py --full NAME`` and ``--docs``; without a new run ``--docs`` alone
    takes the old table out, and the page lists the entry as not run yet."""
    assert tool.old(tool.stored()) == []


def test_a_table_older_than_its_code_does_not_go_in(tool: ModuleType, table: dict[str, Any]) -> None:
    name = "alpha-of-random-layers"
    assert "## Alphas" in tool.page({name: table})
    with pytest.raises(ValueError, match=f"older than the code that makes them: {name}"):
        tool.page({name: table | {"sources": "0" * 16}})


def test_collecting_takes_full_runs_of_the_present_code_alone(
    tool: ModuleType, table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tool, "OUT", tmp_path / "out")
    monkeypatch.setattr(tool, "STORED", tmp_path / "stored")
    (tmp_path / "out").mkdir()
    (tmp_path / "stored").mkdir()
    (tmp_path / "out" / "a.png").write_bytes(b"png")
    (tmp_path / "out" / "a.csv").write_text("x,y\n1,2\n")
    fresh, quick, old = "alpha-of-random-layers", "phases", "roles"
    found = {
        fresh: table | {"figures": [str(tmp_path / "out" / "a.png"), str(tmp_path / "out" / "a.svg")]},
        quick: table | {"mode": "quick", "sources": sources(quick)},
        old: table | {"sources": "0" * 16},
    }
    for name, result in found.items():
        (tmp_path / "out" / f"{name}.json").write_text(json.dumps(result))
        cost = {"seconds": 60.0, "cpu_seconds": 30.0, "finished": True}
        (tmp_path / "out" / f"{name}.cost.json").write_text(json.dumps(cost))
    (tmp_path / "stored" / f"{old}.json").write_text(
        json.dumps(table | {"sources": "1" * 16, "figures": ["b.png"]})
    )
    (tmp_path / "stored" / "b.png").write_bytes(b"png")
    tool.collect()
    assert sorted(f.name for f in (tmp_path / "stored").iterdir()) == [
        f"{fresh}-a.csv",
        f"{fresh}-a.png",
        f"{fresh}.json",
    ]
    told = capsys.readouterr().out
    assert f"{quick}: a quick run; not taken" in told
    assert f"{old}: its code has changed since that run; not taken" in told
    assert f"{old}: the stored table is older than its code; dropped" in told
    page = tool.page(tool.stored())
    assert "1.0 minutes (0.5 of the processor)" in page
    assert f"[data](reproduced/{fresh}-a.csv)" in page


def test_costs_add_up_over_stopped_runs_and_not_over_drawing_anew(tool: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    for seconds, finished, total in (
        (10.0, False, 10.0),
        (20.0, True, 30.0),
        (1.0, True, 30.0),
        (50.0, True, 50.0),
    ):
        cost = tool.Cost(file)
        cost.add(seconds, seconds)
        if finished:
            cost.finish()
        assert json.loads(file.read_text())["seconds"] == total


def test_every_stored_picture_has_its_sentence(tool: ModuleType) -> None:
    for name, table in tool.stored().items():
        for figure in table["figures"]:
            assert (HOME / "docs" / "reproduced" / figure).is_file()
            assert caption(Path(figure).stem.removeprefix(f"{name}-"), table["captions"]), figure


def test_claims_follow_the_rows(tool: ModuleType, table: dict[str, Any]) -> None:
    assert "[held](#alpha-of-random-layers)" in tool.page({"alpha-of-random-layers": table})
    other = copy.deepcopy(table)
    other["rows"][0]["ours"] = 0.0
    assert "[not held](#alpha-of-random-layers)" in tool.page({"alpha-of-random-layers": other})


def test_claims_name_entries_that_there_are() -> None:
    assert all(claim.entry in ENTRIES for claim in CLAIMS if claim.entry is not None)
    assert {claim.paper for claim in CLAIMS} == {
        "robust-and-critical-layers",
        "top-down-eigenspectra",
        "degeneracy-in-the-loss-landscape",
        "dropped-neural-net",
        "Nanda et al. 2023",
        "Hoogland et al. 2024",
        "asked here",
    }


def _row(what: str, ours: object, **more: object) -> dict[str, Any]:
    return {"what": what, "ours": ours, "paper": None, "error": None, "agrees": None, "note": ""} | more


def test_claims_of_followed_runs() -> None:
    verdicts = {c.says.split()[0]: c for c in CLAIMS if c.entry in ("grokking", "in-context")}
    runs = [_row("runs with weight decay that generalise", "all")]
    alone = "test accuracy without weight decay, after as many steps as the longest"
    for accuracy, found in (("3.1%", "held"), ("99.0%", "not held")):
        assert verdicts["Modular"].verdict([*runs, _row(alone, accuracy)]) == found
    level = "seed 0: learning coefficient at its peak and at the end"
    for end, found in (("57.0 +- 0.4", "held"), ("278.0 +- 0.8", "not held")):
        shown = f"279.2 +- 0.9 at step 2000, {end} at step 6100"
        assert verdicts["The"].verdict([_row(level, shown)]) == found
    assert verdicts["The"].verdict([_row(level, "none")]) == "not run"
    event = (
        "half of the matrices leave the random-like phase, before the test loss is halfway down from its peak"
    )
    for seeds, found in (
        ("5 of 5 seeds", "held"),
        ("4 of 5 seeds", "not held"),
        ("0 of 0 seeds", "not held"),
    ):
        assert verdicts["Spectra"].verdict([_row(event, seeds)]) == found
    for steps, found in (((5, 9, 9), "held"), ((9, 5, 9), "not held"), ((5, None, 9), "not held")):
        stages = [_row(f"stage {k}", f"step {s}" if s else "does not appear") for k, s in enumerate(steps)]
        assert verdicts["Bigrams,"].verdict(stages) == found


def test_the_claim_about_scales_is_read_at_its_ends() -> None:
    claim = next(c for c in CLAIMS if "depends on the loss scale" in c.says)
    ends = [
        _row(f"2.2.2 lambda({e})", v, paper=v, error=0.01, agrees="yes") for e, v in ((1e-8, 0.5), (1, 0.25))
    ]
    between = _row("2.2.2 lambda(1e-4)", 0.37, error=0.004, agrees="no")
    assert claim.verdict([ends[0], between, ends[1]]) == "held"
    assert claim.verdict([ends[0] | {"agrees": "no"}, ends[1]]) == "not held"
    assert claim.verdict([ends[0], ends[1] | {"ours": 0.49}]) == "not held"


def test_every_claim_of_a_stored_table_has_its_verdict() -> None:
    """A rule that finds none of its rows would say "not run" of a table that stands below it."""
    tables = {
        file.stem: json.loads(file.read_text()) for file in (HOME / "docs" / "reproduced").glob("*.json")
    }
    blind = [c.says for c in CLAIMS if c.entry in tables and c.verdict(tables[c.entry]["rows"]) == "not run"]
    assert not blind


def test_claims_about_single_networks_and_bases_look_at_their_own_rows() -> None:
    vit, others = (next(c for c in CLAIMS if words in c.says) for words in ("in a ViT", "in pretrained"))
    rows = [
        _row(f"figure 5, {name}: alpha, mean Spearman over layers", rho)
        for name, rho in (("vit-cifar10 (for ViT)", 0.1), ("stories15m-initial (for GPT-2)", 0.3))
    ]
    assert (vit.verdict(rows), others.verdict(rows)) == ("held", "not held")
    neurons, components = (
        next(c for c in CLAIMS if words in c.says) for words in ("than neurons", "than principal")
    )
    edges = [
        _row(f"{network}, {kind}: edges for 99 % of the interaction", value)
        for network, values in (("digits", (10, 20, 30)), ("stories15M", (10, 9, 30)))
        for kind, value in zip(("interaction", "pca", "neuron"), values, strict=True)
    ]
    assert (neurons.verdict(edges), components.verdict(edges)) == ("held", "not held")
    word = next(c for c in CLAIMS if c.says.startswith("Such a fine-tuning"))
    ends = ("median change of alpha", "median distance of spectra (log-eigenvalue)")
    tuned = [
        _row(f"weight decay {d}: {e}", v) for d, v in (("0.1", 0.1), ("1", 0.1), ("10", 0.2)) for e in ends
    ]
    strong = [_row(f"weight decay 100: {e}", 2.6) for e in ends]
    assert word.verdict([*tuned, *strong]) == "held"
    assert word.verdict([*tuned[:-1], tuned[-1] | {"ours": 0.7}]) == "not held"


def test_the_checksum_sees_code_and_not_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "made.py"

    class Found:
        origin = str(file)

    monkeypatch.setattr(registry, "find_spec", lambda name: Found if name.endswith("phases") else None)
    sums = []
    for text in ('"""A."""\nx = 1\n', '"""B."""\n# why\nx = 1\n', '"""A."""\nx = 2\n'):
        file.write_text(text)
        sums.append(sources("phases"))
    assert sums[0] == sums[1] != sums[2]
