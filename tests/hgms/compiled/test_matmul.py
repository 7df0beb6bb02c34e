"""The route of float32 matrix products: in force inside, gone outside, chosen by what was
measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from support.helpers import rejects
from torch import Tensor

from hgms.compiled import Product, RouteChoice, calibrated, choose, matmul, matrix_route
from hgms_core import Data, Key, Problem, Tree

CPU = torch.device("cpu")


def settings() -> dict[str, Any]:
    """All that torch holds of the precision of products and convolutions; each setting flipped
    for those that follow others.
    """
    backends = {
        "products on the CPU": torch.backends.mkldnn.matmul,
        "convolutions on the CPU": torch.backends.mkldnn.conv,
        "products on a GPU": torch.backends.cuda.matmul,
        "convolutions on a GPU": torch.backends.cudnn.conv,
        "all": torch.backends,
    }
    state = {name: backend.fp32_precision for name, backend in backends.items()}
    with torch.backends.flags(fp32_precision="tf32"):
        state |= {f"{name}, all TF32": backend.fp32_precision for name, backend in backends.items()}
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


class TestRoute:
    def test_it_is_in_force_inside_and_gone_outside(self) -> None:
        before = settings()
        with matrix_route("fast"):
            assert torch.get_float32_matmul_precision() == "medium"
            assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
            with matrix_route("exact"):
                assert torch.get_float32_matmul_precision() == "highest"
                assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
            assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        assert settings() == before

    def test_on_a_gpu_it_is_tf32(self) -> None:
        with matrix_route("fast", "cuda:0"):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            # the older name agrees, so asking for it raises nothing
            assert torch.backends.cuda.matmul.allow_tf32
        with matrix_route("fast", "mps"):
            assert torch.get_float32_matmul_precision() == "highest"

    def test_an_exception_restores_it_too(self) -> None:
        before = settings()
        with pytest.raises(ZeroDivisionError), matrix_route("fast"):
            _ = 1 / 0
        assert settings() == before

    @pytest.mark.parametrize("route", ["exact", "fast"])
    @pytest.mark.parametrize(
        "before",
        [
            "older, high",
            "older, medium",
            "newer, bf16",
            "newer, ieee",
            "all, tf32",
            "older and newer",
            "gpu alone",
        ],
    )
    def test_whatever_was_set_before_is_back(self, before: str, route: Any) -> None:
        if before.startswith("older"):
            torch.set_float32_matmul_precision("medium" if before == "older, medium" else "high")
        if before.startswith("newer") or before == "older and newer":
            torch.backends.mkldnn.matmul.fp32_precision = (
                "ieee" if before == "newer, ieee" else "bf16"
            )  # type: ignore[attr-defined]
        if before == "all, tf32":
            torch.backends.fp32_precision = "tf32"
        if before == "gpu alone":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        state = settings()
        with matrix_route(route):
            # which raises where settings contradict each other
            torch.get_float32_matmul_precision()
        assert settings() == state

    def test_an_unknown_route_is_refused(self) -> None:
        route: Any = "quick"
        with rejects("unknown-choice", "route"), matrix_route(route):
            pass


def product(
    rows: int = 128, *, seconds: tuple[float, float], errors: tuple[float, float] = (1e-7, 2e-7)
) -> Product:
    routes = ("exact", "fast")
    return Product(
        rows=rows,
        shape=(rows, 8, 8),
        seconds=dict(zip(routes, seconds, strict=True)),
        errors=dict(zip(routes, errors, strict=True)),
    )


class TestChoice:
    def test_fast_and_accurate(self) -> None:
        choice = choose(
            [product(seconds=(2.0, 1.0)), product(1000, seconds=(2.0, 1.0), errors=(1e-7, 4e-7))]
        )
        assert choice.route == "fast"
        assert "0.5 times the exact route's time with 128 rows" in choice.reason
        assert "4.0e-07 against 1.0e-07" in choice.reason
        assert len(choice.products) == 2

    @pytest.mark.parametrize("error", [4.1e-7, 1e-3, float("nan"), float("inf")])
    def test_fast_and_inaccurate(self, error: float) -> None:
        choice = choose(
            [product(seconds=(2.0, 1.0)), product(seconds=(2.0, 1.0), errors=(1e-7, error))]
        )
        assert choice.route == "exact"
        assert "more than 4 times it" in choice.reason

    @pytest.mark.parametrize("fast", [2.0, 1.95, 0.95])
    def test_slower_or_hardly_faster(self, fast: float) -> None:
        assert choose([product(seconds=(1.0, fast))]).route == "exact"

    def test_slower_for_small_batches_alone(self) -> None:
        choice = choose([product(seconds=(1.0, 2.0)), product(5000, seconds=(100.0, 50.0))])
        assert (
            choice.route,
            "takes 2 times the exact route's time with 128 rows" in choice.reason,
        ) == ("exact", True)

    def test_of_one_batch_the_sum_counts(self) -> None:
        assert choose([product(seconds=(0.1, 0.2)), product(seconds=(10.0, 5.0))]).route == "fast"


def problem(
    *shapes: tuple[int, ...], rows: int = 5000, dtype: torch.dtype = torch.float32
) -> Problem:
    x0 = {str(number): torch.zeros(shape, dtype=dtype) for number, shape in enumerate(shapes)}
    data = Data.of({"a": torch.zeros(rows, 1)})
    return Problem(
        theta0={},
        x0=x0,
        g=lambda t, x, b: torch.zeros(()),
        f=lambda t, x, b: torch.zeros(()),
        lower_data=data,
    )


class TestCalibration:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        calls: list[Any] = []

        def measured(shapes: Any, size: int, device: torch.device) -> tuple[Product, ...]:
            calls.append((list(shapes), size, device))
            return (product(seconds=(2.0, 1.0)),)

        monkeypatch.setattr(matmul, "measured", measured)
        return calls

    @pytest.mark.parametrize(
        "nothing",
        [
            problem((64, 64), rows=127),
            problem((63, 65)),
            problem((10**6,)),
            problem((300, 784), dtype=torch.float64),
        ],
    )
    def test_where_nothing_is_to_be_gained_nothing_is_measured(
        self, nothing: Problem, asked: list[Any]
    ) -> None:
        choice = calibrated(nothing)
        assert (choice.route, choice.products, asked) == ("exact", (), [])
        assert "524,288" in choice.reason

    def test_the_two_largest_matrices_are_measured(self, asked: list[Any]) -> None:
        choice = calibrated(
            problem((64, 64), (300, 784), (784,), (10, 300), (128, 64, 3, 3), rows=700)
        )
        assert asked == [([(300, 784), (128, 576)], 700, CPU)]
        assert choice.route == "fast"
        calibrated(problem((5000, 4000), (3000, 2000)))
        assert asked[1][0] == [(1024, 1024)]  # a part of each, which is the same

    def test_shapes_are_those_of_a_layer_and_bounded(self) -> None:
        products = matmul.measured([(40, 30)], 300, CPU)
        assert [(p.rows, p.shape) for p in products] == [
            (128, (128, 30, 40)),
            (128, (40, 128, 30)),
            (300, (300, 30, 40)),
            (300, (40, 300, 30)),
        ]
        assert [p.rows for p in matmul.measured([(4, 3)], 50, CPU)] == [50, 50]
        # more would take too long
        assert [p.rows for p in matmul.measured([(300, 784)], 10**6, CPU)] == [128, 128]
        assert [p.rows for p in matmul.measured([(64, 128)], 10**6, CPU)] == [128, 128, 2048, 2048]

    def test_errors_are_those_of_float32_against_float64(self) -> None:
        forward, backward = matmul.measured([(300, 200)], 128, CPU)
        generator = Key(0).fold("matrix-route", 128, 300, 200).generator()
        x, w, delta = (
            torch.randn(*sizes, generator=generator)
            for sizes in ((128, 200), (300, 200), (128, 300))
        )
        for timed, a, b in ((forward, x, w.T), (backward, delta.T, x)):
            right = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)
            for route in ("exact", "fast"):
                with matrix_route(route):  # type: ignore[arg-type]
                    error = np.abs((a @ b).numpy() - right).max() / np.abs(right).max()
                assert timed.errors[route] == pytest.approx(error, rel=1e-6)
                assert timed.seconds[route] > 0
            assert 1e-9 < timed.errors["exact"] < 1e-5

    def test_no_global_state_moves(self) -> None:
        before = settings()
        generator = torch.get_rng_state()
        calibrated(problem((64, 128)))
        assert settings() == before
        assert torch.equal(torch.get_rng_state(), generator)

    def test_other_devices_have_one_route(self) -> None:
        choice = calibrated(
            Problem(
                theta0={},
                x0={"w": torch.zeros(300, 784, device="meta")},
                g=lambda t, x, b: torch.zeros(()),
                f=lambda t, x, b: torch.zeros(()),
                lower_data=Data.of({"a": torch.zeros(500, 1)}),
            )
        )
        assert choice == RouteChoice(route="exact", reason="torch has one route on meta")

    def test_a_frozen_matrix_inside_the_loss_counts(self) -> None:
        frozen = torch.randn(300, 784, generator=torch.Generator().manual_seed(0))

        def adapted(theta: Tree, x: Tree, batch: Tree) -> Tensor:
            return (batch["a"] @ frozen.T + x["bias"]).square().mean()

        data = Data.of({"a": torch.ones(500, 784)})
        small = Problem(
            theta0={}, x0={"bias": torch.zeros(300)}, g=adapted, f=adapted, lower_data=data
        )
        shapes = {product.shape for product in calibrated(small).products if product.rows == 128}
        assert shapes == {(128, 784, 300), (300, 128, 784)}
        double = attrs.evolve(small, g=lambda t, x, b: (b["a"].double() @ frozen.double().T).sum())
        assert calibrated(double).products == ()

    def test_a_loss_that_cannot_be_evaluated_is_left_to_the_first_step(self) -> None:
        def fails(theta: Tree, x: Tree, batch: Tree) -> Tensor:
            raise RuntimeError("not here")

        assert calibrated(attrs.evolve(problem((4, 3)), g=fails)).route == "exact"
