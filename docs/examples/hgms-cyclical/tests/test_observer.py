"""`cycles.jsonl` says of every outer step what the run's own record says, also of a run that was
killed and resumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from hgms_cyclical import hgms_run_finished, hgms_run_started, hgms_step_finished
from hgms_cyclical.observer import FILE

from hgms.cli import main
from hgms.runs import load, run_config

RUN = """
budget = "5 steps"
task = "quadratic"

[method]
name = "hg-ms"
generator = { name = "cyclical-langevin", count = 3, cycle_steps = 4, temperature = 1e-2 }
"""


def carried_out(folder: Path, text: str = RUN, *options: str) -> Path:
    """The folder of a run of this configuration."""
    config = folder / "run.toml"
    config.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(
        main, ["run", str(config), "--out", str(folder / "runs"), "--json", *options]
    )
    assert done.exit_code == 0, done.output
    return Path(json.loads(done.stdout)["folder"])


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_is_what_the_record_says(tmp_path):
    folder = carried_out(tmp_path)
    head, *lines = rows(folder / FILE)
    assert head == {"cycles": 3, "task": "quadratic", "method": "hg-ms", "seed": 0}
    steps = [row for row in rows(folder / "steps.jsonl") if row["step"]]
    assert lines == [
        {"step": row["step"], "cycle": row["selected"] + 1, "gap": row["gap"]} for row in steps
    ]
    assert len(lines) == 5


def test_it_calls_the_run_what_its_author_calls_it(tmp_path):
    text = RUN + '[run]\nlabel = "mine"\ntask_label = "easy"\n'
    assert rows(carried_out(tmp_path, text) / FILE)[0] == {
        "cycles": 3,
        "task": "easy",
        "method": "mine",
        "seed": 0,
    }


def test_runs_of_other_generators_have_none(tmp_path):
    folder = carried_out(tmp_path, 'budget = "1 steps"\ntask = "quadratic"\nmethod = "hg-ms"\n')
    assert not (folder / FILE).exists()


def test_a_resumed_run_has_every_step_once(tmp_path):
    """Killed after step 4, before its checkpoint, while the line of step 5 is being written: it
    continues from step 3.
    """
    text = RUN + "[run]\ncheckpoint_seconds = 1e-9\n"
    expected = (carried_out(tmp_path, text) / FILE).read_bytes()
    config = load(tmp_path / "run.toml", out=str(tmp_path / "killed"))

    def kill(info, row, _share):
        if row["step"] == 4:
            with (info.folder / FILE).open("a") as stream:
                stream.write('{"step": 5, "cyc')
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run_config(config, watch=kill)
    (path,) = (tmp_path / "killed").rglob(FILE)
    assert [row["step"] for row in map(json.loads, path.read_text().splitlines()[1:-1])] == [
        1,
        2,
        3,
        4,
    ]
    resumed = run_config(config, resume=True)
    assert resumed.info.resumed_from == 3
    assert path.read_bytes() == expected


def test_a_finished_run_that_is_resumed_keeps_its_file(tmp_path):
    folder = carried_out(tmp_path)
    before = (folder / FILE).read_bytes()
    carried_out(tmp_path, RUN, "--resume")
    assert (folder / FILE).read_bytes() == before


def test_a_run_without_a_folder_is_fine():
    run = SimpleNamespace(
        folder=None,
        state={},
        config={"method": {"generator": {"name": "cyclical-langevin", "count": 2}}},
    )
    hgms_run_started(run)
    hgms_step_finished(run, {"step": 1, "selected": 0, "gap": 0.5})
    hgms_run_finished(run)


def test_a_step_without_a_gap_is_written_as_null(tmp_path):
    """With one finite candidate the gap is infinite, which the record holds as None."""
    config = {"method": {"generator": {"name": "cyclical-langevin", "count": 2}}}
    run = SimpleNamespace(
        folder=tmp_path, config=config, resumed_from=0, state={}, task="t", method="m", seed=3
    )
    hgms_run_started(run)
    hgms_step_finished(run, {"step": 0, "metric.loss": 1.0})
    hgms_step_finished(run, {"step": 1, "selected": 1, "gap": None})
    hgms_run_finished(run)
    assert rows(tmp_path / FILE) == [
        {"cycles": 2, "task": "t", "method": "m", "seed": 3},
        {"step": 1, "cycle": 2, "gap": None},
    ]
