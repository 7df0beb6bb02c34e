"""Methods that weigh lower rows: each against a loop of its own with torch's autograd and
optimisers, in float64, and their gradients against differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, finite_differences, normal, rejects
from support.row_weights import table, weighing
from torch import Tensor

from hgms.generators import Branches
from hgms.hypergradients import Fixed
from hgms.methods.reweighting import (
    Agreement,
    LearningToReweight,
    MwNet,
    OutOfFoldFilter,
    SmallLoss,
    base,
)
from hgms.methods.reweighting.learning_to_reweight import alignments
from hgms.methods.reweighting.mw_net import meta_gradient, weight_logits
from hgms.outer import Sgd
from hgms.selectors import First
from hgms_core import Data, Key, Pipeline, Problem, Rows, Tree, detach

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
NEAR = {"rtol": 1e-8, "atol": 1e-9}  # Adam divides by roots of small numbers
SIZE = 30
BATCH = 8
COSTS = ("lower_gradients", "upper_gradients", "cross_products", "rows", "upper_values")


def losses(x: Tree, batch: Tree) -> Tensor:
    score = torch.tanh(batch["a"] @ x["w"]) @ x["v"]
    return torch.nn.functional.softplus(-batch["y"] * score)


def decay(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return 0.02 * (x["w"].square().sum() + x["v"].square().sum())


def problem(rows: int = SIZE, wrong: int = 12, many: int = 9) -> Problem:
    upper = {"differentiate": table(many, 20), "select": table(many - 2, 30), "stop": table(40, 40)}
    return weighing(
        losses,
        decay,
        table(rows, 10, wrong),
        {role: Data.of(rows) for role, rows in upper.items()},
        theta0={"logits": torch.zeros(rows, dtype=F64), "other": torch.ones((), dtype=F64)},
        x0={"w": 0.5 * normal(3, 4, seed=1), "v": 0.5 * normal(4, seed=2)},
        fresh=lambda key: {
            "w": normal(3, 4, seed=key.derive() % 1000),
            "v": normal(4, seed=key.derive() % 999),
        },
    )


def stepped(method: Any, p: Problem, steps: int = 2) -> tuple[Any, Any]:
    state = method.init(p, 0)
    for _ in range(steps):
        state, record = method.step(p, state, 0.0)
    return state, record


def costs(record: Any) -> list[int]:
    return [record[f"cost_{name}"] for name in COSTS]


def leaves_of(x: Tree) -> Tree:
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in x.items()}


def down(value: Tensor, x: Tree, rate: float) -> Tree:
    """A step down the slope of ``value``, with its graph."""
    grads = torch.autograd.grad(value, list(x.values()), create_graph=True)
    return {name: leaf - rate * grad for (name, leaf), grad in zip(x.items(), grads, strict=True)}


class Optimiser:
    """torch's own, on a tree."""

    def __init__(self, kind: str, x: Tree, lr: float) -> None:
        self.x = leaves_of(x)
        options = {} if kind == "Adam" else {"momentum": 0.9}
        self.own = getattr(torch.optim, kind)(list(self.x.values()), lr, **options)

    def step(self, value: Tensor, lr: float | None = None) -> None:
        self.own.param_groups[0]["lr"] = lr or self.own.param_groups[0]["lr"]
        self.own.zero_grad()
        value.backward()
        self.own.step()


def lower_rows(p: Problem, seed: int, number: int) -> Tree:
    """The lower rows of lower step ``number``, without the steps before it."""
    ((_, below),) = base.lower_batches(p, seed, range(number, number + 1), BATCH)
    return below


def rows_at(p: Problem, number: int) -> tuple[Tree, Tree]:
    """The lower rows and the validation rows of lower step ``number``."""
    below = lower_rows(p, 0, number)
    above, _ = p.upper_data["differentiate"].sample(Key(0).fold("upper", number), 5)
    return below, above


def test_the_rows_of_a_step() -> None:
    p = problem()
    epoch, following = (
        [
            batch["index"].tolist()
            for _, batch in base.lower_batches(p, 3, range(first, first + 3), BATCH)
        ]
        for first in (0, 3)
    )
    # a later start, within an epoch, changes nothing
    assert [lower_rows(p, 3, number)["index"].tolist() for number in range(6)] == epoch + following
    assert len({row for rows in epoch for row in rows}) == 3 * BATCH, "no row twice in an epoch"
    assert epoch != following
    for size in (None, 2 * SIZE):
        steps = list(base.lower_batches(p, 3, range(5, 7), size))
        assert [number for number, _ in steps] == [5, 6]
        assert [batch["index"].tolist() for _, batch in steps] == 2 * [list(range(SIZE))]
    above, count = base.joint_batches(p, Key(0), 8)
    shares = [share for share, _ in base.joint_parts(p)]
    assert ([len(batch["y"]) for batch in above], count, shares) == ([4, 4], 8, [9 / 16, 7 / 16])


# --- learning to reweight


def test_learning_to_reweight_is_its_look_ahead() -> None:
    """ε = 0 by a graph through the look-ahead step; α = 0.7 does not matter."""
    p = problem()
    sgd = {"lr": 0.2, "optimizer": "sgd", "memory": 0.9, "keep": "last"}
    method = LearningToReweight(steps=3, batch_size=BATCH, upper_batch_size=5, **sgd)
    state, record = stepped(method, p)

    own = Optimiser("SGD", p.x0, 0.2)
    means = torch.ones(SIZE, dtype=F64)
    for number in range(6):
        below, above = rows_at(p, number)
        eps = torch.zeros(BATCH, dtype=F64, requires_grad=True)
        x = leaves_of(own.x)
        ahead = losses(down((eps * losses(x, below)).sum(), x, 0.7), above).mean()
        weights = (-torch.autograd.grad(ahead, eps)[0]).clamp_min(0)
        weights = weights / weights.sum()
        value = (weights * losses(own.x, below)).sum() + decay({}, own.x, below)
        means[below["index"]] = 0.9 * means[below["index"]] + 0.1 * BATCH * weights
        own.step(value)
    assert_same([state["x"], state["averages"]], [detach(own.x), means], **CLOSE)
    theta, _ = method.result(state)
    assert_same(theta["logits"].sigmoid(), means / (1 + means), **CLOSE)
    assert_same(theta["other"], p.theta0["other"])
    assert torch.isclose(record["lower_loss"], value)
    assert record["kept"] == (weights > 0).double().mean()
    assert costs(record)[:4] == [6, 6, 6, 6 * (2 * BATCH + 5)]


def test_the_alignment_and_the_meta_gradient_are_those_of_differences() -> None:
    p = problem()
    below, above = rows_at(p, 0)

    def ahead(weights: Tensor, rate: float, more: float = 0.0) -> Tree:
        x = leaves_of(p.x0)
        return detach(down((weights * losses(x, below)).sum() + more * decay({}, x, {}), x, rate))

    def gains_at(x: Tree) -> Tensor:
        slope = torch.func.grad(lambda at: losses(at, above).mean())(x)
        return alignments(Rows(losses=losses), p.x0, slope, below)

    wanted = finite_differences(
        lambda eps: losses(ahead(eps["e"], 1.0), above).mean(), {"e": torch.zeros(BATCH, dtype=F64)}
    )
    assert_same(-gains_at(p.x0), wanted["e"], rtol=1e-6, atol=1e-9)

    net = MwNet(hidden=3).init(p, 1)["net"]
    inputs = losses(p.x0, below)

    def virtual(theta: Tree) -> Tree:
        return ahead(weight_logits(theta, inputs).sigmoid() / BATCH, 0.4, more=1.0)

    wanted = finite_differences(lambda theta: losses(virtual(theta), above).mean(), net)
    found = meta_gradient(net, inputs, 0.4 * gains_at(virtual(net)))
    assert_same(found, wanted, rtol=1e-5, atol=1e-9)


# --- MW-Net


def test_mw_net_is_its_three_steps() -> None:
    """Virtual, meta and actual step with a graph through the virtual one, and torch's
    optimisers.
    """
    p = problem()
    adam = {"lr": 0.1, "optimizer": "adam", "look_ahead": 0.4, "meta_lr": 0.05, "keep": "last"}
    method = MwNet(steps=3, hidden=7, batch_size=BATCH, upper_batch_size=5, **adam)
    state, record = stepped(method, p)

    own = Optimiser("Adam", p.x0, 0.1)
    net = Optimiser("Adam", method.init(p, 0)["net"], 0.05)

    def weights(loss: Tensor) -> Tensor:
        hidden = torch.outer(loss.detach(), net.x["hidden.weight"]) + net.x["hidden.bias"]
        return (torch.relu(hidden) @ net.x["output.weight"] + net.x["output.bias"]).sigmoid()

    def objective(x: Tree, below: Tree) -> Tensor:
        loss = losses(x, below)
        return (weights(loss) * loss).mean() + decay({}, x, below)

    for number in range(6):
        below, above = rows_at(p, number)
        x = leaves_of(own.x)
        net.step(losses(down(objective(x, below), x, 0.4), above).mean())
        own.step(objective(own.x, below))
    assert_same([state["net"], state["x"]], [detach(net.x), detach(own.x)], **NEAR)
    every = weights(losses(own.x, p.lower_data.whole)).detach()
    assert_same(method.result(state)[0]["logits"].sigmoid(), every, **NEAR)
    assert costs(record) == [12, 6, 6, record["cost_rows"], 2]


# --- small-loss selection


@pytest.mark.parametrize("tilt", [0.0, 0.5])
def test_small_loss_is_co_teaching(tilt: float) -> None:
    p = problem()
    options = {"noise_rate": 0.4, "forget_epochs": 1.0, "tilt": tilt, "lr": 0.05, "keep": "last"}
    method = SmallLoss(steps=3, batch_size=BATCH, upper_batch_size=8, **options)
    state, record = stepped(method, p)

    first = method.init(p, 0)
    pair = [Optimiser("Adam", first[name], 0.05) for name in ("x", "peer")]
    picked = torch.zeros(SIZE, dtype=F64)
    kept = []
    for number in range(6):
        below = lower_rows(p, 0, number)
        above, _ = base.joint_batches(p, Key(0).fold(number), 8)
        kept.append(round((1 - 0.4 * min(number * BATCH / SIZE, 1.0)) * BATCH))
        rows = [losses(net.x, below).sort().indices[: kept[-1]] for net in pair]
        for net, chosen in zip(pair, reversed(rows), strict=True):
            joint = [losses(net.x, part).mean() for part in above]
            fit = losses(net.x, below)[chosen].mean() + decay({}, net.x, below)
            net.step(fit + tilt * (9 / 16 * joint[0] + 7 / 16 * joint[1]))
        votes = torch.bincount(torch.cat(rows), minlength=BATCH).double()
        picked[below["index"]] = 10 * (votes - 1)
    assert kept == [8, 7, 6, 5, 5, 5]
    assert_same([state["x"], state["peer"]], [detach(net.x) for net in pair], **NEAR)
    assert_same(method.result(state)[0]["logits"], picked)
    assert [record["kept"], *costs(record)[:2]] == [5 / 8, 12, 24 * (tilt > 0)]


def test_the_rate_of_noise_is_estimated_once_from_validation_rows() -> None:
    method = SmallLoss(steps=1, estimate_steps=60, batch_size=100)
    for wrong, rate in ((120, 0.3), (0, 0.0)):
        p = problem(rows=400, wrong=wrong, many=80)
        state, record = stepped(method, p, 1)
        assert record["noise_rate"] == pytest.approx(rate, abs=0.08)
        assert method.step(p, state, 0.1)[0]["noise_rate"] == state["noise_rate"]


# --- agreement


def test_agreement_is_training_and_choosing_by_turns() -> None:
    p = problem()
    options = {"lr": 0.1, "tilt": 0.5, "share": 0.75, "keep": "last"}
    method = Agreement(steps=8, batch_size=BATCH, upper_batch_size=None, **options)
    state, record = stepped(method, p)

    logits = torch.full((SIZE,), -10.0, dtype=F64)
    upper = [p.upper_data[role].whole for role in ("differentiate", "select")]
    for turn in range(2):
        key = Key(0).fold("round", turn)
        own = Optimiser("Adam", p.initial(key) if turn else p.x0, 0.1)
        for number in range(8):
            below = lower_rows(p, key.derive(), number)
            fit = (logits[below["index"]].sigmoid() * losses(own.x, below)).mean()
            joint = torch.cat([losses(own.x, rows) for rows in upper]).mean()
            rate = 0.05 * (1 + math.cos(math.pi * number / 8))
            own.step(fit + decay({}, own.x, below) + 0.5 * joint, rate)
        usual = torch.quantile(losses(own.x, p.upper_data["stop"].whole), 0.75)
        kept = losses(own.x, p.lower_data.whole) <= usual
        logits = torch.where(kept, 10.0, -10.0).double()
    assert 0 < kept.sum() < SIZE
    assert_same([state["x"], method.result(state)[0]["logits"]], [detach(own.x), logits], **NEAR)
    assert record["kept"] == kept.double().mean()
    assert costs(record) == [16, 32, 0, record["cost_rows"], 4]


# --- the out-of-fold filter

PIPELINE = Pipeline(
    generator=Branches(), selector=First(), hypergradient=Fixed(), outer=Sgd(lr=1.0)
)


def test_the_filter_keeps_rows_that_models_of_other_folds_find_probable() -> None:
    p = problem()
    options = {"lr": 0.1, "tilt": 0.5, "share": 0.75, "upper_batch_size": None}
    method = OutOfFoldFilter(method=PIPELINE, folds=3, steps=8, batch_size=BATCH, **options)
    state, record = stepped(method, p, 1)

    key = Key(0).fold("filter")
    fold = key.fold("folds").indices(SIZE, SIZE, 1)[0].argsort() % 3
    assert fold.bincount().tolist() == [10, 10, 10]
    upper = [p.upper_data[role].whole for role in ("differentiate", "select")]
    kept = torch.zeros(SIZE, dtype=torch.bool)
    for number in range(3):
        weight = torch.where(fold == number, -10.0, 10.0).double().sigmoid()
        own_key = key.fold("fold", number)
        own = Optimiser("Adam", p.initial(own_key), 0.1)
        for step in range(8):
            below = lower_rows(p, own_key.derive(), step)
            fit = (weight[below["index"]] * losses(own.x, below)).mean()
            joint = torch.cat([losses(own.x, rows) for rows in upper]).mean()
            rate = 0.05 * (1 + math.cos(math.pi * step / 8))
            own.step(fit + decay({}, own.x, below) + 0.5 * joint, rate)
        usual = torch.quantile(losses(own.x, p.upper_data["stop"].whole), 0.75)
        kept |= (fold == number) & (losses(own.x, p.lower_data.whole) <= usual)
    assert 0 < kept.sum() < SIZE
    theta, x = method.result(state)
    assert_same(theta["logits"], torch.where(kept, 10.0, -10.0).double())

    # afterwards it is the inner method at this θ
    alone = evolve(p, theta0=theta)
    first, inner = PIPELINE.step(alone, PIPELINE.init(alone, 0))
    assert_same(x, first["x"])
    extra = [own - other for own, other in zip(costs(record), costs(inner), strict=True)]
    assert extra == [24, 48, 0, record["cost_rows"] - inner["cost_rows"], 6]
    again, _ = method.step(p, state)
    assert_same(again["x"], PIPELINE.step(alone, first)[0]["x"])


def test_the_filter_needs_stop_rows_and_a_pipeline() -> None:
    p = problem()
    data = {role: rows for role, rows in p.upper_data.items() if role != "stop"}
    with rejects("no-rows-for-role", "method"):
        OutOfFoldFilter(method=PIPELINE).init(evolve(p, upper_data=data), 0)
    with rejects("wrong-value", "method"):
        OutOfFoldFilter(method=Agreement())
    with rejects("out-of-range", "folds"):
        OutOfFoldFilter(method=PIPELINE, folds=1)


# --- all of them

METHODS: dict[str, Callable[..., Any]] = {
    "learning-to-reweight": lambda **more: LearningToReweight(
        steps=2, batch_size=BATCH, upper_batch_size=5, **more
    ),
    "mw-net": lambda **more: MwNet(steps=2, batch_size=BATCH, upper_batch_size=5, **more),
    "small-loss": lambda **more: SmallLoss(steps=2, batch_size=BATCH, estimate_steps=3, **more),
    "agreement": lambda **more: Agreement(steps=2, batch_size=BATCH, **more),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_best_state_is_that_of_the_lowest_loss_on_stop_rows(name: str) -> None:
    p, method = problem(), METHODS[name](keep="best")
    state = method.init(p, 0)
    losses_at = []
    for step in range(4):
        state, record = method.step(p, state, step / 4)
        losses_at.append(float(record["stop_loss"]))
        own = losses(method.result(state)[1], p.upper_data["stop"].whole).mean()
        assert float(own) == pytest.approx(min(losses_at), rel=1e-12)
    data = {role: rows for role, rows in p.upper_data.items() if role != "stop"}
    with rejects("no-rows-for-role", "method", "keep"):
        method.init(evolve(p, upper_data=data), 0)
