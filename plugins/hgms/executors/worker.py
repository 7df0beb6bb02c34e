"""``python -m hgms.executors.worker``: a process that runs one job after another.

It reads jobs and writes events as lines of JSON. If the parent ends, the worker ends at once; its
job resumes from its checkpoint.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import NoReturn, TextIO

import torch

from hgms.executors.jobs import Tell, as_error, function_of, pack_error
from hgms.runs import stoppable


def main() -> None:
    """Run a worker: one job per line of standard input, until the input closes.

    The first line contains the settings: ``threads``, and ``places`` to import from.
    """
    settings = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of plugins must not mix with messages
    sys.path += [place for place in settings["places"] if place not in sys.path]

    def tell(**event: object) -> None:
        out.write(json.dumps(event) + "\n")

    _serve(sys.stdin, tell, settings["threads"])


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
