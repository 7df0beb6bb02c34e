"""Results of a comparison: tables by task, and missing results."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np
from attrs import field, frozen

from hgms.comparison.cell import Ending
from hgms.comparison.grid import Cell, Grid
from hgms.config.tables import group_values
from hgms.packages import frame
from hgms.results import RECOVERED, StoredRun, Table, execution_notes, read_run, table
from hgms.runs import OwnProblem, RunResult, reporter, run_config
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError, one_of, unknown_name

if TYPE_CHECKING:
    import pandas

ALIKE = "equal candidates"
"""The note for a method with candidates that never differed."""


@frozen(kw_only=True)
class Failure:
    """A cell without a result, and the reason.

    ``failed`` runs are recorded. ``damaged`` folders were not changed. ``begun`` and ``new`` runs
    continue at the next start of the comparison.
    """

    task: str
    method: str
    seed: int
    path: Path
    status: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.status}: {self.task}, {self.method}, seed {self.seed}: {self.reason}\n"
            f"    {self.path}"
        )


@frozen(kw_only=True)
class Comparison:
    """The results of a comparison: a table for each task, and failures.

    ``failures`` are the cells without a result. ``execution`` describes by task how the runs were
    executed, if this differs from torch's defaults.
    """

    tables: Sequence[Table]
    failures: Sequence[Failure]
    execution: Mapping[str, Sequence[str]] = field(factory=dict)
    grid: Grid = field(repr=False)
    runs: Sequence[StoredRun] = field(factory=list, repr=False)
    cells: Sequence[Cell] = field(default=(), repr=False)
    scratch: Any = field(default=None, repr=False, eq=False)
    """Keeps run folders if ``out`` is not set, as long as this object exists."""

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas data frame with one row per run.

        The columns are the identity of the run, its status, its metrics and its costs.

        Raises
        ------
        MissingExtra
            Without pandas.
        """
        rows = [
            {
                "task": run.task_label,
                "method": run.label,
                "role": run.role,
                "seed": run.seed,
                "status": "done",
                **run.metrics,
                **{
                    key: run.summary.get(key)
                    for key in ("upper_loss", "outer_steps", "oracle_calls")
                },
                "seconds": run.seconds,
                "compile_seconds": run.compile_seconds,
                "folder": str(run.path),
            }
            for run in self.runs
        ]
        lost = [
            {name: value for name, value in attrs.asdict(failure).items() if name != "path"}
            | {"folder": str(failure.path)}
            for failure in self.failures
        ]
        return frame([*rows, *lost])

    def plot(self, what: Literal["differences", "curves"] = "differences") -> Any:
        """Plot a figure with one panel per task.

        A panel shows each method's paired difference to the reference, or its metric against
        seconds and oracle calls.

        Raises
        ------
        MissingExtra
            Without matplotlib.
        """
        one_of("what", what, ("differences", "curves"))
        if what == "differences":
            return reporter().plot_forests([table.forest for table in self.tables])
        return reporter().plot_curves(self._study())

    def report(self, path: str | Path) -> Path:
        """Write the report of `hgms report` for these runs.

        The suffix of ``path`` selects the format.

        Raises
        ------
        HgmsError
            The errors of `hgms report`.
        """
        return Path(reporter().write(self._study(), Path(path)))

    def _study(self) -> Any:
        study = reporter().build(
            [
                *(run.path for run in self.runs),
                *(failure.path for failure in self.failures if failure.path.is_dir()),
            ],
            metrics=list(dict.fromkeys(self.grid.metrics.values())),
            reference=self.grid.reference,
        )
        return attrs.evolve(study, sources=[str(self.grid.out)] if self.scratch is None else [])

    @property
    def complete(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        return {
            "budget": str(self.grid.budget),
            "seeds": list(self.grid.seeds),
            "out": None if self.scratch is not None else str(self.grid.out),
            "tasks": [table.as_dict() for table in self.tables],
            "failed": [
                attrs.asdict(failure) | {"path": str(failure.path)} for failure in self.failures
            ],
        }

    def __str__(self) -> str:
        """Return the tables and remarks as text."""
        tables = "".join(f"{table.task}: {self.heading}\n{table}\n\n" for table in self.tables)
        return (tables + "\n".join(self.remarks)).rstrip()

    __repr__ = __str__

    def result(
        self, method: str | None = None, seed: int | None = None, task: str | None = None
    ) -> RunResult:
        """Read the result of a finished run: its θ, x, summary and rows.

        A label or the seed may be omitted if the comparison has only one.

        Raises
        ------
        ConfigError
            If there is no such run, or if there are several.
        """
        known: dict[str, set[Any]] = {
            "task": {cell.task for cell in self.cells},
            "method": {cell.method for cell in self.cells},
            "seed": {cell.config.seed for cell in self.cells},
        }
        for (what, there), value in zip(known.items(), (task, method, seed), strict=True):
            if (value is None and len(there) > 1) or (value is not None and value not in there):
                choices = [str(choice) for choice in sorted(there, key=str)]
                if value is not None:
                    raise unknown_name(what, str(value), choices, (what,))
                raise ConfigError(
                    "missing-option",
                    f"{what} is required, because the comparison has {len(there)}",
                    place=(what,),
                    hint=f"available: {', '.join(choices)}",
                )
        [cell] = [
            cell
            for cell in self.cells
            if task in (None, cell.task)
            and method in (None, cell.method)
            and seed in (None, cell.config.seed)
        ]
        status, error = cell.state()
        if status != "done":
            reason = "" if error is None else f": {error.message}"
            raise ConfigError(
                "no-result", f"the run ({cell}) is {status}{reason}", place=(str(cell.path),)
            )
        result = run_config(cell.config, resume=True, path=cell.path)
        if not isinstance(cell.config.task, OwnProblem):
            return result
        theta, x = cell.config.task.problem_of(cell.config.seed).restore(result.theta, result.x)
        return attrs.evolve(result, theta=theta, x=x)

    @property
    def heading(self) -> str:
        seeds = len(self.grid.seeds)
        return (
            f"{self.grid.budget} each, {seeds} seed{'s' * (seeds > 1)}; mean ± half width of "
            "the 95 % interval"
        )

    @property
    def remarks(self) -> list[str]:
        """Notes that the tables do not contain, such as missing results."""
        lines = self._of_tables()
        if any(ALIKE in row.notes for table in self.tables for row in table.rows):
            lines.append(
                f"{ALIKE}: they never differed, so nothing was selected; the generator's noise "
                "distinguishes them"
            )
        lines += [f"{task}: {note}" for task, notes in self.execution.items() for note in notes]
        tasks = {
            cell.task: cell.config.task
            for cell in self.cells
            if isinstance(cell.config.task, OwnProblem)
        }
        fixed = [label for label, task in tasks.items() if not task.varies]
        if fixed and len(self.grid.seeds) > 1:
            lines.append(
                f"{', '.join(fixed)}: the same problem for every seed, so intervals are over the "
                "methods' own chance alone; a function seed -> Problem varies data and start"
            )
        lines += [
            f"{label}: upper_loss is f on {held} of the {total} validation rows, which are held "
            "out from all methods"
            for label, task in tasks.items()
            for held, total in (task.held_out,)
            if held and self.grid.metrics[label] in task.metric_rows
        ]
        if any(failure.status == "failed" for failure in self.failures) and self.scratch is None:
            how = "retry_failed=True" if self.grid.own else "--retry-failed"
            lines.append(f"failed runs keep their place; {how} runs them once more")
        return [*lines, *map(str, self.failures)]

    def _of_tables(self) -> list[str]:
        """Return notes on reading the tables, on references and on the number of seeds."""
        of_tasks = group_values(
            (line, results.task) for results in self.tables for line in results.remarks
        )
        remarks = {
            line: line if len(tasks) == len(self.tables) else f"{', '.join(tasks)}: {line}"
            for line, tasks in of_tasks.items()
        }
        lines = [remarks.pop(table.unjudged) for table in self.tables if table.unjudged in remarks]
        references = any(table.references for table in self.tables)
        if any(table.winner for table in self.tables):
            others = "every other method and every floor" if references else "every other method"
            lines.append(
                f"★ better than {others}: each difference is exact, or its interval excludes zero"
            )
        if any(pair.count > 1 for table in self.tables for pair in table.pairs.values()):
            apart = any(len(table.references) > 1 for table in self.tables)
            which = "of methods, and of methods and floors" if apart else ""
            lines.append(
                "differences: paired by seed, intervals by Holm's rule over all "
                f"pairs{which and ' '}{which} (chance of a false one: at most 5 %)"
            )
        if any(row.recovered is not None for table in self.tables for row in table.rows):
            lines.append(RECOVERED)
        return [*lines, *remarks.values()]


def gather(
    grid: Grid,
    cells: Iterable[Cell],
    endings: Mapping[Path, Ending],
    finished: Container[Path] = (),
) -> Comparison:
    """Read the results of all cells.

    ``endings`` are the endings of the runs that were executed just now, by folder. ``finished`` are
    the folders that are known to contain the result of their cell.
    """
    cells = list(cells)
    runs: dict[str, dict[str, list[StoredRun]]] = {}
    alike: dict[tuple[str, str], bool] = {}
    failures: list[Failure] = []
    for cell in cells:
        done = runs.setdefault(cell.task, {}).setdefault(cell.method, [])
        status, reason = ("done", None) if cell.path in finished else cell.state()
        if status == "done":
            try:
                run = read_run(cell.path)
                pair = cell.task, cell.method
                # one run with differing candidates is enough; other runs may have many rows
                if alike.get(pair, True):
                    alike[pair] = _alike(run.columns(["gap"])["gap"][1:])
                done.append(run)
                continue
            except CheckpointError as error:
                status, reason = "damaged", error
        ending = endings.get(cell.path)
        if ending is not None and ending.status in ("rejected", "stopped"):
            status = "damaged" if ending.status == "rejected" else status
            reason = ending.error
        failures.append(
            Failure(
                task=cell.task,
                method=cell.method,
                seed=cell.config.seed,
                path=cell.path,
                status=status,
                reason="it did not end" if reason is None else str(reason),
            )
        )
    lost = group_values(((failure.task, failure.method), failure.seed) for failure in failures)
    tables = []
    for task, by_method in runs.items():
        notes = {method: [ALIKE] * alike.get((task, method), False) for method in by_method}
        tables.append(
            table(
                by_method,
                grid.metrics[task],
                grid.reference,
                task=task,
                higher_is_better=grid.pairs[task, next(iter(by_method))].task.metrics[
                    grid.metrics[task]
                ],
                failed={method: lost.get((task, method), []) for method in by_method},
                notes=notes,
            )
        )
    return Comparison(
        tables=tables,
        failures=failures,
        execution={
            task: execution_notes(itertools.chain(*by_method.values()))
            for task, by_method in runs.items()
        },
        grid=grid,
        runs=[run for by_method in runs.values() for group in by_method.values() for run in group],
        cells=cells,
    )


def _alike(gaps: np.ndarray) -> bool:
    """Return whether a run had several candidates that never differed.

    Such a run did not select anything. With one candidate the gap is infinite, and other methods
    have no gap. Both are read as NaN.
    """
    return gaps.dtype != object and len(gaps) > 0 and bool((gaps == 0).all())
