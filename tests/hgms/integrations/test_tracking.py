"""Tracking: what was recorded arrives, also after a resume; what was asked for and cannot be had
stops the run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.helpers import rejects

from hgms.cli import main
from hgms.comparison import compare
from hgms.runs import RunConfig, RunResult, run_config
from hgms_core import ConfigError, HgmsError, MissingExtra

TOML = """
seed = 0
budget = "{steps} steps"
task = "quadratic"
[method]
name = "hg-ms"
keep = "last"
generator = {{ name = "branches", count = 2, steps = 5, lr = 0.1 }}
[run]
out = "{out}"
track = {track}
"""


def _run(out: Path, *track: str, steps: int = 3, resume: bool = False) -> RunResult:
    config = RunConfig.from_toml(TOML.format(out=out, steps=steps, track=list(track)))
    return run_config(config, resume=resume)


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_nothing_is_tracked_unless_asked(tmp_path: Path) -> None:
    result = _run(tmp_path)
    assert not (result.info.folder / "tensorboard").exists()


def test_tensorboard_holds_every_number_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    result = _run(tmp_path, "tensorboard")
    scalars = _scalars(result.info.folder)
    rows = [row for row in result.records if row["step"]]
    assert scalars["upper_loss"] == [
        (row["step"], pytest.approx(row["upper_loss"], rel=1e-6)) for row in rows
    ]
    assert scalars["scores/1"] == [
        (row["step"], pytest.approx(row["scores"][1], rel=1e-6)) for row in rows
    ]
    assert any(tag.startswith("metric/") for tag in scalars)


@pytest.mark.parametrize(
    ("name", "error", "code"),
    [("tensorbord", ConfigError, "unknown-tracker"), ("wandb", MissingExtra, "missing-package")],
)
def test_what_cannot_be_had_stops_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[HgmsError], code: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with rejects(code, "run", "track", of=error):
        _run(tmp_path, name)
    assert not list(tmp_path.rglob("steps.jsonl"))
    # a comparison: before any of its runs has failed for it
    with rejects(code, "run", "track", of=error):
        compare(
            "quadratic",
            "uniform",
            "2 steps",
            1,
            tmp_path / "compared",
            jobs=0,
            run={"track": [name]},
        )
    assert not (tmp_path / "compared").exists()


def test_wandb_and_trackio_get_the_rows_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both libraries stand behind the same calls; here their place is taken by a recorder with
    those calls.
    """
    seen: dict[str, list[object]] = {"rows": [], "inits": [], "ends": []}

    class Recorder:
        def __init__(self) -> None:
            self.summary: dict[str, float] = {}

        def log(self, row: dict[str, float], step: int) -> None:
            seen["rows"].append((step, row.get("upper_loss")))

        def finish(self, exit_code: int = 0) -> None:
            seen["ends"].append((exit_code, dict(self.summary)))

    class Module:
        @staticmethod
        def init(**arguments: object) -> Recorder:
            seen["inits"].append(arguments)
            return Recorder()

    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, Module)
    result = _run(tmp_path, "wandb", "trackio")
    expected = [(row["step"], row.get("upper_loss")) for row in result.records for _ in range(2)]
    assert seen["rows"] == expected
    assert all(
        event["config"]["method"]["name"] == "hg-ms" and event["resume"] == "allow"
        for event in seen["inits"]
    )
    assert seen["ends"][0] == (
        0,
        {f"final/{name}": value for name, value in result.summary["metrics"].items()},
    )


def test_who_follows_a_run_is_no_part_of_it(tmp_path: Path) -> None:
    """The same hash, the same folder; a run goes on, and is read back, whoever followed it
    before.
    """
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    alone = RunConfig.from_toml(TOML.format(out=tmp_path, steps=3, track=[]))
    followed = RunConfig.from_toml(TOML.format(out=tmp_path, steps=3, track=["tensorboard"]))
    assert alone.config_hash == followed.config_hash
    assert "track" not in alone.to_toml()
    first = run_config(followed)
    again = run_config(alone, resume=True)
    assert again.records == first.records


@pytest.mark.extended
def test_the_command_line_and_workers_hand_it_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    words = [
        "compare",
        "--task",
        "quadratic",
        "--methods",
        "uniform",
        "--budget",
        "2 steps",
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    done = CliRunner().invoke(
        main, [*words, "--track", "tensorboard", "--out", str(tmp_path / "option")]
    )
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("HGMS_TRACK", "tensorbord")
    refused = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "variable")])
    assert refused.exit_code == 2
    assert "'tensorbord' (run.track)" in refused.stderr
    assert list((tmp_path / "option").rglob("events.out.*"))
    assert not (tmp_path / "variable").exists()
