"""The docs are true: notebooks run, the pages of verbs and codes are complete, public names are there."""

from __future__ import annotations

import ast
import importlib
import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tooling import tool

import strati
import strati.schemas
from strati.cli.main import COMMANDS

HOME = Path(__file__).resolve().parents[1]
SOURCE = Path(strati.__file__).parent
SUBMODULES = {"configs", "embedded", "interventions", "schemas"}
NOTEBOOKS = sorted((HOME / "docs" / "notebooks").glob("[0-9]*.py"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda p: p.stem,
)
def test_notebooks_run_and_their_pages_are_theirs(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    notebooks = tool("notebooks")
    made = notebooks.page(notebooks.run(path, tmp_path), path.name)
    assert notebooks.alike(made, path.with_suffix(".md").read_text()), "run tools/notebooks.py"
    assert "**Conclusion.**" in made and ".png)" in made


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_for_download_have_the_cells_of_their_scripts(path: Path) -> None:
    stored = json.loads(path.with_suffix(".ipynb").read_text())
    cells = tool("notebooks").cells(path.read_text())
    assert [(cell["source"], cell["cell_type"] == "code") for cell in stored["cells"]] == [
        (cell.text, cell.code) for cell in cells
    ], "run tools/notebooks.py"
    for cell in stored["cells"]:
        for output in cell.get("outputs", []):
            assert str(HOME) not in output["text"], "paths of one machine"


def test_pages_are_alike_but_for_the_last_digits() -> None:
    alike = tool("notebooks").alike
    assert alike("| 0 | 1.765 |   10,000 |", "| 0 | 1.764 | 10,000 |")
    assert not alike("0.weight 15.02", "0.weight 11.93")
    assert not alike("rank=8 0.91", "rank=8 0.91 0.97") and not alike("robust 1", "critical 1")


def test_the_page_of_verbs_is_their_help() -> None:
    page = tool("cli_page")
    assert page.PAGE.read_text() == page.text(), "run tools/cli_page.py"
    assert all(f"## {verb}\n" in page.text() for verb in COMMANDS)


def test_the_page_of_schemas_is_theirs() -> None:
    page = tool("schema_page")
    assert page.PAGE.read_text() == page.text(), "run tools/schema_page.py"
    assert all(f"## {name}\n" in page.text() for name in strati.schemas.names())


def test_the_python_pages_list_every_public_name() -> None:
    """Classes, functions and configs with their homes, as strati's own table has them."""
    page = tool("api_page")
    text = page.PAGE.read_text()
    assert text == text[: text.index(page.START)] + page.listing() + page.SCHEMAS, "run tools/api_page.py"
    shown = set(re.findall(r"^::: strati\.[\w.]+\.(\w+)$", text, re.MULTILINE))
    assert shown >= {*strati.__all__, "open"} - {"__version__"} - SUBMODULES
    text = page.STABLE.read_text()
    assert text == text[: text.index(page.START)] + page.listing("- `{public}.{name}`"), (
        "run tools/api_page.py"
    )
    for name in sorted(shown & set(strati.__all__)):
        assert getattr(strati, name).__doc__, f"{name} has no text for its page"


GALLERY = HOME / "docs" / "gallery"


def plots() -> set[tuple[str, str]]:
    """Module and name of every public function that draws."""
    found = set()
    for file in (SOURCE / "report" / "plots").glob("[a-z]*.py"):
        found |= {(file.stem, node.name) for node in ast.parse(file.read_text()).body
                  if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}  # fmt: skip
    return found - {("study", "draw_all")}  # every metric's scatter, into files


def test_the_gallery_is_its_script_with_pictures() -> None:
    notebooks = tool("notebooks")
    page = (GALLERY / "gallery.md").read_text()
    cells = notebooks.cells((GALLERY / "gallery.py").read_text())
    code = re.findall(r"^```python\n(.*?)\n```", page, re.DOTALL | re.MULTILINE)
    assert code == [cell.text for cell in cells if cell.code], (
        "run tools/notebooks.py docs/gallery/gallery.py"
    )
    assert all(cell.text in page for cell in cells)
    pictures = re.findall(r"\]\((gallery-\d+\.png)\)", page)
    assert len(pictures) == sum("figure = " in cell.text for cell in cells if cell.code)
    assert {p.name for p in GALLERY.glob("*.png")} == set(pictures)


@pytest.mark.slow
def test_every_plot_is_in_the_gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: set[tuple[str, str]] = set()

    def watched(place: tuple[str, str], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            drawn.add(place)
            return function(*words, **options)

        return call

    for stem, name in plots():
        module = importlib.import_module(f"strati.report.plots.{stem}")
        monkeypatch.setattr(module, name, watched((stem, name), getattr(module, name)))
    notebooks = tool("notebooks")
    made = notebooks.page(notebooks.run(GALLERY / "gallery.py", tmp_path), "gallery.py")
    assert sorted(plots() - drawn) == []
    assert notebooks.alike(made, (GALLERY / "gallery.md").read_text()), "run tools/notebooks.py"


def test_every_code_is_explained() -> None:
    """Every code that a warning can carry stands in docs/codes.md, with what to do."""
    page = (HOME / "docs" / "codes.md").read_text()
    explained = set(re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE))
    used = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Flag" and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str) and len(first.value) > 1:
                    used.add(first.value)
    from strati.comparison.check import CODES

    assert sorted((used | set(CODES)) - explained) == []
    homes = (SOURCE, HOME / "reproductions" / "src")
    source = "".join(file.read_text() for home in homes for file in home.rglob("*.py"))
    assert [code for code in sorted(explained) if f'"{code}"' not in source] == []  # none that is gone


BANNED = re.compile(
    r"\b(houses?|rooms?|front door|wears?|worn|wardrobe|workshop|strangers?|stratigraphy|worthless|is worth|"
    r"(?:is|are|be|been|being|not) told|told (?:by|from|apart)|paid for|lends?|praised?|awaits|take home|goes on|"
    r"question round|held (?:against|to account)|does not go with|means here|nobody reads|to speak of)\b",
    re.IGNORECASE,
)
"""Metaphors and inverted phrases that the docs do not use. Write what happens, with the field's terms."""
GENERATED = ("cli.md", "api.md", "schemas.md", "transcript.md")


def prose(text: str) -> str:
    """A page without code, outputs, tables of outputs and names in backquotes."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|<!--.*?-->", "", text, flags=re.DOTALL)


def test_docs_use_plain_words() -> None:
    folder = HOME / "docs"
    pages = [HOME / "CONTRIBUTING.md", *folder.rglob("*.md")]
    pages = [p for p in pages if p.name not in GENERATED and p.parent.name != "reproduced"]
    assert len(pages) > 50
    banned = [f"{p.name}: {word[0]}" for p in pages for word in BANNED.finditer(prose(p.read_text()))]
    assert banned == []


@pytest.mark.parametrize(
    "sentence", ["Files are told by content.", "A metric is worth little.", "The house has rooms."]
)
def test_banned_words_are_recognised(sentence: str) -> None:
    assert BANNED.search(prose(sentence))
    assert not BANNED.search(prose(f"```text\n{sentence}\n```\n`{sentence}`"))


def test_public_names_are_listed_and_there() -> None:
    page = (HOME / "docs" / "stability.md").read_text()
    listed = set(re.findall(r"`strati\.([\w.]+)`", page))
    assert {name for name in listed if "." not in name} == {*strati.__all__, "open"} - {
        "__version__"
    } - SUBMODULES
    for name in sorted(listed):
        assert operator.attrgetter(name)(strati) is not None, name


def test_the_readme_names_nothing_that_is_not_there() -> None:
    """Links and paths of the README exist in the repository, and it stays short."""
    text = (HOME / "README.md").read_text()
    linked = [word for word in re.findall(r"\]\(([^)#\s]+)\)", text) if not word.startswith("http")]
    paths = re.findall(r"\b((?:src|docs|tests|tools)/[\w./-]+\w)", text)
    assert [word for word in linked + paths if not (HOME / word).exists()] == []
    assert len(text.split()) < 970, "keep the README short"


def test_peers_options_are_mapped() -> None:
    """Every parameter of weightwatcher 0.7.7's ``analyze`` and of devinterp 2.0.1's ``llc`` and ``sample``."""
    folder = HOME / "docs" / "migrate"
    first, second = ((folder / f"{name}.md").read_text() for name in ("weightwatcher", "devinterp"))
    assert [word for word in ANALYZE.split() if not re.search(rf"`{word}\b", first)] == []
    assert [word for word in COLUMNS.split() if not re.search(rf"`{word}`", first)] == []
    assert [word for word in SAMPLE.split() if not re.search(rf"[`(]{word}\b", second)] == []


ANALYZE = """model layers min_evals max_evals min_size max_size max_N glorot_fix plot randomize savefig mp_fit
conv2d_norm ww2x pool conv2d_fft fft deltas intra vectors channels stacked fix_fingers xmin_max
max_fingers finger_thresh fit sparsify detX ERG svd_method tolerance start_ids pl_package xmax
base_model peft inverse"""
COLUMNS = """alpha xmin D num_pl_spikes sigma raw_alpha xmax Lambda num_fingers fit_entropy best_fit
alpha_weighted log_alpha_norm norm log_norm spectral_norm log_spectral_norm lambda_max sv_max sv_min
stable_rank entropy matrix_rank rank_loss weak_rank_loss sigma_mp bulk_min bulk_max W_scale
num_spikes mp_softrank rand_num_spikes num_traps rand_sigma_mp rand_mp_softrank rand_W_scale
rand_bulk_min rand_bulk_max max_rand_eval rand_distance ww_softrank ww_maxdist detX_num detX_val
detX_val_unrescaled num_ERG_spikes ERG_gap num_evals has_esd warning status"""
SAMPLE = """model dataset observables lr n_beta param_masks loss_fn num_chains num_draws batch_size
num_burnin_steps num_steps_bw_draws num_init_loss_batches init_seed obs_seed
gradient_accumulation_steps localization noise_level llc_weight_decay bounding_box_size
sampling_method sampling_method_kwargs rmsprop_eps rmsprop_alpha shuffle
match_sampling_input_ids_across_chains init_noise device save_metrics output_path batches_per_draw"""


def blocks(kind: str) -> list[tuple[str, str]]:
    pages = [HOME / "README.md", *(HOME / "docs").rglob("*.md")]
    pattern = re.compile(rf"^```{kind}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page.name, text) for page in pages for text in pattern.findall(page.read_text())]


def test_python_in_the_docs_is_python_and_names_what_there_is() -> None:
    for page, text in blocks("python"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "strati"
            ):
                if node.attr in ("errors", "zoo", "integrations"):
                    continue
                assert hasattr(strati, node.attr), f"{page}: strati.{node.attr}"


def test_commands_in_the_docs_have_options_that_there_are() -> None:
    import click

    from strati.cli.main import strati as group

    context = click.Context(group)
    for page, text in blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = line.partition("#")[0].replace("$ ", "").split()
            if len(words) < 2 or words[0] != "strati" or words[1].startswith("-"):
                continue
            command = group.get_command(context, words[1])
            assert command is not None, f"{page}: no verb {words[1]}"
            known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
            for word in words[2:]:
                if word.startswith("--"):
                    assert word.partition("=")[0] in known, f"{page}: {words[1]} has no {word}"
