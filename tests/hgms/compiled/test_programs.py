"""Compiled programs: they compute what the functions do, and where they cannot, the functions
run.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, network_problem, normal, rejects
from support.programs import as_traced
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from hgms.compiled import Programs, programs, programs_of
from hgms.compiled import cuda_graphs as graphs
from hgms.compiled.trace import flatten, split, trace, unflatten, without_mutations
from hgms.compiled.verify import compared
from hgms_core import ConfigError, Tree
from hgms_core.registry import Registry


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_inductor", as_traced)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """As on a GPU; a recording runs its program again, so all but the device is tested."""
    monkeypatch.setattr(graphs, "RECORDING", ("cuda", "cpu"))


# --- traces


def test_a_trace_is_the_function_with_its_derivatives_and_reads_other_tensors_anew() -> None:
    held = torch.ones(3, dtype=F64)

    def slope(tree: Tree, scale: Tensor) -> dict[str, Any]:
        leaf = tree["x"].detach().requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad((held * scale * leaf**3).sum(), [leaf])
        return {"grad": grad, "also": (tree["y"], None)}

    arguments = ({"x": normal(3), "y": normal(2)}, normal(1))
    flatten(arguments, [])
    traced = trace(slope, arguments)
    held.fill_(5.0)
    x, y, scale = normal(3, seed=5), normal(2, seed=6), normal(1, seed=7)
    result = unflatten(traced.structure, traced.graph(x, y, scale, *traced.constants))
    assert_same(result, {"grad": 15 * scale * x**2, "also": [y, None]}, rtol=1e-12)


def test_what_does_not_depend_on_the_late_input_is_computed_before() -> None:
    def function(a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heavy = torch.tanh(a @ b)
        return heavy.sum(), heavy.t() @ v, b @ (2 * v)

    a, b, v = normal(4, 4), normal(4, 4, seed=1), normal(4, seed=2)
    graph = without_mutations(trace(function, (a, b, v)).graph, [a, b, v])
    pieces = split(graph.graph, range(2, 3), [1, 1])
    late = [node for part in pieces.after for node in part.graph.nodes]
    assert not any("tanh" in str(node.target) for node in late if node.op == "call_function")
    other = normal(4, seed=9)
    outputs = pieces.before(a, b)
    values = [a, b, *outputs[1:]]
    results = [
        part(*[values[i] for i in kept], other)[0]
        for part, kept in zip(pieces.after, pieces.kept, strict=True)
    ]
    torch.testing.assert_close((outputs[0], *results), function(a, b, other))
    assert 1 in pieces.kept[1], "an input is handed over as it is"


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
    noise = torch.zeros_like(want)
    noise[3] = 2e-10 * want.abs().max()
    assert compared([want + noise], [want]) != ""
    assert compared([want + noise], [want], traced.graph, [x]) == ""
    assert compared([want + 100 * noise], [want], traced.graph, [x]) != ""
    exact = trace(lambda x: [torch.tanh(x) * x.exp()], (x,))
    (value,) = exact.graph(x)
    assert compared([value + 2e-10 * value.max()], [value], exact.graph, [x]) != ""


# --- programs


@pytest.mark.extended
def test_a_program_of_the_compiler_is_close_and_made_once() -> None:
    def square(tree: Tree) -> Tree:
        products = {name: (tree[name] @ tree[name].mT).sin() for name in ("single", "double")}
        return {"n": tree["n"] + 1, **products}

    compiler = Programs()
    program = compiler(("square",), square)
    seconds = []
    for x in (normal(5, 5), normal(5, 5, seed=1).t()):
        result = program({"single": x.float(), "double": x, "n": torch.tensor(3)})
        expected = (x @ x.mT).sin()
        torch.testing.assert_close(result["double"], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(result["single"], expected.float(), rtol=1e-5, atol=1e-6)
        assert int(result["n"]) == 4
        seconds.append(compiler.seconds)
    assert compiler.outcomes == {"square": "compiled"}
    assert 0 < seconds[0] == seconds[1]


@pytest.mark.usefixtures("interpreted")
def test_arguments_are_told_apart_by_their_names_and_places() -> None:
    minus = Programs()(
        ("minus",), lambda tree, c: tree["a"] - tree["b"] if c is None else tree["a"] - c
    )
    a, b = torch.ones(2), torch.zeros(2)
    arguments = [
        ({"a": a, "b": a}, None),  # one tensor at first
        ({"a": a, "b": b}, None),
        ({"b": b, "a": a}, None),
        ({"a": a}, b),
    ]
    assert [float(minus(*each)[0]) for each in arguments] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.usefixtures("interpreted")
def test_each_shape_is_a_program_and_after_some_a_function_runs_as_it_is_written() -> None:
    calls = itertools.count()

    def double(x: Tensor) -> Tensor:
        next(calls)
        return 2 * x

    compiler = Programs()
    program = compiler(("double",), double)
    seconds = [0.0]
    for size in range(1, programs.SHAPES + 1):
        assert program(torch.ones(size)).shape == (size,)
        seconds.append(compiler.seconds)
    assert sorted(set(seconds)) == seconds
    before = next(calls)
    program(torch.ones(1))
    assert next(calls) == before + 1, "known shapes do not call the function"
    assert program(torch.ones(99)).shape == (99,)
    assert next(calls) == before + 3


# --- what cannot be a program


def absent(graph: GraphModule, leaves: Sequence[Tensor]) -> None:
    raise RuntimeError("No working C++ compiler found\nand much more")


def wrong(graph: GraphModule, leaves: Sequence[Tensor]) -> Callable[..., Any]:
    return lambda inputs: [output * (1 + 1e-3) for output in graph(*inputs)]


@pytest.mark.parametrize(
    ("function", "inductor", "reason"),
    [
        (lambda x: 2 * x if x.sum() > 0 else x + x, as_traced, "it cannot be traced: "),
        (lambda x: 2 * x, absent, "it cannot be compiled: No working C++ compiler found"),
        (lambda x: 2 * x, wrong, "it differs when it is compiled: by "),
    ],
    ids=["chooses", "absent", "wrong"],
)
def test_a_function_without_a_program_runs_as_it_is_written(
    function: Any,
    inductor: Any,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "_inductor", inductor)
    compiler = Programs()
    program = compiler(("double",), function)
    with caplog.at_level(logging.WARNING, "hgms.programs"):
        assert [float(program(torch.tensor([x]))) for x in (-3.0, 2.0)] == [-6.0, 4.0]
    assert compiler.outcomes["double"].startswith(f"as written: {reason}")
    assert len(caplog.records) == 1


def test_a_function_that_remembers_runs_as_it_is_written() -> None:
    calls = itertools.count()
    compiler = Programs()
    counts = compiler(("counts",), lambda x: x + next(calls))
    first = float(counts(torch.zeros(())))
    assert float(counts(torch.zeros(()))) == first + 1
    assert compiler.outcomes["counts"].startswith("as written: it differs when it is traced")


def test_a_trace_without_a_derivative_runs_as_it_is_written_and_other_errors_pass() -> None:
    def lacks(x: Tensor) -> Tensor:
        if get_proxy_mode() is not None:
            raise ConfigError(code, "a derivative is missing in the trace")
        return 2 * x

    code = "no-second-derivative"
    assert Programs()(("lacks",), lacks)(torch.ones(1)).tolist() == [2.0]
    code = "random-loss"
    with rejects(code):
        Programs()(("lacks",), lacks)(torch.ones(1))


def test_losses_that_count_what_they_do_are_not_compiled() -> None:
    compiler = Programs()
    problem = evolve(network_problem(), compiler=compiler)
    counting = evolve(problem, counters=lambda: {"tokens": 0})
    found = [programs_of(each) for each in (problem, counting, evolve(problem, compiler=None))]
    assert found == [compiler, None, None]


# --- recordings


@pytest.mark.usefixtures("recording")
def test_a_recorded_program_returns_results_of_their_own_without_a_graph() -> None:
    double = Programs()(
        ("double",), lambda tree: {"x": 2 * tree["x"], "same": tree["n"], "n": tree["n"] + 1}
    )
    arguments = [torch.full((2, 3), size, requires_grad=True) for size in (1.0, 2.0, 3.0)]
    arguments += [x.t().contiguous().t() for x in arguments]
    results = [double({"x": x, "n": torch.tensor(n)}) for n, x in enumerate(arguments)]
    assert_same(
        results,
        [
            {"x": 2 * x.detach(), "same": torch.tensor(n), "n": torch.tensor(n + 1)}
            for n, x in enumerate(arguments)
        ],
    )
    assert not any(result["x"].requires_grad for result in results)


@pytest.mark.usefixtures("recording")
def test_what_cannot_be_recorded_is_launched_kernel_by_kernel(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("CUDA error: operation not permitted\nmore lines")

    monkeypatch.setattr(programs, "Recording", refused)
    compiler = Programs()
    with caplog.at_level(logging.WARNING, "hgms.programs"):
        assert compiler(("double",), lambda x: 2 * x)(torch.ones(1)).tolist() == [2.0]
    assert caplog.messages[0].startswith("double is launched kernel by kernel")
    assert compiler.outcomes == {"double": "compiled"}


def test_no_component_has_an_option_for_recordings() -> None:
    targets = [component.target for component in Registry.load().components()]
    assert targets
    assert not [each for each in targets if "cuda_graphs" in getattr(each, "__annotations__", {})]


def test_copies_by_groups_are_copies() -> None:
    leaves = [
        normal(3, 2),
        normal(2, 3).t(),
        torch.tensor([1, 2]),
        normal(3, 2).float(),
        torch.tensor(True),
    ]
    kinds = [F64, F64, torch.int64, F64, torch.bool]
    places = [torch.zeros(leaf.shape, dtype=kind) for leaf, kind in zip(leaves, kinds, strict=True)]
    graphs.copy_(places, leaves)
    assert_same(places, [leaf.to(kind) for leaf, kind in zip(leaves, kinds, strict=True)])
