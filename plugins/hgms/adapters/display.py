"""Display of values: rows of a label and a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
