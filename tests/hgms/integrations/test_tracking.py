"""Tracking: what was recorded arrives, also after a resume; what was asked for and cannot be had
stops the run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner
from support.helpers import rejects

from hgms.cli import main
from hgms.comparison import compare
from hgms.runs import RunConfig, RunResult, run_config
from hgms_core import ConfigError, HgmsError
from hgms_core.errors import MissingExtra

TOML = """
seed = 0
budget = "3 steps"
task = "quadratic"
[method]
name = "hg-ms"
keep = "last"
generator = {{ name = "branches", count = 2, steps = 5, optimizer = {{ name = "sgd", lr = 0.1 }} }}
[run]
out = "{out}"
track = {track}
"""


def configured(out: Path, *track: str) -> RunConfig:
    return RunConfig.from_toml(TOML.format(out=out, track=list(track)))


def test_tensorboard_holds_every_number_and_who_follows_a_run_is_no_part_of_it(
    tmp_path: Path,
) -> None:
    """The same hash, the same folder; a run goes on, and is read back, whoever followed it
    before.
    """
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra tensorboard is not installed",
    )
    alone, followed = configured(tmp_path), configured(tmp_path, "tensorboard")
    assert alone.config_hash == followed.config_hash
    assert "track" not in alone.to_toml()
    first = run_config(followed)
    events = accumulator.EventAccumulator(str(first.info.folder / "tensorboard")).Reload()
    rows = [row for row in first.records if row["step"]]
    for tag, values in {
        "upper_loss": [row["upper_loss"] for row in rows],
        "scores/1": [row["scores"][1] for row in rows],
    }.items():
        found = events.Scalars(tag)
        assert [event.step for event in found] == [row["step"] for row in rows]
        assert [event.value for event in found] == pytest.approx(values, rel=1e-6)
    assert any(tag.startswith("metric/") for tag in events.Tags()["scalars"])
    assert run_config(alone, resume=True).records == first.records


@pytest.mark.parametrize(
    ("name", "error", "code"),
    [("tensorbord", ConfigError, "unknown-tracker"), ("wandb", MissingExtra, "missing-package")],
)
def test_what_cannot_be_had_stops_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[HgmsError], code: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    settings: Any = {"jobs": 0, "run": {"track": [name]}}
    with rejects(code, "run", "track", of=error):
        run_config(configured(tmp_path, name))
    # a comparison: before any of its runs has failed for it
    with rejects(code, "run", "track", of=error):
        compare("quadratic", "uniform", "2 steps", 1, tmp_path / "compared", **settings)
    assert not [*tmp_path.rglob("steps.jsonl"), *tmp_path.glob("compared")]


def test_wandb_and_trackio_get_the_rows_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both libraries stand behind the same calls; here their place is taken by a recorder with
    those calls.
    """
    tracker = MagicMock()
    tracker.init.return_value.summary = summary = {}
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, tracker)
    result: RunResult = run_config(configured(tmp_path, "wandb", "trackio"))
    logged = [call.args[0].get("upper_loss") for call in tracker.init.return_value.log.mock_calls]
    assert logged == [row.get("upper_loss") for row in result.records for _ in range(2)]
    assert tracker.init.call_args.kwargs["config"]["method"]["name"] == "hg-ms"
    metrics = result.summary["metrics"]
    assert summary == {f"final/{name}": value for name, value in metrics.items()}


@pytest.mark.extended
def test_the_command_line_and_workers_hand_it_down(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    words = ["compare", "--task", "quadratic", "--methods", "uniform", "--seeds", "1"]
    words += ["--jobs", "1", "--budget", "2 steps", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, [*words, "--track", "tensorboard"])
    assert done.exit_code == 0, done.output
    assert list(tmp_path.rglob("events.out.*"))
