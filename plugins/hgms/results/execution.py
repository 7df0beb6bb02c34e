"""How the steps of runs were carried out, as a sentence beside their table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from hgms.results.stored import StoredRun

Key = TypeVar("Key")
WORDS = {"matmul": ("float32 matrix products", "exact"), "compile": ("steps", "as written")}
"""What a choice is about, and what it is where torch is left alone."""


def execution_notes(runs: Iterable[StoredRun]) -> list[str]:
    """A sentence for each choice that any of the runs was carried out with; where they differ in
    it, it says so. Of steps that are compiled, which of their functions are programs, by the labels
    of the methods.

    >>> execution_notes([])
    []
    """
    runs = list(runs)
    notes = []
    for key, (subject, rest) in WORDS.items():
        by_choice: dict[str, list[StoredRun]] = {}
        for run in runs:
            by_choice.setdefault(run.execution.get(key, rest), []).append(run)
        if set(by_choice) <= {rest}:
            continue
        if len(by_choice) == 1:
            note = f"{subject}: {next(iter(by_choice))} in all runs"
        else:
            shares = [
                f"{choice} in {len(alike)} ({_labels(alike)})"
                for choice, alike in sorted(by_choice.items())
            ]
            note = (
                f"{subject}: {' and '.join(shares)} of {len(runs)} runs: their seconds do not "
                "compare"
            )
        notes.append(note)
        if key == "compile":
            notes += _programs([run for run in runs if key in run.execution])
    return notes


def _programs(runs: list[StoredRun]) -> list[str]:
    """What was compiled, for whom; and what was not although it was to be."""
    by_names = _grouped(
        runs,
        lambda run: tuple(sorted(name for name, how in run.programs.items() if how == "compiled")),
    )
    groups = sorted(by_names.items(), key=lambda group: (not group[0], _labels(group[1])))
    parts = [
        f"{', '.join(names) or 'nothing, so as written'} ({_labels(alike)})"
        for names, alike in groups
    ]
    refused: dict[str, list[StoredRun]] = {}
    for run in runs:
        for name, how in run.programs.items():
            if how != "compiled":
                refused.setdefault(name, []).append(run)
    whys = [
        f"{name} ({_labels(alike)}) ran {alike[0].programs[name]}"
        for name, alike in refused.items()
    ]
    return [f"compiled: {'; '.join(parts)}", *whys]


def _grouped(
    runs: list[StoredRun], key_of: Callable[[StoredRun], Key]
) -> dict[Key, list[StoredRun]]:
    groups: dict[Key, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(key_of(run), []).append(run)
    return groups


def _labels(runs: list[StoredRun]) -> str:
    return ", ".join(sorted({run.label for run in runs}))
