"""Select the route of a problem's float32 matrix products by measurements on this machine."""

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

from hgms.runs.route import ALLOWED, ROUTES, Route, matrix_route
from hgms_core import Key, Problem

BATCH = 128
"""Rows of a small batch. A route that is faster only on the full data does not help runs with small
batches.
"""

LEAST = 2**19
"""Multiply-adds of a product of BATCH rows below which no gain is possible, because the call to
another library takes longer.
"""

MOST = {"cpu": 2**24, "cuda": 2**32}
"""Multiply-adds of the largest timed product of more than BATCH rows: half a millisecond on a core,
or on a GPU.
"""

WIDEST = 1024
"""Maximum rows and columns of a timed matrix; of a larger matrix, only a part is timed."""

ROWS = 4
"""Rows on which the lower loss is evaluated to find the matrices in its products."""

REPETITIONS = 5
GAIN = 0.9
"""Maximum time of ``fast``, as a share of the exact route's time; smaller differences are noise."""

FACTOR = 4.0
"""Maximum ratio between the largest errors of ``fast`` and of the exact route."""


@frozen(kw_only=True)
class Product:
    """A timed product: ``[m, k]`` by ``[k, n]`` for ``shape = (m, k, n)``, with a batch of ``rows``
    rows.

    By route: ``seconds`` of the fastest repetition, and the largest of the ``errors`` against
    float64, relative to the product's largest entry.
    """

    rows: int
    shape: tuple[int, int, int]
    seconds: Mapping[str, float]
    errors: Mapping[str, float]


@frozen(kw_only=True)
class RouteChoice:
    """The selected ``route``, the ``reason`` as text, and the measured products.

    The list of products is empty if no gain was possible.
    """

    route: Route
    reason: str
    products: tuple[Product, ...] = ()


def calibrated(problem: Problem) -> RouteChoice:
    """Select the route for this problem on this machine by timing a few products on both routes.

    The products are those of the two largest matrices with a batch of the lower data, forward (X
    Wᵀ) and backward (δᵀ X). They have 128 rows, and more rows if that takes only milliseconds.
    Matrices are the leaves of ``x0`` and the other matrices in products of the lower loss (a frozen
    model below adapters).

    ``fast`` is selected if it is faster for both batch sizes and its largest error, against
    float64, is within four times the exact route's. The route is exact, without a measurement, in
    float64 and if no float32 product of 128 rows has half a million multiply-adds (a matrix of 64 ×
    64).

    Notes
    -----
    Cost: a value of the lower loss on a few rows, excluded from every count; 20 to 60 ms on a core,
    more if other processes use it. The numbers are drawn with a separate :class:`Key`.

    Examples
    --------
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
    """Collect the float32 matrices ``[out, in]`` of all products inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, int]] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not import torch's compiler for this class."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            and args[-1].dtype == torch.float32
        ):
            self.shapes.add((args[-1].shape[1], args[-1].shape[0]))
        return func(*args, **(kwargs or {}))


def _inside(problem: Problem) -> set[tuple[int, int]]:
    """Return the matrices in products of the lower loss.

    The list is empty if the loss cannot be evaluated; the first step then reports the error.
    """
    multiplied = _Multiplied()
    with contextlib.suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        batch, _ = problem.lower_data.sample(Key(0).fold("matrix-route", "rows"), ROWS)
        with multiplied:
            problem.g(problem.theta0, problem.x0, batch)
    return multiplied.shapes


def _largest(problem: Problem) -> list[tuple[int, int]]:
    """Return the shapes of the two largest matrices that are large enough for a measurement.

    A leaf with more than two axes counts as a matrix: its first axis, and all others combined.
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
    """Time the products of matrices ``[out, in]`` with batches of data of ``size`` rows.

    The two routes alternate.
    """
    products = []
    for out, inner in shapes:
        small = min(size, BATCH)
        most = min(size, MOST[device.type] // (out * inner))
        # A batch less than twice as large gives no further information.
        for rows in (small, most) if most >= 2 * small else (small,):
            generator = Key(0).fold("matrix-route", rows, out, inner).generator()
            x, w, delta = (
                torch.randn(*sizes, generator=generator).to(device)
                for sizes in ((rows, inner), (out, inner), (rows, out))
            )
            products += [_time_products(rows, x, w.T), _time_products(rows, delta.T, x)]
    return tuple(products)


def _time_products(rows: int, a: Tensor, b: Tensor) -> Product:
    reference = a.double() @ b.double()
    wait = functools.partial(torch.cuda.synchronize, a.device) if a.is_cuda else lambda: None
    seconds: dict[str, list[float]] = {route: [] for route in ROUTES}
    errors: dict[str, float] = {}
    for _ in range(REPETITIONS + 1):
        for route in ROUTES:  # the routes alternate, so a slow phase of the machine affects both
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
        # The first repetition initializes libraries. The median is not suitable: if other processes
        # use the cores, it is the length of the scheduler's time slices.
        seconds={route: min(times[1:]) for route, times in seconds.items()},
        errors=errors,
    )


def choose(products: Iterable[Product]) -> RouteChoice:
    """Select ``fast`` if it is faster for every batch size and its largest error is within FACTOR
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
    # max() is not suitable here because it ignores NaN.
    if not all(product.errors["fast"] <= FACTOR * exact for product in products):
        return RouteChoice(
            route="exact",
            reason=f"the fast route's {error}, more than {FACTOR:g} times it",
            products=products,
        )
    return RouteChoice(route="fast", reason=f"{speed}, {error}", products=products)
