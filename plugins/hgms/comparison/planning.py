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
from hgms.comparison.usage import measure_usage
from hgms.config import Budget
from hgms.config.tables import parse_json
from hgms.executors import Ending, Executor, Tell, code_of, run_with_retries
from hgms.plugins import Registry
from hgms.runs import RunConfig, RunFolder, run_config, undeclared_plugins
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
    ``disk`` the bytes on disk, and ``row`` the bytes per row.
    ``error`` is the reason if it could not be measured.
    """

    step: float = 0.0
    around: float = 0.0
    calls: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    row: float = 0.0
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

    def as_dict(self, workers: Sequence[int] = MANY) -> dict[str, Any]:
        """Return the plan as a dictionary."""
        seconds = self.seconds()
        budget = self.grid.budget
        costs = [self.costs[cell.task, cell.method] for cell in self.left]
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
        }


def plan(grid: Grid, executor: Executor, say: Callable[[str], None] = lambda line: None) -> Plan:
    """Measure three outer steps of each (task, method) with ``executor``.

    Steps are not compiled (a compiled step takes less time). No file is written to the folders of
    the grid's runs. Cost: three outer steps, one evaluation before and one after, for each pair.
    """
    files = undeclared_plugins(grid.registry.host)
    cells = grid.cells()
    jobs = {}
    for pair in grid.pairs:
        cell = next(cell for cell in cells if (cell.task, cell.method) == pair)
        job = job_of(cell, None, files, code_of(files))
        jobs[attrs.evolve(job, function=f"{__name__}:measure")] = pair
    costs: dict[tuple[str, str], Cost] = {}
    for ending in run_with_retries(executor, iter(jobs), say=say):
        pair = jobs[ending.job]
        costs[pair] = _cost(ending)
        error = costs[pair].error
        how = "measured" if error is None else error.lines()[0]
        say(f"[{len(costs)}/{len(jobs)}] {', '.join(pair)}: {how}")
    return Plan(
        grid=grid,
        costs={pair: costs[pair] for pair in grid.pairs},
        left=[cell for cell in cells if cell.state()[0] in ("new", "begun")],
    )


def _cost(ending: Ending) -> Cost:
    if ending.outcome is None:
        return Cost(error=ending.failure)
    return Cost(**ending.outcome)


def _plain(_cost: object, attribute: attrs.Attribute[Any], value: Any) -> Any:
    """Convert a value of a cost to a JSON value."""
    if attribute.name == "error":
        return "" if value is None else str(value)
    return value


def measure(arguments: Mapping[str, Any], _tell: Tell) -> dict[str, Any]:
    """Return the :class:`Cost` of the run of ``arguments``, from three of its steps in a temporary
    folder.
    """
    config = RunConfig.from_dict(arguments["config"], registry=Registry.load(arguments["plugins"]))
    config = evolve(config, budget=Budget(outer_steps=STEPS))
    with tempfile.TemporaryDirectory(prefix="hgms-plan-") as place:
        folder = RunFolder(Path(place) / "run")
        began = time.perf_counter()
        with measure_usage(folder.path, config.run.device):
            result = run_config(config, path=folder.path)
        took = time.perf_counter() - began
        seconds = [float(row["seconds"]) for row in result.records]
        calls = [float(row.get("oracle_calls") or 0) for row in result.records]
        disk = sum(path.stat().st_size for path in folder.path.iterdir())
        rows = sum(path.stat().st_size for path in (folder.steps, folder.timings)) / len(seconds)
        used = parse_json(read_file(folder.path / "resources.json"), "resources.json")
        counted = max(len(seconds) - 2, 1)
        after_warm_up = seconds[-1] - seconds[min(1, len(seconds) - 1)]
        return {
            "step": after_warm_up / counted or seconds[-1],
            "around": took - seconds[-1],
            "calls": (calls[-1] - calls[min(1, len(calls) - 1)]) / counted,
            "memory": float(used["peak_memory_bytes"]),
            "disk": disk - rows * len(seconds),
            "row": rows,
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
