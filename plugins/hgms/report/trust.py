"""Trust in the hypergradients: the measurements of runs with ``run.diagnose``.

A section shows them as warnings and a table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from hgms.diagnosis import missing_measures, number, power, warnings
from hgms.report.study import Entry, Section
from hgms.report.tables import Cell, Table, amount, text
from hgms.runs import RunFolder
from hgms_core.errors import CheckpointError
from hgms_core.torch_errors import first_line

Rows = list[dict[str, Any]]


@frozen(kw_only=True)
class Trust:
    """The diagnosis rows of a section's runs.

    ``rows`` contains the rows of each method's runs, by label and run. ``damaged`` lists the runs
    with rows that are not readable.
    """

    rows: Mapping[str, list[Rows]]
    damaged: list[str] = field(factory=list)

    @classmethod
    def of(cls, section: Section) -> Trust | None:
        """Read the rows of a section's finished runs; ``None`` if no run was diagnosed."""
        rows: dict[str, list[Rows]] = {}
        damaged: list[str] = []
        for entry in section.entries:
            runs = [read for run in entry.runs if (read := _read(entry, run, damaged))]
            if runs:
                rows[entry.label] = runs
        return cls(rows=rows, damaged=damaged) if rows or damaged else None

    @property
    def sentences(self) -> list[tuple[str, str]]:
        """(method, warning) pairs, followed by the missing measures."""
        known = [
            (label, sentence) for label in self.rows for sentence in warnings(self.together(label))
        ]
        lacking = [
            (label, f"not measured: {phrase}")
            for label in self.rows
            for phrase in missing_measures(self.together(label))
        ]
        return [*known, *lacking, *(("", line) for line in self.damaged)]

    def together(self, label: str) -> Rows:
        """Return all rows of a method."""
        return [row for rows in self.rows[label] for row in rows]

    def learning_rows(self, label: str) -> Rows:
        """Return a method's rows with a hypergradient that is not zero."""
        return [row for row in self.together(label) if row.get("hypergradient_norm") != 0]


def _read(entry: Entry, run: Any, damaged: list[str]) -> Rows:
    try:
        return RunFolder(run.path).diagnoses()
    except (CheckpointError, OSError) as error:
        reason = error.lines()[0] if isinstance(error, CheckpointError) else first_line(error)
        damaged.append(f"{entry.label}, seed {run.seed}: {reason}")
        return []


# --- the table
# --------------------------------------------------------------------------------------------------


def table(trust: Trust) -> Table:
    """Build the table with one row per method: medians over its diagnosed steps."""
    columns = [
        "method",
        "steps",
        "bias (%)",
        "cosine, longer",
        "cosine, float64",
        "residual > 1 (%)",
        "curvature ≤ 0 (%)",
        "k of d",
        "c",
        "N to halve",
        "ahead by (s.e.)",
        "by selection (%)",
        "calls outside",
    ]
    rows = []
    for label in trust.rows:
        own = trust.together(label)
        learned = trust.learning_rows(label)
        size = _median(own, "size")
        halve = _median(own, "log10_candidates_to_halve")
        flat = amount(_median(own, "flat_dimension"))
        rows.append(
            [
                text(label),
                amount(float(len(own))),
                amount(_median(learned, "bias", 100)),
                amount(_median(own, "longer_cosine")),
                amount(_median(own, "double_cosine")),
                amount(_share(own, "residual", lambda value: value > 1)),
                amount(_share(own, "curvature", lambda value: value <= 0)),
                Cell(f"{flat.text} of {amount(size).text}", flat.sort)
                if size is not None
                else Cell("–"),
                amount(_median(own, "normal_curvature")),
                Cell("–") if halve is None else Cell(power(halve), halve),
                amount(_median(own, "choice_ratio")),
                amount(_median(learned, "selection_share", 100)),
                amount(sum(number(row, "oracle_calls") for row in own)),
            ]
        )
    caption = (
        "Medians over diagnosed steps and seeds. Bias: what a Newton step to ∇ₓg = 0 changes of "
        "the implicit hypergradient. "
        "Cosines: of the hypergradient with that of a lower run four times as long, and in "
        "float64. k of d: flat directions of "
        "the lower Hessian. c: its smallest eigenvalue across them. N to halve: candidates that "
        "would halve the selection "
        "error, if the paper's bound is tight. Ahead by: the lead of the chosen candidate over "
        "the next, in standard errors. By selection: its share of the step's gain. Calls outside: "
        "the cost of the measurements, which is outside the budget."
    )
    return Table(
        title="Trust in the hypergradients",
        columns=columns,
        rows=rows,
        caption=caption,
        ident="trust",
    )


def _numbers_of(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [value for row in rows if not math.isnan(value := number(row, key))]


def _median(rows: Sequence[Mapping[str, Any]], key: str, unit: float = 1.0) -> float | None:
    values = _numbers_of(rows, key)
    return unit * statistics.median(values) if values else None


def _share(
    rows: Sequence[Mapping[str, Any]], key: str, wrong: Callable[[float], bool]
) -> float | None:
    """Compute the percentage of rows in which the number is wrong.

    Rows without the number are not counted.
    """
    values = _numbers_of(rows, key)
    return 100 * sum(map(wrong, values)) / len(values) if values else None
