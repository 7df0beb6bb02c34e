"""`hgms mix surface` end to end, on models of a few thousand parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.helpers import rejects
from support.small_mixes import TASK, begin, fails, right

from hgms_core import ConfigError, NumericalError

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'hgms[sklearn]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

from hgms_mix.stages.training import TrainingProgress
from hgms_mix.surface.runs import DesignRuns
from hgms_mix.surface.train import load, points_of, run_points

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    )
]
MIX = f"""
seed = 1
{TASK}
[sample]
size = 12
[finetune]
lr = 3e-2
micro_batch = 6
accumulation = 1
save_every = 1
[surface]
points = 8
repeats = 2
"""
DESIGN = Path("runs/mix/surface")
WIDE = '{model_type = "gpt2", n_layer = 1, n_embd = 16, n_head = 2, n_positions = 40}'
LARGER = f'finetune.model={{config = {WIDE}, tokenizer = "bytes"}}'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    begin(MIX, dots=range(100, 140), validation=range(300, 312), test=range(400, 412))
    return tmp_path


def losses() -> dict[str, Any]:
    paths = DESIGN.glob("runs/*/manifest.json")
    records = (json.loads(path.read_bytes())["facts"] for path in paths)
    return {record["key"]: record["metrics"] for record in records}


@pytest.mark.extended
def test_a_design_is_run_once_and_goes_on_where_it_was_broken_off(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = iter([False, False, True])

    def interrupted(self: DesignRuns, point: Any, keep: Any = DesignRuns.run) -> Any:
        if next(begun):
            raise KeyboardInterrupt
        return keep(self, point)

    with monkeypatch.context() as patched:
        patched.setattr(DesignRuns, "run", interrupted)
        fails("mix", "surface", "mix.toml", code=130, parts=["run the same command"])
    first = losses()
    assert len(first) == 2
    done = right("mix", "surface", "mix.toml", "--json", sets=[LARGER])
    report = json.loads(done.stdout)
    every = losses()
    assert len(every) == 8
    assert {key: every[key] for key in first} == first
    assert report["targets"] == {"validation_sums": 1.0}
    said = right("mix", "surface", "mix.toml").stdout
    assert f"{report['recommended']['sums']:.4f}" in said
    assert "--set budget=1steps --set 'method=" in said
    assert losses() == every
    ratios, metrics = (
        np.genfromtxt(DESIGN / name, delimiter=",", names=True)
        for name in ("ratios.csv", "metrics.csv")
    )
    found = metrics["validation_sums"]
    # a prior's run has half of its rows of each source; a repeat another seed, so another loss
    one, other = found[np.isclose(ratios["sums"], 1 / 2)]
    assert one != other


@pytest.mark.extended
def test_a_run_broken_off_in_fine_tuning_ends_with_the_same_losses(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = load(Path("mix.toml"), ["finetune.micro_batch=3", "finetune.save_every=2"])
    runs, broken = (DesignRuns(config=plan.config, folder=Path(x)) for x in ("whole", "broken"))
    point = points_of(plan, runs)[-1]
    whole = runs.run(point)
    assert whole.tokens > 0
    np.testing.assert_allclose(whole.mixture, point.weights, atol=1 / 12)

    def interrupt(self: Any, row: Any, steps: int, keep: Any = TrainingProgress.append) -> None:
        keep(self, row, steps)
        self.interrupts.number = 2 if row["step"] == 1 else None

    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            broken.run(point)
    again = broken.run(point)
    assert again.metrics == whole.metrics


@pytest.mark.extended
def test_a_run_is_the_same_as_a_job_of_values_alone(here: Path) -> None:
    """As another machine carries it out, which has read nothing yet; what another process is at
    is left to that.
    """
    from hgms.executors import BUSY
    from hgms_mix.stages import claim
    from hgms_mix.surface import jobs

    plan = load(Path("mix.toml"), ["task.validation.more.path=test.jsonl"])
    alone, runs = (DesignRuns(config=plan.config, folder=Path(name)) for name in ("alone", "runs"))
    point = points_of(plan, alone)[-1]
    piece = jobs.piece(runs, point)
    arguments = json.loads(json.dumps(piece.job().arguments))
    jobs.design_of.cache_clear()
    with claim(piece.path):
        assert jobs.work(arguments, lambda **event: None) == BUSY
    assert piece.finished() is None
    heard: list[dict[str, Any]] = []
    assert jobs.work(arguments, lambda **event: heard.append(event)) == {}
    assert {event["event"] for event in heard} == {"stage", "step"}
    own = alone.run(point)
    assert piece.finished() == own


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--set", "surface.points=6"], "(surface.points)"),
        (["--set", "sample.seed=1"], "(sample.seed)"),
        (["--set", "surface=3"], "(mix.toml: surface)"),
        (["--set", "surface={point=3}"], "surface.point)"),
        (["--set", "task=quadratic"], "(task.name)"),
        (["--set", "surface.targets.dots=1"], "(surface.targets.dots)"),
    ],
)
def test_bad_plans_leave_with_2_before_anything_runs(
    arguments: list[str], place: str, here: Path
) -> None:
    fails("mix", "surface", "mix.toml", *arguments, parts=[place])
    assert not Path("runs").exists()


def test_a_run_that_diverges_is_recorded_and_too_many_are_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(self: Any, row: Any, steps: int) -> None:
        raise NumericalError("not-finite", "the loss of fine-tuning step 1 is nan")

    plan = load(Path("mix.toml"))
    runs = DesignRuns(config=plan.config, folder=Path("design"))
    points = points_of(plan, runs)[-2:]
    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "append", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # which is no divergence
            runs.run(points[0])
        patched.setattr(TrainingProgress, "append", diverge)
        # though no run comes after it
        with rejects("diverged", "finetune", "lr", of=NumericalError):
            run_points(runs, points[:1], lambda line: None, diverging=0)
    assert set(runs.find_outcome(points[0]).metrics) == {"validation_sums", "test_sums"}
    outcomes = run_points(runs, points, lambda line: None, diverging=1)
    assert [outcome.is_finite for outcome in outcomes] == [False, True]


def test_a_run_that_fails_is_named_and_the_others_are_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = load(Path("mix.toml"))
    runs = DesignRuns(config=plan.config, folder=Path("design"))
    points = points_of(plan, runs)[-2:]
    runs.run(points[1])
    error = ConfigError("wrong-value", "of this mixture", place=("finetune", "lr"))
    monkeypatch.setattr(DesignRuns, "run", Mock(side_effect=error))
    with rejects("runs-failed", str(runs.folder)) as caught:
        run_points(runs, points, lambda line: None, diverging=1)
    assert "finetune.lr" in caught.value.message
    assert [runs.find_outcome(point) is None for point in points] == [True, False]
