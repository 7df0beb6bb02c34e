"""Outer steps as a callback of the Trainer of transformers.

``HypergradientCallback`` is built from these hooks at its first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hgms.arguments import require
from hgms.integrations.outer_steps import OuterSteps, ensure_one_process, logger_row
from hgms.packages import optional_module
from hgms.runs import load_state, save_state
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError

FILE = "hypergradient.safetensors"


class Hooks:
    """Outer steps during ``Trainer.train``: :class:`hgms.integrations.OuterSteps` after every
    ``every``-th step.

    It takes the arguments of ``OuterSteps``; ``lower`` is required, because the Trainer passes no
    batch to its callbacks. ``log`` receives each row's numbers:
    ``trainer.add_callback(HypergradientCallback(…, log=trainer.log))``. Without ``log`` they are
    added to ``state.log_history``.

    The names are the names in ``records``, for example ``hgms/upper_loss``; ``hgms/converged`` is 1
    or 0. Every checkpoint contains a file ``hypergradient.safetensors`` with θ, the outer optimiser
    and the position in the batches. A training resumes from this file.

    Raises
    ------
    ConfigError
        Without ``lower``, and in a training with several processes.
    CheckpointError
        If a training resumes from a checkpoint without that file.
    """

    def __init__(
        self, *, log: Callable[[dict[str, float]], None] | None = None, **arguments: Any
    ) -> None:
        if arguments.get("lower") is None:
            raise ConfigError(
                "missing-option",
                "lower is missing, and the Trainer does not pass batches to its callbacks",
                place=("lower",),
                hint="pass batches for g",
            )
        self.log, self.steps, self._loaded = log, OuterSteps(**arguments), False
        self.records = self.steps.records

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ensure_one_process(args.world_size)
        if state.global_step > 0 and not self._loaded:
            self.load(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self._loaded = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.steps.due(state.global_step):
            return
        row = logger_row(
            self.steps.step(
                kwargs["model"],
                state.global_step,
                progress=min(1.0, state.global_step / state.max_steps)
                if state.max_steps > 0
                else 0.0,
            )
        )
        if self.log is None:
            state.log_history.append({**row, "step": state.global_step})
            return
        wanted = control.should_log
        self.log(row)
        control.should_log = wanted  # otherwise the Trainer treats its own row as logged

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def save(self, folder: str | Path) -> None:
        """Write the state to a checkpoint's folder, completely or not at all."""
        save_state(Path(folder) / FILE, self.steps.state_dict())

    def load(self, folder: str | Path) -> None:
        """Load the state from a checkpoint's folder; the next resumed training starts with it."""
        path = Path(folder) / FILE
        require(
            path.is_file(),
            "missing-file",
            "the training resumes from a checkpoint without the file of theta",
            hint="load theta from another folder with callback.load(…), or write the current "
            "theta with callback.save(…)",
            place=(str(path),),
            error=CheckpointError,
        )
        self.steps.load_state_dict(load_state(path))
        self._loaded = True


@functools.cache
def _callback() -> type:
    module = optional_module("transformers", "the callback for the Trainer", "llm")
    return type(
        "HypergradientCallback",
        (Hooks, module.TrainerCallback),
        {"__doc__": Hooks.__doc__, "__module__": __name__},
    )


def __getattr__(name: str) -> Any:
    if name == "HypergradientCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
