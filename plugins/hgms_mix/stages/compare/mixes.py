"""Run the mixes of a grid, each as a job of an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

import hgms.comparison
import hgms_mix.stages
from hgms.arguments import require
from hgms.comparison import apply_scale
from hgms.config.tables import tables_of
from hgms.executors import (
    Executor,
    Needs,
    Piece,
    RemoteProgress,
    Tell,
    run_together,
    to_stderr,
    unless_busy,
)
from hgms.plugins import Registry
from hgms.runs import undeclared_plugins
from hgms.store import finite
from hgms_core.components import evolve
from hgms_mix.stages import MixConfig
from hgms_mix.stages.compare.outcome import Outcome

PATIENCE = 0.5
"""Seconds to wait for a mix of another process. The orphan of a killed comparison ends
automatically.
"""

Seeded = tuple[str, int]
"""The label of a method, and a seed."""


@frozen(kw_only=True)
class Contest:
    """The mixes to compare: the mixes of a grid's methods on its single task, over seeds.

    All methods of a seed run before the next seed, so that the finished mixes of an incomplete
    comparison are comparable.
    """

    mixes: Mapping[Seeded, MixConfig]
    reference: str

    @classmethod
    def of(
        cls,
        grid: Path,
        labels: Sequence[str] = (),
        seeds: int | Sequence[int] | None = None,
        reference: str | None = None,
        *,
        registry: Registry | None = None,
        **options: Any,
    ) -> Contest:
        """Return the contest of the methods in a grid.

        ``options`` of every mix are ``out``, ``scale`` and ``sets``. References that the grid only
        adds to `hgms compare` have no mix.

        Raises
        ------
        ConfigError
            The grid is invalid, has several tasks or no test set, or lacks a requested method.
        """
        table = apply_scale(tables_of(grid, "grid"), options.get("scale"), grid.name)
        hgms_mix.stages.reject_benchmarks(table, grid.name)
        require(
            isinstance(table.get("method"), list),
            "nothing-to-do",
            "a comparison requires several methods, but the file has one",
            place=(grid.name, "method"),
            hint="add [[method]] tables",
        )
        own = {
            "seeds": seeds if seeds is None or isinstance(seeds, int) else list(seeds),
            "reference": reference,
        }
        table |= {key: value for key, value in own.items() if value is not None}
        table.pop("baselines", None)
        registry = registry or Registry.load()
        runs = hgms.comparison.load(table, source=grid.name, methods=labels, registry=registry)
        require(
            len(runs.tasks) <= 1,
            "wrong-length",
            f"a mix has one task, but the grid has {len(runs.tasks)}",
            place=(grid.name, "task"),
            hint="use one grid per task",
        )
        of_method = {
            method.label: hgms_mix.stages.load(
                grid, method=method.label, registry=registry, **options
            )
            for method in runs.methods
        }
        require(
            all(config.task.test for config in of_method.values()),  # type: ignore[attr-defined]
            "missing-option",
            "a comparison of models requires a test set, but the task has none",
            place=(grid.name, "task", "test"),
            hint="add a table [task.test.NAME]",
        )
        mixes = {
            (label, seed): evolve(config, seed=seed)
            for seed in runs.seeds
            for label, config in of_method.items()
        }
        return cls(mixes=mixes, reference=runs.reference)

    def piece(self, mix: Seeded) -> Piece:
        """Return a mix as a job, equivalent to `hgms mix GRID --method LABEL --seed N`."""
        label, seed = mix
        config = self.mixes[mix]
        plugins = [] if config.host is None else undeclared_plugins(config.host)
        return Piece(
            title=f"{label}, seed {seed}",
            path=hgms_mix.stages.mix_path(config),
            leases=hgms_mix.stages.LEASES,
            function=f"{__name__}:make",
            arguments={"config": config.as_dict(), "title": [label, seed], "plugins": plugins},
            needs=Needs.of_run(config.run),
            finished=lambda: hgms_mix.stages.finished_report(config),
            result=lambda outcome: outcome["report"],
        )

    @property
    def roles(self) -> dict[str, str]:
        """The role of each method in comparisons, by label."""
        return {label: config.role for (label, _), config in self.mixes.items()}


def run_contest(
    contest: Contest,
    executor: Executor,
    say: Callable[[str], None] = to_stderr,
    *,
    bars: bool = False,
) -> Outcome:
    """Run all mixes with ``executor``; a failed mix does not stop the others.

    Finished mixes are not run.

    Raises
    ------
    Interrupted
        Ctrl-C, SIGTERM or SIGHUP; every mix saves its state and ends. A second signal kills the
        mixes.
    """
    pieces = {mix: contest.piece(mix) for mix in contest.mixes}
    reports, failures = run_together(
        list(pieces.values()), executor, kind="mix", bars=bars, say=say
    )
    return Outcome(
        reports={mix: reports[piece] for mix, piece in pieces.items() if piece in reports},
        failures={mix: failures[piece] for mix, piece in pieces.items() if piece in failures},
        roles=contest.roles,
        reference=contest.reference,
    )


@unless_busy
def make(arguments: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Run the mix of ``arguments`` (see :meth:`Contest.piece`) as the job of an executor.

    Return its ``report``, in the form that `hgms mix --json` prints.
    """
    registry = Registry.load(arguments["plugins"])
    progress = RemoteProgress(tell)
    config = hgms_mix.stages.read(arguments["config"], "the grid", registry=registry)
    return {
        "report": finite(
            hgms_mix.stages.run_mix(config, log=progress.say, view=progress, patience=PATIENCE)
        )
    }
