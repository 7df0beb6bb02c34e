"""Long work on many rows, in parts of a few thousand rows.

Several processes share the work, and each part is stored when it is finished.

After a kill, finished parts are not recomputed. Memory contains only the parts in progress, for any
number of rows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol, final

import numpy as np
import torch
from attrs import define, field, frozen

from hgms.store import Folder
from hgms_core import HgmsError
from hgms_core.errors import DataError
from hgms_mix.lm.store import Leaf, file_of, load, write

ROWS = 8192
"""Rows in a part."""
ALONE = 8
"""Parts that this process computes before it starts other processes, which take some seconds to
start.
"""

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
    ``run.threads``) share it.
    """
    stream = iter(rows)
    chunks = enumerate(iter(lambda: list(itertools.islice(stream, ROWS)), []))
    head = list(itertools.islice(chunks, 2))
    if len(head) < 2:  # too small for a file
        folder = None
    parts: list[Part] = []
    waiting: deque[tuple[int, Part | Future[Part]]] = deque()

    def take() -> None:
        count, part = waiting.popleft()
        parts.append(part.result() if isinstance(part, Future) else part)
        watch(count)

    others = torch.get_num_threads()
    with _Helpers(work, others) as helpers:
        for number, chunk in itertools.chain(head, chunks):
            path = None if folder is None else folder / f"{number:06}"
            kept = None if path is None else _load_part(path, work.types)
            if kept is not None:
                waiting.append((len(chunk), kept))
            elif others > 1 and number >= ALONE:
                waiting.append((len(chunk), helpers.submit(chunk, path)))
            else:
                waiting.append((len(chunk), _part(work, chunk, path)))
            while len(waiting) > (others + 1 if others > 1 else 0):
                take()
        while waiting:
            take()
    return parts


def _part(work: Work, chunk: Sequence[Any], path: Path | None) -> Part:
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


def _load_part(path: Path, types: Mapping[str, str]) -> Part | None:
    if (stored := load(_folder(path), types)) is None:
        return None
    leaves, about = stored
    return Part(path, about, types, {name: len(leaf) for name, leaf in leaves.items()})


def _folder(path: Path) -> Folder:
    return Folder(path, key=path.name)


class _Own(threading.local):
    """The process of each thread."""

    process: subprocess.Popen[bytes] | None = None


@define
class _Helpers:
    """Processes that compute parts, each fed by a thread.

    They are started as separate programs. This avoids a fork of this process with its threads, and
    a second import of the user's main module.

    Rows, work and results are pickled: a row of Parquet may contain any Python value, and only
    pickle covers all of a tokenizer. The pipes belong to this process and its children only. Data
    from files or other programs is never unpickled.
    """

    work: Work
    count: int
    threads: ThreadPoolExecutor = field(init=False)
    running: list[subprocess.Popen[bytes]] = field(init=False, factory=list)
    local: _Own = field(init=False, factory=_Own)
    ended: bool = field(init=False, default=False)

    def __enter__(self) -> _Helpers:
        self.threads = ThreadPoolExecutor(max(1, self.count))
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self.ended = True
            # Terminate first: a thread that waits for a result holds the pipe.
            for process in self.running:
                process.kill()
        self.threads.shutdown(cancel_futures=True)
        for process in self.running:
            # Ignore unsent data for a process that has exited.
            with contextlib.suppress(OSError), process:
                pass

    def submit(self, chunk: Sequence[Any], path: Path | None) -> Future[Part]:
        return self.threads.submit(self._send, chunk, path)

    def _send(self, chunk: Sequence[Any], path: Path | None) -> Part:
        process = self.local.process
        requests: list[Any] = [(chunk, path)]
        if process is None:
            process = self.local.process = self._start()
            requests.insert(0, self.work)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for request in requests:
                pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # its pipe closes a moment before it exits
            raise DataError(
                "process-lost",
                "a process that reads rows ended too early with the exit code "
                f"{process.returncode}",
                hint="decrease OMP_NUM_THREADS if memory is insufficient, and run the command "
                "again: finished parts are kept",
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        part: Part = answer
        return part

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            # -P: do not import a file of the working directory that has the name of a library.
            [sys.executable, "-P", "-c", "from hgms_mix.lm.parts import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **own},
            start_new_session=True,
        )
        self.running.append(process)
        if self.ended:
            process.kill()
        return process


def serve() -> None:
    """Compute parts for the parent process until the input ends."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with results
    for number, request in enumerate(_requests(sys.stdin.buffer)):
        if number == 0:
            work = request
            continue
        try:
            answer: Any = _part(work, *request)
        except HgmsError as error:
            answer = error
        except Exception:  # a program error: a traceback cannot be pickled, nor can every class
            answer = RuntimeError(f"in a process that reads rows:\n{traceback.format_exc()}")
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # the parent process has exited
            os._exit(1)


def _requests(stream: BinaryIO) -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(stream)
        except EOFError:
            return
