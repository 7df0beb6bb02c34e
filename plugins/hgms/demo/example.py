"""The example of the README: learn how much weight each of five data sources deserves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hgms.adapters import from_module
from hgms_core import Problem

METHODS = ("hg-implicit", "hg-ms", "uniform", "validation-only", "uniform-tilted")
"""Two methods that learn the weights, and three baselines with fixed weights."""


def make_problem(seed: int) -> Problem:
    """Five sources label rows by five rules. The 40 validation rows follow the rule of source 0."""
    torch.manual_seed(seed)
    rules = torch.randn(5, 20)

    def draw(source: Tensor) -> dict[str, Tensor]:
        point = torch.randn(len(source), 20)
        label = ((point * rules[source]).sum(1) > 0).long()
        return {"point": point, "label": label, "source": source}

    train = draw(torch.arange(400) % 5)
    validation = draw(torch.zeros(40, dtype=torch.long))
    test = draw(torch.zeros(1000, dtype=torch.long))
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 2))

    def loss(model: Any, batch: Any) -> Tensor:  # one loss per row
        return cross_entropy(model(batch["point"]), batch["label"], reduction="none")

    def lower(theta: Any, model: Any, batch: Any) -> Tensor:  # the training loss
        return (5 * theta.softmax(0)[batch["source"]] * loss(model, batch)).mean()

    def evaluate(theta: Any, model: Any) -> dict[str, Any]:  # reported, not used for learning
        return {"test_accuracy": (model(test["point"]).argmax(1) == test["label"]).float().mean()}

    return from_module(
        model, loss, train, validation, theta0=torch.zeros(5), lower=lower, evaluate=evaluate
    )
