"""Compiled programs: they compute what the functions do, and where they cannot, the functions
run.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import rejects
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from hgms.compiled import CompiledProduct, Programs, levels, linearized, programs, programs_of
from hgms.compiled import cuda_graphs as graphs
from hgms.compiled.trace import flatten, split, trace, unflatten, without_mutations
from hgms.compiled.verify import compared
from hgms.gauss_newton import Composite
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.methods import Tilted
from hgms.outer import Adam
from hgms.selectors import BestOfN, Worst
from hgms.solvers import CG, MINRES
from hgms_core import (
    Branch,
    ConfigError,
    Data,
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

F64 = torch.float64
AT: dict[str, Any] = {"strategy": "vjp", "precision": None, "operator": None}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are the traced graphs themselves: all but the compiler, which takes seconds for
    each. A solve takes several of few iterations, which are traced sooner."""

    def as_traced(graph: GraphModule, leaves: Sequence[Tensor]) -> Callable[..., Any]:
        shapes = [leaf.shape for leaf in leaves]

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            assert [leaf.shape for leaf in inputs] == shapes
            return graph(*inputs)

        return run

    monkeypatch.setattr(programs, "_inductor", as_traced)
    monkeypatch.setattr(levels, "ITERATIONS", 3)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def network_problem(rows: int = 12, compiler: Programs | None = None) -> Problem:
    """Example weights for a small network with a bend, so that the Hessian depends on the point."""
    inputs = normal(rows, 3)
    targets = normal(rows, 2, seed=1)

    def outputs(x: Tree, batch: Tree) -> Tensor:
        return torch.tanh(batch["a"] @ x["w"]) @ x["u"] + x["b"]

    def criterion(theta: Tree, x: Tree, z: Tensor, batch: Tree) -> Tensor:
        weights = theta["logits"][batch["index"]].sigmoid()
        return (weights * (z - batch["y"]).square().sum(-1)).mean() + 0.05 * sum(
            (leaf * leaf).sum() for leaf in x.values()
        )

    def f(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        return (outputs(x, batch) - batch["y"]).square().mean() + 0.01 * theta[
            "logits"
        ].square().sum()

    data = Data.of({"a": inputs, "y": targets})
    upper = Data.of({"a": normal(6, 3, seed=2), "y": normal(6, 2, seed=3)})
    return Problem(
        theta0={"logits": 0.3 * normal(rows, seed=4)},
        x0={
            "w": 0.5 * normal(3, 4, seed=5),
            "u": 0.5 * normal(4, 2, seed=6),
            "b": normal(2, seed=7),
        },
        g=Composite(outputs=outputs, criterion=criterion),
        f=f,
        lower_data=data,
        upper_data=dict.fromkeys(("differentiate", "select", "stop"), upper),
        compiler=compiler,
    )


# --- traces


def test_a_trace_is_the_function_with_its_derivatives() -> None:
    def slope(tree: Tree, scale: Tensor) -> dict[str, Any]:
        leaf = tree["x"].detach().requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad((scale * leaf**3).sum(), [leaf])
        return {"grad": grad, "also": (tree["y"], None)}

    arguments = ({"x": normal(3), "y": normal(2)}, normal(1))
    leaves: list[Tensor] = []
    flatten(arguments, leaves)
    traced = trace(slope, arguments)
    other = [normal(3, seed=5), normal(2, seed=6), normal(1, seed=7)]
    result = unflatten(traced.structure, traced.graph(*other, *traced.constants))
    assert result.keys() == {"grad", "also"}
    torch.testing.assert_close(result["grad"], 3 * other[2] * other[0] ** 2)
    torch.testing.assert_close(result["also"], [other[1], None])


def test_a_tensor_that_the_function_reads_beside_its_arguments_is_read_anew() -> None:
    held = torch.ones(2)
    traced = trace(lambda x: x * held, (torch.ones(2),))
    held.fill_(5.0)
    (product,) = traced.graph(torch.tensor([1.0, 2.0]), *traced.constants)
    assert product.tolist() == [5.0, 10.0]


@pytest.mark.usefixtures("interpreted")
def test_arguments_that_are_one_tensor_at_first_may_differ_later() -> None:
    x = torch.ones(2)
    minus = Programs()(("minus",), lambda a, b: a - b)
    assert minus(x, x).tolist() == [0.0, 0.0]
    assert minus(torch.tensor([3.0, 1.0]), x).tolist() == [2.0, 0.0]


@pytest.mark.usefixtures("interpreted")
def test_names_in_another_order_are_other_arguments() -> None:
    minus = Programs()(
        ("minus",), lambda tree, c: tree["a"] - tree["b"] if c is None else tree["a"] - c
    )
    a = torch.ones(2)
    b = torch.zeros(2)
    for tree, c in (({"a": a, "b": b}, None), ({"b": b, "a": a}, None), ({"a": a}, b)):
        assert minus(tree, c).tolist() == [1.0, 1.0]


def test_what_does_not_depend_on_the_late_input_is_computed_before() -> None:
    def function(a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heavy = torch.tanh(a @ b)
        return heavy.sum(), heavy.t() @ v, b @ (2 * v)

    a = normal(4, 4)
    b = normal(4, 4, seed=1)
    v = normal(4, seed=2)
    graph = without_mutations(trace(function, (a, b, v)).graph, [a, b, v])
    pieces = split(graph.graph, range(2, 3), [1, 1])
    operations = [
        [str(node.target) for node in part.graph.nodes if node.op == "call_function"]
        for part in pieces.after
    ]
    assert not any("tanh" in name for part in operations for name in part)
    other = normal(4, seed=9)
    outputs = pieces.before(a, b)
    values = [a, b, *outputs[1:]]
    results = [
        part(*[values[i] for i in kept], other)[0]
        for part, kept in zip(pieces.after, pieces.kept, strict=True)
    ]
    for actual, expected in zip([outputs[0], *results], function(a, b, other), strict=True):
        torch.testing.assert_close(actual, expected)
    assert 1 in pieces.kept[1], "an input is handed over as it is"


# --- programs, by the compiler


def test_a_program_is_compiled_and_close() -> None:
    def square(tree: Tree) -> Tree:
        return {
            "n": tree["n"] + 1,
            **{name: (tree[name] @ tree[name].mT).sin() for name in ("single", "double")},
        }

    def close(result: Tree, x: Tensor) -> None:
        torch.testing.assert_close(result["double"], (x @ x.mT).sin(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            result["single"], (x.float() @ x.float().mT).sin(), rtol=1e-5, atol=1e-6
        )
        assert int(result["n"]) == 4

    compiler = Programs()
    x = normal(5, 5)
    n = torch.tensor(3)
    program = compiler(("square",), square)
    close(program({"single": x.float(), "double": x, "n": n}), x)
    assert compiler.outcomes == {"square": "compiled"}
    seconds = compiler.seconds
    assert seconds > 0
    view = normal(5, 5, seed=1).t()
    close(program({"single": view.float(), "double": view, "n": n}), view)
    assert compiler.seconds == seconds, "a program that is there takes no time to make"


@pytest.mark.usefixtures("interpreted")
def test_another_shape_is_another_program() -> None:
    compiler = Programs()
    double = compiler(("double",), lambda x: 2 * x)
    assert double(normal(5)).shape == (5,)
    seconds = compiler.seconds
    assert double(normal(3, 3)).shape == (3, 3)
    assert compiler.seconds > seconds


# --- what cannot be a program


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hgms.programs"]


def test_a_function_that_chooses_by_a_number_runs_as_it_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = Programs()
    chooses = compiler(("chooses",), lambda x: x if x.sum() > 0 else -x)
    with caplog.at_level(logging.WARNING):
        assert chooses(torch.tensor([-3.0])).tolist() == [3.0]
        assert chooses(torch.tensor([2.0])).tolist() == [2.0]
    (message,) = warnings(caplog)
    assert message.startswith("chooses cannot be traced: ")
    assert "it runs as it is written" in message
    assert compiler.outcomes["chooses"].startswith("as written: it cannot be traced")


def test_a_trace_without_a_derivative_runs_as_it_is_written() -> None:
    """Other errors of a loss end the run."""

    def lacks(x: Tensor) -> Tensor:
        if get_proxy_mode() is not None:
            raise ConfigError(code, "a derivative is missing in the trace")
        return 2 * x

    code = "no-second-derivative"
    assert Programs()(("lacks",), lacks)(torch.ones(1)).tolist() == [2.0]
    code = "random-loss"
    with rejects(code):
        Programs()(("lacks",), lacks)(torch.ones(1))


def test_a_function_that_remembers_runs_as_it_is_written() -> None:
    calls = itertools.count()
    compiler = Programs()
    counts = compiler(("counts",), lambda x: x + next(calls))
    first = float(counts(torch.zeros(())))
    assert float(counts(torch.zeros(()))) == first + 1
    assert compiler.outcomes["counts"].startswith("as written: it differs when it is traced")


def test_without_a_compiler_functions_run_as_they_are_written(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(graph: GraphModule, leaves: Sequence[Tensor]) -> None:
        raise RuntimeError("No working C++ compiler found\nand much more")

    monkeypatch.setattr(programs, "_inductor", absent)
    compiler = Programs()
    with caplog.at_level(logging.WARNING):
        assert compiler(("double",), lambda x: 2 * x)(torch.ones(1)).tolist() == [2.0]
        problem = network_problem(compiler=compiler)
        plain, _ = Implicit(solver=CG()).estimate(
            evolve(problem, compiler=None), problem.theta0, *at(problem)
        )
        same, _ = Implicit(solver=CG()).estimate(problem, problem.theta0, *at(problem))
    assert torch.equal(plain.value["logits"], same.value["logits"])
    assert (
        warnings(caplog)[0].splitlines()[0]
        == "double cannot be compiled: No working C++ compiler found"
    )


def test_a_program_that_differs_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(graph: GraphModule, leaves: Sequence[Tensor]) -> Callable[..., Any]:
        return lambda inputs: [output * (1 + 1e-3) for output in graph(*inputs)]

    monkeypatch.setattr(programs, "_inductor", wrong)
    with caplog.at_level(logging.WARNING):
        assert Programs()(("double",), lambda x: 2 * x)(torch.ones(1)).tolist() == [2.0]
    assert (
        "double differs when it is compiled: by 2.0e-03 where the largest number is 2.0e+00"
        in warnings(caplog)[0]
    )


@pytest.mark.usefixtures("interpreted")
def test_after_some_shapes_a_function_runs_as_it_is_written() -> None:
    calls = itertools.count()

    def double(x: Tensor) -> Tensor:
        next(calls)
        return 2 * x

    program = Programs()(("double",), double)
    for size in range(1, programs.SHAPES + 1):
        program(torch.ones(size))
    before = next(calls)
    program(torch.ones(1))
    assert next(calls) == before + 1, "known shapes do not call the function"
    assert program(torch.ones(99)).shape == (99,)
    assert next(calls) == before + 3


def test_losses_that_count_what_they_do_are_not_compiled() -> None:
    compiler = Programs()
    problem = network_problem(compiler=compiler)
    assert programs_of(problem) is compiler
    assert programs_of(evolve(problem, counters=lambda: {"tokens": 0})) is None
    assert programs_of(evolve(problem, compiler=None)) is None


# --- programs of a GPU, which are recorded: here a recording runs its program again, so all but the
# device is tested


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "RECORDING", ("cuda", "cpu"))


@pytest.mark.usefixtures("interpreted", "recording")
def test_what_a_recorded_program_returned_stays_when_it_runs_again() -> None:
    double = Programs()(
        ("double",), lambda tree: {"x": 2 * tree["x"], "same": tree["n"], "n": tree["n"] + 1}
    )
    first = double({"x": torch.ones(2), "n": torch.tensor(3)})
    second = double({"x": torch.tensor([5.0, 7.0]), "n": torch.tensor(4)})
    assert [first["x"].tolist(), int(first["same"]), int(first["n"])] == [[2.0, 2.0], 3, 4]
    assert [second["x"].tolist(), int(second["same"]), int(second["n"])] == [[10.0, 14.0], 4, 5]


@pytest.mark.usefixtures("interpreted", "recording")
def test_a_recorded_program_keeps_no_graph_of_its_arguments() -> None:
    double = Programs()(("double",), lambda x: 2 * x)
    for size in (1.0, 2.0, 3.0):
        x = torch.full((2, 3), size, requires_grad=True)
        for argument in (x, x.t().contiguous().t()):
            result = double(argument)
            assert not result.requires_grad
            assert result.tolist() == (2 * x).tolist()


@pytest.mark.usefixtures("interpreted", "recording")
def test_what_cannot_be_recorded_is_launched_kernel_by_kernel(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "CUDA error: operation not permitted when stream is capturing"

    def refused(*_: Any) -> None:
        raise RuntimeError(f"{expected}\nmore lines")

    monkeypatch.setattr(programs, "Recording", refused)
    compiler = Programs()
    with caplog.at_level(logging.WARNING):
        assert compiler(("double",), lambda x: 2 * x)(torch.ones(1)).tolist() == [2.0]
    (message,) = warnings(caplog)
    assert message == f"double is launched kernel by kernel, which is slower: {expected}"
    assert compiler.outcomes == {"double": "compiled"}


@pytest.mark.usefixtures("interpreted", "recording")
def test_a_run_of_recorded_programs_is_the_run() -> None:
    method = pipeline(steps=2, products=12)
    problem = network_problem(compiler=Programs())
    plain = evolve(problem, compiler=None)
    state = method.init(problem, 0)
    expected = method.init(plain, 0)
    for _ in range(3):
        state, record = method.step(problem, state)
        expected, reference = method.step(plain, expected)
        assert record["cost_products"] == reference["cost_products"]
    torch.testing.assert_close(state["theta"], expected["theta"], rtol=1e-9, atol=1e-11)
    assert set(problem.compiler.outcomes.values()) == {"compiled"}


def test_copies_by_groups_are_copies() -> None:
    leaves = [
        normal(3, 2),
        normal(2, 3).t(),
        torch.tensor([1, 2]),
        normal(3, 2).float(),
        torch.tensor(True),
    ]
    places = [
        torch.zeros_like(leaf, dtype=F64 if leaf.dtype is torch.float32 else leaf.dtype)
        for leaf in leaves
    ]
    places[1] = places[1].contiguous()
    graphs.copy_(places, leaves)
    for place, leaf in zip(places, leaves, strict=True):
        assert torch.equal(place, leaf.to(place.dtype))


# --- both levels at one point


def batches(problem: Problem, seed: int = 0) -> tuple[Tree, Tree]:
    below = problem.lower_data.batch(
        torch.tensor([2, 5, 7, 1, 0]) if seed else torch.tensor([1, 2, 3, 4, 9])
    )
    return below, problem.upper_data["differentiate"].batch(None)


def on(loss: Loss, batch: Tree, theta: Tree, x: Tree) -> Tensor:
    return loss(theta, x, batch)


def at(problem: Problem) -> tuple[Branch, Key, State]:
    return Branch(x=problem.x0), Key(0), {"v": None}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
def test_programs_linearize_as_the_core_does(strategy: Any) -> None:
    problem = network_problem()
    compiler = Programs()
    v = normal(Ravel.of(problem.x0).size, seed=11)
    for seed in (0, 1):
        theta = {"logits": normal(12, seed=20 + seed)}
        x = {name: normal(*leaf.shape, seed=30 + seed) for name, leaf in problem.x0.items()}
        below, above = batches(problem, seed)
        here = linearized(
            compiler, ("a",), problem.f, problem.g, strategy, None, None, theta, x, below, above
        )
        assert here is not None
        losses = partial(on, problem.f, above), partial(on, problem.g, below)
        plain = Linearization.of(*losses, theta, x, strategy)
        tolerances = (
            {"rtol": 1e-12, "atol": 1e-12}
            if strategy != "difference"
            else {"rtol": 1e-6, "atol": 1e-8}
        )
        torch.testing.assert_close(here.matvec(v), plain.matvec(v), **tolerances)
        torch.testing.assert_close(here.mixed(v)["logits"], plain.mixed(v)["logits"], **tolerances)
        for name in ("upper_loss", "direct", "rhs", "slope"):
            torch.testing.assert_close(
                getattr(here, name), getattr(plain, name), rtol=1e-12, atol=1e-12
            )
        assert here.passes == plain.passes


@pytest.mark.extended
def test_compiled_products_are_those_of_finite_differences() -> None:
    problem = network_problem()
    compiler = Programs()
    below = problem.lower_data.batch(torch.arange(8))
    above = problem.upper_data["differentiate"].batch(None)
    spec = Ravel.of(problem.x0)
    flat = Ravel.of(problem.x0).ravel(problem.x0)
    here = linearized(
        compiler,
        ("a",),
        problem.f,
        problem.g,
        "vjp",
        None,
        None,
        problem.theta0,
        problem.x0,
        below,
        above,
    )
    assert here is not None

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda point: problem.g(problem.theta0, spec.unravel(point), below))(
            x
        )

    v = normal(spec.size, seed=3)
    step = 1e-5
    torch.testing.assert_close(
        here.matvec(v),
        (slope(flat + step * v) - slope(flat - step * v)) / (2 * step),
        rtol=1e-7,
        atol=1e-8,
    )

    def along(theta: Tensor) -> Tensor:
        gradient = torch.func.grad(
            lambda point: problem.g({"logits": theta}, spec.unravel(point), below)
        )(flat)
        return gradient @ v

    expected = torch.func.grad(along)(problem.theta0["logits"])
    torch.testing.assert_close(here.mixed(v)["logits"], expected, rtol=1e-9, atol=1e-11)
    assert set(compiler.outcomes.values()) == {"compiled"}


@pytest.mark.usefixtures("interpreted")
def test_a_product_is_the_matrix_products_that_one_would_write_by_hand() -> None:
    problem = network_problem()
    below, above = batches(problem)
    here = linearized(
        Programs(),
        ("a",),
        problem.f,
        problem.g,
        "vjp",
        None,
        None,
        problem.theta0,
        problem.x0,
        below,
        above,
    )
    assert here is not None
    assert isinstance(here.matvec, CompiledProduct)
    operations = [
        str(node.target) for node in here.matvec.graph.graph.nodes if node.op == "call_function"
    ]
    # By hand: a·V₁; h·V₂ and ḣ·u; δ·V₂ᵀ and δ̇·uᵀ; ḣᵀδ and hᵀδ̇; aᵀδ̇₁.
    assert sum(".mm." in name or ".addmm." in name for name in operations) == 8
    assert not any("tanh.default" in name for name in operations), (
        "the forward pass is not part of a product"
    )


@pytest.mark.usefixtures("interpreted")
def test_gauss_newton_products_are_programs_too() -> None:
    problem = network_problem(compiler=Programs())
    implicit = Implicit(solver=CG(ridge=0.1, max_steps=3), operator="ggn", batch_size=5)
    compiled, _ = implicit.estimate(problem, problem.theta0, *at(problem))
    plain, _ = implicit.estimate(evolve(problem, compiler=None), problem.theta0, *at(problem))
    torch.testing.assert_close(
        compiled.value["logits"], plain.value["logits"], rtol=1e-10, atol=1e-12
    )
    assert compiled.cost == plain.cost
    with rejects("not-supported", "g"):
        implicit.estimate(
            evolve(problem, g=lambda t, x, b: problem.g(t, x, b)), problem.theta0, *at(problem)
        )


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("operator", ["hessian", "ggn"])
def test_rows_are_gathered_once(compiled: bool, operator: Any) -> None:
    problem = network_problem(compiler=Programs() if compiled else None)
    gathered = []
    data = problem.lower_data

    def rows(index: Tensor) -> Any:
        gathered.append(index)
        return data.rows(index)

    lower = evolve(data, rows=rows)
    Implicit(solver=CG(ridge=0.1, max_steps=2), operator=operator, batch_size=5).estimate(
        evolve(problem, lower_data=lower), problem.theta0, *at(problem)
    )
    assert len(gathered) == 1


# --- solvers


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "solver",
    [
        CG(ridge=0.1, rtol=1e-10, max_steps=50),
        CG(ridge=0.1, max_steps=3),
        CG(ridge=0.1, clip=0.01),
        MINRES(ridge=0.1, rtol=1e-8),
        *(
            pytest.param(solver, marks=pytest.mark.extended)
            for solver in (
                CG(ridge=0.1, rtol=1e-3, max_steps=50),
                CG(max_steps=40),
                CG(ridge=0.1, max_steps=17, rtol=1e-14),
            )
        ),
    ],
    ids=str,
)
def test_a_compiled_solve_takes_the_same_steps(solver: Any) -> None:
    problem = network_problem(compiler=Programs())
    implicit = Implicit(solver=solver)
    for x in (problem.x0, {name: 3 * leaf for name, leaf in problem.x0.items()}):
        branch = Branch(x=x)
        compiled, _ = implicit.estimate(problem, problem.theta0, branch, Key(0), {"v": None})
        plain, _ = implicit.estimate(
            evolve(problem, compiler=None), problem.theta0, branch, Key(0), {"v": None}
        )
        torch.testing.assert_close(
            compiled.value["logits"], plain.value["logits"], rtol=1e-8, atol=1e-10
        )
        assert compiled.outcome is plain.outcome
        assert compiled.cost == plain.cost
        assert int(compiled.iterations) == int(plain.iterations)  # type: ignore[arg-type]


@pytest.mark.usefixtures("interpreted")
def test_negative_curvature_ends_a_compiled_solve_where_it_ends_a_plain_one() -> None:
    problem = network_problem(compiler=Programs())
    saddle = evolve(problem, g=lambda t, x, b: problem.g(t, x, b) - 2 * (x["b"] * x["b"]).sum())
    for solver in (CG(max_steps=30), CG(max_steps=30, ridge=0.1)):
        compiled, _ = Implicit(solver=solver).estimate(saddle, saddle.theta0, *at(saddle))
        plain, _ = Implicit(solver=solver).estimate(
            evolve(saddle, compiler=None), saddle.theta0, *at(saddle)
        )
        assert compiled.outcome is plain.outcome is Outcome.NEGATIVE_CURVATURE
        assert compiled.cost == plain.cost
        torch.testing.assert_close(
            compiled.value["logits"], plain.value["logits"], rtol=1e-9, atol=1e-12
        )


# --- lower steps

RULES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "decay": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "clip": {"clip": 0.05},
    "spread": {"lr_spread": (0.5, 2.0), "decay_spread": (0.5, 2.0), "weight_decay": 0.1},
    "adamw-spread": {"optimizer": "adamw", "lr": 0.01, "lr_spread": (0.5, 2.0)},
    "cosine": {"schedule": "cosine", "floor": 0.1},
    "shared": {"batches": "shared"},
    "whole": {"batch_size": None},
    "noise": {"noise": 0.1},
    "chunks": {"chunk": 2},
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("mode", ["stacked", "loop"])
@pytest.mark.parametrize("fields", RULES.values(), ids=RULES)
def test_compiled_branches_are_the_branches(fields: dict[str, Any], mode: Any) -> None:
    problem = network_problem(compiler=Programs())
    generator = Branches(
        **{"count": 3, "steps": 4, "lr": 0.05, "batch_size": 5, "mode": mode, **fields}
    )
    compiled_start = plain_start = generator.init(problem, Key(0))
    for step in range(2):
        key = Key(step)
        compiled = generator.propose(problem, problem.theta0, compiled_start, key)
        plain = generator.propose(evolve(problem, compiler=None), problem.theta0, plain_start, key)
        for tree, expected in (
            (compiled.x, plain.x),
            (compiled.aux, plain.aux),
            ({"l": compiled.losses}, {"l": plain.losses}),
        ):
            for name, leaf in expected.items():
                torch.testing.assert_close(tree[name], leaf, rtol=1e-10, atol=1e-12)
        assert compiled.cost == plain.cost
        index = torch.tensor(1)
        compiled_start = generator.carry(compiled_start, compiled, index, key, problem)
        plain_start = generator.carry(plain_start, plain, index, key, problem)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "selector", [BestOfN(), Worst(mode="loop"), BestOfN(mode="stacked", batch_size=3)], ids=str
)
def test_compiled_scores_select_the_same(selector: Any) -> None:
    problem = network_problem(compiler=Programs())
    candidates = Branches(count=4, steps=2, noise=0.3).propose(
        evolve(problem, compiler=None),
        problem.theta0,
        Branches(count=4).init(problem, Key(0)),
        Key(1),
    )
    candidates.x["b"][2] = torch.nan
    compiled = selector.select(problem, problem.theta0, candidates, Key(0))
    plain = selector.select(evolve(problem, compiler=None), problem.theta0, candidates, Key(0))
    assert int(compiled.index) == int(plain.index)
    torch.testing.assert_close(compiled.scores, plain.scores, rtol=1e-12, atol=0, equal_nan=True)


# --- whole runs


def pipeline(steps: int = 5, products: int = 8) -> Pipeline:
    return Pipeline(
        generator=Branches(count=2, steps=steps, optimizer="adamw", lr=0.02, batch_size=5),
        selector=BestOfN(),
        hypergradient=Implicit(solver=CG(ridge=0.05, max_steps=products), batch_size=8),
        outer=Adam(lr=0.1),
    )


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param("interpreted", marks=pytest.mark.extended),
        pytest.param("compiled", marks=pytest.mark.nightly),
    ],
)
def test_a_compiled_run_is_the_run_and_resumes_to_the_same_numbers(
    compiler: str, request: pytest.FixtureRequest
) -> None:
    if compiler == "interpreted":  # the compiler takes a minute, twice
        request.getfixturevalue("interpreted")
    method = pipeline(steps=2, products=1)
    problem = network_problem(compiler=Programs())
    plain = evolve(problem, compiler=None)
    state = method.init(problem, 0)
    expected = method.init(plain, 0)
    middle: State = {}
    for step in range(4):
        if step == 2:
            middle = state
        state, record = method.step(problem, state)
        expected, reference = method.step(plain, expected)
        assert record["cost_products"] == reference["cost_products"]
    torch.testing.assert_close(state["theta"], expected["theta"], rtol=1e-7, atol=1e-9)
    assert set(problem.compiler.outcomes.values()) == {"compiled"}

    again = network_problem(compiler=Programs())  # another process, which compiles anew
    for _ in range(2):
        middle, _ = method.step(again, middle)
    for name, leaf in state["theta"].items():
        assert torch.equal(middle["theta"][name], leaf)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("wrap", [lambda method: Tilted(method=method, tilt=0.5), None])
def test_wrapped_problems_are_compiled_once(wrap: Any) -> None:
    problem = network_problem(compiler=Programs())
    small = pipeline(steps=2, products=2)
    method = small if wrap is None else wrap(small)
    state = method.init(problem, 0)
    state, _ = method.step(problem, state)
    kept = len(problem.compiler._kept)
    for _ in range(3):
        state, _ = method.step(problem, state)
    assert len(problem.compiler._kept) == kept


# --- rounding


def test_the_tolerance_in_float64_is_what_the_strategy_rounds() -> None:
    """A central difference divides rounding errors by its step: 1.2e-10 of 0.46 is no fault, and
    an error above its noise is one.
    """

    def product(x: Tensor) -> list[Tensor]:
        step = 2e-6
        slopes = [torch.tanh(x + sign * step) * x.exp() for sign in (1.0, -1.0)]
        return [(slopes[0] - slopes[1]) / (2 * step)]

    x = torch.linspace(0.1, 2.0, 40, dtype=F64)
    traced = trace(lambda x: product(x), (x,))
    (want,) = traced.graph(x)
    size = float(want.abs().max())
    noise = torch.zeros_like(want)
    noise[3] = 2e-10 * size
    assert compared([want + noise], [want]) != ""
    assert compared([want + noise], [want], traced.graph, [x]) == ""
    assert compared([want + 100 * noise], [want], traced.graph, [x]) != ""
    exact = trace(lambda x: [torch.tanh(x) * x.exp()], (x,))
    (value,) = exact.graph(x)
    assert compared([value + 2e-10 * value.max()], [value], exact.graph, [x]) != ""
