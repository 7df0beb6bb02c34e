"""Grid files: a table of tasks and methods as a grid, all of it built and checked before anything
runs.

::

    budget = "60s"
    seeds = 5                         # 0 … 4; or a list

    [run]
    out = "runs"

    [[task]]
    name = "hyper-cleaning"

    [[method]]
    name = "hg-ms"
    label = "hg-ms-1"                 # two variants of one method need labels
    generator.count = 1
    on.hyper-cleaning.outer.lr = 0.3  # for one task only, by its label

    [sweep]                           # optional: see hgms.comparison.sweep
    trials = 5
    seeds = [100]
    sampler = "random"
    space.hg-ms = { "outer.lr" = { low = 0.01, high = 1.0, log = true } }

``references = true`` at the top adds every reference that fits, in both forms (see
hgms.comparison.references). ``[[task]]`` and ``[[method]]`` tables hold the fields of the
component, and ``name``, ``label`` and ``on`` beside them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import field, frozen, validators

from hgms.comparison import space
from hgms.comparison.grid import Entry, Grid, SweepSettings, copied, distinct_seeds
from hgms.comparison.references import lines_of, with_references
from hgms.comparison.scale import scaled
from hgms.config import Invalid
from hgms.config.convert import role_of, structured, traits_of
from hgms.config.invalid import named
from hgms.config.tables import lay, show
from hgms.results import DEFAULT_REFERENCES
from hgms.runs import (
    SCHEMA,
    OwnProblem,
    RunConfig,
    RunSettings,
    device_called,
    misfit,
    missing_traits,
    tables_of_others,
    wanted_traits,
)
from hgms_core import Budget, ConfigError, HgmsError, Method, Task, unknown
from hgms_core.registry import KINDS, Registry

FLAGS = "the command line"
PYTHON = "compare"
"""The sources of a grid that has no file."""

RESERVED = {
    "task",
    "method",
    "run",
    "scale",
    "sweep",
    "budget",
    "seeds",
    "sweeps",
    "schema",
    "metric",
    "reference",
    "references",
}


Objects = dict[tuple[str, str], Any]
"""Tasks and methods as objects, by kind and label."""


STOP = '\n  give `upper_data` one set of rows for all roles, or the method keep = "last"'


def placed(task: object) -> dict[str, str]:
    """Device and dtype of a problem of this process, as settings have them."""
    if not isinstance(task, OwnProblem):
        return {}
    dtype = str(task.dtype).removeprefix("torch.")
    return {"device": str(task.device).replace("mps:0", "mps")} | (
        {"dtype": dtype} if dtype in ("float32", "float64") else {}
    )


@frozen(kw_only=True)
class GridFile:
    """The top level of a grid's TOML file. ``task`` and ``method`` are lists of tables (or of
    names).
    """

    schema: int = field(default=SCHEMA, validator=validators.in_([SCHEMA]))
    budget: Budget
    seeds: int | list[int] = field(default=5, validator=distinct_seeds)
    metric: str | None = None
    reference: str | None = None
    references: bool = False
    run: RunSettings = RunSettings()
    task: Any
    method: Any
    sweep: SweepSettings | None = None


def load(
    table: Mapping[str, Any],
    *,
    source: str = "the grid",
    sets: Iterable[str] = (),
    tasks: Sequence[str] = (),
    methods: Sequence[str] = (),
    scale: str | None = None,
    registry: Registry | None = None,
    objects: Objects | None = None,
) -> Grid:
    """The grid that a file's table describes, with ``sets`` laid over it, narrowed to the labels
    ``tasks`` and ``methods``; at one of its scales (:mod:`hgms.comparison.scale`) if ``scale``
    names one.

    ``sets`` are ``task.FIELD=…`` and ``method.FIELD=…`` (all of them), ``LABEL.FIELD=…`` (one of
    them), or a key of the top level. ``objects`` are the tasks and methods that have a name and a
    label in the table and nothing else, by kind and label. Raises one ConfigError with everything
    that is wrong.
    """
    return _Loader(source, registry or Registry.load(), objects or {}).load(
        scaled(table, scale, source), list(sets), tasks, methods
    )


def without_doubles(
    fitting: Mapping[tuple[str, str], Method], methods: Sequence[Entry]
) -> dict[tuple[str, str], Method]:
    """Methods by task and label, without added references that are on the task what the person
    named already.
    """
    entries = {entry.label: entry for entry in methods}

    def is_double(task: str, label: str) -> bool:
        named = [
            other.label
            for other in methods
            if other.name == entries[label].name and not other.added
        ]
        return entries[label].added and any(
            fitting.get((task, other)) == fitting[task, label] for other in named
        )

    return {pair: method for pair, method in fitting.items() if not is_double(*pair)}


class _Loader:
    """Gathers problems, and stops where there are any."""

    def __init__(self, where: str, registry: Registry, objects: Objects) -> None:
        self.where = where
        self.registry = registry
        self.objects = objects
        self.problems: list[str] = []
        self.left_out: list[str] = []
        self.others = tables_of_others() - attrs.fields_dict(GridFile).keys()

    def load(
        self,
        grid: dict[str, Any],
        sets: Sequence[str],
        only_tasks: Sequence[str],
        only_methods: Sequence[str],
    ) -> Grid:
        table = copied(grid)
        all_tasks = self.entries("task", table.get("task"))
        all_methods = self.entries("method", table.get("method"))
        if table.get("references") is True:
            all_methods = with_references(all_methods, self.registry, map(self.traits, all_tasks))
        self.lay(table, [*all_tasks, *all_methods], sets)
        # said by one of `sets`, perhaps; nothing is added twice
        if table.get("references") is True:
            all_methods = with_references(all_methods, self.registry, map(self.traits, all_tasks))
        tasks = self.narrowed(all_tasks, only_tasks)
        methods = self.narrowed(all_methods, only_methods)
        if self.where == FLAGS and "budget" not in table:
            self.problems.append(
                'no budget is given; add --budget 60s, --budget "25 steps" or --budget "1e5 calls"'
            )
            table["budget"] = "1 step"
        for key in self.others:
            table.pop(key, None)
        file = self.built({"task": [], "method": [], **table}, GridFile, self.where)
        self.check_on(all_tasks, all_methods)
        built = {
            task.label: self.built(task.at(""), Task, f"{self.where}.task {task.label}")
            for task in tasks
        }
        fitting = without_doubles(self.fitting(tasks, methods, built), methods)
        if file is None:
            file = self.salvaged(table)
        seeds = tuple(range(file.seeds)) if isinstance(file.seeds, int) else tuple(file.seeds)
        metrics = self.metrics(built, file.metric)
        reference = self.reference(methods, file.reference)
        self.check_run(file.run)
        self.check_devices(file.run, table.get("run", {}), built)
        if file.sweep is not None:
            self.check_sweep(
                file.sweep, seeds, [method.label for method in all_methods], tasks, methods
            )
        self.stop()
        pairs = {}
        for task, method in itertools.product(tasks, methods):
            if method.added and (task.label, method.label) not in fitting:
                continue
            labels = {
                "label": method.label if method.stated else None,
                "task_label": task.label if task.stated else None,
            }
            pairs[task.label, method.label] = RunConfig(
                task=built[task.label],
                method=fitting[task.label, method.label],
                method_name=method.name,
                role=self.role(method),
                seed=seeds[0],
                budget=file.budget,
                run=attrs.evolve(file.run, **labels, **placed(built[task.label])),
                host=self.registry.host,
                own=bool(self.objects),
            )
        return Grid(
            tasks=tasks,
            methods=methods,
            seeds=seeds,
            budget=file.budget,
            run=file.run,
            metrics=metrics,
            reference=reference,
            sweep=file.sweep,
            pairs=pairs,
            registry=self.registry,
            own=bool(self.objects),
            left_out=self.left_out,
        )

    def built(
        self, table: object, wanted: Any, place: str, traits: frozenset[str] = frozenset()
    ) -> Any:
        """The object a table describes (a method for tasks with ``traits``), or None with its
        errors among the problems.
        """
        try:
            return structured(table, wanted, self.registry, traits)
        except Invalid as invalid:
            self.problems += [Invalid(error).render(place) for error in invalid.errors]
        except HgmsError as error:
            self.problems.append(f"{error} @ {place}")
        return None

    def stop(self) -> None:
        problems = list(dict.fromkeys(self.problems))
        if len(problems) == 1:
            raise ConfigError(problems[0])
        if problems:
            shown = "\n".join("  " + problem.replace("\n", "\n  ") for problem in problems)
            raise ConfigError(
                f"{len(problems)} problems in {self.where}; nothing was run:\n{shown}"
            )

    def salvaged(self, table: Mapping[str, Any]) -> GridFile:
        """The file without the keys that are wrong, so that what depends on the others is looked
        at too.
        """
        kept: dict[str, Any] = {"budget": "1 step", "seeds": [2**40], "task": [], "method": []}
        for key, value in table.items():
            with contextlib.suppress(Invalid, HgmsError):
                structured({**kept, key: value}, GridFile, self.registry)
                kept[key] = value
        file: GridFile = structured(kept, GridFile, self.registry)
        return file

    # --- tasks and methods

    def entries(self, kind: Literal["task", "method"], listed: object) -> list[Entry]:
        """The tables of one kind, with labels. Strings are names alone."""
        items = (
            listed if isinstance(listed, (list, tuple)) else [listed] if listed is not None else []
        )
        if not items:
            how = f"write a [[{kind}]] table with its name"
            if self.where == FLAGS:
                flag = {"task": "--task NAME", "method": "--methods NAME,NAME"}[kind]
                how = f"add {flag} (`hgms list {kind}` shows all)"
            if self.where == PYTHON:
                how = f"give its name (`hgms list {kind}` shows all), a table or an object"
            self.problems.append(f"no {kind} is named; {how} @ {self.where}")
        entries = []
        for number, item in enumerate(items, start=1):
            try:
                entries.append(self.entry(kind, {"name": item} if isinstance(item, str) else item))
            except ValueError as error:
                message, line, rest = str(error).partition("\n")
                self.problems.append(f"{message} @ {self.where}.{kind}[{number}]{line}{rest}")
        labels = [entry.label for entry in entries]
        for label, count in Counter(labels).items():
            if count > 1:
                self.problems.append(
                    f"{count} {kind}s are called {label!r}; give each a label of its own, like "
                    f'label = "{label}-2"{" in a grid file" if self.where == FLAGS else ""} @ '
                    f"{self.where}.{kind}"
                )
        return entries

    def entry(self, kind: Literal["task", "method"], item: object) -> Entry:
        """ValueError with what is wrong."""
        if not isinstance(item, Mapping):
            raise ValueError(f"expected a table with the name of a {kind}, got {show(item)}")
        if not isinstance(item.get("name"), str):
            raise ValueError(
                f"the name of the {kind} is missing\n  "
                + named(self.registry, KINDS[kind]).replace("\n", "\n  ")
            )
        label = item.get("label", item["name"])
        on = item.get("on", {})
        if not isinstance(label, str):
            raise ValueError(f"'label' must be a string: {show(label)}")
        RunSettings(label=label)
        if label in RESERVED | self.others:
            raise ValueError(f"the label {label!r} has a meaning of its own; choose another")
        if not isinstance(on, Mapping) or not all(
            isinstance(settings, Mapping) for settings in on.values()
        ):
            raise ValueError("'on' must hold a table of settings for each task it names")
        table = {key: value for key, value in item.items() if key not in ("label", "on")}
        component = self.objects.get((kind, label))
        return Entry(
            kind=kind, label=label, table=table, stated="label" in item, on=on, component=component
        )

    def lay(self, table: dict[str, Any], entries: Sequence[Entry], sets: Sequence[str]) -> None:
        """``--set`` on entries by kind or by label, or on the rest of the file."""
        top = attrs.fields_dict(GridFile)
        for assignment in sets:
            head, dot, rest = assignment.partition(".")
            dotted = [
                entry.label
                for entry in entries
                if "." in entry.label and assignment.startswith(entry.label + ".")
            ]
            if dotted:  # a label may hold dots itself, like cleaning-0.6
                head = max(dotted, key=len)
                rest = assignment[len(head) + 1 :]
            named = bool(dot) and "=" not in head
            chosen = (
                [entry for entry in entries if head in (entry.kind, entry.label)] if named else []
            )
            key, equals, _ = assignment.partition("=")
            try:
                if named and not chosen and head not in top:
                    choices = [
                        "task",
                        "method",
                        "run",
                        "sweep",
                        *(entry.label for entry in entries),
                    ]
                    raise ConfigError(
                        f"--set {assignment}: {unknown('task or method', head, choices)}"
                    )
                if equals and not named and key.strip() not in top:
                    raise ConfigError(
                        f"--set {assignment}: whose {key.strip()!r}? write task.{key}, "
                        f"method.{key} or LABEL.{key}\n"
                        f"  of the grid itself: {', '.join(top)}"
                    )
                for entry in chosen:
                    lay(entry.table, rest, assignment)
                if not chosen:
                    lay(table, assignment)
            except ConfigError as error:
                self.problems.append(str(error))

    def narrowed(self, entries: list[Entry], only: Sequence[str]) -> list[Entry]:
        labels = [entry.label for entry in entries]
        kind = entries[0].kind if entries else "entry"
        self.problems += [
            f"{unknown(kind, word, labels)}\n  @ {self.where}.{kind}"
            for word in only
            if word not in labels
        ]
        return [entry for entry in entries if not only or entry.label in only]

    def check_on(self, tasks: Sequence[Entry], methods: Sequence[Entry]) -> None:
        labels = [task.label for task in tasks]
        self.problems += [
            f"'on' is for methods only @ {self.where}.task {task.label}"
            for task in tasks
            if task.on
        ]
        self.problems += [
            f"{unknown('task', label, labels)}\n  @ {self.where}.method {method.label}.on"
            for method in methods
            for label in method.on
            if label not in labels
        ]

    def fitting(
        self, tasks: Sequence[Entry], methods: Sequence[Entry], built: Mapping[str, Any]
    ) -> dict[tuple[str, str], Method]:
        """Every method for every task, built, and checked to fit it."""
        fitting: dict[tuple[str, str], Method] = {}
        unfit: list[str] = []
        left_out: dict[str, dict[str, list[str]]] = {}
        for entry in methods:
            place = f"{self.where}.method {entry.label}"
            general: dict[frozenset[str], Any] = {}  # defaults are those of the task's kind
            if not tasks:
                self.built(entry.at(""), Method, place)
            for task in tasks:
                traits = self.traits(task)
                if task.label in entry.on:
                    method = self.built(
                        entry.at(task.label), Method, f"{place} on {task.label}", traits
                    )
                else:
                    if traits not in general:
                        general[traits] = self.built(entry.at(""), Method, place, traits)
                    method = general[traits]
                if method is None or built[task.label] is None:
                    continue
                lacking = missing_traits(method, built[task.label])
                if lacking and entry.added:
                    # A task without data sources is of another kind: a reference for them is no
                    # news there.
                    said = {} if "sources" in lacking else left_out
                    said.setdefault(entry.label, {}).setdefault(wanted_traits(lacking), []).append(
                        task.label
                    )
                    continue
                fitting[task.label, entry.label] = method
                if lacking:
                    unfit.append(
                        misfit(entry.label, task.label, lacking)
                        + (STOP if "stop-rows" in lacking else "")
                    )
        if unfit:
            unfit[-1] += "\n  `hgms compat` shows which methods fit which tasks"
        self.problems += unfit
        self.left_out = lines_of(left_out)
        return fitting

    def traits(self, task: Entry) -> frozenset[str]:
        """What a task promises, by which methods have their defaults."""
        if task.component is None:
            return traits_of(self.registry, task.table)
        return frozenset(getattr(task.component, "traits", None) or ())

    # --- the rest of the file

    def metrics(self, built: Mapping[str, Any], metric: str | None) -> dict[str, str]:
        """The primary metric of each task."""
        chosen = {}
        for label, task in built.items():
            names = list(getattr(task, "metrics", ()))
            if task is not None and not names:
                self.problems.append(
                    f"the task {label!r} names no metrics, so there is nothing to compare by"
                )
            elif names and metric is not None and metric not in names:
                self.problems.append(
                    f"{unknown('metric', metric, names)}\n  @ {self.where}, task {label!r}"
                )
            chosen[label] = metric or next(iter(names), "")
        return chosen

    def reference(self, methods: Sequence[Entry], label: str | None) -> str:
        labels = [method.label for method in methods]
        if label is not None and label not in labels:
            cure = (
                "\n  it has to be one of those that are compared: add it to --methods, or "
                "name another with --reference"
            )
            self.problems.append(unknown("reference method", label, labels) + cure)
        default = next(
            (method.label for method in methods if method.name in DEFAULT_REFERENCES),
            next(iter(labels), ""),
        )
        return label or default

    def role(self, method: Entry) -> str:
        """What a method is in comparisons: what it is registered as, or what its object says."""
        return (
            role_of(self.registry, method.name)
            if method.component is None
            else getattr(method.component, "role", "")
        )

    def check_run(self, run: RunSettings) -> None:
        try:
            device_called(run.device)
        except ConfigError as error:
            self.problems.append(str(error))
        if run.label or run.task_label:
            self.problems.append(
                f"labels belong into the [[task]] and [[method]] tables @ {self.where}.run"
            )

    def check_devices(
        self, run: RunSettings, stated: Mapping[str, Any], built: Mapping[str, Any]
    ) -> None:
        """A problem of this process is where it is."""
        for label, task in built.items():
            for key, own in placed(task).items():
                if key in stated and stated[key] != own:
                    self.problems.append(
                        f"{key} = {show(stated[key])}, and the problem {label!r} is made in "
                        f"{show(own)}\n"
                        f"  leave run.{key} out, or make the problem there @ {self.where}.run"
                    )

    def check_sweep(
        self,
        sweep: SweepSettings,
        seeds: Sequence[int],
        known: list[str],
        tasks: Sequence[Entry],
        methods: Sequence[Entry],
    ) -> None:
        """The spaces name methods and fields that exist, have room for the trials, and hold
        values that can be built.
        """
        place = f"{self.where}.sweep"
        shared = sorted(set(sweep.seeds) & set(seeds))
        if shared:
            self.problems.append(
                "the pilot seeds must not be seeds of the comparison, or settings are chosen on "
                f"what is reported: {', '.join(map(str, shared))} @ {place}.seeds"
            )
        if not sweep.space:
            self.problems.append(
                f"no method has a space, so there is nothing to sweep @ {place}.space"
            )
        by_label = {method.label: method for method in methods}
        for label, table in sweep.space.items():
            here = f"{place}.space.{label}"
            if label not in known:
                self.problems.append(f"{unknown('method', label, known)}\n  @ {here}")
            elif label in by_label:
                try:
                    self.check_space(sweep, by_label[label], space.parse(table), tasks, here)
                except ConfigError as error:
                    self.problems.append(f"{error} @ {here}")
                except AttributeError:
                    self.problems.append(f"expected a table of fields, got {show(table)} @ {here}")

    def check_space(
        self,
        sweep: SweepSettings,
        method: Entry,
        dimensions: space.Space,
        tasks: Sequence[Entry],
        here: str,
    ) -> None:
        size = space.points(dimensions)
        if sweep.sampler == "grid" and size is None:
            raise ConfigError('sampler "grid" needs lists of values, not ranges')
        if sweep.sampler != "tpe" and size is not None and size < sweep.trials:
            raise ConfigError(
                f"{size} points are too few for {sweep.trials} different trials, and every "
                "method gets the same number; add values, or lower trials"
            )
        for task in tasks:
            traits = self.traits(task)
            for key, dimension in dimensions.items():
                for value in dimension.ends:
                    self.built(
                        method.at(task.label, {key: value}),
                        Method,
                        f"{here} ({key} = {show(value)})",
                        traits,
                    )
