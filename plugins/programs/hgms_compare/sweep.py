"""Pilot sweeps: every method's settings chosen on validation loss alone, with the same number of trials for each.

The first trial is always the settings as given. A trial is a run for each pilot seed, which are none of the comparison's, in
``<out>/sweeps/<task>/<method>/trial-<k>/seed-<n>``; its value is the mean of their ``validation_loss`` (f on the validation
rows at the returned state; no test row is looked at). The lowest wins. ``sweep.json`` beside the trials holds all of it.

Samplers: ``grid`` takes the points of the lists in a seeded order, ``random`` draws anew for every trial, ``tpe`` is Optuna's
tree-structured Parzen estimator, seeded. Each is a function of what came before, so a broken sweep goes on where it was.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from attrs import define, field

from hgms_compare.grid import Cell, Grid, SweepSettings
from hgms_compare.space import Choices, Range, Space, parse
from hgms_core import CheckpointError, ConfigError, Key, MissingExtra
from hgms_run import ROWS, RunConfig, RunFolder, parse_json, read_file, replace_file

Values = dict[str, Any]
Run = Callable[[list[Cell]], None]
"""Carries out cells that are not finished yet."""


class Sampler(Protocol):
    def ask(self, number: int, before: list[Trial]) -> Values:
        """The values of trial ``number`` ≥ 1, given the trials before it."""
        ...


@define
class Trial:
    """One setting of a method: its value is the mean validation loss over the pilot seeds, infinite if a run failed."""

    number: int
    values: Values
    losses: dict[int, float | None] = field(factory=dict)

    @property
    def loss(self) -> float:
        known = [math.inf if loss is None else loss for loss in self.losses.values()]
        return math.fsum(known) / len(known) if known and all(map(math.isfinite, known)) else math.inf


@define
class Sweep:
    """The trials of one method on one task."""

    grid: Grid
    settings: SweepSettings
    task: str
    method: str
    space: Space
    given: Values
    trials: list[Trial] = field(factory=list)

    @property
    def folder(self) -> Path:
        return self.grid.out / "sweeps" / self.task / self.method

    @property
    def chosen(self) -> Trial:
        """The lowest loss; the given settings where all failed, or on a tie with them."""
        return min(self.trials, key=lambda trial: (trial.loss, trial.number))

    def config(self, trial: Trial) -> RunConfig:
        if trial.number == 0:
            return self.grid.pairs[self.task, self.method]
        return self.grid.varied(self.task, self.method, trial.values)

    def path(self, number: int, seed: int) -> Path:
        return self.folder / f"trial-{number}" / f"seed-{seed}"

    def cells(self, trial: Trial) -> list[Cell]:
        base = attrs.evolve(self.config(trial), budget=self.settings.budget or self.grid.budget)
        return [
            Cell(
                config=attrs.evolve(base, seed=seed),
                path=self.path(trial.number, seed),
                note=f"trial {trial.number}",
            )
            for seed in self.settings.seeds
        ]

    def read(self, trial: Trial) -> None:
        for cell in self.cells(trial):
            summary: Mapping[str, Any] | None = None
            with contextlib.suppress(CheckpointError):
                summary = RunFolder(cell.path).read_summary()
            done = summary is not None and summary.get("status") == "done"
            loss = summary.get("validation_loss") if summary is not None and done else None
            trial.losses[cell.config.seed] = loss if isinstance(loss, int | float) else None

    def identity(self) -> dict[str, Any]:
        """What the trials on disk must have been made for."""
        return {
            "sampler": self.settings.sampler,
            "seed": self.settings.seed,
            "seeds": list(self.settings.seeds),
            "budget": str(self.settings.budget or self.grid.budget),
            "space": {
                key: {"values": list(one.values)} if isinstance(one, Choices) else attrs.asdict(one)
                for key, one in self.space.items()
            },
            "given": self.grid.pairs[self.task, self.method].resolved()["method"],
        }

    def as_dict(self) -> dict[str, Any]:
        best = self.chosen
        return {
            "task": self.task,
            "method": self.method,
            **self.identity(),
            "trials": [
                {
                    "number": trial.number,
                    "values": trial.values,
                    "losses": {str(seed): loss for seed, loss in trial.losses.items()},
                    "loss": trial.loss if math.isfinite(trial.loss) else None,
                }
                for trial in self.trials
            ],
            "chosen": best.number,
            "chosen_values": best.values,
            "note": None if math.isfinite(best.loss) else "every trial failed; the given settings are kept",
        }

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / "sweep.json", json.dumps(self.as_dict(), indent=2, ensure_ascii=False).encode())

    def fault(self) -> str | None:
        """Why the sweep that is on disk already is not this one; None if it is, or if there is none."""
        path = self.folder / "sweep.json"
        if not os.path.lexists(path):
            return None
        try:
            table = parse_json(read_file(path, ROWS), path.name)
            before = {key: table[key] for key in self.identity()}
        except (CheckpointError, KeyError, TypeError, IndexError):
            return f"damaged sweep file {path}\n  remove the folder {self.folder}, or choose another --out"
        mine = json.loads(json.dumps(self.identity()))
        differing = [key for key in mine if mine[key] != before[key]]
        if not differing:
            return None
        return (
            f"{self.folder} holds a sweep with another {' and '.join(differing)}\n  choose another --out, or remove that folder"
        )


def plan(grid: Grid) -> list[Sweep]:
    """The sweeps of a grid: one for each method with a space, on each task. ConfigError where the folder holds others."""
    settings = grid.sweep
    if settings is None:
        return []
    found = []
    for task, method in grid.pairs:
        if method in settings.space:
            space = parse(settings.space[method])
            resolved = grid.pairs[task, method].resolved()["method"]
            given = {key: _at(resolved, key) for key in space}
            found.append(Sweep(grid=grid, settings=settings, task=task, method=method, space=space, given=given))
    faults = [fault for fault in (one.fault() for one in found) if fault]
    if faults:
        raise ConfigError("\n".join(faults))
    if found and settings.sampler == "tpe":
        _optuna()
    return found


def carry_out(sweeps: list[Sweep], run: Run) -> dict[tuple[str, str], RunConfig]:
    """Runs all trials, and returns the chosen configuration of every (task, method), for the comparison's budget.

    Trial by trial over all methods, so that a machine that slows down slows all alike. Only ``tpe`` has to wait for the
    losses of one round before the next.
    """
    if not sweeps:
        return {}
    settings = sweeps[0].settings
    samplers = [sampler_for(one) for one in sweeps]
    rounds: Iterator[range] = iter([range(settings.trials)])
    if settings.sampler == "tpe":
        rounds = (range(number, number + 1) for number in range(settings.trials))
    for numbers in rounds:
        cells = []
        for number, (one, sampler) in itertools.product(numbers, zip(sweeps, samplers, strict=True)):
            values = one.given if number == 0 else sampler.ask(number, one.trials)
            trial = Trial(number=number, values=values)
            one.trials.append(trial)
            cells += one.cells(trial)
        for one in sweeps:
            one.write()
        run(cells)
        for one in sweeps:
            for trial in one.trials:
                one.read(trial)
            one.write()
    return {(one.task, one.method): one.config(one.chosen) for one in sweeps}


# --- samplers ----------------------------------------------------------------------------------------------------------


def sampler_for(sweep: Sweep) -> Sampler:
    key = Key(sweep.settings.seed).fold("sweep").fold(sweep.method)
    if sweep.settings.sampler == "tpe":
        return _Tpe(sweep, key)
    return _Lattice(sweep, key) if sweep.settings.sampler == "grid" else _Random(sweep, key)


@define
class _Lattice:
    """Every point of the lists but the given one, in a seeded order."""

    sweep: Sweep
    key: Key

    def ask(self, number: int, before: list[Trial]) -> Values:
        space = self.sweep.space
        dimensions = [
            one.values if isinstance(one, Choices) else range(int(one.low), int(one.high) + 1) for one in space.values()
        ]
        every = [dict(zip(space, point, strict=True)) for point in itertools.product(*dimensions)]
        points = [point for point in every if point != self.sweep.given]
        order = torch.randperm(len(points), generator=self.key.generator())
        return points[int(order[number - 1])]


@define
class _Random:
    """A new draw for every trial; one that was there before is drawn again."""

    sweep: Sweep
    key: Key

    def ask(self, number: int, before: list[Trial]) -> Values:
        known = [trial.values for trial in before]
        values: Values = {}
        for attempt in range(1000):
            shares = torch.rand(
                len(self.sweep.space), generator=self.key.fold(number).fold(attempt).generator(), dtype=torch.float64
            ).tolist()
            values = {key: one.at(share) for (key, one), share in zip(self.sweep.space.items(), shares, strict=True)}
            if values not in known:
                break
        return values


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise MissingExtra(
            "the sampler 'tpe' needs Optuna, which is not installed\n  pip install 'hgms[optuna]', or use sampler = \"random\""
        ) from error
    return optuna


@define
class _Tpe:
    """Optuna's TPE, told all trials so far; a failed one as worse than the worst."""

    sweep: Sweep
    key: Key

    def ask(self, number: int, before: list[Trial]) -> Values:
        optuna = _optuna()
        distributions = {}
        for key, one in self.sweep.space.items():
            if isinstance(one, Choices):
                distributions[key] = optuna.distributions.CategoricalDistribution(range(len(one.values)))
            elif one.whole:
                distributions[key] = optuna.distributions.IntDistribution(int(one.low), int(one.high), log=one.log)
            else:
                distributions[key] = optuna.distributions.FloatDistribution(one.low, one.high, log=one.log)
        finite = [trial.loss for trial in before if math.isfinite(trial.loss)]
        worst = max(finite, default=0.0) + 1.0
        seed = int(torch.randint(2**31, (), generator=self.key.fold(number).generator()))
        # Optuna's own ten random trials first would leave a short sweep no model at all.
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
        level = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            study = optuna.create_study(sampler=sampler)
            for trial in before:
                parameters = {key: self._spelt(key, value) for key, value in trial.values.items()}
                if any(value is None for value in parameters.values()):
                    continue  # the given settings may lie outside of the space
                loss = trial.loss if math.isfinite(trial.loss) else worst
                study.add_trial(optuna.trial.create_trial(params=parameters, distributions=distributions, value=loss))
            asked = study.ask(distributions).params
        finally:
            optuna.logging.set_verbosity(level)
        spoken = {}
        for key, one in self.sweep.space.items():
            spoken[key] = one.values[asked[key]] if isinstance(one, Choices) else asked[key]
        return spoken

    def _spelt(self, key: str, value: Any) -> Any:
        one = self.sweep.space[key]
        if isinstance(one, Choices):
            return one.values.index(value) if value in one.values else None
        inside = isinstance(one, Range) and isinstance(value, (int, float)) and one.low <= value <= one.high
        return value if inside else None


def _at(table: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, None where there is none."""
    value: Any = table
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


__all__ = ["Sweep", "Trial", "carry_out", "plan"]
