"""Pilot sweeps: choose the settings of each method by validation loss, with the same number of
trials per method.

The first trial always uses the method's own settings. A trial has one run per pilot seed, in
``<out>/sweeps/<task>/<method>-<hash>/seed-<n>``. Pilot seeds must not be seeds of the
comparison. The value of a trial is the mean ``validation_loss`` of its runs (f on the validation
rows at the returned state; test rows are not used). The trial with the lowest value is chosen.
``<out>/sweeps/<task>/<method>/sweep.json`` stores the complete sweep.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import define, field

from hgms.comparison.grid import Cell, Grid, SweepSettings, cells_of
from hgms.comparison.space import Choices, Space, parse
from hgms.runs import RunConfig, RunFolder
from hgms.store import hold_lease, replace_file
from hgms_core import Key
from hgms_core.components import evolve

Values = dict[str, Any]


@define
class Trial:
    """One setting of a method. Its loss is the mean validation loss over the pilot seeds, or
    infinite if a run failed.
    """

    number: int
    values: Values
    losses: dict[int, float | None] = field(factory=dict)

    @property
    def loss(self) -> float:
        known = [math.inf if loss is None else loss for loss in self.losses.values()]
        return (
            math.fsum(known) / len(known) if known and all(map(math.isfinite, known)) else math.inf
        )


def draw_values(space: Space, trials: Sequence[Trial], key: Key) -> Values:
    """Draw new values for each trial; values that were already tried are redrawn."""
    known = [trial.values for trial in trials]
    values: Values = {}
    for attempt in range(1000):
        shares = torch.rand(
            len(space),
            generator=key.fold(len(trials)).fold(attempt).generator(),
            dtype=torch.float64,
        ).tolist()
        values = {
            name: dimension.at(share)
            for (name, dimension), share in zip(space.items(), shares, strict=True)
        }
        if values not in known:
            break
    return values


@define
class Sweep:
    """The trials of one method on one task; ``own`` contains the method's own values."""

    grid: Grid
    settings: SweepSettings
    task: str
    method: str
    space: Space
    own: Values
    trials: list[Trial] = field(factory=list)

    @property
    def out(self) -> Path:
        return self.grid.out / "sweeps"

    @property
    def best(self) -> Trial:
        """The trial with the lowest loss; on a tie the first of them.

        The first trial has the method's own settings. It is also chosen if all trials failed.
        """
        return min(self.trials, key=lambda trial: (trial.loss, trial.number))

    def add_trial(self) -> list[Cell]:
        """Add the next trial and return its runs."""
        values = self.own
        if self.trials:
            key = Key(self.settings.seed).fold("sweep").fold(self.method)
            values = draw_values(self.space, self.trials, key)
        self.trials.append(Trial(number=len(self.trials), values=values))
        return self.cells(self.trials[-1])

    def config(self, trial: Trial) -> RunConfig:
        if trial.number == 0:
            return self.grid.pairs[self.task, self.method]
        return self.grid.vary(self.task, self.method, trial.values)

    def cells(self, trial: Trial) -> list[Cell]:
        config = self.config(trial)
        config = evolve(
            config,
            budget=self.settings.budget or self.grid.budget,
            run=evolve(config.run, out=str(self.out)),
        )
        note = f"trial {trial.number}"
        return [attrs.evolve(cell, note=note) for cell in cells_of(config, self.settings.seeds)]

    def read(self) -> None:
        """Read the losses of all trials from their folders."""
        for trial in self.trials:
            for cell in self.cells(trial):
                done = cell.state()[0] == "done"
                summary = (RunFolder(cell.path).read_summary() or {}) if done else {}
                trial.losses[cell.config.seed] = summary.get("validation_loss")

    def as_dict(self) -> dict[str, Any]:
        best = self.best
        trials = [
            {
                "number": trial.number,
                "values": trial.values,
                "losses": {str(seed): loss for seed, loss in trial.losses.items()},
                "loss": trial.loss if math.isfinite(trial.loss) else None,
            }
            for trial in self.trials
        ]
        failed = "every trial failed; the given settings are kept"
        return {
            "task": self.task,
            "method": self.method,
            "seed": self.settings.seed,
            "seeds": list(self.settings.seeds),
            "budget": str(self.settings.budget or self.grid.budget),
            "space": {
                key: {"values": list(part.values)}
                if isinstance(part, Choices)
                else attrs.asdict(part)
                for key, part in self.space.items()
            },
            "trials": trials,
            "chosen": best.number,
            "chosen_values": best.values,
            "note": None if math.isfinite(best.loss) else failed,
        }

    def write(self) -> None:
        folder = self.out / self.task / self.method
        # coordinators that wait for the same last trial resume at the same time
        with hold_lease(folder, patience=60.0):
            replace_file(
                folder / "sweep.json",
                json.dumps(self.as_dict(), indent=2, ensure_ascii=False).encode(),
            )


def plan(grid: Grid) -> list[Sweep]:
    """Return the sweeps of a grid: one per task and per method with a space."""
    settings = grid.sweep
    if settings is None:
        return []
    sweeps = []
    for task, method in grid.pairs:
        if method in settings.space:
            space = parse(settings.space[method])
            resolved = grid.pairs[task, method].as_dict()["method"]
            sweeps.append(
                Sweep(
                    grid=grid,
                    settings=settings,
                    task=task,
                    method=method,
                    space=space,
                    own={key: _at(resolved, key) for key in space},
                )
            )
    return sweeps


def carry_out(
    sweeps: list[Sweep], run: Callable[[list[Cell]], None]
) -> dict[tuple[str, str], RunConfig]:
    """Run all trials and return the chosen configuration of every (task, method), with the budget
    of the comparison.

    The order is trial by trial over all methods, so that a machine that slows down affects all
    methods equally.
    """
    if not sweeps:
        return {}
    trials = sweeps[0].settings.trials
    cells = [cell for _ in range(trials) for sweep in sweeps for cell in sweep.add_trial()]
    for sweep in sweeps:
        sweep.write()
    run(cells)
    for sweep in sweeps:
        sweep.read()
        sweep.write()
    return {(sweep.task, sweep.method): sweep.config(sweep.best) for sweep in sweeps}


def _at(table: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or ``None`` if it is missing."""
    value: Any = table
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
