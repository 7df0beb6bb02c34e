"""Long work on many rows, in parts of a few thousand rows.

Memory contains the results, and only the part in progress of the rows. Fast tokenizers use all
cores for a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

ROWS = 8192
"""Rows in a part."""


def compute_parts(
    rows: Iterable[Any],
    work: Callable[..., tuple[dict[str, np.ndarray], dict[str, Any]]],
    types: Mapping[str, str],
    watch: Callable[[int], object] = lambda rows: None,
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Apply ``work`` to ``rows``; return the arrays of all parts, joined, and the facts per part.

    ``work(rows of a part)`` returns arrays, with these names and ``types``, and facts about them
    (JSON). ``watch`` receives the number of rows of each finished part.
    """
    parts = []
    facts = []
    stream = iter(rows)
    for chunk in iter(lambda: list(itertools.islice(stream, ROWS)), []):
        arrays, about = work(chunk)
        parts.append(arrays)
        facts.append({**about, "count": len(chunk)})
        watch(len(chunk))
    joined = {
        name: np.concatenate([np.zeros(0, dtype), *(part[name] for part in parts)], dtype=dtype)
        for name, dtype in types.items()
    }
    return joined, facts
