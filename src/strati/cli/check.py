"""``strati check``: exit with 3 when a network is damaged, or shows one of the codes."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from strati.cli import common
from strati.comparison.check import CheckConfig
from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.jobs.progress import progress

FOUND = 3
"""The exit code of a check that found what it looked for."""


class ConfiguredCommand(common.Command):
    """A command whose defaults come from a table of the nearest ``pyproject.toml``: ``[tool.strati.check]``."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read the table before the words of the command line, which win."""
        return super().make_context(info_name, args, parent, default_map=self.defaults(Path.cwd()), **extra)

    def defaults(self, folder: Path) -> dict[str, Any]:
        """The table's options by parameter name; paths are relative to the file.

        Raises:
            BadInputError: The file cannot be read, or the table has an unknown option.
        """
        path = next((p for f in (folder, *folder.parents) if (p := f / "pyproject.toml").is_file()), None)
        if path is None:
            return {}
        try:
            tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
            table = dict(tool.get("strati", {}).get(self.name, {}))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise BadInputError(path, f"[tool.strati.{self.name}] cannot be read: {error}") from None
        known = {p.opts[0].lstrip("-"): p for p in self.params if isinstance(p, click.Option)}
        options = {}
        for name, value in table.items():
            if name not in known:
                why = f"[tool.strati.{self.name}] has no option {name!r}; {nearest(name, list(known))}"
                raise BadInputError(path, why)
            if known[name].multiple and isinstance(value, str):
                value = [value]
            beside = path.parent / str(value)
            options[str(known[name].name)] = str(beside) if name == "base" and beside.exists() else value
        return options


@click.command("check", cls=ConfiguredCommand)
@click.argument("models", nargs=-1, metavar="MODEL...")
@common.option("--base MODEL", "Compare with this network: needed for kinds of update.")
@common.option(
    "--fail-on CODES",
    "Codes that fail (--list shows all), with commas; repeatable. Default: the codes of damage and, with "
    "--base, every change but conversions.",
    multiple=True,
)
@common.option(
    "--fail-if LIMIT",
    "Fail where a layer's number is beyond a limit: 'changed > 20%' (with --base, instead of on every change), "
    "'alpha > 8'. Repeatable.",
    multiple=True,
)
@common.option("--spectra", "Compute spectra too; report their codes and rank-collapse.")
@common.option("--list listed", "List the codes and exit; needs no model.")
@common.option(
    "--format form",
    "Findings as text, or as annotations of GitHub Actions.",
    ("text", "github"),
    default="text",
)
@common.layers_option
@common.workers_option
@common.seed_option
@common.output_options
def command(
    models: tuple[str, ...],
    base: str | None,
    listed: bool,
    form: str,
    output: common.Output,
    **options: Any,
) -> None:
    """Find damage in MODEL and exit with 3: NaN, missing tensors, holes, wild entries, unfaithful conversions.

    Every floating-point tensor is read once; nothing else is computed unless you ask for it. One line per finding.
    With --base the network is compared as well, and every change but a conversion or rounding fails. Defaults of the
    options can stand in [tool.strati.check] of pyproject.toml.

    \b
    Example:
      strati check model.safetensors
      strati check model.gguf --base model/
      strati check tuned/ --base base/ --fail-on dense
      strati check tuned/ --base base/ --fail-if 'changed > 20%'
    """
    from strati.comparison.check import CODES
    from strati.explain import explain

    if listed:
        for code in CODES:
            common.show(f"{code}: {explain(code).entries[0].meaning.replace('`', '')}")
        return
    if not models:
        raise click.UsageError("give a model, or --list for the codes")
    if len(models) > 1 and (output.json or output.html or output.plot):
        raise click.UsageError("--json, --html and --plot write the result of one network; give one")
    for name in ("fail_on", "fail_if"):
        options[name] = options[name] or None
    config = CheckConfig(**options)
    passed = [_check(model, base, config, form, output, title=len(models) > 1) for model in models]
    if not all(passed):
        click.get_current_context().exit(FOUND)


def _check(
    model: str, base: str | None, config: CheckConfig, form: str, output: common.Output, *, title: bool
) -> bool:
    from strati.comparison.check import check
    from strati.core.files import write_atomic
    from strati.io.network import open as open_network
    from strati.report.page import build_page
    from strati.spectra.scan import scan

    with progress("check", None, quiet=output.quiet) as tick:
        checked = check(model, base, config=config, tick=tick)
    if output.html is not None:
        evidence = checked.evidence or (scan(open_network(model), eigenvalues=True),)
        write_atomic(output.html, build_page([item.to_dict() for item in evidence]))
    in_words = form == "text"
    if title and in_words and not output.quiet:
        common.show(f"{model}:")
    common.emit(checked, replace(output, html=None, quiet=output.quiet or not in_words))
    if not in_words and output.speaks:
        click.echo("\n".join([checked.answer(), *checked.annotations()]))
    return checked.passed
