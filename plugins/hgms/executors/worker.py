"""``python -m hgms.executors.worker``: a process that runs one job after another.

It reads jobs and writes events as lines of JSON. On Linux it loads the imports of jobs once and
then forks, and the fork runs the jobs. If the fork is killed, the next one starts within
milliseconds, whereas a new process would load for seconds. If the parent ends, the worker and its
fork end at once; their job resumes from its checkpoint.
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

from hgms.executors.jobs import Tell, as_error, function_of, pack_error
from hgms.runs import stoppable


def main() -> None:
    """Run a worker: one job per line of standard input, until the input closes.

    The first line contains the settings: ``threads``, ``places`` to import from, ``forks``, and
    ``function``, ``prepare`` and ``arguments`` of a job similar to the later ones.
    """
    # A buffer would store the next line, and every fork would read it.
    with open(0, "rb", buffering=0, closefd=False) as first:
        settings = json.loads(first.readline())
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of plugins must not mix with messages
    sys.path += [place for place in settings["places"] if place not in sys.path]

    def tell(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    if not (settings["forks"] and sys.platform == "linux"):
        _serve(sys.stdin, tell, settings["threads"])
    _load(settings, tell)

    def report_end(code: int) -> None:
        out.write("\n")  # the fork may have been killed within a line
        tell(event="gone", code=code)

    _fork_again(lambda: _serve(sys.stdin, tell, settings["threads"]), report_end)


def _load(settings: Mapping[str, Any], tell: Tell) -> None:
    """Import the modules that jobs need before the first fork, with one thread.

    A fork copies the memory of other threads, but not the threads.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(Exception):  # the job reports the error with more detail
        function_of(settings["function"])
        if settings["prepare"]:
            function_of(settings["prepare"])(settings["arguments"], tell)
    gc.collect()
    gc.freeze()  # imports stay in memory: the collections between two jobs can skip them


def _fork_again(serve: Callable[[], NoReturn], gone: Callable[[int], object]) -> None:
    """Call ``serve`` in a fork, and restart a killed fork until ``serve`` ends normally."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    alive, held = os.pipe()  # receives no data: it closes when this process ends
    child = 0

    def hand_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    while True:
        # Block signals until this process stores the child's id and the child sets its own
        # handlers.
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
    """Run the jobs from ``source``; end the process at the end of the input."""
    lines: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in source:
            lines.put(line)
        os._exit(0)  # the parent ended or needs no more jobs

    threading.Thread(target=listen, daemon=True).start()
    with stoppable():
        while True:
            try:
                message = json.loads(lines.get())
            except KeyboardInterrupt:
                os._exit(0)
            torch.set_num_threads(threads)
            try:
                tell(
                    event="ended",
                    outcome=function_of(message["function"])(message["arguments"], tell),
                )
            except KeyboardInterrupt:
                tell(event="interrupted")
            except Exception as error:
                tell(event="ended", error=pack_error(as_error(error)))


if __name__ == "__main__":
    main()
