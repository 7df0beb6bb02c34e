"""What a person sees when a run from a configuration goes wrong: one message, an exit code, and
nothing lost.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner, Result
from support.descent import files
from support.helpers import rejects
from torch.autograd.function import once_differentiable

from hgms.cli import main
from hgms.comparison.grid_file import load as load_grid
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.outer import Adam
from hgms.runs import TRAITS, RunFolder, leased, load, run, run_config
from hgms.runs.advice import explained
from hgms.selectors import First
from hgms.solvers import CG
from hgms_core import Budget, Pipeline, Problem
from hgms_core.errors import ConfigError
from hgms_core.registry import Registry
from hgms_core.torch_errors import out_of_memory

CONFIG = """
task = "quadratic"
method = { name = "hg-implicit", generator = { lr = 0.05, steps = 3 } }
budget = "4 steps"
run = { threads = 1 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def finished(folder: Path, done: Path) -> Path:
    """The folder of a finished run."""
    shutil.copytree(done / "runs", folder / "runs")
    return run_folder(folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("done")
    (place / "run.toml").write_text(CONFIG)
    run_config(load(place / "run.toml", out=str(place / "runs")))
    return place


def hgms(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert "Traceback" not in result.output
    return result


def sets(*assignments: str) -> list[str]:
    return [argument for each in assignments for argument in ("--set", each)]


def run_folder(folder: Path) -> Path:
    [path] = folder.glob("runs/*/*/*")
    return path


def test_all_candidates_non_finite_ends_the_run_with_a_summary(folder: Path) -> None:
    done = hgms("run", "run.toml", *sets("method.generator.lr=1e30", "method.generator.steps=20"))
    assert done.exit_code == 1
    assert done.stderr.startswith("error: step 1: ")
    assert "(method.generator)" in done.stderr
    summary = json.loads((run_folder(folder) / "summary.json").read_text())
    assert (summary["status"], summary["outer_steps"]) == ("failed", 0)
    assert (run_folder(folder) / "checkpoint.json").exists()


@pytest.mark.parametrize(
    ("assignments", "code", "place"),
    [
        (["method.generator.lr=1e308", "method.generator.optimizer=adamw"], 1, "(method)"),
        (["run.device=cuda:7"], 2, "cuda:7"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_a_machine_does_not_hold_is_one_message(
    assignments: list[str], code: int, place: str
) -> None:
    done = hgms("run", "run.toml", *sets(*assignments))
    assert done.exit_code == code
    assert done.stderr.startswith("error: ")
    assert place in done.stderr


def test_a_finished_run_is_not_overwritten_and_resumes_to_itself(finished: Path) -> None:
    before = files(finished)
    again = hgms("run", "run.toml")
    assert again.exit_code == 2
    assert f"({finished.relative_to(Path.cwd())})" in again.stderr
    assert "--resume" in again.stderr
    resumed = hgms("run", "run.toml", "--resume", "--json")
    assert resumed.exit_code == 0
    assert json.loads(resumed.stdout)["outer_steps"] == 4
    assert files(finished) == before


def test_a_folder_of_another_configuration_or_process_is_refused(finished: Path) -> None:
    with leased(finished):
        done = hgms("run", "run.toml", "--resume")
    assert done.exit_code == 2
    assert f"({finished.relative_to(Path.cwd())})" in done.stderr
    config = finished / "config.toml"
    config.write_text(config.read_text().replace("outer_steps = 4", "outer_steps = 5"))
    done = hgms("run", "run.toml", "--resume")
    assert done.exit_code == 2
    assert "\n  budget.outer_steps: 5 in the folder, 4 in this run\n" in done.stderr
    assert str(config.relative_to(Path.cwd())) in done.stderr


# --- memory

SIZES = [
    ["task.rows={}"],
    ["task.validation_rows={}"],
    ["task.rows={}", "task.features={}"],
    ["task=sphere", "task.k={}", "task.d={}1"],
    ["task=hyper-cleaning", "task.hidden={}"],
    ["task=hyper-cleaning", "task.classes={}"],
    ["task=hyper-cleaning", "task.classes={}", "task.hidden=0", "task.noise=class-conditional"],
    ["task=imbalanced-loss", "task.views={}"],
    ["task=imbalanced-loss", "task.shift={}"],
    ["task=imbalanced-loss", "task.hidden={}"],
    ["task=imbalanced-loss", "task.channels=[8, {}]"],
]


def test_a_size_that_no_machine_holds_is_rejected(folder: Path) -> None:
    """Some of these an allocator refuses, some overflow torch's integers."""
    registry = Registry.load()
    for size, code in ((10**12, "too-large"), (10**30, "out-of-range")):
        for settings in SIZES:
            with rejects(code, of=ConfigError):
                values = [setting.format(size) for setting in settings]
                run_config(load(folder / "run.toml", values, registry=registry))


def test_out_of_memory_names_what_bounds_it_and_keeps_the_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Pipeline.step
    full = {2}

    def limited(self: Pipeline, problem: Any, state: Any, progress: float = 0.0) -> Any:
        if int(state["step"]) in full:
            raise torch.OutOfMemoryError("CUDA out of memory.\nGPU 0 has a total capacity of …")
        return step(self, problem, state, progress)

    monkeypatch.setattr(Pipeline, "step", limited)
    command = ("run", "run.toml", *sets("method=hg-ms", "method.generator.chunk=2"))
    done = hgms(*command)
    assert done.exit_code == 1
    first, *advice = done.stderr.splitlines()
    assert first.startswith("error: step 3: out of memory: ")
    assert [line.split(":")[0].strip() for line in advice] == [
        "method.generator",
        "method.selector",
        "method.hypergradient",
    ]
    assert "lower chunk (now 2; the same result)" in advice[0]
    summary = json.loads((run_folder(folder) / "summary.json").read_text())
    told = [summary[name] for name in ("status", "outer_steps", "validation_loss")]
    assert told == ["failed", 2, None]
    full.clear()  # another program gave its memory back
    again = hgms(*command, "--resume", "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["outer_steps"] == 4


@pytest.mark.usefixtures("folder")
def test_the_machines_own_memory_and_that_of_a_library_count_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Pipeline, "init", full)
    done = hgms("run", "run.toml")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: step 1: out of memory: ")
    for text in (
        "DefaultCPUAllocator: can't allocate memory: 8 bytes",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    ):
        assert out_of_memory(RuntimeError(text))


# --- parts


def test_what_cannot_run_on_a_task_is_said_with_the_part_that_is_to_blame() -> None:
    grid = {"budget": "2 steps", "task": ["quadratic", "hyper-cleaning"]}
    with rejects("several-errors", of=ConfigError) as caught:
        load_grid({**grid, "method": ["oracle-clean", "tpe", "uniform"]})
    wanted = {
        "oracle-clean": ("quadratic", "reference:clean"),
        "tpe": ("hyper-cleaning", "few-upper"),
    }
    assert len(caught.value.errors) == 2
    for error, (name, (task, trait)) in zip(caught.value.errors, wanted.items(), strict=True):
        assert (error.code, error.place) == ("not-supported", ("method", name))
        assert task in error.message
        assert TRAITS[trait] in error.message
        assert "part" not in error.message, "the method itself needs it"


class FirstOrderSquare(torch.autograd.Function):
    """The sum of squares, as a fused kernel has it: with a first derivative, but no second."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


def test_a_loss_without_a_second_derivative_needs_an_estimator_of_first_order(
    tmp_path: Path,
) -> None:
    problem = Problem(
        theta0={"t": torch.zeros(3)},
        x0={"x": torch.ones(3)},
        g=lambda t, x, _: FirstOrderSquare.apply(x["x"] - t["t"]),
        f=lambda t, x, _: x["x"].square().sum(),
    )
    generator = Branches(count=1, steps=1, lr=0.1)
    estimator = Implicit(solver=CG(), strategy="jvp")
    method = Pipeline(generator=generator, selector=First(), hypergradient=estimator, outer=Adam())
    folder = RunFolder(tmp_path / "run")
    with rejects("no-second-derivative", "hypergradient", "strategy", of=ConfigError) as caught:
        run(method, problem, Budget(outer_steps=2), folder=folder)
    summary = folder.read_summary() or {}
    assert (summary["status"], summary["error"]) == ("failed", f"{caught.value}")
    first_order = attrs.evolve(method, hypergradient=Implicit(solver=CG(), strategy="difference"))
    assert run(first_order, problem, Budget(outer_steps=2)).summary["status"] == "done"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Trying to backward through the graph a second time", "freed-graph"),
        ("value cannot be converted to type float without overflow", "not-finite"),
    ],
)
def test_classes_without_a_file_do_not_hide_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, message: str, code: str
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    typed = type("Typed", (), {"__module__": "__main__"})
    # a part of a class in C, and one of a class that stands in no file (`python -c`, a notebook)
    part = attrs.make_class("Locked", ["lock", "typed"])(Lock(), typed())
    error = explained(RuntimeError(message), 3, "", method=part, problem=typed())
    assert error is not None
    assert error.code == code
