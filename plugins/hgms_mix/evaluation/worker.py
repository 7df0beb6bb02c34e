"""Compare answers with math-verify: one JSON pair per input line, one verdict per output line.

:func:`hgms_mix.evaluation.verifier.verdicts` runs this file as a script; it imports no module of
this project. An expression such as 9^(9^(9^9)) may use all memory, or a processor without end, and
no signal stops it. Therefore the system ends this process at its limits. The time limit is on
processor time: verdicts on a busy machine are the same as on an idle machine.
"""

from __future__ import annotations

import json
import math
import resource
import sys

MEMORY = 4 << 30


def main(seconds: int) -> None:
    from math_verify import parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    answers = sys.stdout
    sys.stdout = sys.stderr
    answers.write("ready\n")
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(usage.ru_utime + usage.ru_stime) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, most))
        known, parsed = (parse(text, parsing_timeout=None) for text in json.loads(line))
        same = verify(known, parsed, timeout_seconds=None)
        answers.write("right\n" if same else "wrong\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
