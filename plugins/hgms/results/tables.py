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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import field, frozen

from hgms.adapters import as_text
from hgms.config import Budget
from hgms.results.forest import Forest, notebook_html
from hgms.results.recovered import Ratio, recovered
from hgms.results.statistics import CLAIM, Interval, compared, few_seeds, spell, with_failures
from hgms.results.stored import StoredRun
from hgms.runs import RunResult

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

SEEN = ("train", "validation")
"""The rows of a metric (``metric_rows`` of a task) that methods may use: they train x on them,
select by them, or learn θ on them. Such a metric ranks no method.
"""

OVERSPENT = 1.1
"""The share of its budget beyond which a method gets a note and no star: the last step may end a
little after the budget.
"""

ORDER = ("", "floor", "ceiling")
"""Methods before references, floors before ceilings."""


@frozen(kw_only=True)
class Point:
    """What the statistics look at of one finished run. A metric that was not finite is NaN.
    ``role`` is "floor" for a trivial reference, "ceiling" for one that knows the truth. ``spent``
    is the share of its budget, above 1 if the last step ended after it. ``compile_seconds`` are
    the seconds of compilation, which are part of no budget. ``reason`` is why its metrics get no
    verdict (empty: they get one), ``reasons`` the same for single metrics.
    """

    seed: int
    metrics: Mapping[str, float]
    outer_steps: int
    oracle_calls: int
    seconds: float
    compile_seconds: float = 0.0
    peak_memory: float = math.nan
    spent: float = 1.0
    method: str = ""
    role: str = ""
    reason: str = ""
    reasons: Mapping[str, str] = field(factory=dict)

    @classmethod
    def of(cls, run: RunResult | StoredRun) -> Point:
        summary = run.summary
        metrics = run.summary.get("metrics") or {}
        fields: Iterable[str] = (
            run.fields() if isinstance(run, StoredRun) else [*run.records[:1], {}][0]
        )
        method = run.method_name if isinstance(run, StoredRun) else run.info.method
        budget = Budget.parse(run.budget) if isinstance(run, StoredRun) else run.info.budget
        steps = int(summary.get("outer_steps") or 0)
        calls = int(summary.get("oracle_calls") or 0)
        sources = any(name.startswith("weight.") for name in fields)
        rows = run.metric_rows if isinstance(run, StoredRun) else {}
        later = run.scores.get("metrics", ()) if isinstance(run, StoredRun) else ()
        # with data sources metrics of other rows get no verdict either: UNJUDGED says what to do
        used = {
            name: _of_rows(name, kind)
            for name, kind in rows.items()
            if kind in SEEN and not sources
        }
        return cls(
            seed=run.seed if isinstance(run, StoredRun) else run.info.seed,
            metrics={
                name: math.nan if value is None else float(value) for name, value in metrics.items()
            },
            outer_steps=steps,
            oracle_calls=calls,
            seconds=run.seconds,
            compile_seconds=run.compile_seconds,
            peak_memory=float(
                (run.resources.get("peak_memory_bytes") if isinstance(run, StoredRun) else None)
                or math.nan
            ),
            spent=_spent(budget, run.seconds, steps, calls),
            method=method,
            role=str(summary.get("role") or ""),
            reason=str(summary.get("untrained") or "") or (UNJUDGED if sources else ""),
            reasons={**used, **dict.fromkeys((*OF_MIXTURE, *later), "")},
        )

    def unjudged(self, metric: str) -> str:
        """Why the metric says nothing of who is ahead; empty where it does."""
        return self.reasons.get(metric, self.reason)


def _of_rows(metric: str, rows: str) -> str:
    return (
        f"{metric} is of {rows} rows, on which methods train x, select, or learn θ; compare by a "
        "metric of other rows"
    )


def _spent(budget: Budget, seconds: float, steps: int, calls: int) -> float:
    """The share of the budget, above 1 if more was spent; 1 if the clock was not written."""
    pairs = ((budget.seconds, seconds), (budget.outer_steps, steps), (budget.oracle_calls, calls))
    [share] = [amount / limit for limit, amount in pairs if limit is not None]
    return 1.0 if math.isnan(share) else share


@frozen(kw_only=True)
class Row:
    """One method's line of a table.

    Intervals of metrics are over the seeds whose value is defined; ``undefined`` counts those whose
    primary metric is NaN, ``failed`` the runs that did not end well. ``difference`` is to the
    reference method, seed by seed (None for the reference itself), ``winner`` whether the intervals
    of its differences to all other methods and floors exclude zero, in its favour, over as many
    seeds as a claim needs. ``role`` is "floor" or "ceiling" for a reference, ``ahead_of_floor``
    whether its difference to the best floor excludes zero or is exact, in its favour (None: there
    is no floor, or it is a reference itself), ``recovered`` the recovered share where there is one.
    """

    method: str
    metrics: Mapping[str, Interval]
    difference: Interval | None
    outer_steps: Interval
    outer_steps_range: tuple[int, int] | None
    oracle_calls: Interval
    seconds: Interval
    compile_seconds: Interval
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
    ``unjudged`` says why the metric gets no verdict; ``percent`` whether it is shown in percent.
    """

    task: str
    metric: str
    higher_is_better: bool
    reference: str | None
    rows: Sequence[Row]
    pairs: Mapping[tuple[str, str], Interval] = field(factory=dict, repr=False)
    floor: str | None = None
    unjudged: str = ""
    percent: bool = False

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
        """Remarks on the whole table: that its metric gets no verdict, how failed seeds count, that
        no method is ahead of the best floor, that there are few seeds.
        """
        lines = [self.unjudged] * bool(self.unjudged)
        lost = any(row.failed or row.undefined for row in self.rows)
        if lost and self.pairs and not self.unjudged:
            lines.append(FAILED)
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
            share=self.percent,
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
        percent if all its values are in [0, 1].
        """
        share = self.percent
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
                "compile seconds": _text(row.compile_seconds),
                "peak MiB": _text(row.peak_memory_bytes.scaled(2**-20)),
                "note": "; ".join([*counted, *row.notes]),
            }
            shown.append(columns)
        marks = (
            ("role", ("",)),
            ("recovered share", ("",)),
            ("compile seconds", ("0", "–")),
            ("peak MiB", ("–",)),
            ("note", ("",)),
        )
        empty = [name for name, texts in marks if all(row[name] in texts for row in shown)]
        return [{name: text for name, text in row.items() if name not in empty} for row in shown]


FAILED = "a failed or NaN seed counts against its method, as the worst value of the table"
"""How seeds without a value count."""


def is_share(metric: str, values: Iterable[float]) -> bool:
    """Whether to show a metric in percent: its name is that of a share, and its values are in
    [0, 1].

    >>> is_share("test_accuracy", [0.25, 1.0]), is_share("test_accuracy", [25.0, 100.0])
    (True, False)
    """
    named = "accuracy" in metric or metric.endswith(("_share", "f1"))
    return named and all(0 <= value <= 1 for value in values if math.isfinite(value))


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
    higher_is_better: bool | None = True,
    failed: Mapping[str, Collection[int]] | None = None,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> Table:
    """Means with 95 % t-intervals over seeds, and differences in ``metric`` within each seed,
    between all pairs of methods and to ``reference``: where methods are equal, the chance that the
    interval of any difference excludes zero is at most 5 %.

    ``runs`` are finished ones by the method's label; ``failed`` has the seeds of the others.
    ``higher_is_better=None`` is for a metric whose better direction is unknown: nothing is known of
    its worst value, so undefined values are excluded and failed seeds do not count. Means
    are over the defined values. In differences, the best floor and the recovered share, a failed
    seed and one whose value is NaN count against the method
    (:func:`hgms.results.statistics.against_failures`). A method with undefined values or failed
    runs is never marked as the winner, and a method without any value is not one that others have
    to beat. A difference that is the same in every seed is exact: it has no interval and counts by
    its sign. A method that spent more than the budget (by 10 %: the last step may end after it)
    gets a note and is not marked. Losses of a method whose x was not trained to the end
    (``untrained`` in its summary), metrics of rows that methods use (``metric_rows`` of the task),
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
    measured = {
        label: {point.seed: point.metrics.get(metric, math.nan) for point in group}
        for label, group in points.items()
    }
    percent = is_share(metric, (value for own in measured.values() for value in own.values()))
    whys = {
        label: next(filter(None, (point.unjudged(metric) for point in group)), "")
        for label, group in points.items()
    }
    of_all = _of_all(why for label, why in whys.items() if points[label])
    judged = {label: {} if whys[label] else dict(own) for label, own in measured.items()}
    higher = higher_is_better is not False
    for label, seeds in failed.items():
        if any(map(math.isfinite, judged.get(label, {}).values())):
            judged[label] = {**dict.fromkeys(seeds, math.nan), **judged[label]}
    values = (
        {label: _finite(own) for label, own in judged.items()}
        if higher_is_better is None
        else with_failures(judged, higher)
    )
    undefined = {
        label: sum(not math.isfinite(value) for value in by_seed.values())
        for label, by_seed in measured.items()
    }
    roles = {
        label: next((point.role for point in group if point.role in ORDER), "")
        for label, group in points.items()
    }
    whole = {
        label
        for label, group in points.items()
        if group
        and not undefined[label]
        and not failed.get(label)
        and _overspent(group) <= OVERSPENT
    }
    pairs = compared(judged, roles=roles, higher=higher_is_better)
    rivals = [label for label, by_seed in values.items() if by_seed and roles[label] != "ceiling"]
    methods = [label for label in rivals if not roles[label]]
    winner = _winner(pairs, methods, rivals, whole, higher)
    floor = _best(values, [label for label in rivals if roles[label]], higher)
    named = [
        [label for label, group in points.items() if group and group[0].method == name]
        for name in SCALE
    ]
    ends = [_best(values, labels, higher) for labels in named]
    rows = []
    for label in sorted(points, key=lambda label: ORDER.index(roles[label])):
        group = points[label]
        names = dict.fromkeys(name for point in group for name in point.metrics)
        remarks = list(notes.get(label, ()))
        ahead = None
        if whys[label]:
            # which is said of the whole table
            remarks += [f"no verdict: {whys[label]}"] * (whys[label] != of_all)
        elif floor is not None and label in methods:
            ahead = _ahead(pairs[label, floor], higher)
            remarks += _on_floor(floor, pairs[label, floor], ahead=ahead)
        if (spent := _overspent(group)) > OVERSPENT:
            remarks.append(f"spent {spent:.2g} times the budget")
        scaled = None not in ends and not any(label in labels for labels in named) and values[label]
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
                compile_seconds=_defined(point.compile_seconds for point in group),
                peak_memory_bytes=_defined(point.peak_memory for point in group),
                undefined=undefined[label],
                failed=len(failed.get(label, ())),
                winner=label == winner,
                notes=tuple(remarks),
                role=roles[label],
                ahead_of_floor=ahead,
                recovered=recovered(
                    values[label], values[str(ends[0])], values[str(ends[1])], higher=higher
                )
                if scaled
                else None,
            )
        )
    return Table(
        task=task,
        metric=metric,
        higher_is_better=higher,
        reference=reference,
        rows=rows,
        pairs=pairs,
        floor=floor,
        unjudged=of_all,
        percent=percent,
    )


def _finite(values: Mapping[int, float]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _of_all(whys: Iterable[str]) -> str:
    """The reason that holds for every method of the table, rather than for one whose x is
    untrained.
    """
    reasons = set(whys)
    if UNJUDGED in reasons:
        return UNJUDGED
    return reasons.pop() if len(reasons) == 1 else ""


def _overspent(points: Sequence[Point]) -> float:
    """The mean share of the budget that the runs of a method spent."""
    return Interval.of([point.spent for point in points]).mean if points else 0.0


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
    apart = difference.excludes_zero or (difference.exact and difference.mean != 0)
    return apart and (difference.mean > 0) == higher


def _winner(
    pairs: Mapping[tuple[str, str], Interval],
    methods: Sequence[str],
    rivals: Sequence[str],
    whole: set[str],
    higher: bool,
) -> str | None:
    """The method whose paired differences to all rivals exclude zero or are exact, in its favour,
    over as many seeds as a claim needs.
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


def _on_floor(floor: str, difference: Interval, *, ahead: bool) -> list[str]:
    """What to note of a method's difference to the best floor; nothing if its interval excludes
    zero in its favour.
    """
    if difference.count < 2:
        return [f"not ahead of {floor}: {'one seed' if difference.count else 'no seed in common'}"]
    if difference.exact:
        if difference.mean == 0:
            return [f"equal to {floor} in every seed"]
        return [f"{'better' if ahead else 'worse'} than {floor} by the same in every seed"]
    if ahead:
        return []
    return [f"worse than {floor}" if difference.excludes_zero else f"not ahead of {floor}"]
