"""Compares answers with math-verify in a process of its own: one JSON pair per line in, one verdict per line out.

Run as a script by :class:`hgms_evaluation.answers.Verifier`; it imports nothing of this project. math-verify limits its time by
a signal, which works in a process's main thread only, and an expression such as 9^(9^(9^9)) may take all memory: neither should
be able to end an evaluation.
"""

from __future__ import annotations

import json
import logging
import sys

MEMORY = 4 << 30


class _Heard(logging.Handler):
    """math-verify reports a comparison that it gave up as a warning, and otherwise as unequal."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("Timeout")


def main() -> None:
    from math_verify import parse, verify

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # no such limit on this system
    heard = _Heard()
    logger = logging.getLogger("math_verify")
    logger.addHandler(heard)
    logger.propagate = False
    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        before = heard.count
        try:
            known, given = (parse(text, parsing_timeout=seconds) for text in (gold, answer))
            same = verify(known, given, timeout_seconds=seconds)
            verdict = "right" if same else "wrong" if heard.count == before else "undecided"
        except MemoryError:
            verdict = "undecided"
        print(verdict, file=answers, flush=True)


if __name__ == "__main__":
    main()
