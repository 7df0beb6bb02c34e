"""The runs of a design as jobs, which any executor can run."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from hgms.executors import Needs, Piece, RemoteProgress, Tell, unless_busy
from hgms.plugins import Registry
from hgms.runs import undeclared_plugins
from hgms.store import json_digest
from hgms_mix.stages import LEASES, claim, read
from hgms_mix.surface.design import Point
from hgms_mix.surface.runs import DesignRuns, Outcome

PATIENCE = 0.5
"""Seconds to wait for a run of another process."""


def piece(runs: DesignRuns, point: Point) -> Piece:
    """Return the run of a point as a job; its result is its :class:`Outcome`."""
    plugins = [] if runs.given.host is None else undeclared_plugins(runs.given.host)
    arguments = {
        "config": runs.given.as_dict(),
        "folder": str(runs.folder.absolute()),
        "plugins": plugins,
        "data": json_digest(runs.task_inputs),
        "point": attrs.asdict(point),
    }
    shares = " ".join(
        f"{weight:.2f} {name}" for name, weight in zip(runs.sources, point.weights, strict=True)
    )

    def words(outcome: Outcome) -> str:
        name, loss = next(iter(outcome.metrics.items()))
        return f"{name} {loss:.4f}"

    return Piece(
        title=f"{shares}, seed {point.seed}",
        path=runs.folder_of(point).path,
        leases=LEASES[:1],
        function=f"{__name__}:work",
        arguments=arguments,
        needs=Needs.of_run(runs.config.run),
        words=words,
        finished=lambda: runs.find_outcome(point),
        result=lambda _: runs.find_outcome(point),
    )


@unless_busy
def work(arguments: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Run the point of ``arguments`` (see :func:`piece`) as the job of an executor.

    The results are in the folder of the point.
    """
    progress = RemoteProgress(tell)
    design = {name: arguments[name] for name in ("config", "folder", "plugins", "data")}
    runs = design_of(json.dumps(design))
    runs.view = progress
    point = Point(**{**arguments["point"], "weights": tuple(arguments["point"]["weights"])})
    with claim(runs.folder_of(point).path, patience=PATIENCE):
        if runs.find_outcome(point) is None:  # else another process has finished it
            runs.run(point)
    return {}


@functools.lru_cache(maxsize=1)
def design_of(arguments: str) -> DesignRuns:
    """Return the design of a job; further jobs of the same design share its loaded data."""
    design = json.loads(arguments)
    config = read(design["config"], "the surface", registry=Registry.load(design["plugins"]))
    return DesignRuns(config=config, folder=Path(design["folder"]))
