"""Compare answers with math-verify in a separate process.

Each input line contains one JSON pair, and each output line one verdict.

:class:`hgms_mix.evaluation.verifier.Verifier` runs this file as a script; it imports no module of
this project. math-verify limits its time by a signal, which works only in a process's main thread.
An expression such as 9^(9^(9^9)) may use all memory. Neither must end an evaluation. The limit here
is on processor time (if the system has such a signal). Verdicts on a busy machine are therefore the
same as on an idle machine.
"""

from __future__ import annotations

import json
import logging
import signal
import sys

MEMORY = 4 << 30


class _TimeoutCounter(logging.Handler):
    """Count the comparisons that math-verify gave up: it logs a warning, but reports them as
    unequal.
    """

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("Timeout during")


def main() -> None:
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # no such limit on this system
    counter = _TimeoutCounter()
    logger = logging.getLogger("math_verify")
    logger.addHandler(counter)
    logger.propagate = False
    own = sys.platform != "win32"

    def stop(*_: object) -> None:
        raise TimeoutException("Operation timed out!")

    if own:
        signal.signal(signal.SIGPROF, stop)

    def limit(seconds: float) -> None:
        """Send a signal after each interval of ``seconds`` processor seconds; 0: no signal."""
        if own:
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds)

    def verdict(gold: str, answer: str, seconds: int) -> str:
        before = counter.count
        timeout = None if own else seconds
        try:
            try:
                limit(seconds)
                known, parsed = (parse(text, parsing_timeout=timeout) for text in (gold, answer))
                same = verify(known, parsed, timeout_seconds=timeout)
            finally:
                limit(0)
        except (MemoryError, TimeoutException):
            return "undecided"
        return "right" if same else "wrong" if counter.count == before else "undecided"

    answers = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(verdict(*json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
