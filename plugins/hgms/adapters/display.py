"""Display of values: rows of a label and a text, plain on a terminal and as HTML in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from hgms.adapters.shapes import Nested, Shape
from hgms_core.trees import summary

Rows = Iterator[tuple[str, str]]


def as_text(value: Any) -> str:
    """Return the text of a value whose ``_rows()`` are pairs of a label and a text, for
    ``__repr__``.
    """
    try:
        rows = list(value._rows())
    except RuntimeError:  # inside a transform of torch, tensors have no numbers
        return object.__repr__(value)
    width = max(len(label) for label, _ in rows)
    return "\n".join(
        [type(value).__name__, *(f"  {label.ljust(width)}  {text}" for label, text in rows)]
    )


def as_html(value: Any) -> str:
    """Return the HTML of such a value, or of a component, for ``_repr_html_``.

    A component is shown by its fields. Fields that differ from their defaults come first.
    """
    rows = value._rows() if hasattr(value, "_rows") else _fields(value)
    cell = '<{0} style="text-align: left; vertical-align: top; background: none">{1}</{0}>'.format
    body = "".join(
        f"<tr>{cell('th', html.escape(a))}{cell('td', html.escape(b))}</tr>" for a, b in rows
    )
    return (
        f'<strong>{html.escape(type(value).__name__)}</strong><table style="margin: '
        f'0">{body}</table>'
    )


FACTORY: Any = attrs.Factory  # a class, which attrs types as a function


def changes(component: Any) -> dict[str, bool]:
    """Map each field of an attrs object to whether its value differs from its default."""
    usual = {
        field.name: field.default
        for field in attrs.fields(type(component))
        if field.init and field.repr
    }
    made = {
        name: d.factory(*[component] * d.takes_self) if isinstance(d, FACTORY) else d
        for name, d in usual.items()
    }
    return {name: repr(getattr(component, name)) != repr(default) for name, default in made.items()}


def _fields(component: Any) -> list[tuple[str, str]]:
    own = changes(component)
    rows = [(name, brief(getattr(component, name))) for name in own if own[name]]
    rest = ", ".join(f"{name} = {brief(getattr(component, name))}" for name in own if not own[name])
    return [*rows, ("by default", rest)] if rest else rows or [("fields", "none")]


def brief(value: Any) -> str:
    """Return the fields of a component that differ from their defaults; of other values at most 80
    characters.
    """
    if attrs.has(type(value)):
        own = [
            f"{name}={brief(getattr(value, name))}"
            for name, differs in changes(value).items()
            if differs
        ]
        return f"{type(value).__name__}({', '.join(own)})"
    return text if len(text := repr(value)) <= 80 else f"{text[:79]}…"


def sizes(nested: Nested, most: int = 4) -> str:
    """Return names, shapes and types of the tensors of a tree: ``w [3, 4], b [3], float32``."""
    return summary(Shape.of(nested, "a tree", "")[1], most)


def number(value: Tensor) -> str:
    """Format the number in a tensor; for several numbers the least and the greatest."""
    ends = (
        [f"{float(end):.4g}" for end in torch.aminmax(value.detach())]
        if value.numel()
        else ["none"]
    )
    return " to ".join(dict.fromkeys(ends))
