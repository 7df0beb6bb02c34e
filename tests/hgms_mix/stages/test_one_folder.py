"""One run, one folder: what `hgms compare`, `hgms run` and `hgms mix` make of one configuration
and the same data.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import strike
from support.small_mixes import TASK, fails, right, write_sums

from hgms.runs import loop
from hgms.store import hold_lease

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

GRID = f"""
seeds = [1, 2]
budget = "2 steps"
method = ["uniform", {{ name = "hg-baseline", generator = {{ batch_size = 4 }} }}]
{TASK}
[sample]
size = 10
"""
COMPARE = ("compare", "grid.toml", "--jobs", "0", "--method", "hg-baseline")
ONE = (*COMPARE, "--seeds", "1-1")
METHOD = ("grid.toml", "--method", "hg-baseline")
SAMPLE = ("mix", "sample", *METHOD)
OWN = ("config.toml", "steps.jsonl", "checkpoint-2.safetensors", "summary.json")
"""The files of the run: not the clock's, the environment's, or what was measured beside it."""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `hgms compare` learned two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, name in enumerate(("sums", "dots", "validation", "test")):
            write_sums(name, range(20 * number, 20 * number + 20), "yes")
        Path("grid.toml").write_text(GRID)
        right(*COMPARE)
    return folder


@pytest.fixture
def here(compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it."""
    shutil.copytree(compared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def learn_nothing(*_: Any) -> None:
    raise AssertionError("it is learned already")


def folders() -> list[Path]:
    return sorted(Path("runs").glob("source-mixture/hg-baseline-*/seed-1"))


def written(folder: Path, names: tuple[str, ...] = OWN) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.extended
def test_what_compare_learned_is_the_mix(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [folder] = folders()
    before = written(folder)
    monkeypatch.setattr(loop.Run, "advance", learn_nothing)
    done = right(*SAMPLE, "--json")
    assert f"reweight: done before ({folder})" in done.stderr
    assert written(folder) == before
    report = json.loads(done.stdout)
    assert report["folder"] == str(folder)
    assert report["stages"]["reweight"]["processor_seconds"] > 0  # compare counted them
    upper = report["uncertainty"]["upper_loss"]
    assert upper["change"] == pytest.approx(upper["end"] - upper["start"], rel=1e-3, abs=0)


@pytest.mark.extended
def test_what_a_mix_learned_is_a_run_of_compare(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree("runs")
    right(*SAMPLE)
    [folder] = folders()
    monkeypatch.setattr(loop.Run, "advance", learn_nothing)
    right(*ONE)
    fails("run", "grid.toml")  # a grid is no run; the mix's own file is
    right("run", folder / "mix.toml", "--resume")


@pytest.mark.extended
def test_changed_data_is_another_run_and_data_that_are_gone_are_said(here: Path) -> None:
    [before] = folders()
    write_sums("dots", range(20, 40), "no.")
    right(*ONE)
    [after] = set(folders()) - {before}
    assert written(after)["steps.jsonl"] != written(before)["steps.jsonl"]
    assert f"reweight: done before ({after})" in right("mix", "reweight", *METHOD).stderr
    write_sums("dots", range(20, 40), "yes")
    assert f"reweight: done before ({before})" in right("mix", "reweight", *METHOD).stderr

    Path("dots.jsonl").unlink()
    fails("mix", "all", *METHOD, parts=["dots.jsonl does not exist (task.sources.dots.path)"])


@pytest.mark.extended
def test_a_mix_that_is_killed_while_it_learns_goes_on_to_the_same_bytes(here: Path) -> None:
    shutil.rmtree("runs")
    words = ["mix", "reweight", *METHOD, "--set", "budget=40 steps"]
    words += ["--set", "run.checkpoint_seconds=0"]
    right(*words, "--out", "whole")
    [whole] = Path("whole").glob("source-mixture/*/seed-1")
    command = [sys.executable, "-m", "hgms", *words]
    with Path("err").open("w") as err, subprocess.Popen(command, stderr=err) as process:
        strike(process.pid, Path("runs"), 5, signal.SIGKILL)
    [folder] = folders()
    assert not (folder / "summary.json").exists()
    again = right(*words, "--json")
    assert "reweight: resumes (hg-baseline, 40 outer steps)" in again.stderr
    # nobody counted what was killed
    assert json.loads(again.stdout)["stages"]["reweight"]["processor_seconds"] is None
    names = ("steps.jsonl", "checkpoint-40.safetensors", "summary.json")
    assert written(folder, names) == written(whole, names)


def test_a_run_that_another_process_makes_is_not_taken_over(here: Path) -> None:
    [folder] = folders()
    summary = folder / "summary.json"
    summary.unlink()  # it is still being made
    with hold_lease(folder):
        fails(*SAMPLE, parts=[f"({folder})"])
    assert not summary.exists()
