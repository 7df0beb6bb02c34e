"""Equality of mathematical expressions by math-verify, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hgms.packages import optional_module
from hgms_core.errors import MissingExtra

PLACE = ("benchmarks",)


def verdicts(pairs: Sequence[tuple[str, str]], seconds: int = 5) -> list[str]:
    """Return whether each answer equals the known answer, in LaTeX: "right" or "wrong".

    The known answer comes first. An answer without a box is a text in which math-verify finds the
    answer. The verdict is "undecided" if a comparison exceeds ``seconds`` of processor time or the
    memory limit; the process is then started again for the following pairs.

    Raises
    ------
    MissingExtra
        Math-verify is not installed.

    Examples
    --------
    >>> verdicts(
    ...     [("\\\\boxed{0.5}", "\\\\boxed{\\\\frac{1}{2}}"), ("\\\\boxed{2}", "\\\\boxed{3}")]
    ... )
    ['right', 'wrong']
    """
    require_math_verify()
    # -P: do not add the script's folder to the path, where its modules could hide modules of the
    # same names.
    command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(seconds)]
    found: list[str] = []
    while len(found) < len(pairs):
        lines = "".join(json.dumps(pair) + "\n" for pair in pairs[len(found) :])
        done = subprocess.run(
            command, input=lines, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        ready, *own = done.stdout.splitlines() or [""]
        if ready != "ready":
            raise MissingExtra(
                "missing-package",
                "math-verify cannot be used: its process ended before the first comparison",
                place=PLACE,
                install="pip install 'hgms[scores]'",
            )
        found += own
        if len(found) < len(pairs):
            found.append("undecided")
    return found


def require_math_verify() -> None:
    optional_module("math_verify", "scoring of gsm8k and math", "scores", place=PLACE)


def box(text: str) -> str:
    return "\\boxed{" + text + "}"
