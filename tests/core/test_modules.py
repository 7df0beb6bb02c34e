"""Losses on modules: what is no function of its arguments is refused with the way out, what is
frozen stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.helpers import F64, KEY, assert_same, counted, network_problem, normal, rejects
from torch import Tensor, nn
from torch.func import functional_call

from hgms.generators.branches import Branches
from hgms.hypergradients import Fixed, Implicit, OneStep, Unrolled
from hgms.integrations.lower_solution import lower_solution
from hgms.outer import Sgd
from hgms.selectors import BestOfN, First
from hgms.solvers import CG
from hgms_core import (
    ConfigError,
    Data,
    Pipeline,
    Problem,
    Tree,
    groups,
    hypergradient,
    trainable,
    values,
)

pytestmark = pytest.mark.plugins

ROWS = normal(12, 3)
TARGET = normal(12, seed=1)
ABOVE = normal(9, 3, seed=2)


def network(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 1)).double()


def losses(
    module: nn.Module,
) -> tuple[Callable[[Tensor, Tree], Tensor], Callable[[Tensor, Tree], Tensor]]:
    def lower(theta: Tensor, x: Tree) -> Tensor:
        found = (functional_call(module, x, (ROWS,)).squeeze(1) - TARGET).square()
        return (theta.sigmoid() * found).mean() + 0.5 * torch.stack(
            [leaf.square().sum() for leaf in x.values()]
        ).sum()

    def upper(theta: Tensor, x: Tree) -> Tensor:
        return (functional_call(module, x, (ABOVE,)).squeeze(1) - 1).square().mean()

    return upper, lower


def problem(module: nn.Module) -> Problem:
    upper, lower = losses(module)
    return Problem(
        theta0={"t": torch.zeros(12, dtype=F64)},
        x0=trainable(module),
        g=lambda theta, x, _: lower(theta["t"], x),
        f=lambda theta, x, _: upper(theta["t"], x),
    )


def at(module: nn.Module, **options: Any) -> Any:
    return hypergradient(
        *losses(module),
        torch.zeros(12, dtype=F64),
        trainable(module),
        solver=CG(ridge=1.0, rtol=1e-10),
        **options,
    )


def first_step(problem: Problem, **parts: Any) -> Any:
    defaults: dict[str, Any] = {
        "generator": Branches(count=1, steps=3),
        "selector": First(),
        "hypergradient": Implicit(solver=CG(ridge=1.0)),
        "outer": Sgd(),
    }
    method = Pipeline(**{**defaults, **parts})
    return method.step(problem, method.init(problem, 0))


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
def test_dropout_in_training_mode_is_refused_and_in_evaluation_mode_gone(strategy: Any) -> None:
    module = network(nn.Dropout())
    with rejects("random-loss", "loss", of=ConfigError):
        at(module, strategy=strategy)
    assert_same(at(module.eval(), strategy=strategy).value, at(network(), strategy=strategy).value)


def test_a_lower_solution_refuses_dropout_on_the_way_back() -> None:
    for middle, code in ((nn.Dropout(), "random-loss"), (nn.BatchNorm1d(4), "loss-with-state")):
        module = network(middle)
        _, lower = losses(module)
        theta = torch.zeros(12, dtype=F64, requires_grad=True)
        x = lower_solution(lower, theta, trainable(module), solver=CG(ridge=1.0))
        with rejects(code, "loss", of=ConfigError):
            x["0.bias"].sum().backward()


@pytest.mark.parametrize(
    "hypergradient",
    [Implicit(solver=CG(ridge=1.0)), OneStep(), Unrolled()],
    ids=lambda each: each.name,
)
def test_the_first_step_of_a_pipeline_refuses_dropout(hypergradient: Any) -> None:
    with rejects("random-loss", "loss", of=ConfigError):
        first_step(problem(network(nn.Dropout())), hypergradient=hypergradient)


def test_stacked_candidates_refuse_dropout_and_running_statistics() -> None:
    branches = Branches(count=2, steps=1, mode="stacked")
    for middle, code in ((nn.Dropout(), "random-loss"), (nn.BatchNorm1d(4), "loss-with-state")):
        made = problem(network(middle))
        with rejects(code, "loss", of=ConfigError):
            branches.propose(made, made.theta0, branches.init(made, KEY), KEY)


@pytest.mark.parametrize("strategy", ["vjp", "jvp"])
def test_batch_normalisation_is_refused_where_it_learns_its_statistics(strategy: Any) -> None:
    with rejects("loss-with-state", "loss", of=ConfigError):
        at(network(nn.BatchNorm1d(4)), strategy=strategy)
    still = network(nn.BatchNorm1d(4)).eval()
    assert_same(
        at(still, strategy=strategy).value,
        at(still, strategy="difference").value,
        rtol=1e-5,
        atol=1e-9,
    )
    without = network(nn.BatchNorm1d(4, track_running_stats=False))
    assert_same(
        at(without, strategy=strategy).value,
        at(without, strategy="difference").value,
        rtol=1e-5,
        atol=1e-9,
    )


@pytest.mark.nightly
def test_a_compiled_module_has_the_second_derivatives_of_the_eager_one() -> None:
    compiled: Any = torch.compile(network(), backend="aot_eager")
    assert_same(at(compiled, strategy="vjp").value, at(network(), strategy="vjp").value)


@pytest.mark.parametrize("strategy", ["vjp", "jvp"])
def test_a_kernel_with_a_wrong_second_derivative_is_told_the_strategy_that_works(
    strategy: Any,
) -> None:
    """Two backward passes through torch's fused weight_norm are wrong by 1 %."""
    module = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 1)
    ).double()
    with rejects("no-second-derivative", "hypergradient", "strategy", of=ConfigError):
        at(module, strategy=strategy)
    assert at(module, strategy="difference").outcome.label == "converged"


class FirstOrderSquare(torch.autograd.Function):
    """x², as a fused kernel has it: torch takes its second derivative for zero."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square().sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
def test_a_function_that_is_differentiable_once_is_no_zero_hessian(strategy: Any) -> None:
    t = torch.tensor([3.0, -1.0], dtype=F64)

    def f(theta: Tensor, x: Tensor) -> Tensor:
        return (x - 1).square().sum()

    def g(theta: Tensor, x: Tensor) -> Tensor:
        return FirstOrderSquare.apply(x - theta) + 0.5 * x.square().sum()

    def solve() -> Tensor:
        return hypergradient(f, g, t, 2 / 3 * t, solver=CG(), strategy=strategy).value

    if strategy == "difference":
        torch.testing.assert_close(solve(), 4 / 3 * (2 / 3 * t - 1), rtol=1e-6, atol=0)
    else:
        with rejects("no-second-derivative", "hypergradient", "strategy", of=ConfigError):
            solve()


def test_frozen_parameters_and_buffers_are_no_lower_variables_and_tied_weights_come_once() -> None:
    module = network(nn.BatchNorm1d(4))
    module[0].requires_grad_(False)
    module.append(nn.Linear(1, 1))
    module[-1].weight = module[1].bias  # tied
    x = trainable(module)
    assert sorted(x) == ["1.bias", "1.weight", "3.bias", "3.weight", "4.bias"]
    assert not any(leaf.requires_grad for leaf in x.values())
    before = module[3].weight.detach().clone()
    x["3.weight"].add_(1.0)
    assert_same(module[3].weight.detach(), before)


def test_a_state_dict_with_counters_is_refused_where_it_comes_in() -> None:
    module = network(nn.BatchNorm1d(4))
    with rejects("wrong-dtype", "x", "1.num_batches_tracked", of=ConfigError):
        hypergradient(*losses(module), torch.zeros(12), module.state_dict(), solver=CG())
    with rejects("wrong-dtype", "x0", "1.num_batches_tracked", of=ConfigError):
        Problem(
            theta0={}, x0=module.state_dict(), g=lambda t, x, b: x["a"], f=lambda t, x, b: x["a"]
        )


@pytest.mark.parametrize(
    ("table", "code", "place"),
    [
        ({"a": torch.zeros(40), "y": torch.zeros(30)}, "wrong-length", ()),
        ({}, "no-rows", ()),
        ({"a": torch.zeros(())}, "wrong-column", ("a",)),
    ],
)
def test_columns_that_are_no_table_are_refused(
    table: Any, code: str, place: tuple[str, ...]
) -> None:
    with rejects(code, *place, of=ConfigError):
        Data.of(table)


def test_losses_without_theta_are_refused_and_a_zero_hypergradient_is_not() -> None:
    theta = torch.ones(2, dtype=F64)
    x = normal(3)
    with rejects("theta-unused", "theta", of=ConfigError):
        hypergradient(lambda t, p: p.sum(), lambda t, p: p.square().sum(), theta, x, solver=CG())
    with rejects("theta-unused", "theta", of=ConfigError):  # a copy is another tensor
        hypergradient(
            lambda t, p: p.sum(),
            lambda t, p: (p * t.detach().sum()).square().sum(),
            theta,
            x,
            solver=CG(),
        )
    found = hypergradient(
        lambda t, p: p.sum(),
        lambda t, p: (p**2).sum() + (t - 1).square().sum(),
        theta,
        x,
        solver=CG(),
    )
    assert_same(found.value, torch.zeros(2, dtype=F64))
    half = hypergradient(
        lambda t, p: (p["a"] * t["used"]).sum(),
        lambda t, p: p["a"].square().sum(),
        {"used": theta[:1], "unused": theta},
        {"a": x},
        solver=CG(),
    )
    assert_same(half.value["unused"], torch.zeros(2, dtype=F64))


def test_a_pipeline_says_at_its_first_step_that_no_loss_uses_theta() -> None:
    plain = network_problem()
    empty = {name: leaf.detach() for name, leaf in plain.theta0.items()}
    deaf = Problem(
        theta0=plain.theta0,
        x0=plain.x0,
        g=lambda theta, x, batch: plain.g(empty, x, batch),
        f=lambda theta, x, batch: plain.f(empty, x, batch),
        lower_data=plain.lower_data,
        upper_data=plain.upper_data,
    )
    for estimator in (Implicit(solver=CG(ridge=1.0)), OneStep(), Unrolled()):
        with rejects("theta-unused", "theta0", of=ConfigError) as caught:
            first_step(deaf, hypergradient=estimator)
        assert "(weights, scale)" in caught.value.message
    first_step(deaf, hypergradient=Fixed())  # which learns nothing anyway
    seen_problem, seen = counted(plain)
    _, record = first_step(seen_problem)
    assert seen["f"] == record["cost_upper_gradients"]  # no call more where h is not zero


def test_misspelt_modes_and_strategies_are_refused() -> None:
    square: Any = lambda t, x, b: x["x"].square().sum()  # noqa: E731
    mode: Any = "stakced"
    for call in (
        lambda: groups(square, {"x": torch.zeros(2, 1)}, mode=mode),
        lambda: values(square, {}, {"x": torch.zeros(2, 1)}, {}, mode=mode),
    ):
        with rejects("unknown-choice", "mode", of=ConfigError) as caught:
            call()
        assert caught.value.did_you_mean == ("stacked",)
    with rejects("unknown-choice", "mode", of=ConfigError) as caught:
        BestOfN(mode="looop")  # type: ignore[arg-type]
    assert caught.value.did_you_mean == ("loop",)
