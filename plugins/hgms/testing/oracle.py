"""Count the oracle use of a component inside the losses: calls, backward passes, rows, draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import Factory, define, evolve
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hgms.testing.kit import demand
from hgms_core import Batch, Cost, Data, Loss, Problem, Rows, Sources, Tree
from hgms_core.capabilities import GivesRepresentations, find

Note = Callable[[int, Tensor], None]
"""A function (number of candidates evaluated at once, tensor that was passed on)."""


class _Watched(torch.autograd.Function):
    """The identity on several leaves, with callbacks.

    ``forth`` is called with the first leaf in the forward pass, ``back`` in the backward pass, once
    for all rows of a ``vmap``.
    """

    @staticmethod
    def forward(
        forth: Note | None, back: Note | None, times: int, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        if forth is not None:
            forth(times, leaves[0])
        return tuple(leaf.clone() for leaf in leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.back, ctx.times = inputs[1:3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (
            None,
            None,
            None,
            *(grads if ctx.back is None else _watch(ctx.back, None, ctx.times, *grads)),
        )

    @staticmethod
    def jvp(ctx: Any, forth: None, back: None, times: None, *tangents: Tensor) -> Any:
        return tuple(None if tangent is None else tangent.clone() for tangent in tangents)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, forth: Note | None, back: Note | None, times: int, *leaves: Tensor
    ) -> Any:
        return _watch(forth, back, times * info.batch_size, *leaves), in_dims[3:]


_watch: Callable[..., tuple[Tensor, ...]] = _Watched.apply


@define
class Tally:
    """Counts of the use of the losses since the last ``clear()``.

    ``passes`` are backward passes through a call: 1 per gradient, 1 per product. ``rows`` counts
    the rows of calls, ``returned`` the rows of backward passes. ``values`` are the values of g.
    ``on_stop`` counts the backward passes on rows of the role ``stop``.
    """

    calls: dict[str, int] = Factory(lambda: {"f": 0, "g": 0})
    passes: dict[str, int] = Factory(lambda: {"f": 0, "g": 0})
    rows: int = 0
    returned: int = 0
    on_stop: int = 0
    values: list[Tensor] = Factory(list)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def loss(self, name: str, loss: Loss) -> Loss:
        """Return ``loss(theta, x, batch)`` with counting."""

        def counted_loss(theta: Tree, x: Tree, batch: Batch) -> Tensor:
            rows = max(1, batch["index"].numel()) if "index" in batch else 1

            def add_pass(times: int, _: Tensor) -> None:
                self.passes[name] += times
                self.returned += times * rows
                if MARK in batch:
                    self.on_stop += times

            def add_call(times: int, value: Tensor) -> None:
                self.calls[name] += times
                self.rows += times * rows
                if name == "g":
                    self.values.append(value.detach().reshape(-1))

            leaves = iter(_watch(None, add_pass, 1, *theta.values(), *x.values()))
            theta, x = ({key: next(leaves) for key in tree} for tree in (theta, x))
            return _watch(add_call, None, 1, loss(theta, x, batch))[0]

        return counted_loss


MARK = "of-stop"
"""The leaf that marks batches of the role ``stop`` in a counted problem."""


def watch(problem: Problem) -> tuple[Problem, Tally]:
    """Return the same problem with counted losses, and the tally."""
    tally = Tally()
    sources = problem.find(Sources)
    rows = problem.find(Rows)

    def of_x(loss: Callable[[Tree, Batch], Tensor]) -> Callable[[Tree, Batch], Tensor]:
        counted = tally.loss("g", lambda theta, x, batch: loss(x, batch))
        return lambda x, batch: counted({}, x, batch)

    if rows is not None:
        rows = evolve(rows, losses=of_x(rows.losses))
    if sources is not None:
        pooled = tally.loss("g", sources.pooled)
        examples: Any = of_x(sources.examples)
        if known := find(sources.examples, GivesRepresentations):
            examples.representations = of_x(known.representations)
            examples.capabilities = frozenset({GivesRepresentations})
        sources = evolve(sources, losses=of_x(sources.losses), examples=examples, pooled=pooled)
    return evolve(
        problem,
        f=tally.loss("f", problem.f),
        g=tally.loss("g", problem.g),
        upper_data={
            role: _mark_rows(data) if role == "stop" else data
            for role, data in problem.upper_data.items()
        },
        extensions=tuple(item for item in (rows, sources) if item is not None),
    ), tally


def _mark_rows(data: Data) -> Data:
    def mark(batch: Batch) -> Batch:
        return {**batch, MARK: batch["index"]} if "index" in batch else batch

    return evolve(data, whole=mark(data.whole), rows=lambda index: mark(data.rows(index)))


def demand_honest(cost: Cost, tally: Tally) -> None:
    """Require that the declared cost fits the tally, per loss and for rows: see
    :func:`demand_close`.
    """
    lower = cost.lower_gradients + cost.products + cost.cross_products
    upper = cost.upper_values + cost.upper_gradients
    demand(
        upper >= tally.calls["f"],
        f"f was called {tally.calls['f']} times, {upper} calls are declared",
    )
    for name, declared in (("f", upper), ("g", lower)):
        demand_close(name, tally.calls[name], tally.passes[name], int(declared))
    rows = (
        f"{tally.rows} rows went through calls and {tally.returned} through backward passes, "
        f"{cost.rows} are declared"
    )
    demand(_close(int(cost.rows), max(tally.rows, tally.returned)), rows)


def demand_close(name: str, calls: int, passes: int, declared: int) -> None:
    """Require that declared calls are within a factor of two of the larger actual count.

    The counts are calls and backward passes. A gradient is one call and one backward pass. A
    product is one backward pass through an existing graph (which may also give the cross
    product), or two calls (differences).
    """
    counts = (
        f"{name} was called {calls} times, with {passes} backward passes; {declared} calls "
        "are declared"
    )
    demand(_close(declared, max(calls, passes)), counts)


def _close(declared: int, done: int) -> bool:
    return done <= 2 * declared and declared <= 2 * done


class _Draws(TorchFunctionMode):
    """Record the random numbers that torch functions draw from generators inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and any(
            isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values())
        ):
            self.drawn.append(result.detach().clone())
        return result


def record_draws(call: Callable[..., Any], *arguments: Any) -> tuple[list[Tensor], Any]:
    """Call the function; return the random numbers it draws, in order, and its result."""
    with _Draws() as mode:
        result = call(*arguments)
    return mode.drawn, result


def same_draws(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether numbers were drawn and both sequences are equal."""
    return (
        bool(first)
        and len(first) == len(second)
        and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    )
