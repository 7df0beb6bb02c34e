"""Compare answers with math-verify: one JSON pair per input line, one verdict per output line.

:func:`evaluation.verifier.verdicts` runs this file as a script; it imports no module of
this project. An expression such as 9^(9^(9^9)) may use all memory, or a processor without end, and
no signal stops it. Therefore the system ends this process at its limits. The time limit is on
processor time: verdicts on a busy machine are the same as on an idle machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys

MEMORY = 4 << 30


def set_limit(kind: int, value: int) -> None:
    """Set the limit of this process, or a smaller limit that it already has."""
    most = resource.getrlimit(kind)[1]
    unlimited = most == resource.RLIM_INFINITY
    resource.setrlimit(kind, (value if unlimited else min(value, most), most))


def main(seconds: int) -> None:
    from math_verify import parse, verify

    with contextlib.suppress(ValueError):  # macOS has no such limit
        set_limit(resource.RLIMIT_AS, MEMORY)
    answers = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        set_limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + seconds)
        known, parsed = (parse(text, parsing_timeout=None) for text in json.loads(line))
        same = verify(known, parsed, timeout_seconds=None)
        print("right" if same else "wrong", file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
