"""Tables of finished runs of several methods.

They contain means over seeds, and differences within each seed.

All methods of one seed use the same data, split and start, so the differences are computed per
seed. Their intervals are intervals of paired samples, at the levels of Holm's rule over all pairs
of methods (:func:`hgms.results.statistics.paired_differences`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import field, frozen

from hgms.config import Budget
from hgms.results.forest import Forest
from hgms.results.recovery import Ratio, recovered_share
from hgms.results.statistics import (
    CLAIM,
    Interval,
    few_seeds,
    paired_differences,
    spell,
    with_failures,
)
from hgms.results.stored_run import StoredRun

DEFAULT_REFERENCES = ("uniform", "theta0")
"""Names of methods that leave θ at its start. The first name that is a method is the default
reference of differences.
"""

SCALE = ("validation-only", "oracle-joint")
"""The floor and the ceiling of the recovered share of the other methods."""

RECOVERED = (
    "recovered share: of the lead of oracle-joint over validation-only; 95 % interval "
    "by Fieller's theorem, paired by seed"
)
"""Description of the column of the recovered share."""

UNJUDGED = (
    "these metrics depend on how each method trained x, so they do not rank mixtures; use "
    "hgms mix compare, or --metric recovery_error if the task has a reference mixture"
)
"""Reason why metrics of x get no verdict on data sources, and the alternative. Such metrics rank
how x was trained, not the mixtures.
"""

OF_MIXTURE = ("recovery_error",)
"""Metrics of θ only, which measure the mixture independently of how x was trained."""

SEEN = ("train", "validation")
"""Rows of a metric (``metric_rows`` of a task) that methods may use: to train x, to select, or to
learn θ. A metric of such rows ranks no method.
"""

OVERSPENT = 1.1
"""Share of the budget above which a method gets a note and no star. The last step may end shortly
after the budget.
"""

ORDER = ("", "floor", "ceiling")
"""Order of the roles: methods before references, floors before ceilings."""


@frozen(kw_only=True)
class Point:
    """The data of one finished run that the statistics use.

    A metric that was not finite is NaN. ``role`` is "floor" for a trivial reference, and "ceiling"
    for a reference that uses the truth. ``spent`` is the used share of the budget, above 1 if the
    last step ended after the budget. ``compile_seconds`` are the seconds of compilation, which
    count toward no budget. ``reason`` states why the metrics get no verdict (empty: they get a
    verdict). ``reasons`` states the same for single metrics.
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
    def of(cls, run: StoredRun) -> Point:
        summary = run.summary
        steps = int(summary.get("outer_steps") or 0)
        calls = int(summary.get("oracle_calls") or 0)
        spent = Budget.parse(run.budget).share_of_limit(run.seconds, steps, calls)
        sources = any(name.startswith("weight.") for name in run.fields)
        # with data sources, metrics of other rows get no verdict either: UNJUDGED gives the
        # alternative
        used = {
            name: f"{name} is of {kind} rows, on which methods train x, select, or learn θ; use a "
            "metric of other rows"
            for name, kind in run.metric_rows.items()
            if kind in SEEN and not sources
        }
        return cls(
            seed=run.seed,
            metrics={
                name: math.nan if value is None else float(value)
                for name, value in (summary.get("metrics") or {}).items()
            },
            outer_steps=steps,
            oracle_calls=calls,
            seconds=run.seconds,
            compile_seconds=run.compile_seconds,
            peak_memory=float(run.resources.get("peak_memory_bytes") or math.nan),
            spent=1.0 if math.isnan(spent) else spent,  # no recorded clock
            method=run.method_name,
            role=str(summary.get("role") or ""),
            reason=str(summary.get("untrained") or "") or (UNJUDGED if sources else ""),
            reasons={**used, **dict.fromkeys((*OF_MIXTURE, *run.scores.get("metrics", ())), "")},
        )

    def why_unranked(self, metric: str) -> str:
        """Return why the metric cannot rank methods; empty if it can."""
        return self.reasons.get(metric, self.reason)


@frozen(kw_only=True)
class Cost:
    """The resources of one method's runs; intervals are over the seeds with a known value."""

    outer_steps: Interval
    outer_steps_range: tuple[int, int] | None
    oracle_calls: Interval
    seconds: Interval
    compile_seconds: Interval
    peak_memory_bytes: Interval

    @classmethod
    def of(cls, points: Sequence[Point]) -> Cost:
        """Compute the means over the runs of a method."""
        steps = [point.outer_steps for point in points]
        return cls(
            outer_steps=Interval.of(steps),
            outer_steps_range=(min(steps), max(steps)) if steps else None,
            oracle_calls=Interval.of([point.oracle_calls for point in points]),
            seconds=_interval_of(point.seconds for point in points),
            compile_seconds=_interval_of(point.compile_seconds for point in points),
            peak_memory_bytes=_interval_of(point.peak_memory for point in points),
        )


@frozen(kw_only=True)
class Row:
    """One method's row of a table.

    Intervals of metrics are over the seeds with a defined value. ``undefined`` counts the seeds
    whose primary metric is NaN, and ``failed`` the failed runs. ``difference`` is the paired
    difference to the reference method (``None`` for the reference itself).

    ``winner`` is true under two conditions: the intervals of the differences to all other methods
    and floors exclude zero, in favour of this method; and there are as many seeds as a claim needs.

    ``role`` is "floor" or "ceiling" for a reference. ``ahead_of_floor`` states whether the
    difference to the best floor excludes zero or is exact, in favour of this method (``None``:
    there is no floor, or this row is a reference). ``recovered`` is the recovered share, if it is
    defined.
    """

    method: str
    metrics: Mapping[str, Interval]
    difference: Interval | None
    cost: Cost
    undefined: int = 0
    failed: int = 0
    winner: bool = False
    notes: tuple[str, ...] = ()
    role: str = ""
    ahead_of_floor: bool | None = None
    recovered: Ratio | None = None

    def as_dict(self) -> dict[str, Any]:
        table = attrs.asdict(self, recurse=False)
        del table["cost"]
        return _plain(table | attrs.asdict(self.cost, recurse=False))


def _plain(value: Any) -> Any:
    """Return a field of a row as a JSON value; an interval over no values becomes null."""
    if isinstance(value, Interval):
        half = None if math.isnan(value.half_width) else value.half_width
        return {"mean": value.mean, "half_width": half, "n": value.count} if value.count else None
    if isinstance(value, Ratio):
        known = attrs.asdict(value)
        return {name: None if math.isnan(number) else number for name, number in known.items()}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


@frozen(kw_only=True)
class Table:
    """All methods on one task, then the references.

    ``pairs["a", "b"]`` is the paired difference a − b in the metric, for every two methods.
    ``higher_is_better`` is ``None`` if the better direction is unknown; then there are no verdicts.
    ``floor`` is the trivial reference with the best mean. ``unjudged`` states why the metric gets
    no verdict. ``percent`` states whether the metric is shown in percent.
    """

    task: str
    metric: str
    higher_is_better: bool | None
    reference: str | None
    rows: Sequence[Row]
    pairs: Mapping[tuple[str, str], Interval] = field(factory=dict, repr=False)
    floor: str | None = None
    unjudged: str = ""
    percent: bool = False

    def __str__(self) -> str:
        """Return the columns as text."""
        if not self.rows:
            return "no methods"
        rows = [{name: name for name in self.columns[0]}, *self.columns]
        width = {name: max(len(row[name]) for row in rows) for name in rows[0]}
        lines = ["  ".join(row[name].ljust(width[name]) for name in width).rstrip() for row in rows]
        for group in reversed(self.groups):
            lines.insert(group + 1, "─" * max(map(len, lines)))
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def winner(self) -> str | None:
        return next((row.method for row in self.rows if row.winner), None)

    @property
    def references(self) -> list[str]:
        """The methods that are references."""
        return [row.method for row in self.rows if row.role]

    @property
    def groups(self) -> list[int]:
        """The rows before which a line is drawn, to separate the references."""
        roles = [bool(row.role) for row in self.rows]
        return [roles.index(True)] if True in roles[1:] and not roles[0] else []

    @property
    def remarks(self) -> list[str]:
        """Remarks on the whole table.

        They state that its metric gets no verdict, how failed seeds count, that no method
        outperforms the best floor, and that there are few seeds.
        """
        lines = [self.unjudged] if self.unjudged else []
        lost = any(row.failed or row.undefined for row in self.rows)
        if lost and self.pairs and not self.unjudged:
            lines.append(FAILED)
        judged = [row for row in self.rows if row.ahead_of_floor is not None]
        if judged and not any(row.ahead_of_floor for row in judged):
            lines.append(
                f"no method is better than {self.floor}, the best baseline without learning"
            )
        return [*lines, self.few_seeds] if self.few_seeds else lines

    @property
    def few_seeds(self) -> str:
        """The remark that there are too few seeds for a claim.

        Empty if there are enough seeds, or if no methods are compared.
        """
        counts = [row.metrics[self.metric].count for row in self.rows if self.metric in row.metrics]
        judged = self.higher_is_better is not None and len(self.rows) > 1
        return few_seeds(max(counts)) if judged and any(counts) else ""

    @property
    def forest(self) -> Forest | None:
        """The differences to the reference, methods before references, best mean first.

        If the reference has no differences, the first method with differences is the reference.
        The result is ``None`` if there is nothing to compare.
        """
        ranked = sorted(self.rows, key=lambda row: (ORDER.index(row.role), *self.rank(row)))
        known = {a for (a, _), pair in self.pairs.items() if pair.count}
        labels = [row.method for row in ranked if row.method in known]
        if not labels:
            return None
        base = self.reference if self.reference in known else labels[0]
        return Forest(
            title=self.task,
            metric=self.metric.replace("_", " "),
            share=self.percent,
            higher=self.higher_is_better,
            reference=base,
            differences={
                label: None if label == base else self.pairs.get((label, base), Interval.of([]))
                for label in labels
            },
            winner=self.winner,
        )

    def rank(self, row: Row) -> tuple[bool, float]:
        """Return a sort key by the mean of the metric: the best first, undefined means last.

        Without a better direction, the order is unchanged.
        """
        mean = row.metrics[self.metric].mean if self.metric in row.metrics else math.nan
        if math.isnan(mean) or self.higher_is_better is None:
            return math.isnan(mean), 0.0
        return False, -mean if self.higher_is_better else mean

    def as_dict(self) -> dict[str, Any]:
        names = ("task", "metric", "higher_is_better", "reference", "winner", "floor")
        table = {name: getattr(self, name) for name in names}
        return {**table, "methods": [row.as_dict() for row in self.rows]}

    @property
    def columns(self) -> list[dict[str, str]]:
        """The rows as text, for a terminal.

        A metric whose name contains share or accuracy is shown in percent if all its values are in
        [0, 1].
        """
        share = self.percent
        arrow = {True: " ↑", False: " ↓", None: ""}[self.higher_is_better]
        name = self.metric.replace("_", " ") + " (%)" * share + arrow
        shown = []
        for row in self.rows:
            value = row.metrics.get(self.metric, Interval.of([]))
            counted = [
                f"{count} {what}"
                for count, what in ((row.failed, "failed"), (row.undefined, "NaN"))
                if count
            ]
            steps = _text(row.cost.outer_steps)
            low, high = row.cost.outer_steps_range or (0, 0)
            steps += f" ({low}–{high})" if low != high else ""
            partial = f" (n = {value.count})" if value.count and counted else ""
            columns = {"method": row.method + (" ★" if row.winner else ""), "role": row.role}
            columns[name] = _texts(value, share) + partial
            if self.reference is not None and len(self.rows) > 1 and not self.unjudged:
                columns[f"− {self.reference}"] = (
                    "" if row.difference is None else _texts(row.difference, share, signed=True)
                )
            columns |= {
                "recovered share": "" if row.recovered is None else str(row.recovered),
                "outer steps": steps,
                "oracle calls": _text(row.cost.oracle_calls),
                "seconds": _text(row.cost.seconds),
                "compile seconds": _text(row.cost.compile_seconds),
                "peak MiB": _text(row.cost.peak_memory_bytes.scale(2**-20)),
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
"""Note on how seeds without a value count."""


def is_share(metric: str, values: Iterable[float]) -> bool:
    """Return whether to show a metric in percent.

    It is shown in percent if it has a share's name and its values are in [0, 1].

    Examples
    --------
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
    """Format only the mean."""
    mean = interval.mean
    return "–" if math.isnan(mean) else f"{mean:.0f}" if 1000 <= abs(mean) < 1e15 else f"{mean:.4g}"


def table(
    runs: Mapping[str, Sequence[StoredRun | Point]],
    metric: str,
    reference: str | None = None,
    *,
    task: str = "",
    higher_is_better: bool | None = True,
    failed: Mapping[str, Collection[int]] | None = None,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> Table:
    """Compute means over seeds, and paired differences in ``metric``.

    Means have 95 % t-intervals.

    Differences are computed within each seed, between all pairs of methods and to ``reference``. If
    all methods are equal, the chance that any interval of a difference excludes zero is at most 5
    %.

    ``runs`` contains the finished runs by method label; ``failed`` contains the seeds of the failed
    runs. ``higher_is_better=None`` is for a metric whose better direction is unknown. Its worst
    value is then unknown, so undefined values are excluded and failed seeds do not count. Means are
    over the defined values. In differences, the best floor and the recovered share, a failed seed
    or a NaN value counts against the method (:func:`hgms.results.statistics.against_failures`).

    A method with undefined values or failed runs is never marked as the winner. A winner need not
    outperform a method without any value. A difference that is the same in every seed is exact: it
    has no interval and counts by its sign. A method that exceeded the budget by more than 10 % gets
    a note and is not marked (the last step may end after the budget). No winner is marked with
    fewer seeds than a claim needs.

    Three kinds of metrics are shown, but are excluded from differences and verdicts:

    - losses of a method whose x was not trained to the end (``untrained`` in its summary),
    - metrics of rows that methods use (``metric_rows`` of the task),
    - all metrics of x if θ weights data sources.

    References follow the methods. A winner must outperform every floor, and a floor is never a
    winner. A ceiling is not compared with other methods and cannot win. A method gets a note if
    its difference to the floor with the best mean does not exclude zero in its favour.

    If ``validation-only`` and ``oracle-joint`` are in the table, the other methods have a
    recovered share (:func:`hgms.results.recovered_share`). If one of these two has several
    variants, the variant with the best mean counts.
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
        label: next(filter(None, (point.why_unranked(metric) for point in group)), "")
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
    pairs = paired_differences(judged, roles=roles, higher=higher_is_better)
    rivals = [label for label, by_seed in values.items() if by_seed and roles[label] != "ceiling"]
    methods = [label for label in rivals if not roles[label]]
    judged_at_all = higher_is_better is not None
    winner = _winner(pairs, methods, rivals, whole, higher) if judged_at_all else None
    floors = [label for label in rivals if roles[label] and judged_at_all]
    floor = _best(values, floors, higher)
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
            if whys[label] != of_all:  # else a remark on the whole table states this reason
                remarks.append(f"no verdict: {whys[label]}")
        elif floor is not None and label in methods:
            ahead = _ahead(pairs[label, floor], higher)
            remarks += _on_floor(floor, pairs[label, floor], ahead=ahead)
        if (spent := _overspent(group)) > OVERSPENT:
            remarks.append(f"spent {spent:.2g} times the budget")
        scaled = None not in ends and not any(label in labels for labels in named) and values[label]
        rows.append(
            Row(
                method=label,
                metrics={
                    name: _interval_of(point.metrics.get(name, math.nan) for point in group)
                    for name in names
                },
                difference=pairs.get((label, reference), Interval.of([]))
                if reference and label != reference
                else None,
                cost=Cost.of(group),
                undefined=undefined[label],
                failed=len(failed.get(label, ())),
                winner=label == winner,
                notes=tuple(remarks),
                role=roles[label],
                ahead_of_floor=ahead,
                recovered=recovered_share(
                    values[label], values[str(ends[0])], values[str(ends[1])], higher=higher
                )
                if scaled
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
        unjudged=of_all,
        percent=percent,
    )


def _finite(values: Mapping[int, float]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _of_all(whys: Iterable[str]) -> str:
    """Return the reason that applies to every method of the table.

    Without a common reason, the text is empty. UNJUDGED takes precedence over reasons of single
    methods, such as an untrained x.
    """
    reasons = set(whys)
    if UNJUDGED in reasons:
        return UNJUDGED
    return reasons.pop() if len(reasons) == 1 else ""


def _overspent(points: Sequence[Point]) -> float:
    """Compute the mean share of the budget that a method's runs used."""
    return Interval.of([point.spent for point in points]).mean if points else 0.0


def _interval_of(values: Iterable[float]) -> Interval:
    return Interval.of([value for value in values if math.isfinite(value)])


def _best(
    values: Mapping[str, Mapping[int, float]], labels: Sequence[str], higher: bool
) -> str | None:
    """Return the label with the best mean; ``None`` if no label has a value."""
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
    """Return the method whose paired differences to all rivals are in its favour.

    Each difference must exclude zero or be exact, over as many seeds as a claim needs.
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
    """Return the notes on a method's difference to the best floor.

    The list is empty if the interval excludes zero in favour of the method.
    """
    if difference.count < 2:
        return [
            f"not better than {floor}: {'one seed' if difference.count else 'no seed in common'}"
        ]
    if difference.exact:
        if difference.mean == 0:
            return [f"equal to {floor} in every seed"]
        return [f"{'better' if ahead else 'worse'} than {floor} by the same in every seed"]
    if ahead:
        return []
    return [f"worse than {floor}" if difference.excludes_zero else f"not better than {floor}"]
