"""Losses on modules: what is no function of its arguments is refused with the way out, what is
frozen stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, KEY, assert_same, counted, network_problem, normal, rejects
from support.module_problems import pipeline, stepped
from torch import Tensor, nn
from torch.func import functional_call

from hgms.adapters import from_losses, hypergradient, trainable
from hgms.generators.branches import Branches
from hgms.hypergradients import Fixed, OneStep
from hgms.integrations.lower_solution import lower_solution
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import ConfigError, Problem, Tree

pytestmark = pytest.mark.plugins

ROWS = normal(12, 3)
TARGET = normal(12, seed=1)
ABOVE = normal(9, 3, seed=2)
SOLVER = CG(ridge=1.0, rtol=1e-10)


def network(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 1)).double()


def losses(
    module: nn.Module,
) -> tuple[Callable[[Tensor, Tree], Tensor], Callable[[Tensor, Tree], Tensor]]:
    def lower(theta: Tensor, x: Tree) -> Tensor:
        found = (functional_call(module, x, (ROWS,)).squeeze(1) - TARGET).square()
        decay = torch.stack([leaf.square().sum() for leaf in x.values()]).sum()
        return (theta.sigmoid() * found).mean() + 0.5 * decay

    def upper(theta: Tensor, x: Tree) -> Tensor:
        return (functional_call(module, x, (ABOVE,)).squeeze(1) - 1).square().mean()

    return upper, lower


def problem(module: nn.Module) -> Problem:
    upper, lower = losses(module)
    return from_losses(
        theta0={"t": torch.zeros(12, dtype=F64)},
        x0=trainable(module),
        g=lambda theta, x, _: lower(theta["t"], x),
        f=lambda theta, x, _: upper(theta["t"], x),
    )


def at(module: nn.Module, **options: Any) -> Any:
    theta = torch.zeros(12, dtype=F64)
    return hypergradient(*losses(module), theta, trainable(module), solver=SOLVER, **options)


def back_through(module: nn.Module) -> None:
    theta = torch.zeros(12, dtype=F64, requires_grad=True)
    x = lower_solution(losses(module)[1], theta, trainable(module), solver=SOLVER)
    x["0.bias"].sum().backward()


def first_step(module: nn.Module, **parts: Any) -> None:
    stepped(problem(module), pipeline(generator=Branches(count=1, steps=3), **parts), 1)


def stacked(module: nn.Module) -> None:
    made = problem(module)
    branches = Branches(count=2, steps=1, mode="stacked")
    branches.propose(made, made.theta0, branches.init(made, KEY), KEY)


@pytest.mark.parametrize(
    "use",
    [
        at,
        lambda module: at(module, strategy="jvp"),
        back_through,
        first_step,
        lambda module: first_step(module, hypergradient=OneStep()),
        stacked,
    ],
    ids=["vjp", "jvp", "lower_solution", "implicit", "one-step", "stacked"],
)
@pytest.mark.parametrize(
    ("layer", "code"),
    [(nn.Dropout, "random-loss"), (lambda: nn.BatchNorm1d(4), "loss-with-state")],
    ids=["dropout", "running statistics"],
)
def test_dropout_and_running_statistics_are_refused_wherever_a_loss_is_used(
    use: Any, layer: Any, code: str
) -> None:
    with rejects(code, "loss", of=ConfigError):
        use(network(layer()))


@pytest.mark.parametrize("strategy", ["vjp", "jvp"])
@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout().eval()],
    ids=["statistics at rest", "no statistics", "dropout at rest"],
)
def test_layers_at_rest_have_derivatives(layer: nn.Module, strategy: Any) -> None:
    module = network(layer)
    found = at(module, strategy=strategy).value
    assert_same(found, at(module, strategy="difference").value, rtol=1e-5, atol=1e-9)
    if isinstance(layer, nn.Dropout):
        assert_same(found, at(network(), strategy=strategy).value)


def test_a_pipeline_says_at_its_first_step_that_no_loss_uses_theta() -> None:
    plain = network_problem()
    deaf = evolve(
        plain,
        g=lambda theta, x, batch: plain.g(plain.theta0, x, batch),
        f=lambda theta, x, batch: plain.f(plain.theta0, x, batch),
    )
    with rejects("theta-unused", "theta0", of=ConfigError):
        stepped(deaf, pipeline(hypergradient=OneStep()), 1)
    stepped(deaf, pipeline(hypergradient=Fixed()), 1)  # learns nothing anyway
    made, seen = counted(plain)
    method = pipeline(generator=Branches(count=1, steps=3), selector=BestOfN(mode="loop"))
    _, record = method.step(made, method.init(made, 0))
    # no call more where h is not zero
    assert seen["f"] == record["cost_upper_values"] + record["cost_upper_gradients"]
