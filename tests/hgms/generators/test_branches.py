"""Branches against torch.optim run by hand on the same batches, and everything that may differ
between branches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.branch_steps import PROBLEM, ByHand, drawn, propose
from support.helpers import F64, KEY, assert_same, network_problem, normal
from torch import Tensor, optim
from torch.optim import lr_scheduler

from hgms.adapters import from_losses
from hgms.generators.branches import Branches, Diversity
from hgms.generators.ula import Ula
from hgms.optim import SGD, AdamW, Clip, Cosine, LowerOptimizer, Torch
from hgms.runs import run
from hgms_core import Tree

CLOSE = {"rtol": 1e-10, "atol": 1e-13}
SPREAD = [(0.25, 0.5), (1.0, 1.0), (4.0, 2.0)]
OPTIMIZERS: dict[str, tuple[LowerOptimizer, Callable[..., torch.optim.Optimizer]]] = {
    # the lower optimiser, and that of torch for a branch with factors of its rate and decay
    "sgd": (SGD(lr=0.3, weight_decay=0.2), lambda p, r, d: optim.SGD(p, 0.3, weight_decay=0.2)),
    "momentum": (SGD(lr=0.2, momentum=0.8), lambda p, r, d: optim.SGD(p, 0.2, momentum=0.8)),
    "adamw": (
        AdamW(lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p, r, d: optim.AdamW(p, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "spread": (
        AdamW(lr=0.05, weight_decay=0.2),
        lambda p, r, d: optim.AdamW(p, lr=0.05 * r, weight_decay=0.2 * d),
    ),
}
SPREADS: Any = {"lr_spread": (0.25, 4.0), "decay_spread": (0.5, 2.0)}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@every_optimizer
@pytest.mark.parametrize("mode", ["loop", "stacked"])
def test_each_branch_is_torch_optim(name: str, mode: str) -> None:
    optimizer, build = OPTIMIZERS[name]
    spread = SPREADS if name == "spread" else {}
    cases = [("independent", 5, None), ("shared", 5, 0.02), ("independent", None, None)]
    for batches, batch_size, clip in [*cases, ("independent", 5, 0.2)]:
        branches = Branches(
            count=3,
            steps=5,
            batch_size=batch_size,
            mode=mode,
            diversity=Diversity(batches=batches, whole_batch_noise=0.0, **spread),
            optimizer=optimizer if clip is None else Clip(optimizer=optimizer, clip=clip),
        )
        found = propose(branches)
        for i, (rate, decay) in enumerate(SPREAD):
            hand = ByHand(
                lambda p, rate=rate, decay=decay: build(p, rate, decay),  # type: ignore[misc]
                clip=clip,
            )
            assert_same(found.at(i), hand.run(drawn(branches, i)), **CLOSE)


@pytest.mark.parametrize(
    ("cosine", "schedule"),
    [
        (Cosine(floor=0.2), lambda o: lr_scheduler.CosineAnnealingLR(o, 7, eta_min=0.1)),
        # a period of 5 steps of 7 an outer step: restarts fall inside and across outer steps
        (
            Cosine(floor=0.2, period=5),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, eta_min=0.1),
        ),
    ],
    ids=["cosine", "restarts"],
)
def test_schedules_are_those_of_torch(cosine: Cosine, schedule: Any) -> None:
    branches = Branches(
        count=2, steps=7, optimizer=SGD(lr=0.5, schedule=cosine), batch_size=5, carry_rule="base"
    )
    state = branches.init(PROBLEM, KEY)
    with warnings.catch_warnings():
        hand = ByHand(lambda p: optim.SGD(p, lr=0.5), schedule)
        for outer in range(1 if cosine.period is None else 3):
            key = KEY.fold(outer)
            found = propose(branches, start=state, key=key)
            assert_same(found.at(0), hand.run(drawn(branches, 0, key)), **CLOSE)
            state = branches.carry(state, found, torch.tensor(1), key, PROBLEM)


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({"noise": 0.1, "noise_scale": "absolute"}, (1.0, 1.0)),
        ({"noise": 0.1, "noise_scale": "relative"}, (3.0, 0.0)),
        ({}, (3.0, 1.0)),  # on whole batches, where it also starts what is zero
    ],
    ids=["absolute", "relative", "whole batches"],
)
def test_noise_has_the_asked_size_and_spares_branch_zero(
    options: dict[str, Any], units: tuple[float, float]
) -> None:
    x0 = {"w": 3 * torch.ones(400, 5, dtype=F64), "b": torch.zeros(300, dtype=F64)}
    problem = evolve(PROBLEM, x0=x0, g=lambda t, x, b: x["w"].sum())
    x = propose(
        Branches(count=3, steps=1, optimizer=SGD(lr=1e-300), diversity=Diversity(**options)),
        problem,
    ).x
    for name, unit in zip(("w", "b"), units, strict=True):
        noise = (x[name] - x0[name]).reshape(3, -1)
        assert not noise[0].any()
        # four standard errors of a standard deviation, and of a product of independent numbers
        error = 4 * 0.1 * unit / noise.shape[1] ** 0.5
        assert noise[1:].std(1).tolist() == pytest.approx([0.1 * unit] * 2, abs=error / 2**0.5)
        assert abs(float((noise[1] * noise[2]).mean())) <= error * 0.1 * unit


@pytest.mark.parametrize(
    ("settings", "told_apart"),
    [
        ({"batch_size": 1000}, False),
        ({"diversity": Diversity(decay_spread=(0.5, 2.0))}, False),  # of a decay of 0
        ({"batch_size": 5}, True),
        ({"diversity": Diversity(lr_spread=(0.5, 2.0))}, True),
        (
            {"diversity": Diversity(decay_spread=(0.5, 2.0)), "optimizer": SGD(weight_decay=0.1)},
            True,
        ),
        ({"diversity": Diversity(noise=0.05)}, True),
        ({"count": 1}, True),
    ],
)
def test_where_nothing_else_tells_the_branches_apart_noise_does(
    settings: dict[str, Any], told_apart: bool
) -> None:
    """And where something does, nothing has changed."""
    branches = Branches(**{"count": 3, "steps": 2, **settings})
    none = evolve(branches.diversity, whole_batch_noise=0.0)
    x, plain = (propose(b).x["w"] for b in (branches, evolve(branches, diversity=none)))
    assert torch.equal(x[0], plain[0])
    assert torch.equal(x, plain) is told_apart
    assert len(torch.unique(x, dim=0)) == branches.count
    assert told_apart or len(torch.unique(plain, dim=0)) == 1


@pytest.mark.parametrize(
    "generator",
    [
        Branches(),
        Branches(batch_size=4, optimizer=Clip(optimizer=SGD(), clip=0.1)),
        Branches(
            batch_size=4, diversity=Diversity(batches="shared"), optimizer=AdamW(weight_decay=0.1)
        ),
        Branches(
            batch_size=4, optimizer=Torch(build=lambda leaves: torch.optim.RMSprop(leaves, lr=0.01))
        ),
        Ula(lr=0.1, temperature=0.5),
        Ula(lr=0.1, temperature=0.5, batch_size=4),
    ],
    ids=["whole", "own", "shared", "torch", "chains", "chains of batches"],
)
def test_branches_of_a_loss_that_vmap_cannot_evaluate_are_those_of_the_loop(generator: Any) -> None:
    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        calls.append(1)
        return network.g(theta, x, batch) / max(1.0, x["w"].abs().max().item())

    calls: list[int] = []
    network = network_problem()
    ends = []
    counts = []
    for mode in ("auto", "loop"):
        calls.clear()
        ends.append(propose(evolve(generator, count=3, steps=4, mode=mode), evolve(network, g=g)))
        counts.append(len(calls))
    assert counts[0] - counts[1] == 2, "tried once, not per step"
    assert_same((ends[0].x, ends[0].losses), (ends[1].x, ends[1].losses))


def test_a_gradient_through_adamw_at_a_stationary_point_is_bounded() -> None:
    """Ridge regression whose run begins at its solution: F'(0) = 0.29, and was 9e4."""
    a = normal(40, 3)
    y = a @ torch.tensor([1.0, -1.0, 0.5], dtype=F64) + normal(40, seed=1)
    a, y = a.float(), y.float()

    def fit(x: Tensor, batch: Tree) -> Tensor:
        return 0.5 * (batch["a"] @ x - batch["y"]).square().mean()

    matrix = a[:20].T @ a[:20] / 20 + torch.eye(3)
    problem = from_losses(
        theta0=torch.tensor(0.0),
        x0=torch.linalg.solve(matrix, a[:20].T @ y[:20] / 20),
        f=lambda theta, x, batch: fit(x, batch),
        g=lambda theta, x, batch: fit(x, batch) + 0.5 * theta.exp() * x.square().sum(),
        lower_data={"a": a[:20], "y": y[:20]},
        upper_data={"a": a[20:], "y": y[20:]},
    )
    plain = {"name": "hg-baseline", "generator": {"optimizer": {"eps_root": 0.0}}}
    bounded, unbounded = (run(method, problem, "1 steps") for method in ("hg-baseline", plain))
    assert bounded.records[-1]["hypergradient_norm"] < 10
    assert "remarks" not in bounded.summary
    assert unbounded.records[-1]["hypergradient_norm"] > 1e3
