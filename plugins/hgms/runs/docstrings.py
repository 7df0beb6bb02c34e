"""Docstrings on a terminal: paragraphs without markup, wrapped to its width.

Formulas and code keep their lines.
"""

from __future__ import annotations

import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator

from hgms.cli import unmarked

ITEM = re.compile(r"- |[\w*][\w*., ]*:( |$)")
"""The start of a list item: a dash, or names and a colon."""


def folded(doc: str, columns: int) -> str:
    r"""Return a docstring as plain text.

    >>> print(folded("The :class:`~hgms_core.Key` of ``x``::\n\n    y = 2    x\n\nEnd.", 40))
    The Key of `x`:
    <BLANKLINE>
        y = 2    x
    <BLANKLINE>
    End.
    """
    # the indentation of the paragraph that a literal block follows
    blocks = []
    announced = None
    for block in re.split(r"\n[ ]*\n", inspect.cleandoc(doc).rstrip()):
        lines = [line.rstrip() for line in block.splitlines()]
        indent = _indent(lines[0])
        if lines[0].lstrip().startswith(">>> "):
            blocks.append("\n".join(_example(lines, columns)))
        elif announced is not None and indent > announced:
            blocks.append(
                "\n".join(_hanging(line.replace("``", "`"), columns, 4) for line in lines)
            )
        else:
            announced = indent if block.endswith("::") else None
            blocks.append("\n".join(_paragraph(lines, columns)))
    return "\n\n".join(block for block in blocks if block)


def _paragraph(lines: list[str], columns: int) -> Iterator[str]:
    items: list[tuple[int, str]] = []
    for line in lines:
        indent = _indent(line)
        text = line.strip()
        above, before = items[-1] if items else (-1, "")
        begins = ITEM.match(text) if indent == above else before.endswith(":") or indent < above
        if not items or (begins and (indent > 0 or text.startswith("- ") or indent < above)):
            items.append((indent, text))
        else:
            items[-1] = (above, f"{before} {text}")
    for indent, text in items:
        text = re.sub(r"\s*::$", ":", text) if text != "::" else ""
        further = 2 if text.startswith("- ") else 4 if indent and ITEM.match(text) else 0
        if text:
            yield _hanging(" " * indent + unmarked(text), columns, further)


def _hanging(line: str, columns: int, further: int) -> str:
    """Wrap a line at its spaces; further lines are indented by ``further``."""
    indent = _indent(line)
    if len(line) <= columns:
        return line
    return textwrap.fill(
        line.strip(),
        columns,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + further),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _example(lines: list[str], columns: int) -> Iterator[str]:
    """Yield the lines of code and its output.

    Long code is broken at places that Python allows, inside brackets.
    """
    indent = _indent(lines[0])
    for line in lines:
        mark = line[indent : indent + 4]
        text = line[indent + 4 :]
        if mark.rstrip() not in (">>>", "...") or len(line) <= columns:
            yield line
            continue
        goes_on = _indent(text) > 8  # aligned with an open bracket above
        begun = _indent(text) if not goes_on else 4
        code, _, comment = text.strip().partition("  #")
        if comment:
            yield _hanging(f"{' ' * indent}{mark}# {comment.strip()}", columns, 4)
        code = code.strip()
        for number, piece in enumerate(_pieces(code, columns - indent - begun - 8, goes_on)):
            yield (
                " " * indent
                + (f"... {' ' * (begun + 4)}" if number else mark + " " * begun)
                + piece
            )


def _pieces(code: str, room: int, inside: bool) -> Iterator[str]:
    start = 0
    end = 0
    for place in [*_gaps(code, inside), len(code)]:
        if place - start > room and end > start:
            yield code[start:end].strip()
            start = end
        end = place
    yield code[start:].strip()


def _gaps(code: str, inside: bool) -> list[int]:
    """Return the positions after which a line of code may be broken.

    These are spaces inside brackets that are not in a string.
    """
    depth = int(inside)
    gaps = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            depth += (
                (token.string in "([{") - (token.string in ")]}")
                if token.type == tokenize.OP
                else 0
            )
            if depth > 0 and token.start[0] == 1 and code[token.end[1] : token.end[1] + 1] == " ":
                gaps.append(token.end[1])
    except (tokenize.TokenError, IndentationError):
        pass  # part of a statement whose brackets close on a later line
    return gaps
