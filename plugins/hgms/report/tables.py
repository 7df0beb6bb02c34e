"""The report's tables as values: content and sort keys of every cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from attrs import field, frozen

from hgms.config.tables import difference, flatten
from hgms.report.compute import carried_out
from hgms.report.mixture import Mixture, spell_mixture
from hgms.report.study import Entry, Section, Study
from hgms.results import FAILED, RECOVERED, Interval, Ratio, StoredRun, execution_notes, spell

MINUS = "\N{MINUS SIGN}"
_METRICS = 4  # columns of metrics in the first table; a separate table contains all metrics


@frozen
class Cell:
    """A cell of a table.

    ``sort`` is its sort key (``None``: last), and ``note`` is a remark next to the text.
    """

    text: str
    sort: float | str | None = None
    note: str = ""
    strong: bool = False
    number: bool = True


@frozen(kw_only=True)
class Table:
    """A table. ``groups`` are the rows before which a line is drawn."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    caption: str = ""
    ident: str
    groups: list[int] = field(factory=list)


# --- cells
# --------------------------------------------------------------------------------------------------


def text(value: object, note: str = "") -> Cell:
    return Cell(str(value), str(value), note, number=False)


def amount(value: float | None, unit: float = 1.0) -> Cell:
    if value is None or math.isnan(value):
        return Cell("–" if value is None else "nan")
    scaled = value / unit
    whole = abs(scaled) < 1e15 and (abs(scaled) >= 1000 or scaled == round(scaled))
    return Cell(f"{scaled:,.0f}" if whole else f"{scaled:.4g}", value)


def average(value: Interval, unit: float = 1.0) -> Cell:
    return amount(value.mean if value.count else None, unit)


def mean(values: Sequence[float]) -> Cell:
    return amount(fmean(values) if values else None)


def interval(
    value: Interval | None,
    *,
    percent: bool,
    signed: bool = False,
    note: str = "",
    strong: bool = False,
) -> Cell:
    if value is None or value.count == 0:
        return Cell("nan" if note else "–", note=note)
    shown = spell(value, share=percent, signed=signed)
    shown = MINUS + shown[1:] if shown.startswith("-") else shown
    return Cell(shown, None if math.isnan(value.mean) else value.mean, note, strong)


def share(value: Ratio | None) -> Cell:
    """Format a recovered share; the floor and the ceiling of the share have none."""
    return Cell("") if value is None else Cell(str(value).replace("-", MINUS), value.value)


def heading(name: str, percent: bool) -> str:
    return name.replace("_", " ") + (" (%)" if percent else "")


def arrow(section: Section, name: str) -> str:
    higher = section.directions.get(name)
    sign = "" if higher is None else " ↑" if higher else " ↓"
    return heading(name, section.is_share(name)) + sign


def _failure_note(entry: Entry) -> str:
    return f"{len(entry.failed)} failed" if entry.failed else ""


# --- the tables of a section
# --------------------------------------------------------------------------------------------------

_LEGEND = (
    "Mean ± half-width of the 95 % t-interval over seeds. Bold: better than every other method, "
    "each difference's interval excludes zero, over as many seeds as a claim needs."
)
_DIFFERENCES = (
    "Differences are paired by seed; their t-intervals are at the levels of Holm's rule over all "
    "pairs of methods: if methods are equal, the chance that any excludes zero is at most 5 %. "
    "(exact): the same in every seed, so there is no interval."
)

_UNJUDGED = (
    "Mean ± half-width of the 95 % t-interval over seeds. This metric gets no verdict: it does not "
    "rank methods."
)

_ROLES = (
    "Role: a floor is a baseline that does not learn θ, a ceiling one that knows the "
    "truth. A method is marked if its corrected interval does not show that it is better than "
    "the best floor. Pairs of references, or with a ceiling, are excluded from Holm's correction: "
    "they have plain 95 % intervals."
)


def tables(section: Section) -> list[Table]:
    """Return a section's tables in order, without empty tables."""
    shown = [scores(section), mixture(section), uncertainty(section), work(section), pairs(section)]
    if len(section.metrics) > _METRICS:
        shown.append(scores(section, every=True))
    return [table for table in (*shown, settings(section)) if table.rows]


def scores(section: Section, *, every: bool = False) -> Table:
    """Build the table of metrics by method, with the paired difference to the reference."""
    names = section.metrics if every else section.metrics[:_METRICS]
    base = section.compared.reference if not every and not section.compared.unjudged else None
    roles = any(entry.row.role for entry in section.entries)
    shares = not every and any(entry.row.recovered is not None for entry in section.entries)
    columns = [
        "method",
        *(["role"] if roles else []),
        arrow(section, section.metric),
        *([f"{MINUS} {base}"] if base else []),
    ]
    columns += [
        *(["recovered share"] if shares else []),
        *(arrow(section, name) for name in names[1:]),
        "seeds",
    ]
    rows = []
    for entry in section.entries:
        row = [
            text(entry.label, "; ".join(entry.row.notes)),
            *([text(entry.row.role)] if roles else []),
        ]
        for name in names:
            undefined = entry.nonfinite.get(name, 0)
            note = f"not finite in {undefined} of {len(entry.runs)} seeds" if undefined else ""
            strong = name == section.metric and entry.label == section.winner
            percent = section.is_share(name)
            row.append(interval(entry.row.metrics[name], percent=percent, note=note, strong=strong))
            if name == section.metric and base:
                row.append(interval(entry.row.difference, percent=percent, signed=True))
            if name == section.metric and shares:
                row.append(share(entry.row.recovered))
        rows.append([*row, Cell(str(len(entry.runs)), len(entry.runs), _failure_note(entry))])
    caption = (
        _LEGEND + (f" “{MINUS} {base}”: difference to {base}." if base else "") + f" {_DIFFERENCES}"
    )
    caption += f" {_ROLES}" if roles else ""
    if any(entry.failed or entry.nonfinite.get(section.metric) for entry in section.entries):
        caption += f" {FAILED[0].upper()}{FAILED[1:]}."
    caption = _UNJUDGED if section.compared.unjudged else caption
    caption += f" {RECOVERED[0].upper()}{RECOVERED[1:]}." if shares else ""
    return Table(
        title="Every metric" if every else "Results",
        columns=columns,
        rows=rows,
        caption=caption,
        ident="metrics" if every else "results",
        groups=section.compared.groups,
    )


_COSTS = ("lower_gradients", "upper_values", "upper_gradients", "products", "cross_products")


def work(section: Section) -> Table:
    """Build the table of completed outer steps and their cost."""
    memory = any(entry.row.cost.peak_memory_bytes.count for entry in section.entries)
    compiled = any(entry.row.cost.compile_seconds.mean > 0 for entry in section.entries)
    columns = [
        "method",
        "outer steps",
        "min–max",
        "seconds",
        *(["compile seconds"] if compiled else []),
        "oracle calls",
        *(heading(name, percent=False) for name in _COSTS),
    ]
    columns += ["peak memory (MiB)"] if memory else []
    rows = []
    for entry in section.entries:
        steps = entry.values("outer_steps")
        span = f"{min(steps):,.0f}–{max(steps):,.0f}" if steps else "–"
        row = [
            text(entry.label),
            mean(steps),
            Cell(span, min(steps, default=None)),
            average(entry.row.cost.seconds),
            *([average(entry.row.cost.compile_seconds)] if compiled else []),
        ]
        row += [mean(entry.values(name)) for name in ("oracle_calls", *_COSTS)]
        rows.append(row + ([average(entry.row.cost.peak_memory_bytes, 2**20)] if memory else []))
    caption = (
        "Means over seeds; min–max over seeds of the completed outer steps. Seconds are "
        "without evaluation and compilation."
    )
    if any(cell.text == "–" for row in rows for cell in row):
        caption += (
            " –: not in the method's records (their keys oracle_calls and "
            "cost_lower_gradients, for example)."
        )
    return Table(
        title="Outer steps and cost", columns=columns, rows=rows, caption=caption, ident="work"
    )


def mixture(section: Section) -> Table:
    """Build the table of every method's largest sources at the end."""

    def rest(mixed: Mixture) -> float:
        shown = list(mixed.weights.values())[:3]
        return 0.0 if mixed.uniform else abs(1 - math.fsum(value.mean for value in shown))

    return Table(
        title="Final mixture",
        columns=["method", "final source mixture", "rest", "seeds"],
        rows=[
            [
                text(label),
                _largest(mixed),
                Cell(f"{rest(mixed):.3f}", rest(mixed)),
                Cell(str(len(mixed.finals)), len(mixed.finals)),
            ]
            for label, mixed in section.mixtures.items()
        ],
        caption=(
            "The three largest weights of what each method returned: mean over seeds ± "
            "half-width of the 95 % t-interval. Rest: what the other sources hold together."
        ),
        ident="mixture",
    )


def _largest(mixed: Mixture) -> Cell:
    """Format the largest sources, with a note if the runs disagree.

    Means are misleading for runs that disagree.
    """
    leaders = mixed.leaders.most_common()
    agree = len(leaders) < 2 or mixed.uniform
    note = (
        ""
        if agree
        else "largest by seed: " + ", ".join(f"{source} {count}×" for source, count in leaders)
    )
    return text(spell_mixture(mixed), note)


def uncertainty(section: Section) -> Table:
    """Build the table of weight intervals over seeds.

    It contains the methods that learn weights and have at least two seeds.
    """
    rows = []
    words = {1: "more of it", -1: "less of it", 0: "cannot be told"}
    for label, mixed in section.mixtures.items():
        if len(mixed.finals) < 2 or not mixed.moves:
            continue
        for effect in mixed.uncertainty.effects:
            shown = f"{effect.value:.3f}" + (
                "" if math.isnan(effect.low) else f" [{effect.low:.3f}, {effect.high:.3f}]"
            )
            said = text(words[effect.sign])
            rows.append(
                [
                    text(label),
                    text(effect.source),
                    Cell(f"{effect.null:.3f}", effect.null),
                    Cell(shown, effect.value),
                    amount(effect.p),
                    said,
                ]
            )
    return Table(
        title="Uncertainty of the mixture over seeds",
        columns=["method", "source", "start", "weight", "p", "over seeds"],
        rows=rows,
        caption=(
            "Weight: centre of the seeds in log-ratios, with its 95 % interval there. p: of a "
            "weight as at the start, by Holm's rule over the sources of a method. Seeds see the "
            "same data, so their agreement is no evidence about the data."
        ),
        ident="uncertainty",
    )


def pairs(section: Section) -> Table:
    """Build the table of row − column in the main metric, paired by seed."""
    percent = section.is_share(section.metric)
    labels = [
        entry.label for entry in section.entries if entry.runs and not section.compared.unjudged
    ]

    def cell(value: Interval | None) -> Cell:
        if value is None:
            return Cell("·")
        return interval(value, percent=percent, signed=True, strong=value.excludes_zero)

    return Table(
        title="Paired differences",
        columns=["method", *labels],
        rows=[
            [text(row), *(cell(section.compared.pairs.get((row, column))) for column in labels)]
            for row in labels
        ],
        caption=(
            f"{heading(section.metric, percent)}: row {MINUS} column, mean over the seeds both "
            f"have ± half-width. Bold: the interval excludes zero. {_DIFFERENCES}"
        ),
        ident="pairs",
    )


def settings(section: Section) -> Table:
    """Build the table of the settings in which the methods differ."""

    def of(run: StoredRun) -> dict[str, Any]:
        return {
            **{f"method.{key}": value for key, value in run.method.items()},
            "run": carried_out(run),
        }

    shown = {entry.label: of((entry.runs + entry.failed)[0]) for entry in section.entries}
    flat = [flatten(table) for table in shown.values()]
    keys = difference(list(shown.values()))
    return Table(
        title="Settings",
        columns=["setting", *shown],
        rows=[
            [text(key), *(Cell(str(table.get(key, "·")), number=False) for table in flat)]
            for key in keys
        ],
        caption="Only what differs between the methods; · where a method has no such setting.",
        ident="settings",
    )


# --- the tables of a study
# --------------------------------------------------------------------------------------------------


def overview(study: Study) -> Table:
    """Build the table of the main metric by method and task, sorted by the mean position."""
    places: dict[str, list[int]] = {}
    for section in study.sections:
        ranked = sorted(section.entries, key=lambda entry: section.compared.rank(entry.row))
        for place, entry in enumerate(() if section.compared.unjudged else ranked):
            places.setdefault(entry.label, []).append(place)
    rows = []
    mean_place = {
        label: 1 + sum(places[label]) / len(places[label]) if label in places else math.inf
        for label in study.labels
    }
    for label in sorted(study.labels, key=mean_place.__getitem__):
        row = [
            text(label),
            Cell(f"{mean_place[label]:.1f}", mean_place[label]) if label in places else Cell("–"),
        ]
        for section in study.sections:
            own = next((entry for entry in section.entries if entry.label == label), None)
            value, note = (
                (own.row.metrics[section.metric], "; ".join(own.row.notes)) if own else (None, "")
            )
            row.append(
                interval(
                    value,
                    percent=section.is_share(section.metric),
                    note=note,
                    strong=label == section.winner,
                )
            )
        rows.append(row)
    columns = [f"{section.title}: {arrow(section, section.metric)}" for section in study.sections]
    return Table(
        title="All tasks",
        columns=["method", "mean place", *columns],
        rows=rows,
        caption=(
            f"In the order of the mean place over the tasks (1.0: the best mean on each). {_LEGEND}"
        ),
        ident="overview",
    )


def failures(study: Study) -> Table:
    rows = [
        [
            text(section.title),
            text(entry.label),
            amount(run.seed),
            text(run.error or "no reason was written"),
            text(run.path),
        ]
        for section in study.sections
        for entry in section.entries
        for run in entry.failed
    ]
    return Table(
        title="Failed runs",
        columns=["task", "method", "seed", "reason", "folder"],
        rows=rows,
        ident="failed",
    )


def skipped_folders(study: Study) -> Table:
    return Table(
        title="Skipped folders",
        columns=["folder", "reason"],
        rows=[[text(folder.path), text(folder.reason)] for folder in study.skipped],
        ident="skipped",
    )


# --- summary lines
# --------------------------------------------------------------------------------------------------


def summary(study: Study) -> str:
    """Summarise the number of compared and skipped runs in one line."""
    counts = [
        (len(study.runs), "run"),
        (len(study.sections), "task"),
        (len(study.labels), "method"),
    ]
    line = ", ".join(_count(number, noun) for number, noun in counts)
    if study.failed_runs:
        line += f"; {len(study.failed_runs)} failed"
    if study.skipped:
        line += f"; {_count(len(study.skipped), 'folder')} skipped"
    return line + "."


def about(section: Section) -> str:
    seeds = {run.seed for run in section.runs}
    version = {None: ", version not recorded", "": ""}.get(
        section.version, f", version {section.version}"
    )
    better = {None: "", True: " (higher is better)", False: " (lower is better)"}[
        section.compared.higher_is_better
    ]
    metric = heading(section.metric, section.is_share(section.metric))
    how = f" {section.compared.few_seeds}." if section.compared.few_seeds else ""
    how += "".join(f" {note[0].upper()}{note[1:]}." for note in execution_notes(section.runs))
    return (
        f"Task {section.runs[0].task_name}{version}; budget {section.budget} per run; "
        f"{_count(len(seeds), 'seed')}; {metric}{better}.{how}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
