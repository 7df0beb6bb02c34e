"""Compiled functions on disk: another process loads them without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.helpers import assert_same
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from hgms.compiled import Programs
from hgms.compiled.graph_code import Code, has_constants
from hgms.compiled.inductor import precompiled_headers
from hgms.compiled.library import Library, key_of
from hgms.compiled.programs import run_code
from hgms.store import SavedFile, cache_folder

STEP = """
import sys
import torch
from hgms.compiled import Programs, repeat

def step(a):
    values, turns = repeat(lambda x: 0.5 * torch.sin(a @ x), a.sum(0), 7)
    return {"x": values}

def run():
    programs = Programs()
    x = programs(("step",), step)(torch.linspace(-1, 1, 25).reshape(5, 5))["x"]
    assert programs.outcomes == {"step": "compiled"}
    return x
"""
PRINT = """
print(run().tolist())
print("torch._inductor.compile_fx" in sys.modules)
"""


def graph() -> GraphModule:
    return symbolic_trace(lambda a: [a + 1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HGMS_CACHE", str(tmp_path))
    return cache_folder("programs")


def test_a_key_depends_on_graph_shapes_settings_and_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = symbolic_trace(lambda a: [a + 2])
    x = torch.ones(2)
    keys = [
        key_of(graph(), [x], {}),
        key_of(other, [x], {}),
        key_of(graph(), [torch.ones(3)], {}),
        key_of(graph(), [x.double()], {}),
        key_of(graph(), [x], {"realize_reads_threshold": 2}),
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.append(key_of(graph(), [x], {}))
    assert len(set(keys)) == len(keys)
    assert key_of(graph(), [x], {}) == keys[-1]


def test_foreign_files_are_ignored(folder: Path) -> None:
    key = key_of(graph(), [torch.ones(2)], {})
    folder.mkdir()
    for name in (f"{key}-{'0' * 32}.so", f"{key}.so", "notes.txt"):
        (folder / name).write_text("no library")
    assert Library.load(key) is None


@pytest.mark.extended
def test_another_process_loads_a_program_and_a_damaged_file_is_rewritten(folder: Path) -> None:
    names: dict[str, object] = {}
    exec(STEP, names)
    run = names["run"]
    assert callable(run)
    first: Tensor = run()
    (path,) = folder.glob("*.so")
    shown = subprocess.run(
        [sys.executable, "-c", STEP + PRINT], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert_same(torch.tensor(json.loads(shown[0])), first, rtol=0, atol=0)
    assert shown[1] == "False", "no compiler is imported"
    content = path.read_bytes()
    path.write_bytes(content[:1000])
    assert_same(run(), first, rtol=0, atol=0)
    assert path.read_bytes() == content


def test_programs_of_an_interpreter_are_not_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hgms.compiled.programs.compile_graph",
        lambda graph, leaves, **_: lambda inputs: graph(*inputs),
    )
    assert float(Programs()(("double",), lambda x: 2 * x)(torch.ones(()))) == 2
    assert not folder.exists()


LOSS = """
SCALE = 2.0

def loss(theta, x, batch):
    fit = (theta["t"] * (batch["a"] @ x["w"]).sin()).square().mean()
    return SCALE * fit + 0.1 * (x["w"] * x["w"]).sum()
"""
RUN = """
import json, logging, sys
logging.basicConfig()
import torch
from attrs import evolve
import loss_module
from hgms.compiled import Programs
from hgms.compiled import programs as made
from hgms.compiled import levels, step_program
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.optim import SGD
from hgms.outer import Adam
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import ROLES, Data, Pipeline, Problem

def steps(joins=True, rows=6, loss=loss_module.loss):
    '''Take two outer steps; return the state, and the number of traces.'''
    torch.manual_seed(0)
    traces = []

    def counted(module, name):
        function = getattr(module, name)
        def call(*arguments):
            traces.append(name)
            return function(*arguments)
        setattr(module, name, call)
        return module, name, function

    data = Data.of({"a": torch.linspace(-1, 1, 4 * rows).reshape(rows, 4).sin()})
    problem = Problem(
        theta0={"t": torch.ones(1)},
        x0={"w": torch.linspace(0, 1, 4)},
        g=loss,
        f=loss,
        lower_data=data,
        upper_data=dict.fromkeys(ROLES, data),
        compiler=Programs(joins=joins),
    )
    pipeline = Pipeline(
        generator=Branches(count=2, steps=2, optimizer=SGD(lr=0.1)),
        selector=BestOfN(),
        hypergradient=Implicit(solver=CG(ridge=0.5, max_steps=3)),
        outer=Adam(lr=0.1),
    )
    kept = [counted(made, "trace"), counted(step_program, "trace_step"), counted(levels, "split")]
    try:
        state = pipeline.init(problem, 0)
        for _ in range(2):
            state, _record = pipeline.step(problem, state)
    finally:
        for module, name, function in kept:
            setattr(module, name, function)
    return float(state["theta"]["t"]), traces, problem.compiler.outcomes
"""
SHOW = """
made.LARGE = {large}
print(json.dumps([*steps(joins={joins}), "torch._dynamo" in sys.modules]))
"""
PARTS = {"branches", "linearization", "mixed product", "cg"}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("settings", "compiled", "traced"),
    [
        ({"joins": True, "large": 100}, {"step"}, set()),
        ({"joins": False, "large": 100}, PARTS | {"scores"}, set()),
        ({"joins": False, "large": 0}, {"branches", "cg"}, {"linearization", "mixed product"}),
    ],
    ids=["one program", "part by part", "large"],
)
def test_a_second_process_loads_steps_without_a_trace(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
    compiled: set[str],
    traced: set[str],
) -> None:
    """The same numbers, without torch's tracer and compiler."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "loss_module.py").write_text(LOSS)
    script = tmp_path / "script.py"
    script.write_text(RUN + SHOW.format(**settings))
    command = [sys.executable, script]
    first, second = (
        json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    value, traces, outcomes, _ = first
    assert traces
    assert outcomes == dict.fromkeys(compiled, "compiled") | dict.fromkeys(traced, "traced")
    assert second == [value, [], outcomes, False]


def test_a_graph_with_a_constant_runs_as_a_graph() -> None:
    """Code has no place for a tensor; a graph that a step calls once is then kept."""
    constant = torch.arange(3.0)
    with_constant, without = (symbolic_trace(f) for f in (lambda a: [a + constant], double))
    assert (has_constants(with_constant), has_constants(without)) == (True, False)
    with pytest.raises(ValueError, match="constant"):
        Code.of(with_constant)
    a = torch.ones(3)
    assert torch.equal(run_code(with_constant, [a])[0], a + constant)
    assert torch.equal(Code.of(without).as_module()(a), 2 * a)


def test_the_headers_of_kernels_are_precompiled() -> None:
    from torch._inductor.codecache import CppWrapperCodeCache

    before = CppWrapperCodeCache._get_uncompiled_header("cpu")
    with precompiled_headers():
        header = CppWrapperCodeCache._get_uncompiled_header("cpu")
    lines = f"#include <{header}>".splitlines()
    assert lines == [f"#include <{before}>", "#include <torch/csrc/inductor/cpp_prefix.h>"]
    assert CppWrapperCodeCache._get_uncompiled_header("cpu") == before


def double(a: Tensor) -> Tensor:
    return 2 * a


def triple(a: Tensor) -> Tensor:
    return 3 * a


@pytest.mark.extended
def test_a_wrong_program_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program of another function is under the key of this one."""

    def run(function: Callable[[Tensor], Tensor]) -> float:
        programs = Programs()
        value = float(programs(("step",), function)(torch.ones(())))
        assert programs.outcomes == {"step": "compiled"}
        return value

    assert run(double) == 2
    (first,) = folder.glob("*.pickle")
    assert run(triple) == 3
    (second,) = set(folder.glob("*.pickle")) - {first}
    first.unlink()
    place = SavedFile("programs", first.name.partition("-")[0], ".pickle")
    place.store(second.read_bytes())
    assert run(triple) == 3
    assert "is replaced" not in caplog.text
    assert run(double) == run(double) == 2
    assert caplog.text.count("the stored step is replaced, since it differs: by") == 1
    assert [path for path, _ in place.contents()] == [first]


def test_a_result_that_differs_is_made_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = []

    def recall(difference: str, parts: object = "code", size: int = 2) -> object:
        def make() -> list[int]:
            made.append(size)
            return [len(made)]

        leaves = [torch.ones(size)]
        return Programs().recall(["name"], (parts,), leaves, make, lambda found: difference)

    assert [recall(""), recall(""), made] == [[1], [1], [2]]
    assert not caplog.records
    assert recall("by 1") == recall("") == [2]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert recall("", size=3) == [3]
    names: dict[str, object] = {}
    exec("def step(x):\n    return x", names)
    assert recall("", names["step"]) != recall("", names["step"]), "without source: never stored"


def test_another_version_of_torch_makes_programs_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recall(value: int) -> object:
        return Programs().recall(["name"], ("code",), [], lambda: [value], lambda found: "")

    assert recall(1) == recall(2) == [1]
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert recall(3) == [3]


def test_an_error_of_a_check_makes_a_program_again(folder: Path) -> None:
    def fail(found: object) -> str:
        raise RuntimeError("another shape")

    programs = Programs()
    for value in (1, 2):
        assert programs.recall(["name"], ("code",), [], lambda value=value: [value], fail) == [
            value
        ]
    programs.refuse("name", "cannot be compiled")
    assert programs.recall(["name"], ("code",), [], lambda: [3], lambda found: "") is None
