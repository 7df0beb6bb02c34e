"""One branch, or a stacked group of branches, moved K steps: in place without a graph, or unrolled under autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from hgms_core import Data, Group, Loss, Problem, Tree, detach, gradient, twice_differentiable_attention
from hgms_graphs import Recording


@frozen
class Hyper:
    """What both forms of the update share. ``done`` is how many steps the moments have already seen."""

    optimizer: str
    momentum: float
    betas: tuple[float, float]
    eps: float
    clip: float | None
    done: int


def advance(
    hyper: Hyper,
    group: Group,
    theta: Tree,
    moments: Tree,
    data: Data,
    index: Tensor | None,
    rates: list[float | Tensor],
    decay: float | Tensor,
    recording: Recording | None = None,
) -> Tensor:
    """Moves ``group.x`` and ``moments`` in place through all steps; returns the last lower losses.

    ``index`` holds batch numbers with axes (steps, batch), after an axis of members where each has its own batch. ``recording``
    is :func:`gradient_on` recorded for a group like this one.
    """
    leaves = list(group.x.values())
    if recording is not None:
        recording.load(theta, group.x, None if index is None else index[..., 0, :])
        leaves = list(recording.arguments[1].values())
    first = list(moments.values())[: len(leaves)]
    second = list(moments.values())[len(leaves) :]
    stacked = isinstance(group.part, slice)
    loss = torch.empty(())
    for step, rate in enumerate(rates):
        numbers = None if index is None else index[..., step, :]
        if recording is None:
            grads, loss = gradient(group.loss, theta, group.x, data.batch(numbers))
        else:
            if numbers is not None:
                recording.arguments[2].copy_(numbers)
            grads, loss = recording.run()
        if hyper.clip is not None:
            _clip_(grads, hyper.clip, stacked)
        if not isinstance(decay, float) or decay:
            _scale_(leaves, 1 - rate * decay)
        if hyper.optimizer == "sgd":
            if hyper.momentum:
                torch._foreach_mul_(first, hyper.momentum)
                torch._foreach_add_(first, grads)
                grads = first
            _descend_(leaves, grads, rate)
        else:
            _adam_(hyper, leaves, grads, first, second, hyper.done + step + 1, rate)
    if recording is not None:
        torch._foreach_copy_(list(group.x.values()), leaves)
        loss = loss.clone()
    return loss


def gradient_on(loss: Loss, data: Data) -> Callable[[Tree, Tree, Tensor | None], tuple[list[Tensor], Tensor]]:
    """(∇_x loss, loss) as a function of θ, x and row numbers."""
    return lambda theta, x, index: gradient(loss, theta, x, data.batch(index))


def _adam_(
    hyper: Hyper,
    leaves: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    count: int,
    rate: float | Tensor,
) -> None:
    beta1, beta2 = hyper.betas
    torch._foreach_lerp_(first, grads, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
    # m̂ / (√v̂ + ε), with both bias corrections moved into two scalars.
    root = torch._foreach_sqrt(second)
    torch._foreach_div_(root, (1 - beta2**count) ** 0.5)
    torch._foreach_add_(root, hyper.eps)
    scale = rate / (1 - beta1**count)
    if isinstance(scale, Tensor):
        _descend_(leaves, list(torch._foreach_div(first, root)), scale)
    else:
        torch._foreach_addcdiv_(leaves, first, root, -scale)


def _clip_(grads: list[Tensor], bound: float, stacked: bool) -> None:
    """Scales each member's gradient down to norm ``bound``."""
    dims = [tuple(range(1 if stacked else 0, grad.dim())) for grad in grads]
    squares = [grad.square().sum(dim) if dim else grad.square() for grad, dim in zip(grads, dims, strict=True)]
    norm = torch.stack(squares).sum(0).sqrt()
    _scale_(grads, bound / norm.clamp_min(bound))


def _scale_(leaves: list[Tensor], factor: float | Tensor) -> None:
    if isinstance(factor, Tensor) and factor.dim():
        for leaf in leaves:
            leaf.mul_(factor.reshape(-1, *[1] * (leaf.dim() - 1)))
    else:
        torch._foreach_mul_(leaves, factor)


def _descend_(leaves: list[Tensor], directions: list[Tensor], rate: float | Tensor) -> None:
    if isinstance(rate, Tensor):
        for leaf, direction in zip(leaves, directions, strict=True):
            leaf.sub_(rate.reshape(-1, *[1] * (leaf.dim() - 1)) * direction)
    else:
        torch._foreach_add_(leaves, directions, alpha=-rate)


def unrolled(
    hyper: Hyper,
    problem: Problem,
    theta: Tree,
    x: Tree,
    moments: Tree,
    index: Tensor | None,
    rates: list[float],
    decay: float,
    last: int,
) -> Tree:
    """The same K steps of one branch as a differentiable function of ``theta`` through the ``last`` of them."""
    end = x
    for (end, *_), _ in iterates(hyper, problem, theta, x, moments, index, rates, decay, last):  # noqa: B007
        pass
    return end


def iterates(
    hyper: Hyper,
    problem: Problem,
    theta: Tree,
    x: Tree,
    moments: Tree,
    index: Tensor | None,
    rates: list[float],
    decay: float,
    last: int,
) -> Iterator[tuple[list[Tree], Tensor]]:
    """The state after each step of :func:`unrolled` with its moments, and the loss before it.

    The steps before the ``last`` keep no graph. Memory: the graphs of ``last`` gradients.
    """
    names = list(x)
    still = detach(theta)
    state = [x, *({name: moments[f"{kind}.{name}"] for name in names} for kind in "mv" if f"{kind}.{names[0]}" in moments)]
    for step, rate in enumerate(rates):
        within = step >= len(rates) - last
        batch = problem.lower_data.batch(None if index is None else index[step])
        point = state[0]
        leaves = [leaf if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in point.values()]
        with torch.enable_grad(), twice_differentiable_attention() if within else contextlib.nullcontext():
            value = problem.g(theta if within else still, dict(zip(names, leaves, strict=True)), batch)
            found = torch.autograd.grad(value, leaves, create_graph=within, materialize_grads=True)
        with torch.set_grad_enabled(within):
            grads = dict(zip(names, found, strict=True))
            if hyper.clip is not None:
                norm = torch.cat([each.reshape(-1) for each in found]).norm()
                # The bound enters through clamp_min, whose derivative at a zero gradient is 0 and not 0·inf.
                grads = {name: grad * (hyper.clip / norm.clamp_min(hyper.clip)) for name, grad in grads.items()}
            kept = 1 - rate * decay
            point = {name: leaf * kept if decay else leaf for name, leaf in zip(names, leaves, strict=True)}
            state = _step(hyper, point, grads, state[1:], hyper.done + step + 1, rate)
        yield state, value.detach()


def _step(hyper: Hyper, x: Tree, grads: Tree, moments: list[Tree], count: int, rate: float) -> list[Tree]:
    if hyper.optimizer == "sgd":
        if not hyper.momentum:
            return [{name: x[name] - rate * grads[name] for name in x}]
        first = {name: hyper.momentum * moments[0][name] + grads[name] for name in x}
        return [{name: x[name] - rate * first[name] for name in x}, first]
    beta1, beta2 = hyper.betas
    # Operation for operation as in _adam_, so that a branch run again rounds as it did the first time.
    first = {name: torch.lerp(moments[0][name], grads[name], 1 - beta1) for name in x}
    second = {name: torch.addcmul(beta2 * moments[1][name], grads[name], grads[name], value=1 - beta2) for name in x}
    corrected, scale = (1 - beta2**count) ** 0.5, rate / (1 - beta1**count)
    root = {name: _Root.apply(second[name]) / corrected + hyper.eps for name in x}
    return [{name: torch.addcdiv(x[name], first[name], root[name], value=-scale) for name in x}, first, second]


class _Root(torch.autograd.Function):
    """√v whose derivative at v = 0 is 0 instead of infinity (a coordinate that never had a gradient stays where it is)."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        root = v.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return (grad / (2 * root)).masked_fill(~(root > 0), 0)


class Standing(torch.autograd.Function):
    """The outputs of a graph that exists already, as a function of other leaves that stand for its inputs."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Tensor], inputs: list[Tensor], *stand_ins: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = (outputs, inputs)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        outputs, inputs = ctx.graph
        # Kept, so that whoever goes back twice (two losses of one state) finds it still there.
        return None, None, *torch.autograd.grad(outputs, inputs, grads, retain_graph=True, materialize_grads=True)


def differentiated(theta: Tree, last: int | None, steps: int) -> int:
    """How many of the last steps a replay goes back through: none where no leaf of θ requires a gradient."""
    if not any(leaf.requires_grad for leaf in theta.values()):
        return 0
    return steps if last is None else min(last, steps)


def holds_values_of(leaves: Tree) -> Callable[[Tree], bool]:
    """A test whether another θ holds the numbers that ``leaves`` hold now. Of the same memory nothing is read."""
    versions = [leaf._version for leaf in leaves.values()]

    def same(theta: Tree) -> bool:
        if versions != [leaf._version for leaf in leaves.values()]:
            return False  # changed in place since, so nobody knows what they held
        return all(theta[name].is_set_to(leaf) or torch.equal(theta[name], leaf) for name, leaf in leaves.items())

    return same


def stood_in(end: Tree, leaves: Tree, theta: Tree) -> Tree:
    """``end``, whose graph was built from ``leaves``, as a function of ``theta``, which holds the same numbers."""
    outputs = Standing.apply(list(end.values()), list(leaves.values()), *(theta[name] for name in leaves))
    return dict(zip(end, cast("tuple[Tensor, ...]", outputs), strict=True))
