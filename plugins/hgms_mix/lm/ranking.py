"""Shared parts of methods on rows of sources.

They are steps in phases, AdamW, epochs of rows, and the selection of the rows with the highest
scores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from attrs import field
from torch import Tensor

from hgms.arguments import require
from hgms.optim.adam import adam, corrections
from hgms_core import (
    Batch,
    ConfigError,
    Cost,
    Data,
    Key,
    Loss,
    NumericalError,
    Problem,
    Record,
    Sources,
    State,
    Tree,
    component,
    gradient,
)
from hgms_core.capabilities import find
from hgms_core.errors import Place
from hgms_core.validators import (
    at_least,
    at_most,
    decay_rate,
    each,
    greater_than,
    not_negative,
    optional,
    positive,
)
from hgms_mix.lm.losses import HasSizes

some_share: Any = [greater_than(0), at_most(1)]
"""A number in (0, 1]."""
optional_count: Any = optional(at_least(0))
"""A whole number >= 0, or None."""

Phase = Callable[[Problem, State], tuple[State, Record, Cost]]
"""The work of one step: it returns the changes of the state, the record's entries and the cost."""


def sources_of(problem: Problem, use: str) -> Sources:
    """Return the problem's sources.

    Raise ConfigError if there are no sources, or no ``Data.strata``. ``use`` states their purpose
    in the message ("method 'x' mixes").
    """
    sources = problem.find(Sources)
    if sources is None:
        raise ConfigError(
            "not-supported",
            f"{use} data sources, but the problem has no extension Sources",
            place=("problem", "sources"),
        )
    require(
        problem.lower_data.strata is not None,
        "not-supported",
        f"{use} data sources, but the lower rows have no strata",
        place=("problem", "lower_data", "strata"),
        hint="create them with Data(..., strata=((name, number of rows), ...))",
    )
    return sources


def check_role(problem: Problem, use: str, role: str) -> None:
    """Raise ConfigError if no validation rows have the role.

    ``use`` states their purpose in the message ("method 'x' compares with").
    """
    require(
        role in problem.upper_data and problem.upper_data[role].size != 0,
        "no-rows-for-role",
        f"{use} validation rows in the role {role!r}, but there are 0",
        place=("problem", "upper_data", role),
        hint="add validation rows with this role",
    )


def epoch_rows(key: Key, count: int, update: int, batch_size: int) -> Tensor:
    """Return the positions of the rows of an update in a pool of ``count`` rows.

    Every epoch has a separate order and contains each row once.

    Examples
    --------
    >>> sorted(epoch_rows(Key(0), 5, 0, 3).tolist() + epoch_rows(Key(0), 5, 1, 3).tolist())
    [0, 1, 2, 3, 4]
    """
    epoch, at = divmod(update, math.ceil(count / batch_size))
    order = _epoch_order(key.fold("epoch", epoch), count)
    return order[at * batch_size : (at + 1) * batch_size]


@functools.lru_cache(maxsize=4)
def _epoch_order(key: Key, count: int) -> Tensor:
    return torch.randperm(count, generator=key.generator())


def highest(scores: Tensor, count: int) -> Tensor:
    """Return the positions of the ``count`` highest scores; of equal scores the first.

    Examples
    --------
    >>> highest(torch.tensor([0.1, 0.5, 0.5, 0.2]), 2)
    tensor([1, 2])
    """
    return scores.sort(descending=True, stable=True).indices[:count]


def focused_mixtures(count: int, share: float) -> Tensor:
    """Return one mixture per source, ``[S, S]``: ``share`` on the diagonal, the rest even.

    Examples
    --------
    >>> focused_mixtures(3, 0.5)[0]
    tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """
    others = (1 - share) / (count - 1)
    return torch.full((count, count), others, dtype=torch.float64).fill_diagonal_(share)


def source_counts(data: Data, rows: Tensor) -> dict[str, int]:
    """Count the given rows of each source.

    Examples
    --------
    >>> source_counts(Data(size=5, strata=(("a", 2), ("b", 3))), torch.tensor([1, 2, 3, 4]))
    {'a': 1, 'b': 3}
    """
    strata = data.strata or ()
    ends = torch.tensor([size for _, size in strata]).cumsum(0)
    counts = torch.bincount(torch.bucketize(rows, ends, right=True), minlength=len(strata))
    return {name: number for (name, _), number in zip(strata, counts.tolist(), strict=True)}


def prior_shares(problem: Problem, prior: Literal["uniform", "rows"]) -> dict[str, float]:
    """Return the share of each source: equal, or in proportion to the rows of the sources.

    The number of rows is the number in the source's file if the task uses fewer, else the number in
    the pool.

    Examples
    --------
    >>> from hgms.testing.problems import mixture
    >>> prior_shares(mixture(), "rows")
    {'near': 0.5, 'far': 0.5}
    """
    sources = problem.find(Sources)
    known = None if sources is None else find(sources.examples, HasSizes)
    sizes = dict(problem.lower_data.strata or ()) if known is None else known.sizes
    parts = sizes if prior == "rows" else dict.fromkeys(sizes, 1)
    return {name: part / sum(parts.values()) for name, part in parts.items()}


def set_losses(problem: Problem, x: Tree, role: str, chunk: int, step: int) -> tuple[Tensor, Cost]:
    """Return the mean loss of every validation set that has rows of the role, ``[M]``.

    The losses are computed ``chunk`` rows at a time.

    Raises
    ------
    NumericalError
        a loss is not finite.

    Notes
    -----
    Cost: 1 upper value.

    Examples
    --------
    >>> from hgms.testing.problems import mixture
    >>> problem = mixture()
    >>> set_losses(problem, problem.x0, "select", chunk=4, step=1)[0].shape
    torch.Size([1])
    """
    data = problem.upper_data[role]
    parts = sources_of(problem, "validation losses are for").parts
    part = (
        data.batch(None).get("source", torch.zeros(data.size, dtype=torch.int64)).reshape(-1).cpu()
    )
    losses = []
    with torch.no_grad():
        for number in part.unique().tolist():
            pieces = torch.split((part == number).nonzero().squeeze(1), chunk)
            sums = [
                len(piece) * problem.f(problem.theta0, x, data.rows(piece.to(data.device))).double()
                for piece in pieces
            ]
            loss = torch.stack(sums).sum().cpu() / sum(map(len, pieces))
            check_finite(
                loss,
                f"the loss of validation set {parts[number]!r}",
                step,
                place=("validation", parts[number]),
                hint="decrease lr, or check its rows",
            )
            losses.append(loss)
    return torch.stack(losses), Cost(upper_values=1, rows=data.size)


def check_finite(
    values: Tensor,
    what: str,
    step: int,
    *,
    place: Place = ("method", "lr"),
    hint: str = "decrease lr, or check the rows and the model",
) -> None:
    """Require finite values.

    Raises
    ------
    NumericalError
        a value is infinite or not a number.
    """
    require(
        torch.isfinite(values).all(),
        "not-finite",
        f"step {step}: {what} is not finite",
        place=place,
        hint=hint,
        error=NumericalError,
    )


def check_positive(losses: Tensor, what: str, step: int) -> None:
    """Raise NumericalError unless all losses are greater than 0."""
    require(
        (losses > 0).all(),
        "out-of-range",
        f"step {step}: {what} {losses.tolist()} must be greater than 0",
        place=("problem", "f"),
        error=NumericalError,
    )


def upper_gradient(
    problem: Problem, x: Tree, key: Key, batch_size: int | None, step: int
) -> tuple[list[Tensor], Tensor, Cost]:
    """Return the gradient of f on validation rows of the role ``differentiate``, and the loss.

    Raises
    ------
    NumericalError
        The loss is not finite.

    Notes
    -----
    Cost: 1 upper gradient.
    """
    batch, rows = problem.upper_data["differentiate"].sample(key, batch_size)
    grads, loss = gradient(problem.f, problem.theta0, x, batch)
    check_finite(loss, "the validation loss", step)
    return grads, loss, Cost(upper_gradients=1, rows=rows)


@component
class AdamWSettings:
    """The settings of AdamW.

    Parameters
    ----------
    lr, weight_decay, betas, eps
        AdamW.
    """

    lr: float = field(default=1e-4, validator=positive)
    weight_decay: float = field(default=0.0, validator=not_negative)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=each(decay_rate))
    eps: float = field(default=1e-8, validator=positive)


def adamw(
    loss: Loss,
    theta: Tree,
    batch: Batch,
    state: Tree,
    settings: AdamWSettings,
    *,
    lr: float,
    count: int,
    step: int,
) -> tuple[Tree, Tensor]:
    """Compute one AdamW update on a batch, and return the new state and the loss.

    The weight decay is decoupled. ``state`` has leaves ``x.``, ``m.`` and ``v.``, and is not
    modified. ``count`` is the number of updates including this update. ``step`` is the run's step,
    for the message.

    Raises
    ------
    NumericalError
        The loss is not finite.

    Notes
    -----
    Cost: 1 lower gradient. Memory: the state twice, and a gradient.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019.
    """
    grads, value = gradient(loss, theta, adamw_part(state, "x"), batch)
    check_finite(value, "the training loss", step)
    return adamw_moved(grads, state, settings, lr=lr, count=count), value


def adamw_moved(
    grads: list[Tensor], state: Tree, settings: AdamWSettings, *, lr: float, count: int
) -> Tree:
    """Apply the update of :func:`adamw` with a given gradient.

    ``grads`` contains one tensor per leaf of x, in the order of the leaves.

    Examples
    --------
    >>> start = adamw_start({"w": torch.ones(1)})
    >>> adamw_moved([torch.tensor([4.0])], start, AdamWSettings(), lr=0.5, count=1)["x.w"]
    tensor([0.5000])
    """
    x, m, v = (adamw_part(state, part) for part in "xmv")
    decayed = torch._foreach_mul(list(x.values()), 1 - lr * settings.weight_decay)
    after = adam(
        dict(zip(x, decayed, strict=True)),
        dict(zip(x, grads, strict=True)),
        m,
        v,
        corrections(lr, count, settings.betas),
        betas=settings.betas,
        eps=settings.eps,
    )
    return _merge(*after)


def adamw_steps(
    loss: Loss,
    theta: Tree,
    batches: Iterable[Batch],
    state: Tree,
    settings: AdamWSettings,
    *,
    at: int,
    step: int,
) -> tuple[Tree, Tensor]:
    """Apply one update of :func:`adamw` per batch, after the first ``at`` updates.

    Return the state and the loss of the last batch.
    """
    value = torch.empty(())
    for count, batch in enumerate(batches, start=at + 1):
        state, value = adamw(
            loss, theta, batch, state, settings, lr=settings.lr, count=count, step=step
        )
    return state, value


def adamw_on_mixture(
    problem: Problem,
    theta: Tree,
    state: State,
    settings: AdamWSettings,
    *,
    batch_size: int | None,
    key: Key,
    count: int,
) -> tuple[Tree, Tensor, Cost]:
    """Apply ``count`` updates of :func:`adamw` to g(θ, ·), after the first ``at`` of the state.

    ``key`` and ``at`` determine the batches of ``batch_size`` rows (None: all). Return the new
    state of AdamW, the last loss and the cost.
    """
    data = problem.lower_data
    at = state["at"]
    index = data.draw(key.fold(at), batch_size, count)
    batches = (data.batch(None if index is None else index[number]) for number in range(count))
    train, loss = adamw_steps(
        problem.g, theta, batches, state["train"], settings, at=at, step=state["step"] + 1
    )
    return train, loss, Cost(lower_gradients=count, rows=count * data.count(batch_size))


def adamw_start(x: Tree) -> Tree:
    """Return the state at the start of training from ``x``.

    Examples
    --------
    >>> sorted(adamw_start({"w": torch.ones(2)}))
    ['m.w', 'v.w', 'x.w']
    """
    zeros = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
    return _merge(x, zeros, zeros)


def adamw_part(state: Tree, part: str) -> Tree:
    """Return x, m or v of a state."""
    return {
        name.removeprefix(f"{part}."): leaf
        for name, leaf in state.items()
        if name.startswith(f"{part}.")
    }


def _merge(x: Tree, m: Tree, v: Tree) -> Tree:
    return {
        f"{part}.{name}": leaf
        for part, tree in zip("xmv", (x, m, v), strict=True)
        for name, leaf in tree.items()
    }
