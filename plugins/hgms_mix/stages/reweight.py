"""Reweighting: a run of the mix's method, which learns the weights of the sources.

The folder of the mix is the folder of this run. A mix therefore reuses weights that ``hgms run`` or
``hgms compare`` already learned. Its result is an input of the later stages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor

from hgms.arguments import require
from hgms.comparison import measure_usage
from hgms.config.tables import parse_json
from hgms.distributed import launcher_rank
from hgms.runs import Progress, RunConfig, RunFolder, View, device_called, run_config
from hgms.store import read_file
from hgms_core import Problem
from hgms_core.capabilities import Finishes, RanksRows, find
from hgms_core.components import evolve
from hgms_core.errors import CheckpointError
from hgms_mix.stages.graph import Facts, Log, Value


@define(kw_only=True, eq=False)
class Learned(Value):
    """A learned mixture: the run's configuration, folder, key, digest of its end, and facts."""

    config: RunConfig
    path: Path
    key: str
    digest: str
    facts: Facts

    @property
    def weights(self) -> Mapping[str, float]:
        """Learned weights of the sources."""
        return self.facts["weights"]

    @property
    def task(self) -> Any:
        return self.config.task

    @property
    def seed(self) -> int:
        return self.config.seed

    def fingerprint(self) -> list[Any]:
        return [self.key, self.digest, self.seed]

    def state(self) -> Any:
        """Return the final state of the method."""
        stored = RunFolder(self.path).load(device_called(self.config.run.device))
        assert stored is not None  # a finished run has a checkpoint
        return stored[0]

    def problem(self) -> Problem:
        """Build the problem of the run."""
        settings = self.config.run
        return self.task.problem(
            self.seed, device_called(settings.device), getattr(torch, settings.dtype)
        )

    def ranking(self) -> Tensor | None:
        """Return the method's score of each row, or None for a method that does not rank rows.

        The score is NaN for rows without a rank.

        Raises
        ------
        ConfigError
            If the budget ended before the method had ranked the rows.
        """
        method = self.config.method
        ranks = find(method, RanksRows)
        if ranks is None:
            return None
        state = self.state()
        unbuilt: Any = _Unbuilt(self.problem)
        ranking = ranks.ranking(unbuilt, state).detach().cpu()
        finishes = find(method, Finishes)
        require(
            not bool(ranking.isnan().all()) or finishes is None or finishes.is_finished(state),
            "budget-too-small",
            f"method {self.config.method_name!r} ranks rows when it finishes, but its budget "
            f"of {self.config.budget} ended before",
            place=("budget",),
            hint="increase the budget",
        )
        return ranking


class _Unbuilt:
    """The problem of a run, built on first access.

    Rankings are mostly stored with the state, and a problem contains a base model.
    """

    def __init__(self, build: Callable[[], Problem]) -> None:
        self._build = functools.cache(build)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._build(), name)


def reweight(
    config: RunConfig, folder: Path, log: Log = lambda line: None, view: View | None = None
) -> Learned:
    """Learn the weights, resume an interrupted run, or read a finished run and check its files.

    Raises
    ------
    CheckpointError
        If another process works on the same run, or a file is damaged.
    """
    run = RunFolder(folder)
    before = is_finished(run)
    if before:
        log(f"reweight: done before ({folder})")
    else:
        log(
            f"reweight: {'resumes' if run.has_begun else 'starts'} ({config.method_name}, "
            f"{config.budget})"
        )
    # Reading a finished run starts no ranks; ranks of a launcher follow every run.
    alone = before and launcher_rank() is None
    with contextlib.nullcontext() if before else measure_usage(folder, config.run.device):
        result = run_config(
            evolve(config, run=evolve(config.run, ranks=1)) if alone else config,
            resume=True,
            watch=(view or Progress(enabled=False)).watch,
            path=folder,
        )
    weights = weights_of(result.records[-1])
    if not before:
        for remark in result.summary.get("remarks") or []:
            log(f"  note: {remark}")
        log(f"  weights: {', '.join(f'{name} {share:.3f}' for name, share in weights.items())}")
    facts = {
        "weights": weights,
        "method": config.method_name,
        "outer_steps": result.summary["outer_steps"],
        "seconds": result.seconds,
        # this clock already contains the processor time of the whole run
        "processor_seconds": result.seconds
        if config.run.clock == "cpu"
        else processor_seconds(run),
        "metrics": result.summary.get("metrics") or {},
        "validation_loss": result.summary.get("validation_loss"),
    }
    return Learned(
        config=config, path=folder, key=config.config_hash, digest=run.results_digest(), facts=facts
    )


def is_finished(run: RunFolder) -> bool:
    return (run.read_summary() or {}).get("status") == "done"


def processor_seconds(run: RunFolder) -> float | None:
    """Return the processor seconds counted during the run, or None if it was interrupted."""
    with contextlib.suppress(CheckpointError):
        resources = parse_json(read_file(run.path / "resources.json"), "resources.json")
        seconds = resources.get("processor_seconds") if isinstance(resources, dict) else None
        return float(seconds) if isinstance(seconds, int | float) else None
    return None


def weights_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of the sources in a record.

    Examples
    --------
    >>> weights_of({"step": 3, "weight.sums": 0.75, "weight.chat": 0.25})
    {'sums': 0.75, 'chat': 0.25}
    """
    return {
        key.removeprefix("weight."): float(value)
        for key, value in record.items()
        if key.startswith("weight.")
    }
