"""The runs of a design as jobs, which any executor can run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import attrs

from hgms.executors import Needs, Piece, RemoteProgress, Tell, unless_busy
from hgms.plugins import Registry
from hgms.runs import undeclared_plugins
from hgms.store import json_digest
from hgms_mix.stages import LEASES, claim, read, resolved_table
from hgms_mix.surface.design import Point
from hgms_mix.surface.runs import DesignRuns, Outcome

PATIENCE = 0.5
"""Seconds to wait for a run of another process."""
_KNOWN: WeakValueDictionary[str, DesignRuns] = WeakValueDictionary()
"""The designs of this process by data fingerprint: jobs of the same design share loaded data."""
_LAST: list[DesignRuns] = []


def piece(runs: DesignRuns, point: Point) -> Piece:
    """Return the run of a point as a job; its result is its :class:`Outcome`."""
    plugins = [] if runs.given.host is None else undeclared_plugins(runs.given.host)
    arguments = {
        "config": resolved_table(runs.given),
        "folder": str(runs.folder.absolute()),
        "plugins": plugins,
        "point": attrs.asdict(point),
    }
    _KNOWN[_design(arguments)] = runs
    title = " ".join(
        f"{weight:.2f} {name}" for name, weight in zip(runs.sources, point.weights, strict=True)
    )
    title += f", seed {point.seed}"

    def words(outcome: Outcome) -> str:
        name, loss = next(iter(outcome.metrics.items()))
        return f"{name} {loss:.4f}"

    return Piece(
        title=title,
        path=runs.place(point),
        leases=LEASES[:1],
        function=f"{__name__}:work",
        arguments=arguments,
        needs=Needs.of_run(runs.config.run),
        plugins=plugins,
        words=words,
        finished=lambda: runs.find_outcome(point),
        result=lambda _: runs.find_outcome(point),
    )


@unless_busy
def work(arguments: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Run the point of ``arguments`` (see :func:`piece`) as the job of an executor.

    The results are in the folder of the point.
    """
    design = _design(arguments)
    progress = RemoteProgress(tell)
    runs = _KNOWN.get(design)
    if runs is None:
        config = read(
            arguments["config"], "the surface", registry=Registry.load(arguments["plugins"])
        )
        _KNOWN[design] = runs = DesignRuns(config=config, folder=Path(arguments["folder"]))
        _LAST[:] = [runs]  # for the next job
    runs.show(progress, progress.say)
    point = Point(**{**arguments["point"], "weights": tuple(arguments["point"]["weights"])})
    with claim(runs.place(point), patience=PATIENCE):
        if runs.find_outcome(point) is None:  # else another process has finished it
            runs.run(point)
    return {}


def _design(arguments: Mapping[str, Any]) -> str:
    """Return a digest that is the same for all points of one design."""
    return json_digest([arguments["config"], arguments["folder"]])
