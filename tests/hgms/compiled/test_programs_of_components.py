"""Components whose steps are compiled do what they do as they are written, costs included, and
compile once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import assert_same, network_problem
from support.programs import as_traced, same_run

from hgms.compiled import Programs, programs
from hgms.generators.branches import Branches, Trajectory
from hgms.generators.branches import backward as back
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
from hgms.generators.single_loop import Soba
from hgms.generators.ula import Ula
from hgms.hypergradients import Carried, Implicit, OneStep, ThroughStep, Unrolled
from hgms.methods import LearnedStart
from hgms.optim import SGD, AdamW, Clip, Cosine
from hgms.outer import Sgd
from hgms.selectors import First, Worst
from hgms.solvers import MINRES, FixedPoint, Neumann
from hgms_core import Key, Pipeline

pytestmark = pytest.mark.extended

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
PROBLEM = network_problem()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "compile_graph", as_traced)


def pipeline(generator: Any, hypergradient: Any, selector: Any = None, **fields: Any) -> Pipeline:
    return Pipeline(
        generator=generator,
        selector=selector or First(),
        hypergradient=hypergradient,
        outer=Sgd(lr=0.1),
        **fields,
    )


ROWS = {"batch_size": 6, "upper_batch_size": 5}
GENERATORS = {
    "value-gap": ValueGap(steps=2, lr=0.05, inner_lr=0.05, gamma=5.0, ramp=Ramp(steps=4), **ROWS),
    "value-gap, momentum": ValueGap(
        lr=0.05, inner_lr=0.05, momentum=0.9, normalise=False, batch_size=6, count=2
    ),
    "value-gap, whole": ValueGap(lr=0.05, inner_lr=0.05, ramp=Ramp(steps=0)),
    "gradient-norm": GradientNorm(lr=0.05, gamma=5.0, ramp=Ramp(steps=4), momentum=0.5, **ROWS),
    "minimax": Minimax(
        optimizer=PairOptimizer(lr=0.05),
        alpha=3.0,
        stages=Stages(factor=1.5, steps=2),
        batch_size=6,
        clip=0.1,
    ),
    "minimax, sgd": Minimax(
        optimizer=PairOptimizer(lr=0.05, lr_u=0.02, weight_decay=0.1), alpha=3.0, batch_size=6
    ),
    "minimax, adamw": Minimax(
        optimizer=PairOptimizer(kind="adamw", lr=0.05, weight_decay=0.1, schedule="cosine"),
        count=2,
        noise=0.1,
        carry_rule="per-branch",
        batch_size=6,
    ),
    "dynamic-barrier": DynamicBarrier(steps=3, inner_lr=0.05, lr=0.05, **ROWS),
    "fully-first-order": FullyFirstOrder(steps=2, lr=0.05, inner_lr=0.05, decay=0.5, **ROWS),
    "moreau-envelope": MoreauEnvelope(lr=0.05, inner_lr=0.05, **ROWS),
    "value-free": ValueFree(steps=2, lr=0.05, **ROWS),
    "soba": Soba(lr=0.05, v_lr=0.05, decay=0.5, **ROWS),
    "soba, bounded": Soba(lr=0.05, v_lr=0.5, max_norm=0.01),
}


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
def test_single_loop_steps(generator: Any) -> None:
    same_run(pipeline(generator, Carried()), PROBLEM)


@pytest.mark.parametrize(
    "generator",
    [
        Minimax(optimizer=PairOptimizer(kind="adamw"), blocks=1, block_every=1),
        ValueGap(steps=30),
        Trajectory(steps=4, batch_size=6, keep_path="graph"),
    ],
    ids=["blocks", "long", "large"],
)
def test_what_would_be_compiled_again_and_again_or_is_too_long_or_large_is_not(
    generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(programs, "compile_graph", lambda *given: made.append(given))
    monkeypatch.setattr(back, "SMALL", 10)
    problem = evolve(PROBLEM, compiler=Programs())
    generator.propose(problem, problem.theta0, generator.init(problem, Key(0)), Key(0))
    assert not made


# --- the way back through a run

RULES: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": Clip(optimizer=SGD(lr=0.05, momentum=0.9), clip=0.02)},
    "decay": {"optimizer": AdamW(lr=0.02, weight_decay=0.1)},
    "whole": {"optimizer": SGD(lr=0.05), "batch_size": None},
}


@pytest.mark.parametrize("keep_path", ["none", "graph"])
@pytest.mark.parametrize("rule", RULES)
def test_unrolled_branches(rule: str, keep_path: Any) -> None:
    fields = {"count": 1, "steps": 6, "batch_size": 6, **RULES[rule]}
    method = pipeline(Branches(**fields, keep_path=keep_path), Unrolled())
    assert {"path", "backward pass"} <= set(same_run(method, PROBLEM).outcomes)


@pytest.mark.parametrize(
    ("rule", "keep_path", "every"), [("momentum", "graph", 1), ("decay", "none", 3)]
)
def test_unrolled_trajectories_end_anywhere(rule: str, keep_path: Any, every: int) -> None:
    compiler = Programs()
    fields = {"steps": 7, "every": every, "batch_size": 6, **RULES[rule]}
    generator = Trajectory(**fields, keep_path=keep_path)
    start = generator.init(PROBLEM, Key(0))
    proposals = [
        generator.propose(evolve(PROBLEM, compiler=where), PROBLEM.theta0, start, Key(1))
        for where in (compiler, None)
    ]
    fast, plain = proposals
    assert_same((fast.x, fast.losses), (plain.x, plain.losses), **CLOSE)
    assert fast.cost == plain.cost
    for index, last in [(index, last) for index in range(plain.count) for last in (None, 2)]:
        ends = []
        for candidates in proposals:
            theta = {name: leaf.detach().requires_grad_() for name, leaf in PROBLEM.theta0.items()}
            assert candidates.replay is not None
            x, cost = candidates.replay(torch.tensor(index), theta, last)
            value = sum((leaf**2).sum() for leaf in x.values())
            ends.append((torch.autograd.grad(value, list(theta.values())), cost))
        assert_same(*ends, **CLOSE)
    # whatever iterate is chosen
    assert compiler.outcomes == {"path": "compiled", "backward pass": "compiled"}
    assert len(compiler._kept) == 2


# --- estimators

ESTIMATORS: dict[str, Any] = {
    "fresh": Implicit(solver=Neumann(lr=0.1, steps=3), batches="fresh", **ROWS),
    "fresh, forward": Implicit(
        solver=FixedPoint(lr=0.1, max_steps=3), batches="fresh", batch_size=6, strategy="jvp"
    ),
    "one-step": OneStep(lr=0.1, **ROWS),
    "one-step, whole": OneStep(lr=0.1),
    "through": ThroughStep(derivative="exact", upper_batch_size=5),
    "through its own": ThroughStep(derivative="exact", batch="own"),
}


@pytest.mark.parametrize(
    "method",
    [
        *(
            pipeline(
                Branches(
                    count=1,
                    steps=2,
                    optimizer=SGD(lr=0.05, schedule=Cosine(period=5)),
                    batch_size=6,
                ),
                estimator,
            )
            for estimator in ESTIMATORS.values()
        ),
        LearnedStart(
            method=pipeline(
                Trajectory(steps=6, optimizer=SGD(lr=0.05), batch_size=6, keep_path="graph"),
                Unrolled(),
                Worst(mode="loop"),
                answer="last",
            )
        ),
    ],
    ids=[*ESTIMATORS, "a learned start"],
)
def test_estimators(method: Any) -> None:
    same_run(method, PROBLEM)


SOLVERS = [
    MINRES(ridge=0.1, rtol=1e-8),
    Neumann(lr=0.2, steps=25),
    Neumann(lr=50.0, steps=40),
    FixedPoint(lr=0.5, rtol=1e-4),
    FixedPoint(lr=0.5, max_steps=13),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_iterations_of_solvers(solver: Any) -> None:
    method = pipeline(
        Branches(count=1, steps=1, optimizer=SGD(lr=0.05)), Implicit(solver=solver, batch_size=12)
    )
    compiler = same_run(method, PROBLEM, steps=2, rtol=1e-7, atol=1e-9)
    assert {"minres", "richardson"} & set(compiler.outcomes)


@pytest.mark.parametrize(("mode", "batch_size"), [("stacked", 6), ("loop", None)])
def test_langevin_steps(mode: Any, batch_size: int | None) -> None:
    generator = Ula(
        count=3,
        steps=6,
        lr=0.05,
        temperature=0.01,
        carry_rule="per-branch",
        mode=mode,
        batch_size=batch_size,
    )
    same_run(pipeline(generator, OneStep(lr=0.1), Worst(mode="loop")), PROBLEM)
