"""Long work on many rows, in parts of a few thousand: on several processes, and each part kept as
soon as it is done.

A part that was finished before a kill is not made again. Memory holds the parts under way, however
many rows there are.
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

from hgms_core import HgmsError
from hgms_core.errors import DataError
from hgms_mix.lm.store import Leaf, load, write, writing

ROWS = 8192
"""Rows in a part."""
ALONE = 8
"""Parts that this process makes by itself before it starts others: those take some seconds to
start.
"""

Arrays = Mapping[str, np.ndarray]


class Work(Protocol):
    """What is done with the rows of a part: arrays, all with names and types of ``types``, and
    facts about them (JSON). It can be pickled."""

    @property
    def types(self) -> Mapping[str, str]: ...
    def __call__(self, rows: Sequence[Any]) -> tuple[Arrays, dict[str, Any]]: ...


@final
@frozen
class Part:
    """A finished part: its arrays (in memory, or in a file), their lengths, and the facts about
    them.
    """

    arrays: Arrays | Path
    about: Mapping[str, Any]
    types: Mapping[str, str]
    counts: Mapping[str, int]

    def array(self, name: str) -> np.ndarray:
        if not isinstance(self.arrays, Path):
            return self.arrays[name]
        from safetensors import safe_open

        with safe_open(self.arrays, framework="np") as stored:
            array: np.ndarray = stored.get_tensor(name)
        return array


def together(parts: Sequence[Part], name: str) -> Leaf:
    """The arrays of this name of all parts, one after another."""
    count = sum(part.counts[name] for part in parts)
    return Leaf(parts[0].types[name], count, lambda: (part.array(name) for part in parts))


def in_parts(
    rows: Iterable[Any],
    work: Work,
    *,
    folder: Path | None,
    watch: Callable[[int], None] = lambda rows: None,
) -> list[Part]:
    """The parts of ``work`` on ``rows``, in their order. With a ``folder``, parts are kept there,
    and those that are there are not made again: it must belong to these rows and this work alone.
    ``watch`` hears how many rows were done.

    As many processes as torch has threads (OMP_NUM_THREADS, ``run.threads``) share the work, once
    there is enough of it.
    """
    stream = iter(rows)
    chunks = enumerate(iter(lambda: list(itertools.islice(stream, ROWS)), []))
    head = list(itertools.islice(chunks, 2))
    if len(head) < 2:  # not worth a file
        folder = None
    parts: list[Part] = []
    waiting: deque[tuple[int, Part | Future[Part]]] = deque()

    def take() -> None:
        count, part = waiting.popleft()
        parts.append(part.result() if isinstance(part, Future) else part)
        watch(count)

    if folder is not None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    others = torch.get_num_threads()
    with _Helpers(work, others) as helpers:
        for number, chunk in itertools.chain(head, chunks):
            path = None if folder is None else folder / f"{number:06}.safetensors"
            kept = None if path is None else _kept(path, work.types)
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
        path,
        {name: Leaf.of(np.asarray(arrays[name], dtype)) for name, dtype in work.types.items()},
        about,
    )
    return Part(path, about, work.types, counts)


def _kept(path: Path, types: Mapping[str, str]) -> Part | None:
    if (stored := load(path, types, "part", {})) is None:
        return None
    return Part(path, stored[1], types, {name: len(leaf) for name, leaf in stored[0].items()})


@define
class _Helpers:
    """Processes that make parts, each fed by a thread. They are started as programs of their own:
    neither a fork of this process with its threads, nor a second import of the main module of
    whoever uses the library.

    Rows, work and answers are pickled (a row of Parquet may hold any Python value, and nothing else
    holds all of a tokenizer), through pipes that only this process and its own children have:
    nothing from a file or from elsewhere is unpickled.
    """

    work: Work
    count: int
    threads: ThreadPoolExecutor = field(init=False)
    running: list[subprocess.Popen[bytes]] = field(init=False, factory=list)
    local: Any = field(init=False, factory=threading.local)
    ended: bool = field(init=False, default=False)

    def __enter__(self) -> _Helpers:
        self.threads = ThreadPoolExecutor(max(1, self.count))
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self.ended = True
            # first of all: a thread that waits for an answer holds the pipe
            for process in self.running:
                process.kill()
        self.threads.shutdown(cancel_futures=True)
        for process in self.running:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    # what was not sent to a process that is gone
                    with contextlib.suppress(OSError):
                        stream.close()
            process.wait()

    def submit(self, chunk: Sequence[Any], path: Path | None) -> Future[Part]:
        return self.threads.submit(self._send, chunk, path)

    def _send(self, chunk: Sequence[Any], path: Path | None) -> Part:
        process: subprocess.Popen[bytes] | None = getattr(self.local, "process", None)
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
                process.wait(10)  # its pipe closes a moment before it is gone
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
            # -P: a file of the working directory that is called like a library is not imported for
            # it
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
    """What such a process does: parts for whoever started it, until its input ends."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    for number, request in enumerate(_requests(sys.stdin.buffer)):
        if number == 0:
            work = request
            continue
        try:
            answer: Any = _part(work, *request)
        except HgmsError as error:
            answer = error
        except Exception:  # a fault of a program: a traceback does not travel, nor does every class
            answer = RuntimeError(f"in a process that reads rows:\n{traceback.format_exc()}")
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # the process that asked is gone
            os._exit(1)


def _requests(stream: BinaryIO) -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(stream)
        except EOFError:
            return
