"""Write the help of every command into docs/cli.md.

.venv/bin/python tools/cli_page.py
"""

from __future__ import annotations

from pathlib import Path

import click

from strati.cli.main import COMMANDS, strati

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """# All commands and options

This page shows what `strati COMMAND --help` prints.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 2 | bad usage or bad input; one line on standard error says what to do |
| 3 | `check` found a failure |
| 130 | interrupted by Ctrl-C |
| 1 | a fault of strati itself; please report it with the output of `strati --version --verbose` |

To complete commands, options and paths in your shell, run one of these once and open a new shell:

```sh
# bash 4.4 or newer
_STRATI_COMPLETE=bash_source strati > ~/.strati-complete.bash && echo '. ~/.strati-complete.bash' >> ~/.bashrc
# zsh
_STRATI_COMPLETE=zsh_source strati > ~/.strati-complete.zsh && echo '. ~/.strati-complete.zsh' >> ~/.zshrc
# fish
_STRATI_COMPLETE=fish_source strati > ~/.config/fish/completions/strati.fish
```
"""


def text() -> str:
    """The page."""
    parts = [HEAD]
    group = click.Context(strati, info_name="strati", help_option_names=["-h", "--help"])
    for verb in COMMANDS:
        command = strati.get_command(group, verb)
        assert command is not None
        with click.Context(
            command, info_name=verb, parent=group, max_content_width=100, terminal_width=100
        ) as inner:
            parts.append(f"## {verb}\n\n```text\n{command.get_help(inner).rstrip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(text())
