"""``hgms plan``: predict the cost of a grid before its first run, by three outer steps per cell."""

from __future__ import annotations

import heapq
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from hgms.comparison.cell import job_of
from hgms.comparison.grid import Cell, Grid
from hgms.comparison.rank_times import RankTimes, measured_on_ranks, step_of, threads_of
from hgms.comparison.usage import measured
from hgms.config import Budget
from hgms.config.tables import parse_json
from hgms.executors import Ending, Executor, Tell, code_of, tried_again, unpack_error
from hgms.plugins import Registry
from hgms.runs import RunConfig, RunFolder, run_config, unannounced
from hgms.store import read_file
from hgms_core import HgmsError
from hgms_core.components import evolve

STEPS = 3
"""Outer steps that are measured per cell; the first warms up and is not counted."""
MANY = (1, 2, 8, 64, 512)
"""Numbers of workers for which the time of a grid is predicted."""


@frozen(kw_only=True)
class Cost:
    """The cost of one run of a (task, method).

    ``step`` is the seconds of an outer step, ``around`` the seconds of building the problem and of
    two evaluations, and ``calls`` the oracle calls of a step. ``memory`` is the peak in bytes,
    ``disk`` the bytes on disk, and ``row`` the bytes per row. ``parted`` is a step on one rank and
    on two, if requested. ``error`` is the reason if it could not be measured.
    """

    step: float = 0.0
    around: float = 0.0
    calls: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    row: float = 0.0
    parted: RankTimes | None = None
    error: HgmsError | None = None

    def steps(self, budget: Budget) -> float:
        """Return the number of outer steps until the budget is spent."""
        if budget.outer_steps is not None:
            return budget.outer_steps
        if budget.oracle_calls is not None:
            return budget.oracle_calls / max(self.calls, 1.0)
        return (budget.seconds or 0.0) / max(self.step, 1e-9)

    def seconds(self, budget: Budget) -> float:
        """Return the seconds of one run, from its start to its end."""
        return self.around + (
            budget.seconds if budget.seconds is not None else self.steps(budget) * self.step
        )

    def seconds_on(self, ranks: int, budget: Budget) -> float:
        """Return the seconds of one run on this number of ranks; as on one rank if ranks were not
        measured.
        """
        if self.parted is None or self.parted.error:
            return self.seconds(budget)
        return self.parted.seconds(ranks, self.around, self.steps(budget), budget)

    def bytes_on_disk(self, budget: Budget) -> float:
        return self.disk + self.row * self.steps(budget)


@frozen(kw_only=True)
class Plan:
    """The costs of a grid's pairs, and the remaining runs in their order."""

    grid: Grid
    costs: Mapping[tuple[str, str], Cost]
    left: Sequence[Cell]

    def seconds(self) -> list[float]:
        """Return the seconds of each remaining run."""
        return [self.costs[cell.task, cell.method].seconds(self.grid.budget) for cell in self.left]

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for (task, method), cost in self.costs.items():
            runs = sum((cell.task, cell.method) == (task, method) for cell in self.left)
            numbers = {
                "s a step": f"{cost.step:.3g}",
                "s a run": f"{cost.seconds(self.grid.budget):,.1f}",
                "peak MiB": f"{cost.memory / 2**20:,.0f}",
                "kB on disk": f"{cost.bytes_on_disk(self.grid.budget) / 1e3:,.0f}",
            }
            if cost.parted is not None:
                one = cost.parted.one
                two = cost.parted.two
                share = cost.parted.share
                shown = (
                    (f"{one:.3g}", f"{two:.3g}", f"{share:.0%}")
                    if not cost.parted.error
                    else ("–", "–", "–")
                )
                numbers |= dict(zip(("s on 1 rank", "on 2", "parted"), shown, strict=True))
            lacking = dict.fromkeys(numbers, "–")
            rows.append(
                {
                    "task": task,
                    "method": method,
                    "runs": runs,
                    **(lacking if cost.error else numbers),
                }
            )
        return rows

    def as_dict(self, workers: Sequence[int] = MANY, ranks: Sequence[int] = ()) -> dict[str, Any]:
        """Return the plan as a dictionary.

        ``ranks`` gives the seconds of all runs one at a time, each on this number of ranks.
        """
        seconds = self.seconds()
        budget = self.grid.budget
        costs = [self.costs[cell.task, cell.method] for cell in self.left]
        on_ranks = {
            str(count): sum(cost.seconds_on(count, budget) for cost in costs) for count in ranks
        }
        return {
            "pairs": [
                {
                    "task": task,
                    "method": method,
                    **attrs.asdict(cost, value_serializer=_plain),
                    "seconds": cost.seconds(budget),
                }
                for (task, method), cost in self.costs.items()
            ],
            "runs": len(self.left),
            "seconds": sum(seconds),
            "longest": max(seconds, default=0.0),
            "bytes_on_disk": sum(cost.bytes_on_disk(budget) for cost in costs),
            "workers": {str(count): makespan(seconds, count) for count in workers},
            **({"ranks": on_ranks} if ranks else {}),
        }


def plan(
    grid: Grid,
    executor: Executor,
    say: Callable[[str], None] = lambda line: None,
    *,
    on_ranks: bool = False,
) -> Plan:
    """Measure three outer steps of each (task, method) with ``executor``.

    Steps are not compiled (a compiled step takes less time). With ``on_ranks`` steps are also
    measured on one rank and on two. No file is written to the folders of the grid's runs. Cost:
    three outer steps, one evaluation before and one after, for each pair; three times that with
    ``on_ranks``.

    Errors: the errors of :func:`hgms.comparison.rank_times.threads_of`.
    """
    threads = threads_of(grid.run) if on_ranks else None
    files = unannounced(grid.registry.host)
    cells = grid.cells()
    jobs = {}
    for pair in grid.pairs:
        cell = next(cell for cell in cells if (cell.task, cell.method) == pair)
        job = job_of(cell, None, files, code_of(files))
        arguments = {**job.arguments, "threads": threads}
        jobs[attrs.evolve(job, function=f"{__name__}:measure", arguments=arguments)] = pair
    costs: dict[tuple[str, str], Cost] = {}
    for ending in tried_again(executor, iter(jobs), say=say):
        pair = jobs[ending.job]
        costs[pair] = _cost(ending)
        error = costs[pair].error
        how = "measured" if error is None else error.lines()[0]
        say(f"[{len(costs)}/{len(jobs)}] {', '.join(pair)}: {how}")
    left = [cell for cell in cells if cell.state()[0] in ("new", "begun")]
    return Plan(grid=grid, costs={pair: costs[pair] for pair in grid.pairs}, left=left)


def _cost(ending: Ending) -> Cost:
    if ending.outcome is None:
        return Cost(error=ending.failure)
    told = dict(ending.outcome)
    parted = told.pop("parted", None)
    if parted is not None and "error" in parted:
        return Cost(**told, parted=RankTimes(error=unpack_error(parted["error"])))
    return Cost(**told, parted=None if parted is None else RankTimes(**parted))


def _plain(_cost: object, attribute: attrs.Attribute[Any], value: Any) -> Any:
    """Convert a value of a cost to a JSON value."""
    if attribute.name == "error":
        return "" if value is None else str(value)
    return value


def measure(arguments: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Return the :class:`Cost` of the run of ``arguments``, from three of its steps in a temporary
    folder.

    With ``threads``, also measure one rank and two ranks with this number of threads each.
    """
    registry = Registry.load(arguments["plugins"])
    config = RunConfig.from_dict(arguments["config"], registry=registry)
    config = evolve(config, budget=Budget(outer_steps=STEPS))
    with tempfile.TemporaryDirectory(prefix="hgms-plan-") as place:
        folder = RunFolder(Path(place) / "run")
        began = time.perf_counter()
        with measured(folder.path, config.run.device):
            result = run_config(config, path=folder.path)
        took = time.perf_counter() - began
        seconds = [float(row["seconds"]) for row in result.records]
        calls = [float(row.get("oracle_calls") or 0) for row in result.records]
        disk = sum(path.stat().st_size for path in folder.path.iterdir())
        rows = sum(path.stat().st_size for path in (folder.steps, folder.timings)) / len(seconds)
        used = parse_json(read_file(folder.path / "resources.json"), "resources.json")
        counted = max(len(seconds) - 2, 1)
        parted = (
            {}
            if arguments["threads"] is None
            else {"parted": measured_on_ranks(config, Path(place), arguments["threads"])}
        )
        return {
            "step": step_of(seconds),
            "around": took - seconds[-1],
            "calls": (calls[-1] - calls[min(1, len(calls) - 1)]) / counted,
            "memory": float(used["peak_memory_bytes"]),
            "disk": disk - rows * len(seconds),
            "row": rows,
            **parted,
        }


def makespan(seconds: Iterable[float], workers: int) -> float:
    """Seconds until all runs have ended, each started by the first worker that is free.

    >>> makespan([3.0, 1.0, 1.0, 1.0], 2), makespan([3.0, 1.0, 1.0, 1.0], 512), makespan([], 2)
    (3.0, 3.0, 0.0)
    """
    free = [0.0] * workers
    end = 0.0
    for length in seconds:
        started = heapq.heappop(free)
        heapq.heappush(free, started + length)
        end = max(end, started + length)
    return end
