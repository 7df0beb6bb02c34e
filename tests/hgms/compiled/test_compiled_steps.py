"""The parts of a step by compiled programs: the numbers, outcomes and costs of the functions."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import assert_same, normal
from support.programs import as_traced, same_run
from torch import Tensor

from hgms.adapters import from_losses
from hgms.compiled import CompiledProduct, Levels, Programs, levels, linearized, programs, trace
from hgms.compiled import cuda_graphs as graphs
from hgms.config.fingerprinting import fingerprint
from hgms.gauss_newton import Composite
from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import Implicit
from hgms.methods import Tilted
from hgms.optim import SGD, AdamW, Clip, Cosine
from hgms.outer import Adam
from hgms.selectors import BestOfN
from hgms.solvers import CG, MINRES
from hgms_core import (
    Branch,
    Data,
    Estimate,
    Key,
    Linearization,
    Loss,
    Outcome,
    Pipeline,
    Problem,
    Ravel,
    State,
    Tree,
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler; a solve takes several programs of few iterations, which are traced sooner."""
    monkeypatch.setattr(programs, "compile_graph", as_traced)
    monkeypatch.setattr(levels, "ITERATIONS", 3)


def network_problem(rows: int = 12) -> Problem:
    """Example weights for a small network with a bend, so that the Hessian depends on the point."""

    def outputs(x: Tree, batch: Tree) -> Tensor:
        return torch.tanh(batch["a"] @ x["w"]) @ x["u"] + x["b"]

    def criterion(theta: Tree, x: Tree, z: Tensor, batch: Tree) -> Tensor:
        weights = theta["logits"][batch["index"]].sigmoid()
        return (weights * (z - batch["y"]).square().sum(-1)).mean() + 0.05 * sum(
            (leaf * leaf).sum() for leaf in x.values()
        )

    def f(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        error = (outputs(x, batch) - batch["y"]).square().mean()
        return error + 0.01 * theta["logits"].square().sum()

    upper = Data.of({"a": normal(6, 3, seed=2), "y": normal(6, 2, seed=3)})
    return from_losses(
        theta0={"logits": 0.3 * normal(rows, seed=4)},
        x0={
            "w": 0.5 * normal(3, 4, seed=5),
            "u": 0.5 * normal(4, 2, seed=6),
            "b": normal(2, seed=7),
        },
        g=Composite(outputs=outputs, criterion=criterion),
        f=f,
        lower_data=Data.of({"a": normal(rows, 3), "y": normal(rows, 2, seed=1)}),
        upper_data=dict.fromkeys(("differentiate", "select", "stop"), upper),
    )


PROBLEM = network_problem()
SADDLE = evolve(PROBLEM, g=lambda t, x, b: PROBLEM.g(t, x, b) - 2 * (x["b"] * x["b"]).sum())


# --- both levels at one point


def on(loss: Loss, batch: Tree, theta: Tree, x: Tree) -> Tensor:
    return loss(theta, x, batch)


@pytest.mark.parametrize(
    ("strategy", "compiler"),
    [
        ("vjp", "interpreted"),
        pytest.param("jvp", "interpreted", marks=pytest.mark.extended),
        pytest.param("difference", "interpreted", marks=pytest.mark.extended),
        pytest.param("vjp", "inductor", marks=pytest.mark.nightly),
    ],
)
def test_programs_linearize_as_the_core_and_finite_differences_do(
    strategy: Any, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "inductor":
        monkeypatch.undo()
    made = Programs()
    spec = Ravel.of(PROBLEM.x0)
    v = normal(spec.size, seed=11)
    above = PROBLEM.upper_data["differentiate"].batch(None)
    near = {"rtol": 1e-12, "atol": 1e-12}
    products = near if strategy != "difference" else {"rtol": 1e-6, "atol": 1e-8}
    for seed, rows in enumerate(([1, 2, 3, 4, 9], [2, 5, 7, 1, 0])):
        theta = {"logits": normal(12, seed=20 + seed)}
        x = {name: normal(*leaf.shape, seed=30 + seed) for name, leaf in PROBLEM.x0.items()}
        below = PROBLEM.lower_data.batch(torch.tensor(rows))
        both = Levels(f=PROBLEM.f, g=PROBLEM.g, strategy=strategy)
        here = linearized(made, ("a",), both, theta, x, below, above)
        assert here is not None
        losses = partial(on, PROBLEM.f, above), partial(on, PROBLEM.g, below)
        plain = Linearization.of(*losses, theta, x, strategy)
        torch.testing.assert_close(here.matvec(v), plain.matvec(v), **products)
        torch.testing.assert_close(here.mixed(v), plain.mixed(v), **products)
        for name in ("upper_loss", "direct", "rhs", "slope"):
            torch.testing.assert_close(getattr(here, name), getattr(plain, name), **near)
        assert here.passes == plain.passes

        def slope(logits: Tensor, flat: Tensor, below: Tree = below) -> Tensor:
            return torch.func.grad(
                lambda point: PROBLEM.g({"logits": logits}, spec.unravel(point), below)
            )(flat)

        step = 1e-5
        ends = [slope(theta["logits"], spec.ravel(x) + sign * step * v) for sign in (1, -1)]
        torch.testing.assert_close(
            here.matvec(v), (ends[0] - ends[1]) / (2 * step), rtol=1e-7, atol=1e-8
        )
        if strategy == "vjp":
            mixed = torch.func.vjp(partial(slope, flat=spec.ravel(x)), theta["logits"])[1](v)[0]
            torch.testing.assert_close(here.mixed(v)["logits"], mixed, rtol=1e-9, atol=1e-11)
    assert set(made.outcomes.values()) == {"compiled"}
    # By hand: a·V₁; h·V₂ and ḣ·u; δ·V₂ᵀ and δ̇·uᵀ; ḣᵀδ and hᵀδ̇; aᵀδ̇₁, and no forward pass.
    if strategy == "vjp":
        assert isinstance(here.matvec, CompiledProduct)
        names = [str(node.target) for node in here.matvec.code.as_module().graph.nodes]
        assert sum(".mm." in name or ".addmm." in name for name in names) == 8
        assert not any("tanh.default" in name for name in names)


def test_derivatives_in_reverse_mode_are_those_of_the_linearization() -> None:
    """A loaded program is compared with them."""
    theta = {"logits": normal(12, seed=20)}
    x = {name: normal(*leaf.shape, seed=30) for name, leaf in PROBLEM.x0.items()}
    below, above = PROBLEM.lower_data.batch(None), PROBLEM.upper_data["select"].batch(None)
    both = Levels(f=PROBLEM.f, g=PROBLEM.g)
    arguments = (theta, x, below, above, normal(Ravel.of(x).size, seed=11))
    found, expected = both.products_in_reverse_mode(*arguments), both.products(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    ["vjp", *(pytest.param(each, marks=pytest.mark.extended) for each in ("jvp", "difference"))],
)
def test_the_rows_of_large_products_are_the_last_axis(
    monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    """The products read activations in the order in which they are stored. The next process loads
    the same code, which is part of the key of programs that contain the product.
    """
    monkeypatch.setattr(trace, "LARGE_PRODUCT", 0)
    theta, x = PROBLEM.theta0, PROBLEM.x0
    below, above = PROBLEM.lower_data.batch(None), PROBLEM.upper_data["select"].batch(None)
    both = Levels(f=PROBLEM.f, g=PROBLEM.g, strategy=strategy)
    here = linearized(Programs(), ("a",), both, theta, x, below, above)
    assert here is not None
    plain = both.linearization(theta, x, below, above)
    v = normal(Ravel.of(x).size, seed=11)
    size = 1e-6 if strategy == "difference" else 1e-12
    near = {"rtol": size, "atol": size}
    torch.testing.assert_close(here.matvec(v), plain.matvec(v), **near)
    torch.testing.assert_close(here.mixed(v), plain.mixed(v), **near)
    assert isinstance(here.matvec, CompiledProduct)
    hidden = [leaf for leaf in here.matvec.residuals if sorted(leaf.shape) == [4, 12]]
    assert {leaf.shape for leaf in hidden} == ({(4, 12)} if strategy != "difference" else set())
    assert all(leaf.is_contiguous() for leaf in here.matvec.residuals)
    assert fingerprint(pickle.loads(pickle.dumps(here.matvec.code))) == fingerprint(
        here.matvec.code
    )


def test_a_batch_with_another_layout_in_memory_gives_the_same_products() -> None:
    """A square matrix of rows that is contiguous in one call, and its transpose in the next."""

    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        return (torch.tanh(batch["a"] @ x["w"]).square() * theta["t"].exp()).mean()

    rows = normal(4, 4)
    theta, x, v = {"t": normal(4, seed=1)}, {"w": normal(4, seed=2)}, normal(4, seed=3)
    both, compiler = Levels(f=g, g=g), Programs()
    for a in (rows, rows.t().contiguous().t(), rows):
        here = linearized(compiler, ("a",), both, theta, x, {"a": a}, {"a": a})
        assert here is not None
        plain = both.linearization(theta, x, {"a": a}, {"a": a})
        torch.testing.assert_close(here.matvec(v), plain.matvec(v), rtol=1e-12, atol=1e-12)


def test_a_large_function_of_one_call_per_step_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "LARGE", 0)
    compiler = Programs(joins=False)
    method = pipeline()
    states = [method.init(PROBLEM, 0)] * 2
    for _ in range(2):
        states = [
            method.step(evolve(PROBLEM, compiler=where), state)[0]
            for where, state in zip((compiler, None), states, strict=True)
        ]
    assert_same(*states, rtol=1e-9, atol=1e-11)
    often = dict.fromkeys(("branches", "cg"), "compiled")
    assert compiler.outcomes == often | dict.fromkeys(levels.NAMES, "traced")


# --- estimates


def estimates(implicit: Implicit, problem: Problem, x: Tree) -> list[Estimate]:
    """With programs, and without."""
    branch = Branch(x=x)
    return [
        implicit.estimate(each, problem.theta0, *branch.as_candidates(), Key(0), {"v": None})[0]
        for each in (problem, evolve(problem, compiler=None))
    ]


@pytest.mark.extended
@pytest.mark.parametrize("operator", ["hessian", "ggn"])
def test_products_of_either_operator_are_programs_of_rows_gathered_once(operator: Any) -> None:
    gathered = []
    data = PROBLEM.lower_data

    def rows(index: Tensor) -> Any:
        gathered.append(index)
        return data.rows(index)

    problem = evolve(PROBLEM, compiler=Programs(), lower_data=evolve(data, rows=rows))
    implicit = Implicit(solver=CG(ridge=0.1, max_steps=3), operator=operator, batch_size=5)
    compiled, plain = estimates(implicit, problem, problem.x0)
    assert_same(compiled.value, plain.value, rtol=1e-10, atol=1e-12)
    assert compiled.cost == plain.cost
    assert len(gathered) == 2


@pytest.mark.extended
@pytest.mark.parametrize(
    ("solver", "problem"),
    [
        (CG(ridge=0.1, rtol=1e-10, max_steps=50), PROBLEM),
        pytest.param(CG(max_steps=30, ridge=0.1), SADDLE, marks=pytest.mark.extended),
        *(
            pytest.param(solver, PROBLEM, marks=pytest.mark.extended)
            for solver in (
                MINRES(ridge=0.1, rtol=1e-8),
                CG(ridge=0.1, clip=0.01),
                CG(max_steps=40),
                CG(ridge=0.1, max_steps=17, rtol=1e-14),
            )
        ),
    ],
    ids=lambda each: "" if isinstance(each, Problem) else str(each),
)
def test_a_compiled_solve_takes_the_same_steps(solver: Any, problem: Problem) -> None:
    problem = evolve(problem, compiler=Programs())
    for x in (problem.x0, {name: 3 * leaf for name, leaf in problem.x0.items()}):
        compiled, plain = estimates(Implicit(solver=solver), problem, x)
        assert_same(compiled.value, plain.value, rtol=1e-8, atol=1e-10)
        assert compiled.outcome is plain.outcome
        assert compiled.cost == plain.cost
        assert int(compiled.solution.iterations) == int(plain.solution.iterations)  # type: ignore[arg-type]
        if problem.g is SADDLE.g:
            assert compiled.outcome is Outcome.NEGATIVE_CURVATURE


# --- lower steps and scores

RULES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {
        "optimizer": Clip(optimizer=SGD(lr=0.05, momentum=0.9), clip=0.05),
        "diversity": Diversity(batches="shared"),
    },
    "adamw": {
        "optimizer": AdamW(lr=0.01, weight_decay=0.1, schedule=Cosine(floor=0.1)),
        "diversity": Diversity(lr_spread=(0.5, 2.0)),
    },
    "spread": {
        "optimizer": SGD(lr=0.05, weight_decay=0.1),
        "diversity": Diversity(lr_spread=(0.5, 2.0), decay_spread=(0.5, 2.0)),
    },
    "noise": {"diversity": Diversity(noise=0.1), "chunk": 2, "batch_size": None},
}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("rule", "mode"),
    [
        ("momentum", "stacked"),
        ("adamw", "stacked"),
        ("noise", "stacked"),
        ("adamw", "loop"),
        pytest.param("sgd", "stacked", marks=pytest.mark.extended),
        pytest.param("spread", "stacked", marks=pytest.mark.extended),
        pytest.param("momentum", "loop", marks=pytest.mark.extended),
        pytest.param("noise", "loop", marks=pytest.mark.extended),
    ],
)
def test_compiled_branches_are_the_branches(rule: str, mode: Any) -> None:
    common = {"count": 3, "steps": 2, "batch_size": 5, "optimizer": SGD(lr=0.05)}
    fields: Any = {**common, **RULES[rule]}
    generator = Branches(**fields, mode=mode)
    problems = [evolve(PROBLEM, compiler=where) for where in (Programs(), None)]
    starts = [generator.init(each, Key(0)) for each in problems]
    for step in range(2):
        key = Key(step)
        compiled, plain = (
            generator.propose(problem, problem.theta0, start, key)
            for problem, start in zip(problems, starts, strict=True)
        )
        for name in ("x", "aux", "losses"):
            assert_same(getattr(compiled, name), getattr(plain, name), rtol=1e-10, atol=1e-12)
        assert compiled.cost == plain.cost
        starts = [
            generator.carry(start, found, torch.tensor(1), key, problem)
            for problem, start, found in zip(problems, starts, (compiled, plain), strict=True)
        ]


# --- whole runs


def pipeline(products: int = 1) -> Pipeline:
    return Pipeline(
        generator=Branches(count=2, steps=2, optimizer=AdamW(lr=0.02), batch_size=5),
        selector=BestOfN(),
        hypergradient=Implicit(solver=CG(ridge=0.05, max_steps=products), batch_size=8),
        outer=Adam(lr=0.1),
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    "method",
    [pipeline(), pytest.param(Tilted(method=pipeline(), tilt=0.5), marks=pytest.mark.extended)],
    ids=["pipeline", "wrapped"],
)
def test_a_run_of_recorded_programs_is_the_run_and_makes_them_once(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "RECORDING", ("cuda", "cpu"))
    same_run(method, PROBLEM)


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param("interpreted", marks=pytest.mark.extended),
        pytest.param("inductor", marks=pytest.mark.nightly),  # takes a minute, twice
    ],
)
def test_a_compiled_run_is_the_run_and_resumes_to_the_same_numbers(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "inductor":
        monkeypatch.undo()
    method = pipeline()
    same_run(method, PROBLEM, steps=4, rtol=1e-7, atol=1e-9)
    ends: list[State] = []
    middle: State = {}
    for first in (0, 2):  # the second time in another process, which compiles anew
        problem = evolve(PROBLEM, compiler=Programs())
        state = middle if first else method.init(problem, 0)
        for step in range(first, 4):
            if step == 2:
                middle = state
            state, _ = method.step(problem, state)
        ends.append(state)
    assert_same(*ends)
