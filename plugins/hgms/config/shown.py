"""Values as messages print them."""

from __future__ import annotations

import inspect


def got(value: object) -> str:
    """Return a short text for a value of Python."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{_article(type(value).__name__)} of shape {list(shape)}"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else _article(type(value).__name__)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
