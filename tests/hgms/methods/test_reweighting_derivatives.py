"""Gradients of reweighting methods by autograd and by differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, finite_differences, normal, rejects
from torch import Tensor

from hgms.methods.reweighting import Agreement, LearningToReweight, MwNet, SmallLoss, shared
from hgms.methods.reweighting.learning_to_reweight import aligned
from hgms.methods.reweighting.mw_net import meta_gradient, weight_logits
from hgms.runs import missing_traits
from hgms.runs.traits import ensure_fits
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.quadratic import Quadratic
from hgms_core import Data, Key, Problem, Rows, Tree

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


SIZE = 30


BATCH = 8


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


def rows_at(p: Problem, number: int) -> tuple[Tree, Tree]:
    """The lower rows and the validation rows of lower step ``number``."""
    below, _ = shared.lower_batch(p, 0, number, BATCH)
    above, _ = p.upper_data["differentiate"].sample(Key(0).fold("upper", number), 5)
    return below, above


def test_the_alignment_is_the_derivative_by_a_rows_weight() -> None:
    p = problem()
    below, above = rows_at(p, 0)
    x = leaves_of(p.x0)
    direction = slopes(upper({}, x, above), x)
    gains = aligned(Rows(losses=losses), p.x0, direction, below)

    def value(eps: Tree) -> Tensor:
        at = leaves_of(p.x0)
        slope = slopes((eps["e"] * losses(at, below)).sum(), at)
        return upper({}, {name: p.x0[name] - slope[name] for name in at}, above)

    assert_same(
        -gains,
        finite_differences(value, {"e": torch.zeros(BATCH, dtype=F64)})["e"],
        rtol=1e-6,
        atol=1e-9,
    )


def test_where_no_row_helps_only_the_regulariser_acts() -> None:
    p = problem()
    against = evolve(
        p, f=lambda theta, x, batch: -losses(x, p.lower_data.whole).sum() * 0 - x["w"].sum() * 0
    )
    state, record = stepped(
        LearningToReweight(steps=1, lr=0.1, momentum=0.0, optimizer="sgd", memory=0.9, keep="last"),
        against,
        1,
    )
    x = leaves_of(p.x0)
    slope = slopes(decay({}, x, {}), x)
    assert_same(state["x"], {name: p.x0[name] - 0.1 * slope[name] for name in x}, **CLOSE)
    assert record["kept"] == 0
    assert state["theta"]["logits"].sigmoid().allclose(torch.full((SIZE,), 0.9 / 1.9, dtype=F64))


def test_the_meta_gradient_is_that_of_differences() -> None:
    p = problem()
    net = MwNet(hidden=3).init(p, 1)["net"]
    below, above = rows_at(p, 0)
    inputs = losses(p.x0, below)

    def ahead(theta: Tree) -> Tree:
        x = leaves_of(p.x0)
        weights = weight_logits(theta, inputs).sigmoid().detach()
        slope = slopes((weights * losses(x, below)).mean() + decay({}, x, below), x)
        return {name: p.x0[name] - 0.4 * slope[name] for name in x}

    x = leaves_of(ahead(net))
    gains = 0.4 * aligned(Rows(losses=losses), p.x0, slopes(upper({}, x, above), x), below)
    wanted = finite_differences(lambda theta: upper({}, ahead(theta), above), net)
    assert_same(meta_gradient(net, inputs, gains), wanted, rtol=1e-5, atol=1e-9)


METHODS: dict[str, Callable[..., Any]] = {
    "learning-to-reweight": lambda **more: LearningToReweight(
        steps=2, batch_size=BATCH, upper_batch_size=5, **more
    ),
    "mw-net": lambda **more: MwNet(steps=2, batch_size=BATCH, upper_batch_size=5, **more),
    "small-loss": lambda **more: SmallLoss(steps=2, batch_size=BATCH, estimate_steps=3, **more),
    "agreement": lambda **more: Agreement(steps=2, batch_size=BATCH, **more),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_problem_without_weights_of_rows_is_refused(name: str) -> None:
    with rejects("not-supported", "method") as caught:
        ensure_fits(METHODS[name](), Quadratic())
    assert "row" in caught.value.message
    assert missing_traits(METHODS[name](), HyperCleaning()) == {}
    with rejects("not-supported", "method"):
        METHODS[name]().init(Quadratic().problem(0, torch.device("cpu"), F64), 0)
    bare = evolve(
        problem(),
        upper_data={role: problem().upper_data[role] for role in ("differentiate", "select")},
    )
    with rejects("no-rows-for-role", "method", "keep"):
        METHODS[name](keep="best").init(bare, 0)
