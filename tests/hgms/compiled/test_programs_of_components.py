"""Components whose steps are compiled do what they do as they are written, costs included, and
compile once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import assert_same, network_problem
from torch import Tensor
from torch.fx import GraphModule

from hgms.compiled import Programs, launch, programs
from hgms.generators.branches import Branches, Trajectory
from hgms.generators.branches import backward as back
from hgms.generators.penalty import (
    DynamicBarrier,
    FullyFirstOrder,
    GradientNorm,
    Minimax,
    MoreauEnvelope,
    ValueFree,
    ValueGap,
)
from hgms.generators.single_loop import Soba
from hgms.generators.ula import Ula
from hgms.hypergradients import Carried, Implicit, OneStep, ThroughStep, Unrolled
from hgms.methods import LearnedStart
from hgms.outer import Sgd
from hgms.selectors import BestOfN, First, Worst
from hgms.solvers import MINRES, FixedPoint, Neumann
from hgms_core import Branch, Key, Pipeline, Problem

pytestmark = pytest.mark.extended

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, ...]]:
    """Programs are the traced graphs themselves, without the compiler; the shapes for which one
    was made.
    """
    made: list[tuple[torch.Size, ...]] = []

    def as_traced(graph: GraphModule, leaves: Sequence[Tensor]) -> Callable[..., Any]:
        shapes = tuple(leaf.shape for leaf in leaves)
        made.append(shapes)

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            assert tuple(leaf.shape for leaf in inputs) == shapes
            return graph(*inputs)

        return run

    monkeypatch.setattr(programs, "_inductor", as_traced)
    return made


def same_run(
    method: Any, problem: Problem, compiled: list[Any], steps: int = 3, settled: int = 1
) -> Programs:
    """Runs the method both ways; after ``settled`` steps no further program is made."""
    compiler = Programs()
    fast = evolve(problem, compiler=compiler)
    plain = evolve(problem, compiler=None)
    state = method.init(fast, 0)
    expected = method.init(plain, 0)
    count = 0
    for step in range(steps):
        progress = step / steps
        state, record = method.step(fast, state, progress)
        expected, reference = method.step(plain, expected, progress)
        assert_same(record, reference, **CLOSE)
        assert_same(state, expected, **CLOSE)
        if step + 1 == settled:
            count = len(compiled)
    assert count == len(compiled) == len(compiler._kept) > 0
    assert set(compiler.outcomes.values()) == {"compiled"}
    return compiler


def test_numbers_are_an_argument_of_a_program() -> None:
    compiler = Programs()
    x = {"x": torch.ones(2)}
    for value in (2.0, 3.0):
        for where in (None, compiler):
            assert launch(
                where, ("scaled",), lambda numbers, x: numbers[0] * x["x"], (value,), x
            ).tolist() == [value, value]


GENERATORS = {
    "value-gap": ValueGap(
        steps=2, lr=0.05, inner_lr=0.05, gamma=5.0, gamma_steps=4, batch_size=6, upper_batch_size=5
    ),
    "value-gap, whole": ValueGap(lr=0.05, inner_lr=0.05, gamma_steps=0),
    "value-gap, momentum": ValueGap(
        lr=0.05, inner_lr=0.05, momentum=0.9, normalise=False, batch_size=6, count=2
    ),
    "gradient-norm": GradientNorm(
        lr=0.05, gamma=5.0, gamma_steps=4, batch_size=6, upper_batch_size=5
    ),
    "gradient-norm, whole": GradientNorm(lr=0.05, gamma_steps=0, momentum=0.5),
    "minimax": Minimax(lr=0.05, alpha=3.0, stage_factor=1.5, stage_steps=2, batch_size=6, clip=0.1),
    "minimax, sgd": Minimax(
        optimizer="sgd", lr=0.05, lr_u=0.02, weight_decay=0.1, alpha=3.0, batch_size=6
    ),
    "minimax, adamw": Minimax(
        optimizer="adamw", lr=0.05, weight_decay=0.1, schedule="cosine", batch_size=6
    ),
    "minimax, two": Minimax(
        optimizer="adamw", lr=0.05, count=2, noise=0.1, carry_rule="per-branch", batch_size=6
    ),
    "dynamic-barrier": DynamicBarrier(
        steps=3, inner_lr=0.05, lr=0.05, batch_size=6, upper_batch_size=5
    ),
    "fully-first-order": FullyFirstOrder(
        steps=2, lr=0.05, inner_lr=0.05, decay=0.5, batch_size=6, upper_batch_size=5
    ),
    "moreau-envelope": MoreauEnvelope(lr=0.05, inner_lr=0.05, batch_size=6, upper_batch_size=5),
    "value-free": ValueFree(steps=2, lr=0.05, batch_size=6, upper_batch_size=5),
    "soba": Soba(lr=0.05, v_lr=0.05, decay=0.5, batch_size=6, upper_batch_size=5),
    "soba, bounded": Soba(lr=0.05, v_lr=0.5, max_norm=0.01),
}


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
def test_single_loop_steps(generator: Any, compiled: list[Any]) -> None:
    selector = BestOfN(mode="loop")
    same_run(
        Pipeline(
            generator=generator, selector=selector, hypergradient=Carried(), outer=Sgd(lr=0.1)
        ),
        network_problem(),
        compiled,
    )


def test_a_warm_up_is_a_program_of_its_own(compiled: list[Any]) -> None:
    generator = Minimax(optimizer="adamw", lr=0.05, warmup=2, batch_size=6)
    method = Pipeline(
        generator=generator, selector=BestOfN(), hypergradient=Carried(), outer=Sgd(lr=0.1)
    )
    same_run(method, network_problem(), compiled, steps=5, settled=3)


@pytest.mark.parametrize(
    "generator",
    [Minimax(optimizer="adamw", blocks=1, block_every=1), ValueGap(steps=30)],
    ids=["blocks", "long"],
)
def test_what_would_be_compiled_again_and_again_or_too_long_is_not(
    generator: Any, compiled: list[Any]
) -> None:
    problem = network_problem()
    problem = evolve(problem, compiler=Programs())
    generator.propose(problem, problem.theta0, generator.init(problem, Key(0)), Key(0))
    assert not compiled


# --- the way back through a run

RULES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05},
    "momentum": {"lr": 0.05, "momentum": 0.9},
    "adamw": {"optimizer": "adamw", "lr": 0.02},
    "decay": {"optimizer": "adamw", "lr": 0.02, "weight_decay": 0.1},
    "clip": {"lr": 0.05, "clip": 0.02},
    "whole": {"lr": 0.05, "batch_size": None},
}


@pytest.mark.parametrize("keep_graph", [True, False])
@pytest.mark.parametrize("fields", RULES.values(), ids=RULES)
def test_unrolled_branches(fields: dict[str, Any], keep_graph: bool, compiled: list[Any]) -> None:
    generator = Branches(
        **{"count": 1, "steps": 6, "batch_size": 6, **fields}, keep_graph=keep_graph
    )
    method = Pipeline(
        generator=generator, selector=First(), hypergradient=Unrolled(), outer=Sgd(lr=0.1)
    )
    assert {"path", "way back"} <= set(same_run(method, network_problem(), compiled).outcomes)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("keep_graph", [True, False])
@pytest.mark.parametrize("rule", ["momentum", "decay"])
def test_unrolled_trajectories_end_anywhere(
    rule: str, keep_graph: bool, every: int, compiled: list[Any]
) -> None:
    problem = network_problem()
    compiler = Programs()
    generator = Trajectory(
        **{"steps": 7, "every": every, "batch_size": 6, **RULES[rule]}, keep_graph=keep_graph
    )
    start = generator.init(problem, Key(0))
    fast, plain = (
        generator.propose(evolve(problem, compiler=where), problem.theta0, start, Key(1))
        for where in (compiler, None)
    )
    assert_same(fast.x, plain.x, **CLOSE)
    assert_same(fast.losses, plain.losses, **CLOSE)
    assert fast.cost == plain.cost
    for index in range(plain.count):
        for last in (None, 2):
            gradients = []
            costs = []
            for candidates in (fast, plain):
                theta = {
                    name: leaf.detach().requires_grad_() for name, leaf in problem.theta0.items()
                }
                assert candidates.replay is not None
                x, cost = candidates.replay(torch.tensor(index), theta, last)
                value = sum((leaf**2).sum() for leaf in x.values())
                gradients.append(torch.autograd.grad(value, list(theta.values())))
                costs.append(cost)
            assert_same(gradients[0], gradients[1], **CLOSE)
            assert costs[0] == costs[1]
    assert set(compiler.outcomes) == {"path", "way back"}
    assert len(compiled) == 2, "whatever iterate is chosen"


def test_a_learned_start_is_reached_through_programs(compiled: list[Any]) -> None:
    generator = Trajectory(steps=6, lr=0.05, batch_size=6, keep_graph=True)
    pipeline = Pipeline(
        generator=generator,
        selector=Worst(mode="loop"),
        hypergradient=Unrolled(),
        outer=Sgd(lr=0.1),
        answer="last",
    )
    same_run(LearnedStart(method=pipeline), network_problem(), compiled)


def test_large_steps_keep_their_graphs(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(back, "SMALL", 10)
    problem = evolve(network_problem(), compiler=Programs())
    generator = Trajectory(steps=4, batch_size=6, keep_graph=True)
    generator.propose(problem, problem.theta0, generator.init(problem, Key(0)), Key(0))
    assert not compiled


# --- hypergradients

HYPERGRADIENTS: dict[str, Any] = {
    "fresh": Implicit(
        solver=Neumann(lr=0.1, steps=3), batches="fresh", batch_size=6, upper_batch_size=5
    ),
    "fresh, forward": Implicit(
        solver=FixedPoint(lr=0.1, max_steps=3), batches="fresh", batch_size=6, strategy="jvp"
    ),
    "one-step": OneStep(lr=0.1, batch_size=6, upper_batch_size=5),
    "one-step, whole": OneStep(lr=0.1),
    "through": ThroughStep(derivative="exact", upper_batch_size=5),
    "through its own": ThroughStep(derivative="exact", batch="own"),
}


@pytest.mark.parametrize("hypergradient", HYPERGRADIENTS.values(), ids=HYPERGRADIENTS)
def test_hypergradients(hypergradient: Any, compiled: list[Any]) -> None:
    generator = Branches(
        count=1, steps=2, lr=0.05, schedule="cosine-restarts", period=5, batch_size=6
    )
    method = Pipeline(
        generator=generator, selector=First(), hypergradient=hypergradient, outer=Sgd(lr=0.1)
    )
    same_run(method, network_problem(), compiled)


SOLVERS = [
    MINRES(ridge=0.1, rtol=1e-8),
    MINRES(max_steps=4),
    Neumann(lr=0.2, steps=25),
    Neumann(lr=50.0, steps=40),
    FixedPoint(lr=0.5, rtol=1e-4),
    FixedPoint(lr=0.5, max_steps=13),
    FixedPoint(lr=50.0),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_iterations_of_solvers(solver: Any, compiled: list[Any]) -> None:
    problem = network_problem()
    compiler = Programs()
    implicit = Implicit(solver=solver, batch_size=12)
    for seed in range(2):
        branch = Branch(x={name: (1 + seed) * leaf for name, leaf in problem.x0.items()})
        fast, plain = (
            implicit.estimate(
                evolve(problem, compiler=where), problem.theta0, branch, Key(seed), {"v": None}
            )[0]
            for where in (compiler, None)
        )
        assert_same(fast.value, plain.value, rtol=1e-7, atol=1e-9)
        assert fast.outcome is plain.outcome
        assert fast.cost == plain.cost
        assert int(fast.iterations) == int(plain.iterations)  # type: ignore[arg-type]
        if not seed:
            count = len(compiled)
    assert count == len(compiled)
    assert {"minres", "richardson"} & set(compiler.outcomes)


@pytest.mark.parametrize("mode", ["stacked", "loop"])
@pytest.mark.parametrize("batch_size", [6, None])
def test_langevin_steps(mode: Any, batch_size: int | None, compiled: list[Any]) -> None:
    problem = network_problem()
    compiler = Programs()
    generator = Ula(
        count=3,
        steps=6,
        lr=0.05,
        temperature=0.01,
        carry_rule="per-branch",
        mode=mode,
        batch_size=batch_size,
    )
    fast = plain = generator.init(problem, Key(0))
    for step in range(2):
        ends = []
        for state, where in ((fast, compiler), (plain, None)):
            ends.append(
                generator.propose(evolve(problem, compiler=where), problem.theta0, state, Key(step))
            )
        assert_same(ends[0].x, ends[1].x, **CLOSE)
        assert_same(ends[0].losses, ends[1].losses, **CLOSE)
        assert ends[0].cost == ends[1].cost
        assert ends[0].replay is not None
        assert_same(
            ends[0].replay(torch.tensor(2), problem.theta0, None)[0], ends[0].at(2), **CLOSE
        )
        fast, plain = ({"x": end.x} for end in ends)
    assert len(compiled) == 1
