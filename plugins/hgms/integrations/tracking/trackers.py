"""Three trackers of runs with the same three methods: open, log, close."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hgms.packages import optional_module
from hgms.store import digest

if TYPE_CHECKING:
    from hgms_core import RunInfo

PROJECT = "hgms"


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the row's numbers by name; text is excluded.

    Lists (the scores of all candidates) are named by name and position.

    Examples
    --------
    >>> numbers(
    ...     {
    ...         "step": 3,
    ...         "metric.loss": 0.5,
    ...         "scores": [1.0, 2.0],
    ...         "outcome": "converged",
    ...         "gap": None,
    ...     }
    ... )
    {'metric/loss': 0.5, 'scores/0': 1.0, 'scores/1': 2.0}
    """
    paths = {name.replace(".", "/", 1): value for name, value in record.items() if name != "step"}
    lists = {path: value for path, value in paths.items() if isinstance(value, list)}
    items = {f"{path}/{i}": item for path, value in lists.items() for i, item in enumerate(value)}
    return {
        path: float(value)
        for path, value in {**paths, **items}.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def title(run: RunInfo) -> str:
    return f"{run.task}/{run.method}/seed-{run.seed}"


def identity(run: RunInfo) -> str:
    """Return an identifier shared by a run and its resumption, so the curve continues."""
    where = str(run.folder.resolve()) if run.folder is not None else title(run)
    return digest(where)[:16]


def tracker_module(name: str) -> Any:
    """Import the package of a tracker; MissingExtra if it is not installed."""
    return optional_module(name, f"the tracker {name!r}", name, place=("run", "track"))


class TensorBoard:
    """Event files in the run's folder (``tensorboard --logdir runs``)."""

    def __init__(self, run: RunInfo) -> None:
        tracker_module("tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        folder = run.folder if run.folder is not None else Path("runs", title(run))
        # A resumed run repeats the steps after its checkpoint, so their earlier points are removed.
        purge = run.resumed_from + 1 if run.resumed_from else None
        self._writer = writer(log_dir=str(folder / "tensorboard"), purge_step=purge)
        self._writer.add_text("run", f"{title(run)}, budget {run.budget}")

    def log(self, row: Mapping[str, float], step: int) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self, summary: Mapping[str, Any] | None, *, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project ``hgms`` in Weights & Biases.

    wandb reads its own variables, such as WANDB_PROJECT and WANDB_MODE=offline.
    """

    def __init__(self, run: RunInfo) -> None:
        wandb = tracker_module("wandb")
        self._run = wandb.init(
            project=None if os.environ.get("WANDB_PROJECT") else PROJECT,
            name=title(run),
            group=f"{run.task}/{run.method}",
            id=identity(run),
            resume="allow",
            config=dict(run.config),
            dir=str(run.folder) if run.folder is not None else None,
        )

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log(dict(row), step=step)

    def close(self, summary: Mapping[str, Any] | None, *, failed: bool) -> None:
        self._run.summary.update(
            {
                f"final/{name}": value
                for name, value in ((summary or {}).get("metrics") or {}).items()
            }
        )
        self._run.finish(exit_code=1 if failed else 0)


class Trackio(WeightsAndBiases):
    """A run of the local project ``hgms`` (``trackio show``); no data leaves the machine."""

    def __init__(self, run: RunInfo) -> None:
        trackio = tracker_module("trackio")
        self._run = trackio.init(
            project=PROJECT,
            name=f"{title(run)}-{identity(run)[:6]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
        )

    def close(self, summary: Mapping[str, Any] | None, *, failed: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[RunInfo], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
