"""Grid files: a table of tasks and methods as a grid, all of it built and checked before anything runs.

::

    budget = "60s"
    seeds = 5                         # 0 … 4; or a list

    [run]
    out = "runs"

    [[task]]
    name = "hyper-cleaning"
    corruption = 0.6

    [[method]]
    name = "hg-ms"
    on.hyper-cleaning.outer.lr = 0.3  # for one task only, by its label

    [[method]]
    name = "hg-ms"
    label = "hg-ms-1"                 # two variants of one method need labels
    generator.count = 1

    [sweep]                           # optional: see hgms_compare.sweep
    trials = 5
    seeds = [100]
    sampler = "random"
    space.hg-ms = { "outer.lr" = { low = 0.01, high = 1.0, log = true } }

``[[task]]`` and ``[[method]]`` tables hold the fields of the component, and ``name``, ``label`` and ``on`` beside them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import field, frozen, validators

from hgms_compare import space
from hgms_compare.grid import Entry, Grid, SweepSettings, distinct_seeds
from hgms_compare.scale import scaled
from hgms_core import Budget, ConfigError, HgmsError, Method, Task, misfit, missing_traits, unknown
from hgms_core.registry import Registry
from hgms_results import DEFAULT_REFERENCE
from hgms_run import LATER, SCHEMA, Invalid, RunConfig, RunSettings, device_called, lay, put, show, structured, traits_of

FLAGS = "the command line"
"""The source of a grid that has no file."""

RESERVED = {"task", "method", "run", "scale", "sweep", "budget", "seeds", "sweeps", "schema", "metric", "reference"}
RESERVED |= set(LATER)


@frozen(kw_only=True)
class GridFile:
    """The top level of a grid's TOML file. ``task`` and ``method`` are lists of tables (or of names)."""

    schema: int = field(default=SCHEMA, validator=validators.in_([SCHEMA]))
    budget: Budget
    seeds: int | list[int] = field(default=5, validator=distinct_seeds)
    metric: str | None = None
    reference: str | None = None
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
) -> Grid:
    """The grid that a file's table describes, with ``sets`` laid over it, narrowed to the labels ``tasks`` and ``methods``; at
    one of its scales (:mod:`hgms_compare.scale`) if ``scale`` names one.

    ``sets`` are ``task.FIELD=…`` and ``method.FIELD=…`` (all of them), ``LABEL.FIELD=…`` (one of them), or a key of the top
    level. Raises one ConfigError with everything that is wrong.
    """
    return _Loader(source, registry or Registry.load()).load(scaled(table, scale, source), list(sets), tasks, methods)


class _Loader:
    """Gathers problems, and stops where there are any."""

    def __init__(self, where: str, registry: Registry) -> None:
        self.where, self.registry = where, registry
        self.problems: list[str] = []

    def stop(self) -> None:
        found = list(dict.fromkeys(self.problems))
        if len(found) == 1:
            raise ConfigError(found[0])
        if found:
            shown = "\n".join("  " + one.replace("\n", "\n  ") for one in found)
            raise ConfigError(f"{len(found)} problems in {self.where}; nothing was run:\n{shown}")

    def built(self, table: object, wanted: Any, place: str, traits: frozenset[str] = frozenset()) -> Any:
        """The object a table describes (a method for tasks with ``traits``), or None with its errors among the problems."""
        try:
            return structured(table, wanted, self.registry, traits)
        except Invalid as invalid:
            self.problems += [Invalid(one).render(place) for one in invalid.errors]
        except HgmsError as error:
            self.problems.append(f"{error} @ {place}")
        return None

    def load(self, given: dict[str, Any], sets: Sequence[str], only_tasks: Sequence[str], only_methods: Sequence[str]) -> Grid:
        table = copy.deepcopy(given)
        every_task, every_method = self.entries("task", table.get("task")), self.entries("method", table.get("method"))
        self.lay(table, [*every_task, *every_method], sets)
        tasks, methods = self.narrowed(every_task, only_tasks), self.narrowed(every_method, only_methods)
        if self.where == FLAGS and "budget" not in table:
            self.problems.append('no budget is given; add --budget 60s, --budget "25 steps" or --budget "1e5 calls"')
            table["budget"] = "1 step"
        for key in LATER:
            table.pop(key, None)
        file = self.built({"task": [], "method": [], **table}, GridFile, self.where)
        self.check_on(every_task, every_method)
        built = {one.label: self.built(one.table, Task, f"{self.where}.task {one.label}") for one in tasks}
        fitting = self.fitting(tasks, methods, built)
        if file is None:
            file = self.salvaged(table)
        seeds = tuple(range(file.seeds)) if isinstance(file.seeds, int) else tuple(file.seeds)
        metrics = self.metrics(built, file.metric)
        reference = self.reference(methods, file.reference)
        self.check_run(file.run)
        if file.sweep is not None:
            self.check_sweep(file.sweep, seeds, [one.label for one in every_method], tasks, methods)
        self.stop()
        pairs = {}
        for one in tasks:
            for other in methods:
                run = attrs.evolve(
                    file.run, label=other.label if other.stated else None, task_label=one.label if one.stated else None
                )
                pairs[one.label, other.label] = RunConfig(
                    task=built[one.label], method=fitting[one.label, other.label], method_name=other.name,
                    seed=seeds[0], budget=file.budget, run=run, host=self.registry.host,
                )  # fmt: skip
        return Grid(
            tasks=tasks, methods=methods, seeds=seeds, budget=file.budget, run=file.run, metrics=metrics,
            reference=reference, sweep=file.sweep, pairs=pairs, registry=self.registry,
        )  # fmt: skip

    def salvaged(self, table: Mapping[str, Any]) -> GridFile:
        """The file without the keys that are wrong, so that what depends on the others is looked at too."""
        kept: dict[str, Any] = {"budget": "1 step", "seeds": [2**40], "task": [], "method": []}
        for key, value in table.items():
            with contextlib.suppress(Invalid, HgmsError):
                structured({**kept, key: value}, GridFile, self.registry)
                kept[key] = value
        made: GridFile = structured(kept, GridFile, self.registry)
        return made

    # --- tasks and methods

    def entries(self, kind: Literal["task", "method"], given: object) -> list[Entry]:
        """The tables of one kind, with labels. Strings are names alone."""
        items = given if isinstance(given, (list, tuple)) else [given] if given is not None else []
        if not items:
            how = f"write a [[{kind}]] table with its name"
            if self.where == FLAGS:
                how = {"task": "add --task NAME", "method": "add --methods NAME,NAME"}[
                    kind
                ] + f" (`hgms list {kind}` shows all)"
            self.problems.append(f"no {kind} is named; {how} @ {self.where}")
        made = [self.entry(kind, item, f"{self.where}.{kind}[{number}]") for number, item in enumerate(items, start=1)]
        found = [one for one in made if one is not None]
        labels = [one.label for one in found]
        for label in dict.fromkeys(labels):
            if labels.count(label) > 1:
                self.problems.append(
                    f"{labels.count(label)} {kind}s are called {label!r}; give each a label of its own, like "
                    f'label = "{label}-2"{" in a grid file" if self.where == FLAGS else ""} @ {self.where}.{kind}'
                )
        return found

    def entry(self, kind: Literal["task", "method"], item: object, place: str) -> Entry | None:
        if isinstance(item, str):
            item = {"name": item}
        if not isinstance(item, Mapping):
            self.problems.append(f"expected a table with the name of a {kind}, got {show(item)} @ {place}")
            return None
        if not isinstance(item.get("name"), str):
            names = ", ".join(one.name for one in self.registry.components(kind))
            self.problems.append(f"the name of the {kind} is missing @ {place}\n  available: {names}")
            return None
        label, on = item.get("label", item["name"]), item.get("on", {})
        try:
            if not isinstance(label, str):
                raise ValueError(f"'label' must be a string: {show(label)}")
            RunSettings(label=label)
            if label in RESERVED:
                raise ValueError(f"the label {label!r} has a meaning of its own; choose another")
            if not isinstance(on, Mapping) or not all(isinstance(one, Mapping) for one in on.values()):
                raise ValueError("'on' must hold a table of settings for each task it names")
        except ValueError as error:
            self.problems.append(f"{error} @ {place}")
            return None
        table = {key: value for key, value in item.items() if key not in ("label", "on")}
        return Entry(kind=kind, label=label, table=table, stated="label" in item, on=on)

    def lay(self, table: dict[str, Any], entries: Sequence[Entry], sets: Sequence[str]) -> None:
        """``--set`` on entries by kind or by label, or on the rest of the file."""
        top = attrs.fields_dict(GridFile)
        for assignment in sets:
            head, dot, rest = assignment.partition(".")
            dotted = [one.label for one in entries if "." in one.label and assignment.startswith(one.label + ".")]
            if dotted:  # a label may hold dots itself, like cleaning-0.6
                head = max(dotted, key=len)
                rest = assignment[len(head) + 1 :]
            named = bool(dot) and "=" not in head
            hit = [one for one in entries if head in (one.kind, one.label)] if named else []
            try:
                if named and not hit and head not in top:
                    choices = ["task", "method", "run", "sweep", *(one.label for one in entries)]
                    raise ConfigError(f"--set {assignment}: {unknown('task or method', head, choices)}")
                key, equals, _ = assignment.partition("=")
                if equals and not named and key.strip() not in top:
                    raise ConfigError(
                        f"--set {assignment}: whose {key.strip()!r}? write task.{key}, method.{key} or LABEL.{key}\n"
                        f"  of the grid itself: {', '.join(top)}"
                    )
                for entry in hit:
                    lay(entry.table, rest, assignment)
                if not hit:
                    lay(table, assignment)
            except ConfigError as error:
                self.problems.append(str(error))

    def narrowed(self, entries: list[Entry], only: Sequence[str]) -> list[Entry]:
        labels = [one.label for one in entries]
        kind = entries[0].kind if entries else "entry"
        self.problems += [f"{unknown(kind, word, labels)}\n  @ {self.where}.{kind}" for word in only if word not in labels]
        return [one for one in entries if not only or one.label in only]

    def check_on(self, tasks: Sequence[Entry], methods: Sequence[Entry]) -> None:
        labels = [one.label for one in tasks]
        self.problems += [f"'on' is for methods only @ {self.where}.task {one.label}" for one in tasks if one.on]
        self.problems += [
            f"{unknown('task', label, labels)}\n  @ {self.where}.method {one.label}.on"
            for one in methods
            for label in one.on
            if label not in labels
        ]

    def fitting(
        self, tasks: Sequence[Entry], methods: Sequence[Entry], built: Mapping[str, Any]
    ) -> dict[tuple[str, str], Method]:
        """Every method for every task, built, and checked to fit it."""
        found: dict[tuple[str, str], Method] = {}
        unfit: list[str] = []
        for other in methods:
            place = f"{self.where}.method {other.label}"
            whole: dict[frozenset[str], Any] = {}  # defaults are those of the task's kind
            if not tasks:
                self.built(other.table, Method, place)
            for one in tasks:
                traits = traits_of(self.registry, one.table)
                if one.label in other.on:
                    method = self.built(other.at(one.label), Method, f"{place} on {one.label}", traits)
                else:
                    if traits not in whole:
                        whole[traits] = self.built(other.table, Method, place, traits)
                    method = whole[traits]
                if method is None or built[one.label] is None:
                    continue
                found[one.label, other.label] = method
                lacking = missing_traits(method, built[one.label])
                if lacking:
                    unfit.append(misfit(other.label, one.label, lacking))
        if unfit:
            unfit[-1] += "\n  `hgms compat` shows which methods fit which tasks"
        self.problems += unfit
        return found

    # --- the rest of the file

    def metrics(self, built: Mapping[str, Any], metric: str | None) -> dict[str, str]:
        """The primary metric of each task."""
        chosen = {}
        for label, task in built.items():
            names = list(task.metrics) if task is not None else []
            if task is not None and not names:
                self.problems.append(f"the task {label!r} names no metrics, so there is nothing to compare by")
            elif names and metric is not None and metric not in names:
                self.problems.append(f"{unknown('metric', metric, names)}\n  @ {self.where}, task {label!r}")
            chosen[label] = metric or next(iter(names), "")
        return chosen

    def reference(self, methods: Sequence[Entry], given: str | None) -> str:
        labels = [one.label for one in methods]
        if given is not None and given not in labels:
            self.problems.append(unknown("reference method", given, labels))
        return given or next((one.label for one in methods if one.name == DEFAULT_REFERENCE), next(iter(labels), ""))

    def check_run(self, run: RunSettings) -> None:
        try:
            device_called(run.device)
        except ConfigError as error:
            self.problems.append(str(error))
        if run.label or run.task_label:
            self.problems.append(f"labels belong into the [[task]] and [[method]] tables @ {self.where}.run")

    def check_sweep(
        self, sweep: SweepSettings, seeds: Sequence[int], known: list[str], tasks: Sequence[Entry], methods: Sequence[Entry]
    ) -> None:
        """The spaces name methods and fields that exist, have room for the trials, and hold values that can be built."""
        place = f"{self.where}.sweep"
        shared = sorted(set(sweep.seeds) & set(seeds))
        if shared:
            self.problems.append(
                f"the pilot seeds must not be seeds of the comparison, or settings are chosen on what is reported: "
                f"{', '.join(map(str, shared))} @ {place}.seeds"
            )
        if not sweep.space:
            self.problems.append(f"no method has a space, so there is nothing to sweep @ {place}.space")
        by_label = {one.label: one for one in methods}
        for label, table in sweep.space.items():
            here = f"{place}.space.{label}"
            if label not in known:
                self.problems.append(f"{unknown('method', label, known)}\n  @ {here}")
            elif label in by_label:
                try:
                    self.check_space(sweep, by_label[label], space.parse(table), tasks, here)
                except (ConfigError, AttributeError) as error:
                    said = error if isinstance(error, ConfigError) else f"expected a table of fields, got {show(table)}"
                    self.problems.append(f"{said} @ {here}")

    def check_space(
        self, sweep: SweepSettings, method: Entry, found: Mapping[str, space.Dimension], tasks: Sequence[Entry], here: str
    ) -> None:
        size = space.points(found)
        if sweep.sampler == "grid" and size is None:
            raise ConfigError('sampler "grid" needs lists of values, not ranges')
        if sweep.sampler != "tpe" and size is not None and size < sweep.trials:
            raise ConfigError(
                f"{size} points are too few for {sweep.trials} different trials, and every method gets the same number; "
                "add values, or lower trials"
            )
        for task in tasks:
            traits = traits_of(self.registry, task.table)
            for key, one in found.items():
                for value in one.ends:
                    trial = copy.deepcopy(method.at(task.label))
                    put(trial, key.split("."), value)
                    self.built(trial, Method, f"{here} ({key} = {show(value)})", traits)


__all__ = ["FLAGS", "GridFile", "load"]
