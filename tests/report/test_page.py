from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from page_samples import hostile, scan

from strati.core.errors import BadInputError
from strati.report import page as assets
from strati.report.page import build_page
from strati.report.runs import check_result, drawable, read_run


def test_a_page_holds_no_address_and_no_markup_from_results() -> None:
    page = build_page(hostile("<script>alert(1)</script>"))
    assert "alert(1)" not in page
    assert page.count("<script") == 2
    addresses = set(re.findall(r"https?://[^\"'\s)]*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, never fetched


def test_the_policy_allows_only_the_pages_own_parts() -> None:
    page = build_page([scan(2, 24)])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert (
        rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    )
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules["script-src"])
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules["style-src"])
    assert "unsafe" not in policy[1]


@pytest.mark.parametrize("layers", [100, 300])
def test_a_page_of_many_layers_is_small(layers: int) -> None:
    """100 layers of 1024 eigenvalues each must stay under 3 MB; 300 do as well."""
    page = build_page([scan(layers, 1024, exact=6)])
    assert len(page.encode()) < 3e6


def test_the_page_is_a_function_of_its_results() -> None:
    assert build_page([scan(3, 24)]) == build_page([scan(3, 24)])


def test_marks_inside_parts_are_left_alone() -> None:
    assert "@CSP@" not in build_page([scan(1, 24)])


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ([], "not a result"),
        ({}, "no schema"),
        ({"schema": 3}, "no schema"),
        ({"schema": "strati.scan/2", "layers": []}, "cannot draw"),
        ({"schema": "strati.sing/1"}, "cannot draw"),
        ({"schema": "other.scan/1"}, "no schema"),
        ({"schema": "strati.scan/1"}, "lacks 'layers'"),
        ({"schema": "strati.scan/1", "layers": {}}, "not a list of records"),
        ({"schema": "strati.scan/1", "layers": [1]}, "not a list of records"),
        ({"schema": "strati.scan/1", "layers": [{"eigenvalues": ["x"]}]}, "not a number"),
        ({"schema": "strati.scan/1", "layers": [{"alpha": float("nan")}]}, "not finite"),
        ({"schema": "strati.scan/1", "layers": [{"alpha": 10**400}]}, "out of range"),
        ({"schema": "strati.scan/1", "layers": [{"alpha": {1, 2}}]}, "holds a set"),
        ({"schema": "strati.scan/1", "layers": [{3: 4}]}, "not text"),
    ],
)
def test_what_is_no_result_is_refused(result: Any, why: str) -> None:
    with pytest.raises(BadInputError, match=why) as caught:
        build_page([result])
    assert caught.value.what == "result 1"


def test_deep_nesting_is_refused() -> None:
    value: Any = 1
    for _ in range(200):
        value = [value]
    with pytest.raises(BadInputError, match="nested deeper"):
        check_result({"schema": "strati.scan/1", "layers": [], "x": value}, "x")


def test_no_result_is_refused() -> None:
    with pytest.raises(BadInputError, match="no result given"):
        build_page([])


def test_every_verb_with_a_result_can_be_drawn() -> None:
    from strati.cli.main import COMMANDS

    parts = {"llc", "scales", "sparsify", "reassemble-make"}  # of verbs, or of Python alone
    assert set(COMMANDS) - {"report", "demo", "explain"} <= drawable()
    assert parts <= drawable()
    drawn_alike = {"interaction-basis", "interaction-graph"}  # as the basis, of which they are parts
    assert {check_result(result, "x") for result in hostile("x")} == drawable() - drawn_alike


def test_only_pictures_beside_the_result_come_onto_the_page(tmp_path: Path) -> None:
    """A JSON file from anywhere must not bring other files of the reader's machine onto a page."""
    import json

    png = b"\x89PNG\r\n\x1a\n" + bytes(20)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.png").write_bytes(png)
    (tmp_path / "outside.png").write_bytes(png)
    (tmp_path / "inside" / "secret.txt").write_text("secret")
    (tmp_path / "inside" / "link.png").symlink_to(tmp_path / "outside.png")
    figures = [
        "a.png",
        "../outside.png",
        str(tmp_path / "outside.png"),
        "secret.txt",
        "link.png",
        "ghost.png",
    ]
    result = {"schema": "strati.reproduce/1", "strati": "1", "rows": [], "figures": figures}
    file = tmp_path / "inside" / "result.json"
    file.write_text(json.dumps(result))
    assert [picture["name"] for picture in read_run(file)["pictures"]] == ["a.png"]


MODULES = sorted(assets.STATIC.glob("*.js"))


def test_every_module_is_used_and_short() -> None:
    script = assets.script()
    for path in MODULES:
        assert f"const module_{path.stem} = " in script
        assert len(path.read_text().splitlines()) < 500


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_imports_name_what_is_exported_and_used(path: Path) -> None:
    source = path.read_text()
    for names, module in re.findall(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', source, re.MULTILINE):
        exported = set(
            re.findall(
                r"^export (?:async )?(?:function|const) (\w+)",
                (assets.STATIC / f"{module}.js").read_text(),
                re.MULTILINE,
            )
        )
        wanted = {name.strip() for name in names.split(",")}
        assert wanted <= exported
        body = source.split('.js";\n')[-1]
        assert {name for name in wanted if not re.search(rf"\b{name}\b", body)} == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_scripts_never_parse_markup_nor_reach_out(path: Path) -> None:
    source = path.read_text()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "new Function",
        "fetch(",
        "XMLHttpRequest",
        "WebSocket",
        "import(",
        "localStorage",
    ):
        assert word not in source
