"""Outer steps as a callback of Lightning.

``HypergradientCallback`` is built from these hooks at its first use.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from typing import Any

from hgms.integrations.outer_steps import OuterSteps, ensure_one_process, logger_row
from hgms_core.errors import MissingExtra


class Hooks:
    """Outer steps during ``Trainer.fit``: :class:`hgms.integrations.OuterSteps` after every
    ``every``-th optimiser step.

    It takes the arguments of ``OuterSteps``. Without ``lower``, g receives the batch of the
    training step. ``progress`` is the share of the steps that the trainer expects.

    The trainer's loggers receive the numbers of each row of ``records``, for example
    ``hgms/upper_loss``; ``hgms/converged`` is 1 or 0. Lightning's checkpoints contain θ, the outer
    optimiser and the position in the batches.

    Raises
    ------
    ConfigError
        In a training with several processes.
    """

    def __init__(self, **arguments: Any) -> None:
        self.steps = OuterSteps(**arguments)
        self.records = self.steps.records
        self._last = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        ensure_one_process(trainer.world_size)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # The step number is unchanged while gradients are accumulated.
        if step == self._last or not self.steps.due(step):
            return
        self._last = step
        total = float(trainer.estimated_stepping_batches)
        progress = min(1.0, step / total) if math.isfinite(total) and total > 0 else 0.0
        row = logger_row(self.steps.step(pl_module, step, batch, progress))
        # pl_module.log is not suitable: it would repeat a row until the next row.
        for logger in trainer.loggers:
            logger.log_metrics(row, step=step)

    def state_dict(self) -> dict[str, Any]:
        return self.steps.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps.load_state_dict(state_dict)


def _lightning() -> Any:
    """Return the package that the program uses; the two packages have different classes."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise MissingExtra(
        "missing-package",
        "the callback for Lightning requires Lightning, which is not installed",
        install="pip install 'hgms[lightning]'",
    )


@functools.cache
def _callback() -> type:
    return type(
        "HypergradientCallback",
        (Hooks, _lightning().Callback),
        {"__doc__": Hooks.__doc__, "__module__": __name__},
    )


def __getattr__(name: str) -> Any:
    if name == "HypergradientCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
