"""One run, one folder: what `hgms compare`, `hgms run` and `hgms mix` make of one configuration
and the same data.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.processes import strike

from hgms.cli import main
from hgms.results import scan
from hgms.runs import leased, loop

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

GRID = f"""
seeds = [1, 2]
budget = "3 steps"
method = ["uniform", {{ name = "hg-baseline", generator = {{ batch_size = 4 }} }}]
{(Path(__file__).resolve().parents[2] / "tiny_mix.toml").read_text()}
[sample]
size = 10
"""


def write(name: str, numbers: range, answer: str) -> None:
    rows = [{"prompt": f"{n} + 1", "completion": answer} for n in numbers]
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("sums", "dots", "validation", "test")):
        write(name, range(20 * number, 20 * number + 20), "yes")
    Path("grid.toml").write_text(GRID)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def compare(*arguments: str) -> Result:
    return call("compare", "grid.toml", "--jobs", "0", *arguments)


def mix(stage: str, *arguments: str) -> Result:
    return call("mix", stage, "grid.toml", "--method", "hg-baseline", *arguments)


def folders() -> list[Path]:
    return sorted(Path("runs").glob("source-mixture/hg-baseline-*/seed-1"))


def written(folder: Path) -> dict[str, bytes]:
    """The files of the run: not the clock's, the environment's, or what was measured beside it."""
    names = ("config.toml", "steps.jsonl", "checkpoint.json", "summary.json")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture
def learn_nothing(monkeypatch: pytest.MonkeyPatch) -> Any:
    def forbid() -> None:
        def advance(*_: Any) -> None:
            raise AssertionError("it is learned already")

        monkeypatch.setattr(loop.Run, "advance", advance)

    return forbid


def test_what_compare_learned_is_the_mix(here: Path, learn_nothing: Any) -> None:
    assert compare("--method", "hg-baseline").exit_code == 0
    [folder] = folders()
    before = written(folder)
    learn_nothing()
    done = mix("sample", "--json")
    assert done.exit_code == 0, done.output
    assert f"reweight: done before ({folder})" in done.stderr
    assert written(folder) == before
    report = json.loads(done.stdout)
    assert report["folder"] == str(folder)
    assert report["stages"]["reweight"]["processor_seconds"] > 0  # compare counted them
    # seed 2 was learned by compare, too
    assert json.loads(mix("certainty", "--json").stdout)["certainty"]["seeds"]["over"] == "2 seeds"
    runs, skipped = scan("runs")
    assert ([run.path.name for run in runs], skipped) == (["seed-1", "seed-2"], [])


def test_what_a_mix_learned_is_a_run_of_compare(here: Path, learn_nothing: Any) -> None:
    done = mix("all", "--json")
    assert done.exit_code == 0, done.output
    [folder] = folders()
    assert {path.name for path in folder.iterdir()} >= {
        "config.toml",
        "summary.json",
        "mix.toml",
        "report.json",
        "scores.json",
        "certainty",
        "sample",
        "finetune",
        "evaluate",
    }
    learn_nothing()
    compared = compare("--method", "hg-baseline", "--seeds", "1-1", "--json")
    assert compared.exit_code == 0, compared.output
    assert call("run", "grid.toml").exit_code == 2  # a grid is no run; the mix's own file is
    again = call("run", str(folder / "mix.toml"), "--resume")
    assert again.exit_code == 0, again.output
    runs, skipped = scan("runs")
    assert ([run.path for run in runs], skipped) == ([folder], [])  # no stage is taken for a run


def test_changed_data_is_another_run(here: Path) -> None:
    assert compare("--method", "hg-baseline").exit_code == 0
    [before] = folders()
    write("dots", range(20, 40), "no.")
    assert compare("--method", "hg-baseline", "--seeds", "1-1").exit_code == 0
    assert len(folders()) == 2
    [after] = set(folders()) - {before}
    assert (after / "steps.jsonl").read_bytes() != (before / "steps.jsonl").read_bytes()
    done = mix("sample")
    assert done.exit_code == 0, done.output
    assert f"reweight: done before ({after})" in done.stderr
    # a report counts the newer data, and says so
    runs, [skipped] = scan("runs")
    assert after in [run.path for run in runs]
    assert (skipped.path, skipped.reason) == (
        before,
        f"the task's data have changed since; {after} is the newer run",
    )
    write("dots", range(20, 40), "yes")
    assert f"reweight: done before ({before})" in mix("reweight").stderr


def test_a_sweep_on_other_data_is_another_sweep(here: Path) -> None:
    sweep = (
        '[sweep]\nseeds = [9]\ntrials = 2\nbudget = "1 step"\n'
        'space.hg-baseline = { "outer.lr" = [0.1, 0.2] }\n'
    )
    Path("grid.toml").write_text(GRID + sweep)
    words = ("--method", "hg-baseline", "--seeds", "1-1", "--budget", "1 step")
    assert compare(*words).exit_code == 0
    assert compare(*words).exit_code == 0
    write("dots", range(20, 40), "no.")
    refused = compare(*words)
    assert refused.exit_code == 2
    assert "data (runs/sweeps/source-mixture/hg-baseline)\n" in refused.stderr


def test_data_that_are_gone_are_said_and_reports_do_without(here: Path) -> None:
    assert compare("--method", "hg-baseline", "--seeds", "1-1").exit_code == 0
    [folder] = folders()
    Path("dots.jsonl").unlink()
    missing = "dots.jsonl does not exist (task.sources.dots.path)"
    listed = compare("--dry-run", "--json")
    assert listed.exit_code == 0, listed.output
    assert {row["state"] for row in json.loads(listed.stdout)} == {"new"}
    compared = compare("--method", "hg-baseline", "--seeds", "1-1")
    assert compared.exit_code == 1
    assert missing in compared.stdout
    for stage in ("reweight", "all"):
        done = mix(stage)
        assert done.exit_code == 2
        assert missing in done.stderr
    done = call("run", str(folder / "config.toml"), "--out", "alone")
    assert done.exit_code == 2
    assert missing in done.stderr
    reported = call("report", str(folder), "--out", "page.md")
    assert reported.exit_code == 0, reported.output


@pytest.mark.extended
def test_a_mix_that_is_killed_while_it_learns_goes_on_to_the_same_bytes(here: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hgms.cli",
        "mix",
        "reweight",
        "grid.toml",
        "--method",
        "hg-baseline",
    ]
    sets = ["--set", "budget=40 steps", "--set", "run.checkpoint_seconds=0"]
    assert mix("reweight", *sets, "--out", "whole").exit_code == 0
    [whole] = Path("whole").glob("source-mixture/*/seed-1")
    with Path("err").open("w") as err, subprocess.Popen([*command, *sets], stderr=err) as process:
        strike(process.pid, Path("runs"), 5, signal.SIGKILL)
    [folder] = folders()
    assert not (folder / "summary.json").exists()
    again = mix("reweight", *sets, "--json")
    assert again.exit_code == 0, again.output
    assert "reweight: going on with hg-baseline, 40 outer steps" in again.stderr
    # nobody counted what was killed
    assert json.loads(again.stdout)["stages"]["reweight"]["processor_seconds"] is None
    ours = written(folder)
    theirs = written(whole)
    for name in ("steps.jsonl", "checkpoint.json", "summary.json"):
        assert ours[name] == theirs[name], name


def test_a_run_that_another_process_makes_is_not_taken_over(here: Path) -> None:
    assert mix("sample").exit_code == 0
    [folder] = folders()
    (folder / "summary.json").unlink()  # it is still being made
    with leased(folder):
        refused = mix("sample")
    assert refused.exit_code == 2
    assert f"({folder})" in refused.stderr
    assert not (folder / "summary.json").exists()
    with leased(folder, ".mix.lease"):  # a mix at work in its later stages
        assert f"({folder})" in mix("sample").stderr
        assert compare("--method", "hg-baseline", "--seeds", "1-1").exit_code == 0
    assert (folder / "summary.json").exists()
