"""Equality of two mathematical expressions by math-verify, in a separate process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, cast

from hgms_core.errors import MissingExtra

Verdict = Literal["right", "wrong", "undecided"]

PATIENCE = 24
"""Timeout by the clock, as a multiple of the limit on processor time.

Parsing and each comparison have such a limit. No signal can stop a comparison that exceeds the
timeout.
"""


class Verifier:
    """Compare mathematical expressions with math-verify in a separate process.

    The process is restarted if a comparison takes too long or all memory. The verifier may be
    called from any thread.

    ``verdict`` is "undecided" if math-verify ran out of time. The arguments are not
    interchangeable: the known answer comes first.

    Raises
    ------
    MissingExtra
        Math-verify is not installed.

    Examples
    --------
    >>> with Verifier() as verifier:
    ...     verifier.verdict("0.5", r"\\frac{1}{2}"), verifier.verdict("2", "3")
    ('right', 'wrong')
    """

    def __init__(self, seconds: int = 5) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._reader = ThreadPoolExecutor(1)

    def verdict(self, gold: str, answer: str, *, whole: bool = False) -> Verdict:
        """Return whether ``answer`` equals ``gold``.

        With ``whole``, ``answer`` is a text in which math-verify finds the answer.
        """
        pair = [_box(gold), answer if whole else _box(answer), self._seconds]
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(pair) + "\n")
                process.stdin.flush()
            line = self._line(process, PATIENCE * self._seconds)
        return cast(Verdict, line) if line in ("right", "wrong") else "undecided"

    def _line(self, process: subprocess.Popen[str], seconds: float) -> str:
        """Return the next line of the process; stop the process after the timeout."""
        assert process.stdout is not None
        try:
            line = self._reader.submit(process.stdout.readline).result(seconds).strip()
        except TimeoutError:
            line = ""
        if not line:
            self._stop()
        return line

    def _start(self) -> subprocess.Popen[str]:
        require_math_verify()
        script = Path(__file__).with_name("worker.py")
        # -P: do not add the script's folder to the path, where its modules could hide modules of
        # the same names.
        process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._process = process
        if self._line(process, 120) != "ready":
            raise MissingExtra(
                "missing-package",
                "math-verify cannot be used: its process ended before the first comparison",
                place=("evaluate", "benchmarks"),
                install="pip install 'hgms[llm]'",
            )
        return process

    def _stop(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:
                pass

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stop()


def require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtra(
            "missing-package",
            "gsm8k and math require math-verify, which is not installed",
            place=("evaluate", "benchmarks"),
            install="pip install 'hgms[llm]'",
        )


def _box(text: str) -> str:
    return "\\boxed{" + text + "}"
