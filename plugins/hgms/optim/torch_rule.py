"""Steps of torch optimisers as functions of their inputs, also differentiable.

The values equal the values of the ordinary step. The derivative is the derivative of torch's
differentiable step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hgms.optim.rule import clipped, not_linear
from hgms.optim.stepper import Build, Stepper, needs_closure
from hgms.optim.timetable import Timetable
from hgms_core import ConfigError, Tree

DIFFERENTIABLE = "Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD"


@frozen(eq=False)
class TorchRule:
    """A torch optimiser: its constructor ``build``, and its learning rate and decay per step.

    ``clip`` bounds the norm of ∇g (None: no bound). ``done`` is the number of steps already taken.
    """

    build: Build
    times: Timetable
    clip: float | None = None
    done: int = 0

    def check_linear(self) -> NoReturn:
        raise not_linear("torch")

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

    def numbers(self, step: int, rate: float, decay: float) -> tuple[int, float, float]:
        """Return (step number in the whole run, rate factor, decay factor).

        ``step`` is the step number in a run that starts now.
        """
        return self.done + step, rate, decay

    def step(
        self, x: Tree, slopes: list[Tensor], moments: Tree, numbers: tuple[int, float, float]
    ) -> tuple[Tree, Tree]:
        """Return (x, memory) after a step; differentiable if gradients are recorded."""
        grads = dict(zip(x, clipped(slopes, self.clip, stacked=False), strict=True))
        if not torch.is_grad_enabled():
            return plain_step(self, x, grads, moments, numbers)
        names: list[list[str]] = []
        tensors = [*x.values(), *grads.values(), *moments.values()]
        outputs = DifferentiableStep.apply(self, numbers, list(x), list(moments), names, *tensors)
        return (
            dict(zip(x, outputs, strict=False)),
            dict(zip(names[0], outputs[len(x) :], strict=True)),
        )


def plain_step(
    rule: TorchRule, x: Tree, grads: Tree, memory: Tree, numbers: tuple[int, float, float]
) -> tuple[Tree, Tree]:
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in x.items()}
    stepper = Stepper.of(rule.build, leaves, memory)
    return _take_step(rule, stepper, grads, numbers)


def _record_step(
    rule: TorchRule, x: Tree, grads: Tree, memory: Tree, numbers: tuple[int, float, float]
) -> tuple[Tree, Tree]:
    """The same step with a graph, computed by the differentiable form of the torch optimiser."""
    places = {name: leaf.detach().clone().requires_grad_() for name, leaf in x.items()}
    leaves = {name: leaf.clone() for name, leaf in x.items()}
    stepper = evolve(Stepper.of(rule.build, places), leaves=leaves)
    optimizer = stepper.optimizer
    instead = {id(place): leaves[name] for name, place in places.items()}
    optimizer.defaults["differentiable"] = True
    # State that a new optimiser already has.
    states = {instead[id(place)]: state for place, state in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(states)
    for group, fresh in zip(optimizer.param_groups, stepper.fresh, strict=True):
        group["params"] = [instead[id(place)] for place in group["params"]]
        for key, value in (("differentiable", True), ("foreach", False), ("fused", False)):
            if key in group:
                group[key] = fresh[key] = value
    # Counts are float64: torch computes with them here, and the ordinary step uses Python numbers.
    counts = {
        name: f"{name.partition('|step|')[0]}|step|tensor" for name in memory if "|step|" in name
    }
    stepper.recall(
        {
            counts.get(name, name): leaf.double() if name in counts else leaf
            for name, leaf in memory.items()
        }
    )
    return _take_step(rule, stepper, grads, numbers, _Smooth())


def _take_step(
    rule: TorchRule,
    stepper: Stepper,
    grads: Tree,
    numbers: tuple[int, float, float],
    form: Any = contextlib.nullcontext(),
) -> tuple[Tree, Tree]:
    number, rate, decay = numbers
    options = rule.times.options(number)
    stepper.set(options, rate, decay)
    for name, leaf in stepper.leaves.items():
        leaf.grad = grads[name]
    with form:
        stepper.optimizer.step()
    x = {name: leaf.detach() if leaf.is_leaf else leaf for name, leaf in stepper.leaves.items()}
    return x, stepper.memory(options)


class DifferentiableStep(torch.autograd.Function):
    """An in-place step as an autograd function. Its derivative is the derivative of the
    differentiable form of the torch optimiser.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rule: TorchRule,
        numbers: Any,
        x: list[str],
        memory: list[str],
        names: list[list[str]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.rule = rule
        ctx.numbers = numbers
        ctx.x = x
        ctx.memory = memory
        ctx.save_for_backward(*tensors)
        after, kept = plain_step(rule, *_trees(tensors, x, memory), numbers)
        names.append(list(kept))
        ctx.names = list(kept)
        ctx.mark_non_differentiable(
            *(leaf for leaf in kept.values() if not leaf.is_floating_point())
        )
        return (*after.values(), *kept.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        names = [*ctx.x, *ctx.x, *ctx.memory]
        moving = [
            leaf.is_floating_point() and "|step|" not in name
            for name, leaf in zip(names, ctx.saved_tensors, strict=True)
        ]
        inputs = [
            leaf.detach().requires_grad_(moves)
            for leaf, moves in zip(ctx.saved_tensors, moving, strict=True)
        ]
        with torch.enable_grad(), _counting():
            after, kept = _record_step(ctx.rule, *_trees(inputs, ctx.x, ctx.memory), ctx.numbers)
        # Match the names without the type of the counts.
        same = {name.rpartition("|")[0]: leaf for name, leaf in kept.items()}
        outputs = [*after.values(), *(same[name.rpartition("|")[0]] for name in ctx.names)]
        pairs = [
            (leaf, slope.to(leaf.dtype))
            for leaf, slope in zip(outputs, slopes, strict=True)
            if leaf.requires_grad
        ]
        leaves = [leaf for leaf in inputs if leaf.requires_grad]
        ends, along = zip(*pairs, strict=True)
        grads = iter(torch.autograd.grad(ends, leaves, along, materialize_grads=True))
        return (None,) * 5 + tuple(next(grads) if leaf.requires_grad else None for leaf in inputs)


def _trees(tensors: Sequence[Tensor], x: list[str], memory: list[str]) -> tuple[Tree, Tree, Tree]:
    count = len(x)
    return (
        dict(zip(x, tensors[:count], strict=True)),
        dict(zip(x, tensors[count : 2 * count], strict=True)),
        dict(zip(memory, tensors[2 * count :], strict=True)),
    )


@contextlib.contextmanager
def _counting() -> Iterator[None]:
    """Use float64 for the counts that an optimiser creates inside this context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Smooth(TorchFunctionMode):
    """Set the derivative of √v at v = 0 to 0, and disable ``detach``.

    A coordinate that never had a gradient therefore does not move. Disabling ``detach`` keeps the
    graph complete: SGD detaches the gradient that initialises its momentum.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (torch.sqrt, Tensor.sqrt):
            return _root(args[0])
        if function is Tensor.sqrt_:
            return args[0].copy_(_root(args[0].clone()))
        return args[0] if function is Tensor.detach else function(*args, **(kwargs or {}))


def _root(v: Tensor) -> Tensor:
    return torch.where(
        v == 0, torch.zeros_like(v), torch.where(v == 0, torch.ones_like(v), v).sqrt()
    )
