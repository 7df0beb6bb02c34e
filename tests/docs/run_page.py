"""Runs every block of one page in order, in the current folder: ``python run_page.py PAGE``.

- ``python`` is executed, in one namespace for the page
- ``toml`` or ``python`` whose first line is ``# file: NAME`` is written to NAME
- ``console`` holds ``$ hgms …`` commands, each with the output it gives (``...`` stands for anything), or with none
- ``text``, ``bash`` and directives are only shown
"""

from __future__ import annotations

import doctest
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# file: (\S+)\n")
SHOWN_ONLY = ("text", "bash")
MATCH = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block."""
    for found in FENCE.finditer(text):
        yield found[1].strip(), found[2]


def commands(content: str) -> Iterator[tuple[str, str]]:
    """(command, expected output) of a console block."""
    for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def run_command(command: str, expected: str) -> None:
    from click.testing import CliRunner

    from hgms_core.cli import main

    program, *arguments = shlex.split(command)
    assert program == "hgms", f"a console block holds hgms commands only: {command}"
    result = CliRunner().invoke(main, arguments, prog_name="hgms")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    wanted = 2 if expected.startswith("error:") else 0
    assert result.exit_code == wanted, f"$ {command}\nleft with {result.exit_code}:\n{result.output}"
    if expected.strip():
        same = doctest.OutputChecker().check_output(expected, result.output, MATCH)
        assert same, f"$ {command}\nthe page says:\n{expected}\nit printed:\n{result.output}"


def run_page(text: str) -> int:
    """How many blocks were run or written."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    count = 0
    for language, content in blocks(text):
        named = FILE.match(content)
        if named and language in ("python", "toml"):
            Path(named[1]).write_text(content, encoding="utf-8")
        elif language == "python":
            exec(compile(content, "<page>", "exec"), namespace)
        elif language == "console":
            for command, expected in commands(content):
                run_command(command, expected)
        elif language == "toml" or language in SHOWN_ONLY or language.startswith("{"):
            continue
        else:
            raise AssertionError(f"a block in {language or 'no language'!r}; use python, toml, console, text or bash")
        count += 1
    return count


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, "")
    sys.stdout.write(f"{run_page(Path(sys.argv[1]).read_text(encoding='utf-8'))} blocks run\n")
