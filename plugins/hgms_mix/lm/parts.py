"""Long work on many rows, in parts of a few thousand rows.

The results of each part are appended to files.

After a kill, finished parts are not recomputed. Memory contains only the part in progress, for any
number of rows. Fast tokenizers use all cores for a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hgms.store import Folder
from hgms_mix.lm.store import Arrays, append, begin, commit, memory_map

ROWS = 8192
"""Rows in a part."""


def compute_parts(
    rows: Iterable[Any],
    work: Any,
    *,
    folder: Folder | None,
    watch: Callable[[int], None] = lambda rows: None,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Apply ``work`` to ``rows``; return the arrays of all parts, joined, and the facts per part.

    ``work(rows of a part)`` returns arrays, with the names and types in ``work.types``, and facts
    about them (JSON).

    With a ``folder``, the arrays are appended to its files, and finished parts are not recomputed.
    The folder must be used only for these rows and this work. ``watch`` receives the number of rows
    of each finished part.
    """
    facts = [] if folder is None else list(begin(folder, work.types).get("parts", []))
    parts: list[Arrays] = []
    stream = iter(rows)
    chunks = iter(lambda: list(itertools.islice(stream, ROWS)), [])
    for chunk in itertools.islice(chunks, len(facts)):
        watch(len(chunk))
    for chunk in chunks:
        arrays, about = work(chunk)
        facts.append({**about, "count": len(chunk)})
        if folder is None:
            parts.append(arrays)
        else:
            append(folder, work.types, arrays)
            commit(folder, work.types, {"parts": facts})
        watch(len(chunk))
    if folder is not None:
        return memory_map(folder.path, work.types), facts
    joined = {
        name: torch.from_numpy(
            np.concatenate([np.zeros(0, dtype), *(part[name] for part in parts)], dtype=dtype)
        )
        for name, dtype in work.types.items()
    }
    return joined, facts
