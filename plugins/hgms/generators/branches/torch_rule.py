"""Steps of torch optimisers: one optimiser per branch, on views of the stacked tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from attrs import fields, frozen
from torch import Tensor

from hgms.generators.branches.rule import clip_
from hgms.generators.branches.steps import Slope
from hgms.generators.branches.torch_step import DifferentiableStep, Settings, plain_step
from hgms.optim import Build, Stepper, Timetable, needs_closure
from hgms_core import ConfigError, Group, Problem, Tree, stack

DIFFERENTIABLE = "Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD"


@frozen(eq=False)
class TorchRule(Settings):
    """A torch optimiser with its schedule. ``done`` is the number of steps already taken."""

    done: int = 0

    def check_linear(self) -> NoReturn:
        raise ConfigError(
            "not-supported",
            "a step that is linear in ∇g requires optimizer='sgd' and clip=None, but the "
            "generator has an optimiser of torch",
            place=("generator", "optimizer"),
            hint="change the optimizer, or use the hypergradient 'unrolled' with last = 1",
        )

    def check_differentiable(self) -> None:
        """Raise ConfigError if torch cannot differentiate a step of this optimiser."""
        optimizer = self.times.optimizer
        if not all("differentiable" in group for group in optimizer.param_groups):
            raise ConfigError(
                "not-supported",
                f"the hypergradient 'unrolled' requires differentiable steps, which "
                f"{type(optimizer).__name__} does not have",
                place=("generator", "optimizer"),
                hint=f"use an optimiser of torch.optim with differentiable steps ({DIFFERENTIABLE})"
                "\nor use the hypergradient 'implicit'",
            )

    @property
    def needs_closure(self) -> bool:
        return needs_closure(self.times.optimizer)

    def no_moments(self, x: Tree) -> Tree:
        return {}

    def parts(self, moments: Tree, names: Sequence[str]) -> list[Tree]:
        return [moments]

    def joined(self, parts: Sequence[Tree]) -> Tree:
        return {name: leaf for memory in parts for name, leaf in memory.items()}

    def numbers(self, step: int, rate: float, decay: float) -> tuple[int, float, float]:
        """Return (step number in the whole run, rate factor, decay factor).

        ``step`` is the step number in a run that starts now.
        """
        return self.done + step, rate, decay

    def stepped(
        self, x: Tree, grads: Tree, moments: Sequence[Tree], numbers: tuple[int, float, float]
    ) -> list[Tree]:
        """Return [x, memory] after a step; differentiable if gradients are recorded."""
        memory = moments[0] if moments else {}
        if not torch.is_grad_enabled():
            return plain_step(self, x, grads, memory, numbers)
        names: list[list[str]] = []
        tensors = [*x.values(), *grads.values(), *memory.values()]
        outputs = DifferentiableStep.apply(self, numbers, list(x), list(memory), names, *tensors)
        return [
            dict(zip(x, outputs, strict=False)),
            dict(zip(names[0], outputs[len(x) :], strict=True)),
        ]


def check_settings(generator: Any, optimizer: object) -> None:
    """Raise ConfigError if ``optimizer`` is a function and options of the built-in rules are also
    set.
    """
    if not callable(optimizer):
        return
    if getattr(generator, "way_back", "graph") != "graph":
        raise ConfigError(
            "conflicting-options",
            "way_back='mixed' requires the optimizer 'sgd' or 'adamw', but optimizer is a function",
            place=("way_back",),
            hint='set optimizer = "sgd" or "adamw", or way_back = "graph"',
        )
    for name in ("lr", "momentum", "betas", "eps", "eps_root", "weight_decay"):
        if getattr(generator, name) != getattr(fields(type(generator)), name).default:
            raise ConfigError(
                "conflicting-options",
                f"{name} is an option of 'sgd' and 'adamw', but optimizer is a function",
                place=(name,),
                hint="set it in the function: optimizer=lambda params: "
                f"torch.optim.RMSprop(params, {name}=…)",
            )


def timetable_of(
    problem: Problem, optimizer: str | Build, schedule: object, rate: float
) -> Timetable:
    """Return the rates and decays per step of a torch schedule, cached in ``problem.kept``.

    ``rate`` is the rate of a built-in rule. The cache avoids computing the schedule again from the
    first step.
    """
    key = ("timetable", id(optimizer), id(schedule), rate)
    if key not in problem.kept:
        build = partial(torch.optim.SGD, lr=rate) if isinstance(optimizer, str) else optimizer
        times = Timetable.of(build, problem.x0, schedule if callable(schedule) else None)
        # Keep references to both objects, so that their ids are not reused.
        problem.kept[key] = (times, optimizer, schedule)
    kept: Timetable = problem.kept[key][0]
    return kept


def advance_torch(
    rule: TorchRule,
    group: Group,
    moments: Tree,
    slope: Slope,
    rates: Sequence[Sequence[float]],
    decays: Sequence[float],
    remember: bool,
) -> tuple[Tensor, list[Tree], int]:
    """Move ``group.x`` in place by one step per entry of ``rates``, one optimiser per member.

    An entry of ``rates`` contains one factor per member. Return (lower losses before the last step,
    memory of each member, gradients per member).
    """
    stacked = isinstance(group.part, slice)
    loss = torch.empty(())
    calls = 0
    members = [_member(slope.x, i if stacked else None) for i in range(len(decays))]
    memories = [
        {name: leaf[i] for name, leaf in moments.items()} if stacked else moments
        for i in range(len(decays))
    ]
    steppers = [
        Stepper.of(rule.build, leaves, memory)
        for leaves, memory in zip(members, memories, strict=True)
    ]

    def slopes(step: int) -> Tensor:
        nonlocal calls
        calls += 1
        grads, losses = slope.at(step)
        if rule.clip is not None:
            clip_(grads, rule.clip, stacked)
        for i, leaves in enumerate(members):
            for leaf, grad in zip(leaves.values(), grads, strict=True):
                leaf.grad = grad[i] if stacked else grad
        return losses

    options: list[dict[str, Any]] = []
    for step, factors in enumerate(rates):
        options = rule.times.options(rule.done + step)
        for stepper, rate, decay in zip(steppers, factors, decays, strict=True):
            stepper.set(options, rate, decay)
        if rule.needs_closure:
            loss = cast("Any", steppers[0].optimizer).step(partial(slopes, step))
            continue
        loss = slopes(step)
        for stepper in steppers:
            stepper.optimizer.step()
    return loss, [stepper.memory(options) for stepper in steppers] if remember else [], calls


def joined(memories: Sequence[Tree]) -> Tree:
    """Return the memories of all branches, stacked."""
    shapes = [{name: leaf.shape for name, leaf in memory.items()} for memory in memories]
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            "not-supported",
            "the state of the optimiser has another shape in each branch, so a branch cannot "
            "continue with the state of another branch",
            place=("generator", "moments"),
            hint='set moments = "fresh" or count = 1',
        )
    return stack(memories)


def _member(x: Tree, row: int | None) -> Tree:
    """Return one branch's leaves, which share memory with ``x``."""
    return {
        name: (leaf if row is None else leaf[row]).detach().requires_grad_()
        for name, leaf in x.items()
    }
