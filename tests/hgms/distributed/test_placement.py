"""Several ranks compute what one does: steps, losses between steps, messages; ranks that are lost.

The ranks are threads here (``support.threads``); tests/ranks starts processes.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from click.exceptions import Exit
from support.helpers import assert_same, network_problem, rejects
from support.threads import on_ranks

from hgms.distributed import (
    LAUNCHED,
    OnRanks,
    RankLost,
    Ranks,
    alone,
    follow,
    join,
    launcher,
    launcher_rank,
    place_parts,
    start,
)
from hgms.distributed.method import ensure_agreement
from hgms.generators.branches import Branches
from hgms.hypergradients import OneStep
from hgms.optim import SGD
from hgms.outer import Adam
from hgms.runs import RunConfig, run, run_config
from hgms.runs.rank import follow_launched
from hgms.selectors import BestOfN
from hgms_core import ConfigError, Pipeline

pytestmark = pytest.mark.extended

CPU = torch.device("cpu")
METHOD = Pipeline(
    generator=Branches(count=3, steps=2, optimizer=SGD(lr=0.05), batch_size=8),
    selector=BestOfN(),
    hypergradient=OneStep(derivative="difference"),
    outer=Adam(lr=0.1),
)


def config(out: Path, ranks: int, **run: Any) -> RunConfig:
    task = {"name": "ridge-cv"}
    settings = {"out": str(out), "dtype": "float64", "threads": 1, "ranks": ranks, **run}
    method = {
        "name": "hg-ms",
        "generator": {"count": 4, "steps": 2, "batch_size": 4},
        "hypergradient": {"name": "one-step", "derivative": "difference"},
    }
    return RunConfig.from_dict(
        {"budget": "4 steps", "seed": 3, "task": task, "method": method, "run": settings}
    )


def test_a_run_on_launched_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    alone = run_config(config(tmp_path / "one", 1))
    ours = config(tmp_path / "two", 2)

    def other() -> None:
        with pytest.raises(Exit) as ended:
            follow_launched(ours, CPU)
        assert ended.value.exit_code == 0

    result, _ = on_ranks(lambda: run_config(ours), other)
    assert_same(result.theta, alone.theta, rtol=1e-9, atol=1e-12)
    assert_same(result.x, alone.x, rtol=1e-9, atol=1e-12)
    chosen = [[row.get("selected") for row in each.records] for each in (result, alone)]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("sharded", [False, True])
def test_each_step_and_each_loss_between_steps_is_taken_by_all_ranks(sharded: bool) -> None:
    """Also of a state that only rank 0 has, as of a resumed run."""
    calls: list[Any] = []

    def theirs() -> Any:
        return attrs.evolve(
            network_problem(), evaluate=lambda theta, x: calls.append(theta["scale"].item()) or {}
        )

    def steps(method: Any, problem: Any) -> list[Any]:
        states = [method.init(problem, 5)]
        for number in range(2):
            states.append(method.step(problem, states[-1], number / 4)[0])
        again = method.step(problem, states[1], 0.25)[0]
        states.append(method.step(problem, copy.deepcopy(again), 0.75)[0])
        return [method.result(state) for state in states]

    def first() -> Any:
        ranks = Ranks(0, 2)
        join(0, 2, CPU, LAUNCHED)
        method = OnRanks(place_parts(METHOD, 2, CPU, sharded), ranks, sharded)
        assert method.method.outer == METHOD.outer
        problem = method.build(network_problem)
        results = steps(method, problem)
        batch = problem.lower_data.batch(None)
        values = [problem.g(*results[-1], batch), problem.f(*results[-1], batch)]
        problem.evaluate(*results[-1])
        ranks.close()
        return results, values

    def second() -> None:
        join(1, 2, CPU, LAUNCHED)
        follow(place_parts(METHOD, 2, CPU, sharded), theirs, Ranks(1, 2))

    (results, values), _ = on_ranks(first, second)
    whole = network_problem()
    assert_same(results, steps(METHOD, whole), rtol=1e-6, atol=1e-9)
    batch = whole.lower_data.batch(None)
    expected = [loss(*results[-1], batch) for loss in (whole.g, whole.f)]
    assert_same(values, expected, rtol=1e-12)
    assert calls == ([results[-1][0]["scale"].item()] if sharded else [])


def test_messages_reach_every_rank_and_another_theta_is_an_error() -> None:
    def rank() -> Any:
        number, count = launcher_rank() or (0, 1)
        ranks = Ranks(number, count)
        join(number, count, CPU, LAUNCHED)
        said = ranks.say({"a": torch.arange(3), "b": ["c", 1.5]} if number == 0 else None)
        ensure_agreement({}, ranks)
        ensure_agreement({"t": torch.tensor([1.0, float("nan")])}, ranks)
        with rejects("ranks-differ", "run", "ranks", of=ConfigError) as caught:
            ensure_agreement({"t": torch.full((2,), 1.0 + (number == 1))}, ranks)
        return said, "rank 1" in caught.value.message

    for said, named in on_ranks(rank, rank, rank):
        assert_same(said, {"a": torch.arange(3), "b": ["c", 1.5]})
        assert named


@pytest.mark.parametrize("method", ["file://{}/meet", LAUNCHED])
def test_a_world_of_one_rank_meets_by_gloo_and_is_left(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_MET", {"groups": 0})
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in {**address, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    join(0, 1, CPU, method.format(tmp_path))
    ranks = Ranks(0, 1)
    assert ranks.say({"a": 1}) == {"a": 1}
    ranks.close()
    assert not dist.is_initialized()
    with alone():
        assert launcher_rank() is None
    assert launcher_rank() == (0, 1)


@pytest.mark.parametrize(
    ("code", "how"),
    [("print('its last word'); exit(3)", "3"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
)
def test_a_lost_connection_names_the_rank_that_has_ended(code: str, how: str) -> None:
    place = tempfile.TemporaryDirectory()
    with Path(place.name, "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import os; {code}"], stdin=subprocess.PIPE, stdout=errors
        )
    ranks = Ranks(0, 2, [process], place)
    with rejects("rank-lost", "run", "ranks", of=RankLost) as caught, ranks.together("step 7"):
        raise RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer")
    assert all(part in caught.value.message for part in ("step 7", "rank 1 of 2", how))
    assert ("its last word" in caught.value.message) == (how == "3")
    with pytest.raises(RuntimeError, match="other"), ranks.together("step 8"):
        raise RuntimeError("other")
    with rejects("rank-lost", of=RankLost), Ranks(0, 2).together("step 9"):
        raise RuntimeError("gloo/transport timed out")


def test_a_rank_that_cannot_start_is_an_error_with_its_last_words() -> None:
    with rejects("rank-lost", "run", "ranks", of=ConfigError) as caught:
        start(2, CPU, "no_such_module", {}, 1)
    assert "no_such_module" in caught.value.message
    assert not dist.is_initialized()


@pytest.mark.parametrize("settings", [{"compile": True}, {"diagnose": 5}])
def test_what_ranks_cannot_do_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with rejects("conflicting-options", "run", *settings, of=ConfigError):
        run_config(config(tmp_path, 2, **settings))


def test_objects_of_one_process_do_not_run_on_ranks() -> None:
    with rejects("not-supported", "run", "ranks", of=ConfigError):
        run(METHOD, network_problem(), "1 steps", settings={"ranks": 2})
