"""Grids: tasks × methods × seeds under one budget, built and checked as values
(:mod:`hgms.comparison.grid_file` reads them).

A cell is one run in its folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import field, frozen

from hgms.config import Budget
from hgms.config.tables import overlay_tables, show
from hgms.plugins import Registry
from hgms.runs import OwnProblem, RunConfig, RunFolder, RunSettings
from hgms_core import ConfigError, HgmsError
from hgms_core.components import evolve
from hgms_core.errors import CheckpointError, Place

NO_FILE = "the grid"
FLAGS = "the command line"
PYTHON = "compare"
"""The sources of a grid that has no file."""

MOST_SEEDS = 100_000
"""Upper bound of the seeds per pair, far above practical use."""


def root_of(source: str) -> Place:
    """Return the first part of the places in a grid: its file, if it has one.

    Examples
    --------
    >>> root_of("grid.toml"), root_of(FLAGS)
    (('grid.toml',), ())
    """
    return () if source in (NO_FILE, FLAGS, PYTHON) else (source,)


def distinct_seeds(_settings: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Validate seeds: a count, or a list of numbers; at most MOST_SEEDS."""
    name = attribute.name
    numbers = value if isinstance(value, list | tuple) else ()
    count = value if isinstance(value, int) else len(numbers)
    none = "out-of-range" if isinstance(value, int) else "missing-option"
    for is_wrong, code, requirement in (
        (count < 1, none, "must be a count of at least 1, or a list of seeds"),
        (count > MOST_SEEDS, "too-large", f"must have at most {MOST_SEEDS:,} seeds"),
        (any(number < 0 for number in numbers), "out-of-range", "must not be negative"),
        (len({*numbers}) < len(numbers), "wrong-value", "must not contain a seed twice"),
    ):
        if is_wrong:
            raise ConfigError(code, f"{name}={show(value)} {requirement}", place=(name,))


@frozen(kw_only=True)
class Entry:
    """One task or method of a grid: its label, its table in the file, and its settings for single
    tasks (``on``).

    ``component`` is the object if the entry has no table; its ``table`` then contains only its
    name. ``added`` marks an entry that the user did not name (:mod:`hgms.comparison.references`).
    Such an entry is excluded from tasks that it does not fit.
    """

    kind: Literal["task", "method"]
    label: str
    table: dict[str, Any]
    stated: bool = False
    on: Mapping[str, Any] = field(factory=dict)
    component: Any = None
    added: bool = False

    @property
    def name(self) -> str:
        return str(self.table["name"])

    def at(self, task: str) -> Any:
        """Return the table (or the object) for the task with this label."""
        if self.component is not None:
            return self.component
        return copy_table(overlay_tables(self.table, self.on.get(task, {})))


def copy_table(value: Any) -> Any:
    """Return a copy of a table. Objects in the table are not copied."""
    if isinstance(value, Mapping):
        return {key: copy_table(item) for key, item in value.items()}
    return [copy_table(item) for item in value] if isinstance(value, list) else value


@frozen(kw_only=True)
class Cell:
    """One run of a grid, in its folder.

    ``around`` is the text of the configuration before and after the line of the seed, if the cells
    of a pair share it.
    """

    config: RunConfig
    path: Path
    around: tuple[str, str] | None = field(default=None, eq=False, repr=False)

    @property
    def task(self) -> str:
        return self.config.run.task_label or self.config.task.name

    @property
    def method(self) -> str:
        return self.config.run.label or self.config.method_name

    def __str__(self) -> str:
        return f"{self.task}, {self.method}, seed {self.config.seed}"

    @property
    def text(self) -> str:
        """The configuration as text, as stored in the folder."""
        if self.around is None:
            return self.config.to_toml()
        return f"\nseed = {self.config.seed}\n".join(self.around)

    def state(self) -> tuple[str, HgmsError | None]:
        """Return ``new``, ``begun``, ``done``, ``failed`` or ``damaged``, and the error of the last
        two.
        """
        folder = RunFolder(self.path)
        try:
            if folder.config.exists() and not folder.holds(self.text):
                return "damaged", CheckpointError(
                    "other-settings", "the folder contains a run of another configuration"
                )
            if other := self.other_problem(folder):
                return "damaged", other
            summary = folder.read_summary()
            if summary is None:
                return ("begun" if folder.config.exists() else "new"), None
            status = summary.get("status")
            if status == "done":
                return "done", None
            if status == "failed":
                return "failed", HgmsError("run-failed", str(summary.get("error") or "no reason"))
            return "damaged", CheckpointError(
                "damaged-file",
                f"status={status!r} must be 'done' or 'failed'",
                place=("summary.json", "status"),
            )
        except HgmsError as error:
            return "damaged", error
        except (OSError, ValueError, TypeError) as error:
            return "damaged", CheckpointError("damaged-file", str(error))

    def other_problem(self, folder: RunFolder) -> CheckpointError | None:
        """Return an error if a function of the seed created another problem for the stored run."""
        task = self.config.task
        if not isinstance(task, OwnProblem):
            return None
        before = (folder.read_environment().get("task") or {}).get("instance")
        if not before or before == (now := task.instance(self.config.seed)):
            return None
        what = ", ".join(key for key in {**before, **now} if before.get(key) != now.get(key))
        return CheckpointError(
            "other-settings",
            f"the folder contains a run of another problem ({what}), although the function that "
            "creates the problem is the same",
            hint="draw all random numbers from the seed, or choose another folder if the data has "
            "changed",
        )


def cells_of(config: RunConfig, seeds: Iterable[int]) -> Iterator[Cell]:
    """Yield the runs of a pair.

    Its hash and its text take a thousand times as long as a seed, so all seeds share them.
    """
    folder = config.path.parent
    before, line, after = config.to_toml().partition(f"\nseed = {config.seed}\n")
    around = (before, after) if line else None
    for seed in seeds:
        yield Cell(config=evolve(config, seed=seed), path=folder / f"seed-{seed}", around=around)


@frozen(kw_only=True)
class Grid:
    """A checked grid: each of its configurations has been built once."""

    tasks: Sequence[Entry]
    methods: Sequence[Entry]
    seeds: Sequence[int]
    budget: Budget
    run: RunSettings
    metrics: Mapping[str, str]
    """The primary metric of each task, by the task's label."""
    reference: str
    pairs: Mapping[tuple[str, str], RunConfig]
    """The configuration of every (task, method), by labels, for the first seed."""
    registry: Registry = field(eq=False, repr=False)
    """References without user request that are excluded, with their tasks and reasons."""
    own: bool = False
    """Whether the grid contains objects that no other process can build."""

    @property
    def out(self) -> Path:
        return Path(self.run.out)

    def cells(self) -> list[Cell]:
        """Return all runs, ordered by seed, so that a machine that slows down affects all methods
        equally.
        """
        by_seed = zip(
            *(cells_of(config, self.seeds) for config in self.pairs.values()), strict=True
        )
        return list(itertools.chain.from_iterable(by_seed))
