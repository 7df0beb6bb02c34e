"""Execution settings of the steps of runs, as sentences next to their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hgms.results.stored_run import StoredRun

WORDS = {"matmul": ("float32 matrix products", "exact"), "compile": ("steps", "eager")}
"""For each setting: its subject in a sentence, and its value under torch's defaults."""


def execution_notes(runs: Iterable[StoredRun]) -> list[str]:
    """Return one sentence for each setting that any of the runs used.

    If the runs differ in a setting, the sentence states it. Each function that could not be
    compiled has a sentence as well.

    Examples
    --------
    >>> execution_notes([])
    []
    """
    runs = list(runs)
    notes = []
    for key, (subject, rest) in WORDS.items():
        counts = Counter(run.execution.get(key, rest) for run in runs)
        shares = [f"{choice} in {count}" for choice, count in sorted(counts.items())]
        if len(counts) > 1:
            notes.append(
                f"{subject}: {' and '.join(shares)} of {len(runs)} runs: their seconds do not "
                "compare"
            )
        elif counts and rest not in counts:
            notes.append(f"{subject}: {next(iter(counts))} in all runs")
    eager = {name: outcome for run in runs for name, outcome in run.eager.items()}
    return notes + [f"{name} is not compiled ({outcome})" for name, outcome in eager.items()]
