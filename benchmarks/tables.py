"""Write the tables of docs/reference/benchmarks*.md and the table of the project's README.

The sources are the raw records in benchmarks/results, and benchmarks/published_figures.toml:

    python benchmarks/tables.py
            write the tables into the pages, and draw the pictures
    python benchmarks/tables.py --check
            list the tables that differ from the records; status 1
    python benchmarks/tables.py runs cleaning runs/paper/cleaning
            store the runs below a folder as results/cleaning.parquet
    python benchmarks/tables.py runs demo hgms-demo/runs
            store the runs of `hgms demo`, for the README
    python benchmarks/tables.py runs cleaning more-runs --add
            add to the stored runs: a campaign may be run in parts
    python benchmarks/tables.py figures methods methods.json
            store the --json of a bench script as results/methods.parquet

A file of runs has a row per run: every metric, setting, cost and the environment.
``NAME.curves.parquet`` contains the main metric at each evaluation. A file of figures has a row
per number. speed.py and bench_scaling.py write ``speed.json`` and ``scaling.json``. On the page, a
table is between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. A table without records
has a sentence instead.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow
from attrs import frozen
from pyarrow import parquet

import hgms.report as report
from hgms.plugins import Registry
from hgms.report.parquet import runs_file
from hgms.results import recovered_share
from hgms.results.statistics import Interval, paired_differences, paired_interval, spell

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where this file was loaded by its path
import claims
import published_figures

sys.path.insert(0, str(Path(__file__).resolve().parent / "tune"))
import tune_tables
import zoo_tables

ROOT = Path(__file__).resolve().parents[1]
FRONT = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = tuple(sorted((ROOT / "docs" / "reference").glob("benchmarks*.md")))
MARKED = re.compile(
    r"(?<=<!-- table: )([a-z0-9-]+)( -->\n)(.*?)(?=<!-- end of table -->)", re.DOTALL
)
DEMO = re.compile(r"(?<=<!-- demo -->\n)(.*?)(?=<!-- end of demo -->)", re.DOTALL)

# --- keeping records
# --------------------------------------------------------------------------------------------------


def keep_runs(name: str, folders: Sequence[Path], *, add: bool = False) -> list[Path]:
    """Store one row per run below the folders, and the points of its curves.

    Local paths are excluded. ``add``: keep the stored runs; a new run replaces a stored run of the
    same task, method and seed.
    """
    study = report.build(folders)
    for skipped_run in study.skipped:
        print(f"skipped: {skipped_run.path}: {skipped_run.reason}", file=sys.stderr)
    table = parquet.read_table(io.BytesIO(runs_file(study))).drop_columns(["folder"])
    points = []
    stored = [
        run
        for section in study.sections
        for entry in section.entries
        for run in entry.runs + entry.failed
    ]
    facts: dict[str, list[Any]] = {}
    for run in stored:
        own = {"cost." + key: value for key, value in (run.summary.get("cost") or {}).items()}
        own |= {
            "environment." + key: run.environment.get(key)
            for key in ("python", "platform", "processor", "threads", "git")
        }
        own |= {
            "environment." + key: run.environment["versions"].get(key)
            for key in ("hgms", "torch", "numpy")
        }
        for key, value in own.items():
            facts.setdefault(key, [None] * len(stored))[len(points)] = value
        metric = f"metric.{next(iter(run.higher_is_better))}"
        columns = run.columns(["seconds", "oracle_calls", metric])
        points.append(
            [
                {
                    "task": run.task_label,
                    "method": run.label,
                    "seed": run.seed,
                    "step": int(step),
                    "seconds": seconds,
                    "oracle_calls": calls,
                    metric: value,
                }
                for step, seconds, calls, value in zip(*columns.values(), strict=True)
                if math.isfinite(value)
            ]
        )
    for key, values in facts.items():
        table = table.append_column(key, pyarrow.array(values))
    every = [point for own in points for point in own]
    # tasks of one study may have different metrics
    names = dict.fromkeys(name for point in every for name in point)
    curves = pyarrow.Table.from_pylist(
        [{name: point.get(name) for name in names} for point in every]
    )
    return [_written(name, table, add), _written(f"{name}.curves", curves, add)]


def keep_figures(name: str, path: Path) -> list[Path]:
    """Store one row per number of a JSON file, under the keys that lead to it, with the file's
    texts in every row.
    """
    figures = json.loads(path.read_text(encoding="utf-8"))
    about = {key: str(value) for key, value in figures.items() if not isinstance(value, Mapping)}
    rows = [
        {**about, "case": case, "quantity": quantity, "value": value}
        for case, numbers in figures.items()
        if isinstance(numbers, Mapping)
        for quantity, value in _flat(numbers)
    ]
    if not rows:
        raise SystemExit(f"{path} contains no table of numbers")
    return [_written(name, pyarrow.Table.from_pylist(rows))]


def _flat(table: Mapping[str, Any], above: str = "") -> list[tuple[str, float]]:
    values = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            values += _flat(value, f"{above}{key}: ")
        elif not isinstance(value, str):
            values.append((above + key, float(value)))
    return values


RUN = ("task", "method", "seed")
"""The columns that identify the rows of a run."""


def _written(name: str, table: pyarrow.Table, add: bool = False) -> Path:
    path = RESULTS / f"{name}.parquet"
    path.parent.mkdir(exist_ok=True)
    if add and path.exists():
        before = parquet.read_table(path)
        new = set(zip(*(table[key].to_pylist() for key in RUN), strict=True))
        others = [
            run not in new for run in zip(*(before[key].to_pylist() for key in RUN), strict=True)
        ]
        table = pyarrow.concat_tables(
            [before.filter(pyarrow.array(others)), table], promote_options="permissive"
        )
    parquet.write_table(table, path, compression="zstd")
    return path


# --- tables
# --------------------------------------------------------------------------------------------------

Values = Mapping[str, Mapping[int, float]]
"""A metric of each method, by seed."""


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the finished runs of a file of records, or an empty list without the file."""
    path = RESULTS / f"{name}.parquet"
    return _read(path, path.stat().st_mtime_ns) if path.exists() else []


@lru_cache
def _read(path: Path, _changed: int) -> list[dict[str, Any]]:
    return [
        row for row in parquet.read_table(path).to_pylist() if row.get("status", "done") == "done"
    ]


def roles_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the role of each method in comparisons: "floor", "ceiling" or empty."""
    own = {
        component.name: str(getattr(component.target, "role", ""))
        for component in Registry.load().components("method")
    }
    return {row["method"]: row.get("role") or own.get(row["method_name"], "") for row in rows}


def values_of(
    rows: Sequence[Mapping[str, Any]], task: str, metric: str
) -> dict[str, dict[int, float]]:
    by_seed: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["task"] == task:
            by_seed.setdefault(row["method"], {})[row["seed"]] = row[f"metric.{metric}"]
    return by_seed


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def mean(values: Mapping[int, float]) -> str:
    return spell(Interval.of(list(values.values())), share=True)


def difference(
    values: Values, method: str, other: str, holm: Mapping[tuple[str, str], Interval]
) -> str:
    """Return method − other with the interval of this pair; bold if Holm's rule over all pairs
    excludes zero.
    """
    shown = spell(paired_interval(values[method], values[other]), share=True, signed=True)
    return f"**{shown}**" if holm[method, other].excludes_zero else shown


RATES = ("0.4", "0.6", "0.8")
REFERENCES = ("uniform", "validation-only", "uniform-tilted", "oracle-clean", "oracle-joint")


def cleaning() -> tuple[list[dict[str, Any]], dict[str, dict[str, dict[int, float]]], list[str]]:
    """Return the rows, the test accuracies by corruption rate, and the methods, with those that
    learn θ first.
    """
    rows = rows_of("cleaning")
    values = {rate: values_of(rows, f"cleaning-{rate}", "test_accuracy") for rate in RATES}
    values = {rate: by_method for rate, by_method in values.items() if by_method}
    names = dict.fromkeys(row["method"] for row in rows)
    return rows, values, sorted(names, key=lambda name: (name in REFERENCES, *_best(values, name)))


def _best(values: Mapping[str, Values], name: str) -> tuple[float, str]:
    hardest = values[max(values)].get(name, {0: 0.0})
    return -sum(hardest.values()) / len(hardest), name


def cleaning_accuracy() -> str:
    rows, values, names = cleaning()
    table = []
    for name in names:
        steps = [row["outer_steps"] for row in rows if row["method"] == name]
        cells = [
            mean(by_method[name]) if name in by_method else "–" for by_method in values.values()
        ]
        table.append([f"`{name}`", *cells, f"{min(steps)}–{max(steps)}"])
    return markdown(["method", *(f"ρ = {rate}" for rate in values), "outer steps (min–max)"], table)


def cleaning_references() -> str:
    """Compare each method with the references, the highest rate first."""
    references = ("uniform", "uniform-tilted", "validation-only")
    table = []
    rows, by_rate, _ = cleaning()
    for rate, values in sorted(by_rate.items(), reverse=True):
        holm = paired_differences(values, roles=roles_of(rows))
        table += [
            [
                rate,
                f"`{name}`",
                *(difference(values, name, reference, holm) for reference in references),
            ]
            for name in sorted(
                set(values) - set(REFERENCES), key=lambda name: _best({"": values}, name)
            )
        ]
    return markdown(["ρ", "method", *(f"− `{reference}`" for reference in references)], table)


def cleaning_pairs() -> str:
    """Compare hg-ms-tilted with the other methods that learn θ."""
    rows, values, names = cleaning()
    holm = {
        rate: paired_differences(by_method, roles=roles_of(rows))
        for rate, by_method in values.items()
    }
    table = []
    for name in names:
        if name not in (*REFERENCES, "hg-ms-tilted"):
            cells = [
                difference(by_method, "hg-ms-tilted", name, holm[rate])
                for rate, by_method in values.items()
            ]
            table.append([f"`{name}`", *cells])
    return markdown(["`hg-ms-tilted` −", *(f"ρ = {rate}" for rate in values)], table)


def cleaning_weights() -> str:
    """Measure how well the weights separate right labels from wrong labels."""
    rows, values, names = cleaning()
    table = []
    for name in names:
        if name not in REFERENCES:
            cells = [
                mean(values_of(rows, f"cleaning-{rate}", "cleaning_f1")[name]) for rate in values
            ]
            table.append([f"`{name}`", *cells])
    uniform = [
        mean(values_of(rows, f"cleaning-{rate}", "cleaning_f1")["uniform"]) for rate in values
    ]
    return markdown(
        ["method", *(f"ρ = {rate}" for rate in values)],
        [*table, ["all weights kept (`uniform`)", *uniform]],
    )


def imbalanced() -> str:
    rows = rows_of("imbalanced")
    values = values_of(rows, "imbalanced", "test_balanced_accuracy")
    holm = paired_differences(values, roles=roles_of(rows))
    table = []
    for name in sorted(values, key=lambda name: (name in REFERENCES, *_best({"": values}, name))):
        steps = [row["outer_steps"] for row in rows if row["method"] == name]
        away = [
            difference(values, name, reference, holm) if name not in REFERENCES else "–"
            for reference in ("uniform-tilted", "validation-only")
        ]
        table.append([f"`{name}`", mean(values[name]), *away, f"{min(steps)}–{max(steps)}"])
    return markdown(
        [
            "method",
            "balanced accuracy",
            "− `uniform-tilted`",
            "− `validation-only`",
            "outer steps (min–max)",
        ],
        table,
    )


def candidates() -> str:
    """Compare hg-ms with N branches to one branch at equal seconds."""
    rows = rows_of("candidates")
    values, losses = (
        values_of(rows, "cleaning-0.8", metric) for metric in ("test_accuracy", "validation_loss")
    )
    holm = paired_differences(values)
    table = []
    for name in sorted(values):
        steps = [row["outer_steps"] for row in rows if row["method"] == name]
        away = difference(values, name, "n-1", holm) if name != "n-1" else "–"
        loss = spell(Interval.of(list(losses[name].values())))
        table.append(
            [name.removeprefix("n-"), mean(values[name]), away, loss, f"{min(steps)}–{max(steps)}"]
        )
    return markdown(
        ["N", "test accuracy", "− N = 1", "validation loss", "outer steps (min–max)"], table
    )


def lower_state() -> str:
    """Compare hg-ms at the paper's settings with variants of one part each, at equal updates."""
    rows = rows_of("cleaning-state")
    metrics = ("test_accuracy", "validation_loss", "cleaning_f1")
    values, losses, weights = (values_of(rows, "cleaning-0.6", metric) for metric in metrics)
    holm = paired_differences(values, roles=roles_of(rows))
    table = []
    for name in sorted(values, key=lambda name: (name in REFERENCES, *_best({"": values}, name))):
        away = difference(values, name, "paper", holm) if name != "paper" else "–"
        loss = spell(Interval.of(list(losses[name].values())))
        table.append([f"`{name}`", mean(values[name]), away, loss, mean(weights[name])])
    return markdown(
        ["variant", "test accuracy", "− `paper`", "validation loss", "F1 of the weights"], table
    )


def paper_cells() -> str:
    """Compare the cells of the paper's MNIST tables with our runs, one line per variant."""
    head = ["task", "method", "variant"]
    head += ["paper, test", "ours, test", "", "paper, train", "ours, train", ""]
    return markdown(head, published_figures.cells(rows_of))


RATE_OF = {"v-pbgd": "generator.lr", "g-pbgd": "generator.lr", "iaptt-gm": "outer.start.lr"}


def rate_scan() -> str:
    """Return single runs of the paper's cells with several rates of the lower level."""
    records = ("cleaning-published-rates", "cleaning-slow-rates", "cleaning-rate-scan")
    rows = []
    for row in (row for name in records for row in rows_of(name)):
        task, _, _ = row["task"].partition(",")
        method = row["method_name"]
        rows.append((task, method, float(row[f"setting.method.{RATE_OF[method]}"]), row))
    table = [
        [
            task,
            f"`{method}`",
            f"`{RATE_OF[method]}`",
            f"{rate:g}",
            str(row["seed"]),
            f"{100 * row['metric.test_accuracy']:.2f}",
            f"{100 * row['metric.train_accuracy']:.2f}",
        ]
        for task, method, rate, row in sorted(rows, key=lambda item: (*item[:2], -item[2]))
    ]
    return markdown(["task", "method", "rate", "value", "seed", "test", "train"], table)


def imbalanced_updates() -> str:
    """Return single runs on imbalanced data at the paper's numbers of updates, and its figures."""
    cells = published_figures.table_of_cells()["cell"]
    theirs = {cell["method"]: cell for cell in cells if cell["task"] == "imbalanced"}
    rows = []
    for row in rows_of("imbalanced-updates"):
        task, _, _ = row["task"].partition(",")
        method = row["method_name"]
        rate = float(row[f"setting.method.{RATE_OF[method]}"])
        line = [task, f"`{method}`", f"{rate:g}", str(row["outer_steps"])]
        for part in ("test", "train"):
            line.append(f"{100 * row[f'metric.{part}_balanced_accuracy']:.2f}")
            line.append(f"{theirs[method][part][0]:.2f}")
        rows.append((task, method, -rate, line))
    head = ["task", "method", "lower rate", "updates", "test", "paper", "train", "paper"]
    return markdown(head, [line for *_, line in sorted(rows)])


def cleaning_speed() -> str:
    """Compare compiled steps with the fast route of products to eager steps with exact products, at
    equal seconds.
    """
    written = rows_of("cleaning-written")
    compiled = rows_of("cleaning-compiled")
    table = []
    for rate in RATES:
        before, after = (
            values_of(rows, f"cleaning-{rate}", "test_accuracy") for rows in (written, compiled)
        )
        for name in sorted(before.keys() & after.keys()):
            seeds = before[name].keys() & after[name].keys()
            pairs = [
                (row["outer_steps"], other["outer_steps"])
                for row in written
                for other in compiled
                if all(row[key] == other[key] for key in ("task", "method", "seed"))
                and (row["task"], row["method"]) == (f"cleaning-{rate}", name)
            ]
            steps = sum(new for _, new in pairs) / sum(old for old, _ in pairs)
            shown = [
                mean({seed: values[name][seed] for seed in seeds}) for values in (before, after)
            ]
            away = spell(paired_interval(after[name], before[name]), share=True, signed=True)
            table.append([rate, f"`{name}`", *shown, away, f"{steps:.2f}", str(len(seeds))])
    return markdown(
        ["ρ", "method", "eager", "compiled, fast", "difference", "outer steps, ratio", "seeds"],
        table,
    )


# --- evidence
# --------------------------------------------------------------------------------------------------

CAMPAIGNS = {  # the file of records: its title, its metric, and its grid
    "evidence-cleaning": ("MNIST cleaning, 60 s", "test_accuracy", "evidence/cleaning.toml"),
    "evidence-fashion": (
        "Fashion-MNIST cleaning, 60 s",
        "test_accuracy",
        "evidence/cleaning.toml --scale fashion",
    ),
    "evidence-digits": (
        "digits cleaning, 15 s",
        "test_accuracy",
        "evidence/cleaning.toml --scale digits",
    ),
    "evidence-imbalanced": (
        "imbalanced, ten images at least",
        "test_balanced_accuracy",
        "evidence/imbalanced.toml",
    ),
    "evidence-mls": ("MLS-Bench cleaning, 60 s", "test_accuracy", "mls/linear.toml"),
}
EARLIER = {f"{name}-before": CAMPAIGNS[name] for name in ("evidence-cleaning", "evidence-digits")}
"""Records in which references train on fewer validation rows than methods; no claim uses them."""
SCALE = ("validation-only", "oracle-joint")
CLAIM = 10
"""The minimum number of seeds for a claim."""


@frozen(kw_only=True)
class Study:
    """The runs of one task: values of the metric by label and seed, methods and roles by label, and
    all pairs by Holm's rule.

    Each form of a reference is a floor: best stopping, ``-last`` for the end of the budget,
    ``-flat`` for another step.
    """

    task: str
    methods: Mapping[str, str]
    values: Values
    roles: Mapping[str, str]
    steps: Mapping[str, str]
    holm: Mapping[tuple[str, str], Interval]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], task: str, metric: str) -> Study:
        values = values_of(rows, task, metric)
        roles = roles_of(rows)
        steps = {
            name: [
                row["outer_steps"] for row in rows if (row["task"], row["method"]) == (task, name)
            ]
            for name in values
        }
        spans = {name: f"{min(own)}–{max(own)}" for name, own in steps.items()}
        methods = {row["method"]: row["method_name"] for row in rows}
        return cls(
            task=task,
            methods=methods,
            values=values,
            roles=roles,
            steps=spans,
            holm=paired_differences(values, roles=roles),
        )

    def mean(self, name: str) -> float:
        return sum(self.values[name].values()) / len(self.values[name])

    def named(self, role: str) -> list[str]:
        """Return the methods of a role, the best mean first."""
        return sorted(
            (name for name in self.values if self.roles[name] == role),
            key=lambda name: (-self.mean(name), name),
        )

    @property
    def seeds(self) -> int:
        return min(len(by_seed) for by_seed in self.values.values())

    def share(self, name: str) -> str:
        """Return the recovered share between the best forms of both ends, or an empty text if one
        is missing.
        """
        forms = [[label for label in self.values if self.methods[label] == end] for end in SCALE]
        if not all(forms) or self.methods[name] in SCALE:
            return "–"
        return str(
            recovered_share(
                self.values[name], *(self.values[max(labels, key=self.mean)] for labels in forms)
            )
        )

    def ahead(self, name: str) -> bool:
        """Return whether a method outperforms every trivial reference by Holm's rule."""
        gaps = [self.holm[name, floor] for floor in self.named("floor")]
        return bool(gaps) and all(gap.excludes_zero and gap.mean > 0 for gap in gaps)

    def verdict(self, name: str) -> str:
        if self.ahead(name):
            return "better than every baseline that does not learn"
        behind = [
            floor for floor in self.named("floor") if not self.holm[name, floor].excludes_zero
        ]
        lost = [
            floor
            for floor in self.named("floor")
            if floor not in behind and self.holm[name, floor].mean < 0
        ]
        return f"**behind `{lost[0]}`**" if lost else f"not better than `{behind[0]}`"


def studies(name: str, metric: str) -> list[Study]:
    rows = rows_of(name)
    return [Study.of(rows, task, metric) for task in sorted({row["task"] for row in rows})]


def absent(name: str) -> str:
    return f"Not run yet (`hgms compare benchmarks/{campaign(name)[2]}`).\n"


def campaign(name: str) -> tuple[str, str, str]:
    return (CAMPAIGNS | EARLIER)[name]


def evidence(name: str) -> str:
    """Return every method and reference of a campaign: mean, difference to the best trivial
    reference, recovered share, verdict.
    """
    table = []
    metric = campaign(name)[1]
    for study in studies(name, metric):
        floors = study.named("floor")
        for method in [*study.named(""), *floors, *study.named("ceiling")]:
            learns = not study.roles[method] and floors
            away = difference(study.values, method, floors[0], study.holm) if learns else "–"
            share = study.share(method)
            verdict = (
                study.verdict(method)
                if learns
                else {"floor": "reference", "ceiling": "knows the truth"}.get(
                    study.roles[method], "–"
                )
            )
            table.append(
                [
                    study.task,
                    f"`{method}`",
                    mean(study.values[method]),
                    away,
                    share,
                    study.steps[method],
                    verdict,
                ]
            )
    head = [
        "task",
        "method",
        metric.replace("_", " ") + " (%)",
        "− best trivial reference",
        "recovered share",
        "outer steps",
        "",
    ]
    return markdown(head, table) if table else absent(name)


def judged() -> list[tuple[str, Study]]:
    """Return all studies that claims use: the campaigns, the short tables, and digits at equal
    calls.
    """
    campaigns = [
        (title, study)
        for name, (title, metric, _) in CAMPAIGNS.items()
        for study in studies(name, metric)
    ]
    short = [("MNIST cleaning, 15 s", study) for study in studies("cleaning", "test_accuracy")]
    short += [
        ("digits cleaning, 4,000 calls", study) for study in studies("digits-demo", "test_accuracy")
    ]
    return [
        *campaigns,
        *short,
        *(("imbalanced, 20 s", study) for study in studies("imbalanced", "test_balanced_accuracy")),
    ]


def established() -> str:
    """Return the methods that outperform every baseline by Holm's rule, with enough seeds for a
    claim.
    """
    table = []
    for title, study in judged():
        for method in study.named(""):
            if study.ahead(method) and study.seeds >= CLAIM:
                floor = study.named("floor")[0]
                away = difference(study.values, method, floor, study.holm)
                table.append(
                    [
                        title,
                        study.task,
                        f"`{method}`",
                        f"`{floor}`",
                        away,
                        study.share(method),
                        _seeds(study),
                    ]
                )
    head = [
        "what",
        "task",
        "method",
        "best trivial reference",
        "difference",
        "recovered share",
        "seeds",
    ]
    return (
        markdown(head, table)
        if table
        else "No method outperforms every baseline that does not learn.\n"
    )


def _seeds(study: Study) -> str:
    return str(study.seeds) + ("" if study.seeds >= CLAIM else f" (a claim needs {CLAIM})")


def open_questions() -> str:
    """Return the tasks without such a claim, with the best method of each."""
    table = []
    for title, study in judged():
        claimed = study.seeds >= CLAIM and any(map(study.ahead, study.named("")))
        if study.named("") and study.named("floor") and not claimed:
            method = study.named("")[0]
            floor = study.named("floor")[0]
            away = difference(study.values, method, floor, study.holm)
            table.append(
                [
                    title,
                    study.task,
                    f"`{method}`",
                    f"`{floor}`",
                    away,
                    study.share(method),
                    _seeds(study),
                ]
            )
    head = [
        "what",
        "task",
        "method with the best mean",
        "best trivial reference",
        "difference",
        "recovered share",
        "seeds",
    ]
    return (
        markdown(head, table)
        if table
        else "Every task has a method that outperforms every baseline that does not learn.\n"
    )


def winners() -> str:
    """Compare the method with the best mean to all others that learn θ."""
    table = []
    for title, study in judged():
        if len(learning := study.named("")) > 1:
            beaten = [name for name in learning[1:] if study.holm[learning[0], name].excludes_zero]
            level = [f"`{name}`" for name in learning[1:] if name not in beaten]
            table.append(
                [
                    title,
                    study.task,
                    f"`{learning[0]}`",
                    f"{len(beaten)} of {len(learning) - 1}",
                    ", ".join(level) or "none",
                ]
            )
    return markdown(
        ["what", "task", "best mean", "better than", "not distinguished from it"], table
    )


# --- the tests


def mutations() -> str:
    """Return the number of planted mistakes by area, and the number that each tier catches."""
    path = RESULTS / "mutations.json"
    if not path.exists():
        return "Not run yet (`python benchmarks/mutations.py`).\n"
    verdicts = list(json.loads(path.read_text(encoding="utf-8")).values())
    areas: dict[str, list[str]] = {}
    for verdict in verdicts:
        areas.setdefault(verdict["area"], []).append(verdict["tier"])
    areas = dict(sorted(areas.items())) | {"all": [verdict["tier"] for verdict in verdicts]}
    table = [
        [
            area,
            str(len(tiers)),
            str(tiers.count("default")),
            str(tiers.count("extended")),
            str(tiers.count("none")),
        ]
        for area, tiers in areas.items()
    ]
    head = ["area", "planted", "caught by default", "by extended only", "missed"]
    return markdown(head, table)


# --- the demo
# --------------------------------------------------------------------------------------------------


WHAT = {
    "hg-implicit": "one candidate",
    "hg-ms": "the best of two candidates",
    "uniform": "baseline: equal weights",
    "validation-only": "baseline: validation rows alone",
    "uniform-tilted": "baseline: both",
}
"""The methods of the demo."""


def corrected(interval: Interval) -> str:
    """Format a difference with its interval by Holm's rule, as `hgms demo` prints it; bold if it
    excludes 0.
    """
    shown = spell(interval, share=True, signed=True)
    return f"**{shown}**" if interval.excludes_zero else shown


def demo() -> str:
    """Return the table of `hgms demo`, from the stored records of its run folders."""
    table = []
    for study in studies("demo", "test_accuracy"):
        for method in [name for role in ("", "floor") for name in study.named(role)]:
            away = [
                corrected(study.holm[method, floor]) if not study.roles[method] else "–"
                for floor in ("uniform", "validation-only")
            ]
            accuracy = mean(study.values[method])
            first, _, last = study.steps[method].partition("–")
            steps = first if first == last else study.steps[method]
            table.append([f"`{method}`", accuracy, *away, steps, WHAT[method]])
    if not table:
        return "\nNot measured.\n\n"
    head = ["method", "test accuracy (%)", "− `uniform`", "− `validation-only`", "steps", ""]
    return "\n".join(["", markdown(head, table), ""])


# --- published figures
# --------------------------------------------------------------------------------------------------


def published() -> str:
    """Return the published figures of the methods, the measured figures and a mark, with the
    differences below.
    """
    said = [f"{what}." for what in published_figures.differences()]
    return "\n".join(
        [
            markdown(published_figures.HEAD, published_figures.rows(rows_of)),
            *(f"- {line}\n" for line in said),
        ]
    )


def memory() -> str:
    """Return the peak memory of N Langevin chains in lower states, with default evaluation and
    stacked without a chunk.
    """
    quantities = {row["quantity"]: row["value"] for row in rows_of("memory")}
    table = []
    for count in (2, 8):
        bound = 2 * count + 6
        sizes = [
            quantities[f"N = {count}, {how} (bound {bound})"]
            for how in ("auto, chunk None", "stacked, chunk None")
        ]
        table.append([str(count), f"{sizes[0]:.1f}", str(bound), f"{sizes[1]:.1f}"])
    return markdown(["N", "as evaluated by default", "bound", "stacked without a chunk"], table)


SPEED = ("work", "measured", "quartiles", "required", "aim", "met", "of")


def speed_row(row: Mapping[str, Any]) -> list[str]:
    """Return a row of speed.py's table: a ratio (or seconds), its limits, and the reached limit."""
    sign = "≥" if row["greater"] else "≤"
    limits = [f"{sign} {row[name]:g}" for name in ("required", "aim")]
    if "median" not in row:
        return [row["work"], "–", "–", *limits, "not measured", "–"]
    reached = "aim" if row["aim met"] else "required" if row["required met"] else "**no**"
    return [row["work"], f"{row['median']:.3g}", _range(row), *limits, reached, row["of"]]


def _range(quartiles: Mapping[str, float], unit: float = 1.0) -> str:
    low, high = (unit * quartiles[name] for name in ("q25", "q75"))
    return f"{low:.3g}–{high:.3g}" if low < high else "–"


def figures_of(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return figures


def speed() -> str:
    """Return the required, targeted and measured values."""
    return markdown(SPEED, [speed_row(row) for row in figures_of("speed")["rows"]])


def speed_hypergradient() -> str:
    """Return every implementation of the hypergradient, with its time relative to two others."""
    sides = figures_of("speed")["parts"]["hypergradient"]["sides"]
    others = ("by hand", "jaxopt, jitted", "jax, linearize + scan")
    table = []
    for name, side in sides.items():
        shares = [
            f"{side[f'/ {other}']['median']:.2f}" if f"/ {other}" in side else "1"
            for other in others
        ]
        table.append(
            [
                name,
                f"{side['seconds']['median']:.2f}",
                _range(side["seconds"]),
                *shares,
                f"{side['difference']:.0e}",
            ]
        )
    return markdown(
        ["side", "seconds", "quartiles", *(f"/ {other}" for other in others), "differs by"], table
    )


def speed_methods() -> str:
    """Return the duration of an outer step of every method, now and in the previous checkout."""
    parts = figures_of("speed")["parts"]
    table = []
    for part in ("digits", "others"):
        for name, row in parts[part]["methods"].items():
            cells = [f"{1e3 * row[side]['median']:.3g}" for side in ("this", "other")]
            table.append(
                [f"`{name}`", *cells, f"{row['ratio']['median']:.2f}", _range(row["ratio"])]
            )
    return markdown(["method", "now (ms)", "before (ms)", "ratio", "quartiles"], table)


def products() -> str:
    """Return the products of every solver to a residual of 1e-6, along two trajectories."""
    table = []
    for row in figures_of("products")["products"]:
        each = " ".join(map(str, row["each"]))
        shares = [f"{row[name]:.2f}" for name in ("ratio", "seconds ratio")]
        table.append([row["what"], row["trajectory"], f"{row['ridge']:g}", each, *shares])
    return markdown(
        ["solver", "trajectory", "ridge", "products of each system", "/ cg", "seconds / cg"], table
    )


def kernels() -> str:
    """Return the operations and kernels of each part of a step."""
    rows = figures_of("kernels")["kernels"]
    return markdown(
        ["part", *next(iter(rows.values()))],
        [[name, *map(str, row.values())] for name, row in rows.items()],
    )


def speed_machine() -> str:
    figures = figures_of("speed")
    keys = ("machine", "torch", "jax", "jaxopt", "torchopt", "python")
    return markdown(keys, [[figures[key] for key in keys]])


def growth() -> str:
    """Return the duration of an outer step relative to its floor, at growing sizes."""
    axes = {"N": "candidates", "n": "rows", "d": "unknowns"}
    table = []
    for name, rows in figures_of("scaling")["growth"]["sweeps"].items():
        for row in rows:
            cells = [
                f"{1e3 * row['sides'][side]['median']:.3g}" if side in row["sides"] else "–"
                for side in ("eager", "compiled", "floor")
            ]
            for side in ("eager", "compiled"):
                first, share = (each["/ floor"].get(side) for each in (rows[0], row))
                if first is None or share is None:
                    cells += ["–", "–"]
                    continue
                cells += [f"{share['median']:.3g}", f"{share['median'] / first['median']:.2f}"]
            table.append([axes[name], f"{row['size']:,}", *cells])
    head = ["axis", "size", "eager (ms)", "compiled (ms)", "floor (ms)"]
    for side in ("eager", "compiled"):
        head += [f"{side} / floor", "relative to the smallest size"]
    return markdown(head, table)


def environment() -> str:
    """Return the environments of the stored runs."""
    table = []
    for name in sorted(path.stem for path in RESULTS.glob("*.parquet")):
        rows = parquet.read_table(RESULTS / f"{name}.parquet").to_pylist()
        if "environment.torch" in rows[0]:
            where = [f"environment.{key}" for key in ("threads", "torch", "python")]
            facts = {
                key: ", ".join(sorted({str(row[key]) for row in rows}))
                for key in ("budget", "setting.run.clock", *where)
            }
            seeds = sorted({row["seed"] for row in rows})
            table.append([f"`{name}`", str(len(rows)), ", ".join(map(str, seeds)), *facts.values()])
    return markdown(
        ["records", "runs", "seeds", "budget", "clock", "threads", "torch", "Python"], table
    )


# --- the picture
# --------------------------------------------------------------------------------------------------

PICTURE = ROOT / "docs" / "images" / "cleaning-methods.png"
DRAWN = (
    "hg-ms-tilted",
    "hg-ms",
    "hg-baseline",
    "v-pbgd",
    "g-pbgd",
    "scalebio",
    "uniform",
    "uniform-tilted",
    "validation-only",
    "oracle-joint",
)


def draw() -> None:
    """Draw the mean test accuracy over the seeds against seconds, one panel per corruption rate,
    with dashed references.
    """
    import numpy as np
    from matplotlib.figure import Figure

    rows = parquet.read_table(RESULTS / "cleaning.curves.parquet").to_pylist()
    tasks = sorted({row["task"] for row in rows})
    figure = Figure(figsize=(4.2 * len(tasks), 4), layout="constrained")
    grid = np.linspace(1.5, 15, 136)
    for panel, task in zip(
        figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True
    ):
        for number, name in enumerate(DRAWN):
            held = []
            mine = [row for row in rows if (row["task"], row["method"]) == (task, name)]
            for seed in sorted({row["seed"] for row in mine}):
                own = [row for row in mine if row["seed"] == seed]
                points = [
                    (row["seconds"], 100 * row["metric.test_accuracy"])
                    for row in own
                    if row["seconds"] > 0
                ]
                held.append(np.interp(grid, *zip(*points, strict=True)))
            line = "--" if name in REFERENCES else "-"
            panel.plot(
                grid, np.mean(held, axis=0), line, color=f"C{number}", linewidth=1.6, label=name
            )
        panel.set(
            title=f"ρ = {task.removeprefix('cleaning-')}",
            xlabel="seconds of processor time",
            ylim=(60, 95),
        )
    panels = figure.axes
    panels[0].set_ylabel("test accuracy (%)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    figure.savefig(PICTURE, dpi=110)


# --- the page
# --------------------------------------------------------------------------------------------------


def records(file: str) -> list[dict[str, Any]]:
    lines = (RESULTS / file).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def tune(file: str, table: Callable[[Sequence[dict[str, Any]]], str]) -> str:
    return table(records(file))


TABLES: dict[str, Callable[[], str]] = {
    "claims": lambda: markdown(["claim", "page", "table", "seeds"], claims.rows()),
    "environment": environment,
    "established": established,
    "open": open_questions,
    "winners": winners,
    **{name: partial(evidence, name) for name in CAMPAIGNS | EARLIER},
    "rate-scan": rate_scan,
    "imbalanced-updates": imbalanced_updates,
    "published": published,
    "cleaning-accuracy": cleaning_accuracy,
    "cleaning-references": cleaning_references,
    "cleaning-pairs": cleaning_pairs,
    "cleaning-weights": cleaning_weights,
    "candidates": candidates,
    "paper-cells": paper_cells,
    "lower-state": lower_state,
    "cleaning-speed": cleaning_speed,
    "imbalanced": imbalanced,
    "memory": memory,
    "speed": speed,
    "speed-machine": speed_machine,
    "speed-hypergradient": speed_hypergradient,
    "speed-methods": speed_methods,
    "products": products,
    "kernels": kernels,
    "growth": growth,
    "mutations": mutations,
    **{name: partial(tune, *entry) for name, entry in tune_tables.TABLES.items()},
    **{name: partial(tune, "zoo.jsonl", table) for name, table in zoo_tables.TABLES.items()},
}


def page(text: str) -> str:
    """Return the page with new tables."""
    return MARKED.sub(lambda match: match[1] + match[2] + "\n" + TABLES[match[1]]() + "\n", text)


def stale(text: str) -> list[str]:
    """Return the tables on the page that differ from the records."""
    return [
        match[1]
        for match in MARKED.finditer(text)
        if match[3].strip() != TABLES[match[1]]().strip()
    ]


def front_page() -> str:
    """Return the project's README with a new table of the demo."""
    return DEMO.sub(lambda _: demo(), FRONT.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    commands = parser.add_subparsers(dest="command")
    for command in ("runs", "figures"):
        own = commands.add_parser(command)
        own.add_argument("name")
        own.add_argument("sources", type=Path, nargs="+" if command == "runs" else 1)
        if command == "runs":
            own.add_argument("--add", action="store_true", help="keep the stored runs")
    options = parser.parse_args()
    if options.command:
        kept = (
            keep_runs(options.name, options.sources, add=options.add)
            if options.command == "runs"
            else keep_figures(options.name, *options.sources)
        )
        print("\n".join(f"{path} ({path.stat().st_size / 1000:.0f} kB)" for path in kept))
        return 0
    from bench_scaling import draw as draw_scaling
    from bench_scaling import draw_growth

    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    if options.check:
        wrong = [name for text in texts.values() for name in stale(text)]
        if FRONT.read_text(encoding="utf-8") != front_page():
            wrong.append(FRONT.name)
        print("\n".join(wrong))
        return int(bool(wrong))
    for path, text in texts.items():
        path.write_text(page(text), encoding="utf-8")
    FRONT.write_text(front_page(), encoding="utf-8")
    draw()
    draw_scaling(figures_of("scaling"), PICTURE.parent / "scaling.png")
    zoo_tables.draw_profile(records("zoo.jsonl"), PICTURE.parent / "zoo-profile.png")
    draw_growth(figures_of("scaling")["growth"], PICTURE.parent / "growth.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
