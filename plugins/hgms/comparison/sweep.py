"""Pilot sweeps: choose the settings of each method by validation loss, with the same number of
trials per method.

The first trial always uses the method's own settings. A trial has one run per pilot seed, in
``<out>/sweeps/<task>/<method>/trial-<k>/seed-<n>``. Pilot seeds must not be seeds of the
comparison. The value of a trial is the mean ``validation_loss`` of its runs (f on the validation
rows at the returned state; test rows are not used). The trial with the lowest value is chosen.
``sweep.json`` in the folder of the trials stores the complete sweep.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import define, field

from hgms.comparison.grid import Cell, Grid, SweepSettings
from hgms.comparison.space import Choices, Space, parse
from hgms.config.tables import parse_json
from hgms.runs import RunConfig, RunFolder, data_of
from hgms.store import ROWS, hold_lease, read_file, replace_file
from hgms_core import ConfigError, Key
from hgms_core.components import evolve
from hgms_core.errors import CheckpointError, raise_all

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
    def folder(self) -> Path:
        return self.grid.out / "sweeps" / self.task / self.method

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

    def path(self, number: int, seed: int) -> Path:
        return self.folder / f"trial-{number}" / f"seed-{seed}"

    def cells(self, trial: Trial) -> list[Cell]:
        config = evolve(self.config(trial), budget=self.settings.budget or self.grid.budget)
        return [
            Cell(
                config=evolve(config, seed=seed),
                path=self.path(trial.number, seed),
                note=f"trial {trial.number}",
            )
            for seed in self.settings.seeds
        ]

    def read(self) -> None:
        """Read the losses of all trials from their folders."""
        for trial in self.trials:
            for seed in self.settings.seeds:
                trial.losses[seed] = None
                with contextlib.suppress(CheckpointError):
                    summary = RunFolder(self.path(trial.number, seed)).read_summary() or {}
                    loss = summary.get("validation_loss")
                    if summary.get("status") == "done" and isinstance(loss, int | float):
                        trial.losses[seed] = loss

    def identity(self) -> dict[str, Any]:
        """Return the settings and data that the trials on disk must match."""
        return {
            "seed": self.settings.seed,
            "seeds": list(self.settings.seeds),
            "budget": str(self.settings.budget or self.grid.budget),
            "space": {
                key: {"values": list(part.values)}
                if isinstance(part, Choices)
                else attrs.asdict(part)
                for key, part in self.space.items()
            },
            "given": self.grid.pairs[self.task, self.method].as_dict()["method"],
            **data_of(self.grid.pairs[self.task, self.method].task),
        }

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
            **self.identity(),
            "trials": trials,
            "chosen": best.number,
            "chosen_values": best.values,
            "note": None if math.isfinite(best.loss) else failed,
        }

    def write(self) -> None:
        # coordinators that wait for the same last trial resume at the same time
        with hold_lease(self.folder, patience=60.0):
            replace_file(
                self.folder / "sweep.json",
                json.dumps(self.as_dict(), indent=2, ensure_ascii=False).encode(),
            )

    def fault(self) -> ConfigError | None:
        """Return an error if another sweep is on disk; ``None`` if it matches or does not exist."""
        path = self.folder / "sweep.json"
        if not os.path.lexists(path):
            return None
        mine = json.loads(json.dumps(self.identity()))
        try:
            table = parse_json(read_file(path, ROWS), path.name)
            before = {key: table[key] for key in mine}
        except (CheckpointError, KeyError, TypeError, IndexError):
            return ConfigError(
                "damaged-file",
                "the table of the sweep is damaged",
                place=(str(path),),
                hint=f"remove the folder {self.folder}, or choose another --out",
            )
        differing = " and ".join(
            "content of its data" if key == "data_fingerprint" else key
            for key in mine
            if mine[key] != before[key]
        )
        if not differing:
            return None
        return ConfigError(
            "other-settings",
            f"the folder contains a sweep with another {differing}",
            place=(str(self.folder),),
            hint="choose another --out, or remove the folder",
        )


def plan(grid: Grid) -> list[Sweep]:
    """Return the sweeps of a grid: one per task and per method with a space.

    Raise ConfigError if a folder contains another sweep.
    """
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
    faults = [fault for sweep in sweeps if (fault := sweep.fault())]
    if faults:
        raise_all(faults)
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
