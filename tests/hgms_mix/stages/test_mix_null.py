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

from hgms.results import scan
from hgms.uncertainty import over_seeds
from hgms_core import DataError, Key
from hgms_mix.stages.certainty import null_result, warnings
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
    write_rows(
        name, [{"prompt": f"{n} + 1", "completion": answer or f"is {n + 1}"} for n in numbers]
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    halves = torch.randperm(100, generator=Key(5).generator()).add(100).split(50)
    write("like", halves[0].tolist())
    write("alike", halves[1].tolist())
    write("noise", range(300, 350), "zzzzzzz")
    write("validation", range(200, 260))
    mix_of()
    return tmp_path


def mix_of(second: str = "noise", method: str = SMALL_STEPS, budget: str = "20 steps") -> None:
    """mix.toml: the source `first` is like the validation rows."""
    filled = {"SECOND": second, "METHOD": method, "BUDGET": budget}
    text = MIX
    for word, value in filled.items():
        text = text.replace(word, value)
    Path("mix.toml").write_text(text)


def null(*arguments: object) -> Any:
    return report_of("mix", "null", "mix.toml", *arguments)


def certainty(*arguments: object) -> Any:
    return report_of("mix", "certainty", "mix.toml", *arguments)["certainty"]


def test_halves_are_every_row_once_and_drawn_anew_for_every_number(here: Path) -> None:
    from hgms_mix.stages.null_halves import halved

    config = load(Path("mix.toml"))
    tokenizer = config.task.model.load_tokenizer()
    whole = config.task.tables(tokenizer)
    drawn = [
        halved(config, seed, split).task.tables(tokenizer)
        for seed, split in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    for halves in drawn:
        assert list(halves) == ["first/1", "first/2", "second/1", "second/2"]
        for source in ("first", "second"):
            rows = torch.cat([halves[f"{source}/{half}"].rows for half in (1, 2)])
            assert torch.equal(rows.sort().values, whole[source].rows)
            assert abs(halves[f"{source}/1"].size - halves[f"{source}/2"].size) <= 1
    kinds = {tuple(halves["first/1"].rows.tolist()) for halves in drawn}
    assert len(kinds) == 3  # the first and the last are one split


def test_a_mixture_of_sources_is_shared_by_their_halves(here: Path) -> None:
    task = attrs.evolve(load(Path("mix.toml")).task, halves=3)
    problem = task.problem(0, torch.device("cpu"), torch.float64)
    sources = problem.sources
    assert sources is not None
    for mixture, weights in (
        ({"first": 0.8, "second": 0.2}, [0.4, 0.4, 0.1, 0.1]),
        ({"first/2": 1.0, "second/1": 1.0}, [0, 0.5, 0.5, 0]),
    ):
        found = sources.weights(sources.theta(mixture)).tolist()
        assert found == pytest.approx(weights, abs=1e-9)
    assert [name for name, _ in problem.lower_data.strata] == list(sources.names)


def test_halves_of_one_row_or_of_a_mix_are_rejected(here: Path) -> None:
    from hgms_mix.lm.halves import in_halves

    fails("mix", "reweight", "mix.toml", sets=["task.halves=1"], parts=["(task.halves)"])
    write("noise", range(1))
    task = load(Path("mix.toml")).task
    with rejects("too-few-rows", "task", "sources", "second", of=DataError):
        in_halves(task.tables(task.model.load_tokenizer()), Key(0))


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
    words = ("--seeds", "2", "--splits", "2")
    result = null(*words)
    assert result["evidence"], result["verdict"]
    assert [row["evidence"] for row in result["sources"]] == [1, -1]
    assert result["ratio"] > 3
    pairs = {(row["seed"], row["split"]) for row in result["weights"]}
    assert pairs == {(0, 0), (0, 1), (1, 0), (1, 1)}

    again = right("mix", "null", "mix.toml", *words)
    assert "4 of 4 runs done before" in again.stderr
    assert "evidence for more of first, less of second" in again.stdout
    # its runs are no results of the sources, and the mix knows of it
    assert scan("runs") == ([], [])
    assert certainty()["null"]["verdict"] == result["verdict"]
    # another budget is another mixture: nothing is known of that
    assert certainty("--set", "budget=3 steps")["null"] is None


def test_an_interrupted_null_test_goes_on_to_the_same_weights(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms.executors import RemoteProgress

    mix_of(budget="3 steps")
    whole = null("--seeds", "2", "--out", "whole")

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
    from hgms_mix.stages import null_halves

    keep = null_halves.run_config

    def broken(config: Any, **how: Any) -> Any:
        if config.seed == 0:
            raise DataError("unreadable-file", "the disk was removed", hint="insert it")
        return keep(config, **how)

    mix_of(method='method = "uniform"', budget="1 step")
    words = ("mix", "null", "mix.toml", "--seeds", "2")
    with monkeypatch.context() as patched:
        patched.setattr(null_halves, "run_config", broken)
        fails(*words, parts=["1 of 2 runs", "  seed-0-split-0: the disk was removed; insert it\n"])
    again = right(*words, "--json")
    assert "1 of 2 runs done before" in again.stderr
    result = json.loads(again.stdout)
    assert (result["evidence"], result["ratio"], result["runs"]) == (False, None, 2)


@pytest.mark.extended
def test_rows_and_seeds_say_which_source_helps(here: Path) -> None:
    report = report_of("mix", "certainty", "mix.toml")
    assert json.loads((Path(report["folder"]) / "report.json").read_bytes()) == report
    alone = report["certainty"]
    assert [row["evidence"] for row in alone["rows"]["sources"]] == [1, -1]
    assert alone["prior"] == {"first": 0.5, "second": 0.5}
    assert "evidence for more of first" in alone["sentences"][0]
    assert alone["null"] is alone["seeds"] is None
    mix_of(budget="5 steps")
    for seed in range(3):
        report = certainty("--seed", seed)
    assert report["seeds"]["over"] == "3 seeds"
    effect = report["seeds"]["sources"][0]
    assert 0 < effect["low"] < effect["value"] < effect["high"] < 1
    # other data: the seeds of before are of another problem
    write("noise", range(300, 350), "yyyyyyy")
    assert certainty("--seed", "2")["seeds"] is None


@pytest.mark.extended
def test_later_stages_do_not_depend_on_it(here: Path) -> None:
    mix_of(budget="1 step")
    write("validation", range(200, 216))
    right("mix", "sample", "mix.toml", sets=["certainty.rows=8"])
    again = right("mix", "sample", "mix.toml", sets=["certainty.rows=4"])
    said = stages_of(again)
    assert [said[0], said[2]] == ["reweight: done before", "sample: done before"]
    assert "gradients of up to 4 rows" in said[1]


def test_a_method_that_learns_nothing_has_no_certainty(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.stages import certainty as stage

    monkeypatch.setattr(stage, "alignments", None)  # no gradient is taken
    mix_of(method='method = { name = "fixed", mixture = { first = 1 } }', budget="1 step")
    done = right("mix", "certainty", "mix.toml", "--json")
    report = json.loads(done.stdout)["certainty"]
    assert report["left_out"] == "the method 'fixed' learns no weights"
    assert not report["warnings"] + report["sentences"]
    assert "learned" not in done.stderr


@pytest.mark.extended
def test_an_x_that_the_weights_do_not_rest_on_is_no_warning(here: Path) -> None:
    """RDS compares rows; its x stays where it starts, and so does the validation loss."""
    mix_of(method='method = "rds"', budget="50 steps")
    report = certainty()
    assert report["upper_loss"]["change"] == 0
    assert not any("x learned nothing" in line for line in report["warnings"])


def test_too_few_validation_rows_are_said_and_stop_nothing(here: Path) -> None:
    write("validation", range(200, 204))
    mix_of(budget="1 step")
    sets = ["task.validation_split=[0.5,0.25,0.25]"]
    assert "not measured: " in right("mix", "certainty", "mix.toml", sets=sets).stderr


@pytest.mark.parametrize(
    "text", ["[1]", "{}", "{", '{"verdict": "v", "evidence": true, "sources": [{"source": "a"}]}']
)
def test_a_damaged_null_test_is_none(text: str, tmp_path: Path) -> None:
    mix: Any = SimpleNamespace(folder=tmp_path / "seed-0")
    path = tmp_path / "null-test" / "null.json"
    assert null_result(mix) is None
    path.parent.mkdir()
    path.write_text(text)
    assert null_result(mix) is None
    sound = '{"verdict": "v", "evidence": true, "sources": [{"source": "a", "evidence": 1}]}'
    path.write_text(sound)
    assert null_result(mix) == json.loads(sound)


def test_what_is_to_be_warned_of() -> None:
    def table(first: int) -> dict[str, Any]:
        return {
            "sources": [{"source": "a", "evidence": first}, {"source": "b", "evidence": -first}]
        }

    def upper(change: float, half: float) -> dict[str, float]:
        ends = {"start": 2.0, "end": 2.0 + change}
        return {**ends, "change": change, "low": change - half, "high": change + half}

    corner = {"a": 0.96, "b": 0.04}
    even = {"a": 0.6, "b": 0.4}
    turned = {"a": 0.4, "b": 0.6}
    close = [even, {"a": 0.61, "b": 0.39}, {"a": 0.62, "b": 0.38}]
    agreed = over_seeds(close, {"a": 0.5, "b": 0.5})
    assert agreed.evidence
    blind = {**table(0), "evidence": False}
    tables = {"rows": table(1), "rows_by_angle": table(1)}
    good = {**tables, "moved": 0.1, "upper_loss": upper(-0.5, 0.1)}
    rose = {**good, "upper_loss": upper(0.5, 0.1)}
    still = {**good, "upper_loss": upper(0.01, 0.1), "moved": 1e-4}
    assert list(warnings(corner, good, {0: corner, 1: even}, table(1))) == []
    for arguments, said in (
        ((corner, good, {0: corner}, table(0)), "no support for that from the null test"),
        ((even, rose, {0: even}, None), "rose by more than its noise (+0.5 [0.4, 0.6]; x moved"),
        ((even, still, {0: even}, None), "x learned nothing that validation shows: it moved by 0."),
        ((even, good, {0: even, 1: turned}, None), "2 seeds disagree on the largest source: a, b"),
        ((even, good, {0: even}, blind, agreed), "the null test sees nothing"),
        ((even, {**good, "rows_by_angle": table(-1)}, {0: even}, None), "a gains by the size"),
    ):
        (line,) = warnings(*arguments)
        assert said in line
