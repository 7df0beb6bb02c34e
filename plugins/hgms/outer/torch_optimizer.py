"""Outer optimisers that use the optimisers of torch.optim."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

import torch
from attrs import Attribute, field
from torch import Tensor

from hgms.optim import Schedule as TorchSchedule
from hgms.optim import Stepper, Timetable, timetable_of
from hgms.outer.shape import Schedule
from hgms_core import ConfigError, State, Tree, component, hookimpl
from hgms_core.capabilities import Capabilities, HasTestingInstance
from hgms_core.errors import unknown_name
from hgms_core.torch_errors import first_line, out_of_memory

Setting = bool | int | float | str | tuple[float, ...] | None


def _names() -> dict[str, type[torch.optim.Optimizer]]:
    base = torch.optim.Optimizer
    return {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }


def _usable(_self: object, _attribute: Attribute[Any], value: str | Callable[..., Any]) -> None:
    if isinstance(value, str) and value not in _names():
        raise unknown_name(
            "optimizer", value, _names(), ("optimizer",), label="optimiser of torch.optim"
        )
    chosen = _names()[value] if isinstance(value, str) else value
    if not (inspect.isclass(chosen) and issubclass(chosen, torch.optim.Optimizer)):
        raise ConfigError(
            "wrong-type",
            f"optimizer={chosen!r} must be the name of a class in torch.optim, or a class derived "
            "from torch.optim.Optimizer",
            place=("optimizer",),
        )


@final
@component
class TorchOptimizer:
    """Update θ by any optimiser of ``torch.optim``.

    The arguments are the name of its class and a table of its settings.

    Each step builds the optimiser around a copy of θ and loads the previous state. It passes h as
    the gradient, and returns the new state as a value. So the result is the same as with an
    optimiser kept in memory, and the state can be saved.

    Use for the rules that this package does not implement: RAdam, NAdam, Adagrad, Rprop, …. Avoid
    if ``adam``, ``adamw`` or ``sgd`` suffice: they support clipping and projections. This class
    supports neither, but a task's projection still applies.

    Parameters
    ----------
    optimizer
        The class's name, or from Python the class itself. A custom class works if the states of its
        parameters and their group contain all of its memory.
    settings
        Its keyword arguments, with torch's defaults for the others.
    schedule
        Shapes its learning rate over the budget, as in ``adam``. From Python also a function that
        creates a scheduler of torch, such as
        ``lambda optimizer: lr_scheduler.StepLR(optimizer, 30)``. The scheduler advances by one step
        per outer step and must not depend on a loss.

    Raises
    ------
    ConfigError
        With the nearest name, for a class or a setting that does not exist; with torch's message
        for an invalid value; and for an optimiser that needs the loss itself (``LBFGS``).

    Notes
    -----
    Cost: no oracle call. Memory: one more copy of θ and of the optimiser's state during a step. An
    optimiser that draws random numbers draws them from torch's global generator; the optimisers in
    ``torch.optim`` draw no random numbers.

    Source: the documentation of each class in ``torch.optim``.

    Examples
    --------
    >>> outer = TorchOptimizer(optimizer="SGD", settings={"lr": 0.5, "momentum": 0.9})
    >>> theta, state = {"t": torch.ones(1)}, outer.init({"t": torch.ones(1)})
    >>> for _ in range(2):
    ...     theta, state = outer.step(theta, {"t": torch.ones(1)}, state, 0.0)
    >>> theta["t"]  # 1 − 0.5·1 − 0.5·1.9
    tensor([-0.4500])
    """

    name: ClassVar[str] = "torch"
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance})

    optimizer: str | Callable[..., torch.optim.Optimizer] = field(default="Adam", validator=_usable)
    settings: Mapping[str, Setting] = field(factory=dict, hash=False)

    schedule: Schedule | TorchSchedule = field(factory=Schedule)
    _times: dict[Any, Timetable] = field(init=False, factory=dict, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        optimizer = self._class()
        known = [name for name in inspect.signature(optimizer).parameters if name != "params"]
        for name in self.settings:
            if name not in known:
                raise unknown_name(
                    "option",
                    name,
                    known,
                    ("settings", name),
                    label=f"setting of {optimizer.__name__}",
                )
        self._stepper({"θ": torch.zeros(2, 2)}, {})

    @classmethod
    def testing_instance(cls) -> TorchOptimizer:
        """Return an instance with a higher learning rate.

        With torch's default rates, 400 steps are too few for the checks.
        """
        return cls(settings={"lr": 0.1})

    def init(self, theta: Tree) -> State:
        self._stepper(theta, {})
        self._options(theta, 0)
        return {"step": 0, "memory": {}}

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        done = state["step"]
        stepper = self._stepper(theta, state["memory"])
        options = self._options(theta, done)
        rate = 1.0 if callable(self.schedule) else self.schedule.factor(done, progress)
        stepper.set(options, rate)
        for name, leaf in stepper.leaves.items():
            leaf.grad = gradient[name].detach().to(leaf, copy=True)
        try:
            stepper.optimizer.step()
        except (RuntimeError, ValueError) as error:
            if out_of_memory(error):
                raise
            raise ConfigError(
                "not-supported",
                f"{type(stepper.optimizer).__name__} cannot update these upper variables: "
                f"{first_line(error)}",
                place=("optimizer",),
            ) from error
        moved = {name: leaf.detach() for name, leaf in stepper.leaves.items()}
        return moved, {"step": done + 1, "memory": stepper.memory(options)}

    def _stepper(self, theta: Tree, memory: Tree) -> Stepper:
        leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in theta.items()}
        return Stepper.of(self._build, leaves, memory)

    def _options(self, theta: Tree, step: int) -> list[dict[str, Any]]:
        """Return the options that a scheduler of torch sets at a step."""
        schedule = self.schedule if callable(self.schedule) else None
        return timetable_of(self._times, theta, self._build, schedule).options(step)

    def _class(self) -> Callable[..., torch.optim.Optimizer]:
        return (
            getattr(torch.optim, self.optimizer)
            if isinstance(self.optimizer, str)
            else self.optimizer
        )

    def _build(self, leaves: list[Tensor]) -> torch.optim.Optimizer:
        optimizer = self._class()
        try:
            return optimizer(leaves, **dict[str, Any](self.settings))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                "wrong-value",
                f"{optimizer.__name__} rejects its settings: {first_line(error)}",
                place=("settings",),
            ) from error


@hookimpl
def hgms_register_outer_optimizers() -> list[type]:
    return [TorchOptimizer]
