"""Methods that weigh lower rows: each against a loop of its own with torch's autograd and
optimisers, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, normal
from torch import Tensor

from hgms.compiled import Programs
from hgms.methods.reweighting import Agreement, LearningToReweight, MwNet, SmallLoss, shared
from hgms.tasks.cleaning import HyperCleaning
from hgms_core import Data, Key, Problem, Rows, Tree

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SIZE = 30
BATCH = 8
COSTS = ("lower_gradients", "upper_gradients", "cross_products", "rows")


def losses(x: Tree, batch: Tree) -> Tensor:
    score = torch.tanh(batch["a"] @ x["w"]) @ x["v"]
    return torch.nn.functional.softplus(-batch["y"] * score)


def decay(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return 0.02 * (x["w"].square().sum() + x["v"].square().sum())


def upper(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return losses(x, batch).mean()


def lower(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return (theta["logits"][batch["index"]].sigmoid() * losses(x, batch)).mean() + decay(
        theta, x, batch
    )


def table(rows: int, seed: int, wrong: int = 0) -> Tree:
    a = normal(rows, 3, seed=seed)
    y = torch.sign(a[:, 0] + 0.5 * a[:, 1])
    return {"a": a, "y": torch.where(torch.arange(rows) < wrong, -y, y)}


def problem(rows: int = SIZE, wrong: int = 12, many: int = 9) -> Problem:
    return Problem(
        theta0={"logits": torch.zeros(rows, dtype=F64), "other": torch.ones((), dtype=F64)},
        x0={"w": 0.5 * normal(3, 4, seed=1), "v": 0.5 * normal(4, seed=2)},
        g=lower,
        f=upper,
        lower_data=table(rows, 10, wrong),
        upper_data={
            "differentiate": Data.of(table(many, 20)),
            "select": Data.of(table(many - 2, 30)),
            "stop": Data.of(table(40, 40)),
        },
        fresh=lambda key: {
            "w": normal(3, 4, seed=key.derive() % 1000),
            "v": normal(4, seed=key.derive() % 999),
        },
        rows=Rows(losses=losses, regulariser=decay),
    )


def stepped(method: Any, p: Problem, steps: int = 2, progress: float = 0.0) -> tuple[Any, Any]:
    state = method.init(p, 0)
    record = {}
    for _ in range(steps):
        state, record = method.step(p, state, progress)
    return state, record


def leaves_of(x: Tree) -> Tree:
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in x.items()}


def slopes(value: Tensor, leaves: Tree, graph: bool = False) -> Tree:
    return dict(
        zip(
            leaves,
            torch.autograd.grad(value, list(leaves.values()), create_graph=graph),
            strict=True,
        )
    )


class Optimiser:
    """torch's own, on a tree."""

    def __init__(self, kind: str, x: Tree, lr: float) -> None:
        self.x = leaves_of(x)
        parameters = list(self.x.values())
        self.own: Any = (
            torch.optim.Adam(parameters, lr)
            if kind == "adam"
            else torch.optim.SGD(parameters, lr, momentum=0.9)
        )

    def step(self, value: Tensor, lr: float | None = None) -> None:
        if lr is not None:
            self.own.param_groups[0]["lr"] = lr
        self.own.zero_grad()
        value.backward()
        self.own.step()


def rows_at(p: Problem, number: int) -> tuple[Tree, Tree]:
    """The lower rows and the validation rows of lower step ``number``."""
    below, _ = shared.lower_batch(p, 0, number, BATCH)
    above, _ = p.upper_data["differentiate"].sample(Key(0).fold("upper", number), 5)
    return below, above


def test_the_rows_of_a_step() -> None:
    p = problem()
    epoch = [shared.lower_batch(p, 3, number, BATCH)[0]["index"].tolist() for number in range(3)]
    assert len({row for rows in epoch for row in rows}) == 3 * BATCH, (
        "no row comes twice in an epoch"
    )
    assert epoch != [
        shared.lower_batch(p, 3, number, BATCH)[0]["index"].tolist() for number in range(3, 6)
    ]
    for size in (None, 2 * SIZE):
        batch, count = shared.lower_batch(p, 3, 5, size)
        assert (batch["index"].tolist(), count) == (list(range(SIZE)), SIZE)
    above, count = shared.joint_batches(p, Key(0), 8)
    assert ([len(batch["y"]) for batch in above], count) == ([4, 4], 8)
    assert [share for share, _ in shared.joint_parts(p)] == [9 / 16, 7 / 16]


# --- learning to reweight


def test_learning_to_reweight_is_its_look_ahead() -> None:
    """ε = 0 by a graph through the look-ahead step; α = 0.7 does not matter."""
    p = problem()
    method = LearningToReweight(
        steps=3,
        lr=0.2,
        optimizer="sgd",
        memory=0.9,
        batch_size=BATCH,
        upper_batch_size=5,
        keep="last",
    )
    state, record = stepped(method, p)

    own = Optimiser("sgd", p.x0, 0.2)
    means = torch.ones(SIZE, dtype=F64)
    for number in range(6):
        below, above = rows_at(p, number)
        eps = torch.zeros(BATCH, dtype=F64, requires_grad=True)
        x = leaves_of(own.x)
        slope = slopes((eps * losses(x, below)).sum(), x, graph=True)
        ahead = {name: x[name] - 0.7 * slope[name] for name in x}
        weights = (-torch.autograd.grad(upper({}, ahead, above), eps)[0]).clamp_min(0)
        weights = weights / weights.sum()
        value = (weights * losses(own.x, below)).sum() + decay({}, own.x, below)
        means[below["index"]] = 0.9 * means[below["index"]] + 0.1 * BATCH * weights
        own.step(value)
    assert_same(state["x"], {name: leaf.detach() for name, leaf in own.x.items()}, **CLOSE)
    assert_same(state["averages"], means, **CLOSE)
    theta, x = method.result(state)
    assert torch.allclose(theta["logits"].sigmoid(), means / (1 + means))
    assert_same(theta["other"], p.theta0["other"])
    assert torch.isclose(record["lower_loss"], value)
    assert record["kept"] == (weights > 0).double().mean()
    assert [record[f"cost_{name}"] for name in COSTS] == [6, 6, 6, 6 * (2 * BATCH + 5)]


# --- MW-Net


def test_mw_net_is_its_three_steps() -> None:
    """Virtual, meta and actual step with a graph through the virtual one, and torch's
    optimisers.
    """
    p = problem()
    method = MwNet(
        steps=3,
        lr=0.1,
        optimizer="adam",
        look_ahead=0.4,
        meta_lr=0.05,
        hidden=7,
        batch_size=BATCH,
        upper_batch_size=5,
        keep="last",
    )
    state = first = method.init(p, 0)
    for _ in range(2):
        state, record = method.step(p, state, 0.0)

    own = Optimiser("adam", p.x0, 0.1)
    net = Optimiser("adam", first["net"], 0.05)

    def weights(theta: Tree, loss: Tensor) -> Tensor:
        hidden = torch.relu(torch.outer(loss, theta["hidden.weight"]) + theta["hidden.bias"])
        return torch.sigmoid(hidden @ theta["output.weight"] + theta["output.bias"])

    for number in range(6):
        below, above = rows_at(p, number)
        x = leaves_of(own.x)
        loss = losses(x, below)
        slope = slopes(
            (weights(net.x, loss.detach()) * loss).mean() + decay({}, x, below), x, graph=True
        )
        net.step(upper({}, {name: x[name] - 0.4 * slope[name] for name in x}, above))
        loss = losses(own.x, below)
        own.step((weights(net.x, loss.detach()).detach() * loss).mean() + decay({}, own.x, below))
    close = {"rtol": 1e-8, "atol": 1e-9}  # Adam divides by roots of small numbers
    assert_same(state["net"], {name: leaf.detach() for name, leaf in net.x.items()}, **close)
    assert_same(state["x"], {name: leaf.detach() for name, leaf in own.x.items()}, **close)
    every = weights(net.x, losses(own.x, p.lower_data.whole)).detach()
    assert_same(method.result(state)[0]["logits"].sigmoid(), every, **close)
    assert [record[f"cost_{name}"] for name in COSTS[:3]] == [12, 6, 6]
    assert record["cost_upper_values"] == 2


# --- small-loss selection


@pytest.mark.parametrize("tilt", [0.0, 0.5])
def test_small_loss_is_co_teaching(tilt: float) -> None:
    p = problem()
    method = SmallLoss(
        steps=3,
        noise_rate=0.4,
        forget_epochs=1.0,
        tilt=tilt,
        lr=0.05,
        batch_size=BATCH,
        upper_batch_size=8,
        keep="last",
    )
    state, record = stepped(method, p)

    first = method.init(p, 0)
    pair = [Optimiser("adam", first["x"], 0.05), Optimiser("adam", first["peer"], 0.05)]
    picked = torch.zeros(SIZE, dtype=F64)
    kept = []
    for number in range(6):
        below, _ = shared.lower_batch(p, 0, number, BATCH)
        above, _ = shared.joint_batches(p, Key(0).fold(number), 8)
        count = round((1 - 0.4 * min(number * BATCH / SIZE, 1.0)) * BATCH)
        rows = [losses(net.x, below).sort().indices[:count] for net in pair]
        for net, chosen in zip(pair, reversed(rows), strict=True):
            joint = 9 / 16 * upper({}, net.x, above[0]) + 7 / 16 * upper({}, net.x, above[1])
            net.step(losses(net.x, below)[chosen].mean() + decay({}, net.x, below) + tilt * joint)
        votes = torch.zeros(BATCH, dtype=F64)
        for chosen in rows:
            votes[chosen] += 1
        picked[below["index"]] = 10 * (votes - 1)
        kept.append(count)
    assert kept == [8, 7, 6, 5, 5, 5]
    for name, net in zip(("x", "peer"), pair, strict=True):
        assert_same(
            state[name],
            {leaf: value.detach() for leaf, value in net.x.items()},
            rtol=1e-8,
            atol=1e-9,
        )
    assert_same(method.result(state)[0]["logits"], picked)
    assert record["kept"] == 5 / 8
    assert (record["cost_lower_gradients"], record["cost_upper_gradients"]) == (12, 24 * (tilt > 0))


def test_the_rate_of_noise_is_estimated_from_validation_rows() -> None:
    p = problem(rows=400, wrong=120, many=80)
    method = SmallLoss(steps=1, estimate_steps=60, batch_size=100)
    state, record = stepped(method, p, 1)
    assert record["noise_rate"] == pytest.approx(0.3, abs=0.08)
    again, record = method.step(p, state, 0.1)
    assert again["noise_rate"] == state["noise_rate"]
    clean, _ = stepped(method, problem(rows=400, wrong=0, many=80), 1)
    assert clean["noise_rate"] == pytest.approx(0.0, abs=0.08)


# --- agreement


def test_agreement_is_training_and_choosing_by_turns() -> None:
    p = problem()
    method = Agreement(
        steps=8, lr=0.1, tilt=0.5, share=0.75, batch_size=BATCH, upper_batch_size=None, keep="last"
    )
    state, record = stepped(method, p)

    kept = torch.zeros(SIZE, dtype=torch.bool)
    for turn in range(2):
        key = Key(0).fold("round", turn)
        own = Optimiser("adam", p.initial(key) if turn else p.x0, 0.1)
        for number in range(8):
            below, _ = shared.lower_batch(p, key.derive(), number, BATCH)
            weights = torch.where(kept, 10.0, -10.0).double().sigmoid()[below["index"]]
            joint = torch.cat(
                [losses(own.x, p.upper_data[role].whole) for role in ("differentiate", "select")]
            ).mean()
            value = (weights * losses(own.x, below)).mean() + decay({}, own.x, below) + 0.5 * joint
            own.step(value, 0.05 * (1 + math.cos(math.pi * number / 8)))
        usual = torch.quantile(losses(own.x, p.upper_data["stop"].whole), 0.75)
        kept = losses(own.x, p.lower_data.whole) <= usual
    assert 0 < kept.sum() < SIZE
    assert_same(
        state["x"], {name: leaf.detach() for name, leaf in own.x.items()}, rtol=1e-8, atol=1e-9
    )
    assert_same(method.result(state)[0]["logits"], torch.where(kept, 10.0, -10.0).double())
    assert record["kept"] == kept.double().mean()
    assert (
        record["cost_lower_gradients"],
        record["cost_upper_gradients"],
        record["cost_upper_values"],
    ) == (16, 32, 4)


# --- all of them

METHODS: dict[str, Callable[..., Any]] = {
    "learning-to-reweight": lambda **more: LearningToReweight(
        steps=2, batch_size=BATCH, upper_batch_size=5, **more
    ),
    "mw-net": lambda **more: MwNet(steps=2, batch_size=BATCH, upper_batch_size=5, **more),
    "small-loss": lambda **more: SmallLoss(steps=2, batch_size=BATCH, estimate_steps=3, **more),
    "agreement": lambda **more: Agreement(steps=2, batch_size=BATCH, **more),
}


def a_module() -> Problem:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)
    )
    return Problem.of_module(
        model.double(),
        lambda model, batch: torch.nn.functional.softplus(
            -batch["y"] * model(batch["a"]).squeeze(-1)
        ),
        table(SIZE, 10, 12),
        table(20, 20),
    )


@pytest.mark.parametrize("name", METHODS)
def test_they_run_on_every_problem_that_weighs_its_rows(name: str) -> None:
    cleaning = HyperCleaning(train_size=30, validation_size=20, test_size=5, hidden=3).problem(
        0, torch.device("cpu"), F64
    )
    for p in (cleaning, a_module()):
        theta, x = METHODS[name]().result(stepped(METHODS[name](), p)[0])
        assert all(bool(leaf.isfinite().all()) for leaf in (*theta.values(), *x.values()))
        assert not any(torch.equal(leaf, p.x0[part]) for part, leaf in x.items() if leaf.dim() > 1)


@pytest.mark.parametrize("name", METHODS)
def test_the_best_state_is_that_of_the_lowest_loss_on_stop_rows(name: str) -> None:
    p = problem()
    method = METHODS[name](keep="best")
    state = method.init(p, 0)
    losses_at = []
    for step in range(4):
        state, record = method.step(p, state, step / 4)
        losses_at.append(float(record["stop_loss"]))
        theta, x = method.result(state)
        own = upper(theta, x, p.upper_data["stop"].whole)
        assert float(own) == pytest.approx(min(losses_at), rel=1e-12)


@pytest.mark.extended
@pytest.mark.parametrize("name", METHODS)
def test_steps_as_programs_are_the_same_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, without the compiler; programs are made in the first outer step alone."""
    count: list[int] = []

    def as_traced(graph: Any, leaves: Any) -> Callable[[Any], Any]:
        count.append(len(leaves))
        return lambda inputs: graph(*inputs)

    monkeypatch.setattr("hgms.compiled.programs._inductor", as_traced)
    method = METHODS[name]()
    plain = problem()
    compiler = Programs()
    fast = evolve(plain, compiler=compiler)
    state = method.init(fast, 0)
    expected = method.init(plain, 0)
    seen = 0
    for step in range(2):
        state, record = method.step(fast, state, step / 2)
        expected, reference = method.step(plain, expected, step / 2)
        assert_same(record, reference, rtol=1e-9, atol=1e-11)
        assert_same(state, expected, rtol=1e-9, atol=1e-11)
        seen = seen or len(count)
    assert set(compiler.outcomes.values()) == {"compiled"}
    assert 0 < seen == len(count)
