"""`hgms mix compare`: tables of tuned models, a process for each mix, and [for.LABEL]."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.helpers import rejects
from support.small_mixes import fails, report_of, write_rows

from hgms.executors import BUSY, Ending, Job, Local
from hgms.executors import shared_work as together
from hgms.runs import Interrupted
from hgms.store import DiskError
from hgms_core import ConfigError
from hgms_core.errors import DataError, OutOfMemory
from hgms_mix.stages.compare.mixes import Contest, run_contest
from hgms_mix.stages.compare.outcome import Outcome
from hgms_mix.stages.config import load

GRID = """
budget = "2 steps"
seeds = [3, 5]
method = ["hg-ms", { name = "hg-ms", label = "other" }, "uniform"]
run = { out = "mixes", threads = 1 }

[task]
name = "source-mixture"
template = "plain"
max_length = 40
sources = { one = { path = "one.jsonl" }, two = { path = "two.jsonl" } }
validation = { all = { path = "validation.jsonl" } }
test = { all = { path = "test.jsonl" } }
[task.model]
config = { model_type = "gpt2", n_layer = 1, n_embd = 8, n_head = 2, n_positions = 40 }
tokenizer = "bytes"

[sample]
size = 10

[for.uniform]
budget = "1 steps"
sample.size = 24
finetune.epochs = 2
"""
MINE = """
import attrs
from hgms_core import hookimpl

@attrs.frozen(kw_only=True)
class Mine:
    name = "mine"
    def init(self, problem, seed): return {}
    def step(self, problem, state, progress): return state, {}
    def result(self, state): return {}, {}

@hookimpl
def hgms_register_methods():
    return [Mine]
"""


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for first, (name, count) in enumerate(
        {"one": 30, "two": 30, "validation": 20, "test": 10}.items()
    ):
        numbers = range(100 * first, 100 * first + count)
        answers = ["." if name == "two" else str(2 * n) for n in numbers]
        texts = zip(numbers, answers, strict=True)
        write_rows(name, [{"prompt": f"{n} twice", "completion": text} for n, text in texts])
    Path("grid.toml").write_text(GRID)
    return Path("grid.toml")


def test_values_for_one_method_are_laid_over_its_mix_alone_and_keep_a_path(grid: Path) -> None:
    """Of a model and of a source, whether [for.LABEL] or --set lays it; what has another origin
    of its own needs none.
    """
    uniform, other = (load(grid, method=label) for label in ("uniform", "other"))
    assert (uniform.sample.size, uniform.finetune.epochs) == (24, 2)
    assert [str(config.budget) for config in (uniform, other)] == ["1 outer step", "2 outer steps"]
    assert (other.sample.size, other.finetune.epochs) == (10, 1)

    path = '{ path = "one.jsonl" }'
    built = '{ config = { model_type = "gpt2" }, tokenizer = "bytes" }'
    grid.write_text(
        GRID.replace("[task]", '[finetune]\nmodel = "m"\n[task]').replace(path, '"one.jsonl"')
        + 'finetune.model = { dtype = "float32" }\n[for.hg-ms]\nfinetune.model = { path = "n" }\n'
        + f"[for.other]\nfinetune.model = {built}\n"
    )
    sets = ["task.sources.one.rows=10", "task.prior.one=0.3", "task.prior.two=0.7"]
    uniform, named, other = (
        load(grid, ["task.prior=size", *sets], method=label)
        for label in ("uniform", "hg-ms", "other")
    )
    models = [config.finetune.model for config in (uniform, named, other)]
    assert [model.path for model in models] == ["m", "n", None]
    assert uniform.task.prior == {"one": 0.3, "two": 0.7}


@pytest.mark.parametrize(
    ("own", "code", "place"),
    [
        ("[for.uniforn]\nsample.size = 3", "unknown-method", ("uniforn",)),
        ("[for.uniform]\ntask.cache = 3", "unknown-option", ("uniform", "task")),
        ("[for.uniform]\nsampel.size = 3", "unknown-option", ("uniform", "sampel")),
    ],
)
def test_values_for_nobody_or_of_another_table_are_refused(
    grid: Path, own: str, code: str, place: tuple[str, ...]
) -> None:
    grid.write_text(GRID.partition("[for.uniform]")[0] + own)
    with rejects(code, "grid.toml", "for", *place, of=ConfigError):
        load(grid, method="uniform")


def test_a_contest_is_of_all_methods_and_seeds(grid: Path) -> None:
    """But of no baselines that a grid only adds."""
    grid.write_text("baselines = true\n" + GRID)
    contest = Contest.of(grid)
    roles = {"hg-ms": "", "other": "", "uniform": "floor"}
    assert (contest.reference, contest.roles) == ("uniform", roles)
    assert list(contest.mixes)[:4] == [*((label, 3) for label in roles), ("hg-ms", 5)]
    some = Contest.of(grid, ["other", "hg-ms"], [9], "hg-ms", out="x")
    assert set(some.mixes) == {("other", 9), ("hg-ms", 9)}
    assert (some.reference, some.mixes["other", 9].run.out) == ("hg-ms", "x")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--methods", "uniforn"], "'uniforn'"),
        (["--methods", "hg-ms", "--reference", "uniform"], "'uniform'"),
        (["--seeds", "three"], "three"),
        (["--set", "sampel.size=3"], "did you mean 'sample'?"),
        (["--set", "task.test={}"], "(grid.toml: task.test)"),
    ],
)
def test_bad_words_are_one_message_and_exit_code_2(grid: Path, words: list[str], part: str) -> None:
    fails("mix", "compare", grid, *words, parts=[part])


def report(loss: float, counts: dict[str, int], seconds: list[float | None]) -> dict[str, Any]:
    stages = zip(("reweight", "sample", "finetune"), seconds, strict=True)
    return {
        "folder": "somewhere",
        "outer_steps": 2,
        "test": {"all": {"token_loss": {"value": loss}}},
        "sample": {"size": sum(counts.values()), "counts": counts},
        "stages": {name: {"processor_seconds": spent} for name, spent in stages},
    }


LOSSES = {
    "ours": [1.00, 1.02, 0.98, 1.01, 0.99],
    "theirs": [1.20, 1.21, 1.19, 1.22, 1.18],
    "uniform": [1.21, 1.22, 1.18, 1.23, 1.19],
    "oracle": [0.9, 0.91, 0.92, 0.9, 0.91],
}
ROLES = {"ours": "", "theirs": "", "uniform": "floor", "oracle": "ceiling"}


def test_differences_are_paired_by_seed_and_said_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports: dict[tuple[str, int], Any] = {
        (label, seed): report(loss, {"a": 6, "b": 2 + 2 * seed}, [10.0, 1.0, 5.0 + seed])
        for label, values in LOSSES.items()
        for seed, loss in enumerate(values)
    }
    error = OutOfMemory("out-of-memory", "no memory", hint="decrease task.micro_batch")
    failures = {("theirs", 5): error}
    outcome = Outcome(reports=reports, failures=failures, roles=ROLES, reference="uniform")
    table = outcome.table("all")
    gap = table.pairs["ours", "uniform"]
    assert (gap.mean, gap.excludes_zero) == (pytest.approx(-0.206), True)
    assert not table.pairs["theirs", "uniform"].excludes_zero
    rows = {row.method: row for row in table.rows}
    assert [*rows] == ["ours", "theirs", "uniform", "oracle"]
    assert (rows["ours"].ahead_of_floor, rows["theirs"].ahead_of_floor) == (True, False)
    assert (rows["ours"].cost.seconds.mean, rows["theirs"].failed) == (18.0, 1)
    # failures and warnings are printed once with their seeds
    for seed, lines in ((0, ["a has 0.97"]), (3, ["a has 0.97", "b"])):
        reports["ours", seed]["uncertainty"] = {"warnings": lines}
    outcome.print()
    out = capsys.readouterr().out
    for part in (
        "failed: theirs, seed 5: no memory",
        "a 0.53 b 0.47; not better than uniform",
        "5 seeds: a claim needs 10",
        "  warning: ours, seeds 0, 3: a has 0.97\n",
        "  warning: ours, seed 3: b\n",
    ):
        assert part in out


def fake(answer: Callable[[str, int], Any]) -> Any:
    """An executor that makes no mix: each job ends as `answer` says of its method and seed."""

    def carry_out(jobs: Iterable[Job], report: Any) -> Iterator[Ending]:
        for job in jobs:
            yield Ending(job=job, **answer(*job.arguments["title"]))

    return SimpleNamespace(carry_out=carry_out, close=lambda: None)


def test_a_mix_that_fails_or_is_lost_three_times_stops_no_other(
    grid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mix that another process makes is waited for, and a lost one is taken up again."""
    monkeypatch.setattr(together, "POLL", 0.0)
    asked = Counter[tuple[str, int]]()
    full = DiskError("cannot-write", "the disk is full", hint="free disk space")

    def answer(label: str, seed: int) -> Any:
        asked[label, seed] += 1
        if (label, seed) == ("uniform", 5):
            return {"error": full}
        if label == "other" and (seed == 5 or asked[label, seed] < 3):
            return {"lost": "its process was killed"}
        if (label, asked[label, seed]) == ("hg-ms", 1):
            return {"outcome": BUSY}
        test = {"all": {"token_loss": {"value": len(label) + seed}}}
        return {"outcome": {"report": {"folder": label, "test": test}}}

    result = run_contest(Contest.of(grid, out="there"), fake(answer), print)
    times = {"hg-ms": 2, "uniform": 1, "other": 3}
    assert asked == {(label, seed): times[label] for label in times for seed in (3, 5)}
    codes = {which: error.code for which, error in result.failures.items()}
    assert codes == {("uniform", 5): "cannot-write", ("other", 5): "worker-lost"}


@pytest.mark.extended
def test_a_batch_system_stops_every_mix(grid: Path) -> None:
    """SIGTERM reaches the mixes as Ctrl-C does, and those that wait are not begun."""
    grid.write_text(GRID.replace('budget = "2 steps"', 'budget = "100000 steps"'))

    def press() -> None:
        while not any(
            path.read_bytes().count(b"\n") > 2 for path in Path("mixes").rglob("steps.jsonl")
        ):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    def missed(*_: Any) -> None:
        raise AssertionError("the signal was not handled")

    before = signal.signal(signal.SIGTERM, missed)
    try:
        threading.Thread(target=press).start()
        with pytest.raises(Interrupted) as stopped:
            run_contest(Contest.of(grid), Local(jobs=1), lambda line: None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.number == signal.SIGTERM
    assert "0 of 6" in stopped.value.args[0]
    assert len(list(Path("mixes").rglob("checkpoint-*.safetensors"))) == 1


@pytest.mark.extended
def test_a_finished_mix_takes_no_process(grid: Path) -> None:
    def begin(*_: Any) -> Any:
        raise InterruptedError

    def result(*sets: str) -> Any:
        contest = Contest.of(grid, ["uniform"], [5], sets=list(sets))
        return run_contest(contest, fake(begin), lines.append)

    lines: list[str] = []
    alone = report_of("mix", grid, "--method", "uniform", "--seed", "5")
    assert json.loads(json.dumps(result().reports["uniform", 5])) == alone
    assert lines == ["1 of 1 mix done before"]
    with pytest.raises(InterruptedError):  # a process makes what has other settings
        result("finetune.epochs=3")
    Path("two.jsonl").unlink()  # is said at once, not by each process
    with rejects("missing-file", of=DataError):
        result()


@pytest.mark.nightly
def test_the_mixes_are_those_of_hgms_mix(grid: Path) -> None:
    words = ("--methods", "hg-ms,uniform", "--seeds", "5-5")
    table = report_of("mix", "compare", grid, *words)
    alone = report_of("mix", grid, "--method", "uniform", "--seed", "5")
    (loss,) = (mix["losses"]["all"] for mix in table["mixes"] if mix["method"] == "uniform")
    assert alone["test"]["all"]["token_loss"]["value"] == loss
