"""What a person sees when a run from a configuration goes wrong: one message, an exit code, and
nothing lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from support.descent import files
from support.fakes import call
from support.helpers import rejects

from hgms.runs import load, run_config
from hgms_core import Pipeline
from hgms_core.errors import ConfigError

CONFIG = """
task = "quadratic"
method = { name = "hg-implicit", generator = { optimizer.lr = 0.05, steps = 3 } }
budget = "4 steps"
run = { threads = 1 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def started(*arguments: str, **sets: object) -> Result:
    """`hgms run run.toml …`"""
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    result = call("run", "run.toml", *arguments, *words)
    assert "Traceback" not in result.output
    return result


def the_run(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The one run's folder and its summary."""
    [path] = folder.glob("runs/*/*/*")
    return path, json.loads((path / "summary.json").read_text())


def test_a_finished_run_is_not_overwritten_and_one_of_others_is_refused(folder: Path) -> None:
    assert started().exit_code == 0
    path, _ = the_run(folder)
    before = files(path)
    again = started()
    assert again.exit_code == 2
    assert f"({path.relative_to(folder)})" in again.stderr
    resumed = started("--resume", "--json")
    assert (resumed.exit_code, json.loads(resumed.stdout)["outer_steps"]) == (0, 4)
    assert files(path) == before
    config = path / "config.toml"
    config.write_text(config.read_text().replace("outer_steps = 4", "outer_steps = 5"))
    done = started("--resume")
    assert done.exit_code == 2
    assert "\n  budget.outer_steps: 5 in the folder, 4 in this run\n" in done.stderr


# --- memory


def test_what_no_machine_holds_is_rejected(folder: Path) -> None:
    """An allocator refuses the one size, the other overflows torch's integers."""
    for code, size in (("too-large", 10**12), ("out-of-range", 10**30)):
        with rejects(code, of=ConfigError):
            run_config(load(folder / "run.toml", [f"task.rows={size}"]))


def test_out_of_memory_names_what_bounds_it_and_keeps_the_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Pipeline.step
    full = [torch.OutOfMemoryError("CUDA out of memory.\nGPU 0 has a total capacity of …")]

    def limited(self: Pipeline, problem: Any, state: Any, progress: float = 0.0) -> Any:
        if int(state["step"]) == 2 and full:
            raise full.pop(0)
        return step(self, problem, state, progress)

    monkeypatch.setattr(Pipeline, "step", limited)
    settings = {"method": "hg-ms", "method.generator.chunk": 2}
    done = started(**settings)
    assert done.exit_code == 1
    first, *advice = done.stderr.splitlines()
    assert first.startswith("error: step 3: out of memory: ")
    parts = [line.split(":")[0].strip() for line in advice]
    assert parts == ["method.generator", "method.selector", "method.hypergradient"]
    assert "lower chunk (now 2; the same result)" in advice[0]
    summary = the_run(folder)[1]
    told = [summary[name] for name in ("status", "outer_steps", "validation_loss")]
    assert told == ["failed", 2, None]
    last = started("--resume", "--json", **settings)  # another program gave its memory back
    assert (last.exit_code, json.loads(last.stdout)["outer_steps"]) == (0, 4)
