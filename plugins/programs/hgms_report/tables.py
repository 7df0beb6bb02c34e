"""The report's tables as values: which there are, what stands in every cell, and by what its column is sorted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from hgms_core import Budget
from hgms_report import mixture as mixtures
from hgms_report.mixture import Mixture
from hgms_report.study import Entry, Section, Study, carried_out
from hgms_results import Interval, StoredRun, is_share, spell
from hgms_run import difference, flatten

MINUS = "\N{MINUS SIGN}"
_METRICS = 4  # columns of metrics in the first table; all of them are in one of its own


@frozen
class Cell:
    """``sort`` is what a column is sorted by (None: last), ``note`` a remark beside the text."""

    text: str
    sort: float | str | None = None
    note: str = ""
    strong: bool = False
    number: bool = True


@frozen(kw_only=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    caption: str = ""
    ident: str = field(default="")
    groups: list[int] = field(factory=list)
    """Rows before which a line is drawn."""


def text(value: object) -> Cell:
    return Cell(str(value), str(value), number=False)


def amount(value: float | None, unit: float = 1.0) -> Cell:
    if value is None or math.isnan(value):
        return Cell("–" if value is None else "nan")
    scaled = value / unit
    whole = abs(scaled) < 1e15 and (abs(scaled) >= 1000 or scaled == round(scaled))
    return Cell(f"{scaled:,.0f}" if whole else f"{scaled:.4g}", value)


def interval(value: Interval | None, metric: str, *, signed: bool = False, note: str = "", strong: bool = False) -> Cell:
    if value is None or value.count == 0:
        return Cell("nan" if note else "–", note=note)
    shown = spell(value, share=is_share(metric), signed=signed)
    shown = MINUS + shown[1:] if shown.startswith("-") else shown
    return Cell(shown, None if math.isnan(value.mean) else value.mean, note, strong)


def heading(name: str) -> str:
    return name.replace("_", " ") + (" (%)" if is_share(name) else "")


def outcome(name: str) -> str:
    """How a linear solve ended, in words."""
    return name.replace("-", " ")


def arrow(section: Section, name: str) -> str:
    higher = section.directions.get(name)
    return heading(name) + ("" if higher is None else " ↑" if higher else " ↓")


# --- the tables --------------------------------------------------------------------------------------------------------


def overview(study: Study) -> Table:
    """Main metric by method and task; the methods in the order of their mean place."""
    places: dict[str, list[int]] = {}
    for section in study.sections:
        for place, entry in enumerate(section.entries):
            places.setdefault(entry.label, []).append(place)
    rows = []
    for label in sorted(study.labels, key=lambda label: sum(places[label]) / len(places[label])):
        row = [text(label)]
        for section in study.sections:
            found = next((entry for entry in section.entries if entry.label == label), None)
            value, note = (found.metrics[section.metric], found.mark) if found else (None, "")
            row.append(interval(value, section.metric, note=note, strong=label == section.winner))
        rows.append(row)
    columns = [f"{section.title}: {arrow(section, section.metric)}" for section in study.sections]
    caption = f"{_LEGEND} {DIFFERENCES}"
    return Table(title="All tasks", columns=["method", *columns], rows=rows, caption=caption, ident="overview")


_LEGEND = (
    "Mean ± half-width of the 95 % t-interval over seeds. Bold: ahead of every other method, each difference's interval "
    "excludes zero."
)
DIFFERENCES = (
    "Differences are paired by seed; their t-intervals are at the levels of Holm's rule over all pairs of methods: where "
    "methods are equal, the chance that any excludes zero is at most 5 %. ± 0, the same in every seed, tells nothing of chance."
)


def scores(section: Section, *, every: bool = False) -> Table:
    """Metrics by method, with the paired difference to the reference."""
    names = section.metrics if every else section.metrics[:_METRICS]
    base = section.reference if not every else None
    columns = ["method", arrow(section, section.metric)]
    columns += [f"{MINUS} {base}"] if base else []
    columns += [arrow(section, name) for name in names[1:]] + ["seeds"]
    rows = []
    for entry in section.entries:
        row = [Cell(entry.label, entry.label, note=entry.mark, number=False)]
        for name in names:
            bad = entry.nonfinite.get(name, 0)
            note = f"not finite in {bad} of {len(entry.runs)} seeds" if bad else ""
            strong = name == section.metric and entry.label == section.winner
            row.append(interval(entry.metrics[name], name, note=note, strong=strong))
            if name == section.metric and base:
                row.append(interval(entry.difference, name, signed=True))
        failed = f"{len(entry.failed)} failed" if entry.failed else ""
        row.append(Cell(str(len(entry.runs)), len(entry.runs), failed))
        rows.append(row)
    caption = _LEGEND + (f" “{MINUS} {base}”: difference to {base}." if base else "") + f" {DIFFERENCES}"
    title = "Every metric" if every else "Results"
    return Table(title=title, columns=columns, rows=rows, caption=caption, ident="metrics" if every else "results")


_COSTS = ("lower_gradients", "upper_values", "upper_gradients", "products", "cross_products")


def work(section: Section) -> Table:
    """Completed outer steps and what they cost."""
    memory = any(entry.peak_memory for entry in section.entries)
    columns = ["method", "outer steps", "min–max", "seconds", "oracle calls", *(heading(name) for name in _COSTS)]
    columns += ["peak memory (MiB)"] if memory else []
    rows = []
    for entry in section.entries:
        steps = entry.values("outer_steps")
        span = f"{min(steps):,.0f}–{max(steps):,.0f}" if steps else "–"
        row = [text(entry.label), amount(_mean(steps)), Cell(span, min(steps, default=None)), amount(_mean(entry.seconds))]
        row += [amount(_mean(entry.values(name))) for name in ("oracle_calls", *_COSTS)]
        row += [amount(_mean(entry.peak_memory), 2**20)] if memory else []
        rows.append(row)
    caption = "Means over seeds; min–max over seeds of the completed outer steps. Seconds are without evaluation."
    return Table(title="Outer steps and cost", columns=columns, rows=rows, caption=caption, ident="work")


def mixture(section: Section) -> Table:
    """Every method's largest sources at the end."""
    rows = []
    for entry in section.entries:
        found = section.mixtures.get(entry.label)
        if found is not None:
            rows.append(
                [
                    text(entry.label),
                    _largest(found),
                    Cell(f"{_rest(found):.3f}", _rest(found)),
                    Cell(str(len(found.finals)), len(found.finals)),
                ]
            )
    caption = (
        "The three largest weights of what each method returned: mean over seeds ± half-width of the 95 % t-interval. "
        "Rest: what the other sources hold together."
    )
    columns = ["method", "final source mixture", "rest", "seeds"]
    return Table(title="Final mixture", columns=columns, rows=rows, caption=caption, ident="mixture")


def _largest(found: Mixture) -> Cell:
    """Means say little of runs that do not agree, so that is noted."""
    leaders = found.leaders.most_common()
    note = ""
    if len(leaders) > 1 and not found.uniform:
        note = "largest by seed: " + ", ".join(f"{source} {count}×" for source, count in leaders)
    shown = mixtures.spelt(found)
    return Cell(shown, shown, note, number=False)


def _rest(found: Mixture) -> float:
    return 0.0 if found.uniform else abs(1 - math.fsum(value.mean for value in list(found.weights.values())[:3]))


def weights(section: Section) -> Table:
    """Every source's final weight, where the three largest are not all of them."""
    sources = list(dict.fromkeys(source for each in section.mixtures.values() for source in each.sources))
    shown = [entry.label for entry in section.entries if entry.label in section.mixtures]
    rows = []
    for source in sources if len(sources) > 3 else ():
        row = [text(source)]
        for label in shown:
            value = section.mixtures[label].weights.get(source)
            first = next(iter(section.mixtures[label].weights)) == source and not section.mixtures[label].uniform
            row.append(Cell("–") if value is None else Cell(mixtures.weight(value), value.mean, strong=first))
        rows.append(row)
    caption = "Mean over seeds ± half-width of the 95 % t-interval. Bold: the largest of its method."
    return Table(title="Final weights", columns=["source", *shown], rows=rows, caption=caption, ident="weights")


def passes(section: Section) -> Table:
    """Tokens and seconds of one outer step."""
    rows = []
    for entry in section.entries:
        if not (known := section.tokens.get(entry.label)):
            continue
        forward, backward = (_mean([each[side] for each in known.values()]) or 0.0 for side in (0, 1))
        seconds = _mean([each for run in known if (each := seconds_per_step(run)) is not None])
        rate = None if not seconds else (forward + backward) / seconds
        row = [
            text(entry.label),
            amount(_mean(entry.values("outer_steps"))),
            amount(seconds),
            amount(forward),
            amount(backward),
        ]
        rows.append([*row, amount(rate)])
    columns = ["method", "outer steps", "seconds per step", "tokens forward", "tokens backward", "tokens per second"]
    caption = (
        "Means over steps and seeds. Tokens include padding; one that goes through the model once forward and once backward "
        "counts in both columns. Seconds are without evaluation."
    )
    return Table(title="Tokens and seconds per outer step", columns=columns, rows=rows, caption=caption, ident="passes")


def seconds_per_step(run: StoredRun) -> float | None:
    steps = run.summary.get("outer_steps")
    return run.seconds / steps if steps and not math.isnan(run.seconds) else None


def ledgers(study: Study) -> list[Table]:
    """For each task with named sources: what every method made of every budget, a group of rows each."""
    tasks: dict[tuple[str, str | None], list[Section]] = {}
    for section in study.sections:
        if section.mixtures:
            tasks.setdefault((section.name, section.version), []).append(section)
    found = []
    for number, ((name, version), sections) in enumerate(tasks.items()):
        metrics = list(dict.fromkeys(each for section in sections for each in section.metrics))[:_METRICS]
        rows: list[list[Cell]] = []
        groups = []
        for section in sorted(sections, key=_length):
            groups += [len(rows)] if rows else []
            for entry in sorted(section.entries, key=lambda entry: entry.label):
                mixed = section.mixtures.get(entry.label)
                failed = f"{len(entry.failed)} failed" if entry.failed else ""
                row = [
                    Cell(entry.label, entry.label, failed, number=False),
                    Cell(_duration(section.budget), _length(section)[1]),
                ]
                row += [amount(_mean(entry.values("outer_steps")) if entry.runs else None)]
                row += [text("–") if mixed is None else _largest(mixed)]
                none = Interval.of([])
                row += [interval(entry.metrics.get(each, none), each, strong=_best(section, entry, each)) for each in metrics]
                rows.append(row)
        other = sum(key[0] == name for key in tasks) > 1
        found.append(
            Table(
                title=f"Budget ledger: {name}" + (f", version {version}" if other else ""),
                columns=[
                    "method",
                    "budget",
                    "outer steps",
                    "three largest weights",
                    *(arrow(sections[0], each) for each in metrics),
                ],
                rows=rows,
                caption="Means over seeds ± half-width of the 95 % t-interval. Bold: the best mean under that budget.",
                ident=f"ledger-{number}",
                groups=groups,
            )
        )
    return found


def _best(section: Section, entry: Entry, metric: str) -> bool:
    higher = section.directions.get(metric)
    means = [each.metrics[metric].mean for each in section.entries if metric in each.metrics]
    known = [mean for mean in means if not math.isnan(mean)]
    if higher is None or len(known) < 2 or metric not in entry.metrics:
        return False
    return entry.metrics[metric].mean == (max(known) if higher else min(known))


def _length(section: Section) -> tuple[int, float]:
    """What a budget counts, and how much of it: budgets in seconds come before those in steps and calls."""
    budget = Budget.parse(section.budget)
    amounts = [budget.seconds, budget.outer_steps, budget.oracle_calls]
    return next((kind, float(value)) for kind, value in enumerate(amounts) if value is not None)


def _duration(budget: str) -> str:
    """Long budgets in hours, as they are given.

    >>> _duration("32400 s"), _duration("90 s"), _duration("25 outer steps")
    ('9 h', '90 s', '25 outer steps')
    """
    seconds = Budget.parse(budget).seconds
    return f"{seconds / 3600:g} h" if seconds is not None and seconds >= 3600 and seconds % 900 == 0 else budget


def pairs(section: Section) -> Table:
    """Row − column in the main metric, paired by seed."""
    labels = [entry.label for entry in section.entries if entry.runs]
    rows = []
    for one in labels:
        row = [text(one)]
        for other in labels:
            value = section.pairs.get((one, other))
            row.append(Cell("·") if value is None else interval(value, section.metric, signed=True, strong=value.excludes_zero))
        rows.append(row)
    caption = (
        f"{heading(section.metric)}: row {MINUS} column, mean over the seeds both have ± half-width. Bold: the interval "
        f"excludes zero. {DIFFERENCES}"
    )
    return Table(title="Paired differences", columns=["method", *labels], rows=rows, caption=caption, ident="pairs")


def solves(section: Section) -> Table:
    """How the linear solves ended, for the methods that had any."""
    shown = [each for each in section.diagnoses if set(each.outcomes) - {"not-solved"}]
    outcomes = sorted({name for each in shown for name in each.outcomes})
    rows = [
        [text(each.label), *(amount(each.outcomes.get(name, 0)) for name in outcomes), amount(each.iterations)]
        for each in shown
    ]
    return Table(
        title="Linear solves",
        columns=["method", *map(outcome, outcomes), "median iterations"],
        rows=rows,
        caption="How the solves ended, counted over all steps of all seeds.",
        ident="solves",
    )


def settings(section: Section) -> Table:
    """The settings in which the methods differ."""
    shown = [(entry.label, _all_settings((entry.runs + entry.failed)[0])) for entry in section.entries]
    keys = difference([table for _, table in shown])
    flat = [flatten(table) for _, table in shown]
    rows = [[text(key), *(Cell(str(table.get(key, "·")), number=False) for table in flat)] for key in keys]
    columns = ["setting", *(label for label, _ in shown)]
    caption = "Only what differs between the methods; · where a method has no such setting."
    return Table(title="Settings", columns=columns, rows=rows, caption=caption, ident="settings")


def _all_settings(run: StoredRun) -> dict[str, Any]:
    return {**{f"method.{key}": value for key, value in run.method.items()}, "run": carried_out(run)}


def failures(study: Study) -> Table:
    rows = [
        [text(section.title), text(entry.label), amount(run.seed), text(run.error or "no reason was written"), text(run.path)]
        for section in study.sections
        for entry in section.entries
        for run in entry.failed
    ]
    return Table(title="Failed runs", columns=["task", "method", "seed", "reason", "folder"], rows=rows, ident="failed")


def left_out(study: Study) -> Table:
    rows = [[text(each.path), text(each.reason)] for each in study.skipped]
    return Table(title="Folders left out", columns=["folder", "reason"], rows=rows, ident="skipped")


def sweeps(study: Study) -> list[Table]:
    """The trials of every pilot sweep."""
    found = []
    for number, sweep in enumerate(study.sweeps):
        table = sweep.table
        trials = [each for each in table.get("trials") or [] if isinstance(each, dict)]
        keys = list(dict.fromkeys(key for each in trials for key in each.get("values") or {}))
        rows = []
        for each in trials:
            chosen = each.get("number") == table.get("chosen")
            loss = each.get("loss")
            count = number_of + 1 if isinstance(number_of := each.get("number"), int) else None  # people count from one
            row = [Cell(str(count or ""), count, "chosen" if chosen else "", chosen)]
            given = {**_given(table, keys), **(each.get("values") or {})}
            for key in keys:
                value = given.get(key, "·")
                row.append(amount(value) if isinstance(value, int | float) and not isinstance(value, bool) else text(value))
            row.append(Cell("failed") if loss is None else Cell(f"{loss:.5g}", loss, "", chosen))
            rows.append(row)
        caption = ", ".join(
            f"{key} {table[key]}" for key in ("sampler", "budget", "seeds", "note") if table.get(key) is not None
        )
        found.append(
            Table(
                title=f"{table.get('task', '?')}: {table.get('method', sweep.path.parent.name)}",
                columns=["trial", *keys, "validation loss ↓"],
                rows=rows,
                caption=caption,
                ident=f"sweep-{number}",
            )
        )
    return found


def _given(table: Any, keys: Sequence[str]) -> dict[str, Any]:
    """The first trial is the method's settings as given, of which the sweep's record holds the whole table."""
    given = table.get("given")
    flat = flatten(given) if isinstance(given, dict) else {}
    return {key: flat[key] for key in keys if key in flat}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


# --- what every report has ---------------------------------------------------------------------------------------------


def tables(section: Section) -> list[Table]:
    """A section's tables, in their order; those without a row are left out."""
    found = [scores(section), mixture(section), weights(section), work(section), passes(section), pairs(section)]
    if len(section.metrics) > _METRICS:
        found.append(scores(section, every=True))
    found += [solves(section), settings(section)]
    return [table for table in found if table.rows]


def summary(study: Study) -> str:
    """One line: how much was compared, and what was left out."""
    counts = [
        (len(study.runs), "run"),
        (len(study.sections), "task"),
        (len(study.labels), "method"),
    ]
    said = ", ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts)
    if study.failed:
        said += f"; {len(study.failed)} failed"
    if study.skipped:
        said += f"; {len(study.skipped)} folder{'s' * (len(study.skipped) != 1)} left out"
    return said + "."


def about(section: Section) -> str:
    seeds = sorted({run.seed for run in section.runs})
    version = f"version {section.version}" if section.version is not None else "version not recorded"
    better = "" if section.higher is None else f" ({'higher' if section.higher else 'lower'} is better)"
    return (
        f"Task {section.task}, {version}; budget {section.budget} per run; "
        f"{len(seeds)} seed{'s' * (len(seeds) != 1)}; {heading(section.metric)}{better}."
    )


__all__ = ["Cell", "Table", "about", "failures", "ledgers", "left_out", "overview", "summary", "sweeps", "tables"]
