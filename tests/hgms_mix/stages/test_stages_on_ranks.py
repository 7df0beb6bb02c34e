"""Stages of a mix that ranks (threads here) run together, and gradients that they average."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.exceptions import Exit
from support.helpers import rejects
from support.small_mixes import TASK, begin
from support.threads import on_ranks
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from hgms.distributed import LAUNCHED, call, join, launched
from hgms_core import ConfigError
from hgms_mix.stages import carry_out, follower, load
from hgms_mix.stages.config import MixConfig, resolved
from hgms_mix.stages.evaluate import tuned
from hgms_mix.stages.follower import follow_launched, follow_started
from hgms_mix.stages.mix import STAGES, Mix
from hgms_mix.stages.on_ranks import call_off, together
from hgms_mix.stages.replicas import average, of_replicas
from hgms_mix.stages.stage import Stage

pytestmark = pytest.mark.extended

MIX = f"""
seed = 1
budget = "2 steps"
[method]
name = "hg-ms"
generator = {{ count = 2, steps = 1, batch_size = 4 }}
hypergradient = {{ name = "through-step", derivative = "difference" }}
[certainty]
validation_blocks = 4
source_blocks = 4
rows = 1
[run]
threads = 1
{TASK}
[sample]
size = 29
[finetune]
lr = 1e-2
micro_batch = 3
accumulation = 2
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mix:
    """A mix that one process has made."""
    place = tmp_path_factory.mktemp("mix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        begin(MIX.replace('path = "', f'path = "{place}/'))
    config = load(place / "mix.toml", out=str(place / "runs"))
    mix = Mix(config, Path(carry_out(config)["folder"]))
    mix.run("evaluate")
    return mix


def on_two(made: Mix) -> MixConfig:
    place = made.folder.parents[3]
    return load(place / "mix.toml", ["run.ranks=2"], out=str(place / "runs"))


def stage_named(name: str) -> Stage:
    return next(stage for stage in STAGES if stage.name == name)


def test_ranks_evaluate_as_one_process_does(
    made: Mix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_two(made)
    lock = Lock()

    def one_by_one(*args: Any) -> Any:
        with lock:  # threads share the random numbers of a new model
            return tuned(*args)

    monkeypatch.setattr("hgms_mix.stages.evaluate.tuned", one_by_one)
    stage = stage_named("evaluate")

    def first() -> float:
        follow_launched(config)  # rank 0 goes on at once
        mix = Mix(config, made.folder)
        mix.done.update(made.done)
        stage.run(mix, tmp_path)
        call_off(config)
        return mix.others_seconds

    def other() -> None:
        with pytest.raises(Exit) as ended:
            follow_launched(config)
        assert ended.value.exit_code == 0

    assert on_ranks(first, other)[0] > 0
    ours, alone = (
        json.loads((folder / "losses-sums.json").read_bytes())
        for folder in (tmp_path, made.folder / "evaluate")
    )
    assert (ours["digest"], ours["tokens"]) == (alone["digest"], alone["tokens"])
    assert ours["total"] == pytest.approx(alone["total"], rel=1e-6)
    follow_launched(config)  # no launcher has started this process
    assert launched() is None


def test_a_stage_of_one_rank_knows_of_no_others_and_a_rank_needs_the_folder(
    made: Mix, tmp_path: Path
) -> None:
    config = on_two(made)

    def first() -> Any:
        with together(Mix(config, made.folder), stage_named("sample"), tmp_path) as ranks:
            seen = ranks, launched()
        call({"stage": "evaluate", "at": str(tmp_path / "none"), "folder": "", "done": {}})
        return *seen, launched()

    def other() -> None:
        with rejects("missing-file", "run", "out", of=ConfigError):
            follow_launched(config)

    assert on_ranks(first, other)[0] == (None, None, (0, 2))


def test_a_started_rank_says_in_its_last_line_why_it_ends(
    made: Mix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"stage": "evaluate", "at": str(tmp_path / "none"), "folder": "", "done": {}}
    meeting = {"rank": 1, "method": LAUNCHED, "plugins": []}
    ready: list[int] = []

    def last_words(config: Any) -> str:
        told = {**place, **meeting, "config": config}
        monkeypatch.setattr(follower, "begun", lambda: (told, lambda: ready.append(1)))
        with pytest.raises(SystemExit) as ended:
            follow_started()
        return str(ended.value.code)

    assert str(tmp_path / "none") in last_words(resolved(on_two(made)))
    assert ready == [1]
    assert "run.ranks" in last_words({**resolved(made.config), "run": {"ranks": "many"}})
    assert ready == [1], "it has not loaded"


# --- replicas


class Trainer:
    """What of a trainer is used: its model, and an accelerator at its last micro-batch or not."""

    def __init__(self, model: nn.Module, last: bool) -> None:
        self.model = model
        self.accelerator = SimpleNamespace(sync_gradients=last, autocast=nullcontext)

    def training_step(self, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        loss = model(rows).square().mean()
        loss.backward()
        return loss.detach()


def test_replicas_take_the_mean_of_their_gradients_at_the_last_micro_batch() -> None:
    rows = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    plain = nn.Linear(3, 2)
    start = plain.state_dict()

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        return [leaf.grad.clone() for leaf in model.parameters()]

    def rank() -> Any:
        number, count = launched()
        join(number, count, torch.device("cpu"), LAUNCHED)
        found = []
        for last in (False, True):
            model = nn.Linear(3, 2)
            model.load_state_dict(start)
            trainer = of_replicas(Trainer)(model, last)
            wrapped = trainer._wrap_model(model)
            assert trainer._wrap_model(wrapped) is wrapped
            loss = trainer.training_step(wrapped, rows[number])
            found.append((loss, gradients(model)))
        missing = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        missing.grad = torch.full((2,), 3.0, dtype=torch.bfloat16) if number else None
        average([missing])
        return found, missing.grad

    own = []
    for each in rows:
        plain.zero_grad()
        loss = plain(each).square().mean()
        loss.backward()
        own.append((loss.detach(), gradients(plain)))
    mean = [sum(pair) / 2 for pair in zip(*(slopes for _, slopes in own), strict=True)]
    for (before, after), missing in on_ranks(rank, rank):
        number = [float(loss) for loss, _ in own].index(float(before[0]))
        torch.testing.assert_close(before, own[number])
        torch.testing.assert_close(after, (own[number][0], mean))
        torch.testing.assert_close(missing, torch.full((2,), 1.5, dtype=torch.bfloat16))
