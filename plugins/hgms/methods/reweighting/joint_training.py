"""Training on lower rows with constant weights, and on validation rows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms.compiled import Numbers, launch
from hgms.methods.reweighting import base
from hgms_core import Batch, Cost, Key, Loss, Problem, Tree
from hgms_core.trees import require_grad


@frozen
class Training:
    """Steps of Adam on g(θ, ·) + tilt·f; the rate decreases from ``lr`` to 0 as a cosine."""

    steps: int
    lr: float
    tilt: float
    batch_size: int | None
    upper_batch_size: int | None


@frozen
class Losses:
    """g, and f over validation rows: the mean of each part, weighted by its share of the rows."""

    g: Loss
    f: Loss
    shares: tuple[float, ...]
    tilt: float


def train(
    problem: Problem, name: str, theta: Tree, x: Tree, key: Key, training: Training
) -> tuple[Tree, Tensor, Tensor, Cost]:
    """Run the steps of ``training``.

    Return x, the last g and f, and the cost. f is on the rows of the roles ``differentiate`` and
    ``select``.
    """
    moments = base.no_moments("adam", x)
    cost = Cost()
    shares = tuple(share for share, _ in base.joint_parts(problem))
    losses = Losses(problem.g, problem.f, shares, training.tilt)
    settings = (f"{name} training", losses)
    function = partial(_step, losses)
    lower = upper = torch.empty(())
    size = problem.lower_data.count(training.batch_size)
    steps = range(training.steps)
    for number, below in base.lower_batches(problem, key.derive(), steps, training.batch_size):
        above, upper_size = base.joint_batches(problem, key.fold(number), training.upper_batch_size)
        rate = training.lr * 0.5 * (1 + math.cos(math.pi * number / training.steps))
        numbers = base.numbers(rate, number + 1)
        x, moments, lower, upper = launch(
            problem.compiler, settings, function, numbers, x, moments, theta, below, above
        )
        cost += Cost(lower_gradients=1, upper_gradients=len(above), rows=size + upper_size)
    return x, lower, upper, cost


def _step(
    losses: Losses,
    numbers: Numbers,
    x: Tree,
    moments: Tree,
    theta: Tree,
    below: Batch,
    above: list[Batch],
) -> tuple[Tree, Tree, Tensor, Tensor]:
    leaves = require_grad(x)
    with torch.enable_grad():
        lower = losses.g(theta, leaves, below)
        upper = joint_loss(losses.f, losses.shares, theta, leaves, above)
        slope = base.gradient_of(lower + losses.tilt * upper, leaves)
    x, moments = base.step_of_x("adam", 0.0, numbers, x, slope, moments)
    return x, moments, lower.detach(), upper.detach()


def joint_loss(f: Loss, shares: tuple[float, ...], theta: Tree, x: Tree, above: list[Batch]) -> Any:
    """Return f over the validation rows that x is trained on: the mean of each part, weighted by
    its share of the rows.
    """
    return sum(share * f(theta, x, batch) for share, batch in zip(shares, above, strict=True))
