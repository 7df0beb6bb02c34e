"""Tables: what finished runs of several methods say, as means over seeds and as differences within
each seed.

All methods of one seed see the same data, split and start, so differences are taken seed by seed
and their intervals are those of paired samples, at the levels of Holm's rule over all pairs of
methods (:func:`hgms.results.statistics.compared`). :func:`table` takes runs from memory or from
disk.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import field, frozen

from hgms.results.forest import Forest, notebook_html
from hgms.results.recovered import Ratio, recovered
from hgms.results.statistics import CLAIM, Interval, compared, few_seeds, spell
from hgms.results.stored import StoredRun
from hgms.runs import RunResult
from hgms_core import as_text

DEFAULT_REFERENCES = ("uniform", "theta0")
"""What a method is called that leaves θ where it is: differences are taken to it where it is among
the methods and nothing else is asked for."""

SCALE = ("validation-only", "oracle-joint")
"""The methods between which the recovered share of the others is measured."""

RECOVERED = (
    "recovered share: of what oracle-joint is ahead of validation-only by; 95 % interval "
    "by Fieller's theorem, paired by seed"
)
"""What the column of the recovered share holds."""

UNJUDGED = (
    "all but the mixture is of the x that each method trained its weights with, so it says "
    "nothing of who is ahead; compare by "
    "--metric recovery_error where a reference mixture is known, else by hgms mix compare"
)
"""Why what is measured of x gets no verdict on data sources, and what to do: it ranks how x was
trained, not the mixtures.
"""

OF_MIXTURE = ("recovery_error",)
"""Metrics of θ alone, which speak of the mixture however x was trained."""

ORDER = ("", "floor", "ceiling")
"""Methods before references, floors before ceilings."""


@frozen(kw_only=True)
class Point:
    """What the statistics look at of one finished run. A metric that was not finite is NaN.
    ``role`` is "floor" for a trivial reference, "ceiling" for one that knows the truth.
    ``sources``: its θ weighs data sources; ``later`` are metrics of a model that was tuned on the
    result.
    """

    seed: int
    metrics: Mapping[str, float]
    outer_steps: int
    oracle_calls: int
    seconds: float
    peak_memory: float = math.nan
    method: str = ""
    untrained: str = ""
    sources: bool = False
    later: frozenset[str] = frozenset()
    role: str = ""

    @classmethod
    def of(cls, run: RunResult | StoredRun) -> Point:
        summary = run.summary
        metrics = run.summary.get("metrics") or {}
        fields: Iterable[str] = (
            run.fields() if isinstance(run, StoredRun) else [*run.records[:1], {}][0]
        )
        method = run.method_name if isinstance(run, StoredRun) else run.info.method
        return cls(
            seed=run.seed if isinstance(run, StoredRun) else run.info.seed,
            metrics={
                name: math.nan if value is None else float(value) for name, value in metrics.items()
            },
            outer_steps=int(summary.get("outer_steps") or 0),
            oracle_calls=int(summary.get("oracle_calls") or 0),
            seconds=run.seconds,
            peak_memory=float(
                (run.resources.get("peak_memory_bytes") if isinstance(run, StoredRun) else None)
                or math.nan
            ),
            method=method,
            untrained=str(summary.get("untrained") or ""),
            sources=any(name.startswith("weight.") for name in fields),
            later=frozenset(run.scores.get("metrics", ()) if isinstance(run, StoredRun) else ()),
            role=str(summary.get("role") or ""),
        )

    def unjudged(self, metric: str) -> str:
        """Why the metric says nothing of who is ahead; empty where it does."""
        if metric in OF_MIXTURE or metric in self.later:
            return ""
        return self.untrained or (UNJUDGED if self.sources else "")


@frozen(kw_only=True)
class Row:
    """One method's line of a table.

    Intervals are over the seeds whose value is defined; ``undefined`` counts those whose primary
    metric is NaN, ``failed`` the runs that did not end well. ``difference`` is to the reference
    method, seed by seed (None for the reference itself), ``winner`` whether the intervals of its
    differences to all other methods and floors exclude zero, in its favour, over as many seeds as a
    claim needs. ``role`` is "floor" or "ceiling" for a reference, ``ahead_of_floor`` whether its
    difference to the best floor excludes zero, in its favour (None: there is no floor, or it is a
    reference itself), ``recovered`` the recovered share where there is one.
    """

    method: str
    metrics: Mapping[str, Interval]
    difference: Interval | None
    outer_steps: Interval
    outer_steps_range: tuple[int, int] | None
    oracle_calls: Interval
    seconds: Interval
    peak_memory_bytes: Interval
    undefined: int = 0
    failed: int = 0
    winner: bool = False
    notes: tuple[str, ...] = ()
    role: str = ""
    ahead_of_floor: bool | None = None
    recovered: Ratio | None = None

    def as_dict(self) -> dict[str, Any]:
        return {field.name: _plain(getattr(self, field.name)) for field in attrs.fields(Row)}


def _plain(value: Any) -> Any:
    """A field of a row as JSON has it; an interval over no values is null."""
    if isinstance(value, Interval):
        half = None if math.isnan(value.half_width) else value.half_width
        return {"mean": value.mean, "half_width": half, "n": value.count} if value.count else None
    if isinstance(value, Ratio):
        known = {name: getattr(value, name) for name in ("value", "low", "high", "count")}
        return {name: None if math.isnan(number) else number for name, number in known.items()}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


@frozen(kw_only=True)
class Table:
    """All methods on one task, then the references. ``pairs["a", "b"]`` is the paired difference a
    − b in the metric, of every two methods; ``floor`` is the trivial reference with the best mean;
    ``unjudged`` says why the metric gets no verdict.
    """

    task: str
    metric: str
    higher_is_better: bool
    reference: str | None
    rows: Sequence[Row]
    pairs: Mapping[tuple[str, str], Interval] = field(factory=dict, repr=False)
    floor: str | None = None
    unjudged: str = ""

    __repr__ = as_text

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "task", self.task or "not named"
        yield "metric", f"{self.metric}, {'higher' if self.higher_is_better else 'lower'} is better"
        yield "methods", ", ".join(row.method for row in self.rows)
        yield "reference", self.reference or "none"
        yield "winner", self.winner or "none"
        yield from (("note", line) for line in self.remarks)

    def _repr_html_(self) -> str:
        return notebook_html(self.html)

    @property
    def winner(self) -> str | None:
        return next((row.method for row in self.rows if row.winner), None)

    @property
    def references(self) -> list[str]:
        """The methods that are references."""
        return [row.method for row in self.rows if row.role]

    @property
    def groups(self) -> list[int]:
        """The rows before which a line is drawn: where the references begin."""
        roles = [bool(row.role) for row in self.rows]
        return [roles.index(True)] if True in roles[1:] and not roles[0] else []

    @property
    def remarks(self) -> list[str]:
        """What is to be said of the whole table: that its metric gets no verdict, that no method is
        ahead of the best floor, that there are few seeds."""
        lines = [self.unjudged] * bool(self.unjudged)
        judged = [row for row in self.rows if row.ahead_of_floor is not None]
        if judged and not any(row.ahead_of_floor for row in judged):
            which = "no method is" if len(judged) > 1 else f"{judged[0].method} is not"
            lines.append(
                f"{which} ahead of {self.floor}, the best of the references that learn nothing "
                "about θ"
            )
        return [*lines, self.few_seeds] if self.few_seeds else lines

    @property
    def few_seeds(self) -> str:
        """That there are too few seeds to claim anything; nothing where there are enough, or
        nothing is compared.
        """
        counts = [row.metrics[self.metric].count for row in self.rows if self.metric in row.metrics]
        return few_seeds(max(counts)) if len(self.rows) > 1 and any(counts) else ""

    @property
    def forest(self) -> Forest | None:
        """The differences as a picture, methods before references, best mean first; None where
        there is nothing to compare.
        """

        def rank(row: Row) -> tuple[int, bool, float]:
            mean = row.metrics[self.metric].mean if self.metric in row.metrics else math.nan
            return ORDER.index(row.role), math.isnan(mean), -mean if self.higher_is_better else mean

        ranked = sorted(self.rows, key=rank)
        return Forest.of(
            self.pairs,
            [row.method for row in ranked],
            self.reference,
            title=self.task,
            metric=self.metric.replace("_", " "),
            share=is_share(self.metric),
            higher=self.higher_is_better,
            winner=self.winner,
            excluded={row.method: "; ".join(row.notes) or "no value" for row in ranked},
            references=self.references,
        )

    @property
    def html(self) -> str:
        """The differences as a picture, and the rows below it."""
        rows = self.columns
        groups = self.groups
        names = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0]) if rows else ""
        body = "".join(
            f"<tr{' class=group' * (number in groups)}>"
            + "".join(f"<td>{html.escape(text)}</td>" for text in row.values())
            + "</tr>"
            for number, row in enumerate(rows)
        )
        picture = (
            self.forest.html()
            if self.forest is not None
            else f"<p><b>{html.escape(self.task)}</b></p>"
        )
        table = f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
        return f'{picture}<div class="wide">{table}</div>'

    def as_dict(self) -> dict[str, Any]:
        table = {
            name: getattr(self, name)
            for name in ("task", "metric", "higher_is_better", "reference", "winner", "floor")
        }
        return {**table, "methods": [row.as_dict() for row in self.rows]}

    @property
    def columns(self) -> list[dict[str, str]]:
        """The rows as text, for a terminal. A metric called a share or an accuracy is shown in
        percent.
        """
        share = is_share(self.metric)
        name = (
            self.metric.replace("_", " ")
            + " (%)" * share
            + (" ↑" if self.higher_is_better else " ↓")
        )
        shown = []
        for row in self.rows:
            value = row.metrics.get(self.metric, Interval.of([]))
            counted = [
                f"{count} {what}"
                for count, what in ((row.failed, "failed"), (row.undefined, "NaN"))
                if count
            ]
            steps = _text(row.outer_steps)
            if row.outer_steps_range and row.outer_steps_range[0] != row.outer_steps_range[1]:
                steps += " ({}–{})".format(*row.outer_steps_range)
            partial = f" (n = {value.count})" if value.count and counted else ""
            columns = {"method": row.method + (" ★" if row.winner else ""), "role": row.role}
            columns[name] = _texts(value, share) + partial
            if self.reference is not None and len(self.rows) > 1 and not self.unjudged:
                difference = (
                    "" if row.difference is None else _texts(row.difference, share, signed=True)
                )
                columns[f"− {self.reference}"] = difference
            columns |= {
                "recovered share": "" if row.recovered is None else str(row.recovered),
                "outer steps": steps,
                "oracle calls": _text(row.oracle_calls),
                "seconds": _text(row.seconds),
                "peak MiB": _text(row.peak_memory_bytes.scaled(2**-20)),
                "note": "; ".join([*counted, *row.notes]),
            }
            shown.append(columns)
        marks = (("role", ""), ("recovered share", ""), ("peak MiB", "–"), ("note", ""))
        empty = [name for name, mark in marks if all(row[name] == mark for row in shown)]
        return [{name: text for name, text in row.items() if name not in empty} for row in shown]


def is_share(metric: str) -> bool:
    """Whether the metric is a share of something, which people read in percent."""
    return "accuracy" in metric or metric.endswith(("_share", "f1"))


def _texts(interval: Interval, share: bool, *, signed: bool = False) -> str:
    return (
        "–"
        if interval.count == 0 or math.isnan(interval.mean)
        else spell(interval, share=share, signed=signed)
    )


def _text(interval: Interval) -> str:
    """The mean alone."""
    mean = interval.mean
    return "–" if math.isnan(mean) else f"{mean:.0f}" if 1000 <= abs(mean) < 1e15 else f"{mean:.4g}"


def table(
    runs: Mapping[str, Sequence[RunResult | StoredRun | Point]],
    metric: str,
    reference: str | None = None,
    *,
    task: str = "",
    higher_is_better: bool = True,
    failed: Mapping[str, int] | None = None,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> Table:
    """Means with 95 % t-intervals over seeds, and differences in ``metric`` within each seed,
    between all pairs of methods and to ``reference``: where methods are equal, the chance that the
    interval of any difference excludes zero is at most 5 %.

    ``runs`` are finished ones by the method's label; ``failed`` counts the others. A value that is
    NaN is left out of means and differences and counted; a method with undefined values or failed
    runs is never marked as the winner, and a method without any value is not one that others have
    to beat. Losses of a method whose x was not trained to the end (``untrained`` in its summary),
    and all metrics of x where θ weighs data sources, are shown and take no part in differences and
    verdicts. No winner is marked by fewer seeds than a claim needs.

    References come after the methods. A floor is one that others have to beat and no winner, a
    ceiling is neither. A method whose difference to the floor with the best mean does not exclude
    zero in its favour is noted as not ahead of it. Where ``validation-only`` and ``oracle-joint``
    are among the methods the others have a recovered share
    (:func:`hgms.results.recovered.recovered`); of several variants of one of these the one with the
    best mean counts.
    """
    points = {
        label: [run if isinstance(run, Point) else Point.of(run) for run in group]
        for label, group in runs.items()
    }
    failed = failed or {}
    notes = notes or {}
    finite = {
        label: {
            point.seed: point.metrics[metric]
            for point in group
            if math.isfinite(point.metrics.get(metric, math.nan))
        }
        for label, group in points.items()
    }
    whys = {
        label: next(filter(None, (point.unjudged(metric) for point in group)), "")
        for label, group in points.items()
    }
    values = {label: {} if whys[label] else by_seed for label, by_seed in finite.items()}
    roles = {
        label: next((point.role for point in group if point.role in ORDER), "")
        for label, group in points.items()
    }
    whole = {
        label
        for label, group in points.items()
        if group and len(values[label]) == len(group) and not failed.get(label)
    }
    pairs = compared(values, roles=roles)
    rivals = [label for label, by_seed in values.items() if by_seed and roles[label] != "ceiling"]
    methods = [label for label in rivals if not roles[label]]
    winner = _winner(pairs, methods, rivals, whole, higher_is_better)
    floor = _best(values, [label for label in rivals if roles[label]], higher_is_better)
    named = [
        [label for label, group in points.items() if group and group[0].method == name]
        for name in SCALE
    ]
    ends = [_best(values, labels, higher_is_better) for labels in named]
    rows = []
    for label in sorted(points, key=lambda label: ORDER.index(roles[label])):
        group = points[label]
        names = dict.fromkeys(name for point in group for name in point.metrics)
        remarks = list(notes.get(label, ()))
        ahead = None
        if whys[label]:
            # which is said of the whole table
            remarks += [f"no verdict: {whys[label]}"] * (whys[label] != UNJUDGED)
        elif floor is not None and label in methods:
            ahead = _ahead(pairs[label, floor], higher_is_better)
            remarks += [] if ahead else [_not_ahead(floor, pairs[label, floor], higher_is_better)]
        measured = (
            None not in ends and not any(label in labels for labels in named) and values[label]
        )
        steps = [point.outer_steps for point in group]
        rows.append(
            Row(
                method=label,
                metrics={
                    name: _defined(point.metrics.get(name, math.nan) for point in group)
                    for name in names
                },
                difference=pairs.get((label, reference), Interval.of([]))
                if reference and label != reference
                else None,
                outer_steps=Interval.of(steps),
                outer_steps_range=(min(steps), max(steps)) if steps else None,
                oracle_calls=Interval.of([point.oracle_calls for point in group]),
                seconds=_defined(point.seconds for point in group),
                peak_memory_bytes=_defined(point.peak_memory for point in group),
                undefined=len(group) - len(finite[label]),
                failed=failed.get(label, 0),
                winner=label == winner,
                notes=tuple(remarks),
                role=roles[label],
                ahead_of_floor=ahead,
                recovered=recovered(values[label], values[str(ends[0])], values[str(ends[1])])
                if measured
                else None,
            )
        )
    return Table(
        task=task,
        metric=metric,
        higher_is_better=higher_is_better,
        reference=reference,
        rows=rows,
        pairs=pairs,
        floor=floor,
        unjudged=UNJUDGED if UNJUDGED in whys.values() else "",
    )


def _defined(values: Iterable[float]) -> Interval:
    return Interval.of([value for value in values if math.isfinite(value)])


def _best(
    values: Mapping[str, Mapping[int, float]], labels: Sequence[str], higher: bool
) -> str | None:
    """The label with the best mean; None where none has a value."""
    means = {
        label: Interval.of(list(values[label].values())).mean for label in labels if values[label]
    }
    return max(means, key=lambda label: means[label] if higher else -means[label], default=None)


def _ahead(difference: Interval, higher: bool) -> bool:
    return difference.excludes_zero and (difference.mean > 0) == higher


def _winner(
    pairs: Mapping[tuple[str, str], Interval],
    methods: Sequence[str],
    rivals: Sequence[str],
    whole: set[str],
    higher: bool,
) -> str | None:
    """The method whose paired differences to all rivals exclude zero, in its favour, over as
    many seeds as a claim needs.
    """
    for label in methods:
        differences = [pairs[label, other] for other in rivals if other != label]
        enough = differences and all(difference.count >= CLAIM for difference in differences)
        if (
            label in whole
            and enough
            and all(_ahead(difference, higher) for difference in differences)
        ):
            return label
    return None


def _not_ahead(floor: str, difference: Interval, higher: bool) -> str:
    if difference.count < 2:
        return f"not ahead of {floor}: {'one seed' if difference.count else 'no seed in common'}"
    return f"worse than {floor}" if difference.excludes_zero else f"not ahead of {floor}"
