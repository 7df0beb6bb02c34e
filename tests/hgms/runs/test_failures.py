"""What a person sees when a run from a configuration goes wrong: one message, an exit code, and
nothing lost.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner, Result
from support.helpers import rejects
from torch.autograd.function import once_differentiable

from hgms.cli import main
from hgms.comparison.grid_file import load
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.outer import Adam
from hgms.runs import TRAITS, RunFolder, leased, run
from hgms.runs.advice import explained
from hgms.selectors import First
from hgms.solvers import CG
from hgms_core import Budget, Pipeline, Problem
from hgms_core.errors import ConfigError

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


def hgms(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def run_folder(folder: Path) -> Path:
    [path] = folder.glob("runs/*/*/*")
    return path


def test_all_candidates_non_finite_stops_with_a_summary(folder: Path) -> None:
    done = hgms(
        "run", "run.toml", "--set", "method.generator.lr=1e30", "--set", "method.generator.steps=20"
    )
    assert done.exit_code == 1
    assert done.stderr.startswith("error: step 1: ")
    assert "(method.generator)" in done.stderr
    assert "Traceback" not in done.stderr
    summary = json.loads((run_folder(folder) / "summary.json").read_text())
    assert (summary["status"], summary["outer_steps"]) == ("failed", 0)
    assert (run_folder(folder) / "checkpoint.json").exists()


def test_a_number_that_no_tensor_of_the_run_holds_is_one_message(folder: Path) -> None:
    done = hgms(
        "run",
        "run.toml",
        "--set",
        "method.generator.lr=1e308",
        "--set",
        "method.generator.optimizer=adamw",
    )
    assert done.exit_code == 1
    assert done.stderr.startswith("error: step 1: ")
    assert "(method)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_finished_run_is_not_overwritten_and_resumes_to_itself(folder: Path) -> None:
    assert hgms("run", "run.toml").exit_code == 0
    before = {path.name: path.read_bytes() for path in run_folder(folder).iterdir()}
    again = hgms("run", "run.toml")
    assert again.exit_code == 2
    assert f"({run_folder(folder).relative_to(folder)})" in again.stderr
    assert "--resume" in again.stderr
    resumed = hgms("run", "run.toml", "--resume", "--json")
    assert resumed.exit_code == 0
    assert json.loads(resumed.stdout)["outer_steps"] == 4
    assert before == {path.name: path.read_bytes() for path in run_folder(folder).iterdir()}


def test_a_folder_of_another_configuration_is_refused(folder: Path) -> None:
    assert hgms("run", "run.toml").exit_code == 0
    config = run_folder(folder) / "config.toml"
    config.write_text(config.read_text().replace("outer_steps = 4", "outer_steps = 5"))
    done = hgms("run", "run.toml", "--resume")
    assert done.exit_code == 2
    assert "\n  budget.outer_steps: 5 in the folder, 4 in this run\n" in done.stderr
    assert str(config.relative_to(folder)) in done.stderr


def test_a_corrupt_checkpoint_is_named(folder: Path) -> None:
    assert hgms("run", "run.toml").exit_code == 0
    (run_folder(folder) / "summary.json").unlink()
    [tensors] = run_folder(folder).glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-3])
    done = hgms("run", "run.toml", "--resume")
    assert done.exit_code == 2
    assert f"({tensors.relative_to(folder)})" in done.stderr


def test_two_processes_do_not_write_to_one_folder(folder: Path) -> None:
    assert hgms("run", "run.toml").exit_code == 0
    with leased(run_folder(folder)):
        done = hgms("run", "run.toml", "--resume")
    assert done.exit_code == 2
    assert f"({run_folder(folder).relative_to(folder)})" in done.stderr


def test_a_device_that_is_not_there(folder: Path) -> None:
    done = hgms("run", "run.toml", "--set", "run.device=cuda:7")
    assert done.exit_code == 2
    assert "cuda:7" in done.stderr
    assert "cpu" in done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        ["task.rows={}"],
        ["task.validation_rows={}"],
        ["task.rows={}", "task.features={}"],
        ["task=sphere", "task.d={}"],
        ["task=sphere", "task.k={}", "task.d={}1"],
        ["task=hyper-cleaning", "task.hidden={}"],
        ["task=hyper-cleaning", "task.classes={}"],
        ["task=hyper-cleaning", "task.classes={}", "task.hidden=0", "task.noise=class-conditional"],
        ["task=hyper-cleaning", "task.train_size={}"],
        ["task=imbalanced-loss", "task.views={}"],
        ["task=imbalanced-loss", "task.shift={}"],
        ["task=imbalanced-loss", "task.hidden={}"],
        ["task=imbalanced-loss", "task.channels=[8, {}]"],
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [10**12, 10**30], ids=["1e12", "1e30"])
def test_a_size_that_no_machine_holds(folder: Path, settings: list[str], size: int) -> None:
    """Some of these an allocator refuses, some overflow torch's integers, and each is one
    message.
    """
    sets = [argument for setting in settings for argument in ("--set", setting.format(size))]
    done = hgms("run", "run.toml", *sets)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert done.stderr.startswith("error: ")
    shown = "train_size" if "train_size" in settings[-1] else " GB, "
    assert (shown if size < 2**63 else "64 bits") in done.stderr


def test_differences_are_to_uniform_where_it_takes_part() -> None:
    table = {"budget": "2 steps", "task": ["quadratic"]}
    assert (
        load({**table, "method": ["hg-ms", {"name": "uniform", "label": "floor"}]}).reference
        == "floor"
    )
    assert load({**table, "method": ["hg-ms", "hg-implicit"]}).reference == "hg-ms"


def test_what_cannot_run_on_a_task_is_said_with_the_part_that_is_to_blame() -> None:
    with rejects("several-errors", of=ConfigError) as caught:
        load(
            {
                "budget": "2 steps",
                "task": ["quadratic", "hyper-cleaning"],
                "method": ["oracle-clean", "tpe", "uniform"],
            }
        )
    errors = caught.value.errors
    assert [(error.code, error.place) for error in errors] == [
        ("not-supported", ("method", "oracle-clean")),
        ("not-supported", ("method", "tpe")),
    ]
    for error, task, trait in zip(
        errors, ("quadratic", "hyper-cleaning"), ("reference:clean", "few-upper"), strict=True
    ):
        assert task in error.message
        assert TRAITS[trait] in error.message
        assert "part" not in error.message, "the method itself needs it"


@pytest.mark.extended
def test_demo_on_a_small_budget(folder: Path) -> None:
    done = hgms("demo", "--out", "out", "--seeds", "2", "--calls", "400", "--jobs", "0", "--json")
    assert done.exit_code == 0, done.stderr
    table = json.loads(done.stdout)
    methods = {row["method"]: row for row in table["methods"]}
    roles = {name: row["role"] for name, row in methods.items()}
    floors = ("uniform", "validation-only", "uniform-tilted")
    assert [roles.pop(name) for name in (*floors, "oracle-joint")] == ["floor"] * 3 + ["ceiling"]
    assert len(roles) == 2
    assert set(roles.values()) == {""}
    assert all(row["seconds"]["n"] == 2 for row in methods.values())
    assert methods["uniform"]["difference"] is None
    assert table["floor"] in floors
    pictures = {
        f"{name}{suffix}"
        for name in ("accuracy", "differences", "weights")
        for suffix in (".png", ".svg")
    }
    assert {Path(path).name for path in table["pictures"]} == pictures
    # over what is there
    again = hgms("demo", "--out", "out", "--seeds", "1", "--calls", "200", "--jobs", "0")
    assert again.exit_code == 0, again.stderr


def test_out_of_memory_names_what_bounds_it_and_keeps_the_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_core.pipeline import Pipeline

    step = Pipeline.step
    full = {2}

    def limited(self: Pipeline, problem: Any, state: Any, progress: float = 0.0) -> Any:
        if int(state["step"]) in full:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of …"
            )
        return step(self, problem, state, progress)

    monkeypatch.setattr(Pipeline, "step", limited)
    done = hgms("run", "run.toml", "--set", "method=hg-ms", "--set", "method.generator.chunk=2")
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "error: step 3: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.; the state "
        "after step 2 is kept",
        (
            "  method.generator: lower chunk (now 2; the same result), lower batch_size (now 256), "
            "lower count (now 2)"
        ),
        "  method.selector: lower chunk (now all; the same result), lower batch_size (now all)",
        "  method.hypergradient: lower batch_size (now 2500)",
    ]
    summary = json.loads((run_folder(folder) / "summary.json").read_text())
    assert (summary["status"], summary["outer_steps"], summary["validation_loss"]) == (
        "failed",
        2,
        None,
    )
    assert "out of memory" in summary["error"]
    full.clear()  # another program gave its memory back
    again = hgms(
        "run",
        "run.toml",
        "--set",
        "method=hg-ms",
        "--set",
        "method.generator.chunk=2",
        "--resume",
        "--json",
    )
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["outer_steps"] == 4


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")],
    ids=str,
)
def test_the_machines_own_memory_counts_too(
    error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_core.pipeline import Pipeline

    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Pipeline, "init", full)
    done = hgms("run", "run.toml")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: step 1: out of memory: ")
    assert "nothing was begun" in done.stderr


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


def test_a_loss_without_a_second_derivative_is_told_what_to_do(tmp_path: Path) -> None:
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
    summary = folder.read_summary()
    assert summary is not None
    assert (summary["status"], summary["error"]) == ("failed", f"{caught.value}")
    first_order = attrs.evolve(method, hypergradient=Implicit(solver=CG(), strategy="difference"))
    assert run(first_order, problem, Budget(outer_steps=2)).summary["status"] == "done"


def test_classes_without_a_file_do_not_hide_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    typed = type("Typed", (), {"__module__": "__main__"})
    # a part of a class in C, and one of a class that stands in no file (`python -c`, a notebook)
    part = attrs.make_class("Locked", ["lock", "typed"])(Lock(), typed())
    for message, code in (
        ("Trying to backward through the graph a second time", "freed-graph"),
        ("value cannot be converted to type float without overflow", "not-finite"),
    ):
        error = explained(
            RuntimeError(message), 3, "the state after step 2 is kept", method=part, problem=typed()
        )
        assert error is not None
        assert error.code == code
