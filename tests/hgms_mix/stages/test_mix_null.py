"""How certain a mix is: the null test and the stage `certainty`, on models of a few thousand
parameters.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from support.helpers import rejects
from support.small_mixes import fails, report_of, right, stages_of, write_rows

from hgms.executors import RemoteProgress
from hgms.results import scan
from hgms.uncertainty import over_seeds
from hgms_core import DataError, Key
from hgms_mix.lm.halves import in_halves
from hgms_mix.stages import certainty as certain
from hgms_mix.stages import null_halves
from hgms_mix.stages.config import load

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

MIX = """
seed = 0
budget = "BUDGET"
METHOD
[task]
name = "source-mixture"
template = "plain"
max_length = 24
validation_split = [0.8, 0.1, 0.1]
[task.model]
config = { model_type = "gpt2", n_layer = 1, n_embd = 16, n_head = 2, n_positions = 24 }
tokenizer = "bytes"
[task.sources]
first = { path = "like.jsonl" }
second = { path = "SECOND.jsonl" }
[task.validation.sums]
path = "validation.jsonl"
[sample]
size = 20
"""
SMALL_STEPS = """
[method]
name = "hg-baseline"
generator = { lr = 0.1, batch_size = 8, mode = "loop" }
hypergradient = { upper_batch_size = 16 }
outer = { lr = 0.1 }
"""


def write(name: str, numbers: Sequence[int], answer: str | None = None) -> None:
    texts = [{"prompt": f"{n} + 1", "completion": answer or f"is {n + 1}"} for n in numbers]
    write_rows(name, texts)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    halves = torch.randperm(100, generator=Key(5).generator()).add(100).split(50)
    for name, half in zip(("like", "alike"), halves, strict=True):
        write(name, half.tolist())
    write("noise", range(300, 350), "zzzzzzz")
    write("validation", range(200, 260))
    mix_of()
    return tmp_path


def mix_of(second: str = "noise", method: str = SMALL_STEPS, budget: str = "20 steps") -> None:
    """mix.toml: the source `first` is like the validation rows."""
    text = MIX.replace("SECOND", second).replace("METHOD", method).replace("BUDGET", budget)
    Path("mix.toml").write_text(text)


def certainty(*arguments: object) -> Any:
    return report_of("mix", "certainty", "mix.toml", *arguments)["certainty"]


def test_halves_are_every_row_once_and_drawn_anew_for_every_number(here: Path) -> None:
    config = load(Path("mix.toml"))
    tokenizer = config.task.model.load_tokenizer()
    whole = config.task.tables(tokenizer)
    splits = ((0, 0), (0, 1), (1, 0), (0, 0))
    drawn = [null_halves.halved(config, *which).task.tables(tokenizer) for which in splits]
    for halves in drawn:
        assert list(halves) == ["first/1", "first/2", "second/1", "second/2"]
        for source in ("first", "second"):
            one, other = (halves[f"{source}/{half}"].rows for half in (1, 2))
            assert torch.equal(torch.cat([one, other]).sort().values, whole[source].rows)
            assert abs(len(one) - len(other)) <= 1
    kinds = {tuple(halves["first/1"].rows.tolist()) for halves in drawn}
    assert len(kinds) == 3  # the first and the last are one split
    fails("mix", "reweight", "mix.toml", sets=["task.halves=1"], parts=["(task.halves)"])
    write("noise", range(1))
    with rejects("too-few-rows", "task", "sources", "second", of=DataError):
        in_halves(load(Path("mix.toml")).task.tables(tokenizer), Key(0))


def test_a_mixture_of_sources_is_shared_by_their_halves(here: Path) -> None:
    task = attrs.evolve(load(Path("mix.toml")).task, halves=3)
    problem = task.problem(0, torch.device("cpu"), torch.float64)
    sources = problem.sources
    mixtures = ({"first": 0.8, "second": 0.2}, {"first/2": 1.0, "second/1": 1.0})
    found = [sources.weights(sources.theta(mixture)).tolist() for mixture in mixtures]
    assert found[0] == pytest.approx([0.4, 0.4, 0.1, 0.1], abs=1e-9)
    assert found[1] == pytest.approx([0, 0.5, 0.5, 0], abs=1e-9)
    assert [name for name, _ in problem.lower_data.strata] == list(sources.names)


@pytest.mark.extended
def test_two_halves_of_one_source_are_no_evidence(here: Path) -> None:
    """A/A: `first` and `second` are random halves of one list."""
    mix_of("alike", budget="12 steps")
    result = report_of("mix", "--null", "mix.toml")
    assert not result["evidence"], result["verdict"]
    assert all(max(run["weights"].values()) < 0.5 for run in result["weights"])
    mix_of("alike")
    report = certainty()
    assert not report["rows"]["evidence"]
    assert "no evidence against the prior (uniform)" in report["sentences"][0]


@pytest.mark.extended
def test_a_source_like_the_validation_rows_beside_noise_is_evidence(here: Path) -> None:
    mix_of(budget="12 steps")
    words = ("mix", "null", "mix.toml", "--seeds", "2", "--splits", "2")
    result = report_of(*words)
    assert result["evidence"], result["verdict"]
    assert [row["evidence"] for row in result["sources"]] == [1, -1]
    assert result["ratio"] > 3
    pairs = {(row["seed"], row["split"]) for row in result["weights"]}
    assert pairs == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert "4 of 4 runs done before" in right(*words).stderr
    # its runs are no results of the sources, and the mix knows of it
    assert scan("runs") == ([], [])
    assert certainty()["null"]["verdict"] == result["verdict"]
    # another budget is another mixture: nothing is known of that
    mix_of(budget="5 steps")
    for seed in range(3):
        report = certainty("--seed", seed)
    assert (report["null"], report["seeds"]["over"]) == (None, "3 seeds")
    assert [row["evidence"] for row in report["rows"]["sources"]] == [1, -1]
    effect = report["seeds"]["sources"][0]
    assert 0 < effect["low"] < effect["value"] < effect["high"] < 1
    # other data: the seeds of before are of another problem
    write("noise", range(300, 350), "yyyyyyy")
    assert certainty("--seed", "2")["seeds"] is None


def test_an_interrupted_null_test_goes_on_to_the_same_weights(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix_of(budget="3 steps")
    whole = report_of("mix", "null", "mix.toml", "--seeds", "2", "--out", "whole")

    def press(self: Any, info: Any, record: dict[str, Any], share: float) -> None:
        if record["step"] == 2 and info.seed == 1:
            signal.raise_signal(signal.SIGINT)

    words = ("mix", "null", "mix.toml", "--seeds", "2", "--out", "broken")
    with monkeypatch.context() as patched:
        patched.setattr(RemoteProgress, "watch", press)
        fails(*words, code=130, parts=["1 of 2 runs\n  run the same command"])
    again = right(*words, "--json")
    assert "1 of 2 runs done before" in again.stderr
    assert "seed-1-split-0: going on" in again.stderr
    assert json.loads(again.stdout)["weights"] == whole["weights"]


def test_runs_of_a_null_test_that_fail_are_named_and_uniform_is_no_evidence(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: Any, keep: Any = null_halves.run_config, **how: Any) -> Any:
        if config.seed == 0:
            raise DataError("unreadable-file", "the disk was removed", hint="insert it")
        return keep(config, **how)

    mix_of(method='method = "uniform"', budget="1 step")
    words = ("mix", "null", "mix.toml", "--seeds", "2")
    with monkeypatch.context() as patched:
        patched.setattr(null_halves, "run_config", broken)
        fails(*words, parts=["1 of 2 runs", "  seed-0-split-0: the disk was removed; insert it\n"])
    result = report_of(*words)
    assert (result["evidence"], result["ratio"], result["runs"]) == (False, None, 2)


def test_later_stages_do_not_depend_on_it_and_too_few_validation_rows_stop_nothing(
    here: Path,
) -> None:
    mix_of(budget="1 step")
    write("validation", range(200, 204))
    sets = ["task.validation_split=[0.5,0.25,0.25]"]
    done = right("mix", "sample", "mix.toml", sets=[*sets, "certainty.rows=8"])
    assert "not measured: " in done.stderr
    again = stages_of(right("mix", "sample", "mix.toml", sets=[*sets, "certainty.rows=4"]))
    assert [again[0], again[-1]] == ["reweight: done before", "sample: done before"]
    assert any("gradients of up to 4 rows" in line for line in again)


def test_a_method_that_learns_nothing_has_no_certainty(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certain, "alignments", None)  # no gradient is taken
    mix_of(method='method = { name = "fixed", mixture = { first = 1 } }', budget="1 step")
    report = certainty()
    assert report["left_out"] == "the method 'fixed' learns no weights"
    assert not report["warnings"] + report["sentences"]


SOUND = '{"verdict": "v", "evidence": true, "sources": [{"source": "a", "evidence": 1}]}'


def test_a_damaged_null_test_is_none(tmp_path: Path) -> None:
    mix: Any = SimpleNamespace(folder=tmp_path / "null-test" / "seed-0")
    found = [certain.null_result(mix)]
    path = tmp_path / "null-test" / "null-test" / "null.json"
    path.parent.mkdir(parents=True)
    for text in ("[1]", "{}", "{", SOUND.replace(', "evidence": 1', ""), SOUND):
        path.write_text(text)
        found.append(certain.null_result(mix))
    assert found == [None, None, None, None, None, json.loads(SOUND)]


def table(first: int) -> dict[str, Any]:
    return {"sources": [{"source": "a", "evidence": first}, {"source": "b", "evidence": -first}]}


def upper(change: float) -> dict[str, float]:
    ends = {"start": 2.0, "end": 2.0 + change}
    return {**ends, "change": change, "low": change - 0.1, "high": change + 0.1}


CORNER, EVEN, TURNED = ({"a": share, "b": 1 - share} for share in (0.96, 0.6, 0.4))
GOOD = {"rows": table(1), "rows_by_angle": table(1), "moved": 0.1, "upper_loss": upper(-0.5)}
ROSE = {**GOOD, "upper_loss": upper(0.5)}
STILL = {**GOOD, "upper_loss": upper(0.01), "moved": 1e-4}
AGREED = over_seeds([{"a": w, "b": 1 - w} for w in (0.6, 0.61, 0.62)], {"a": 0.5, "b": 0.5})
BLIND = {**table(0), "evidence": False}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((CORNER, GOOD, {0: CORNER, 1: EVEN}, table(1)), ""),
        ((CORNER, GOOD, {0: CORNER}, table(0)), "no support for that from the null test"),
        ((EVEN, ROSE, {0: EVEN}, None), "rose by more than its noise (+0.5 [0.4, 0.6]; x moved"),
        ((EVEN, STILL, {0: EVEN}, None), "x learned nothing that validation shows: it moved by 0."),
        ((EVEN, GOOD, {0: EVEN, 1: TURNED}, None), "2 seeds disagree on the largest source: a, b"),
        ((EVEN, GOOD, {0: EVEN}, BLIND, AGREED), "the null test sees nothing"),
        ((EVEN, {**GOOD, "rows_by_angle": table(-1)}, {0: EVEN}, None), "a gains by the size"),
    ],
)
def test_what_is_to_be_warned_of(arguments: Any, said: str) -> None:
    assert [said in line for line in certain.warnings(*arguments)] == [True] * bool(said)
