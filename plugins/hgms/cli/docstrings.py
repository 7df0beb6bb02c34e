"""Text of docstrings without its markup."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from hgms.cli.terminal import wrap_paragraph


def strip_markup(text: str) -> str:
    """Text without roles, references and emphasis; code in single backticks.

    >>> strip_markup("*one* of :func:`~a.b.c`, ``x * y * z`` or `the page <https://a.b>`_")
    'one of c, `x * y * z` or the page'
    """
    pieces = re.split(r"(``.+?``)", text)
    return "".join(
        f"`{piece[2:-2]}`" if piece.startswith("``") else _unmarked_words(piece) for piece in pieces
    )


def _unmarked_words(text: str) -> str:
    text = re.sub(r":[\w:]+:`([^`]+)`", lambda match: _title(match[1]), text)
    text = re.sub(r"`([^`<]+?) <[^`>]+>`_+", r"\1", text)
    text = re.sub(r"(?<![\w*])(\*\*?)(?=[^\s*])(.+?)(?<=[^\s*])\1(?![\w*])", r"\2", text)
    return re.sub(r"^\.\. (\w+)::", lambda match: f"{match[1].capitalize()}:", text)


def _title(reference: str) -> str:
    title, target, _ = reference.partition(" <")
    return title.rpartition(".")[2] if title.startswith("~") and not target else title


ITEM = re.compile(r"- |[\w*][\w*., ]*:( |$)")
"""The start of a list item: a dash, or names and a colon."""


def fold_docstring(doc: str, columns: int) -> str:
    r"""Return a docstring as plain text.

    >>> print(
    ...     fold_docstring("The :class:`~hgms_core.Key` of ``x``::\n\n    y = 2    x\n\nEnd.", 40)
    ... )
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
            blocks.append("\n".join(lines))
        elif announced is not None and indent > announced:
            blocks.append("\n".join(line.replace("``", "`") for line in lines))
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
            yield wrap_paragraph(strip_markup(text), columns, indent, indent + further)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
