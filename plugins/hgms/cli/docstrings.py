"""Text of docstrings without its markup."""

from __future__ import annotations

import re


def strip_markup(text: str) -> str:
    """Text without roles, references and emphasis; code in single backticks.

    Examples
    --------
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
