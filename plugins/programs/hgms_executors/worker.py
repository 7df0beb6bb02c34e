"""``python -m hgms_executors.worker``: a process that carries out one job after another.

It reads jobs and writes what happens as lines of JSON. When its parent is gone it ends at once: what it was doing goes on from
its checkpoint.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from hgms_executors.jobs import called, described
from hgms_run import stoppable


def main(arguments: Sequence[str]) -> None:
    """A worker: one job per line of standard input, until that closes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a plugin prints must not come between
    lines: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the parent is gone, or done with us

    threading.Thread(target=listen, daemon=True).start()
    threads, places = int(arguments[0]), json.loads(arguments[1])
    sys.path += [place for place in places if place not in sys.path]

    def tell(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    with stoppable():
        while True:
            try:
                message = json.loads(lines.get())
            except KeyboardInterrupt:
                return
            torch.set_num_threads(threads)
            try:
                if prepare := message.get("prepare"):
                    called(prepare)(message["arguments"], tell)
                    gc.collect()
                    gc.freeze()  # what is imported stays: collecting between two jobs need not look at it
                else:
                    tell(event="ended", outcome=called(message["function"])(message["arguments"], tell))
            except KeyboardInterrupt:
                tell(event="interrupted")
            except Exception as error:
                tell(event="ended", error=described(error))


if __name__ == "__main__":
    main(sys.argv[1:])
