"""Compares answers with math-verify in a process of its own: one JSON pair per line in, one verdict per line out.

Run as a script by :class:`hgms_evaluation.verifier.Verifier`; it imports nothing of this project. math-verify limits its time
by a signal, which works in a process's main thread only, and an expression such as 9^(9^(9^9)) may take all memory: neither
should be able to end an evaluation. The limit here is on processor time (where there is such a signal), so that a busy machine
gives the verdicts of an idle one.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable

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

    def limit(seconds: float) -> None:
        """A signal after every so many seconds of processor time; 0: none."""
        if own:
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds)

    if own:
        signal.signal(signal.SIGPROF, stop)

    def compare(gold: str, answer: str, seconds: int) -> bool:
        timeout = None if own else seconds
        known, parsed = (parse(text, parsing_timeout=timeout) for text in (gold, answer))
        return bool(verify(known, parsed, timeout_seconds=timeout))

    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(_verdict(json.loads(line), compare, limit, heard, TimeoutException), file=answers, flush=True)


def _verdict(
    pair: tuple[str, str, int],
    compare: Callable[[str, str, int], bool],
    limit: Callable[[float], None],
    heard: _Heard,
    timeout: type[BaseException],
) -> str:
    before = heard.count
    try:
        try:
            limit(pair[2])
            same = compare(*pair)
        finally:
            limit(0)
    except (MemoryError, timeout):
        return "undecided"
    return "right" if same else "wrong" if heard.count == before else "undecided"


if __name__ == "__main__":
    main()
