"""One step of an optimiser of torch as a function: its values are those of the ordinary step, its
derivative that of torch's differentiable form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hgms.optim import Build, Stepper, Timetable
from hgms_core import Tree


@frozen(eq=False)
class Settings:
    """An optimiser of torch: how it is built, and its learning rate and decay by step. ``clip``
    bounds the norm of ∇g (None: nothing does).
    """

    build: Build
    times: Timetable
    clip: float | None


def plain_step(
    settings: Settings, x: Tree, grads: Tree, memory: Tree, numbers: tuple[int, float, float]
) -> list[Tree]:
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in x.items()}
    stepper = Stepper.of(settings.build, leaves, memory)
    return _taken(settings, stepper, grads, numbers)


def _recorded(
    settings: Settings, x: Tree, grads: Tree, memory: Tree, numbers: tuple[int, float, float]
) -> list[Tree]:
    """The same with a graph, by the form of its step that torch can differentiate."""
    places = {name: leaf.detach().clone().requires_grad_() for name, leaf in x.items()}
    leaves = {name: leaf.clone() for name, leaf in x.items()}
    stepper = evolve(Stepper.of(settings.build, places), leaves=leaves)
    optimizer = stepper.optimizer
    instead = {id(place): leaves[name] for name, place in places.items()}
    optimizer.defaults["differentiable"] = True
    # what a new one holds already
    states = {instead[id(place)]: state for place, state in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(states)
    for group, fresh in zip(optimizer.param_groups, stepper.fresh, strict=True):
        group["params"] = [instead[id(place)] for place in group["params"]]
        for key, value in (("differentiable", True), ("foreach", False), ("fused", False)):
            if key in group:
                group[key] = fresh[key] = value
    # The counts in float64: here torch computes with them, and elsewhere Python does.
    counts = {
        name: f"{name.partition('|step|')[0]}|step|tensor" for name in memory if "|step|" in name
    }
    stepper.recall(
        {
            counts.get(name, name): leaf.double() if name in counts else leaf
            for name, leaf in memory.items()
        }
    )
    return _taken(settings, stepper, grads, numbers, _Smooth())


def _taken(
    settings: Settings,
    stepper: Stepper,
    grads: Tree,
    numbers: tuple[int, float, float],
    form: Any = contextlib.nullcontext(),
) -> list[Tree]:
    number, rate, decay = numbers
    options = settings.times.options(number)
    stepper.set(options, rate, decay)
    for name, leaf in stepper.leaves.items():
        leaf.grad = grads[name]
    with form:
        stepper.optimizer.step()
    return [
        {name: leaf.detach() if leaf.is_leaf else leaf for name, leaf in stepper.leaves.items()},
        stepper.memory(options),
    ]


class DifferentiableStep(torch.autograd.Function):
    """A step as it is taken in place; its derivative is that of the form of it that torch can
    differentiate.
    """

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        numbers: Any,
        x: list[str],
        memory: list[str],
        names: list[list[str]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.settings = settings
        ctx.numbers = numbers
        ctx.x = x
        ctx.memory = memory
        ctx.save_for_backward(*tensors)
        after, kept = plain_step(settings, *_trees(tensors, x, memory), numbers)
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
            after, kept = _recorded(ctx.settings, *_trees(inputs, ctx.x, ctx.memory), ctx.numbers)
        # whatever the type of the counts
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
    """Inside, the counts that an optimiser begins are in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Smooth(TorchFunctionMode):
    """Inside, √v has the derivative 0 at v = 0, so that a coordinate that never had a gradient
    stays where it is, and nothing is cut off, as SGD cuts off the gradient that its momentum begins
    with.
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
