"""How the steps of runs were carried out, as a sentence beside their table."""

from __future__ import annotations

from collections.abc import Iterable

from hgms_results.stored import StoredRun

WORDS = {"matmul": ("float32 matrix products", "exact")}
"""What a choice is about, and what it is where torch is left alone."""


def execution_notes(runs: Iterable[StoredRun]) -> list[str]:
    """A sentence for each choice that any of the runs was carried out with; where they differ in it, it says so.

    >>> execution_notes([])
    []
    """
    runs, notes = list(runs), []
    for key, (subject, rest) in WORDS.items():
        by_choice: dict[str, list[StoredRun]] = {}
        for run in runs:
            by_choice.setdefault(run.execution.get(key, rest), []).append(run)
        if set(by_choice) <= {rest}:
            continue
        if len(by_choice) == 1:
            notes.append(f"{subject}: {next(iter(by_choice))} in all runs")
            continue
        shares = [
            f"{choice} in {len(alike)} ({', '.join(sorted({run.label for run in alike}))})"
            for choice, alike in sorted(by_choice.items())
        ]
        notes.append(f"{subject}: {' and '.join(shares)} of {len(runs)} runs: their seconds do not compare")
    return notes
