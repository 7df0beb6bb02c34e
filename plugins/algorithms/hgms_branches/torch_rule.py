"""Steps of an optimiser of torch: in place for one branch or a stack, and as a differentiable function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hgms_branches.rule import clip_
from hgms_branches.steps import Slope
from hgms_core import ConfigError, Group, Tree, stack
from hgms_optim import Build, Stepper, Timetable, needs_closure

DIFFERENTIABLE = "Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD"


@frozen(eq=False)
class TorchRule:
    """An optimiser of torch with its schedule. ``done`` is how many steps it has already taken."""

    build: Build
    times: Timetable
    clip: float | None
    done: int = 0

    def check_linear(self) -> NoReturn:
        raise ConfigError(
            'a step is linear in ∇g only with optimizer = "sgd" and no clip, and this generator has an optimiser of torch\n'
            "  change these, or use the hypergradient 'unrolled' with last = 1"
        )

    def check_differentiable(self) -> None:
        """ConfigError where torch cannot differentiate a step of this optimiser."""
        optimizer = self.times.optimizer
        if not all("differentiable" in group for group in optimizer.param_groups):
            raise ConfigError(
                f"{type(optimizer).__name__} has no differentiable step, and `unrolled` goes back through every one\n"
                f"  take one of torch.optim that has ({DIFFERENTIABLE}),\n"
                "  or the hypergradient 'implicit', which differentiates at the end alone"
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
        """Of the step with this number in a run that begins now: its own number, and factors on learning rate and decay."""
        return self.done + step, rate, decay

    def stepped(self, x: Tree, grads: Tree, moments: Sequence[Tree], numbers: tuple[int, float, float]) -> list[Tree]:
        """[x, memory] after a step, differentiable where gradients are recorded."""
        memory = moments[0] if moments else {}
        if not torch.is_grad_enabled():
            return _plain(self, x, grads, memory, numbers)
        names: list[list[str]] = []
        tensors = [*x.values(), *grads.values(), *memory.values()]
        outputs = _Step.apply(self, numbers, list(x), list(memory), names, *tensors)
        return [dict(zip(x, outputs, strict=False)), dict(zip(names[0], outputs[len(x) :], strict=True))]


def advance_torch(
    rule: TorchRule,
    group: Group,
    moments: Tree,
    slope: Slope,
    rates: Sequence[Sequence[float]],
    decays: Sequence[float],
    remember: bool,
) -> tuple[Tensor, list[Tree], int]:
    """Moves ``group.x`` in place, each member by an optimiser of its own, through a step for each of ``rates``, which holds a
    factor for each member; (the lower losses before the last step, each member's memory, gradients of each)."""
    stacked, loss, calls = isinstance(group.part, slice), torch.empty(()), 0
    members = [_member(slope.x, i if stacked else None) for i in range(len(decays))]
    memories = [{name: leaf[i] for name, leaf in moments.items()} if stacked else moments for i in range(len(decays))]
    steppers = [Stepper.of(rule.build, leaves, memory) for leaves, memory in zip(members, memories, strict=True)]

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
    if slope.x is not group.x:
        torch._foreach_copy_(list(group.x.values()), list(slope.x.values()))
    return loss, [stepper.memory(options) for stepper in steppers] if remember else [], calls


def joined(memories: Sequence[Tree]) -> Tree:
    """The memories of all branches, stacked."""
    shapes = [{name: leaf.shape for name, leaf in memory.items()} for memory in memories]
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            "the optimiser remembers something of another size in each branch, so that one memory cannot take another's place\n"
            '  take moments = "fresh", or count = 1'
        )
    return stack(memories)


def _member(x: Tree, row: int | None) -> Tree:
    """One branch's leaves, which share memory with ``x``."""
    return {name: (leaf if row is None else leaf[row]).detach().requires_grad_() for name, leaf in x.items()}


def _plain(rule: TorchRule, x: Tree, grads: Tree, memory: Tree, numbers: tuple[int, float, float]) -> list[Tree]:
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in x.items()}
    stepper = Stepper.of(rule.build, leaves, memory)
    return _taken(rule, stepper, grads, numbers)


def _recorded(rule: TorchRule, x: Tree, grads: Tree, memory: Tree, numbers: tuple[int, float, float]) -> list[Tree]:
    """The same with a graph, by the form of its step that torch can differentiate."""
    places = {name: leaf.detach().clone().requires_grad_() for name, leaf in x.items()}
    leaves = {name: leaf.clone() for name, leaf in x.items()}
    stepper = evolve(Stepper.of(rule.build, places), leaves=leaves)
    optimizer, instead = stepper.optimizer, {id(place): leaves[name] for name, place in places.items()}
    optimizer.defaults["differentiable"] = True
    states = {instead[id(place)]: state for place, state in optimizer.state.items()}  # what a new one holds already
    optimizer.state.clear()
    optimizer.state.update(states)
    for group, fresh in zip(optimizer.param_groups, stepper.fresh, strict=True):
        group["params"] = [instead[id(place)] for place in group["params"]]
        for key, value in (("differentiable", True), ("foreach", False), ("fused", False)):
            if key in group:
                group[key] = fresh[key] = value
    # The counts in float64: here torch computes with them, and elsewhere Python does.
    counts = {name: f"{name.partition('|step|')[0]}|step|tensor" for name in memory if "|step|" in name}
    stepper.recall({counts.get(name, name): leaf.double() if name in counts else leaf for name, leaf in memory.items()})
    return _taken(rule, stepper, grads, numbers, _Smooth())


def _taken(
    rule: TorchRule, stepper: Stepper, grads: Tree, numbers: tuple[int, float, float], form: Any = contextlib.nullcontext()
) -> list[Tree]:
    number, rate, decay = numbers
    options = rule.times.options(number)
    stepper.set(options, rate, decay)
    for name, leaf in stepper.leaves.items():
        leaf.grad = grads[name]
    with form:
        stepper.optimizer.step()
    return [{name: leaf.detach() if leaf.is_leaf else leaf for name, leaf in stepper.leaves.items()}, stepper.memory(options)]


class _Step(torch.autograd.Function):
    """A step as it is taken in place; its derivative is that of the form of it that torch can differentiate."""

    @staticmethod
    def forward(
        ctx: Any, rule: TorchRule, numbers: Any, x: list[str], memory: list[str], names: list[list[str]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rule, ctx.numbers, ctx.x, ctx.memory = rule, numbers, x, memory
        ctx.save_for_backward(*tensors)
        after, kept = _plain(rule, *_trees(tensors, x, memory), numbers)
        names.append(list(kept))
        ctx.names = list(kept)
        ctx.mark_non_differentiable(*(leaf for leaf in kept.values() if not leaf.is_floating_point()))
        return (*after.values(), *kept.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        names = [*ctx.x, *ctx.x, *ctx.memory]
        moving = [
            leaf.is_floating_point() and "|step|" not in name for name, leaf in zip(names, ctx.saved_tensors, strict=True)
        ]
        inputs = [leaf.detach().requires_grad_(moves) for leaf, moves in zip(ctx.saved_tensors, moving, strict=True)]
        with torch.enable_grad(), _counting():
            after, kept = _recorded(ctx.rule, *_trees(inputs, ctx.x, ctx.memory), ctx.numbers)
        same = {name.rpartition("|")[0]: leaf for name, leaf in kept.items()}  # whatever the type of the counts
        outputs = [*after.values(), *(same[name.rpartition("|")[0]] for name in ctx.names)]
        pairs = [(leaf, slope.to(leaf.dtype)) for leaf, slope in zip(outputs, slopes, strict=True) if leaf.requires_grad]
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
    """Inside, √v has the derivative 0 at v = 0, so that a coordinate that never had a gradient stays where it is, and nothing
    is cut off, as SGD cuts off the gradient that its momentum begins with."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if function in (torch.sqrt, Tensor.sqrt):
            return _root(args[0])
        if function is Tensor.sqrt_:
            return args[0].copy_(_root(args[0].clone()))
        return args[0] if function is Tensor.detach else function(*args, **(kwargs or {}))


def _root(v: Tensor) -> Tensor:
    return torch.where(v == 0, torch.zeros_like(v), torch.where(v == 0, torch.ones_like(v), v).sqrt())
