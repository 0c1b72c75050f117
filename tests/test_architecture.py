"""Imports point one way, as docs/architecture.md says; modules stay small; torch stays out of the foundation."""

from __future__ import annotations

import ast
import functools
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "strati"

# Each package may import those of a lower rank, and itself. Packages of one rank do not know each other.
RANKS = {
    "_version": 0,
    "core": 0,
    "embedded": 0,
    "schemas": 0,
    "explain": 1,
    "zoo": 1,
    "jobs": 1,
    "io": 2,
    "evaluate": 3,
    "spectra": 4,
    "landscape": 4,
    "reassembly": 4,
    "comparison": 5,
    "interventions": 6,
    "tracking": 7,
    "report": 7,
    "integrations": 8,
    "cli": 9,
    "configs": 10,
    "__init__": 10,
    "__main__": 10,
}
MODULES = sorted(SOURCE.rglob("*.py"))
COMPANION = SOURCE.parents[1] / "reproductions" / "src" / "strati_reproductions"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


DRAWING = ("plot", "summary", "_repr_html_")
"""Methods of results that may import `report`: plots and pages are the one thing imported upwards, in the call."""


@dataclass(frozen=True)
class Import:
    """One import of a module: of what, in which function (``""`` at the top), and whether for type checking only."""

    name: str
    function: str
    checking: bool


def imports(tree: ast.AST, function: str = "", checking: bool = False) -> list[Import]:
    """Everything that a module imports, inside functions as well."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, function, checking) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            names = [node.module]
            if node.module.split(".")[0] == "strati":  # what is imported may itself be a module
                deeper = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [n if is_module(n) else node.module for n in deeper]
            found += [Import(name, function, checking) for name in names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += imports(node, function or node.name, checking)
        elif isinstance(node, ast.If):
            only = "TYPE_CHECKING" in ast.dump(node.test)
            body = ast.Module(body=node.body, type_ignores=[])
            rest = ast.Module(body=node.orelse, type_ignores=[])
            found += imports(body, function, checking or only) + imports(rest, function, checking)
        else:
            found += imports(node, function, checking)
    return found


def is_module(name: str) -> bool:
    place = SOURCE.joinpath(*name.split(".")[1:])
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def at_run_time(path: Path) -> list[Import]:
    """The imports of strati's own modules that happen when the program runs, drawing left aside."""
    return [
        item
        for item in imports(parsed(path))
        if item.name.split(".")[0] == "strati"
        and not item.checking
        and not (item.function in DRAWING and item.name.startswith("strati.report."))
    ]


def test_every_package_has_a_rank() -> None:
    assert {part_of(path) for path in MODULES} - set(RANKS) == set(), (
        "add it to RANKS and docs/architecture.md"
    )


def test_imports_point_one_way() -> None:
    """At the top of a module and inside its functions; only plots and pages of a result point up."""
    wrong = [
        f"{path.relative_to(SOURCE)} imports {item.name} in {item.function or 'the module'}"
        for path in MODULES
        for item in at_run_time(path)
        if not allowed(part_of(path), item.name)
    ]
    assert wrong == []


def allowed(package: str, imported: str) -> bool:
    _, _, rest = imported.partition(".")
    other = rest.partition(".")[0]
    rank, other_rank = RANKS[package], RANKS.get(other, 10)
    return not other or other == package or other_rank < rank or other_rank == rank == 0


def test_a_wrong_import_is_noticed() -> None:
    assert not allowed("io", "strati.spectra.scan") and not allowed("spectra", "strati.landscape")
    assert allowed("spectra", "strati.io.network") and allowed("cli", "strati")


def test_no_module_needs_itself():
    """No cycle of imports, not even one that is closed by an import inside a function."""
    needs = {}
    for path in MODULES:
        name = ".".join(["strati", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        needs[name] = sorted({item.name for item in at_run_time(path)} - {name})
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name in done:
            return
        for other in needs.get(name, []):
            walk(other, (*above, name))
        done.add(name)

    for name in needs:
        walk(name, ())


def test_the_product_does_not_import_the_reproductions() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}: {item.name}"
        for path in MODULES
        for item in imports(parsed(path))
        if item.name.split(".")[0] == "strati_reproductions"
    ]
    assert wrong == []


def test_torch_stays_inside_functions() -> None:
    heavy = ("torch", "transformers", "matplotlib", "ray", "peft")
    wrong = [
        f"{path.relative_to(SOURCE)}: {item.name}"
        for path in MODULES
        if part_of(path) in ("core", "jobs", "io", "spectra", "comparison", "reassembly", "cli", "report")
        if path.name != "vision_models.py"  # modules for torch, imported where a checkpoint becomes one
        for item in imports(parsed(path))
        if item.name.split(".")[0] in heavy and not item.checking and not item.function
    ]
    assert wrong == []


def code_lines(path: Path) -> int:
    """Lines without docstrings, comments and blanks."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in (*layout, tokenize.ENCODING, tokenize.ENDMARKER):
                lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(path)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_modules_are_small_and_have_a_docstring() -> None:
    texts = {path: path.read_text() for path in (*MODULES, *COMPANION.rglob("*.py"))}
    declarations = SOURCE / "schemas" / "json_types.py"  # the fields of every JSON result, no code
    assert [path for path in texts if code_lines(path) > 400 and path != declarations] == []
    assert [path for path, text in texts.items() if text and not ast.get_docstring(parsed(path))] == []


def test_no_two_classes_share_a_name() -> None:
    """One name for one thing. The callbacks of two trainers are the same thing; an underscore makes a name private."""
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in parsed(path).body:
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and node.name != "StratiCallback"
            ):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def sentences(operand: ast.expr) -> list[str]:
    """Texts of several words that are compared with something."""
    parts = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return [text for text in texts if " " in text.strip()]


def decisions_on_sentences(tree: ast.AST) -> list[str]:
    """Comparisons with sentences, and searches in the text of an error, a reason or a warning."""
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            wrong += [ast.unparse(node) for operand in operands if sentences(operand)]
            searched = [
                right
                for operator, right in zip(node.ops, node.comparators, strict=True)
                if isinstance(operator, ast.In | ast.NotIn)
            ]
            if any(ast.unparse(right) in ("str(error)", "error.why") for right in searched):
                wrong.append(ast.unparse(node))
            if any(isinstance(right, ast.Attribute) and right.attr in PROSE for right in searched):
                wrong.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            searches = node.func.attr in ("startswith", "endswith")
            wrong += [ast.unparse(node)] if searches and any(map(sentences, node.args)) else []
    return wrong


PROSE = ("reason", "text", "why", "note", "sentence")
"""Attributes that hold a sentence for users."""


def test_no_decision_depends_on_a_sentence() -> None:
    """Programs decide on enums, codes and types; sentences can be reworded without changing a result."""
    assert {
        str(path.relative_to(SOURCE)): wrong
        for path in MODULES
        if (wrong := decisions_on_sentences(parsed(path)))
    } == {}


def test_a_decision_on_a_sentence_is_noticed() -> None:
    wrong = 'x = reason == "not finite"\ny = "regular" in flag.text\nz = "infinite" in str(error)'
    assert len(decisions_on_sentences(ast.parse(wrong))) == 3
    assert decisions_on_sentences(ast.parse('x = code == "not-finite"')) == []


def test_no_module_has_the_name_of_another_package() -> None:
    """Nor of one of the standard library; ``integrations`` is where users look for the names of other packages."""
    others = {
        "torch",
        "numpy",
        "onnx",
        "gguf",
        "h5py",
        "keras",
        "msgpack",
        "safetensors",
        "transformers",
        "ray",
        "peft",
    }
    names = {path.stem for path in MODULES if part_of(path) != "integrations"} - {"__init__", "__main__"}
    assert names & (others | set(sys.stdlib_module_names)) == set()
