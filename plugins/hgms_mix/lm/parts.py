"""Long work on many rows, in parts of a few thousand rows.

Several processes share the work, and the results of each part are appended to files.

After a kill, finished parts are not recomputed. Memory contains only the parts in progress, for any
number of rows.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hgms.store import Folder
from hgms_core import HgmsError
from hgms_mix.lm.store import Arrays, append, begin, commit, memory_map

ROWS = 8192
"""Rows in a part."""
ALONE = 8
"""Parts that this process computes before it starts other processes."""


def compute_parts(
    rows: Iterable[Any],
    work: Any,
    *,
    folder: Folder | None,
    watch: Callable[[int], None] = lambda rows: None,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Apply ``work`` to ``rows``; return the arrays of all parts, joined, and the facts per part.

    ``work(rows of a part)`` returns arrays, with the names and types in ``work.types``, and facts
    about them (JSON). It can be pickled.

    With a ``folder``, the arrays are appended to its files, and finished parts are not recomputed.
    The folder must be used only for these rows and this work. ``watch`` receives the number of rows
    of each finished part.

    If there is enough work, as many processes as torch has threads (OMP_NUM_THREADS,
    ``run.threads``) share it, on Linux.
    """
    facts = [] if folder is None else list(begin(folder, work.types).get("parts", []))
    parts: list[Arrays] = []
    stream = iter(rows)
    chunks = iter(lambda: list(itertools.islice(stream, ROWS)), [])
    for chunk in itertools.islice(chunks, len(facts)):
        watch(len(chunk))
    for count, arrays, about in _results(work, chunks):
        facts.append({**about, "count": count})
        if folder is None:
            parts.append(arrays)
        else:
            append(folder, work.types, arrays)
            commit(folder, work.types, {"parts": facts})
        watch(count)
    if folder is not None:
        return memory_map(folder.path, work.types), facts
    joined = {
        name: torch.from_numpy(
            np.concatenate([np.zeros(0, dtype), *(part[name] for part in parts)], dtype=dtype)
        )
        for name, dtype in work.types.items()
    }
    return joined, facts


@frozen
class _Results(Dataset[Any]):
    """The results of each chunk of rows, or the error (others than HgmsError are raised)."""

    work: Any

    def __getitem__(self, chunk: Sequence[Any]) -> Any:
        try:
            return len(chunk), *self.work(chunk)
        except HgmsError as error:
            return error


def _results(
    work: Any, chunks: Iterator[list[Any]]
) -> Iterator[tuple[int, Arrays, dict[str, Any]]]:
    """Yield the results of the chunks in their order: the number of rows, arrays and facts."""
    results = _Results(work)
    processes = torch.get_num_threads() if sys.platform == "linux" else 1
    alone = map(results.__getitem__, itertools.islice(chunks, None if processes == 1 else ALONE))
    for result in itertools.chain(alone, _in_processes(results, chunks, processes)):
        if isinstance(result, Exception):
            raise result
        yield result


def _in_processes(results: _Results, chunks: Iterator[list[Any]], processes: int) -> Iterator[Any]:
    """Compute the remaining chunks in processes of a DataLoader, in their order."""
    first = list(itertools.islice(chunks, 1))
    if not first:
        return
    loader: Any = DataLoader(
        results,
        batch_size=None,
        sampler=itertools.chain(first, chunks),
        num_workers=processes,
        multiprocessing_context="fork",
        collate_fn=_identity,
        worker_init_fn=_begin_process,
        generator=torch.Generator(),  # without it, the loader draws a number of the global one
    )
    yield from loader


def _identity(result: Any) -> Any:
    return result


def _begin_process(_number: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has one thread
