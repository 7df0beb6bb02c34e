"""A torch scheduler as a function of the step number.

A run can therefore resume at any step, and a branch can be repeated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hgms.optim.stepper import Build, Stepper
from hgms_core import ConfigError
from hgms_core.torch_errors import first_line

Schedule = Callable[[torch.optim.Optimizer], LRScheduler]
"""Function that builds a scheduler of an optimiser: ``lambda optimizer:
torch.optim.lr_scheduler.StepLR(optimizer, 30)``.
"""

HINT = (
    "use a function of the optimiser: schedule=lambda optimizer: "
    "torch.optim.lr_scheduler.StepLR(optimizer, 30)"
)


@define(eq=False)
class Timetable:
    """Options that a scheduler sets in an optimiser's groups, step by step.

    They are computed once per step, up to the largest requested step.

    The scheduler uses a separate optimiser, which takes no steps. Memory: a few numbers per step.

    Examples
    --------
    >>> times = Timetable.of(
    ...     lambda params: torch.optim.SGD(params, lr=1.0),
    ...     {"w": torch.ones(2)},
    ...     lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    ... )
    >>> [times.options(step)[0]["lr"] for step in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    rows: list[list[dict[str, Any]]]

    @classmethod
    def of(cls, build: Build, leaves: Mapping[str, Tensor], schedule: Schedule | None) -> Timetable:
        """Build the timetable of an optimiser for leaves of these shapes.

        Without a ``schedule``, all options are constant.

        Raises
        ------
        ConfigError
            If ``schedule`` does not return a scheduler, or returns one that reads a loss.
        """
        # tensors without memory
        shapes = {
            name: leaf.new_zeros(()).expand(leaf.shape).requires_grad_()
            for name, leaf in leaves.items()
        }
        stepper = Stepper.of(build, shapes)
        if schedule is None:
            return cls(stepper.optimizer, None, [[{} for _ in stepper.fresh]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                scheduler = schedule(stepper.optimizer)
            except (TypeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    "wrong-value",
                    f"schedule raises {type(error).__name__} if it is called with the optimiser: "
                    f"{first_line(error)}",
                    place=("schedule",),
                    hint=HINT,
                ) from error
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "not-supported",
                "schedule returns a ReduceLROnPlateau, which depends on a loss, but a schedule may "
                "depend on the number of the step only",
                place=("schedule",),
                hint="use another scheduler, such as StepLR, CosineAnnealingLR or OneCycleLR",
            )
        if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not stepper.optimizer:
            shown = type(scheduler).__name__
            raise ConfigError(
                "wrong-result",
                f"schedule returns a {shown}, but must return a scheduler of the optimiser that it "
                "is called with",
                place=("schedule",),
                hint=HINT,
            )
        times = cls(stepper.optimizer, scheduler, [])
        times._note()
        return times

    def options(self, step: int) -> list[dict[str, Any]]:
        """Return the options that the schedule sets in each group before this step (from 0)."""
        if self.scheduler is None:
            return self.rows[0]
        while len(self.rows) <= step:
            with warnings.catch_warnings():  # a warning that the optimiser has taken no step
                warnings.simplefilter("ignore")
                self.scheduler.step()
            self._note()
        return self.rows[step]

    def _note(self) -> None:
        known = ("lr", "momentum", "betas", "weight_decay")  # options that torch's schedulers set
        self.rows.append(
            [
                {key: group[key] for key in known if key in group}
                for group in self.optimizer.param_groups
            ]
        )


def timetable_of(
    times: dict[Any, Timetable],
    leaves: Mapping[str, Tensor],
    build: Build,
    schedule: Schedule | None,
) -> Timetable:
    """Return the timetable for leaves of these shapes; ``times`` keeps it."""
    shapes = tuple((name, leaf.shape) for name, leaf in leaves.items())
    if shapes not in times:
        times[shapes] = Timetable.of(build, leaves, schedule)
    return times[shapes]
