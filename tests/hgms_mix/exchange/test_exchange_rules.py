"""A mixture that changes while others train: which rows it takes, and how it scores sources, of a
linear model in float64 whose gradients are written down.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.helpers import F64, normal
from torch import Tensor, nn

from hgms_core import Key
from hgms_mix.exchange.plan import Plan
from hgms_mix.exchange.rules import Alignment

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
)


def planned(sizes: dict[str, int], *changes: tuple[int, tuple[float, ...]]) -> Plan:
    plan = Plan(sizes, Key(3))
    for start, weights in changes:
        plan.begin(start, torch.tensor(weights, dtype=F64))
    return plan


def test_sources_come_as_often_as_their_weight_says_and_give_all_rows_before_one_comes_again() -> (
    None
):
    sizes = {"a": 7, "b": 30}
    plan = planned(sizes, (0, (0.6, 0.4)), (4000, (0.1, 0.9)))
    drawn = [plan.row(place) for place in range(8000)]
    for first, share in ((0, 0.6), (4000, 0.1)):
        count = sum(name == "a" for name, _ in drawn[first : first + 4000])
        assert abs(count - 4000 * share) <= 4 * math.sqrt(4000 * share * (1 - share))
    for name, size in sizes.items():
        rows = [row for source, row in drawn if source == name]
        epochs = [rows[first : first + size] for first in range(0, len(rows) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)


def test_rows_do_not_depend_on_when_they_are_asked_for() -> None:
    """Asked in any order, and from a history."""
    sizes = {"copy": 10, "noise": 14}
    second, third = planned(sizes, (0, (0.5, 0.5)), (500, (0.2, 0.8))), planned(sizes)
    third.replay(second.history())
    backwards = [third.row(place) for place in range(900)[::-1]]
    assert backwards[::-1] == [second.row(place) for place in range(900)]


def linear() -> nn.Module:
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.3)
    return model


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).exp().mean()  # the gradient at w of a row a is a·exp(w·a)


def gradient(model: nn.Module, batch: Tensor) -> Tensor:
    w = next(model.parameters()).detach()[0]
    return (batch * (batch @ w).exp()[:, None]).mean(0)


LOWER = {name: normal(5, 3, seed=seed) for seed, name in enumerate("abc")}
UPPER = normal(5, 3, seed=3)


def test_alignment_is_the_cosine_of_gradients_in_the_metric_of_the_trainer_s_adam() -> None:
    model = linear()
    adam = torch.optim.AdamW(
        model.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0
    )
    v = torch.zeros(3, dtype=F64)
    for batch in (LOWER["a"], LOWER["b"]):
        v = 0.9 * v + 0.1 * gradient(model, batch) ** 2
        adam.zero_grad()
        loss(model, batch).backward()
        adam.step()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    wanted = gradient(model, UPPER)
    own = torch.stack([gradient(model, batch) for batch in LOWER.values()])
    scaled = own / ((0.9 * v + 0.1 * own**2).sqrt() + 1e-3)
    for optimizer, directions, atol in ((sgd, own, 1e-13), (adam, scaled, 1e-12)):
        scores = Alignment().scores(loss, model, LOWER, UPPER, optimizer)
        expected = directions @ wanted / (directions.norm(dim=1) * wanted.norm())
        torch.testing.assert_close(scores, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "optimizer", [transformers.optimization.Adafactor, torch.optim.Adafactor, torch.optim.RMSprop]
)
def test_alignment_under_another_state_is_the_plain_cosine(optimizer: Any) -> None:
    """Also of a vector, whose second moment Adafactor calls what Adam calls it."""
    model = nn.Linear(3, 1).double()
    other = optimizer(model.parameters())
    loss(model, LOWER["a"]).backward()
    other.step()
    assert any(other.state.values())
    plain, under = (
        Alignment().scores(loss, model, LOWER, UPPER, each).tolist() for each in (None, other)
    )
    assert under == plain
