"""The penalty methods: by hand, against plain autograd, to the closed form, on a manifold of
minima, counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from scipy.optimize import minimize_scalar
from support.helpers import F64, assert_same, counted, network_problem, normal, rejects

from hgms.generators.branches import Branches
from hgms.generators.penalty import (
    DynamicBarrier,
    FullyFirstOrder,
    GradientNorm,
    Minimax,
    MoreauEnvelope,
    ValueFree,
    ValueGap,
)
from hgms.generators.penalty.minimax import SCALEBIO
from hgms.hypergradients import Carried, Implicit, Unrolled
from hgms.outer import AdamW, Sgd
from hgms.runs import pack, unpack
from hgms.selectors import BestOfN, First
from hgms.solvers import Identity
from hgms.tasks.quadratic import Quadratic
from hgms.tasks.sphere import Sphere
from hgms_core import Data, Key, Pipeline, Problem, Tree

CPU = torch.device("cpu")


def method(generator: Any, outer: Any = None, **parts: Any) -> Pipeline:
    given = {
        "selector": First(),
        "hypergradient": Carried(),
        "outer": outer or Sgd(lr=0.1),
        **parts,
    }
    return Pipeline(generator=generator, **given)


def advance(
    pipeline: Pipeline, problem: Problem, steps: int, state: Any = None, seed: int = 0
) -> tuple[Any, Any]:
    state = state or pipeline.init(problem, seed)
    record = {}
    for _ in range(steps):
        state, record = pipeline.step(problem, state)
    return state, record


# By hand: g = (x − t)², f = (x − 3)² + t at t = 1, x = 0, so ∇_x g = −2, ∇_t g = 2, ∇_x f = −6, ∇_t
# f = 1, f = 10, g = 1.
SCALAR = Problem(
    theta0={"t": torch.ones(1, dtype=F64)},
    x0={"x": torch.zeros(1, dtype=F64)},
    g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    f=lambda t, x, _: ((x["x"] - 3) ** 2 + t["t"]).sum(),
)
HAND = {
    # ω = 0 + 0.25·2 = 0.5, c = 1/4.   ∇_y L = (−6 + 4·(−2))/4 = −3.5.   ∇_t L = (1 + 4·(2 −
    # 2·0.5))/4 = 1.25.
    "value-gap": (ValueGap(steps=1, inner_lr=0.25, lr=0.1, gamma=4.0, gamma_steps=0), 0.35, 0.875),
    # the same without c: four times as far in t, and in y at half the rate
    "value-gap plain": (
        ValueGap(steps=1, inner_lr=0.25, lr=0.05, gamma=4.0, gamma_steps=0, normalise=False),
        0.7,
        0.5,
    ),
    # a step of 1.4 is cut to max(1, ‖y‖)
    "value-gap long": (
        ValueGap(steps=1, inner_lr=0.25, lr=0.1, gamma=4.0, gamma_steps=0, normalise=False),
        1.0,
        0.5,
    ),
    # γ_0 = 4 of a ramp to 8 in 10 steps
    "value-gap ramp": (
        ValueGap(steps=1, inner_lr=0.25, lr=0.1, gamma=8.0, gamma_start=4.0, gamma_steps=10),
        0.35,
        0.875,
    ),
    # ½·4·(2(y − t))² = 8(y − t)².   ∇_y L = (−6 − 16)/4 = −5.5.   ∇_t L = (1 + 16)/4 = 4.25.
    "gradient-norm": (GradientNorm(lr=0.1, gamma=4.0, gamma_steps=0), 0.55, 0.575),
    # y^1 = 0.5, ∇q = (2 − 1, −2), ⟨∇f, ∇q⟩ = 1 + 12, λ = 3 − 13/5 = 0.4.   y: −6 − 0.8 = −6.8.   t:
    # 1 + 0.4 = 1.4.
    "dynamic-barrier": (DynamicBarrier(steps=1, inner_lr=0.25, lr=0.1, eta=3.0), 0.68, 0.86),
    # the same with η = 2 < 13/5: the barrier is slack, λ = 0, and only f counts
    "dynamic-barrier slack": (DynamicBarrier(steps=1, inner_lr=0.25, lr=0.1, eta=2.0), 0.6, 0.9),
    # z = 0.25·2 = 0.5.   y: −6/4 − 2 = −3.5.   ∇_t at y = 0.35, z = 0.5: 1 + 4 (2·0.65 − 2·0.5) =
    # 2.2.
    "fully-first-order": (FullyFirstOrder(inner_lr=0.25, lr=0.1, penalty=4.0), 0.35, 0.78),
    # z = 0.5.   y: −6/4 − 2 − (0 − 0.5)/0.5 = −2.5.   t: 1/4 + 2 − 2·0.5 = 1.25.
    "moreau-envelope": (MoreauEnvelope(inner_lr=0.25, lr=0.1, gamma=0.5, penalty=4.0), 0.25, 0.875),
    # y: −6/4 − 2 = −3.5; t feels f alone
    "value-free": (ValueFree(lr=0.1, gamma=4.0), 0.35, 0.9),
}


@pytest.mark.parametrize("case", HAND)
def test_one_step_by_hand(case: str) -> None:
    generator, y, t = HAND[case]
    state, record = advance(method(generator), SCALAR, 1)
    assert state["x"]["x"].item() == pytest.approx(y, abs=1e-14)
    assert state["theta"]["t"].item() == pytest.approx(t, abs=1e-14)
    moved_first = case.startswith(("fully", "value-free"))  # f is taken at the new y
    assert float(record["upper_loss"]) == pytest.approx(1 + (3 - y) ** 2 if moved_first else 10)
    assert float(record["lower_loss"]) == pytest.approx(
        (1 - y) ** 2 if case.startswith("fully") else 1
    )
    if case.startswith(("gradient", "dynamic")):
        assert float(record["lower_gradient_norm"]) == 2


def test_two_steps_of_the_game_by_hand() -> None:
    pipeline = method(Minimax(optimizer="sgd", alpha=2.0, lr=0.05, lr_u=0.1))
    # w: −6 + 2·(−2) = −10.  u: 2·(−2) = −4.  w = u, so t feels f alone: 1.
    state, _ = advance(pipeline, SCALAR, 1)
    assert_same(
        [state["x"]["x"], state["start"]["aux"]["u.x"][0], state["theta"]["t"]],
        [torch.tensor([each], dtype=F64) for each in (0.5, 0.4, 0.9)],
        atol=1e-14,
    )
    # w: 2(0.5 − 3) + 4(0.5 − 0.9) = −6.6.  u: 4(0.4 − 0.9) = −2.  t: 1 + 2(2·0.4 − 2·0.5) = 0.6.
    state, _ = advance(pipeline, SCALAR, 1, state)
    assert_same(
        [state["x"]["x"], state["start"]["aux"]["u.x"][0], state["theta"]["t"]],
        [torch.tensor([each], dtype=F64) for each in (0.83, 0.6, 0.84)],
        atol=1e-14,
    )


# Straight down: the same methods with torch's own optimisers and backward(), on the batches the
# pipeline draws --------------

Parameters = dict[str, torch.nn.Parameter]


def parameters(tree: Tree) -> Parameters:
    return {name: torch.nn.Parameter(leaf.clone()) for name, leaf in tree.items()}


def fixed(tree: Any) -> Tree:
    return {name: leaf.detach() for name, leaf in tree.items()}


class Rows:
    """The batches of branch 0 at outer step k of a run with seed 0."""

    def __init__(
        self, problem: Problem, k: int, size: int | None, upper_size: int | None, steps: int
    ) -> None:
        key = Key(0).fold("step", k).fold("propose").fold("branch", 0)
        above = problem.upper_data["differentiate"]
        self.lower = [problem.lower_data.whole] * steps
        self.upper = above.whole
        if size is not None:
            self.lower = [
                problem.lower_data.rows(i)
                for i in key.fold("lower").indices(problem.lower_data.size, size, steps)
            ]
        if upper_size is not None:
            self.upper = above.rows(key.fold("upper").indices(above.size, upper_size, 1)[0])


def straight_value_gap(
    problem: Problem, one: ValueGap, rate: float, outer_steps: int
) -> tuple[Any, ...]:
    theta = parameters(problem.theta0)
    y = parameters(problem.x0)
    omega = parameters(problem.x0)
    optimizers = [
        torch.optim.SGD(theta.values(), rate),
        torch.optim.SGD(y.values(), one.lr, momentum=one.momentum),
    ]
    inner = torch.optim.SGD(omega.values(), one.inner_lr)
    for k in range(outer_steps):
        rows = Rows(problem, k, one.batch_size, one.upper_batch_size, one.steps + 1)
        for t in range(one.steps):
            inner.zero_grad()
            problem.g(fixed(theta), omega, rows.lower[t]).backward()
            inner.step()
        gamma = min(
            one.gamma, one.gamma_start + (one.gamma - one.gamma_start) * k / one.gamma_steps
        )
        scale = min(1 / gamma, 1.0) if one.normalise and gamma else 1.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        gap = problem.g(theta, y, rows.lower[-1]) - problem.g(theta, fixed(omega), rows.lower[-1])
        (scale * (problem.f(theta, y, rows.upper) + gamma * gap)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return theta, y, {"omega": omega}


def straight_gradient_norm(
    problem: Problem, one: GradientNorm, rate: float, outer_steps: int
) -> tuple[Any, ...]:
    theta = parameters(problem.theta0)
    y = parameters(problem.x0)
    optimizers = [
        torch.optim.SGD(theta.values(), rate),
        torch.optim.SGD(y.values(), one.lr, momentum=one.momentum),
    ]
    for k in range(outer_steps):
        rows = Rows(problem, k, one.batch_size, one.upper_batch_size, 1)
        gamma = min(
            one.gamma, one.gamma_start + (one.gamma - one.gamma_start) * k / one.gamma_steps
        )
        scale = min(1 / gamma, 1.0) if one.normalise and gamma else 1.0
        for optimizer in optimizers:
            optimizer.zero_grad()
        key = Key(0).fold("step", k, "propose", "branch", 0, "lower")
        data = problem.lower_data
        pair = [data.draw(key.fold(i), one.batch_size, 1) for i in range(2)]
        batches = [data.whole if index is None else data.rows(index[0]) for index in pair]
        first, second = (
            torch.autograd.grad(problem.g(theta, y, b), list(y.values()), create_graph=True)
            for b in batches
        )
        penalty = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        (scale * (problem.f(theta, y, rows.upper) + gamma / 2 * penalty)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return theta, y, {}


def straight_minimax(
    problem: Problem, one: Minimax, rate: float, outer_steps: int
) -> tuple[Any, ...]:
    theta = parameters(problem.theta0)
    w = parameters(problem.x0)
    u = parameters(problem.x0)
    kind: Any = torch.optim.AdamW if one.optimizer == "adamw" else torch.optim.SGD
    more = (
        {"betas": one.betas, "eps": one.eps, "weight_decay": one.weight_decay}
        if one.optimizer == "adamw"
        else {}
    )
    of_w = kind(w.values(), one.lr, **more)
    of_u = kind(u.values(), one.lr_u or one.lr, maximize=True, **more)
    for k in range(outer_steps):
        stage = k // (one.stage_steps or outer_steps)
        alpha = one.alpha * one.stage_factor**stage
        of_w.param_groups[0]["lr"] = one.lr / one.stage_factor**stage
        of_u.param_groups[0]["lr"] = (one.lr_u or one.lr) / one.stage_factor**stage
        rows = Rows(problem, k, one.batch_size, one.upper_batch_size, 1)
        for each in (*theta.values(), *w.values(), *u.values()):
            each.grad = None
        (-alpha * problem.g(theta, u, rows.lower[0])).backward()
        (alpha * problem.g(theta, w, rows.lower[0]) + problem.f(theta, w, rows.upper)).backward()
        if one.clip is not None:
            for model in (w, u):
                torch.nn.utils.clip_grad_norm_(model.values(), one.clip * alpha)
        if k >= one.warmup:
            of_u.step()
        of_w.step()
        with torch.no_grad():
            for leaf in theta.values():
                leaf -= rate * leaf.grad
    return theta, w, {"u": u}


def straight_dynamic_barrier(
    problem: Problem, one: DynamicBarrier, rate: float, outer_steps: int
) -> tuple[Any, ...]:
    theta = parameters(problem.theta0)
    y = parameters(problem.x0)
    both = [*theta.values(), *y.values()]
    for k in range(outer_steps):
        rows = Rows(problem, k, one.batch_size, one.upper_batch_size, 1)
        end = parameters(fixed(y))
        inner = torch.optim.SGD(end.values(), one.inner_lr)
        for _ in range(one.steps):
            inner.zero_grad()
            problem.g(fixed(theta), end, rows.lower[0]).backward()
            inner.step()
        gap = problem.g(theta, y, rows.lower[0]) - problem.g(theta, fixed(end), rows.lower[0])
        down = torch.cat([each.reshape(-1) for each in torch.autograd.grad(gap, both)])
        f = torch.cat(
            [
                each.reshape(-1)
                for each in torch.autograd.grad(problem.f(theta, y, rows.upper), both)
            ]
        )
        weight = max(float((one.eta * down @ down - f @ down) / (down @ down)), 0.0)
        direction = f + weight * down
        sizes = [rate] * sum(leaf.numel() for leaf in theta.values()) + [one.lr] * sum(
            leaf.numel() for leaf in y.values()
        )
        moves = (torch.tensor(sizes, dtype=F64) * direction).split([leaf.numel() for leaf in both])
        with torch.no_grad():
            for leaf, move in zip(both, moves, strict=True):
                leaf -= move.reshape(leaf.shape)
    return theta, y, {}


def drawn(problem: Problem, k: int, evaluation: int, one: Any) -> tuple[Tree, Tree]:
    """The batches of an evaluation of branch 0 at outer step k, where each is drawn by a key of
    its own.
    """
    key = Key(0).fold("step", k, "propose", "branch", 0, "evaluation", evaluation)
    pairs = (
        (problem.lower_data, "lower", one.batch_size),
        (problem.upper_data["differentiate"], "upper", one.upper_batch_size),
    )
    below, above = (data.sample(key.fold(name), size)[0] for data, name, size in pairs)
    return below, above


def straight_fully_first_order(
    problem: Problem, one: FullyFirstOrder, rate: float, outer_steps: int
) -> tuple[Any, ...]:
    theta = parameters(problem.theta0)
    y = parameters(problem.x0)
    z = parameters(problem.x0)
    outer, of_y, of_z = (torch.optim.SGD(tree.values(), rate) for tree in (theta, y, z))
    for k in range(outer_steps):
        multiplier = one.penalty * (k + 1) ** one.growth
        of_z.param_groups[0]["lr"] = one.inner_lr / (k + 1) ** one.decay
        of_y.param_groups[0]["lr"] = one.lr / (k + 1) ** one.decay / multiplier  # the paper's α
        for t in range(one.steps):
            below, above = drawn(problem, k, t, one)
            of_y.zero_grad()
            of_z.zero_grad()
            problem.g(fixed(theta), z, below).backward()
            (
                problem.f(fixed(theta), y, above) + multiplier * problem.g(fixed(theta), y, below)
            ).backward()
            of_y.step()
            of_z.step()
        below, above = drawn(problem, k, one.steps, one)
        outer.zero_grad()
        gap = problem.g(theta, fixed(y), below) - problem.g(theta, fixed(z), below)
        (problem.f(theta, fixed(y), above) + multiplier * gap).backward()
        outer.step()
    return theta, y, {"z": z}


def straight_moreau_envelope(
    problem: Problem, one: MoreauEnvelope, rate: float, outer_steps: int
) -> tuple[Any, ...]:
    theta = parameters(problem.theta0)
    y = parameters(problem.x0)
    z = parameters(problem.x0)
    outer, of_y, of_z = (
        torch.optim.SGD(t.values(), r) for t, r in ((theta, rate), (y, one.lr), (z, one.inner_lr))
    )

    def distance(a: Any, b: Any) -> torch.Tensor:
        return sum(((a[name] - b[name]) ** 2).sum() for name in a) / (2 * one.gamma)

    for k in range(outer_steps):
        of_z.zero_grad()
        (
            problem.g(fixed(theta), z, drawn(problem, k, 0, one)[0]) + distance(z, fixed(y))
        ).backward()
        of_z.step()
        below, above = drawn(problem, k, 1, one)
        for optimizer in (outer, of_y):
            optimizer.zero_grad()
        envelope = problem.g(theta, fixed(z), below) + distance(y, fixed(z))
        upper = problem.f(theta, y, above) / (one.penalty * (k + 1) ** one.growth)
        (upper + problem.g(theta, y, below) - envelope).backward()
        for optimizer in (outer, of_y):
            optimizer.step()
    return theta, y, {"z": z}


def straight_value_free(
    problem: Problem, one: ValueFree, rate: float, outer_steps: int
) -> tuple[Any, ...]:
    theta = parameters(problem.theta0)
    y = parameters(problem.x0)
    outer = torch.optim.SGD(theta.values(), rate)
    of_y = torch.optim.SGD(y.values(), one.lr / one.gamma)
    for k in range(outer_steps):
        for t in range(one.steps):
            below, above = drawn(problem, k, t, one)
            of_y.zero_grad()
            (
                problem.f(fixed(theta), y, above) + one.gamma * problem.g(fixed(theta), y, below)
            ).backward()
            of_y.step()
        outer.zero_grad()
        problem.f(theta, fixed(y), drawn(problem, k, one.steps, one)[1]).backward()
        outer.step()
    return theta, y, {}


RAMP = {"gamma": 5.0, "gamma_start": 0.5, "gamma_steps": 3, "lr": 0.2}
STRAIGHT: dict[str, tuple[Any, Callable[..., tuple[Any, ...]]]] = {
    "value-gap": (ValueGap(steps=2, inner_lr=0.3, **RAMP), straight_value_gap),
    "value-gap, momentum, batches": (
        ValueGap(
            steps=3,
            inner_lr=0.3,
            momentum=0.9,
            batch_size=5,
            upper_batch_size=4,
            normalise=False,
            **RAMP,
        ),
        straight_value_gap,
    ),
    "gradient-norm": (GradientNorm(**RAMP), straight_gradient_norm),
    "gradient-norm, momentum, batches": (
        GradientNorm(momentum=0.9, batch_size=5, upper_batch_size=4, **RAMP),
        straight_gradient_norm,
    ),
    "minimax, sgd": (Minimax(alpha=3.0, lr=0.1, lr_u=0.2), straight_minimax),
    "minimax, sgd, stages": (
        Minimax(alpha=3.0, lr=0.1, stage_factor=2.0, stage_steps=2, batch_size=5),
        straight_minimax,
    ),
    "minimax, clip": (Minimax(alpha=3.0, lr=0.1, clip=0.01, upper_batch_size=4), straight_minimax),
    "minimax, adamw, warm-up": (
        Minimax(optimizer="adamw", alpha=3.0, lr=0.05, weight_decay=0.1, warmup=2, batch_size=5),
        straight_minimax,
    ),
    "dynamic-barrier": (
        DynamicBarrier(steps=3, inner_lr=0.3, lr=0.2, eta=0.7),
        straight_dynamic_barrier,
    ),
    "dynamic-barrier, batches": (
        DynamicBarrier(steps=1, inner_lr=0.3, lr=0.2, eta=2.0, batch_size=5, upper_batch_size=4),
        straight_dynamic_barrier,
    ),
    "fully-first-order": (
        FullyFirstOrder(steps=2, inner_lr=0.3, lr=0.2, penalty=2.0),
        straight_fully_first_order,
    ),
    "fully-first-order, decay, batches": (
        FullyFirstOrder(
            inner_lr=0.3, lr=0.2, decay=4 / 7, growth=1 / 3, batch_size=5, upper_batch_size=4
        ),
        straight_fully_first_order,
    ),
    "moreau-envelope": (
        MoreauEnvelope(inner_lr=0.3, lr=0.2, gamma=0.7, penalty=2.0),
        straight_moreau_envelope,
    ),
    "moreau-envelope, batches": (
        MoreauEnvelope(inner_lr=0.3, lr=0.2, growth=0.3, batch_size=5, upper_batch_size=4),
        straight_moreau_envelope,
    ),
    "value-free": (ValueFree(steps=3, lr=0.2, gamma=3.0), straight_value_free),
    "value-free, batches": (
        ValueFree(lr=0.2, batch_size=5, upper_batch_size=4),
        straight_value_free,
    ),
}


@pytest.mark.parametrize("case", STRAIGHT)
def test_five_steps_equal_plain_autograd(case: str) -> None:
    generator, straight = STRAIGHT[case]
    problem = network_problem()  # θ enters f directly
    state, _ = advance(method(generator, Sgd(lr=0.5)), problem, 5)
    theta, y, others = straight(problem, generator, 0.5, 5)
    # torch's clipping divides by the norm + 1e-6
    tolerance = {"rtol": 1e-3, "atol": 1e-6} if "clip" in case else {"rtol": 1e-10, "atol": 1e-12}
    assert_same(state["theta"], fixed(theta), **tolerance)
    assert_same(state["x"], fixed(y), **tolerance)
    for variable, tree in others.items():
        for name, leaf in tree.items():
            assert_same(state["start"]["aux"][f"{variable}.{name}"][0], leaf.detach(), **tolerance)


# What is evaluated
# --------------------------------------------------------------------------------------------------

COUNTS = {
    # (generator, calls of g, calls of f, lower gradients, products, rows of g that the cost counts
    # beyond calls)
    "value-gap": (ValueGap(steps=3, batch_size=5, upper_batch_size=4), 5, {"lower_gradients": 5}),
    "gradient-norm": (
        GradientNorm(batch_size=5, upper_batch_size=4),
        2,
        {"lower_gradients": 2, "products": 2, "cross_products": 2},
    ),
    "minimax": (Minimax(batch_size=5, upper_batch_size=4), 2, {"lower_gradients": 2}),
    "dynamic-barrier": (
        DynamicBarrier(steps=3, batch_size=5, upper_batch_size=4),
        4,
        {"lower_gradients": 4},
    ),
    "fully-first-order": (
        FullyFirstOrder(steps=2, batch_size=5, upper_batch_size=4),
        6,
        {"lower_gradients": 6, "upper_gradients": 3},
    ),
    "moreau-envelope": (
        MoreauEnvelope(batch_size=5, upper_batch_size=4),
        3,
        {"lower_gradients": 3},
    ),
    "value-free": (
        ValueFree(steps=2, batch_size=5, upper_batch_size=4),
        2,
        {"lower_gradients": 2, "upper_gradients": 3},
    ),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", COUNTS)
def test_nothing_is_evaluated_twice_and_all_is_counted(case: str, count: int) -> None:
    generator, calls_of_g, cost = COUNTS[case]
    problem, calls = counted(network_problem())
    _, record = advance(method(evolve(generator, count=count)), problem, 2)
    assert calls["g"] == 2 * count * calls_of_g
    above = cost.get("upper_gradients", 1)
    assert calls["f"] == 2 * count * above
    assert calls["g_rows"] == 2 * count * calls_of_g * 5
    found = {
        name.removeprefix("cost_"): value
        for name, value in record.items()
        if name.startswith("cost_") and value
    }
    below = {name: value for name, value in cost.items() if name != "upper_gradients"}
    assert found == {
        **{name: 2 * count * value for name, value in below.items()},
        "upper_gradients": 2 * count * above,
        "rows": 2 * count * (5 * sum(below.values()) + 4 * above),
    }


def test_one_whole_batch_is_passed_once_for_the_squared_gradient() -> None:
    problem, calls = counted(network_problem())
    _, record = advance(method(GradientNorm(batch_size=10**6)), problem, 1)
    assert (
        calls["g"]
        == record["cost_lower_gradients"]
        == record["cost_products"]
        == record["cost_cross_products"]
        == 1
    )


def test_minibatches_leave_the_penalty_of_the_squared_gradient_unbiased() -> None:
    """Over every pair of batches the two estimates have the mean of the whole batch, which is 0 at
    a stationary point; the square of one batch's gradient would push each weight down by its share
    of the variance.
    """
    rows = 6
    size = 2
    targets = torch.tensor([3.0, -1.0, 0.5, 2.0, -2.5, 1.0], dtype=F64)
    weights = torch.linspace(0.2, 1.2, rows, dtype=F64)
    centre = (weights * targets).sum() / weights.sum()

    def g(theta: Tree, x: Tree, batch: Tree) -> torch.Tensor:
        return (theta["w"][batch["index"]] * (x["y"] - batch["target"]).square()).mean()

    for y, stationary in ((centre, True), (centre + 0.7, False)):
        problem = Problem(
            theta0={"w": weights},
            x0={"y": y.reshape(1)},
            g=g,
            f=lambda theta, x, batch: 0 * x["y"].sum(),
            lower_data=Data.of({"target": targets}),
        )
        exact = GradientNorm(gamma=1.0, gamma_steps=0)
        (wanted,) = exact.propose(problem, problem.theta0, exact.init(problem, Key(0)), Key(0)).aux[
            "theta.w"
        ]
        assert bool(wanted.abs().max() < 1e-12) == stationary
        pairs = list(itertools.product(itertools.combinations(range(rows), size), repeat=2))
        found = []
        for pair in pairs:
            queue = [torch.tensor([batch]) for batch in pair]
            drawn = evolve(
                problem, lower_data=Drawn(rows, {}, problem.lower_data.rows, queue=queue)
            )
            generator = evolve(exact, batch_size=size)
            found.append(
                generator.propose(drawn, problem.theta0, generator.init(drawn, Key(0)), Key(0)).aux[
                    "theta.w"
                ][0]
            )
            assert not queue
        assert_same(torch.stack(found).mean(0), wanted, atol=1e-12)
        squared = [
            slope_of_square(g, problem, list(batch))
            for batch in itertools.combinations(range(rows), size)
        ]
        # what the two batches are for
        assert not stationary or bool((torch.stack(squared).mean(0) > 0.01).all())


@frozen
class Drawn(Data):
    """Data whose draws are given beforehand."""

    queue: list[torch.Tensor] = field(factory=list, eq=False)

    def draw(self, key: Key, batch_size: int | None, steps: int) -> torch.Tensor:
        return self.queue.pop(0)


def slope_of_square(g: Any, problem: Problem, rows: list[int]) -> torch.Tensor:
    theta = parameters(problem.theta0)
    x = parameters(problem.x0)
    (slope,) = torch.autograd.grad(
        g(theta, x, problem.lower_data.rows(torch.tensor(rows))), [x["y"]], create_graph=True
    )
    return torch.autograd.grad(slope.square().sum() / 2, theta["w"])[0]


def test_two_batches_of_the_squared_gradient_are_drawn_independently() -> None:
    """Batches cut from one shuffled epoch never share a row; of independent ones of half the
    rows half a batch is shared.
    """
    problem = network_problem()
    seen = []
    data = problem.lower_data
    watched = evolve(data, rows=lambda index: seen.append(index.tolist()) or data.rows(index))
    advance(
        method(GradientNorm(batch_size=data.size // 2)), evolve(problem, lower_data=watched), 40
    )
    shared = [len(set(a) & set(b)) for a, b in zip(seen[::2], seen[1::2], strict=True)]
    assert sum(shared) / len(shared) == pytest.approx(data.size / 4, abs=1)


def test_the_two_lower_values_of_the_gap_see_one_batch() -> None:
    """At ω = y both terms of θ's penalty gradient cancel, which they only do on the same rows."""
    problem = evolve(network_problem(), f=lambda theta, x, batch: 0 * x["b"].sum())
    for generator in (
        ValueGap(steps=1, inner_lr=1e-12, batch_size=5, gamma_steps=0),
        Minimax(batch_size=5),
        DynamicBarrier(steps=1, inner_lr=1e-12, batch_size=5),
        FullyFirstOrder(lr=1e-12, inner_lr=1e-12, batch_size=5),
        MoreauEnvelope(inner_lr=1e-12, batch_size=5),
    ):
        _, record = advance(method(generator), problem, 1)
        assert float(record["hypergradient_norm"]) < 1e-9


# N candidates
# --------------------------------------------------------------------------------------------------

GENERATORS = {
    "value-gap": ValueGap(count=3, batch_size=5, momentum=0.5, gamma_steps=0),
    "gradient-norm": GradientNorm(count=3, batch_size=5, momentum=0.5, gamma_steps=0),
    "minimax": Minimax(count=3, batch_size=5, optimizer="adamw"),
    "dynamic-barrier": DynamicBarrier(count=3, batch_size=5, eta=20.0),
    "fully-first-order": FullyFirstOrder(count=3, batch_size=5, lr=0.1),
    "moreau-envelope": MoreauEnvelope(count=3, batch_size=5, lr=0.1),
    "value-free": ValueFree(count=3, batch_size=5, lr=0.1),
}


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", GENERATORS)
def test_branches_are_single_runs_of_their_own_and_bring_their_own_gradient(
    name: str, noise: float
) -> None:
    problem = network_problem()
    generator = evolve(GENERATORS[name], noise=noise)
    start = generator.init(problem, Key(0))
    key = Key(3)
    found = generator.propose(problem, problem.theta0, start, key)
    alone = evolve(generator, count=1, noise=0.0).propose(problem, problem.theta0, start, key)
    assert_same({k: v[:1] for k, v in found.x.items()}, alone.x)  # branch 0 is free of noise
    assert_same({k: v[:1] for k, v in found.aux.items()}, alone.aux)
    for i in (1, 2):
        assert not torch.equal(found.x["w"][i], found.x["w"][0])
        same = torch.equal(found.aux["theta.weights"][i], found.aux["theta.weights"][0])
        assert same == (name == "value-free")  # whose h is ∇_θ f alone, in which x has no part here
    again = generator.propose(problem, problem.theta0, start, key)
    assert_same(again.x, found.x)


@pytest.mark.parametrize("name", GENERATORS)
def test_the_selected_branch_moves_theta_and_is_carried_with_all_it_kept(name: str) -> None:
    problem = network_problem()
    for rule in ("selected", "per-branch"):
        generator = evolve(GENERATORS[name], carry_rule=rule)
        pipeline = method(generator, Sgd(lr=1.0), selector=BestOfN())
        before = pipeline.init(problem, 0)
        state, record = pipeline.step(problem, before)
        found = generator.propose(
            problem, problem.theta0, before["start"], Key(0).fold("step", 0).fold("propose")
        )
        index = int(record["selected"])
        assert_same(state["x"], {k: v[index] for k, v in found.x.items()})
        moved = {k: problem.theta0[k] - state["theta"][k] for k in problem.theta0}
        assert_same(moved, {k: found.aux[f"theta.{k}"][index] for k in moved}, atol=1e-14)
        rows = slice(index, index + 1) if rule == "selected" else slice(None)
        assert_same(state["start"]["x"], {k: v[rows] for k, v in found.x.items()})
        kept = state["start"]["aux"]
        assert not any(k.startswith("theta.") or "." not in k for k in kept)
        assert_same(kept, {k: found.aux[k][rows] for k in kept})
        advance(pipeline, problem, 2, state)


def test_equal_candidates_are_refused_with_what_to_do() -> None:
    for generator in GENERATORS.values():
        with rejects("conflicting-options", "generator", "noise"):
            method(evolve(generator, batch_size=None)).init(network_problem(), 0)
        method(evolve(generator, batch_size=None, upper_batch_size=4)).init(network_problem(), 0)
        method(evolve(generator, batch_size=None, noise=0.1)).init(network_problem(), 0)
        start = evolve(generator, carry_rule="per-branch").init(network_problem(), Key(0))
        with rejects("wrong-length", "generator", "count"):
            evolve(generator, count=2).propose(
                network_problem(), network_problem().theta0, start, Key(0)
            )


def test_noise_sets_branches_apart_once_or_at_every_step() -> None:
    problem = network_problem()
    for name, generator in GENERATORS.items():
        noisy = evolve(generator, noise=0.1, batch_size=None)
        apart = evolve(noisy, carry_rule="per-branch").init(problem, Key(0))
        assert_same({k: v[0] for k, v in apart["x"].items()}, problem.x0)
        spread = torch.cat([(apart["x"][k][1:] - problem.x0[k]).reshape(-1) for k in problem.x0])
        assert 0.06 < float(spread.std()) < 0.14
        for twin in {
            "value-gap": ["omega"],
            "minimax": ["u"],
            "fully-first-order": ["z"],
            "moreau-envelope": ["z"],
        }.get(name, []):
            assert_same({k: apart["aux"][f"{twin}.{k}"] for k in problem.x0}, apart["x"])
        pipeline = method(evolve(noisy, carry_rule="per-branch"), selector=BestOfN())
        # nothing is added to branches of their own
        found = noisy.propose(problem, problem.theta0, apart, Key(1))
        assert_same(found.x, noisy.propose(problem, problem.theta0, apart, Key(2)).x)
        common = noisy.init(problem, Key(0))
        assert_same({k: v[0] for k, v in common["x"].items()}, problem.x0)
        one, other = (
            noisy.propose(problem, problem.theta0, common, Key(seed)).x["w"] for seed in (1, 2)
        )
        assert torch.equal(one[0], other[0])
        assert not torch.equal(one[1], other[1])
        advance(pipeline, problem, 2)


# Blocks
# --------------------------------------------------------------------------------------------------


def test_only_the_drawn_blocks_move_and_only_they_have_moments() -> None:
    problem = network_problem()
    pipeline = method(Minimax(optimizer="adamw", blocks=1, block_every=2, lr=0.1, batch_size=5))
    state = pipeline.init(problem, 0)
    drawn = []
    for _ in range(24):
        before, (state, _) = state, pipeline.step(problem, state)
        moved = {
            "w": [
                name for name in problem.x0 if not torch.equal(state["x"][name], before["x"][name])
            ],
            "u": [
                k
                for k in problem.x0
                if not torch.equal(*(s["start"]["aux"][f"u.{k}"] for s in (state, before)))
            ],
        }
        for which in "wu":
            assert len(moved[which]) == 1
            assert [f"m{which}.{moved[which][0]}"] == [
                k for k in state["start"]["aux"] if k.startswith(f"m{which}.")
            ]
        drawn.append((moved["w"][0], moved["u"][0]))
    assert all(drawn[k] == drawn[k + 1] for k in range(0, 24, 2))
    assert {w for w, _ in drawn} == set(problem.x0) == {u for _, u in drawn}
    assert any(w != u for w, u in drawn)  # drawn for each model by itself
    other = advance(pipeline, problem, 1, seed=1)[0]["start"]["blocks"]
    assert other != state["start"]["blocks"]


def test_whole_layers_are_drawn_and_what_is_in_none_always_moves() -> None:
    """LISA: two of four layers for a period of three steps, with both halves of an adapter;
    embeddings and head each step.
    """
    layers = [f"model.layers.{i}" for i in range(4)]
    parts = ("self_attn.q_proj.lora_A.weight", "self_attn.q_proj.lora_B.weight", "norm.weight")
    names = [
        "model.embed_tokens.weight",
        *(f"{layer}.{part}" for layer in layers for part in parts),
        "lm_head.weight",
    ]
    target = {name: normal(2, seed=number) for number, name in enumerate(names)}
    problem = Problem(
        theta0={"t": torch.ones(1, dtype=F64)},
        x0={name: torch.zeros(2, dtype=F64) for name in names},
        g=lambda t, x, _: (
            sum(0.5 * ((x[name] - target[name]) ** 2).sum() for name in names) + 0 * t["t"].sum()
        ),
        f=lambda t, x, _: sum(0.5 * (x[name] ** 2).sum() for name in names),
    )
    generator = Minimax(
        optimizer="adamw", blocks=2, block_every=3, lr=0.1, alpha=2.0, weight_decay=0.1
    )
    pipeline = method(generator)
    state = pipeline.init(problem, 0)
    always = {"model.embed_tokens.weight", "lm_head.weight"}
    drawn = []
    for _ in range(12):
        before, (state, _) = state, pipeline.step(problem, state)
        moved = {name for name in names if not torch.equal(state["x"][name], before["x"][name])}
        assert always <= moved
        active = {name for name in layers if f"{name}.norm.weight" in moved}
        assert moved - always == {f"{layer}.{part}" for layer in active for part in parts}
        assert len(active) == 2
        drawn.append(active)
    assert all(drawn[k] == drawn[k - k % 3] for k in range(12))
    assert set().union(*drawn) == set(layers)
    # The moments of what always moves go on over the draws, as in torch's optimiser on that leaf
    # alone.
    w = torch.zeros(2, dtype=F64, requires_grad=True)
    optimizer = torch.optim.AdamW([w], lr=0.1, weight_decay=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        (0.5 * (w**2).sum() + 2.0 * 0.5 * ((w - target["lm_head.weight"]) ** 2).sum()).backward()
        optimizer.step()
    assert_same(state["x"]["lm_head.weight"], w.detach(), rtol=1e-10)


def test_a_cosine_takes_both_rates_to_zero_over_the_budget() -> None:
    problem = Problem(
        theta0={"t": torch.ones(1, dtype=F64)},
        x0={"x": torch.zeros(1, dtype=F64)},
        g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
        f=lambda t, x, _: ((x["x"] - 3) ** 2).sum(),
    )
    pipeline = method(Minimax(optimizer="sgd", alpha=2.0, lr=0.05, schedule="cosine"))
    for progress, factor in ((0.0, 1.0), (1 / 3, 0.75), (0.5, 0.5), (1.0, 0.0)):
        state, _ = pipeline.step(problem, pipeline.init(problem, 0), progress)
        assert float(state["x"]["x"]) == pytest.approx(0.5 * factor)  # ∇_w = −6 − 2·2
        assert float(state["start"]["aux"]["u.x"]) == pytest.approx(0.2 * factor)  # ∇_u = −2·2


def test_scalebio_on_sources_is_as_its_authors_run_it() -> None:
    parts = SCALEBIO.with_overrides({}, ["sources"])
    generator = parts["generator"]
    outer = parts["outer"]
    assert (generator["optimizer"], generator["weight_decay"], generator["schedule"]) == (
        "adamw",
        5e-4,
        "cosine",
    )
    assert (outer["name"], outer["lr"], outer["weight_decay"]) == ("adamw", 1e-2, 1e-2)
    assert outer["schedule"] == {"kind": "cosine", "final": 0.0}


def test_all_blocks_are_all_leaves_and_leaves_of_one_module_move_together() -> None:
    problem = network_problem()
    all_blocks = Minimax(optimizer="sgd", blocks=3, batch_size=5)
    assert_same(
        advance(method(all_blocks), problem, 3)[0]["x"],
        advance(method(evolve(all_blocks, blocks=None)), problem, 3)[0]["x"],
    )
    with rejects("out-of-range", "generator", "blocks"):
        method(evolve(all_blocks, blocks=4)).init(problem, 0)
    layers = Problem(
        theta0={"t": torch.ones(1, dtype=F64)},
        x0={
            name: torch.zeros(2, dtype=F64) for name in ("a.weight", "a.bias", "b.weight", "b.bias")
        },
        g=lambda t, x, _: sum(((leaf - t["t"]) ** 2).sum() for leaf in x.values()),
        f=lambda t, x, _: sum(leaf.sum() for leaf in x.values()),
    )
    x = advance(method(evolve(all_blocks, blocks=1)), layers, 1)[0]["x"]
    assert sorted(name for name, leaf in x.items() if leaf.any()) in (
        ["a.bias", "a.weight"],
        ["b.bias", "b.weight"],
    )


# Against the truth
# --------------------------------------------------------------------------------------------------

RIDGE = Quadratic(
    features=6, rows=12, validation_rows=100, penalty="shared", noise=2.0, condition=3.0
)


def penalised_minimiser(kind: str, gamma: float | None) -> float:
    """argmin_θ min_x f + γ·penalty by dense algebra in x and a scalar search in θ; F itself for
    γ = None.
    """
    problem = RIDGE.problem(1, CPU, F64)
    exact = RIDGE.closed_form(1, CPU, F64)
    n = exact.a.shape[0]
    m = exact.validation_a.shape[0]
    above = exact.validation_a.T @ exact.validation_a / m
    above_b = exact.validation_a.T @ exact.validation_b / m

    def value(log_penalty: float) -> float:
        theta = {"log_penalty": torch.tensor([log_penalty], dtype=F64)}
        best = exact.solution(theta)
        if gamma is None:
            return float(exact.value(theta))
        hessian = exact.a.T @ exact.a / n + theta["log_penalty"].exp() * torch.eye(
            RIDGE.features, dtype=F64
        )
        weight = hessian if kind == "gap" else hessian @ hessian
        x = {"x": torch.linalg.solve(above + gamma * weight, above_b + gamma * weight @ best["x"])}
        error = x["x"] - best["x"]
        penalty = 0.5 * error @ weight @ error  # g − min g = ½ eᵀHe, and ½‖∇g‖² = ½ eᵀH²e
        return float(problem.f(theta, x, problem.upper_data["select"].whole) + gamma * penalty)

    return float(
        minimize_scalar(value, bounds=(-5, 3), method="bounded", options={"xatol": 1e-10}).x
    )


def log_penalty(generator: Any, rate: float, steps: int) -> float:
    state, _ = advance(method(generator, Sgd(lr=rate)), RIDGE.problem(1, CPU, F64), steps)
    return float(state["theta"]["log_penalty"])


@pytest.mark.extended
@pytest.mark.parametrize("gamma", [4.0, 10.0])
def test_fixed_penalties_converge_to_the_penalised_optimum(gamma: float) -> None:
    """Five times nearer to it than it is to the true optimum, so the two cannot be confused."""
    settings: dict[str, Any] = {"gamma": gamma, "gamma_start": 4.0, "gamma_steps": 100}
    steps, rate = (400, 0.25) if gamma == 4 else (500, 0.1)
    best = penalised_minimiser("gap", None)
    gap = penalised_minimiser("gap", gamma)
    norm = penalised_minimiser("norm", gamma)
    found = {
        "value-gap": (
            log_penalty(ValueGap(lr=0.3, inner_lr=0.7, **settings), rate * gamma, steps),
            gap,
        ),
        "minimax": (
            log_penalty(Minimax(lr=0.3 / gamma, lr_u=0.7 / gamma, alpha=gamma), rate, steps),
            gap,
        ),
        "gradient-norm": (log_penalty(GradientNorm(lr=0.3, **settings), rate * gamma, steps), norm),
    }
    for name, (reached, expected) in found.items():
        assert abs(reached - expected) < abs(expected - best) / 5, name


def test_f2sa_s_upper_gradient_tends_to_the_hypergradient_as_one_over_its_multiplier() -> None:
    """At a θ that stays, with the whole data and many steps."""
    problem = RIDGE.problem(1, CPU, F64)
    exact = RIDGE.closed_form(1, CPU, F64)
    theta = {"log_penalty": torch.tensor([0.3], dtype=F64)}
    wanted = exact.hypergradient(theta)["log_penalty"]
    errors = []
    for penalty in (10.0, 100.0, 1000.0):
        generator = FullyFirstOrder(steps=300, lr=0.3, inner_lr=0.3, penalty=penalty, growth=0.0)
        h = generator.propose(problem, theta, generator.init(problem, Key(0)), Key(0)).aux[
            "theta.log_penalty"
        ][0]
        errors.append(float((h - wanted).abs().max()))
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.3)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.1)


def test_meha_with_a_wide_envelope_is_the_value_gap() -> None:
    """For γ → ∞ and a fixed c both move y and θ along the gradients of f/c + g(y) − g(z)."""
    problem = network_problem()
    gap = ValueGap(inner_lr=0.2, lr=0.3, gamma=5.0, gamma_steps=0)  # c_k = 1/γ: f/γ + g(y) − g(ω)
    meha = MoreauEnvelope(inner_lr=0.2, lr=0.3, penalty=5.0, growth=0.0, gamma=1e12)
    ends = [advance(method(generator), problem, 5)[0] for generator in (gap, meha)]
    assert_same(ends[1]["x"], ends[0]["x"], rtol=1e-9)
    assert_same(ends[1]["theta"], ends[0]["theta"], rtol=1e-9)


def test_the_proximal_point_of_meha_is_that_of_the_envelope() -> None:
    """With θ and y held, z tends to argmin_z g + ‖z − y‖²/(2γ), by dense algebra."""
    problem = RIDGE.problem(1, CPU, F64)
    exact = RIDGE.closed_form(1, CPU, F64)
    hessian = exact.a.T @ exact.a / len(exact.a) + problem.theta0["log_penalty"].exp() * torch.eye(
        RIDGE.features, dtype=F64
    )
    y = {name: leaf + 1 for name, leaf in problem.x0.items()}
    held = evolve(problem, x0=y)
    generator = MoreauEnvelope(inner_lr=0.3, lr=1e-300, gamma=0.8)
    start = generator.init(held, Key(0))
    for _ in range(200):
        candidates = generator.propose(held, held.theta0, start, Key(0))
        start = generator.carry(start, candidates, torch.tensor(0), Key(0), held)
    best = exact.solution(held.theta0)["x"]
    shift = torch.eye(RIDGE.features, dtype=F64) / 0.8
    wanted = torch.linalg.solve(hessian + shift, hessian @ best + shift @ y["x"])
    assert_same(start["aux"]["z.x"][0], wanted, rtol=1e-8)


def test_the_penalised_optimum_is_wrong_by_the_order_of_one_over_gamma() -> None:
    best = penalised_minimiser("gap", None)
    for kind in ("gap", "norm"):
        errors = [abs(penalised_minimiser(kind, gamma) - best) for gamma in (4.0, 16.0, 64.0)]
        assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)
        assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)


@pytest.mark.extended
def test_a_growing_penalty_and_a_barrier_come_near_the_true_optimum() -> None:
    best = penalised_minimiser("gap", None)
    small = penalised_minimiser("gap", 4.0)
    grown = log_penalty(
        ValueGap(lr=0.3, inner_lr=0.7, gamma=40.0, gamma_start=4.0, gamma_steps=1000), 1.0, 1000
    )
    assert abs(grown - best) < abs(small - best) / 4
    barrier = log_penalty(DynamicBarrier(steps=5, inner_lr=0.5, lr=0.03, eta=0.5), 0.15, 400)
    assert abs(barrier - best) < 0.05


SPHERE = Sphere(k=2, d=6)
ON_SPHERE = {
    "value-gap": (ValueGap(gamma=20.0, gamma_steps=0, lr=0.2, inner_lr=0.2), 0.2),
    "minimax": (Minimax(alpha=20.0, lr=0.01), 0.01),
}


def on_sphere(generator: Any, rate: float, seed: int, **parts: Any) -> dict[str, float]:
    problem = SPHERE.problem(0, CPU, F64)
    pipeline = method(generator, Sgd(lr=rate), **parts)
    return dict(problem.evaluate(*pipeline.result(advance(pipeline, problem, 150, seed=seed)[0])))


@pytest.mark.extended
@pytest.mark.parametrize("name", ON_SPHERE)
def test_on_a_manifold_of_minima_selection_makes_up_for_the_slow_drift_along_it(name: str) -> None:
    """A penalty moves y along the manifold by f alone, γ times slower than g moves it onto it: one
    run that starts at the worst minimiser works with a wrong x meanwhile, and of several runs the
    best one is less wrong.
    """
    generator, rate = ON_SPHERE[name]
    alone = on_sphere(generator, rate, seed=0)
    # a lower minimiser up to the penalty's bias of order 1/γ,
    assert alone["manifold_distance"] < 0.05
    assert alone["solution_distance"] > 0.5  # and not the optimistic one
    spread = evolve(generator, count=5, noise=0.5, carry_rule="per-branch")
    for seed in (0, 1):
        best = on_sphere(spread, rate, seed, selector=BestOfN())
        assert best["manifold_distance"] < 0.05
        assert 0 < best["upper_gap"] < 0.75 * alone["upper_gap"]
        assert best["solution_distance"] < alone["solution_distance"]


def test_a_barrier_drifts_to_the_optimistic_minimiser_as_fast_as_its_rates_let_it() -> None:
    """BOME follows ∇f wherever the gap allows, so it too moves along the manifold: at a small
    budget it stops short of F*.
    """
    slow, fast = (
        on_sphere(DynamicBarrier(steps=5, inner_lr=0.2, lr=rate, eta=0.5), rate, 0)
        for rate in (0.02, 0.1)
    )
    assert slow["manifold_distance"] < 0.06
    assert slow["solution_distance"] > 0.4
    assert slow["upper_gap"] > 0.1
    assert 0 < fast["upper_gap"] < 0.1 * slow["upper_gap"]
    assert fast["solution_distance"] < 0.1


def test_the_gradient_norm_is_content_with_a_maximum() -> None:
    """∇g vanishes at the sphere's centre too. Of several runs, one that is held there can have
    the lowest f.
    """
    generator = GradientNorm(
        gamma=20.0, gamma_steps=0, lr=0.1, count=5, noise=0.5, carry_rule="per-branch"
    )
    stuck = on_sphere(generator, 0.2, 0, selector=BestOfN())
    assert stuck["manifold_distance"] > 0.9


# State, and what does not fit
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATORS)
def test_a_run_read_back_from_disk_goes_on_the_same(name: str) -> None:
    problem = network_problem()
    generator = GENERATORS[name]
    if name == "minimax":
        generator = evolve(generator, blocks=2, block_every=2)
    pipeline = method(generator, AdamW(lr=0.1), selector=BestOfN())
    through, _ = advance(pipeline, problem, 5)
    halfway, _ = advance(pipeline, problem, 3)
    resumed, _ = advance(pipeline, problem, 2, unpack(*pack(halfway)))
    assert_same(unpack(*pack(resumed)), unpack(*pack(through)))


@pytest.mark.parametrize("name", GENERATORS)
def test_a_penalty_step_is_not_replayed(name: str) -> None:
    with rejects("not-supported", "hypergradient"):
        advance(method(GENERATORS[name], hypergradient=Unrolled()), network_problem(), 1)
    advance(
        method(GENERATORS[name], hypergradient=Implicit(solver=Identity())), network_problem(), 1
    )


def test_carried_wants_a_generator_that_brings_the_gradient() -> None:
    with rejects("not-supported", "hypergradient") as caught:
        advance(method(Branches(count=1, steps=1)), network_problem(), 1)
    assert "'theta.weights'" in caught.value.message


def test_a_loss_that_lacks_a_variable_gives_zeros() -> None:
    problem = evolve(SCALAR, f=lambda t, x, _: 0 * t["t"].sum(), g=lambda t, x, _: x["x"].sum())
    for generator in GENERATORS.values():
        state, _ = advance(method(evolve(generator, count=1)), problem, 1)
        assert_same(state["theta"], problem.theta0)
        assert math.isfinite(float(state["x"]["x"]))
