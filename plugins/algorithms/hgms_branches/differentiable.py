"""One lower step as a differentiable function of θ and of the state before it."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from hgms_adam import adam
from hgms_branches.steps import Coefficients, Rule
from hgms_core import Loss, Tree, twice_differentiable_attention


def differentiable_step(
    g: Loss, rule: Rule, theta: Tree, state: list[Tree], batch: Tree, numbers: Coefficients, graph: bool
) -> tuple[list[Tree], Tensor]:
    """[x, m, v], as far as there are moments, after one step, and the loss before it; with a ``graph`` as differentiable
    functions of ``theta`` and of the state.

    Operation for operation as in :func:`hgms_branches.steps.advance`, so that a branch that is run again rounds as it did the
    first time."""
    names = list(state[0])
    leaves = [leaf if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in state[0].values()]
    x = dict(zip(names, leaves, strict=True))
    with torch.enable_grad(), twice_differentiable_attention() if graph else contextlib.nullcontext():
        value = g(theta, x, batch)
        slopes = torch.autograd.grad(value, leaves, create_graph=graph, materialize_grads=True)
    with torch.set_grad_enabled(graph):
        return _stepped(rule, x, _clipped(rule, slopes, names), state[1:], numbers), value.detach()


def _stepped(rule: Rule, x: Tree, grads: Tree, moments: list[Tree], numbers: Coefficients) -> list[Tree]:
    if numbers.kept is not None:
        x = {name: leaf * numbers.kept for name, leaf in x.items()}
    if rule.optimizer == "adamw":
        scale, correction = numbers.scale, numbers.correction
        return [*adam(x, grads, *moments, scale=scale, correction=correction, betas=rule.betas, eps=rule.eps)]
    if not rule.momentum:
        return [{name: x[name] - numbers.rate * grads[name] for name in x}]
    first = {name: rule.momentum * moments[0][name] + grads[name] for name in x}
    return [{name: x[name] - numbers.rate * first[name] for name in x}, first]


def _clipped(rule: Rule, slopes: tuple[Tensor, ...], names: list[str]) -> Tree:
    grads = dict(zip(names, slopes, strict=True))
    if (bound := rule.clip) is None:
        return grads
    norm = torch.cat([slope.reshape(-1) for slope in slopes]).norm()
    # The bound enters through clamp_min, whose derivative at a zero gradient is 0 and not 0·inf.
    return {name: grad * (bound / norm.clamp_min(bound)) for name, grad in grads.items()}
