"""Execution settings of the steps of runs, as sentences next to their table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from hgms.results.stored_run import StoredRun

Key = TypeVar("Key")
WORDS = {"matmul": ("float32 matrix products", "exact"), "compile": ("steps", "eager")}
"""For each setting: its subject in a sentence, and its value under torch's defaults."""


def execution_notes(runs: Iterable[StoredRun]) -> list[str]:
    """Return one sentence for each setting that any of the runs used.

    If the runs differ in a setting, the sentence states it.

    Examples
    --------
    >>> execution_notes([])
    []
    """
    runs = list(runs)
    notes = []
    for key, (subject, rest) in WORDS.items():
        by_choice = _group((run.execution.get(key, rest), run) for run in runs)
        if set(by_choice) <= {rest}:
            continue
        if len(by_choice) == 1:
            notes.append(f"{subject}: {next(iter(by_choice))} in all runs")
        else:
            shares = [
                f"{choice} in {len(alike)} ({_labels(alike)})"
                for choice, alike in sorted(by_choice.items())
            ]
            notes.append(
                f"{subject}: {' and '.join(shares)} of {len(runs)} runs: their seconds do not "
                "compare"
            )
    return notes


def _group(pairs: Iterable[tuple[Key, StoredRun]]) -> dict[Key, list[StoredRun]]:
    groups: dict[Key, list[StoredRun]] = {}
    for key, run in pairs:
        groups.setdefault(key, []).append(run)
    return groups


def _labels(runs: list[StoredRun]) -> str:
    return ", ".join(sorted({run.label for run in runs}))
