"""Shared parts of the penalty generators: N branches around one step, and their carried state.

A branch's lower state is ``x``. Its other variables (ω, u or z, moments) are stored in ``aux``
under ``<variable>.<leaf>``. ``aux`` also contains the data for the hypergradient ``carried``: the
upper gradient of the same pass (``theta.<leaf>``) and, under names without a dot, measurements
(``upper_loss``, ``lower_gradient_norm``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hgms.compiled import Programs, form
from hgms_core import (
    Candidates,
    ConfigError,
    Cost,
    Data,
    Key,
    Loss,
    Problem,
    State,
    Tree,
    gradient,
    norm,
    slopes,
    stack,
)
from hgms_core.trees import require_grad

STEPS = 5
"""Maximum lower steps per compiled function. The compile time grows with their number."""

Step = Callable[[Tree, Tree, Key], tuple[Tree, Tree, Tensor]]
"""The step of one branch: (x, aux, key) → (next x, next aux, lower loss before the step)."""


def tag(variable: str, tree: Tree) -> Tree:
    return {f"{variable}.{name}": leaf for name, leaf in tree.items()}


def untag(variable: str, aux: Tree) -> Tree:
    return {
        name[len(variable) + 1 :]: leaf
        for name, leaf in aux.items()
        if name.startswith(variable + ".")
    }


def begin(
    method: Any,
    problem: Problem,
    key: Key,
    twins: tuple[str, ...] = (),
    zeros: tuple[str, ...] = (),
) -> State:
    """Return the state before the first step: x, its ``twins``, and moments of zero.

    The ``twins`` start equal to x. The state has one copy for all branches. With ``per-branch``, it
    has one copy per branch, with the noise that makes branches differ.
    """
    full = is_full(problem.lower_data, method.batch_size)
    if (
        method.count > 1
        and not method.noise
        and full
        and is_full(problem.upper_data["differentiate"], method.upper_batch_size)
    ):
        raise ConfigError(
            "conflicting-options",
            f"all {method.count} candidates of generator {method.name!r} would be equal with "
            "noise=0 and full batches",
            place=("generator", "noise"),
            hint="set noise > 0, batch_size below the number of rows, or count = 1",
        )
    own = method.count if method.carry_rule == "per-branch" else 1
    x = stack(
        [
            _noisy(problem.x0, method.noise, key.fold("noise", i)) if i else problem.x0
            for i in range(own)
        ]
    )
    aux = {f"{twin}.{name}": leaf for twin in twins for name, leaf in x.items()}
    aux |= {f"{zero}.{name}": torch.zeros_like(leaf) for zero in zeros for name, leaf in x.items()}
    return {"x": x, "aux": aux, "step": 0}


def is_full(data: Data, batch_size: int | None) -> bool:
    """Return whether a batch of this size contains all rows."""
    return batch_size is None or batch_size >= data.size


def branches(start: State, key: Key, method: Any, step: Step, cost: Cost) -> Candidates:
    """Run ``step`` for every branch, from its stored start or with noise from the common start.

    ``cost`` is the cost of one branch. Branch 0 is free of noise. Noise is added to x only: the
    other variables of the common start approximate the lower solution, and noise would make them
    worse.
    """
    stored = next(iter(start["x"].values())).shape[0]
    if stored not in (1, method.count):
        raise ConfigError(
            "wrong-length",
            f"the carried state has {stored} branches, but count={method.count}",
            place=("generator", "count"),
        )
    ends = []
    for member in range(method.count):
        row = 0 if stored == 1 else member
        own = key.fold("branch", member)
        x = {name: leaf[row] for name, leaf in start["x"].items()}
        if stored == 1 and member:
            x = _noisy(x, method.noise, own.fold("noise"))
        ends.append(step(x, {name: leaf[row] for name, leaf in start["aux"].items()}, own))
    if method.count == 1:  # no copy in the usual case
        x, aux = ({name: leaf.unsqueeze(0) for name, leaf in tree.items()} for tree in ends[0][:2])
    else:
        x = stack([x for x, _, _ in ends])
        aux = stack([aux for _, aux, _ in ends])
    losses = torch.stack([loss for _, _, loss in ends])
    return Candidates(x=x, aux=aux, losses=losses, cost=sum((cost for _ in ends), Cost()))


def _noisy(x: Tree, scale: float, key: Key) -> Tree:
    if not scale:
        return x
    device = next(iter(x.values())).device
    generator = key.generator(device)
    return {
        name: leaf
        + scale * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device=device)
        for name, leaf in x.items()
    }


def carry(
    method: Any, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
) -> State:
    """Return the selected branch, or every branch, as the next start.

    Upper gradients and measurements are removed, because they belong to this step only.
    """
    x = candidates.x
    aux = {
        name: leaf
        for name, leaf in candidates.aux.items()
        if "." in name and not name.startswith("theta.")
    }
    if method.carry_rule == "selected" and method.count > 1:
        row = index.reshape(1)
        x, aux = (
            {name: leaf.index_select(0, row) for name, leaf in tree.items()} for tree in (x, aux)
        )
    return {**start, "x": x, "aux": aux, "step": start["step"] + 1}


def draw(problem: Problem, key: Key, method: Any) -> tuple[Tree, Tree]:
    """Draw a lower batch, and an upper batch of the role ``differentiate``."""
    below, _ = problem.lower_data.sample(key.fold("lower"), method.batch_size)
    return below, upper_batch(problem, key, method)


def upper_batch(problem: Problem, key: Key, method: Any) -> Tree:
    return problem.upper_data["differentiate"].sample(key.fold("upper"), method.upper_batch_size)[0]


def draw_each(problem: Problem, key: Key, method: Any, steps: int) -> tuple[list[Tree], list[Tree]]:
    """Draw a lower and an upper batch for each of ``steps`` evaluations, independently.

    An evaluation after a step therefore does not depend on the rows of that step.
    """
    above = problem.upper_data["differentiate"]
    keys = [key.fold("evaluation", step) for step in range(steps)]
    return (
        [problem.lower_data.sample(own.fold("lower"), method.batch_size)[0] for own in keys],
        [above.sample(own.fold("upper"), method.upper_batch_size)[0] for own in keys],
    )


def rows(problem: Problem, method: Any) -> tuple[int, int]:
    """Return the numbers of rows of a lower and an upper batch."""
    return problem.lower_data.count(method.batch_size), problem.upper_data["differentiate"].count(
        method.upper_batch_size
    )


def gradients(value: Tensor, *trees: Tree) -> list[Tree]:
    """Return the gradient of ``value`` in each tree, in one backward pass.

    Gradients are zero for leaves that ``value`` does not depend on.
    """
    leaves = iter(slopes(value, [leaf for tree in trees for leaf in tree.values()]))
    return [{name: next(leaves) for name in tree} for tree in trees]


def with_momentum(direction: Tree, m: Tree, momentum: float) -> tuple[Tree, Tree]:
    """Return the running sum of directions after ``m``, and its entries for ``aux``.

    Without momentum, there are no entries.
    """
    if not momentum:
        return direction, {}
    direction = {name: momentum * m[name] + leaf for name, leaf in direction.items()}
    return direction, tag("m", direction)


def descend(x: Tree, direction: Tree, rate: float | Tensor) -> Tree:
    """Return x − rate·direction as new tensors, with the step length limited to max(1, ‖x‖).

    A fixed rate is too large if θ has made g steep (for example, a growing weight decay). The bound
    limits the growth of x until θ adapts.
    """
    length = (norm(direction) * rate).abs()
    factor = norm(x).clamp_min(1) / torch.maximum(length, norm(x).clamp_min(1))
    direction = {name: direction[name] * factor for name in x}  # factor 1 changes no bit
    if isinstance(rate, Tensor):
        return {name: leaf - rate * direction[name] for name, leaf in x.items()}
    moved = torch._foreach_add(list(x.values()), [direction[name] for name in x], alpha=-rate)
    return dict(zip(x, moved, strict=True))


def descent(
    programs: Programs | None,
    method: Any,
    g: Loss,
    steps: int,
    rate: float,
    theta: Tree,
    x: Tree,
    batch: Tree,
) -> Tree:
    """Return x after ``steps`` steps of rate ``rate`` along −∇_x g on one batch.

    A compiled function takes several steps.
    """
    length = max(length for length in range(1, STEPS + 1) if steps % length == 0) if steps else 1
    block = form(
        programs, (f"{method.name} descent", g, rate, length), partial(_descent, g, rate, length)
    )
    for _ in range(0, steps, length):
        x = block(theta, x, batch)
    return x


def _descent(g: Loss, rate: float, steps: int, theta: Tree, x: Tree, batch: Tree) -> Tree:
    for _ in range(steps):
        grads, _value = gradient(g, theta, x, batch)
        x = descend(x, dict(zip(x, grads, strict=True)), rate)
    return x


def penalised_step(
    g: Loss,
    f: Loss,
    rate: float | Tensor,
    penalty: float | Tensor,
    theta: Tree,
    y: Tree,
    below: Tree,
    above: Tree,
) -> tuple[Tree, Tensor]:
    """Return y − (rate/penalty) ∇_y [f + penalty·g], and the lower loss at the old y."""
    lower = require_grad(y)
    with torch.enable_grad():
        at_y = g(theta, lower, below)
        (slope,) = gradients(f(theta, lower, above) / penalty + at_y, lower)
    return descend(y, slope, rate), at_y.detach()


def penalty_weights(method: Any, step: int) -> tuple[float, float]:
    """Return (γ_k, c_k) at outer step k."""
    gamma = method.ramp.at(method.gamma, step)
    return gamma, 1 / gamma if method.normalise and gamma > 1 else 1.0
