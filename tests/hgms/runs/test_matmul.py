"""The route of float32 matrix products: in force inside, gone outside, chosen by what was
measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from support.helpers import rejects
from torch import Tensor

from hgms.adapters import from_losses
from hgms.runs import Product, RouteChoice, calibrated, choose, matmul, matrix_route
from hgms_core import Data, Key, Problem, Tree

CPU = torch.device("cpu")
BACKENDS: dict[str, Any] = {
    "products on the CPU": torch.backends.mkldnn.matmul,
    "convolutions on the CPU": torch.backends.mkldnn.conv,
    "products on a GPU": torch.backends.cuda.matmul,
    "convolutions on a GPU": torch.backends.cudnn.conv,
    "all": torch.backends,
}


def settings() -> dict[str, Any]:
    """All that torch holds of the precision of products and convolutions; each setting flipped
    for those that follow others.
    """
    state = {name: backend.fp32_precision for name, backend in BACKENDS.items()}
    with torch.backends.flags(fp32_precision="tf32"):
        state |= {f"{name}, all TF32": backend.fp32_precision for name, backend in BACKENDS.items()}
    try:
        state["older"] = torch.get_float32_matmul_precision()
    except RuntimeError:
        state["older"] = "mixed"
    return state


def reset() -> None:
    """The settings of a fresh process."""
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul, torch.backends):
        backend.fp32_precision = "none"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    reset()  # an earlier test may have left other settings
    before = settings()
    yield
    reset()
    assert settings() == before


# --- routes


def test_a_route_is_in_force_inside() -> None:
    cpu, gpu = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = settings()
    with matrix_route("fast"):
        assert (torch.get_float32_matmul_precision(), cpu.fp32_precision) == ("medium", "bf16")
        with matrix_route("exact"):
            assert torch.get_float32_matmul_precision() == "highest"
            assert cpu.fp32_precision == "ieee"
        assert cpu.fp32_precision == "bf16"
    assert settings() == before
    with matrix_route("fast", "cuda:0"):
        # the older name agrees, so asking for it raises nothing
        assert (gpu.fp32_precision, gpu.allow_tf32) == ("tf32", True)
    with matrix_route("fast", "mps"):
        assert torch.get_float32_matmul_precision() == "highest"
    with rejects("unknown-choice", "route"), matrix_route("quick"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("high", {}),
        ("medium", {}),
        ("highest", {"products on the CPU": "ieee"}),
        ("high", {"products on the CPU": "bf16"}),
        ("highest", {"all": "tf32"}),
        ("highest", {"products on a GPU": "tf32"}),
    ],
)
def test_whatever_was_set_before_is_back_also_after_an_exception(
    older: str, newer: dict[str, str]
) -> None:
    torch.set_float32_matmul_precision(older)
    for name, precision in newer.items():
        BACKENDS[name].fp32_precision = precision
    before = settings()
    routes: Any = ("exact", "fast")
    for route in routes:
        with suppress(ZeroDivisionError), matrix_route(route):
            # which raises where settings contradict each other
            torch.get_float32_matmul_precision()
            raise ZeroDivisionError
        assert settings() == before


# --- the choice


def product(exact: float, fast: float, error: float = 2e-7, rows: int = 128) -> Product:
    """One of these seconds and this error of ``fast``; that of ``exact`` is 1e-7."""
    return Product(
        rows=rows,
        shape=(rows, 8, 8),
        seconds={"exact": exact, "fast": fast},
        errors={"exact": 1e-7, "fast": error},
    )


@pytest.mark.parametrize(
    ("products", "route"),
    [
        ([product(2.0, 1.0), product(2.0, 1.0, error=4e-7, rows=1000)], "fast"),
        *(
            ([product(2.0, 1.0), product(2.0, 1.0, error=error)], "exact")
            for error in (4.1e-7, float("nan"), float("inf"))
        ),
        *(([product(1.0, fast)], "exact") for fast in (2.0, 0.95)),
        # slower for small batches alone
        ([product(1.0, 2.0), product(100.0, 50.0, rows=5000)], "exact"),
        # of one batch the sum counts
        ([product(0.1, 0.2), product(10.0, 5.0)], "fast"),
    ],
)
def test_the_route_is_the_faster_one_that_is_accurate(products: list[Any], route: str) -> None:
    choice = choose(products)
    assert (choice.route, list(choice.products)) == (route, products)


def problem(*shapes: tuple[int, ...], rows: int = 5000, **like: Any) -> Problem:
    return from_losses(
        theta0={},
        x0={str(number): torch.zeros(shape, **like) for number, shape in enumerate(shapes)},
        g=lambda t, x, b: torch.zeros(()),
        f=lambda t, x, b: torch.zeros(()),
        lower_data=Data.of({"a": torch.zeros(rows, 1)}),
    )


def fails(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    raise RuntimeError("left to the first step")


def test_the_two_largest_matrices_are_measured_where_there_is_something_to_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def measured(shapes: Any, size: int, device: torch.device) -> tuple[Product, ...]:
        calls.append((list(shapes), size, device))
        return (product(2.0, 1.0),)

    monkeypatch.setattr(matmul, "measured", measured)
    for nothing in (
        problem((64, 64), rows=127),
        problem((63, 65)),
        problem((10**6,)),
        problem((300, 784), dtype=torch.float64),
        evolve(problem((4, 3)), g=fails),
    ):
        choice = calibrated(nothing)
        assert (choice.route, choice.products, calls) == ("exact", (), [])
    elsewhere = calibrated(problem((300, 784), device="meta"))
    assert elsewhere == RouteChoice(route="exact", reason="torch has one route on meta")
    several = problem((64, 64), (300, 784), (784,), (10, 300), (128, 64, 3, 3), rows=700)
    assert calibrated(several).route == "fast"
    calibrated(problem((5000, 4000), (3000, 2000)))
    assert calls[0] == ([(300, 784), (128, 576)], 700, CPU)
    assert calls[1][0] == [(1024, 1024)]  # a part of each, which is the same


def test_errors_are_those_of_float32_against_float64() -> None:
    forward, backward = matmul.measured([(300, 200)], 128, CPU)
    generator = Key(0).fold("matrix-route", 128, 300, 200).generator()
    x, w, delta = (
        torch.randn(*sizes, generator=generator) for sizes in ((128, 200), (300, 200), (128, 300))
    )
    routes: Any = ("exact", "fast")
    for timed, a, b in ((forward, x, w.T), (backward, delta.T, x)):
        right = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)
        for route in routes:
            with matrix_route(route):
                error = np.abs((a @ b).numpy() - right).max() / np.abs(right).max()
            assert timed.errors[route] == pytest.approx(error, rel=1e-6)
            assert timed.seconds[route] > 0
        assert 1e-9 < timed.errors["exact"] < 1e-5
