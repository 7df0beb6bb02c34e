"""Steps of the penalty methods: by hand, and against the same steps with plain gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.field_problems import run
from support.helpers import F64, assert_same, network_problem

from hgms.generators.penalty import (
    DynamicBarrier,
    FullyFirstOrder,
    GradientNorm,
    Minimax,
    MoreauEnvelope,
    PairOptimizer,
    Ramp,
    Stages,
    ValueFree,
    ValueGap,
)
from hgms.hypergradients import Carried
from hgms.outer import Sgd
from hgms.selectors import First
from hgms_core import Key, Pipeline, Problem, Tree


def method(generator: Any, rate: float = 0.1) -> Pipeline:
    return Pipeline(
        generator=generator, selector=First(), hypergradient=Carried(), outer=Sgd(lr=rate)
    )


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
    "value-gap": (
        ValueGap(steps=1, inner_lr=0.25, lr=0.1, gamma=4.0, ramp=Ramp(steps=0)),
        0.35,
        0.875,
    ),
    # the same without c: four times as far in t, and in y at half the rate
    "value-gap plain": (
        ValueGap(steps=1, inner_lr=0.25, lr=0.05, gamma=4.0, ramp=Ramp(steps=0), normalise=False),
        0.7,
        0.5,
    ),
    # a step of 1.4 is cut to max(1, ‖y‖)
    "value-gap long": (
        ValueGap(steps=1, inner_lr=0.25, lr=0.1, gamma=4.0, ramp=Ramp(steps=0), normalise=False),
        1.0,
        0.5,
    ),
    # γ_0 = 4 of a ramp to 8 in 10 steps
    "value-gap ramp": (
        ValueGap(steps=1, inner_lr=0.25, lr=0.1, gamma=8.0, ramp=Ramp(start=4.0, steps=10)),
        0.35,
        0.875,
    ),
    # ½·4·(2(y − t))² = 8(y − t)².   ∇_y L = (−6 − 16)/4 = −5.5.   ∇_t L = (1 + 16)/4 = 4.25.
    "gradient-norm": (GradientNorm(lr=0.1, gamma=4.0, ramp=Ramp(steps=0)), 0.55, 0.575),
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
    theta, x, record = run(method(generator), SCALAR, 1)
    assert (x["x"].item(), theta["t"].item()) == pytest.approx((y, t), abs=1e-14)
    moved_first = case.startswith(("fully", "value-free"))  # f is taken at the new y
    assert float(record["upper_loss"]) == pytest.approx(1 + (3 - y) ** 2 if moved_first else 10)
    lower = (1 - y) ** 2 if case.startswith("fully") else 1
    assert float(record["lower_loss"]) == pytest.approx(lower)
    if case.startswith(("gradient", "dynamic")):
        assert float(record["lower_gradient_norm"]) == 2


def test_two_steps_of_the_game_by_hand() -> None:
    game = method(Minimax(alpha=2.0, optimizer=PairOptimizer(lr=0.05, lr_u=0.1)))
    # w: −6 + 2·(−2) = −10.  u: 2·(−2) = −4.  w = u, so t feels f alone: 1.  Then w: 2(0.5 − 3) +
    # 4(0.5 − 0.9) = −6.6.  u: 4(0.4 − 0.9) = −2.  t: 1 + 2(2·0.4 − 2·0.5) = 0.6.
    state = game.init(SCALAR, 0)
    for expected in ((0.5, 0.4, 0.9), (0.83, 0.6, 0.84)):
        state, _ = game.step(SCALAR, state)
        found = (state["x"]["x"], state["start"]["aux"]["u.x"][0], state["theta"]["t"])
        assert tuple(map(float, found)) == pytest.approx(expected, abs=1e-14)


# The same methods with gradients of torch.func, one outer step a call, on the batches that the
# pipeline draws.

Loss = Callable[[Tree], torch.Tensor]


def slope(loss: Loss, at: Tree) -> Tree:
    return torch.func.grad(loss)(at)  # type: ignore[no-any-return]


def down(at: Tree, loss: Loss, rate: float) -> Tree:
    slopes = slope(loss, at)
    return {name: leaf - rate * slopes[name] for name, leaf in at.items()}


def heavy(state: dict[str, Tree], loss: Loss, one: Any) -> None:
    """A step of y with momentum."""
    slopes = slope(loss, state["y"])
    before = state.get("m", {name: torch.zeros_like(leaf) for name, leaf in slopes.items()})
    state["m"] = {name: one.momentum * before[name] + leaf for name, leaf in slopes.items()}
    state["y"] = {name: leaf - one.lr * state["m"][name] for name, leaf in state["y"].items()}


def key_of(k: int) -> Key:
    return Key(0).fold("step", k, "propose", "branch", 0)


def rows_of(problem: Problem, k: int, one: Any, steps: int = 1) -> tuple[list[Tree], Tree]:
    """The lower batches and the upper one of outer step k, of one draw each."""
    above = problem.upper_data["differentiate"]
    lower = problem.lower_data.draw(key_of(k).fold("lower"), one.batch_size, steps)
    upper = above.draw(key_of(k).fold("upper"), one.upper_batch_size, 1)
    below = [problem.lower_data.batch(None if lower is None else lower[t]) for t in range(steps)]
    return below, above.batch(None if upper is None else upper[0])


def drawn(problem: Problem, k: int, evaluation: int, one: Any) -> tuple[Tree, Tree]:
    """The batches of an evaluation at outer step k, where each is drawn by a key of its own."""
    key = key_of(k).fold("evaluation", evaluation)
    below, _ = problem.lower_data.sample(key.fold("lower"), one.batch_size)
    above, _ = problem.upper_data["differentiate"].sample(key.fold("upper"), one.upper_batch_size)
    return below, above


def ramp(one: Any, k: int) -> tuple[float, float]:
    """γ at outer step k, and the factor of the whole loss."""
    gamma = min(one.gamma, one.ramp.start + (one.gamma - one.ramp.start) * k / one.ramp.steps)
    return gamma, min(1 / gamma, 1.0) if one.normalise and gamma else 1.0


def value_gap(p: Problem, one: ValueGap, rate: float, k: int, s: dict[str, Tree]) -> None:
    below, above = rows_of(p, k, one, one.steps + 1)
    theta, y = s["theta"], s["y"]
    for batch in below[:-1]:
        s["omega"] = down(s["omega"], lambda w, batch=batch: p.g(theta, w, batch), one.inner_lr)
    gamma, scale = ramp(one, k)

    def total(theta: Tree, y: Tree) -> torch.Tensor:
        gap = p.g(theta, y, below[-1]) - p.g(theta, s["omega"], below[-1])
        return scale * (p.f(theta, y, above) + gamma * gap)

    s["theta"] = down(theta, lambda t: total(t, y), rate)
    heavy(s, lambda y: total(theta, y), one)


def gradient_norm(p: Problem, one: GradientNorm, rate: float, k: int, s: dict[str, Tree]) -> None:
    _, above = rows_of(p, k, one)
    gamma, scale = ramp(one, k)
    lower = key_of(k).fold("lower")
    # two independent batches: the square of one batch's gradient would be biased
    batches = [p.lower_data.sample(lower.fold(i), one.batch_size)[0] for i in range(2)]

    def total(theta: Tree, y: Tree) -> torch.Tensor:
        a, b = (slope(lambda y, rows=rows: p.g(theta, y, rows), y) for rows in batches)
        penalty = sum((a[name] * b[name]).sum() for name in a)
        return scale * (p.f(theta, y, above) + gamma / 2 * penalty)

    theta, y = s["theta"], s["y"]
    s["theta"] = down(theta, lambda t: total(t, y), rate)
    heavy(s, lambda y: total(theta, y), one)


def minimax(p: Problem, one: Minimax, rate: float, k: int, s: dict[str, Any]) -> None:
    rule = one.optimizer
    if k == 0:
        s["u"], s["y"] = (
            {name: torch.nn.Parameter(leaf.clone()) for name, leaf in p.x0.items()} for _ in "uy"
        )
        adamw = rule.kind == "adamw"
        kind: Any = torch.optim.AdamW if adamw else torch.optim.SGD
        more = {"betas": rule.betas, "eps": rule.eps} if adamw else {}
        s["of_y"] = kind(s["y"].values(), weight_decay=rule.weight_decay, **more)
        s["of_u"] = kind(s["u"].values(), weight_decay=rule.weight_decay, maximize=True, **more)
    growth = one.stages.factor ** (k // (one.stages.steps or 10**9))
    alpha = one.alpha * growth
    s["of_y"].param_groups[0]["lr"] = rule.lr / growth
    s["of_u"].param_groups[0]["lr"] = (rule.lr_u or rule.lr) / growth
    [below], above = rows_of(p, k, one)
    theta = {name: leaf.clone().requires_grad_() for name, leaf in s["theta"].items()}
    for leaf in (*s["u"].values(), *s["y"].values()):
        leaf.grad = None
    (-alpha * p.g(theta, s["u"], below)).backward()
    (alpha * p.g(theta, s["y"], below) + p.f(theta, s["y"], above)).backward()
    for model in (s["y"], s["u"]) if one.clip is not None else ():
        torch.nn.utils.clip_grad_norm_(model.values(), one.clip * alpha)
    s["of_y"].step()
    if k >= one.warmup:
        s["of_u"].step()
    s["theta"] = {name: leaf.detach() - rate * leaf.grad for name, leaf in theta.items()}


def dynamic_barrier(
    p: Problem, one: DynamicBarrier, rate: float, k: int, s: dict[str, Tree]
) -> None:
    [below], above = rows_of(p, k, one)
    theta, y = s["theta"], s["y"]
    end = y
    for _ in range(one.steps):
        end = down(end, lambda x: p.g(theta, x, below), one.inner_lr)
    both = {"theta": theta, "y": y}
    gap: Any = torch.func.grad(
        lambda at: p.g(at["theta"], at["y"], below) - p.g(at["theta"], end, below)
    )(both)
    upper: Any = torch.func.grad(lambda at: p.f(at["theta"], at["y"], above))(both)
    pairs = [(upper[part][name], gap[part][name]) for part in both for name in both[part]]
    size = sum((q * q).sum() for _, q in pairs)
    along = sum((f * q).sum() for f, q in pairs)
    weight = max(float((one.eta * size - along) / size), 0.0)
    for part, step in (("theta", rate), ("y", one.lr)):
        s[part] = {
            name: leaf - step * (upper[part][name] + weight * gap[part][name])
            for name, leaf in both[part].items()
        }


def fully_first_order(
    p: Problem, one: FullyFirstOrder, rate: float, k: int, s: dict[str, Tree]
) -> None:
    c = one.penalty * (k + 1) ** one.growth
    fallen = 1 / (k + 1) ** one.decay
    theta = s["theta"]
    for t in range(one.steps):
        below, above = drawn(p, k, t, one)
        s["z"] = down(s["z"], lambda z, below=below: p.g(theta, z, below), one.inner_lr * fallen)
        s["y"] = down(  # the paper's α is that of y without the multiplier
            s["y"],
            lambda y, below=below, above=above: p.f(theta, y, above) + c * p.g(theta, y, below),
            one.lr * fallen / c,
        )
    below, above = drawn(p, k, one.steps, one)
    s["theta"] = down(
        theta,
        lambda t: p.f(t, s["y"], above) + c * (p.g(t, s["y"], below) - p.g(t, s["z"], below)),
        rate,
    )


def moreau_envelope(
    p: Problem, one: MoreauEnvelope, rate: float, k: int, s: dict[str, Tree]
) -> None:
    def distance(a: Tree, b: Tree) -> Any:
        return sum(((a[name] - b[name]) ** 2).sum() for name in a) / (2 * one.gamma)

    theta, y = s["theta"], s["y"]
    first, _ = drawn(p, k, 0, one)
    z = s["z"] = down(s["z"], lambda z: p.g(theta, z, first) + distance(z, y), one.inner_lr)
    below, above = drawn(p, k, 1, one)

    def total(theta: Tree, y: Tree) -> Any:
        upper = p.f(theta, y, above) / (one.penalty * (k + 1) ** one.growth)
        return upper + p.g(theta, y, below) - p.g(theta, z, below) - distance(y, z)

    s["theta"] = down(theta, lambda t: total(t, y), rate)
    s["y"] = down(y, lambda y: total(theta, y), one.lr)


def value_free(p: Problem, one: ValueFree, rate: float, k: int, s: dict[str, Tree]) -> None:
    theta = s["theta"]
    for t in range(one.steps):
        below, above = drawn(p, k, t, one)
        s["y"] = down(
            s["y"],
            lambda y, below=below, above=above: (
                p.f(theta, y, above) + one.gamma * p.g(theta, y, below)
            ),
            one.lr / one.gamma,
        )
    s["theta"] = down(theta, lambda t: p.f(t, s["y"], drawn(p, k, one.steps, one)[1]), rate)


RAMP: dict[str, Any] = {"gamma": 5.0, "ramp": Ramp(start=0.5, steps=3), "lr": 0.2}
BATCHES: dict[str, Any] = {"batch_size": 5, "upper_batch_size": 4}
STRAIGHT: dict[str, tuple[Any, Callable[..., None]]] = {
    "value-gap": (ValueGap(steps=2, inner_lr=0.3, **RAMP), value_gap),
    "value-gap, momentum, batches": (
        ValueGap(steps=3, inner_lr=0.3, momentum=0.9, normalise=False, **BATCHES, **RAMP),
        value_gap,
    ),
    "gradient-norm": (GradientNorm(**RAMP), gradient_norm),
    "gradient-norm, momentum, batches": (
        GradientNorm(momentum=0.9, **BATCHES, **RAMP),
        gradient_norm,
    ),
    "minimax, sgd, stages": (
        Minimax(
            alpha=3.0,
            optimizer=PairOptimizer(lr=0.1, lr_u=0.2),
            stages=Stages(factor=2.0, steps=2),
            batch_size=5,
        ),
        minimax,
    ),
    "minimax, clip": (
        Minimax(alpha=3.0, optimizer=PairOptimizer(lr=0.1), clip=0.01, upper_batch_size=4),
        minimax,
    ),
    "minimax, adamw, warm-up": (
        Minimax(
            optimizer=PairOptimizer(kind="adamw", lr=0.05, weight_decay=0.1),
            alpha=3.0,
            warmup=2,
            batch_size=5,
        ),
        minimax,
    ),
    "dynamic-barrier": (DynamicBarrier(steps=3, inner_lr=0.3, lr=0.2, eta=0.7), dynamic_barrier),
    "dynamic-barrier, batches": (
        DynamicBarrier(steps=1, inner_lr=0.3, lr=0.2, eta=2.0, **BATCHES),
        dynamic_barrier,
    ),
    "fully-first-order, decay, batches": (
        FullyFirstOrder(steps=2, inner_lr=0.3, lr=0.2, decay=4 / 7, growth=1 / 3, **BATCHES),
        fully_first_order,
    ),
    "moreau-envelope": (
        MoreauEnvelope(inner_lr=0.3, lr=0.2, gamma=0.7, penalty=2.0),
        moreau_envelope,
    ),
    "moreau-envelope, batches": (
        MoreauEnvelope(inner_lr=0.3, lr=0.2, growth=0.3, **BATCHES),
        moreau_envelope,
    ),
    "value-free, batches": (ValueFree(steps=3, lr=0.2, gamma=3.0, **BATCHES), value_free),
}


@pytest.mark.parametrize("case", STRAIGHT)
def test_five_steps_equal_plain_gradients(case: str) -> None:
    generator, straight = STRAIGHT[case]
    problem = network_problem()  # θ enters f directly
    pipeline = method(generator, 0.5)
    state = pipeline.init(problem, 0)
    hand: dict[str, Any] = {
        "theta": problem.theta0,
        **dict.fromkeys(("y", "z", "omega"), problem.x0),
    }
    for k in range(5):
        state, _ = pipeline.step(problem, state)
        straight(problem, generator, 0.5, k, hand)
    # torch's clipping divides by the norm + 1e-6
    close = {"rtol": 1e-3, "atol": 1e-6} if "clip" in case else {"rtol": 1e-10, "atol": 1e-12}
    assert_same(state["theta"], hand["theta"], **close)
    assert_same(state["x"], {name: leaf.detach() for name, leaf in hand["y"].items()}, **close)
    kept = state["start"]["aux"]
    twins = {name for name in kept if name.split(".")[0] in ("omega", "z", "u")}
    for name in twins:
        twin, leaf = name.split(".", 1)
        assert_same(kept[name][0], hand[twin][leaf].detach(), **close)
    carried = {ValueGap, Minimax, FullyFirstOrder, MoreauEnvelope}
    assert bool(twins) == (type(generator) in carried)
