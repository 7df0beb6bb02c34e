"""A schedule over several outer steps: each factor multiplies the first rate."""

from __future__ import annotations

import torch
from support.helpers import F64, assert_same, normal

from hgms.outer import Schedule, Sgd, TorchOptimizer

COSINE = Schedule(kind="cosine", final=0.1)


def test_torch_optimisers_scale_the_first_rate_at_every_step() -> None:
    ours = Sgd(lr=0.2, schedule=COSINE)
    theirs = TorchOptimizer(optimizer="SGD", settings={"lr": 0.2}, schedule=COSINE)
    ends = []
    for outer in (ours, theirs):
        theta = {"t": torch.ones(3, dtype=F64)}
        state = outer.init(theta)
        for step in range(3):
            slope = {"t": normal(3, seed=step)}
            theta, state = outer.step(theta, slope, state, 0.3 * (step + 1))
        ends.append(theta)
    assert_same(*ends, rtol=1e-14)
