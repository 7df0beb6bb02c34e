"""Trust in the hypergradients: the measurements of runs with ``run.diagnose``.

A section shows them as warnings, a table and figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from hgms.diagnosis import ALIKE, BIASED, SIGMAS, missing_measures, number, power, warnings
from hgms.report.curves import Curve, bin_values
from hgms.report.figures import AXES, LOG, Style, figure, numbers, traces
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


# --- figures
# --------------------------------------------------------------------------------------------------


@frozen
class Picture:
    """A number of the rows over outer steps.

    ``line`` is the threshold of its warning; ``log`` draws powers of ten.
    """

    key: str
    title: str
    text: str
    axis: str
    line: float | None = None
    log: bool = False
    of: Callable[[float], float] = lambda value: value


PICTURES = (
    Picture(
        "bias",
        "Bias of an unsolved lower level",
        "how much of the implicit hypergradient a Newton step to ∇ₓg = 0 changes",
        "share of its size",
        BIASED,
        True,
    ),
    Picture(
        "newton_step",
        "Distance to a lower minimiser",
        "length of the Newton step to ∇ₓg = 0",
        "‖δ‖",
        log=True,
    ),
    Picture(
        "longer_cosine",
        "Agreement with a longer lower run",
        "cosine with the hypergradient after four times as many lower steps",
        "cosine",
        ALIKE,
    ),
    Picture(
        "double_cosine",
        "Rounding",
        "1 − the cosine with the same hypergradient in float64",
        "1 − cosine",
        1e-3,
        True,
        lambda value: 1 - value,
    ),
    Picture(
        "curvature",
        "Smallest curvature of the solve",
        "below zero the system is not positive definite",
        "pᵀ(H + γI)p / pᵀp",
        0.0,
    ),
    Picture(
        "flat_dimension",
        "Flat directions",
        "k: eigenvalues of the lower Hessian that are as good as zero",
        "k",
    ),
    Picture(
        "choice_ratio",
        "Choice against noise",
        "the lead of the chosen candidate over the next, in standard errors of the rows",
        "standard errors",
        SIGMAS,
    ),
)


def figures(trust: Trust, style: Style) -> list[dict[str, Any]]:
    """Return the figures with content; a dashed line is the threshold of a warning."""
    shown = []
    for picture in PICTURES:
        curves = {
            label: curve
            for label, runs in trust.rows.items()
            if (curve := _curve(runs, picture)) is not None
        }
        if curves:
            shown.append(_figure(picture, curves, style))
    gains = [
        label for label in trust.rows if _numbers_of(trust.learning_rows(label), "gain_selection")
    ]
    return [*shown, _gain(trust, gains)] if gains else shown


def _curve(runs: Sequence[Rows], picture: Picture) -> Curve | None:
    lines = []
    for rows in runs:
        points = [
            (row["step"], picture.of(number(row, picture.key)))
            for row in rows
            if row.get("hypergradient_norm") != 0
        ]
        known = [(x, y) for x, y in points if not math.isnan(y) and (y > 0 or not picture.log)]
        if known:
            x, y = zip(*known, strict=True)
            lines.append((np.array(x, dtype=float), np.array(y, dtype=float)))
    return bin_values(lines)


def _figure(picture: Picture, curves: Mapping[str, Curve], style: Style) -> dict[str, Any]:
    lines = traces(curves, style, positive=picture.log)
    for trace in lines:
        if not trace["meta"].get("band"):
            # one diagnosed step cannot form a line
            trace |= {"mode": "lines+markers", "marker": {"size": 6}}
    scale: dict[str, Any] = {}
    if picture.log:
        known = np.concatenate([curve.y for curve in curves.values()])
        scale = {**LOG, "dtick": 1 if known.max() > 30 * known.min() else "D2"}
    text = f"{picture.text}: median over seeds, band: middle half"
    drawn = figure(picture.title, text, lines, AXES["step"], picture.axis, **scale)
    if picture.line is not None:
        drawn["spec"]["layout"]["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": picture.line,
                "y1": picture.line,
                "line": {"dash": "dash", "width": 1.5, "color": "#8a8f98"},
            }
        ]
    return drawn


def _gain(trust: Trust, labels: Sequence[str]) -> dict[str, Any]:
    """Draw two bars per method: reductions of the upper value.

    The bars are the reductions by selection and by the outer step.

    Both are means over the method's diagnosed steps.
    """
    order = list(labels)[::-1]
    data = []
    for colour, shape, key, name in (
        (0, "", "gain_selection", "selection"),
        (1, "/", "gain_differentiation", "differentiation"),
    ):
        values = np.array(
            [np.mean(_numbers_of(trust.learning_rows(label), key) or [math.nan]) for label in order]
        )
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": order,
                "x": numbers(values),
                "meta": {"colour": colour},
                "marker": {
                    "pattern": {"shape": shape, "size": 7, "solidity": 0.2, "fillmode": "overlay"}
                },
                "hovertemplate": f"<b>%{{y}}</b><br>{name}: %{{x:.4~g}}<extra></extra>",
                "showlegend": True,
            }
        )
    text = (
        "mean of the diagnosed steps, on rows that neither choose nor are differentiated on: "
        "mean candidate to chosen one, and "
        "on to the same candidate at the next θ, its lower level solved again"
    )
    axis = "fall of the upper value in a step"
    drawn = figure("Gain by selection and by differentiation", text, data, axis, "")
    drawn["spec"]["layout"] = {
        "barmode": "group",
        "hovermode": "closest",
        "showlegend": True,
        "yaxis": {"automargin": True, "ticksuffix": "  "},
        "xaxis": {"title": {"text": axis}},
        "legend": {"orientation": "h", "y": -0.25, "yanchor": "top", "x": 0},
    }
    return drawn
