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
from support.helpers import F64, assert_same, normal
from support.programs import as_traced
from torch import Tensor
from torch.fx import GraphModule

from hgms.compiled import Programs, programs
from hgms.compiled import cuda_graphs as graphs
from hgms.compiled.trace import flatten, split, trace, unflatten, without_mutations
from hgms.compiled.verify import compare, effect_of_rounding
from hgms.plugins import Registry
from hgms_core import ConfigError, Tree


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "compile_graph", as_traced)


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
    pieces = split(graph, range(2, 3), [1, 1])
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
    rounding = effect_of_rounding(lambda inputs: traced.graph(*inputs), [x], traced.graph(x))
    assert compare([want + noise], [want]) != ""
    assert compare([want + noise], [want], rounding) == ""
    assert compare([want + 100 * noise], [want], rounding) != ""
    exact = trace(lambda x: [torch.tanh(x) * x.exp()], (x,))
    (value,) = exact.graph(x)
    rounding = effect_of_rounding(lambda inputs: exact.graph(*inputs), [x], exact.graph(x))
    assert compare([value + 2e-10 * value.max()], [value], rounding) != ""


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


def absent(graph: GraphModule, leaves: Sequence[Tensor], **settings: Any) -> None:
    raise RuntimeError("No working C++ compiler found\nand much more")


def wrong(graph: GraphModule, leaves: Sequence[Tensor]) -> Callable[..., Any]:
    return lambda inputs: [output * (1 + 1e-3) for output in graph(*inputs)]


@pytest.mark.parametrize(
    ("function", "inductor", "reason"),
    [
        (lambda x: 2 * x if x.sum() > 0 else x + x, as_traced, "it cannot be traced: "),
        (
            lambda x, calls=itertools.count(): 2 * x + (next(calls) == 0),
            as_traced,
            "it differs when it is traced: ",
        ),
        (lambda x: 2 * x, absent, "it cannot be compiled: No working C++ compiler found"),
        (lambda x: 2 * x, wrong, "it differs when it is compiled: by "),
    ],
    ids=["chooses", "changes", "absent", "wrong"],
)
def test_a_function_without_a_program_runs_as_it_is_written(
    function: Any,
    inductor: Any,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "compile_graph", inductor)
    compiler = Programs()
    program = compiler(("double",), function)
    with caplog.at_level(logging.WARNING, "hgms.programs"):
        assert [float(program(torch.tensor([x]))) for x in (-3.0, 2.0)] == [-6.0, 4.0]
    assert compiler.outcomes["double"].startswith(f"eager: {reason}")
    assert len(caplog.records) == 1


def test_one_reason_is_said_once_and_a_refused_function_is_not_tried_for_other_shapes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "compile_graph", absent)
    tried: list[str] = []
    compiler = Programs(before=tried.append)
    with caplog.at_level(logging.WARNING, "hgms.programs"):
        for name in ("double", "triple"):
            program = compiler((name,), lambda x: x + x)
            assert program(torch.ones(2)).tolist() == [2.0, 2.0]
            count = len(tried)
            assert program(torch.ones(1)).tolist() == [2.0]
            assert len(tried) == count
    assert len(caplog.records) == 1
    assert set(tried) == {"double", "triple"}
    assert all(compiler.refuses(name) for name in tried)


def test_a_device_without_a_compiler_runs_the_function() -> None:
    compiler = Programs()
    result = compiler(("double",), lambda x: 2 * x)(torch.ones(3, device="meta"))
    assert (result.shape, result.device.type) == ((3,), "meta")
    assert compiler.refuses("double")


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("full"), ConfigError("wrong-value", "of the user", place=("x",))],
    ids=lambda error: type(error).__name__,
)
def test_what_a_function_as_written_would_not_survive_either_passes_on(error: Exception) -> None:
    def function(x: Tensor) -> Tensor:
        raise error

    compiler = Programs()
    with pytest.raises(type(error)):
        compiler(("fails",), function)(torch.ones(2))
    assert not compiler.busy
    assert not compiler.refuses("fails")


def test_making_inside_of_making_is_counted_once() -> None:
    compiler = Programs(clock=itertools.count(step=10).__next__)
    with compiler.making():
        assert compiler.busy
        with compiler.making():
            pass
        assert compiler.busy
    assert compiler.seconds == 10
    assert not compiler.busy


# --- recordings


@pytest.mark.usefixtures("recording")
def test_a_program_that_cannot_be_recorded_is_launched_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    error: list[Exception] = [RuntimeError("operation not permitted when stream is capturing")]

    def failing(*_: Any) -> None:
        raise error[0]

    monkeypatch.setattr(programs, "Recording", failing)
    compiler = Programs()
    with caplog.at_level(logging.WARNING, "hgms.programs"):
        program = compiler(("double",), lambda x: 2 * x)
        assert program(torch.ones(2)).tolist() == [2.0, 2.0]
    assert compiler.outcomes == {"double": "compiled"}
    assert "not permitted" in caplog.text
    error[0] = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        program(torch.ones(3))


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


def test_no_component_has_an_option_for_recordings() -> None:
    targets = [component.target for component in Registry.load().components()]
    assert targets
    assert not [each for each in targets if "cuda_graphs" in getattr(each, "__annotations__", {})]
