"""The fast route of matrix products on the device: chosen by what is measured there, in force in
a run, and gone after it.
"""

from __future__ import annotations

import pytest
import torch

from hgms.compiled import calibrated, matrix_route
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.outer import Adam
from hgms.runs import RunSettings, run
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import Budget, Data, Pipeline, Problem, Tree

pytestmark = pytest.mark.nightly


def least_squares(device: torch.device) -> Problem:
    """A linear layer of 256 × 256 fitted to 512 rows: products that are worth a choice."""
    generator = torch.Generator().manual_seed(0)
    a, b, w = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((512, 256), (512, 256), (256, 256))
    )
    rows = Data.of({"a": a, "b": b})

    def loss(theta: Tree, x: Tree, batch: Tree) -> torch.Tensor:
        fit = (batch["a"] @ x["w"].T - batch["b"]).square().mean()
        return fit + torch.exp(theta["t"]) * x["w"].square().mean()

    roles = dict.fromkeys(("differentiate", "select", "stop"), rows)
    theta0 = {"t": torch.zeros((), device=device)}
    return Problem(theta0=theta0, x0={"w": w}, g=loss, f=loss, lower_data=rows, upper_data=roles)


@pytest.mark.usefixtures("real")
def test_what_is_measured_is_of_this_device(device: torch.device) -> None:
    choice = calibrated(least_squares(device))
    assert choice.products
    for product in choice.products:
        assert product.errors["exact"] < 1e-5
        assert min(product.seconds.values()) > 0
    accurate = max(p.errors["fast"] for p in choice.products) <= 4 * max(
        p.errors["exact"] for p in choice.products
    )
    assert choice.route == "exact" or accurate


def test_fast_differs_from_exact_by_rounding_alone(device: torch.device) -> None:
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).to(device)
    right = a.double() @ a.double()
    for route, error in (("exact", 1e-5), ("fast", 1e-2)):
        with matrix_route(route, device):  # type: ignore[arg-type]
            assert float(((a @ a) - right).abs().max() / right.abs().max()) < error


def test_a_run_takes_it_and_leaves_nothing_behind(device: torch.device) -> None:
    before = torch.get_float32_matmul_precision()
    method = Pipeline(
        generator=Branches(count=2, steps=2, lr=0.05),
        selector=BestOfN(),
        hypergradient=Implicit(solver=CG(max_steps=3)),
        outer=Adam(lr=0.1),
    )
    result = run(
        method, least_squares(device), Budget(outer_steps=2), settings=RunSettings(matmul="fast")
    )
    assert result.execution is not None
    assert result.execution.matmul.route == "fast"
    assert torch.get_float32_matmul_precision() == before
