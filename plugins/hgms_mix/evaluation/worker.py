"""Compares answers with math-verify in a process of its own: one JSON pair per line in, one verdict
per line out.

Run as a script by :class:`hgms_mix.evaluation.verifier.Verifier`; it imports nothing of this
project. math-verify limits its time by a signal, which works in a process's main thread only, and
an expression such as 9^(9^(9^9)) may take all memory: neither should be able to end an evaluation.
The limit here is on processor time (where there is such a signal), so that a busy machine gives the
verdicts of an idle one.
"""

from __future__ import annotations

import json
import logging
import signal
import sys

MEMORY = 4 << 30


class _Heard(logging.Handler):
    """math-verify reports a comparison that it gave up as a warning, and otherwise as unequal."""

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
    heard = _Heard()
    logger = logging.getLogger("math_verify")
    logger.addHandler(heard)
    logger.propagate = False
    own = hasattr(signal, "setitimer")

    def stop(*_: object) -> None:
        raise TimeoutException("Operation timed out!")

    if own:
        signal.signal(signal.SIGPROF, stop)

    def limit(seconds: float) -> None:
        """A signal after every so many seconds of processor time; 0: none."""
        if own:
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds)

    def verdict(gold: str, answer: str, seconds: int) -> str:
        before = heard.count
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
        return "right" if same else "wrong" if heard.count == before else "undecided"

    answers = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(verdict(*json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
