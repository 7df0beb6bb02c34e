"""Losses and rows of users through whole runs: either the right numbers, or an error that names the
cause.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hgms.runs import run
from hgms_core import Problem

Rows = dict[str, Tensor]


def rows() -> tuple[Rows, Rows]:
    a = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    y = (a[:, 0] > 0).long()
    return {"a": a[:40], "y": y[:40]}, {"a": a[40:], "y": y[40:]}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def loss(model: nn.Module, batch: Rows) -> Tensor:
    return cross_entropy(model(batch["a"]), batch["y"], reduction="none")


def scaled(model: nn.Module, batch: Rows) -> Tensor:
    return loss(model, batch) / max(1.0, model(batch["a"]).abs().max().item())


LOOP = {"generator": {"mode": "loop"}, "selector": {"mode": "loop"}}


@pytest.mark.parametrize("method", ["hg-ms", "hg-ms-tilted", "random-search"])
def test_a_loss_that_cannot_be_stacked_gives_what_the_loop_gives(method: str) -> None:
    found = []
    for options in ({}, LOOP):
        table: dict[str, Any] = {"name": method, **options}
        made = Problem.of_module(network(), scaled, *rows())
        found.append(run(table, made, "1 steps", seed=0))
    assert torch.equal(found[0].theta, found[1].theta)
    assert found[0].summary["upper_loss"] == found[1].summary["upper_loss"]
