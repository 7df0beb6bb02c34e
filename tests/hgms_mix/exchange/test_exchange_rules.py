"""A mixture that changes while others train: which rows it takes, and how it scores sources."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hgms_core import Key
from hgms_mix.exchange.plan import Plan
from hgms_mix.exchange.rules import Alignment, Losses

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
)
SIZES = {"copy": 10, "noise": 14}


class Projected(torch.optim.AdamW):
    """Adam with second moments of another shape than the parameters, as GaLore has them."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for leaf in group["params"]:
                self.state[leaf]["exp_avg_sq"] = torch.ones(2, 2)


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def shares(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)


class TestPlan:
    def test_each_source_gives_all_its_rows_before_one_comes_again(self) -> None:
        plan = Plan({"a": 7, "b": 30}, Key(3))
        plan.begin(0, shares(0.5, 0.5))
        plan.begin(23, shares(0.9, 0.1))
        plan.begin(90, shares(0.2, 0.8))
        drawn = [plan.row(place) for place in range(200)]
        for name, size in (("a", 7), ("b", 30)):
            rows = [row for source, row in drawn if source == name]
            for first in range(0, len(rows) - size + 1, size):
                assert sorted(rows[first : first + size]) == list(range(size))

    def test_sources_come_as_often_as_their_weight_says(self) -> None:
        plan = Plan({"a": 5, "b": 5, "c": 5}, Key(0))
        plan.begin(0, shares(0.6, 0.0, 0.4))
        plan.begin(4000, shares(0.1, 0.2, 0.7))
        for places, weights in (
            (range(4000), (0.6, 0.0, 0.4)),
            (range(4000, 8000), (0.1, 0.2, 0.7)),
        ):
            counts = Counter(plan.row(place)[0] for place in places)
            for name, weight in zip("abc", weights, strict=True):
                assert abs(counts[name] - 4000 * weight) <= 4 * math.sqrt(
                    4000 * weight * (1 - weight)
                )

    def test_rows_do_not_depend_on_when_they_are_asked_for(self) -> None:
        """Asked in any order, before or after later mixtures are known, and from a history."""
        first = Plan(SIZES, Key(1))
        second = Plan(SIZES, Key(1))
        early = []
        for start, weights in (
            (0, shares(0.5, 0.5)),
            (5, shares(0.2, 0.8)),
            (2000, shares(0.7, 0.3)),
        ):
            first.begin(start, weights)
            second.begin(start, weights)
            early += [first.row(place) for place in range(start, start + 5)]
        third = Plan(SIZES, Key(1))
        third.replay(second.history())
        late = [second.row(place) for place in (*range(10), *range(2000, 2005))]
        assert early == late
        assert [third.row(place) for place in range(2100)[::-1]] == [
            second.row(place) for place in range(2100)
        ][::-1]


class TestRules:
    """A linear model in float64, whose gradients are written down."""

    @pytest.fixture
    def model(self) -> nn.Module:
        model = nn.Linear(3, 1, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(shares(0.3, -0.2, 0.5)[None])
        return model

    @staticmethod
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).exp().mean()  # the gradient at w of a row a is a·exp(w·a)

    @staticmethod
    def gradient(model: nn.Module, batch: Tensor) -> Tensor:
        w = next(model.parameters()).detach()[0]
        return (batch * (batch @ w).exp()[:, None]).mean(0)

    def batches(self) -> tuple[dict[str, Tensor], Tensor]:
        draw = torch.Generator().manual_seed(0)
        *lower, upper = torch.randn(4, 5, 3, generator=draw, dtype=torch.float64)
        return dict(zip("abc", lower, strict=True)), upper

    def test_alignment_is_the_cosine_of_gradients(self, model: nn.Module) -> None:
        lower, upper = self.batches()
        scores = Alignment().scores(
            self.loss, model, lower, upper, torch.optim.SGD(model.parameters(), lr=1.0)
        )
        wanted = self.gradient(model, upper)
        for score, batch in zip(scores, lower.values(), strict=True):
            own = self.gradient(model, batch)
            assert float(score) == pytest.approx(cosine(wanted, own), abs=1e-13)

    def test_alignment_is_in_the_metric_of_the_trainer_s_adam(self, model: nn.Module) -> None:
        lower, upper = self.batches()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0
        )
        v = torch.zeros(3, dtype=torch.float64)
        for batch in (lower["a"], lower["b"]):
            v = 0.9 * v + 0.1 * self.gradient(model, batch) ** 2
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            optimizer.step()
        scores = Alignment().scores(self.loss, model, lower, upper, optimizer)
        wanted = self.gradient(model, upper)
        for score, batch in zip(scores, lower.values(), strict=True):
            own = self.gradient(model, batch)
            u = own / ((0.9 * v + 0.1 * own**2).sqrt() + 1e-3)
            assert float(score) == pytest.approx(cosine(wanted, u), abs=1e-12)

    @pytest.mark.parametrize(
        "optimizer",
        [
            lambda leaves: transformers.optimization.Adafactor(leaves),
            lambda leaves: torch.optim.Adafactor(leaves),
            lambda leaves: torch.optim.Adamax(leaves),
            lambda leaves: torch.optim.RMSprop(leaves),
            lambda leaves: torch.optim.Adagrad(leaves),
            lambda leaves: Projected(leaves),
        ],
    )
    def test_alignment_under_another_state_is_the_plain_cosine(self, optimizer: Any) -> None:
        """Also of a vector, whose second moment Adafactor calls what Adam calls it."""
        draw = torch.Generator().manual_seed(1)
        model = nn.Linear(3, 1).double()
        with torch.no_grad():
            model.weight.copy_(torch.randn(1, 3, generator=draw))
        lower, upper = self.batches()
        expected = Alignment().scores(self.loss, model, lower, upper, None)
        other = optimizer(model.parameters())
        before = [leaf.detach().clone() for leaf in model.parameters()]
        self.loss(model, lower["a"]).backward()
        other.step()
        with torch.no_grad():
            for leaf, value in zip(model.parameters(), before, strict=True):
                leaf.copy_(value)
        assert any(other.state.values())
        scores = Alignment().scores(self.loss, model, lower, upper, other)
        assert scores.tolist() == expected.tolist()

    def test_losses_are_those_above_the_reference(self, model: nn.Module) -> None:
        lower, _ = self.batches()
        plain = [float(self.loss(model, batch).detach()) for batch in lower.values()]
        rule = Losses(reference={"c": 0.5, "b": 2.0, "a": 1.0})
        assert rule.scores(self.loss, model, lower, None, None).tolist() == pytest.approx(
            [value - base for value, base in zip(plain, (1.0, 2.0, 0.5), strict=True)], abs=1e-14
        )
        assert Losses().scores(self.loss, model, lower, None, None).tolist() == pytest.approx(
            plain, abs=1e-14
        )
