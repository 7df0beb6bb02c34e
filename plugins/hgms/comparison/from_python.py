"""``hgms compare`` from Python: problems, tasks and methods as names, tables or objects.

Names and tables are read like a grid file. Objects that no other process can build (a problem of a
notebook, a class that no plugin registers) are used unchanged, and are compared in this process.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field

from hgms.arguments import require
from hgms.comparison.comparison import Comparison
from hgms.comparison.grid import PYTHON
from hgms.comparison.grid_file import ARGUMENTS, Objects, load
from hgms.comparison.run_grid import run_grid
from hgms.config import Budget, check_arguments
from hgms.config.as_table import plain
from hgms.config.invalid import kinds_of
from hgms.facts import name_of
from hgms.plugins import KINDS, LOG, Registry
from hgms.runs import Interrupted, OwnProblem, RunSettings
from hgms_core import ConfigError, Problem, Task
from hgms_core.arguments import check_part

EXPECTED = {
    "task": "a Problem, a function seed -> Problem, or a task (its name, a table, or an object)",
    "method": "a method (its name, a table, or an object)",
}
"""The accepted values by the kinds of entries."""


class _Scratch:
    """A temporary folder that is removed with this object."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="hgms-compare-")
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@check_arguments()
def compare(
    problems: Any,
    methods: Any,
    budget: str | Budget,
    seeds: int | Sequence[int] = 5,
    out: str | Path | None = None,
    *,
    run: RunSettings | Mapping[str, Any] | None = None,
    metric: str | None = None,
    higher_is_better: bool | Mapping[str, bool] | None = None,
    reference: str | None = None,
    baselines: bool = True,
    jobs: int | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    registry: Registry | None = None,
) -> Comparison:
    """Compare every problem with every method and seed under one budget; return one table per
    problem.

    A run belongs to its problem and method: its configuration contains digests of their values and
    code. If they have changed, the run is executed in another folder and a message is printed;
    otherwise the stored run is read. A function ``seed -> Problem`` is identified by its code. If
    its problem differs although the code is the same, the stored run is not used and is reported as
    damaged. A run that fails is listed in ``failures``, and the others continue.

    Parameters
    ----------
    problems
        a :class:`Problem`; a function ``seed -> Problem``, so that the seed also determines data
        and start; a task as a name, a table of a grid file or an object; a list of these, or a
        dictionary from labels to these.
    methods
        Names (``"hg-ms"``), tables (``{"name": "hg-ms", "outer": {"lr": 0.1}}``, whose parts may be
        objects) or objects, such as a :class:`Pipeline` or an instance of a user class; a list, or
        a dictionary from labels.
    budget
        The budget of each run: ``"60s"``, ``"25 steps"``, ``"1e5 calls"``.
    seeds
        a count (0, 1, …) or the numbers.
    out
        The folder of the run folders, for ``hgms report`` and to resume: a second call reads
        finished runs and runs the missing ones; ``None``: a temporary folder that is kept as long
        as the returned comparison.
    run
        Settings of ``[run]``, by name.
    metric
        The metric of the comparison. Default: the first metric of ``evaluate`` or the task. Metrics
        of ``evaluate`` must use rows that are neither training nor validation rows: methods train
        and select on those. A problem without metrics has ``upper_loss``: f on a quarter of its
        validation rows, which no method sees. With fewer than four validation rows no method is
        ranked by it.
    higher_is_better
        The direction of the metric, if its name does not imply it (the names of an accuracy or a
        loss do).
    reference
        The label of the method to which differences are taken (default: ``uniform`` if present,
        else the first).
    baselines
        Whether the trivial baselines that fit a problem are added: ``uniform``, and for problems
        with validation rows ``validation-only`` and ``uniform-tilted``.
    jobs
        Number of parallel processes, as in ``hgms compare``; 0: in this process. Problems and
        objects of classes that are not registered exist only in this process. Their runs are then
        executed here, one by one, and any other number is rejected (a process that is forked after
        torch has computed may hang).
    retry_failed
        Whether failed runs are repeated.
    progress
        Whether to show progress: bars on a terminal or below a notebook's cell, else a line per run
        on stderr.

    Raises
    ------
    ConfigError
        If an argument is invalid, or a method needs a property that a problem lacks; all errors are
        listed, and no run has started.

    Examples
    --------
    >>> import torch
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: ((x["x"] - 2) ** 2).sum(),
    ... )
    >>> comparison = compare(problem, ["hg-implicit", "uniform"], "20 steps", seeds=2)
    >>> table = comparison.tables[0]
    >>> [
    ...     (row.method, round(row.metrics[table.metric].mean, 1)) for row in table.rows
    ... ]  # f at the x of each
    [('hg-implicit', 0.0), ('uniform', 2.4)]
    """
    registry = registry or Registry.load()
    settings = dict(plain(run)) if isinstance(run, RunSettings) else dict(run or {})
    scratch = _Scratch() if out is None else None
    first = 0 if isinstance(seeds, int) else min(seeds, default=0)
    reading = _Reading(registry, first, metric, higher_is_better)
    given = {
        "budget": plain(budget) if isinstance(budget, Budget) else budget,
        "seeds": seeds if isinstance(seeds, int) else list(seeds),
        "task": reading.entries("task", problems),
        "method": reading.entries("method", methods),
        "run": {key: value for key, value in settings.items() if value != "none"}
        | {"out": str(out) if scratch is None else scratch.path},
        "metric": metric,
        "reference": reference,
        "baselines": baselines,
    }
    stated = {key: value for key, value in given.items() if value is not None}
    grid = load(stated, source=PYTHON, registry=registry, objects=reading.objects)
    try:
        comparison = run_grid(
            grid,
            jobs=jobs,
            retry_failed=retry_failed,
            progress=progress,
            say=lambda line: LOG.warning("%s", line),
        )
    except Interrupted as error:
        if scratch is None:
            raise
        raise Interrupted(
            "interrupted; no run is saved",
            error.number,
            hint='set out="runs/mine" to be able to resume',
        ) from None
    return attrs.evolve(comparison, scratch=scratch)


@define
class _Reading:
    """Convert the arguments of the user to entries of a grid file.

    ``seed`` is the seed with which a function's problem is inspected. ``objects`` contains the
    objects that have no table, by kind and label.
    """

    registry: Registry
    seed: int
    metric: str | None
    higher: bool | Mapping[str, bool] | None
    objects: Objects = field(factory=dict, init=False)

    def entries(self, kind: str, value: Any) -> list[Any]:
        """Return the entries of one item, a list of items, or a dictionary from labels to items."""
        pairs: list[tuple[str | None, Any]] = []
        for item in value if isinstance(value, list | tuple) else [value]:
            if (
                isinstance(item, Mapping)
                and not isinstance(item.get("name"), str)
                and not (item.keys() & {"label", "on"})
            ):
                pairs += item.items()
            else:
                pairs.append((None, item))
        return [self.entry(kind, label, item) for label, item in pairs]

    def entry(self, kind: str, label: str | None, item: Any) -> Any:
        named = {} if label is None else {"label": label}
        if isinstance(item, str):
            return {"name": item, **named}
        if isinstance(item, Mapping):
            return (
                {**self.table(item), **named}
                if label is None or isinstance(item.get("name"), str)
                else item
            )
        if kind == "task" and (
            isinstance(item, Problem) or (callable(item) and not isinstance(item, Task | type))
        ):
            return self.problem(label, item)
        check_part((ARGUMENTS[kind],), item, EXPECTED[kind], KINDS[kind].methods())
        if self.is_registered(item):
            return {**plain(item), **named}
        return self.keep(kind, str(name_of(item)), label, item)

    def problem(
        self, label: str | None, problem: Problem | Callable[[int], Problem]
    ) -> dict[str, Any]:
        function = problem.__name__ if inspect.isroutine(problem) else ""
        default = (
            function
            if function.isidentifier() and not isinstance(problem, Problem)
            else OwnProblem.name
        )
        others = sum(kind == "task" for kind, _ in self.objects)
        called = label or (
            default if ("task", default) not in self.objects else f"{default}-{others + 1}"
        )
        own = OwnProblem.of(
            problem, called, seed=self.seed, metric=self.metric, higher=self.higher, measured=True
        )
        return self.keep(
            "task", OwnProblem.name, None if called == OwnProblem.name else called, own
        )

    def keep(self, kind: str, name: str, label: str | None, item: Any) -> dict[str, Any]:
        require(
            (kind, label or name) not in self.objects,
            "duplicate-label",
            f"two {kind}s have the label {label or name!r}",
            place=(ARGUMENTS[kind],),
            hint=f"pass a dictionary with labels: {{'{name}-1': …, '{name}-2': …}}",
        )
        self.objects[kind, label or name] = item
        return {"name": name} | ({} if label is None else {"label": label})

    def table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Convert parts of a table that are objects of registered classes to tables; keep other
        objects.
        """
        read = dict(table)
        for key, value in table.items():
            if isinstance(value, Mapping):
                read[key] = self.table(value)
            elif self.is_registered(value):
                read[key] = plain(value)
            elif attrs.has(type(value)):
                self.objects["part", str(len(self.objects))] = value
        return read

    def is_registered(self, component: Any) -> bool:
        """Whether another process can build the component and its parts from names and values."""
        cls = type(component)
        if not attrs.has(cls):
            return False
        kinds = kinds_of(cls)
        known = [self.registry.find(kind.name, name_of(component)) for kind in kinds]
        if kinds and not any(other is not None and other.target is cls for other in known):
            return False
        try:
            plain(component)
        except ConfigError:
            return False
        parts = (getattr(component, part.name) for part in attrs.fields(cls))
        return all(self.is_registered(part) for part in parts if attrs.has(type(part)))
