"""Grid files: build a grid from a table of tasks and methods, and check all of it before the first
run.

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

``baselines = true`` at the top level adds the trivial baselines that fit (see
hgms.comparison.references); `hgms compare` sets it to true if the file does not contain it.
``[[task]]`` and ``[[method]]`` tables contain the fields of the component and the keys ``name``,
``label`` and ``on``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import field, frozen, validators

from hgms import facts
from hgms.arguments import collect_errors, require
from hgms.comparison.grid import (
    FLAGS,
    NO_FILE,
    PYTHON,
    Entry,
    Grid,
    copy_table,
    distinct_seeds,
    root_of,
)
from hgms.comparison.references import BASELINES, with_baselines
from hgms.comparison.scale import apply_scale
from hgms.config import Budget
from hgms.config.convert import role_of, structure, traits_of
from hgms.config.tables import merge_setting, show
from hgms.plugins import Registry
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
)
from hgms_core import ConfigError, HgmsError, Method, Task
from hgms_core.errors import Place, raise_all, unknown_name

RESERVED = {
    "task",
    "method",
    "run",
    "scale",
    "budget",
    "seeds",
    "schema",
    "metric",
    "reference",
    "baselines",
}


Objects = dict[tuple[str, str], Any]
"""Tasks and methods as objects, by kind and label."""


ARGUMENTS: Mapping[str | int, str] = {"task": "problems", "method": "methods"}
"""The arguments of :func:`hgms.comparison.compare` by the kinds of their entries."""

STOP = 'pass one set of rows for all roles in upper_data, or set keep = "last" in the method'
TRAITS = "run `hgms describe NAME` for the traits of a task or the needs of a method"


def device_settings(task: object) -> dict[str, str]:
    """Return device and dtype of a problem of this process, in the form of the settings."""
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
    baselines: bool = False
    run: RunSettings = RunSettings()
    task: Any
    method: Any


def load(
    table: Mapping[str, Any],
    *,
    source: str = NO_FILE,
    sets: Iterable[str] = (),
    tasks: Sequence[str] = (),
    methods: Sequence[str] = (),
    scale: str | None = None,
    options: Collection[str] = (),
    registry: Registry | None = None,
    objects: Objects | None = None,
) -> Grid:
    """Build the grid that a file's table describes.

    ``scale`` selects one of the scales in the table (:mod:`hgms.comparison.scale`). ``sets``
    override values, and ``tasks`` and ``methods`` restrict the grid to these labels.

    ``sets`` are ``task.FIELD=…`` and ``method.FIELD=…`` (all tasks or methods), ``LABEL.FIELD=…``
    (one task or method), or a key of the top level. ``objects`` are the tasks and methods whose
    tables contain only a name and a label, by kind and label. ``options`` are the keys of ``table``
    that are from the command line.

    Raises
    ------
    ConfigError
        Or an ErrorGroup with all errors. Places begin with ``source`` if it is a file, or are an
        option (``--seeds``); entries are named by their labels: ``("grid.toml", "method",
        "hg-ms", "outer", "lr")``.
    """
    return _Loader(source, options, registry or Registry.load(), objects or {}).load(
        apply_scale(table, scale, source), list(sets), tasks, methods
    )


class _Loader:
    """Build a grid and collect the errors."""

    def __init__(
        self, where: str, options: Collection[str], registry: Registry, objects: Objects
    ) -> None:
        self.where = where
        self.options = options
        self.root = root_of(where)
        self.registry = registry
        self.objects = objects
        self.errors: list[HgmsError] = []
        self.others = tables_of_others() - attrs.fields_dict(GridFile).keys()

    def load(
        self,
        grid: dict[str, Any],
        sets: Sequence[str],
        only_tasks: Sequence[str],
        only_methods: Sequence[str],
    ) -> Grid:
        table = copy_table(grid)
        all_tasks = self.entries("task", table.get("task"))
        all_methods = self.entries("method", table.get("method"))
        all_methods = self.with_added(table, all_methods)
        self.lay(table, [*all_tasks, *all_methods], sets)
        # `sets` may have requested further methods; no method is added twice
        all_methods = self.with_added(table, all_methods)
        tasks = self.select(all_tasks, only_tasks)
        methods = self.select(all_methods, only_methods)
        for key in self.others:
            table.pop(key, None)
        file = self.build({"task": [], "method": [], **table}, GridFile)
        self.check_on(all_tasks, all_methods)
        built = {task.label: self.build(task.at(""), Task, ("task", task.label)) for task in tasks}
        fitting = self.fitting(tasks, methods, built)
        metrics = self.metrics(built, table.get("metric"))
        reference = self.reference(methods, table.get("reference"))
        if file is None:  # the rest depends on its values
            self.stop()
        assert file is not None
        seeds = tuple(range(file.seeds)) if isinstance(file.seeds, int) else tuple(file.seeds)
        self.check_run(file.run)
        self.check_devices(file.run, table.get("run", {}), built)
        self.stop()
        pairs = {}
        for task, method in itertools.product(tasks, methods):
            if method.added and (task.label, method.label) not in fitting:
                continue
            pairs[task.label, method.label] = RunConfig(
                task=built[task.label],
                method=fitting[task.label, method.label],
                method_name=method.name,
                role=self.role(method),
                seed=seeds[0],
                budget=file.budget,
                run=attrs.evolve(
                    file.run,
                    label=method.label if method.stated else None,
                    task_label=task.label if task.stated else None,
                    **device_settings(built[task.label]),
                ),
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
            pairs=pairs,
            registry=self.registry,
            own=bool(self.objects),
        )

    def with_added(self, table: Mapping[str, Any], methods: list[Entry]) -> list[Entry]:
        """Return the methods with the baselines that the table requests."""
        wanted = methods and table.get("baselines") is True
        return with_baselines(methods, self.registry) if wanted else methods

    def build(
        self, table: object, wanted: Any, place: Place = (), traits: frozenset[str] = frozenset()
    ) -> Any:
        """Build the object that a table at ``place`` describes (a method for tasks with
        ``traits``).

        Return ``None`` if that fails; its errors are collected.
        """
        built = None
        found: list[HgmsError] = []
        with collect_errors(found):
            built = structure(table, wanted, self.registry, traits)
        for error in found:
            error.place = self.place(*place, *error.place)
        self.errors += found
        return built

    def place(self, *path: str | int) -> Place:
        """Return the place of a value: its option, or the path in the file or in the arguments of
        :func:`compare`.
        """
        if path and path[0] in self.options:
            return (f"--{path[0]}",)
        if self.where == PYTHON and path:
            return (ARGUMENTS.get(path[0], path[0]), *path[1:])
        return (*self.root, *path)

    def stop(self) -> None:
        """Raise the collected errors, each once."""
        distinct = {(error.code, error.message, error.place): error for error in self.errors}
        if distinct:
            raise_all([*distinct.values()])

    # --- tasks and methods

    def entries(self, kind: Literal["task", "method"], listed: object) -> list[Entry]:
        """Return the entries of one kind, with labels. Strings are tables with only a name."""
        items = (
            listed if isinstance(listed, (list, tuple)) else [listed] if listed is not None else []
        )
        if not items:
            flag = {"task": "--task NAME", "method": "--methods NAME,NAME"}[kind]
            hints = {
                FLAGS: f"add {flag} (`hgms list {kind}` shows all)",
                PYTHON: f"pass its name (`hgms list {kind}` shows all), a table or an object",
            }
            self.errors.append(
                ConfigError(
                    "missing-option",
                    f"no {kind} is given",
                    place=self.place(kind),
                    hint=hints.get(self.where, f"write a [[{kind}]] table with its name"),
                )
            )
        entries = []
        for index, item in enumerate(items):
            with collect_errors(self.errors, *self.place(kind, index)):
                entries.append(self.entry(kind, {"name": item} if isinstance(item, str) else item))
        where = " in a grid file" if self.where == FLAGS else ""
        self.errors += [
            ConfigError(
                "duplicate-label",
                f"{count} {kind}s have the label {label!r}",
                place=self.place(kind),
                hint=f'set a different label for each, such as label = "{label}-2"{where}',
            )
            for label, count in Counter(entry.label for entry in entries).items()
            if count > 1
        ]
        return entries

    def entry(self, kind: Literal["task", "method"], item: Any) -> Entry:
        """Return the entry of a table. Errors: ConfigError, with its place in the table."""
        require(
            isinstance(item, Mapping),
            "wrong-type",
            f"{show(item)} must be a table with the name of a {kind}",
        )
        if not isinstance(item.get("name"), str):
            names = ", ".join(component.name for component in self.registry.components(kind))
            raise ConfigError(
                "missing-option",
                f"the name of the {kind} is missing",
                place=("name",),
                hint=f"available: {names}\n`hgms list {kind}` describes each",
            )
        label = item.get("label", item["name"])
        on = item.get("on", {})
        require(
            isinstance(label, str),
            "wrong-type",
            f"label={show(label)} must be a string",
            place=("label",),
        )
        RunSettings(label=label)
        require(
            label not in RESERVED | self.others,
            "reserved-label",
            f"the label {label!r} is reserved",
            hint="choose another label",
            place=("label",),
        )
        require(
            isinstance(on, Mapping)
            and all(isinstance(settings, Mapping) for settings in on.values()),
            "wrong-type",
            "on must contain one table of settings per task",
            place=("on",),
        )
        table = {key: value for key, value in item.items() if key not in ("label", "on")}
        component = self.objects.get((kind, label))
        return Entry(
            kind=kind, label=label, table=table, stated="label" in item, on=on, component=component
        )

    def lay(self, table: dict[str, Any], entries: Sequence[Entry], sets: Sequence[str]) -> None:
        """Apply ``--set`` to entries by kind or by label, or to the rest of the file."""
        top = attrs.fields_dict(GridFile)
        labels = [entry.label for entry in entries]
        for assignment in sets:
            key, equals, _ = assignment.partition("=")
            first, dot, _ = key.partition(".")
            # a label may contain dots, like cleaning-0.6
            named = [name for name in ("task", "method", *labels) if key.startswith(f"{name}.")]
            head = max(named, key=len, default=first)
            rest = assignment[len(head) + 1 :]
            chosen = [entry for entry in entries if named and head in (entry.kind, entry.label)]
            place = (f"--set {assignment}",)
            with collect_errors(self.errors):
                if equals and not chosen and first.strip() not in top:
                    if dot:
                        choices = ["task", "method", "run", *labels]
                        raise unknown_name("label", first, choices, place, label="task or method")
                    raise ConfigError(
                        "ambiguous-setting",
                        f"{key.strip()!r} is not an option of the grid",
                        place=place,
                        hint=f"use task.{key}, method.{key} or LABEL.{key}\n"
                        f"options of the grid: {', '.join(top)}",
                    )
                for entry in chosen:
                    require(
                        rest.partition("=")[0].strip() != "name",
                        "not-supported",
                        f"the name of {entry.kind} {entry.label!r} cannot be set",
                        hint=f"name another {entry.kind} instead",
                        place=place,
                    )
                    if entry.added and head == entry.kind:
                        self.lay_if_known(entry, rest, assignment)
                    else:
                        merge_setting(entry.table, rest, assignment)
                if not chosen:
                    merge_setting(table, assignment)

    def lay_if_known(self, entry: Entry, rest: str, assignment: str) -> None:
        """Apply a setting for all methods to a method that the user did not name, only if it has
        the field.
        """
        table = copy_table(entry.table)
        with contextlib.suppress(HgmsError):
            merge_setting(table, rest, assignment)
            structure(table, Method, self.registry)
            entry.table.update(table)

    def select(self, entries: list[Entry], only: Sequence[str]) -> list[Entry]:
        labels = [entry.label for entry in entries]
        kind = entries[0].kind if entries else "entry"
        self.errors += [
            unknown_name(kind, word, labels, self.place(kind))
            for word in only
            if word not in labels
        ]
        return [entry for entry in entries if not only or entry.label in only]

    def check_on(self, tasks: Sequence[Entry], methods: Sequence[Entry]) -> None:
        labels = [task.label for task in tasks]
        self.errors += [
            ConfigError(
                "not-supported",
                "only methods support on",
                place=self.place("task", task.label, "on"),
            )
            for task in tasks
            if task.on
        ]
        for method in methods:
            for label, settings in method.on.items():
                place = self.place("method", method.label, "on", label)
                if label not in labels:
                    self.errors.append(unknown_name("task", label, labels, place))
                if "name" in settings:
                    self.errors.append(
                        ConfigError(
                            "not-supported",
                            "the name of a method cannot differ between tasks",
                            place=(*place, "name"),
                            hint="add a [[method]] table with this name",
                        )
                    )

    def fitting(
        self, tasks: Sequence[Entry], methods: Sequence[Entry], built: Mapping[str, Any]
    ) -> dict[tuple[str, str], Method]:
        """Build every method for every task and check that it fits."""
        fitting: dict[tuple[str, str], Method] = {}
        for entry in methods:
            place: Place = ("method", entry.label)
            general: dict[frozenset[str], Any] = {}  # defaults depend on the task's traits
            if not tasks:
                self.build(entry.at(""), Method, place)
            for task in tasks:
                traits = self.traits(task)
                if task.label in entry.on:
                    method = self.build(
                        entry.at(task.label), Method, (*place, "on", task.label), traits
                    )
                else:
                    if traits not in general:
                        general[traits] = self.build(entry.at(""), Method, place, traits)
                    method = general[traits]
                if method is None or built[task.label] is None:
                    continue
                lacking = missing_traits(method, built[task.label])
                known = facts.traits_of(built[task.label])
                # a baseline that the user did not name could fail on a task without traits
                if entry.added and (lacking or known is None or not BASELINES[entry.name] <= known):
                    continue
                fitting[task.label, entry.label] = method
                if lacking:
                    self.errors.append(
                        ConfigError(
                            "not-supported",
                            misfit(entry.label, task.label, lacking),
                            place=self.place(*place),
                            hint=f"{STOP}\n{TRAITS}" if "stop-rows" in lacking else TRAITS,
                        )
                    )
        return fitting

    def traits(self, task: Entry) -> frozenset[str]:
        """Return the traits of a task, which determine the defaults of methods."""
        if task.component is None:
            return traits_of(self.registry, task.table)
        return facts.traits_of(task.component) or frozenset()

    # --- the rest of the file

    def metrics(self, built: Mapping[str, Any], metric: str | None) -> dict[str, str]:
        """Return the primary metric of each task."""
        chosen = {}
        for label, task in built.items():
            names = list(facts.metrics_of(task))
            if task is not None and not names:
                self.errors.append(
                    ConfigError(
                        "wrong-metric",
                        f"the task {label!r} has no metrics, so it cannot be compared",
                        place=self.place("task", label),
                    )
                )
            elif names and metric is not None and metric not in names:
                self.errors.append(
                    unknown_name(
                        "metric",
                        str(metric),
                        names,
                        self.place("metric"),
                        label=f"metric of task {label!r}:",
                    )
                )
            chosen[label] = metric or next(iter(names), "")
        return chosen

    def reference(self, methods: Sequence[Entry], label: str | None) -> str:
        labels = [method.label for method in methods]
        if label is not None and label not in labels:
            place = self.place("reference")
            self.errors.append(
                unknown_name("method", str(label), labels, place, label="reference method")
            )
        defaults = [method.label for method in methods if method.name in DEFAULT_REFERENCES]
        return label or next(iter([*defaults, *labels]), "")

    def role(self, method: Entry) -> str:
        """Return the role of a method in comparisons: its registered role, or the role of its
        object.
        """
        return (
            role_of(self.registry, method.name)
            if method.component is None
            else facts.role_of(method.component)
        )

    def check_run(self, run: RunSettings) -> None:
        with collect_errors(self.errors, *self.root):
            device_called(run.device)
        if run.label or run.task_label:
            self.errors.append(
                ConfigError(
                    "not-supported",
                    "the [run] table of a grid does not support labels",
                    place=self.place("run", "label" if run.label else "task_label"),
                    hint="set labels in the [[task]] and [[method]] tables",
                )
            )

    def check_devices(
        self, run: RunSettings, stated: Mapping[str, Any], built: Mapping[str, Any]
    ) -> None:
        """Require that ``[run]`` does not contradict the device and dtype of given problems."""
        for label, task in built.items():
            for key, own in device_settings(task).items():
                if key in stated and stated[key] != own:
                    self.errors.append(
                        ConfigError(
                            "conflicting-options",
                            f"{key}={show(stated[key])} differs from {show(own)}, the {key} of "
                            f"the problem {label!r}",
                            place=self.place("run", key),
                            hint=f"remove run.{key}, or create the problem with it",
                        )
                    )
