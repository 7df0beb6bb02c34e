"""Shared parts of these methods: the rows of a step, a step of x, weights of rows as θ, and the end
of an outer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers
from hgms.config import lowering
from hgms.optim.adam import adam, corrections
from hgms.rows import better_state, check_stop_rows, weighted_rows
from hgms_core import (
    Batch,
    ConfigError,
    Cost,
    Data,
    Key,
    Problem,
    Record,
    Rows,
    State,
    Tree,
    component,
)
from hgms_core.capabilities import Capabilities, HasTestingInstance
from hgms_core.validators import decay_rate, optional_positive, positive

BETAS = (0.9, 0.999)
EPS = 1e-8
LARGEST = 10.0
"""Upper bound of the logit of a weight: σ(10) = 0.99995."""
CHUNK = 1024
"""Rows per chunk when all lower rows are evaluated."""


@component
class Reweighting:
    """Settings of a method that trains x step by step on weighted rows.

    Parameters
    ----------
    steps
        Updates of x per outer step.
    optimizer, lr, momentum, schedule
        Of x; the schedule follows the share of the budget.
    batch_size
        Lower rows per update.
    upper_batch_size
        Validation rows; None: all.
    keep
        The returned state: ``best`` on the rows of the role ``stop``, or ``last``.

    Raises
    ------
    ConfigError
        For a problem whose θ does not weight lower rows, or without rows for ``stop`` if they are
        needed.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance})

    steps: int = field(default=20, validator=positive)
    optimizer: Literal["sgd", "adam"] = "adam"
    lr: float = field(default=3e-3, validator=positive)
    momentum: float = field(default=0.9, validator=decay_rate)
    schedule: Literal["constant", "cosine"] = "cosine"
    batch_size: int | None = field(default=256, validator=optional_positive)
    upper_batch_size: int | None = field(default=100, validator=optional_positive)
    keep: Literal["last", "best"] = "best"

    memory_hints = lowering(other=["batch_size", "upper_batch_size"])

    @property
    def needs(self) -> frozenset[str]:
        stop = {"stop-rows"} if self.keep == "best" else set()
        return frozenset({"row-weights"} | stop)

    def rate(self, progress: float) -> float:
        """Return the learning rate at this share of the budget."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def batches(self, problem: Problem, state: State) -> Iterator[tuple[int, Batch, Batch, int]]:
        """Yield the number of each lower step, its lower rows, and its validation rows.

        The validation rows have the role ``differentiate``; their number is the last value.
        """
        data = problem.upper_data["differentiate"]
        steps = range(state["lower_steps"], state["lower_steps"] + self.steps)
        for number, below in lower_batches(problem, state["seed"], steps, self.batch_size):
            key = Key(state["seed"]).fold("upper", number)
            yield number, below, *data.sample(key, self.upper_batch_size)

    def result(self, state: State) -> tuple[Tree, Tree]:
        return answer(self, state)


def begin(method: Any, problem: Problem, seed: int, **more: Any) -> State:
    """Return the state before the first step.

    ``more`` may contain further lower states; each has moments that start at zero.
    """
    weighted_rows(problem, method.name)
    if method.keep == "best":
        check_stop_rows(problem)
    return {
        "seed": seed,
        "step": 0,
        "lower_steps": 0,
        "theta": dict(problem.theta0),
        "x": dict(problem.x0),
        "best": None,
        "cost": Cost().numbers(),
        **more,
    }


def no_moments(optimizer: str, x: Tree) -> Tree:
    """Return the initial moments of ``momentum`` (m) or Adam (m and v)."""
    kinds = "m" if optimizer == "sgd" else "mv"
    return {f"{kind}.{name}": torch.zeros_like(leaf) for kind in kinds for name, leaf in x.items()}


def numbers(rate: float, count: int) -> list[float]:
    """Return the scalar arguments of :func:`step_of_x` for step ``count``, from 1."""
    return [rate, *corrections(rate, count, BETAS)]


def step_of_x(
    optimizer: str, momentum: float, steps: Numbers, x: Tree, slope: Tree, moments: Tree
) -> tuple[Tree, Tree]:
    """(x, moments) after one step of SGD with momentum or of Adam, as new tensors."""
    rate, scale, correction = steps
    if optimizer == "sgd":
        first = {f"m.{name}": momentum * moments[f"m.{name}"] + slope[name] for name in x}
        return {name: leaf - rate * first[f"m.{name}"] for name, leaf in x.items()}, first
    m, v = ({name: moments[f"{kind}.{name}"] for name in x} for kind in "mv")
    x, m, v = adam(x, slope, m, v, (scale, correction), betas=BETAS, eps=EPS)
    return x, {f"{kind}.{name}": tree[name] for kind, tree in (("m", m), ("v", v)) for name in x}


def gradient_of(value: Tensor, leaves: Tree, retain: bool = False) -> Tree:
    """Return the gradient of a scalar in each leaf; zeros for leaves that the scalar does not
    depend on.
    """
    slopes = torch.autograd.grad(
        value, list(leaves.values()), retain_graph=retain, materialize_grads=True
    )
    return dict(zip(leaves, slopes, strict=True))


def lower_batches(
    problem: Problem, seed: int, steps: range, size: int | None
) -> Iterator[tuple[int, Batch]]:
    """Yield each lower step of the run in ``steps``, and its rows.

    Each epoch has a separate order, which is drawn once. Rows that do not fill a batch are skipped
    in that epoch, so that no row appears twice in a batch.
    """
    data = problem.lower_data
    length = 1 if size is None else max(1, data.size // size)
    epoch = -1
    drawn: Tensor | None = None
    for step in steps:
        if step // length != epoch and size is not None:
            epoch = step // length
            drawn = data.draw(Key(seed).fold("epoch", epoch), size, length)
        yield step, data.batch(None if drawn is None else drawn[step % length])


def joint_parts(problem: Problem) -> list[tuple[float, Data]]:
    """Return the validation rows that x may be trained on, the roles ``differentiate`` and
    ``select``, each with its share of these rows.
    """
    first = problem.upper_data["differentiate"]
    second = problem.upper_data["select"]
    parts = [first] if first is second else [part for part in (first, second) if part.size]
    total = sum(part.size for part in parts)
    return [(part.size / total if total else 1.0, part) for part in parts]


def joint_batches(problem: Problem, key: Key, size: int | None) -> tuple[list[Batch], int]:
    """Draw rows from each of :func:`joint_parts`, ``size`` in total (``None``: every row); return
    their number too.
    """
    batches = []
    count = 0
    for number, (share, part) in enumerate(joint_parts(problem)):
        batch, rows = part.sample(
            key.fold("upper", number), None if size is None else max(1, round(share * size))
        )
        batches.append(batch)
        count += rows
    return batches, count


@torch.no_grad()
def all_losses(problem: Problem, rows: Rows, x: Tree) -> tuple[Tensor, Cost]:
    """Return the loss of every lower row, ``[n]``, computed in chunks of rows."""
    data = problem.lower_data
    index = torch.arange(data.size, device=data.device).split(CHUNK)
    losses = torch.cat([rows.losses(x, data.batch(part)) for part in index])
    return losses, Cost(upper_values=len(index), rows=data.size)


@torch.no_grad()
def usual_loss(
    method: Any, problem: Problem, rows: Rows, x: Tree, share: float
) -> tuple[Tensor, Cost]:
    """Return the ``share``-quantile of ℓ over the validation rows of the role ``stop``, which are
    not used to train x.
    """
    batch, count = problem.upper_data["stop"].sample(Key(0), None)
    try:
        losses = rows.losses(x, batch)
    except KeyError as error:
        raise ConfigError(
            "missing-column",
            f"method {method.name!r} compares losses of lower rows and validation rows, but the "
            f"validation rows have no column {error}",
            place=("upper_data", "stop", *map(str, error.args)),
        ) from error
    return losses.quantile(share), Cost(upper_values=1, rows=count)


def as_theta(problem: Problem, rows: Rows, logits: Tensor) -> Tree:
    """Return θ with these logits, projected onto Θ; its other leaves keep their initial values."""
    leaf = problem.theta0[rows.leaf]
    return problem.project({**problem.theta0, rows.leaf: logits.to(leaf).clamp(-LARGEST, LARGEST)})


def theta_of_kept(problem: Problem, rows: Rows, kept: Tensor) -> Tree:
    """Return θ with the largest logit for kept rows, and the smallest for others."""
    return as_theta(problem, rows, LARGEST * (2.0 * kept - 1))


def end_step(
    method: Any,
    problem: Problem,
    state: State,
    changes: State,
    answers: Sequence[Tree],
    spent: Cost,
    record: Record,
) -> tuple[State, Record]:
    """Return the state after an outer step, and its record.

    ``answers`` are the lower states that may be the result. With ``keep = "best"`` the result is
    the state with the lowest upper loss so far on the rows of the role ``stop``, otherwise the
    state's x.
    """
    following = {**state, **changes, "step": state["step"] + 1}
    best = state["best"]
    if method.keep == "best":
        batch, rows = problem.upper_data["stop"].sample(Key(0), None)
        with torch.no_grad():
            losses = [problem.f(following["theta"], x, batch) for x in answers]
        record = {**record, "stop_loss": torch.stack(losses).min()}
        for loss, x in zip(losses, answers, strict=True):
            best = better_state({"loss": loss, "theta": following["theta"], "x": x}, best)
        spent = spent + Cost(upper_values=len(answers), rows=len(answers) * rows)
    cost = Cost(**state["cost"]) + spent
    counts = {f"cost_{name}": number for name, number in cost.numbers().items()}
    record = {"step": following["step"], **record, **counts, "oracle_calls": cost.calls}
    return {**following, "best": best, "cost": cost.numbers()}, record


def answer(method: Any, state: State) -> tuple[Tree, Tree]:
    """Return (θ, x) of the best state, or of the last."""
    if method.keep == "best" and state["best"] is not None:
        return state["best"]["theta"], state["best"]["x"]
    return state["theta"], state["x"]
