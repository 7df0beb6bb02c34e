"""Which route the float32 matrix products of a problem take: measured on this machine."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hgms.compiled.route import ALLOWED, ROUTES, Route, matrix_route
from hgms_core import Key, Problem

BATCH = 128
"""Rows of a small batch: a route that is faster on the whole data alone does not serve those who
sample.
"""

LEAST = 2**19
"""Multiply-adds of a product of BATCH rows below which there is nothing to gain: calling another
library takes longer.
"""

MOST = {"cpu": 2**24, "cuda": 2**32}
"""Multiply-adds of the largest product of more than BATCH rows that is timed: half a millisecond
on a core, or on a GPU.
"""

WIDEST = 1024
"""Rows and columns of a matrix above which a part of it is timed."""

ROWS = 4
"""Rows on which the lower loss is evaluated to see what it multiplies by."""

REPETITIONS = 5
GAIN = 0.9
"""The share of the exact route's time that ``fast`` may take at most: what is nearer than this
is noise.
"""

FACTOR = 4.0
"""How many times as large as the exact route's the largest error of ``fast`` may be."""


@frozen(kw_only=True)
class Product:
    """A product that was timed: ``[m, k]`` by ``[k, n]`` for ``shape = (m, k, n)``, of a batch of
    ``rows`` rows. By route: the ``seconds`` of the fastest repetition; the largest of its
    ``errors`` against float64, over the product's largest entry.
    """

    rows: int
    shape: tuple[int, int, int]
    seconds: Mapping[str, float]
    errors: Mapping[str, float]


@frozen(kw_only=True)
class RouteChoice:
    """The ``route`` to take, the ``reason`` in words, and what was measured (nothing, where
    nothing was to be gained).
    """

    route: Route
    reason: str
    products: tuple[Product, ...] = ()


def calibrated(problem: Problem) -> RouteChoice:
    """The route for this problem on this machine, chosen by timing a few products of its sizes on
    both.

    The products are those of the two largest matrices with a batch of the lower data, forward (X
    Wᵀ) and backward (δᵀ X), for 128 rows and, where that takes milliseconds only, for more.
    Matrices are the leaves of ``x0``, and what the lower loss multiplies by (a frozen model below
    adapters). ``fast`` is chosen where it is faster for both and its largest error, against
    float64, is within four times the exact route's. Where no float32 product of 128 rows has half a
    million multiply-adds (a matrix of 64 × 64), and in float64, nothing is measured: exact.

    Cost: a value of the lower loss on a few rows, outside every count; 20 to 60 ms on a core, more
    where other processes want it. The numbers are of a :class:`Key` of their own.

    >>> small = Problem(
    ...     theta0={},
    ...     x0={"x": torch.ones(2, 2)},
    ...     g=lambda t, x, b: x["x"].sum(),
    ...     f=lambda t, x, b: x["x"].sum(),
    ... )
    >>> calibrated(small).route
    'exact'
    """
    if not (largest := _largest(problem)):
        return RouteChoice(
            route="exact", reason=f"no float32 product of a small batch has {LEAST:,} multiply-adds"
        )
    device = next(iter(problem.x0.values())).device
    if device.type not in ALLOWED:
        return RouteChoice(route="exact", reason=f"torch has one route on {device.type}")
    return choose(measured(largest, problem.lower_data.count(None), device))


class _Multiplied(TorchDispatchMode):
    """Collects the matrices ``[out, in]`` in float32 by which anything is multiplied inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            and args[-1].dtype == torch.float32
        ):
            self.shapes.add((args[-1].shape[1], args[-1].shape[0]))
        return func(*args, **(kwargs or {}))


def _inside(problem: Problem) -> set[tuple[int, int]]:
    """The matrices that the lower loss multiplies by; none where it cannot be evaluated, which
    the first step will say.
    """
    multiplied = _Multiplied()
    with contextlib.suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        batch, _ = problem.lower_data.sample(Key(0).fold("matrix-route", "rows"), ROWS)
        with multiplied:
            problem.g(problem.theta0, problem.x0, batch)
    return multiplied.shapes


def _largest(problem: Problem) -> list[tuple[int, int]]:
    """The shapes of the two largest matrices that are worth a choice; of a leaf with more axes,
    the first and the rest.
    """
    leaves = [
        leaf
        for leaf in problem.x0.values()
        if leaf.dtype == torch.float32 and leaf.dim() > 1 and leaf.numel()
    ]
    matrices = {(leaf.shape[0], leaf[0].numel()) for leaf in leaves} | (
        _inside(problem) if problem.x0 else set()
    )
    shapes = {(min(out, WIDEST), min(inner, WIDEST)) for out, inner in matrices}
    rows = problem.lower_data.count(BATCH)
    return sorted(
        (shape for shape in shapes if rows * shape[0] * shape[1] >= LEAST),
        key=lambda s: -s[0] * s[1],
    )[:2]


def measured(
    shapes: Iterable[tuple[int, int]], size: int, device: torch.device
) -> tuple[Product, ...]:
    """The products of matrices ``[out, in]`` with batches of data of ``size`` rows, timed on
    both routes in turn.
    """
    products = []
    for out, inner in shapes:
        small = min(size, BATCH)
        most = min(size, MOST[device.type] // (out * inner))
        # less than twice as many tell nothing else
        for rows in (small, most) if most >= 2 * small else (small,):
            generator = Key(0).fold("matrix-route", rows, out, inner).generator()
            x, w, delta = (
                torch.randn(*sizes, generator=generator).to(device)
                for sizes in ((rows, inner), (out, inner), (rows, out))
            )
            products += [_timed(rows, x, w.T), _timed(rows, delta.T, x)]
    return tuple(products)


def _timed(rows: int, a: Tensor, b: Tensor) -> Product:
    reference = a.double() @ b.double()
    wait = functools.partial(torch.cuda.synchronize, a.device) if a.is_cuda else lambda: None
    seconds: dict[str, list[float]] = {route: [] for route in ROUTES}
    errors: dict[str, float] = {}
    for _ in range(REPETITIONS + 1):
        for route in ROUTES:  # in turn, so that a machine that slows down slows both
            with matrix_route(route, a.device):
                wait()
                began = time.perf_counter()
                product = a @ b
                wait()
                seconds[route].append(time.perf_counter() - began)
            if route not in errors:
                errors[route] = float((product - reference).abs().max() / reference.abs().max())
    return Product(
        rows=rows,
        shape=(a.shape[0], a.shape[1], b.shape[1]),
        # The first sets libraries up. Not the median: where other processes want the cores, too,
        # that is the length of the scheduler's turns, whatever was computed.
        seconds={route: min(times[1:]) for route, times in seconds.items()},
        errors=errors,
    )


def choose(products: Iterable[Product]) -> RouteChoice:
    """``fast`` where it is faster for every size of batch and its largest error is within FACTOR
    of the exact route's.
    """
    products = tuple(products)

    def share(rows: int) -> float:
        exact, fast = (
            sum(product.seconds[route] for product in products if product.rows == rows)
            for route in ROUTES
        )
        return fast / exact

    slowest = max({product.rows for product in products}, key=share)
    exact, fast = (max(product.errors[route] for product in products) for route in ROUTES)
    speed = f"{share(slowest):.2g} times the exact route's time with {slowest:,} rows"
    error = f"largest error {fast:.1e} against {exact:.1e}"
    if share(slowest) > GAIN:
        return RouteChoice(route="exact", reason=f"the fast route takes {speed}", products=products)
    # not by the maximum, which passes over NaN
    if not all(product.errors["fast"] <= FACTOR * exact for product in products):
        return RouteChoice(
            route="exact",
            reason=f"the fast route's {error}, more than {FACTOR:g} times it",
            products=products,
        )
    return RouteChoice(route="fast", reason=f"{speed}, {error}", products=products)
