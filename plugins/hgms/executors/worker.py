"""``python -m hgms.executors.worker``: a process that carries out one job after another.

It reads jobs and writes what happens as lines of JSON. On Linux it loads what jobs need once and
forks: the fork carries jobs out, and when it is killed the next one is there within milliseconds,
where a new process would load for seconds. When the parent is gone all of it ends at once: what it
was doing goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn, TextIO

import torch

from hgms.executors.jobs import Tell, as_error, called, pack_error
from hgms.runs import stoppable


def main() -> None:
    """A worker: one job per line of standard input, until that closes. The first line are its
    settings: ``threads``, ``places`` to import from, ``forks``, and of a job whose like will come
    ``function``, ``prepare`` and ``arguments``.
    """
    # a buffer would hold the next line, for every fork again
    with open(0, "rb", buffering=0, closefd=False) as first:
        settings = json.loads(first.readline())
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a plugin prints must not come between
    sys.path += [place for place in settings["places"] if place not in sys.path]

    def tell(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    if not (settings["forks"] and sys.platform == "linux"):
        _serve(sys.stdin, tell, settings["threads"])
    _load(settings, tell)

    def gone(code: int) -> None:
        out.write("\n")  # the fork may have been killed within a line
        tell(event="gone", code=code)

    _fork_again(lambda: _serve(sys.stdin, tell, settings["threads"]), gone)


def _load(settings: Mapping[str, Any], tell: Tell) -> None:
    """What jobs need is imported before the first fork, by one thread: a fork has the memory of
    others, but not them.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(Exception):  # the job says it better
        called(settings["function"])
        if settings["prepare"]:
            called(settings["prepare"])(settings["arguments"], tell)
    gc.collect()
    gc.freeze()  # what is imported stays: collecting between two jobs need not look at it


def _fork_again(serve: Callable[[], NoReturn], gone: Callable[[int], object]) -> None:
    """Calls ``serve`` in a fork, and in another one whenever that is killed, until it ends of
    itself.
    """
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    alive, held = os.pipe()  # nothing is ever written: it closes with this process
    child = 0

    def hand_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    while True:
        # until the child is known here, and has its own handlers there
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        child = os.fork()
        for number in stops:
            signal.signal(number, hand_on if child else signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if not child:
            os.close(held)
            threading.Thread(target=lambda: (os.read(alive, 1), os._exit(0)), daemon=True).start()
            serve()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return
        gone(code)


def _serve(source: TextIO, tell: Tell, threads: int) -> NoReturn:
    """Carries out the jobs that ``source`` gives; ends the process where there is no more to
    read.
    """
    lines: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in source:
            lines.put(line)
        os._exit(0)  # the parent is gone, or done with us

    threading.Thread(target=listen, daemon=True).start()
    with stoppable():
        while True:
            try:
                message = json.loads(lines.get())
            except KeyboardInterrupt:
                os._exit(0)
            torch.set_num_threads(threads)
            try:
                tell(event="ended", outcome=called(message["function"])(message["arguments"], tell))
            except KeyboardInterrupt:
                tell(event="interrupted")
            except Exception as error:
                tell(event="ended", error=pack_error(as_error(error)))


if __name__ == "__main__":
    main()
