"""The docs' page of reproductions: made from full runs alone, true to its stored tables, and open about old ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tooling

from strati_reproductions.claims import CLAIMS, Verdict
from strati_reproductions.registry import ENTRIES, PAPERS
from strati_reproductions.rows import caption

HOME = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(HOME)
    return tooling.tool("reproduce_all")


@pytest.fixture
def table() -> dict[str, Any]:
    row = {"what": "share with alpha in [2, 6]", "paper": None, "ours": 0.17, "note": ""}
    row |= {"key": "share-well-trained", "facts": {}}
    name = "alpha-of-random-layers"
    return {
        "title": "Alphas",
        "mode": "full",
        "seed": 0,
        "revision": ENTRIES[name].revision,
        "rows": [row],
        "figures": [],
    }


def test_the_page_is_what_its_tables_give(tool: ModuleType) -> None:
    assert tool.check() == 0
    assert all(found["mode"] == "full" for found in tool.stored().values())
    assert all(row["mode"] == "full" for found in tool.stored().values() for row in found["rows"])


def test_quick_results_do_not_go_in(tool: ModuleType, table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="quick results"):
        tool.pages({"alpha-of-random-layers": table | {"mode": "quick"}})


def test_stored_tables_have_the_revision_of_their_experiment(tool: ModuleType) -> None:
    """Where this fails, run ``tools/reproduce_all.py --full NAME`` and ``--docs``; without a new run ``--docs`` alone
    drops the table, and the page lists the entry as not run yet."""
    assert tool.outdated(tool.stored()) == {}


def test_a_table_of_another_revision_does_not_go_in(tool: ModuleType, table: dict[str, Any]) -> None:
    name = "alpha-of-random-layers"
    assert "## Alphas" in tool.pages({name: table})["reproduced/robust-and-critical-layers.md"]
    with pytest.raises(ValueError, match=f"tables of another revision: {name}"):
        tool.pages({name: table | {"revision": ENTRIES[name].revision + 1}})
    with pytest.raises(ValueError, match="another revision"):
        tool.pages({name: {key: table[key] for key in table if key != "revision"}})


def test_collecting_takes_full_runs_of_the_present_revision_alone(
    tool: ModuleType, table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tool, "OUT", tmp_path / "out")
    monkeypatch.setattr(tool, "STORED", tmp_path / "stored")
    (tmp_path / "out").mkdir()
    (tmp_path / "stored").mkdir()
    (tmp_path / "out" / "a.png").write_bytes(b"png")
    (tmp_path / "out" / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "out" / "large.png").write_bytes(b"png")
    (tmp_path / "out" / "large.csv").write_text("x,y\n" + "1,2\n" * tool.LARGEST_CSV)
    fresh, quick, old = "alpha-of-random-layers", "phases", "roles"
    found = {
        fresh: table | {"figures": [str(tmp_path / "out" / n) for n in ("a.png", "a.svg", "large.png")]},
        quick: table | {"mode": "quick"},
        old: table | {"revision": 0},
    }
    for name, result in found.items():
        (tmp_path / "out" / f"{name}.json").write_text(json.dumps(result))
        cost = {"seconds": 60.0, "cpu_seconds": 30.0, "finished": True}
        (tmp_path / "out" / f"{name}.cost.json").write_text(json.dumps(cost))
    (tmp_path / "stored" / f"{old}.json").write_text(
        json.dumps(table | {"revision": 0, "figures": ["b.png"]})
    )
    (tmp_path / "stored" / "b.png").write_bytes(b"png")
    tool.collect()
    assert sorted(f.name for f in (tmp_path / "stored").iterdir()) == [
        f"{fresh}-a.csv",
        f"{fresh}-a.png",
        f"{fresh}-large.png",
        f"{fresh}.csv",
        f"{fresh}.json",
    ]
    told = capsys.readouterr().out
    assert f"{quick}: a quick run; not taken" in told
    assert f"{old}: the table has revision 0, the experiment 2; not taken" in told
    assert f"{old}: the table has revision 0, the experiment 2; dropped" in told
    page = tool.pages(tool.stored())["reproduced/robust-and-critical-layers.md"]
    assert "1.0 minutes (0.5 of the processor)" in page
    assert f"[data]({fresh}-a.csv)" in page


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
    place = "reproduced/robust-and-critical-layers.md"
    for ours, verdict, heading in ((0.17, "held", "**Held**"), (0.0, "did not hold", "**Did not hold**")):
        changed = copy.deepcopy(table)
        changed["rows"][0]["ours"] = ours
        files = tool.pages({"alpha-of-random-layers": changed})
        assert f"[{verdict}]({place}#alpha-of-random-layers)" in files["reproduced.md"]
        top = files[place].split("\n## ")[1]
        assert top.startswith("What held up, what did not, what it means") and heading in top


def test_every_reproduction_has_a_page(tool: ModuleType) -> None:
    assert {entry.paper for entry in ENTRIES.values()} == set(PAPERS)
    nav = (HOME / "mkdocs.yml").read_text()
    assert all(f"- reproduced/{name}.md" in nav for name in PAPERS)


def test_claims_name_entries_that_there_are() -> None:
    assert all(claim.entry in ENTRIES for claim in CLAIMS)


def test_a_page_shows_the_rows_that_compare_and_links_all_of_them(
    tool: ModuleType, table: dict[str, Any]
) -> None:
    rows = [{"what": f"row {k}", "paper": k if k < 30 else None, "ours": k} for k in range(40)]
    name = "alpha-of-random-layers"
    page = tool.pages({name: table | {"rows": rows}})["reproduced/robust-and-critical-layers.md"]
    assert f"{tool.ROWS_SHOWN} of 40 rows" in page and f"({name}.csv)" in page
    assert "row 39" not in page
    assert tool.rows_as_csv({"rows": rows}).count("\n") == 41


def _row(
    key: str, ours: object = None, facts: dict[str, Any] | None = None, **more: object
) -> dict[str, Any]:
    cells = {"what": "", "ours": ours, "paper": None, "error": None, "agrees": None, "note": ""}
    return cells | {"key": key, "facts": facts or {}} | more


def test_claims_of_followed_runs() -> None:
    verdicts = {c.says.split()[0]: c for c in CLAIMS if c.entry in ("grokking", "in-context")}
    runs = [_row("runs-that-generalise", facts={"count": 5, "of": 5})]
    for accuracy, verdict in ((0.031, "held"), (0.99, "did not hold")):
        alone = _row("accuracy-without-decay", facts={"accuracy": accuracy})
        assert verdicts["Modular"].verdict([*runs, alone]) == verdict
    for end, error, verdict in ((57.0, 0.4, "held"), (278.0, 0.8, "did not hold")):
        levels = {"decay": True, "peak": 279.2, "peak_error": 0.9, "end": end, "end_error": error}
        assert verdicts["The"].verdict([_row("peak-and-end", facts=levels)]) == verdict
    assert verdicts["The"].verdict([_row("peak-and-end", facts={"decay": True})]) == "not tested"
    for count, of, verdict in ((5, 5, "held"), (4, 5, "did not hold"), (0, 0, "did not hold")):
        order = {"first": "spectra", "second": "test-loss", "count": count, "of": of}
        assert verdicts["Spectra"].verdict([_row("order", facts=order)]) == verdict
    for steps, verdict in (((5, 9, 9), "held"), ((9, 5, 9), "did not hold"), ((5, None, 9), "did not hold")):
        stages = [_row("stage", facts={"stage": k, "step": step}) for k, step in enumerate(steps)]
        assert verdicts["Bigrams,"].verdict(stages) == verdict


def test_a_claim_can_hold_in_part() -> None:
    share = next(c for c in CLAIMS if c.says.startswith("1 to 6 %"))
    gpt2 = _row("quasi-null-share", paper_network=0.8, facts={"most": 3.0})
    other = _row("quasi-null-share", 2.0, {"most": 7.0})
    assert share.verdict([gpt2, other]) == "held in part"
    assert share.verdict([gpt2 | {"paper_network": 1.2}, other]) == "held"
    assert share.verdict([gpt2 | {"facts": {"most": 0.5}}]) == "did not hold"
    assert share.meaning(Verdict.IN_PART) == share.meaning(Verdict.FAILED) != share.meaning(Verdict.HELD)
    tails = next(c for c in CLAIMS if "no clean edge of the bulk" in c.says)
    for count, verdict in ((12, "held"), (9, "held in part"), (6, "did not hold")):
        assert tails.verdict([_row("gpt2-heavy-tailed", facts={"count": count, "of": 12})]) == verdict


def test_the_claim_about_scales_is_read_at_its_ends() -> None:
    claim = next(c for c in CLAIMS if "depends on the loss scale" in c.says)
    ends = [_row("lambda-at-scale", v, paper=v, error=0.01, agrees="yes") for v in (0.5, 0.25)]
    between = _row("lambda-at-scale", 0.37, error=0.004, agrees="no")
    assert claim.verdict([ends[0], between, ends[1]]) == "held"
    assert claim.verdict([ends[0] | {"agrees": "no"}, ends[1]]) == "did not hold"
    assert claim.verdict([ends[0], ends[1] | {"ours": 0.49}]) == "did not hold"


def test_claims_do_not_depend_on_text() -> None:
    """Other names and notes of the rows, the same verdicts: rules read keys, facts and numbers."""
    for claim in CLAIMS:
        file = HOME / "docs" / "reproduced" / f"{claim.entry}.json"
        if file.is_file():
            rows = json.loads(file.read_text())["rows"]
            renamed = [row | {"what": "x", "note": "y"} for row in rows]
            assert claim.verdict(renamed) == claim.verdict(rows), claim.says


def test_stored_keys_are_those_that_the_code_gives() -> None:
    source = "".join(file.read_text() for file in (HOME / "reproductions" / "src").rglob("*.py"))
    for file in (HOME / "docs" / "reproduced").glob("*.json"):
        keys = {row["key"] for row in json.loads(file.read_text())["rows"] if "key" in row}
        assert {key for key in keys if f'"{key}"' not in source} <= {"table-1", "table-2", "table-3"}


def test_every_claim_of_a_stored_table_has_its_verdict() -> None:
    """A rule that finds none of its rows would say "not tested" of a table that stands below it.

    The rows of anti-grokking decide nothing until a test accuracy falls.
    """
    tables = {
        file.stem: json.loads(file.read_text()) for file in (HOME / "docs" / "reproduced").glob("*.json")
    }
    without_fall = {
        name
        for name, table in tables.items()
        if any(row.get("key") == "heralded" and row["facts"]["of"] == 0 for row in table["rows"])
    }
    blind = [
        c.says
        for c in CLAIMS
        if c.entry in set(tables) - without_fall and c.verdict(tables[c.entry]["rows"]) == "not tested"
    ]
    assert not blind


def test_claims_about_single_networks_and_bases_look_at_their_own_rows() -> None:
    vit, others = (next(c for c in CLAIMS if words in c.says) for words in ("in a ViT", "in pretrained"))
    rows = [
        _row("mean-correlation", rho, {"network": name, "metric": "alpha", "statistic": "Spearman"})
        for name, rho in (("vit-cifar10", 0.1), ("stories15m-initial", 0.3))
    ]
    assert (vit.verdict(rows), others.verdict(rows)) == ("held", "did not hold")
    neurons, components = (
        next(c for c in CLAIMS if words in c.says) for words in ("than the neuron", "than principal")
    )
    edges = [
        _row("edges", value, {"network": network, "basis": kind})
        for network, values in (("digits", (10, 20, 30)), ("stories15M", (10, 9, 30)))
        for kind, value in zip(("interaction", "pca", "neuron"), values, strict=True)
    ]
    assert (neurons.verdict(edges), components.verdict(edges)) == ("held", "did not hold")
    word = next(c for c in CLAIMS if c.says.startswith("Such a fine-tuning"))
    keys = ("alpha-change", "spectral-distance")
    tuned = [_row(k, v, {"decay": d}) for d, v in ((0.1, 0.1), (1.0, 0.1), (10.0, 0.2)) for k in keys]
    strong = [_row(k, 2.6, {"decay": 100.0}) for k in keys]
    assert word.verdict([*tuned, *strong]) == "held"
    assert word.verdict([*tuned[:-1], tuned[-1] | {"ours": 0.7}]) == "did not hold"
    assert word.verdict(tuned[:-1]) == "not tested"
    larger = next(c for c in CLAIMS if "more stable across layers" in c.says)
    for effect, pvalue, verdict in (
        (-0.5, 0.01, "held"),
        (-0.5, 0.2, "did not hold"),
        (0.5, 0.01, "did not hold"),
    ):
        facts = {"effect": effect, "pvalue": pvalue}
        assert larger.verdict([_row("neighbour-distance", facts=facts)]) == verdict
