"""Runs every block of one page in order, in the current folder: ``python run_page.py PAGE
[--write]``.

- ``python`` is executed, in one namespace for the page
- ``toml`` or ``python`` whose first line is ``# file: NAME`` is written to NAME
- ``console`` holds ``$ hgms …`` commands, each with the output it gives (docs/transcripts.py has
  the rules), or with none; also ``$ cd``, ``$ cat``, ``$ pip install -e`` and ``$ pytest``
  (tests/docs/programs.py)
- ``py``, ``text``, ``bash`` and directives are only shown (``py`` takes a minute and more)

With ``--write`` the page is given the output of its commands; without, an output that is another is
an error.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))

import programs
import transcripts

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# file: (\S+)\n")
SHOWN_ONLY = ("py", "text", "bash")

Check = Callable[[str, str, str], str]
"""(command, output on the page, output now) -> output to be on the page."""


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block."""
    for fence in FENCE.finditer(text):
        yield fence[1].strip(), fence[2]


def commands(content: str) -> Iterator[tuple[str, str]]:
    """(command, expected output) of a console block."""
    for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def run_command(command: str, expected: str) -> str:
    """What the command prints."""
    output = programs.called(command, expected)
    if output is not None:
        return output
    from click.testing import CliRunner

    from hgms.cli import main

    program, *arguments = shlex.split(command)
    assert program == "hgms", (
        f"a console block holds hgms, {', '.join(programs.PROGRAMS)}: {command}"
    )
    result = CliRunner().invoke(main, arguments, prog_name="hgms")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    wanted = programs.code_of(expected)
    assert result.exit_code == wanted, (
        f"$ {command}\nleft with {result.exit_code}:\n{result.output}"
    )
    return result.output


def compare(command: str, expected: str, output: str) -> str:
    wanted = transcripts.renewed(expected, output, str(Path.cwd()))
    different = "\n".join(transcripts.differences(expected, wanted))
    assert not different, (
        f"$ {command}\n{different}\nrun `python docs/transcripts.py`, and read what it changed"
    )
    return expected


def renew(command: str, expected: str, output: str) -> str:
    wanted = transcripts.renewed(expected, output, str(Path.cwd()))
    return wanted if transcripts.differences(expected, wanted) else expected


def run_page(text: str, check: Check = compare) -> tuple[int, str]:
    """How many blocks were run or written, and the page with its console blocks as ``check``
    wants them.
    """
    namespace: dict[str, object] = {"__name__": "__page__"}
    count = 0
    for fence in list(FENCE.finditer(text)):
        language = fence[1].strip()
        content = fence[2]
        named = FILE.match(content)
        if named and language in ("python", "toml"):
            Path(named[1]).write_text(content, encoding="utf-8")
        elif language == "python":
            exec(compile(content, "<page>", "exec"), namespace)
        elif language == "console":
            new = ""
            for command, expected in commands(content):
                new += f"$ {command}\n{check(command, expected, run_command(command, expected))}"
            if new != content:
                text = text.replace(fence[0], f"```{language}\n{new}```", 1)
        elif language == "toml" or language in SHOWN_ONLY or language.startswith("{"):
            continue
        else:
            raise AssertionError(
                f"a block in {language or 'no language'!r}; use "
                "python, py, toml, console, text or bash"
            )
        count += 1
    return count, text


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, "")
    page = Path(sys.argv[1])
    write = "--write" in sys.argv
    count, text = run_page(page.read_text(encoding="utf-8"), renew if write else compare)
    if write:
        page.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{count} blocks run\n")
