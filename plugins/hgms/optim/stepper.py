"""A torch optimiser with its memory as a value.

The memory contains tensors by name, which can be stacked, saved and copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import ConfigError, Tree
from hgms_core.torch_errors import first_line

Build = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Function that builds an optimiser of parameters: ``lambda params: torch.optim.RMSprop(params,
lr=0.01)``, or the class itself.
"""

NUMBERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "none": lambda _: None,
}
"""Kinds of entries that are not tensors, and the functions that restore them.

The other kinds are ``tensor`` and ``cpu``. An entry of kind ``cpu`` remains on the CPU. Its name
includes the type of a number that is stored in the wider type of the leaves (``cpu float32``).
"""


@frozen(eq=False)
class Stepper:
    """An optimiser of ``leaves``; ``fresh`` are the options of its groups when it was built.

    Examples
    --------
    >>> leaf = torch.ones(2, requires_grad=True)
    >>> stepper = Stepper.of(
    ...     lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5), {"w": leaf}
    ... )
    >>> leaf.grad = torch.ones(2)
    >>> stepper.optimizer.step()
    >>> stepper.memory()
    {'w|momentum_buffer|tensor': tensor([1., 1.])}
    """

    optimizer: torch.optim.Optimizer
    leaves: Tree
    fresh: list[dict[str, Any]]

    @classmethod
    def of(cls, build: Build, leaves: Tree, memory: Mapping[str, Tensor] | None = None) -> Stepper:
        """Build the optimiser with an earlier ``memory``, or a new one.

        Raises
        ------
        ConfigError
            If ``build`` does not return an optimiser, or its optimiser has other tensors than
            ``leaves`` or evaluates the loss (LBFGS).
        """
        optimizer = _build_optimizer(build, [*leaves.values()])
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        stepper = cls(optimizer, leaves, options)
        stepper.recall(memory or {})
        return stepper

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Load copies of a memory; the optimiser changes the copies in place."""
        for name, tensor in memory.items():
            owner, path, kind = name.rsplit("|", 2)
            value = NUMBERS[kind](tensor) if kind in NUMBERS else _again(tensor, *kind.split())
            if owner in self.leaves:
                self.optimizer.state[self.leaves[owner]][path] = value
            else:
                self.optimizer.param_groups[int(owner)][path] = value

    def set(
        self, options: Sequence[Mapping[str, Any]], rate: float = 1.0, decay: float = 1.0
    ) -> None:
        """Set the options of a schedule (:meth:`Timetable.options`) for the groups.

        ``rate`` and ``decay`` are factors on learning rate and weight decay.
        """
        for group, fresh, scheduled in zip(
            self.optimizer.param_groups, self.fresh, options, strict=True
        ):
            for key, factor in (("lr", rate), ("weight_decay", decay)):
                if key in group:
                    value = scheduled.get(key, fresh[key])
                    group[key] = value if factor == 1 else value * factor
            group.update(
                {
                    key: value
                    for key, value in scheduled.items()
                    if key not in ("lr", "weight_decay")
                }
            )

    def memory(self, scheduled: Sequence[Mapping[str, Any]] = ()) -> Tree:
        """Return the states of the leaves, and the group options that the optimiser changed.

        Options set by a schedule are excluded.
        """
        like = next(iter(self.leaves.values()))
        memory = {}
        state = self.optimizer.state
        entries = [
            (name, path, value)
            for name, leaf in self.leaves.items()
            for path, value in state.get(leaf, {}).items()
        ]
        for number, (group, fresh) in enumerate(
            zip(self.optimizer.param_groups, self.fresh, strict=True)
        ):
            others = {"params", "lr", "weight_decay", *(scheduled[number] if scheduled else ())}
            entries += [
                (str(number), key, value)
                for key, value in group.items()
                if key not in others and not _same(value, fresh.get(key))
            ]
        for owner, path, value in entries:
            kind, tensor = self._as_tensor(value, like)
            memory[f"{owner}|{path}|{kind}"] = tensor
        if len(state) > sum(leaf in state for leaf in self.leaves.values()):
            raise ConfigError(
                "not-supported",
                f"{self._name} stores state outside the states of its parameters, which cannot "
                "be carried to the next step",
                place=("optimizer",),
            )
        return memory

    def _as_tensor(self, value: Any, like: Tensor) -> tuple[str, Tensor]:
        device = like.device
        if isinstance(value, Tensor):
            # a count of steps stays on the CPU, also if this run continues on a GPU
            stays = value.device.type == "cpu" and (device.type != "cpu" or not value.dim())
            place = "cpu" if stays else "tensor"
            dtype = value.dtype
            narrow = (
                not value.dim()
                and value.is_floating_point()
                and torch.promote_types(dtype, like.dtype) != dtype
            )
            if narrow:
                place += f" {str(dtype).removeprefix('torch.')}"
            return place, value.to(device, like.dtype if narrow else dtype)
        for kind, known in (("bool", bool), ("int", int), ("float", float)):
            if isinstance(value, known):
                return kind, torch.tensor(
                    value, dtype=torch.float64 if kind == "float" else None, device=device
                )
        if value is None:
            return "none", torch.zeros((), device=device)
        raise ConfigError(
            "not-supported",
            f"{self._name} stores a {type(value).__name__} in its state, which cannot be carried "
            "to the next step",
            place=("optimizer",),
            hint="use an optimiser whose state consists of tensors and numbers",
        )

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__


def _build_optimizer(build: Build, leaves: list[Tensor]) -> torch.optim.Optimizer:
    hint = (
        "use a function of the parameters: optimizer=lambda params: "
        "torch.optim.RMSprop(params, lr=0.01)"
    )
    try:
        optimizer = build(leaves)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "wrong-value",
            f"optimizer raises {type(error).__name__} if it is called with the list of parameters: "
            f"{first_line(error)}",
            place=("optimizer",),
            hint=hint,
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "wrong-result",
            f"optimizer returns a {type(optimizer).__name__}, but must return an optimiser of "
            "torch.optim",
            place=("optimizer",),
            hint=hint,
        )
    arguments = [*inspect.signature(optimizer.step).parameters.values()]
    if arguments and arguments[0].default is inspect.Parameter.empty:
        raise ConfigError(
            "not-supported",
            f"{type(optimizer).__name__} evaluates the loss several times per step",
            place=("optimizer",),
            hint="use an optimiser with one gradient per step, such as Adam",
        )
    held = {id(leaf) for group in optimizer.param_groups for leaf in group["params"]}
    if held != {id(leaf) for leaf in leaves}:
        raise ConfigError(
            "wrong-result",
            "optimizer returns an optimiser of other parameters, but must use all parameters that "
            "it is called with and no others",
            place=("optimizer",),
            hint=hint,
        )
    return optimizer


def _again(tensor: Tensor, place: str, dtype: str | None = None) -> Tensor:
    """Return a copy at the original place, with the original type."""
    return tensor.to(
        "cpu" if place == "cpu" else tensor.device,
        getattr(torch, dtype) if dtype else tensor.dtype,
        copy=True,
    )


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)
