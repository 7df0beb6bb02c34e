"""A whole outer step as one program: the same numbers as step by step."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import F64, assert_same, normal
from support.programs import as_traced
from torch import Tensor, nn
from torch.nn import functional

from hgms.adapters import from_losses, from_module
from hgms.compiled import Programs, programs, repeat, step_program
from hgms.compiled.trace import trace
from hgms.generators.branches import Branches, Diversity, Restarts
from hgms.hypergradients import Implicit, Unrolled
from hgms.optim import SGD, AdamW, Clip, Cosine
from hgms.outer import Adam, ProjectedGradient, Projection, Schedule, Sgd
from hgms.outer import AdamW as OuterAdamW
from hgms.selectors import BestOfN, Worst
from hgms.solvers import CG, MINRES, Neumann
from hgms_core import ROLES, Data, Key, Outcome, Pipeline, Problem, State, Tree
from hgms_core.capabilities import Fixed

F32 = torch.float32
CLOSE = {F32: 1e-6, F64: 1e-12}
ROWS = 12


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, and no records of torch's tracing, which take longer than the trace."""
    monkeypatch.setattr(programs, "compile_graph", as_traced)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


def by_role(rows: Tree) -> dict[str, Data]:
    return dict.fromkeys(ROLES, Data.of(rows))


def labels(count: int, seed: int) -> Tensor:
    return normal(count, 3, seed=seed).argmax(1)


def linear(dtype: torch.dtype = F64, more: Tree | None = None, rows: int = ROWS) -> Problem:
    """A linear model whose rows have a weight each."""

    def losses(x: Tree, batch: Tree) -> Tensor:
        return functional.softplus(-batch["y"] * (batch["a"] @ x["w"]).to(dtype))

    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        weights = theta["logits"][batch["index"]].sigmoid()
        decay = sum((0.1 * leaf * leaf).sum().to(dtype) for leaf in x.values())
        return (weights * losses(x, batch)).mean() + decay

    def data(count: int, seed: int) -> Tree:
        return {"a": normal(count, 4, seed=seed), "y": normal(count, seed=seed + 1).sign()}

    problem = from_losses(
        theta0={"logits": 0.1 * normal(rows, seed=1)},
        x0={"w": normal(4, seed=2), **(more or {})},
        g=g,
        f=lambda _, x, batch: losses(x, batch).mean(),
        lower_data=Data.of(data(rows, 3)),
        upper_data=by_role(data(8, 5)),
    )
    return in_dtype(problem, dtype)


def in_dtype(problem: Problem, dtype: torch.dtype) -> Problem:
    def convert(tree: Tree) -> Tree:
        return {
            name: leaf.to(dtype) if leaf.is_floating_point() else leaf
            for name, leaf in tree.items()
            if name != "index"
        }

    return evolve(
        problem,
        theta0=convert(problem.theta0),
        x0=convert(problem.x0),
        lower_data=Data.of(convert(problem.lower_data.whole)),
        upper_data=by_role(convert(problem.upper_data["stop"].whole)),
    )


def module(model: nn.Module, *shape: int, dtype: torch.dtype = F64) -> Problem:
    """Cross-entropy of a network, whose weight decay is learned."""

    def loss(model: Any, batch: Tree) -> Tensor:
        return functional.cross_entropy(model(batch["a"]), batch["label"], reduction="none")

    def data(count: int, seed: int) -> Tree:
        return {"a": normal(count, *shape, seed=seed).to(dtype), "label": labels(count, seed + 1)}

    rows = (Data.of(data(ROWS, 1)), by_role(data(8, 3)))
    return from_module(model.to(dtype), loss, *rows)


def seeded(*layers: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*layers)
        for part in model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    return model


def network() -> nn.Module:
    return seeded(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def pooled() -> nn.Module:
    layers = (nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Tanh())
    return seeded(*layers, nn.Flatten(), nn.Linear(8, 3))


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    return seeded(*layers).eval()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, a: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(a).mean(1))
        return out


def transformer() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer()


def pipeline(
    count: int = 3,
    steps: int = 4,
    optimizer: Any = None,
    batch_size: int | None = None,
    solver: Any = None,
    outer: Any = None,
    selector: Any = None,
    **more: Any,
) -> Pipeline:
    hypergradient = Implicit(
        solver=solver or CG(ridge=0.5, max_steps=6, rtol=1e-3), batch_size=batch_size
    )
    return Pipeline(
        generator=Branches(
            count=count,
            steps=steps,
            optimizer=optimizer or SGD(lr=0.2),
            batch_size=batch_size,
            **more,
        ),
        selector=selector or BestOfN(),
        hypergradient=more.pop("hypergradient", hypergradient),
        outer=outer or Adam(lr=0.1),
    )


def compare_steps(
    method: Pipeline, problem: Problem, close: float, steps: int = 3
) -> tuple[Programs, State, list[dict[str, Any]]]:
    """Take steps in one program and part by part; the states of each step must agree."""
    made = Programs()
    fast = evolve(problem, compiler=made)
    state, expected = (method.init(each, 0) for each in (fast, problem))
    records = []
    for step in range(steps):
        state, record = method.step(fast, state, step / steps)
        expected, reference = method.step(problem, expected, step / steps)
        assert_same(state, expected, rtol=close, atol=close)
        kept = {name: value for name, value in record.items() if name not in ("gap", "residual")}
        assert_same(kept, {name: reference[name] for name in kept}, rtol=1e2 * close, atol=close)
        assert list(record) == list(reference)
        records.append(record)
    assert made.outcomes == {"step": "compiled"}
    return made, state, records


PROBLEMS = {
    "linear": lambda dtype: linear(dtype),
    "network": lambda dtype: module(network(), 4, dtype=dtype),
    "convolutions, BatchNorm in evaluation": lambda dtype: module(
        convolutions(), 1, 5, 5, dtype=dtype
    ),
    "maximum pooling": lambda dtype: module(pooled(), 1, 5, 5, dtype=dtype),
    "transformer": lambda dtype: module(transformer(), 3, 4, dtype=dtype),
    "empty leaves": lambda dtype: linear(dtype, {"none": torch.zeros(0), "more": normal(2, 0)}),
}


LONG = ("convolutions, BatchNorm in evaluation", "maximum pooling", "transformer", "linear")


def _tiers(name: str, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    if name == "transformer" or (name in LONG and dtype == F32):
        return [pytest.mark.nightly]
    return [pytest.mark.extended] if name in LONG or dtype == F32 else []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=_tiers(name, dtype))
        for name in PROBLEMS
        for dtype in (F64, F32)
    ],
)
def test_one_program_computes_the_step_of_each_kind_of_problem(
    name: str, dtype: torch.dtype
) -> None:
    compare_steps(pipeline(), PROBLEMS[name](dtype), CLOSE[dtype])


FIRST_TRACE = """
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from hgms.compiled.loops import replacements

pooled = torch.func.grad(lambda x: torch.nn.functional.max_pool2d(x, 2).sum())
make_fx(pooled, replacements())(torch.ones(1, 1, 4, 4))
"""


@pytest.mark.extended
def test_maximum_pooling_can_be_the_first_trace_of_a_process() -> None:
    subprocess.run([sys.executable, "-c", FIRST_TRACE], check=True)


def test_leaves_may_have_several_types() -> None:
    problem = linear(F32)
    mixed = {"w": problem.x0["w"], "v": normal(2, seed=9).double()}
    compare_steps(pipeline(), evolve(problem, x0=mixed), 1e-6)


def test_batches_of_a_source_without_a_table_are_read_before_the_step() -> None:
    problem = linear()
    data = problem.lower_data
    source = Data(size=data.size, rows=lambda index: dict(data.rows(index)))
    compare_steps(pipeline(batch_size=5), evolve(problem, lower_data=source), 1e-12, steps=2)


@pytest.mark.parametrize(
    ("parts", "fixed"),
    [
        ({"diversity": Diversity(lr_spread=(0.5, 2.0)), "outer": Sgd()}, (True, True, True)),
        ({"batch_size": 5, "outer": OuterAdamW()}, (False, True, False)),
        ({"outer": Sgd(schedule=Schedule(kind="cosine"))}, (False, True, False)),
        ({"optimizer": SGD(schedule=Cosine()), "outer": Sgd()}, (False, True, True)),
        ({"optimizer": AdamW(), "outer": Sgd()}, (False, True, True)),
    ],
    ids=str,
)
def test_operands_are_fixed_if_all_steps_have_the_same(
    parts: dict[str, Any], fixed: tuple[bool, ...]
) -> None:
    method, problem = pipeline(**parts), linear()
    state = method.init(problem, 0)
    key = Key(0)
    operands = (
        method.generator.operands(problem, state["start"], key, 0.0),
        method.selector.operands(problem, key),
        method.outer.operands(problem, state["outer"], 0.0),
    )
    assert tuple(isinstance(value, Fixed) for value in operands) == fixed


@pytest.mark.parametrize(
    "parts",
    [
        {"count": 1, "solver": Neumann(lr=0.2, steps=5)},
        {"mode": "loop", "batch_size": 5, "diversity": Diversity(lr_spread=(0.5, 2.0))},
        *(
            pytest.param(parts, marks=pytest.mark.extended)
            for parts in (
                {
                    "batch_size": 5,
                    "optimizer": AdamW(lr=0.05, weight_decay=0.1, schedule=Cosine()),
                    "outer": OuterAdamW(weight_decay=0.1, schedule=Schedule(kind="inverse")),
                },
                {
                    "batch_size": 5,
                    "diversity": Diversity(batches="shared", lr_spread=(0.5, 2.0)),
                    "selector": Worst(),
                },
                {
                    "optimizer": Clip(optimizer=SGD(lr=0.3, momentum=0.5), clip=0.1),
                    "steps": 5,
                    "outer": Sgd(lr=0.3, momentum=0.5, clip=0.01, schedule=Schedule(kind="cosine")),
                },
                {
                    "optimizer": SGD(momentum=0.5, moments="fresh"),
                    "carry_rule": "per-branch",
                    "outer": ProjectedGradient(projection=Projection(kind="simplex")),
                },
            )
        ),
    ],
    ids=str,
)
def test_one_program_computes_the_step_with_all_settings_of_its_parts(
    parts: dict[str, Any],
) -> None:
    _, _, records = compare_steps(pipeline(**parts), linear(), 1e-12)
    assert len({float(record["upper_loss"]) for record in records}) == 3


@pytest.mark.extended
@settings(max_examples=5, deadline=None)
@given(
    rows=st.integers(2, 9),
    count=st.integers(1, 3),
    steps=st.integers(1, 7),
    drawn=st.booleans(),
    ridge=st.floats(0.1, 2.0),
)
def test_one_program_computes_steps_of_any_size(
    rows: int, count: int, steps: int, drawn: bool, ridge: float
) -> None:
    method = pipeline(
        count=count,
        steps=steps,
        batch_size=max(1, rows // 2) if drawn else None,
        solver=CG(ridge=ridge, max_steps=5),
    )
    compare_steps(method, linear(rows=rows), 1e-11, steps=2)


@pytest.mark.parametrize(
    ("scale", "solver", "outcome"),
    [
        pytest.param(0.0, CG(ridge=0.5, rtol=1e-9), Outcome.CONVERGED, marks=pytest.mark.extended),
        pytest.param(
            0.0,
            CG(ridge=0.5, rtol=1e-9, max_steps=2),
            Outcome.ITERATION_LIMIT,
            marks=pytest.mark.extended,
        ),
        (0.0, CG(rtol=1e-14, ridge=0.5, clip=0.01, max_steps=90), Outcome.CONVERGED),
        (3.0, CG(ridge=0.0), Outcome.NEGATIVE_CURVATURE),
    ],
)
def test_the_solve_in_a_program_reports_what_an_eager_solve_reports(
    scale: float, solver: CG, outcome: Outcome
) -> None:
    problem = linear()
    bent = evolve(
        problem, g=lambda t, x, b: problem.g(t, x, b) - scale * (x["w"][:2] * x["w"][:2]).sum()
    )
    _, _, records = compare_steps(pipeline(steps=2, solver=solver), bent, 1e-11, steps=2)
    assert list(Outcome)[int(records[0]["outcome"])] is outcome
    assert type(records[-1]["cost_products"]) is int
    assert records[-1]["cost_products"] >= 2


@pytest.mark.parametrize("every", [2, 1])
def test_a_restart_replaces_the_state_of_the_program(every: int) -> None:
    method = pipeline(batch_size=5)
    generator = Restarts(generator=method.generator, restart_every=every)
    problem = evolve(linear(), fresh=lambda key: {"w": normal(4, seed=key.derive() % 100)})
    method = evolve(method, generator=generator)
    made, state, _ = compare_steps(method, problem, 1e-12, steps=5)
    assert state["start"]["outer_steps"] == 5
    # A run that is resumed at a restart computes the same numbers.
    following, expected = (
        method.step(evolve(problem, compiler=each), state)[0] for each in (made, Programs())
    )
    assert_same(following, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "parts", [{"solver": MINRES(ridge=0.5)}, {"count": 1, "keep_path": "graph"}], ids=str
)
def test_parts_that_cannot_be_joined_have_separate_programs(parts: dict[str, Any]) -> None:
    made = Programs()
    problem = evolve(linear(), compiler=made)
    method = pipeline(**parts)
    method.step(problem, method.init(problem, 0))
    assert "step" not in made.outcomes
    assert "scores" in made.outcomes
    unrolled = evolve(method, hypergradient=Unrolled())
    unrolled.step(problem, unrolled.init(problem, 0))
    assert "step" not in made.outcomes


@pytest.mark.parametrize(
    ("make", "most"),
    [(linear, 4 * ROWS - 1), (lambda: module(convolutions(), 1, 5, 5), 200 * ROWS)],
    ids=["rows", "convolutions"],
)
def test_a_large_problem_has_separate_programs(
    make: Callable[[], Problem], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_program, "WORK", most)
    made = Programs()
    problem = evolve(make(), compiler=made)
    method = pipeline(steps=1)
    method.step(problem, method.init(problem, 0))
    assert "step" not in made.outcomes
    assert "branches" in made.outcomes


def test_a_loss_that_cannot_be_traced_falls_back_with_one_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problem = linear()

    def f(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        value = problem.f(theta, x, batch)
        return value if value.item() > 0 else -value

    made = Programs()
    branching = evolve(problem, f=f, compiler=made)
    method = pipeline(count=1)
    state = method.init(branching, 0)
    with caplog.at_level(logging.WARNING, "hgms.programs"):
        for _ in range(2):
            state, _ = method.step(branching, state)
    assert made.outcomes["step"].startswith("eager: it cannot be traced")
    assert made.outcomes["branches"] == "compiled"
    assert sum("step" in record.message for record in caplog.records) == 1
    expected = method.init(branching, 0)
    plain = evolve(branching, compiler=None)
    for _ in range(2):
        expected, _ = method.step(plain, expected)
    assert_same(state, expected, rtol=1e-11, atol=1e-12)


def test_a_program_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(graph: Any, leaves: Any, **settings: Any) -> Any:
        return lambda inputs: [
            1.001 * leaf if leaf.is_floating_point() else leaf for leaf in graph(*inputs)
        ]

    monkeypatch.setattr(programs, "compile_graph", wrong)
    made = Programs()
    problem = evolve(linear(), compiler=made)
    method = pipeline()
    method.step(problem, method.init(problem, 0))
    assert made.outcomes["step"].startswith("eager: it differs")


@pytest.mark.extended
def test_other_rows_have_another_program() -> None:
    made = Programs()
    method = pipeline()
    problems = {rows: evolve(linear(rows=rows), compiler=made) for rows in (ROWS, 9)}
    for rows in (ROWS, ROWS, 9):
        problem = problems[rows]
        plain = evolve(problem, compiler=None)
        state, _ = method.step(problem, method.init(problem, 0))
        expected, _ = method.step(plain, method.init(plain, 0))
        assert_same(state, expected, rtol=1e-12, atol=1e-12)
    steps = [kept[0] for key, kept in made._kept.items() if key[0] == "step"]
    assert [len(step.programs) for step in steps] == [1, 1]


def test_a_loop_is_one_operation_of_a_graph_without_its_constant_part() -> None:
    def function(a: Tensor, b: Tensor) -> list[Any]:
        def double(values: list[Tensor]) -> list[Tensor]:
            return [values[0] + torch.tanh(a) * values[1], values[1]]

        values, turns = repeat(double, [b, b], 10, going=lambda values: values[0].sum() < 5)
        return [*values, torch.as_tensor(turns)]

    a, b = normal(3).abs(), normal(3, seed=1).abs()
    traced = trace(function, (a, b))
    names = [str(node.target) for node in traced.graph.graph.nodes if node.op == "call_function"]
    assert sum("while_loop" in name for name in names) == 1
    assert sum("tanh" in name for name in names) == 1
    for scale in (1.0, 0.1):
        outputs = traced.graph(a, scale * b)
        assert_same(outputs, function(a, scale * b), rtol=1e-12)
    assert 1 < int(function(a, b)[-1]) < int(function(a, 0.1 * b)[-1])


@pytest.mark.parametrize(
    ("name", "dtype", "batch_size"),
    [
        pytest.param("linear", F32, 5, marks=pytest.mark.extended),
        pytest.param("network", F64, None, marks=pytest.mark.nightly),
        pytest.param("linear", F64, 5, marks=pytest.mark.nightly),
        pytest.param("network", F32, None, marks=pytest.mark.nightly),
    ],
)
def test_the_compiled_program_computes_the_step(
    name: str, dtype: torch.dtype, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    compare_steps(pipeline(batch_size=batch_size), PROBLEMS[name](dtype), CLOSE[dtype])
