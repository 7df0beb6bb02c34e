"""Six people's scripts, from a module of their own to a comparison: short, without files, and
right.

What a script computes is checked against a closed form or a loop written by hand on the module
itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import F64, normal
from torch import Tensor, nn
from torch.func import functional_call

from hgms.adapters import hypergradient
from hgms.generators.branches import Branches
from hgms.hypergradients import Unrolled
from hgms.optim import SGD
from hgms.solvers import CG
from hgms_core import Key, Problem, Tree

SCRIPTS = sorted(
    (Path(__file__).resolve().parents[2] / "docs" / "examples" / "newcomers").glob("*.py")
)
METHODS = {
    "cnn_with_batchnorm": ["hg-ms", "even"],
    "compiled_model": ["hg-implicit", "hg-baseline", "uniform"],
    "frozen_backbone": ["implicit", "as-it-is"],
    "mlp_with_dropout": ["hg-ms", "uniform"],
    "sklearn_pipeline": ["hg-implicit", "uniform"],
    "tied_transformer": ["hg-implicit", "uniform"],
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a script leaves, run once, in float64 where it does not say otherwise, in a folder
    that has to stay empty.
    """

    @functools.cache
    def run(name: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(name)
        dtype = torch.float32 if name == "cnn_with_batchnorm" else F64
        with contextlib.chdir(folder), torch.random.fork_rng(), default_dtype(dtype):
            torch.manual_seed(0)
            made = runpy.run_path(str(next(path for path in SCRIPTS if path.stem == name)))
        assert not list(folder.iterdir())
        return made

    return run


def assert_compared(name: str, made: dict[str, Any]) -> None:
    comparison = made["comparison"]
    assert comparison.complete
    (table,) = comparison.tables
    assert {*METHODS[name]} <= {row.method for row in table.rows}


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in METHODS if name != "sklearn_pipeline"])
def test_the_script_ends_with_a_table_of_its_methods(name: str, script: Any) -> None:
    assert_compared(name, script(name))


def steps_by_hand(
    model: nn.Module, loss: Any, theta: Tensor, batches: list[Tree], lr: float
) -> dict[str, Tensor]:
    """Plain gradient descent on a copy of the module with weighted rows, as one would write it.
    The parameters after it.
    """
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        (theta.sigmoid()[batch["index"]] * loss(model, batch)).mean().backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in model.named_parameters()}


def after(p: Problem, branches: Branches, theta: Tree) -> Any:
    """One branch of some steps from the module's own parameters."""
    start = {name: leaf[None] for name, leaf in p.x0.items()}
    state = branches.init(p, Key(0))
    return branches.propose(p, theta, {**state, "x": start}, Key(1)).branch(torch.tensor(0))


def assert_slope(p: Problem, branches: Branches, value: Callable[[Tree], Tensor]) -> None:
    """The hypergradient through the branch is the central difference of ``value`` in a drawn
    direction.
    """
    theta = {"theta": 0.3 * normal(*p.theta0["theta"].shape, seed=3)}
    estimate, _ = Unrolled().estimate(
        p, theta, *after(p, branches, theta).as_candidates(), Key(2), None
    )
    # no kink of a ReLU is that near
    direction = normal(*theta["theta"].shape, seed=4)
    step = 1e-6
    above, below = (
        float(value({"theta": theta["theta"] + sign * step * direction})) for sign in (1.0, -1.0)
    )
    slope = float((estimate.value["theta"] * direction).sum())
    assert abs(slope) > 1e-6
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "lr"), [("tied_transformer", 0.3), ("compiled_model", 0.1)])
def test_a_branch_has_the_slope_of_a_run_by_hand(name: str, lr: float, script: Any) -> None:
    made = script(name)
    p, model = made["problem"], made["model"]
    inner = copy.deepcopy(getattr(model, "_orig_mod", model))
    start = {name.removeprefix("_orig_mod."): leaf for name, leaf in p.x0.items()}
    inner.load_state_dict(start, strict=False)
    batches = [p.lower_data.batch(None)] * 3
    rows = p.upper_data["differentiate"].batch(None)

    def by_hand(theta: Tree) -> Tensor:
        end = steps_by_hand(inner, made["loss"], theta["theta"], batches, lr=lr)
        return made["loss"](lambda a: functional_call(inner, end, (a,)), rows).mean().detach()

    assert_slope(p, Branches(count=1, steps=3, optimizer=SGD(lr=lr)), by_hand)


def solved(p: Problem, theta: Tensor, x: Tree, **options: Any) -> Any:
    """The hypergradient on all rows, at an x that solves the lower problem."""
    below, above = p.lower_data.batch(None), p.upper_data["differentiate"].batch(None)
    return hypergradient(
        lambda t, x: p.f(t, x, above),
        lambda t, x: p.g(t, x, below),
        {"theta": theta.detach()},
        x,
        solver=CG(**options),
    )


@pytest.mark.extended
def test_frozen_backbone_has_the_hypergradient_in_closed_form(script: Any) -> None:
    made = script("frozen_backbone")
    model, p, (train, validation, _) = made["model"], made["problem"], made["rows"]
    features = [
        torch.cat([model[0](part["a"]), torch.ones(30, 1, dtype=F64)], dim=1).detach()
        for part in (train, validation)
    ]
    theta = torch.tensor(-1.0, dtype=F64, requires_grad=True)
    penalty = theta.exp() * torch.diag(torch.tensor([1.0] * 12 + [0.0], dtype=F64))
    best = torch.linalg.solve(
        features[0].T @ features[0] / 30 + penalty, features[0].T @ train["y"] / 30
    )
    upper = (features[1] @ best - validation["y"]).square().mean()
    (want,) = torch.autograd.grad(upper, theta)
    x = {"1.weight": best[None, :12].detach(), "1.bias": best[12:].detach()}
    assert sorted(x) == sorted(p.x0)
    h = solved(p, theta, x, rtol=1e-12)
    assert float(h.value["theta"]) == pytest.approx(float(want), rel=1e-9)


def test_sklearn_pipeline_has_the_hypergradient_in_closed_form_and_a_table(script: Any) -> None:
    made = script("sklearn_pipeline")
    assert_compared("sklearn_pipeline", made)
    X, y = (torch.as_tensor(made[name][:300]) for name in "Xy")
    theta = (0.2 * normal(65) - 2).requires_grad_()
    best = torch.linalg.solve(
        X[:150].T @ X[:150] / 150 + torch.diag(theta.exp()), X[:150].T @ y[:150] / 150
    )
    (want,) = torch.autograd.grad((X[150:] @ best - y[150:]).square().mean(), theta)
    h = solved(made["problem"], theta, {"x": best.detach()}, rtol=1e-13, max_steps=500)
    torch.testing.assert_close(h.value["theta"], want, rtol=1e-7, atol=1e-9)
