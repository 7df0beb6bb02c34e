"""How certain a mix is: the null test, the stage `certainty`, report.json, on models of a few
thousand parameters.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support.helpers import rejects

from hgms.cli import main
from hgms.results import scan
from hgms.uncertainty import in_words, over_seeds
from hgms_core import DataError, Key
from hgms_mix.stages.certainty import null_result

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
first = { path = "FIRST" }
second = { path = "SECOND" }
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


def write(path: str, numbers: Sequence[int], answer: str | None = None) -> None:
    rows = [{"prompt": f"{n} + 1", "completion": answer or f"is {n + 1}"} for n in numbers]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    halves = torch.randperm(100, generator=Key(5).generator()).add(100).split(50)
    write("like.jsonl", halves[0].tolist())
    write("alike.jsonl", halves[1].tolist())
    write("noise.jsonl", range(300, 350), "zzzzzzz")
    write("validation.jsonl", range(200, 260))
    return tmp_path


def mix_of(
    first: str, second: str, *, method: str = 'method = "uniform"', budget: str = "20 steps"
) -> str:
    filled = {"FIRST": first, "SECOND": second, "METHOD": method, "BUDGET": budget}
    text = MIX
    for word, value in filled.items():
        text = text.replace(word, value)
    Path("mix.toml").write_text(text)
    return "mix.toml"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["mix", *arguments])


def json_of(*arguments: str) -> dict[str, Any]:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


# --- halves
# --------------------------------------------------------------------------------------------------


def test_halves_are_every_row_once_and_drawn_anew_for_every_number(here: Path) -> None:
    from hgms_mix.stages.config import load
    from hgms_mix.stages.null_halves import halved

    config = load(Path(mix_of("like.jsonl", "noise.jsonl")))
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
    import attrs

    from hgms_mix.stages.config import load

    config = load(Path(mix_of("like.jsonl", "noise.jsonl")))
    problem = attrs.evolve(config.task, halves=3).problem(0, torch.device("cpu"), torch.float64)
    assert problem.sources is not None
    assert problem.sources.weights(
        problem.sources.theta({"first": 0.8, "second": 0.2})
    ).tolist() == pytest.approx([0.4, 0.4, 0.1, 0.1])
    assert problem.sources.weights(
        problem.sources.theta({"first/2": 1.0, "second/1": 1.0})
    ).tolist() == pytest.approx([0, 0.5, 0.5, 0], abs=1e-9)
    assert [name for name, _ in problem.lower_data.strata] == list(problem.sources.names)


def test_a_source_of_one_row_has_no_halves(here: Path) -> None:
    from hgms_mix.lm.halves import in_halves
    from hgms_mix.stages.config import load

    write("one.jsonl", range(1))
    tables = load(Path(mix_of("one.jsonl", "noise.jsonl"))).task
    with rejects("too-few-rows", "task", "sources", "first", of=DataError):
        in_halves(tables.tables(tables.model.load_tokenizer()), Key(0))


def test_halves_of_sources_are_no_mixture_to_draw_from(here: Path) -> None:
    mix_of("like.jsonl", "noise.jsonl")
    refused = call("reweight", "mix.toml", "--set", "task.halves=1")
    assert refused.exit_code == 2
    assert "(task.halves)" in refused.stderr


# --- the null test
# --------------------------------------------------------------------------------------------------


def test_a_fixed_uniform_mixture_is_no_evidence(here: Path) -> None:
    result = json_of("null", mix_of("like.jsonl", "noise.jsonl", budget="2 steps"))
    assert (result["evidence"], result["ratio"], result["runs"]) == (False, None, 3)
    assert result["verdict"].startswith("no weight moved")


@pytest.mark.extended
def test_two_halves_of_one_source_are_no_evidence_with_small_steps_on_fresh_batches(
    here: Path,
) -> None:
    """A/A: `first` and `second` are random halves of one list."""
    result = json_of(
        "--null", mix_of("like.jsonl", "alike.jsonl", method=SMALL_STEPS, budget="12 steps")
    )
    assert not result["evidence"], result["verdict"]
    assert "part as far as different sources do" in result["verdict"]
    assert all(max(run["weights"].values()) < 0.5 for run in result["weights"])


@pytest.mark.extended
def test_a_source_like_the_validation_rows_beside_noise_is_evidence(here: Path) -> None:
    mix_of("like.jsonl", "noise.jsonl", method=SMALL_STEPS, budget="12 steps")
    result = json_of("null", "mix.toml", "--seeds", "2", "--splits", "2")
    assert result["evidence"], result["verdict"]
    assert [row["evidence"] for row in result["sources"]] == [1, -1]
    assert result["ratio"] > 3
    assert {(row["seed"], row["split"]) for row in result["weights"]} == {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    }

    again = call("null", "mix.toml", "--seeds", "2", "--splits", "2")
    assert "4 of 4 runs done before" in again.stderr
    assert "evidence for more of first, less of second" in again.stdout
    # its runs are no results of the sources, and the mix knows of it
    assert scan("runs") == ([], [])
    report = json_of("certainty", "mix.toml")
    assert report["certainty"]["null"]["verdict"] == result["verdict"]
    # another budget is another mixture: nothing is known of that
    assert json_of("certainty", "mix.toml", "--set", "budget=3 steps")["certainty"]["null"] is None


def test_an_interrupted_null_test_goes_on_to_the_same_weights(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms.executors import RemoteProgress

    mix_of("like.jsonl", "noise.jsonl", method=SMALL_STEPS, budget="4 steps")
    whole = json_of("null", "mix.toml", "--seeds", "2", "--out", "whole")

    def press(self: Any, info: Any, record: dict[str, Any], share: float) -> None:
        if record["step"] == 2 and info.seed == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteProgress, "watch", press)
        broken = call("null", "mix.toml", "--seeds", "2", "--out", "broken")
    assert broken.exit_code == 130
    assert "1 of 2 runs\n  run the same command" in broken.stderr
    again = call("null", "mix.toml", "--seeds", "2", "--out", "broken", "--json")
    assert "1 of 2 runs done before" in again.stderr
    assert "seed-1-split-0: going on" in again.stderr
    assert json.loads(again.stdout)["weights"] == whole["weights"]


@pytest.mark.extended
def test_processes_learn_the_weights_of_one(here: Path) -> None:
    mix_of("like.jsonl", "noise.jsonl", method=SMALL_STEPS, budget="4 steps")
    one = json_of("null", "mix.toml", "--seeds", "2", "--out", "one")
    both = json_of(
        "null", "mix.toml", "--seeds", "2", "--out", "both", "--executor", "local", "--jobs", "2"
    )
    assert both["weights"] == one["weights"]
    assert both["sources"] == one["sources"]


def test_runs_of_a_null_test_that_fail_are_named_with_their_reasons(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.stages import null_halves as null

    keep = null.run_config

    def broken(config: Any, **how: Any) -> Any:
        if config.seed == 0:
            raise DataError("unreadable-file", "the disk was removed", hint="insert it")
        return keep(config, **how)

    mix_of("like.jsonl", "noise.jsonl", budget="1 step")
    with monkeypatch.context() as patched:
        patched.setattr(null, "run_config", broken)
        failed = call("null", "mix.toml", "--seeds", "2")
    assert failed.exit_code == 2
    assert "1 of 2 runs of the null test failed (" in failed.stderr
    assert "  seed-0-split-0: the disk was removed; insert it\n" in failed.stderr
    assert "Traceback" not in failed.stderr
    again = call("null", "mix.toml", "--seeds", "2")
    assert "1 of 2 runs done before" in again.stderr


# --- the stage
# --------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_rows_say_which_source_helps_and_nothing_of_two_halves_of_one(here: Path) -> None:
    report = json_of("certainty", mix_of("like.jsonl", "noise.jsonl", method=SMALL_STEPS))
    rows = report["certainty"]["rows"]
    assert [row["evidence"] for row in rows["sources"]] == [1, -1]
    assert report["certainty"]["prior"] == {"first": 0.5, "second": 0.5}
    assert "evidence for more of first" in report["certainty"]["sentences"][0]
    assert report["certainty"]["null"] is None
    assert json.loads((Path(report["folder"]) / "report.json").read_bytes()) == report

    report = json_of("certainty", mix_of("like.jsonl", "alike.jsonl", method=SMALL_STEPS))
    assert not report["certainty"]["rows"]["evidence"]
    assert "no evidence against the prior (uniform)" in report["certainty"]["sentences"][0]


@pytest.mark.extended
def test_seeds_of_one_mix_are_put_together_and_others_are_not(here: Path) -> None:
    mix_of("like.jsonl", "noise.jsonl", method=SMALL_STEPS, budget="5 steps")
    alone = json_of("certainty", "mix.toml")
    assert alone["certainty"]["seeds"] is None
    for seed in ("1", "2"):
        report = json_of("certainty", "mix.toml", "--seed", seed)
    assert report["certainty"]["seeds"]["over"] == "3 seeds"
    effect = report["certainty"]["seeds"]["sources"][0]
    assert 0 < effect["low"] < effect["value"] < effect["high"] < 1
    shown = call("certainty", "mix.toml", "--seed", "2")
    assert "over seeds" in shown.stdout
    # other data: the seeds of before are of another problem
    write("noise.jsonl", range(300, 350), "yyyyyyy")
    assert json_of("certainty", "mix.toml", "--seed", "2")["certainty"]["seeds"] is None


def test_later_stages_do_not_depend_on_it(here: Path) -> None:
    mix_of("like.jsonl", "noise.jsonl", method=SMALL_STEPS, budget="2 steps")
    json_of("sample", "mix.toml")
    again = call("sample", "mix.toml", "--set", "certainty.rows=2")
    assert [line.partition(" (")[0] for line in again.stderr.splitlines() if line[0] != " "] == [
        "reweight: done before",
        "certainty: 80 gradients of up to 2 rows",
        "sample: done before",
    ]


@pytest.mark.parametrize("name", ["uniform", "fixed"])
def test_a_method_that_learns_nothing_has_no_certainty(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.stages import certainty

    monkeypatch.setattr(certainty, "alignments", None)  # no gradient is taken
    mixture = ", mixture = { first = 1 }" if name == "fixed" else ""
    method = f'method = {{ name = "{name}"{mixture} }}'
    mix_of("like.jsonl", "noise.jsonl", method=method, budget="2 steps")
    report = json_of("certainty", "mix.toml")["certainty"]
    assert report["left_out"] == f"the method {name!r} learns no weights"
    assert not report["warnings"]
    assert not report["sentences"]
    done = call("certainty", "mix.toml")
    assert done.exit_code == 0, done.output
    assert "learned" not in done.output


def test_an_x_that_the_weights_do_not_rest_on_is_no_warning(here: Path) -> None:
    """RDS compares rows; its x stays where it starts, and so does the validation loss."""
    report = json_of(
        "certainty", mix_of("like.jsonl", "noise.jsonl", method='method = "rds"', budget="50 steps")
    )
    assert report["certainty"]["upper_loss"]["change"] == 0
    assert not any("x learned nothing" in line for line in report["certainty"]["warnings"])


def test_too_few_validation_rows_are_said_and_stop_nothing(here: Path) -> None:
    write("validation.jsonl", range(200, 204))
    done = call(
        "certainty",
        mix_of("like.jsonl", "noise.jsonl", method=SMALL_STEPS, budget="2 steps"),
        "--set",
        "task.validation_split=[0.5,0.25,0.25]",
    )
    assert done.exit_code == 0, done.output
    assert "not measured: " in done.stderr


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
    path.write_text(
        sound := '{"verdict": "v", "evidence": true, "sources": [{"source": "a", "evidence": 1}]}'
    )
    assert null_result(mix) == json.loads(sound)


def test_what_is_to_be_warned_of() -> None:
    from hgms_mix.stages.certainty import warnings

    def table(first: int) -> dict[str, Any]:
        return {
            "sources": [{"source": "a", "evidence": first}, {"source": "b", "evidence": -first}]
        }

    def upper(change: float, half: float) -> dict[str, float]:
        return {
            "start": 2.0,
            "end": 2.0 + change,
            "change": change,
            "low": change - half,
            "high": change + half,
        }

    corner = {"a": 0.96, "b": 0.04}
    even = {"a": 0.6, "b": 0.4}
    good = {
        "rows": table(1),
        "rows_by_angle": table(1),
        "moved": 0.1,
        "upper_loss": upper(-0.5, 0.1),
    }
    assert list(warnings(corner, good, {0: corner, 1: even}, table(1))) == []
    (line,) = warnings(corner, good, {0: corner}, table(0))
    assert line == "a has 0.96 of the weight, and there is no support for that from the null test"
    (line,) = warnings(even, {**good, "upper_loss": upper(0.5, 0.1)}, {0: even}, None)
    assert line == (
        "the validation loss rose by more than its noise (+0.5 [0.4, 0.6]; x moved by 0.1 of "
        "its length)"
    )
    (line,) = warnings(
        even, {**good, "upper_loss": upper(0.01, 0.1), "moved": 1e-4}, {0: even}, None
    )
    assert line.startswith(
        "x learned nothing that validation shows: it moved by 0.0001 of its length"
    )
    (line,) = warnings(even, good, {0: even, 1: {"a": 0.4, "b": 0.6}}, None)
    assert line == "2 seeds disagree on the largest source: a, b"
    agreed = over_seeds(
        [even, {"a": 0.61, "b": 0.39}, {"a": 0.62, "b": 0.38}], {"a": 0.5, "b": 0.5}
    )
    assert agreed.evidence
    (line,) = warnings(even, good, {0: even}, {**table(0), "evidence": False}, agreed)
    assert line.endswith("and the null test sees nothing: each amplifies the same luck of the rows")
    (line,) = warnings(even, {**good, "rows_by_angle": table(-1)}, {0: even}, None)
    assert line == (
        "a gains by the size of its gradients only: by their direction it is worse than the prior"
    )


def test_the_demo_knows_what_its_seeds_say() -> None:
    from hgms_mix.stages.demo import Demo

    def report(weight: float) -> dict[str, Any]:
        return {
            "sources": [
                {"source": "sums", "weight": weight},
                {"source": "dots", "weight": 1 - weight},
            ]
        }

    learned = {seed: report(weight) for seed, weight in enumerate((0.7, 0.72, 0.69))}
    said = Demo(method="hg-ms", reports={"hg-ms": learned}, picture=None, folder=Path()).certainty
    assert said is not None
    assert (
        in_words(said)
        == "over 3 seeds: evidence for more of sums (p = 0.002), less of dots (p = 0.002)"
    )
    assert (
        Demo(
            method="hg-ms", reports={"hg-ms": {0: report(0.7)}}, picture=None, folder=Path()
        ).certainty
        is None
    )
