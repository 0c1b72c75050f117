"""Write the help of every verb into docs/cli.md.

.venv/bin/python tools/cli_page.py
"""

from __future__ import annotations

from pathlib import Path

import click

from strati.cli.main import COMMANDS, strati

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """# The command line

What `strati VERB --help` prints, verb by verb. Exit codes: 0 done; 2 bad usage or bad input, a line on standard error;
3 `check` found what it was told to look for; 130 stopped by Ctrl-C; 1 a fault of strati itself.

Completion of verbs, options and paths in the shell, once, then open a new one:

```sh
# bash 4.4 or newer
_STRATI_COMPLETE=bash_source strati > ~/.strati-complete.bash && echo '. ~/.strati-complete.bash' >> ~/.bashrc
# zsh
_STRATI_COMPLETE=zsh_source strati > ~/.strati-complete.zsh && echo '. ~/.strati-complete.zsh' >> ~/.zshrc
# fish
_STRATI_COMPLETE=fish_source strati > ~/.config/fish/completions/strati.fish
```

For a bug report: `strati --version --verbose` prints the versions of strati, Python, the system and every package
that it may use.
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
