"""Components whose steps are compiled do what they do as they are written, costs included, and compile once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from helpers import assert_same, network_problem
from torch import Tensor
from torch.fx import GraphModule

from hgms_core import Key, Pipeline, Problem
from hgms_graphs import Programs, launch, programs
from hgms_hypergradients import Carried
from hgms_outer import Sgd
from hgms_penalty import DynamicBarrier, GradientNorm, Minimax, ValueGap
from hgms_selectors import BestOfN
from hgms_single_loop import Soba

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, ...]]:
    """Programs are the traced graphs themselves, without the compiler; the shapes for which one was made."""
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


def same_run(method: Any, problem: Problem, compiled: list[Any], steps: int = 3, settled: int = 1) -> Programs:
    """Runs the method both ways; after ``settled`` steps no further program is made."""
    compiler = Programs()
    fast, plain = evolve(problem, compiler=compiler), evolve(problem, compiler=None)
    state, expected = method.init(fast, 0), method.init(plain, 0)
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
    compiler, x = Programs(), {"x": torch.ones(2)}
    for value in (2.0, 3.0):
        for where in (None, compiler):
            assert launch(where, ("scaled",), lambda numbers, x: numbers[0] * x["x"], (value,), x).tolist() == [value, value]


GENERATORS = {
    "value-gap": ValueGap(steps=2, lr=0.05, inner_lr=0.05, gamma=5.0, gamma_steps=4, batch_size=6, upper_batch_size=5),
    "value-gap, whole": ValueGap(lr=0.05, inner_lr=0.05, gamma_steps=0),
    "value-gap, momentum": ValueGap(lr=0.05, inner_lr=0.05, momentum=0.9, normalise=False, batch_size=6, count=2),
    "gradient-norm": GradientNorm(lr=0.05, gamma=5.0, gamma_steps=4, batch_size=6, upper_batch_size=5),
    "gradient-norm, whole": GradientNorm(lr=0.05, gamma_steps=0, momentum=0.5),
    "minimax": Minimax(lr=0.05, alpha=3.0, stage_factor=1.5, stage_steps=2, batch_size=6, clip=0.1),
    "minimax, sgd": Minimax(optimizer="sgd", lr=0.05, lr_u=0.02, weight_decay=0.1, alpha=3.0, batch_size=6),
    "minimax, adamw": Minimax(optimizer="adamw", lr=0.05, weight_decay=0.1, schedule="cosine", batch_size=6),
    "minimax, two": Minimax(optimizer="adamw", lr=0.05, count=2, noise=0.1, carry_rule="per-branch", batch_size=6),
    "dynamic-barrier": DynamicBarrier(steps=3, inner_lr=0.05, lr=0.05, batch_size=6, upper_batch_size=5),
    "soba": Soba(lr=0.05, v_lr=0.05, decay=0.5, batch_size=6, upper_batch_size=5),
    "soba, bounded": Soba(lr=0.05, v_lr=0.5, max_norm=0.01),
}  # fmt: skip


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
def test_single_loop_steps(generator: Any, compiled: list[Any]) -> None:
    selector = BestOfN(mode="loop")
    same_run(
        Pipeline(generator=generator, selector=selector, hypergradient=Carried(), outer=Sgd(lr=0.1)),
        network_problem(),
        compiled,
    )


def test_a_warm_up_is_a_program_of_its_own(compiled: list[Any]) -> None:
    generator = Minimax(optimizer="adamw", lr=0.05, warmup=2, batch_size=6)
    method = Pipeline(generator=generator, selector=BestOfN(), hypergradient=Carried(), outer=Sgd(lr=0.1))
    same_run(method, network_problem(), compiled, steps=5, settled=3)


@pytest.mark.parametrize(
    "generator", [Minimax(optimizer="adamw", blocks=1, block_every=1), ValueGap(steps=30)], ids=["blocks", "long"]
)
def test_what_would_be_compiled_again_and_again_or_too_long_is_not(generator: Any, compiled: list[Any]) -> None:
    problem = network_problem()
    problem = evolve(problem, compiler=Programs())
    generator.propose(problem, problem.theta0, generator.init(problem, Key(0)), Key(0))
    assert not compiled
