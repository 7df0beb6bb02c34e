"""Hypergradients of a language model in float64: against double backward and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import assert_same, finite_differences, rejects
from support.language_models import CPU, EXTENDED, noisy, problem_of, spec, task_of, text_files
from torch import Tensor

from hgms.gauss_newton import by_difference, gauss_newton
from hgms.generators.branches import Branches, Diversity
from hgms.generators.penalty import Minimax, PairOptimizer
from hgms.hypergradients import Implicit, ThroughStep, Unrolled
from hgms.optim import SGD, AdamW, Clip
from hgms.selectors import BestOfN
from hgms.solvers import CG, Neumann
from hgms_core import Branch, ConfigError, Cost, Key, LastStep, Problem, Sources, Tree
from hgms_mix.lm import Lora, Source

pytest.importorskip("transformers")
pytest.importorskip("peft")

KEY = Key(3).fold("step", 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    return text_files(tmp_path_factory.mktemp("texts"))


def one_step(optimizer: Any = SGD(lr=0.5), steps: int = 1) -> Branches:
    return Branches(
        count=3, steps=steps, optimizer=optimizer, diversity=Diversity(noise=0.05), batch_size=6
    )


def chosen(problem: Problem, generator: Branches, theta: Tree) -> Any:
    """The branch that is best at θ₀, run at θ."""
    start = generator.init(problem, KEY)
    first, again = (
        generator.propose(problem, at, start, KEY.fold("propose")) for at in (problem.theta0, theta)
    )
    selection = BestOfN().select(problem, problem.theta0, first, KEY.fold("select"))
    return again.branch(selection.index)


def hypergradients(problem: Problem, generator: Branches, *estimators: Any) -> list[Tensor]:
    branch = chosen(problem, generator, problem.theta0)
    return [
        estimator.estimate(
            problem, problem.theta0, *branch.as_candidates(), KEY.fold("differentiate"), {}
        )[0].value["logits"]
        for estimator in estimators
    ]


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(kind, marks=EXTENDED) for kind in ("gemma2", "llama", "qwen2"))]
)
def test_the_one_step_hypergradient_is_exact(files: dict[str, Source], kind: str) -> None:
    problem = problem_of(files, kind)
    generator = one_step()
    ways = [
        ThroughStep(batch="own", derivative=way) for way in ("exact", "per-source", "difference")
    ]
    exact, per_source, difference, double_backward = hypergradients(
        problem, generator, *ways, Unrolled()
    )
    size = float(exact.norm())
    assert size > 1e-4
    # Llama's kind normalise in float32, which bounds what can agree.
    double = kind == "gpt2"
    close = {"rtol": 1e-8, "atol": 1e-12} if double else {"rtol": 1e-4, "atol": 1e-6}
    assert_same([exact, per_source], 2 * [double_backward], **close)
    assert_same(difference, double_backward, rtol=1e-3, atol=2e-5 * size + close["atol"])
    upper = problem.upper_data["differentiate"].batch(None)
    slopes = finite_differences(
        lambda theta: problem.f(theta, chosen(problem, generator, theta).x, upper),
        problem.theta0,
        step=1e-4 if double else 1e-2,
    )
    within = {"rtol": 1e-5, "atol": 1e-8} if double else {"rtol": 5e-3, "atol": 1e-5}
    assert_same(slopes["logits"], exact, **within)


def test_the_last_of_several_steps_is_exact(files: dict[str, Source]) -> None:
    generator = one_step(SGD(lr=0.5, weight_decay=0.1, momentum=0.5), steps=3)
    ways = (ThroughStep(batch="own", derivative="exact"), Unrolled(last=1))
    exact, truncated = hypergradients(problem_of(files), generator, *ways)
    assert_same(exact, truncated, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("optimizer", [AdamW(), Clip(optimizer=SGD())])
def test_a_step_that_is_not_linear_is_refused(files: dict[str, Source], optimizer: Any) -> None:
    with rejects("not-supported", "generator", "optimizer", of=ConfigError):
        hypergradients(problem_of(files), one_step(optimizer), ThroughStep())


def test_differences_on_a_bfloat16_base_have_the_signs_of_the_exact_float32_direction(
    files: dict[str, Source],
) -> None:
    """The losses are computed in the base's precision, so that decides how far a difference
    reaches, not the adapters' type.
    """

    def on(base: str, estimator: Any) -> list[Tensor]:
        task = task_of(files, model=spec("gpt2", base), adapter=Lora(rank=4, alpha=8.0))
        problem = task.problem(0, CPU, torch.float32)
        assert problem.precision == getattr(torch, base)
        x = noisy(problem.x0, size=0.05)
        steps = [
            LastStep(x=x, batch=problem.lower_data.batch(index), rows=9, rate=0.1)
            for number in range(2)
            for index in problem.lower_data.draw(Key(number), 9, 1)
        ]
        branches = [
            Branch(x=x, replay=lambda theta, last: (x, Cost()), next_step=lambda key, at=at: at)
            for at in steps
        ]
        return [
            estimator.estimate(problem, problem.theta0, *branch.as_candidates(), Key(0), {})[
                0
            ].value["logits"]
            for branch in branches
        ]

    exact = on("float32", ThroughStep(derivative="exact"))
    for right, difference in zip(exact, on("bfloat16", ThroughStep()), strict=True):
        assert torch.equal(difference > 0, right > 0)
        assert float((difference - right).norm() / right.norm()) < 0.15


@pytest.mark.extended
@pytest.mark.parametrize(
    "saving",
    [{"checkpointing": True}, pytest.param({"micro_batch": 4}, marks=pytest.mark.extended)],
    ids=str,
)
def test_a_second_derivative_through_activations_computed_again(
    files: dict[str, Source], saving: dict[str, Any]
) -> None:
    """They are computed again with the attention kernel of the first time, whatever is allowed
    by then.
    """
    solvers = (CG(ridge=20.0, max_steps=2), Neumann(ridge=20.0, lr=1e-2, steps=2))
    ways = [*(Implicit(solver=solver, batch_size=6) for solver in solvers), Unrolled()]
    generator = evolve(one_step(steps=2), count=1)
    plain, saved = (
        hypergradients(problem_of(files, adapter=Lora(rank=2), **how), generator, *ways)
        for how in ({}, saving)
    )
    assert all(value.norm() > 1e-6 for value in plain)
    assert_same(saved, plain, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("fields", [{"average": "token"}, {"adapter": None}])
def test_the_lower_loss_says_its_logits(files: dict[str, Source], fields: dict[str, Any]) -> None:
    """Of all scored tokens, and what is made of them; with dropout, and of a whole model's
    parameters. Products with the Gauss–Newton matrix by forward mode and by differences of the
    logits agree.
    """
    problem = problem_of(files, **fields)
    batch, _ = problem.lower_data.sample(Key(1), 6)
    z = problem.g.outputs(problem.x0, batch)
    assert len(z) == int(batch["mask"][:, 1:].sum())
    value = problem.g.criterion(problem.theta0, problem.x0, z, batch)
    assert_same(value, problem.g(problem.theta0, problem.x0, batch), rtol=1e-7, atol=1e-7)
    v = noisy({name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()})
    exact, ours = (
        way(problem.g)(problem.theta0, problem.x0, batch, v)
        for way in (gauss_newton, by_difference)
    )
    assert sum(float((exact[name] * leaf).sum()) for name, leaf in v.items()) > 0
    assert_same(ours, exact, rtol=1e-5, atol=1e-7)


def test_scalebio_moves_the_logits_by_its_formula(files: dict[str, Source]) -> None:
    """h_s = α ω_s [(ℓ_s(w) − ℓ_s(u)) − Σ_j ω_j (ℓ_j(w) − ℓ_j(u))] at the losses before the step."""
    problem = problem_of(files, adapter=Lora(rank=2))
    generator = Minimax(alpha=10.0, optimizer=PairOptimizer(lr=0.1))
    u = noisy(problem.x0, 5, 0.2)
    aux = {f"u.{name}": leaf[None] for name, leaf in u.items()}
    start = {**generator.init(problem, Key(0)), "aux": aux}
    results = generator.propose(problem, problem.theta0, start, Key(1)).aux["theta.logits"][0]
    batch = problem.lower_data.batch(None)
    apart = problem.find(Sources).losses(problem.x0, batch) - problem.find(Sources).losses(u, batch)
    omega = problem.find(Sources).weights(problem.theta0)
    assert_same(results, 10.0 * omega * (apart - omega @ apart), rtol=1e-7, atol=1e-7)
