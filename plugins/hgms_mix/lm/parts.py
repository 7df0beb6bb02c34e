"""Long work on many rows, in parts of a few thousand rows.

Several processes share the work, and each part is stored when it is finished.

After a kill, finished parts are not recomputed. Memory contains only the parts in progress, for any
number of rows.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
from attrs import frozen
from torch.utils.data import DataLoader, Dataset

from hgms.store import Folder
from hgms_core import HgmsError
from hgms_core.errors import DataError
from hgms_core.torch_errors import first_line
from hgms_mix.lm.store import Leaf, file_of, load, write

ROWS = 8192
"""Rows in a part."""
ALONE = 8
"""Parts that this process computes before it starts other processes."""

Arrays = Mapping[str, np.ndarray]


class Work(Protocol):
    """The computation on the rows of a part.

    It returns arrays, with the names and types in ``types``, and facts about them (JSON). It can be
    pickled.
    """

    @property
    def types(self) -> Mapping[str, str]: ...
    def __call__(self, rows: Sequence[Any]) -> tuple[Arrays, dict[str, Any]]: ...


@final
@frozen
class Part:
    """A finished part: its arrays (in memory or in a folder), their lengths, and facts."""

    arrays: Arrays | Path
    about: Mapping[str, Any]
    types: Mapping[str, str]
    counts: Mapping[str, int]

    def array(self, name: str) -> np.ndarray:
        if not isinstance(self.arrays, Path):
            return self.arrays[name]
        array: np.ndarray = np.load(self.arrays / file_of(name))
        return array


def concatenate_parts(parts: Sequence[Part], name: str) -> Leaf:
    """Concatenate the arrays with this name from all parts."""
    count = sum(part.counts[name] for part in parts)
    return Leaf(parts[0].types[name], count, lambda: (part.array(name) for part in parts))


def compute_parts(
    rows: Iterable[Any],
    work: Work,
    *,
    folder: Path | None,
    watch: Callable[[int], None] = lambda rows: None,
) -> list[Part]:
    """Apply ``work`` to ``rows``, and return the parts in their order.

    With a ``folder``, parts are stored there, and existing parts are not recomputed. The folder
    must be used only for these rows and this work. ``watch`` receives the number of finished rows.

    If there is enough work, as many processes as torch has threads (OMP_NUM_THREADS,
    ``run.threads``) share it, on Linux.
    """
    stream = iter(rows)
    chunks = iter(lambda: list(itertools.islice(stream, ROWS)), [])
    head = list(itertools.islice(chunks, 2))
    place = folder if len(head) == 2 else None  # one part is too small for a file
    requests = (
        (chunk, None if place is None else place / f"{number:06}")
        for number, chunk in enumerate(itertools.chain(head, chunks))
    )
    processes = torch.get_num_threads() if sys.platform == "linux" else 1
    alone = requests if processes == 1 else itertools.islice(requests, ALONE)
    in_this_process = ((len(chunk), _part(work, chunk, path)) for chunk, path in alone)
    parts: list[Part] = []
    for count, part in itertools.chain(in_this_process, _in_processes(work, requests, processes)):
        parts.append(part)
        watch(count)
    return parts


def _part(work: Work, chunk: Sequence[Any], path: Path | None) -> Part:
    """Compute a part, unless it is stored."""
    if path is not None and (stored := load(_folder(path), work.types)) is not None:
        leaves, facts = stored
        return Part(path, facts, work.types, {name: len(leaf) for name, leaf in leaves.items()})
    arrays, about = work(chunk)
    counts = {name: len(array) for name, array in arrays.items()}
    if path is None:
        return Part(arrays, about, work.types, counts)
    write(
        _folder(path),
        {name: Leaf.of(np.asarray(arrays[name], dtype)) for name, dtype in work.types.items()},
        about,
    )
    return Part(path, about, work.types, counts)


def _folder(path: Path) -> Folder:
    return Folder(path, key=path.name)


@frozen
class _Results(Dataset[Any]):
    """The part of each request, with its number of rows, or the error."""

    work: Work

    def __getitem__(self, request: tuple[Sequence[Any], Path | None]) -> Any:
        try:
            return len(request[0]), _part(self.work, *request)
        except HgmsError as error:
            return error
        except Exception:  # a program error: a traceback cannot be pickled, nor can every class
            return RuntimeError(f"in a process that reads rows:\n{traceback.format_exc()}")


def _in_processes(
    work: Work, requests: Iterator[Any], processes: int
) -> Iterator[tuple[int, Part]]:
    """Compute the remaining requests in processes of a DataLoader, in their order."""
    first = list(itertools.islice(requests, 1))
    if not first:
        return
    loader: Any = DataLoader(
        _Results(work),
        batch_size=None,
        sampler=itertools.chain(first, requests),
        num_workers=processes,
        multiprocessing_context="fork",
        collate_fn=_identity,
        worker_init_fn=_begin_process,
        generator=torch.Generator(),  # without it, the loader draws a number of the global one
    )
    results = iter(loader)
    try:
        while True:
            try:
                result = next(results)
            except StopIteration:
                return
            except RuntimeError as error:
                traceback.clear_frames(error.__traceback__)  # they keep the other processes
                raise DataError(
                    "process-lost",
                    f"a process that reads rows ended too early: {first_line(error)}",
                    hint="decrease OMP_NUM_THREADS if memory is insufficient, and run the command "
                    "again: finished parts are kept",
                ) from error
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        del results  # ends the processes: an error keeps this frame


def _identity(result: Any) -> Any:
    return result


def _begin_process(_number: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has one thread
