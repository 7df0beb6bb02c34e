"""`hgms mix` end to end, on files in a temporary folder and models of a few thousand parameters."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support.helpers import rejects

from hgms.cli import main

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'hgms[llm]'"
)
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

pytestmark = [
    # peft's own calls of names that transformers has renamed
    pytest.mark.filterwarnings(
        "ignore:.*checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    )
]

MIX = f"""
seed = 1
budget = "3 steps"
method = "uniform"
{(Path(__file__).resolve().parents[2] / "tiny_mix.toml").read_text()}
[sample]
size = 30
[finetune]
lr = 1e-2
micro_batch = 3
accumulation = 2
save_every = 2
"""


def write_sums(path: Path, first: int, count: int, completion: str | None = None) -> None:
    """Sums whose prompts depend on the numbers alone, so that no two files have one in common."""
    rows = ((i // 40, i % 40) for i in range(first, first + count))
    lines = (
        json.dumps({"prompt": f"{a} + {b} =", "completion": completion or str(a + b)})
        for a, b in rows
    )
    path.write_text("".join(line + "\n" for line in lines))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_sums(Path("sums.jsonl"), 0, 40)
    write_sums(Path("dots.jsonl"), 100, 60, ".")
    write_sums(Path("validation.jsonl"), 200, 20)
    write_sums(Path("test.jsonl"), 300, 15)
    Path("mix.toml").write_text(MIX)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["mix", *arguments])


def report_of(*arguments: str) -> dict[str, Any]:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def sampled(report: dict[str, Any]) -> list[dict[str, Any]]:
    with gzip.open(Path(report["folder"]) / "sample" / "rows.jsonl.gz", "rt") as stream:
        return [json.loads(line) for line in stream]


def files_of(folder: Path) -> dict[str, bytes]:
    """All that matters of a mix's stages: not the clock, not the environment."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for stage in ("sample", "finetune", "evaluate")
        for path in sorted((folder / stage).rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "env.json")
    }


def test_all_stages_then_nothing_to_do_then_only_what_changed(here: Path) -> None:
    first = call("mix.toml")
    assert first.exit_code == 0, first.output
    assert [line.split(":")[0] for line in first.stderr.splitlines() if line[0] != " "] == [
        "reweight",
        "certainty",
        "sample",
        "finetune",
        "evaluate",
    ]
    (folder,) = here.glob("runs/source-mixture/uniform-*/seed-1")
    assert {path.name for path in folder.iterdir()} >= {
        "config.toml",
        "mix.toml",
        "mixture.png",
        "report.json",
        "sample",
        "finetune",
        "evaluate",
    }
    assert "sums     0.5000   15     40" in first.stdout
    report = json.loads((folder / "report.json").read_bytes())
    assert report["sample"]["counts"] == {"sums": 15, "dots": 15}
    assert report["test"]["sums"]["rows"] == 15
    assert (
        report["test"]["sums"]["token_loss"]["low"] < report["test"]["sums"]["token_loss"]["value"]
    )
    rows = sampled(report)
    source = {
        name: [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
        for name in ("sums", "dots")
    }
    assert len({(row["source"], row["row"]) for row in rows}) == 30
    for row in rows:
        there = source[row["source"]][row["row"]]
        assert [item["content"] for item in row["messages"]] == [
            there["prompt"],
            there["completion"],
        ]

    before = files_of(folder)
    second = call("mix.toml")
    assert [line.partition(" (")[0] for line in second.stderr.splitlines()] == [
        f"{stage}: done before"
        for stage in ("reweight", "certainty", "sample", "finetune", "evaluate")
    ]
    assert files_of(folder) == before

    third = call("mix.toml", "--set", "finetune.lr=2e-2")
    assert [line.partition(" (")[0] for line in third.stderr.splitlines() if line[0] != " "] == [
        "reweight: done before",
        "certainty: done before",
        "sample: done before",
        "finetune: 30 rows",
        "evaluate: sums",
    ]
    assert files_of(folder) != before
    fourth = call("mix.toml")  # the settings of before are found where they stepped aside to
    assert "finetune: done before" in fourth.stderr
    assert files_of(folder) == before


def test_the_resolved_file_describes_the_same_mix(here: Path) -> None:
    report = report_of("sample", "mix.toml")
    Path("again.toml").write_bytes((Path(report["folder"]) / "mix.toml").read_bytes())
    again = call("sample", "again.toml")
    assert again.exit_code == 0, again.output
    assert [line.partition(" (")[0] for line in again.stderr.splitlines()] == [
        f"{stage}: done before" for stage in ("reweight", "certainty", "sample")
    ]


def test_one_stage_makes_those_before_it_and_none_after(here: Path) -> None:
    report = report_of("finetune", "mix.toml")
    assert list(report["stages"]) == ["reweight", "certainty", "sample", "finetune"]
    assert "test" not in report
    assert not (Path(report["folder"]) / "evaluate").exists()


def test_new_content_of_a_source_is_a_new_mix(here: Path) -> None:
    report = report_of("sample", "mix.toml")
    write_sums(Path("dots.jsonl"), 100, 60, "!")
    again = call("sample", "mix.toml")
    assert [line.split(" ")[0] for line in again.stderr.splitlines() if line[0] != " "] == [
        "reweight:",
        "certainty:",
        "sample:",
    ]
    assert "done before" not in again.stderr
    (other,) = set(here.glob("runs/source-mixture/*/seed-1")) - {here / report["folder"]}
    texts = {
        row["messages"][1]["content"]
        for row in sampled({"folder": other})
        if row["source"] == "dots"
    }
    assert texts == {"!"}


def test_counts_and_rows_do_not_depend_on_the_order_of_the_tables(here: Path) -> None:
    first = sampled(report_of("sample", "mix.toml", "--set", "sample.size=31"))
    sums = '[task.sources.sums]\npath = "sums.jsonl"\n'
    dots = '[task.sources.dots]\npath = "dots.jsonl"\n'
    Path("turned.toml").write_text(MIX.replace(sums + dots, dots + sums))
    second = sampled(report_of("sample", "turned.toml", "--set", "sample.size=31"))
    assert [(row["source"], row["row"]) for row in first] == [
        (row["source"], row["row"]) for row in second
    ]


def test_a_source_that_is_short_gives_the_rest_to_others_and_says_so(here: Path) -> None:
    done = call("sample", "mix.toml", "--set", "sample.size=90")
    assert (
        "  source 'sums' has 40 rows, its weight 0.500 asks for 45; the others give the rest"
        in done.stderr
    )
    assert json.loads(
        next(here.glob("runs/source-mixture/*/seed-1/sample/counts.json")).read_bytes()
    )["counts"] == {"sums": 40, "dots": 50}
    done = call("sample", "mix.toml", "--set", "sample.size=101")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-2:] == [
        "error: size=101 exceeds the 100 rows of the sources (dots 60, sums 40) (sample.size)",
        "  decrease size to 100 or less, add rows, or set allow_fewer = true",
    ]


def test_validation_rows_alone_are_a_set_too(here: Path) -> None:
    Path("mix.toml").write_text(MIX.replace("[task.validation.sums]", "[task.validation.held]"))
    words = ("mix.toml", "--set", "sample.of=validation", "--set", "sample.size=7")
    report = report_of(*words)
    validation = {
        json.loads(line)["prompt"] for line in (here / "validation.jsonl").read_text().splitlines()
    }
    prompts = [row["messages"][0]["content"] for row in sampled(report)]
    assert len(prompts) == 7
    assert set(prompts) <= validation
    assert [(row["source"], row["rows"]) for row in report["sources"]] == [("held", 7)]
    assert report["finetune"]["rows"] == 7
    shown = call(*words)  # the weights that were learned have rows of their own
    assert shown.exit_code == 0, shown.output
    assert "held     1.0000   7      20" in shown.stdout
    assert re.search(r"dots +0\.500\s", shown.stdout)


def test_an_interrupted_mix_goes_on_to_the_same_files(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.stages.checkpoints import LossLog

    whole = report_of("mix.toml", "--out", "whole")
    keep = LossLog.append

    def interrupt(self: Any, row: Any, steps: int) -> None:
        keep(self, row, steps)
        if row["step"] == 3:
            self.interrupts.number = signal.SIGINT

    monkeypatch.setattr(LossLog, "append", interrupt)
    broken = call("mix.toml", "--out", "broken")
    assert broken.exit_code == 130
    assert "run the same command again to resume in stage finetune" in broken.stderr
    monkeypatch.setattr(LossLog, "append", keep)
    again = call("mix.toml", "--out", "broken")
    assert "finetune: going on with 30 rows" in again.stderr
    (folder,) = here.glob("broken/source-mixture/*/seed-1")
    assert files_of(folder) == files_of(Path(whole["folder"]))


def test_ctrl_c_during_reweighting_keeps_the_steps(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms.runs import Progress

    whole = Path(report_of("reweight", "mix.toml", "--out", "whole")["folder"])

    def press(self: Any, info: Any, record: dict[str, Any], share: float) -> None:
        if record["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "watch", press)
        broken = call("mix.toml", "--out", "broken")
    assert broken.exit_code == 130
    assert "the state after step 1 is saved" in broken.stderr
    assert "--resume" not in broken.stderr
    assert "run the same command again to resume in stage reweight" in broken.stderr
    again = call("reweight", "mix.toml", "--out", "broken")
    assert "reweight: going on with uniform" in again.stderr
    (folder,) = here.glob("broken/source-mixture/*/seed-1")
    for name in ("steps.jsonl", "summary.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("stage", "missing"),
    [("finetune", "accelerate"), ("finetune", "peft"), ("sample", "transformers")],
)
def test_what_is_not_installed_is_said_before_anything_runs(
    stage: str, missing: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else there(name, *rest),
    )
    done = call(stage, "mix.toml")
    assert done.exit_code == 2
    assert f"{missing} ({stage})\n" in done.stderr
    assert "pip install 'hgms[llm]'" in done.stderr
    assert not Path("runs").exists()


def test_a_judge_without_a_key_is_said_before_anything_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    done = call("mix.toml", "--set", "evaluate.benchmarks=['mt-bench']")
    assert done.exit_code == 2
    assert "OPENAI_API_KEY" in done.stderr
    assert not Path("runs").exists()


def test_weights_are_said_when_they_are_known_and_losses_stand_beside_those_before_tuning(
    here: Path,
) -> None:
    done = call("mix.toml")
    said = done.stderr.splitlines()
    weights, first = (
        next(i for i, line in enumerate(said) if line.startswith(start))
        for start in ("  weights: ", "sample:")
    )
    assert said[weights] == "  weights: sums 0.500, dots 0.500"
    assert weights < first
    report = report_of("mix.toml")
    test = report["test"]["sums"]
    gap = test["against_untuned"]
    assert gap["low"] <= gap["value"] <= gap["high"]
    assert gap["value"] == pytest.approx(test["token_loss"]["value"] - test["untuned"], abs=1e-9)
    assert f" {test['untuned']:.4f} " in done.stdout
    # an adapter that tuning leaves as it was is the model before
    left = report_of("mix.toml", "--set", "finetune.lr=1e-30")["test"]["sums"]
    assert left["token_loss"]["value"] == pytest.approx(left["untuned"], rel=1e-6)


@pytest.mark.extended
def test_hg_ms_beside_uniform_is_compared_row_by_row(here: Path) -> None:
    report_of("mix.toml")
    report = report_of("mix.toml", "--set", "method=hg-ms", "--set", "finetune.start=reweighted")
    # fine-tuned in another way: not comparable
    assert report["test"]["sums"]["against_uniform"] is None
    report = report_of("mix.toml", "--set", "method=hg-ms", "--set", "method.outer.lr=3.0")
    gap = report["test"]["sums"]["against_uniform"]
    assert gap["low"] <= gap["value"] <= gap["high"]
    weights = {row["source"]: row["weight"] for row in report["sources"]}
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-6)
    assert weights["sums"] != weights["dots"]


def test_all_parameters_are_tuned_and_saved_where_there_is_no_adapter(here: Path) -> None:
    report = report_of(
        "mix.toml",
        "--set",
        "task.adapter=none",
        "--set",
        "method=hg-ms",
        "--set",
        "finetune.start=reweighted",
    )
    assert report["finetune"]["kind"] == "model"
    folder = Path(report["folder"]) / "finetune" / "model"
    assert (folder / "model.safetensors").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("Grüße")["input_ids"] == list("Grüße".encode())


@pytest.mark.parametrize(
    "then", ["finetune.lr=1e-30", "finetune.epochs=0"], ids=["hardly-moved", "kept"]
)
def test_what_fine_tuning_starts_from_is_what_reweighting_ended_with(here: Path, then: str) -> None:
    """With a learning rate too small to move anything, or no pass over rows, the saved adapter
    is the run's lower state.
    """
    from safetensors.torch import load_file

    settings = ["method=hg-ms-online", "method.generator.lr=0.5", "finetune.start=reweighted", then]
    report = report_of("mix.toml", *(part for setting in settings for part in ("--set", setting)))
    folder = Path(report["folder"])
    state = next(load_file(path) for path in folder.glob("checkpoint-*.safetensors"))
    saved = load_file(folder / "finetune" / "adapter" / "adapter_model.safetensors")
    assert saved
    for name, leaf in saved.items():
        own = name.removeprefix("base_model.model.")
        same = torch.equal if then == "finetune.epochs=0" else torch.allclose
        assert any(
            key.endswith(own) and value.shape == leaf.shape and same(value, leaf)
            for key, value in state.items()
        ), name
    assert report["finetune"]["rows"] == (
        0 if then == "finetune.epochs=0" else report["sample"]["size"]
    )
    assert report["test"]["sums"]["token_loss"]["value"] > 0


def test_no_pass_over_rows_needs_a_model_that_learning_trained(here: Path) -> None:
    done = call("mix.toml", "--set", "finetune.epochs=0")
    assert done.exit_code == 2
    assert "finetune.epochs)" in done.stderr
    assert 'start = "reweighted"' in done.stderr


def test_benchmarks_are_answered_and_shown(here: Path) -> None:
    pytest.importorskip(
        "math_verify", reason="math-verify is not installed: pip install 'hgms[llm]'"
    )
    questions = [
        {"question": f"{i} + 1 =", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(3)
    ]
    Path("gsm8k.jsonl").write_text("".join(json.dumps(item) + "\n" for item in questions))
    sets = [
        "evaluate.benchmarks=['gsm8k']",
        "evaluate.paths.gsm8k=gsm8k.jsonl",
        "evaluate.max_new_tokens=4",
        "evaluate.max_prompt_tokens=30",
        "evaluate.instruction=''",
    ]
    done = call("mix.toml", *(part for item in sets for part in ("--set", item)))
    assert done.exit_code == 0, done.output
    assert "evaluate: sums, gsm8k" in done.stderr
    assert any(line.startswith("  gsm8k: 0.00 [0.00, ") for line in done.stdout.splitlines()), (
        done.stdout
    )
    report = json.loads(next(here.glob("runs/source-mixture/*/seed-1/report.json")).read_bytes())
    assert report["benchmarks"]["gsm8k"]["score"] == 0.0  # four random bytes are no answer
    assert (
        len(
            (here / report["folder"] / "evaluate/benchmarks/gsm8k.answers.jsonl")
            .read_text()
            .splitlines()
        )
        == 3
    )


RANKED = '''
from __future__ import annotations
from typing import Any, ClassVar, final
import torch
from attrs import frozen
from hgms_core import hookimpl


@final
@frozen(kw_only=True)
class ByNumber:
    """Ranks the rows of lower_data by their numbers, leaves the first out, and is finished at once.

    >>> ByNumber().name
    'by-number'
    """

    name: ClassVar[str] = "by-number"

    def init(self, problem: Any, seed: int) -> Any:
        return {"theta": problem.theta0, "x": problem.x0, "left": 2}

    def step(self, problem: Any, state: Any, progress: float) -> Any:
        return {**state, "left": state["left"] - 1}, {"oracle_calls": 0}

    def finished(self, state: Any) -> bool:
        return state["left"] == 0

    def result(self, state: Any) -> Any:
        return state["theta"], state["x"]

    def ranking(self, problem: Any, state: Any) -> torch.Tensor:
        scores = torch.arange(float(problem.lower_data.size))
        scores[0] = torch.nan
        return scores if self.finished(state) else scores * torch.nan


@hookimpl
def hgms_register_methods() -> list[type]:
    return [ByNumber]
'''


def test_a_method_that_ranks_rows_gives_the_top_of_its_ranking(here: Path) -> None:
    Path("ranked.py").write_text(RANKED)
    arguments = [
        "--plugin",
        "ranked.py",
        "--set",
        "method=by-number",
        "--set",
        "task.cache=20",
        "--set",
        "sample.size=25",
    ]
    report = report_of("sample", "mix.toml", *arguments)
    assert report["outer_steps"] == 2  # of 3: the method said that it was done
    assert (report["sample"]["by"], report["sample"]["counts"]) == (
        "ranking",
        {"sums": 5, "dots": 20},
    )
    rows = sampled(report)
    # the twenty cached rows of `dots` have the numbers 20 … 39, those of `sums` 0 … 19 in the order
    # of the file
    assert sorted(row["score"] for row in rows) == [float(i) for i in range(15, 40)]
    ordered = sorted((row for row in rows if row["source"] == "sums"), key=lambda row: row["score"])
    assert [row["row"] for row in ordered] == sorted(row["row"] for row in ordered)
    done = call("sample", "mix.toml", *arguments, "--set", "sample.size=40")
    assert done.exit_code == 2
    assert "39 rows" in done.stderr
    assert "(dots 20, sums 19) (sample.size)" in done.stderr
    done = call("sample", "mix.toml", *arguments, "--set", "budget=1 steps")
    assert done.exit_code == 2
    assert "'by-number'" in done.stderr
    assert "1 outer step" in done.stderr
    assert "(budget)" in done.stderr


@pytest.mark.parametrize(
    ("sets", "place", "part"),
    [
        (["finetun.lr=1"], "finetun", "did you mean 'finetune'?"),
        (["sample.sise=3"], "sample.sise", "did you mean 'size'?"),
        (["sample.size=0"], "sample.size", "size=0 "),
        (["finetune.schedule=cosin"], "finetune.schedule", "did you mean 'cosine'?"),
        (['evaluate.benchmarks=["gsm9k"]'], "evaluate.benchmarks[0]", "did you mean 'gsm8k'?"),
        (["run.device=cuda"], "run.device", "'cuda'"),
        (["task.sources.sums.path=nowhere.jsonl"], "task.sources.sums.path", "nowhere.jsonl"),
        (['task.adapter.targets=["nope"]'], "task.adapter.targets", "'nope'"),
        (["run.device=cuda:1"], "run.device", "'cuda:1'"),
        (["task=quadratic"], "task.name", "'quadratic'"),
    ],
)
def test_bad_configurations_leave_with_2(
    sets: list[str], place: str, part: str, here: Path
) -> None:
    if sets == ["run.device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    done = call("mix.toml", *(word for item in sets for word in ("--set", item)))
    assert done.exit_code == 2, done.output
    assert f"{place})" in done.stderr
    assert part in done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["reweigth", "mix.toml"], "did you mean 'reweight'?"),
        (["nowhere.toml"], "(nowhere.toml)"),
        (["/dev/zero"], "(/dev/zero)"),
        (["sample"], "Missing argument 'CONFIG'"),
    ],
)
def test_bad_calls_leave_with_2(arguments: list[str], part: str, here: Path) -> None:
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert part in done.stderr


def test_a_mix_without_a_sample_table_says_what_is_missing(here: Path) -> None:
    Path("short.toml").write_text(MIX.replace("[sample]\nsize = 30\n", ""))
    done = call("short.toml")
    assert done.exit_code == 2
    assert "(short.toml: sample)" in done.stderr
    assert "size" in done.stderr


def test_two_at_once_are_refused(here: Path) -> None:
    from hgms.runs import leased

    report = report_of("sample", "mix.toml")
    with leased(Path(report["folder"]), ".mix.lease"):
        done = call("sample", "mix.toml")
    assert done.exit_code == 2
    assert f"({report['folder']})" in done.stderr


def test_a_sample_whose_source_changed_underneath_is_refused(here: Path) -> None:
    from hgms_mix.stages.config import load
    from hgms_mix.stages.finetune import chosen_rows
    from hgms_mix.stages.mix import Mix

    mix = Mix(load(Path("mix.toml")), here / "folder")
    mix.run("sample")
    assert len(chosen_rows(mix)) == 30
    write_sums(Path("dots.jsonl"), 100, 60, "!")
    with rejects("data-changed", "task", "sources", "dots"):
        chosen_rows(mix)


def test_only_rows_that_are_drawn_become_tokens(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.lm.tokens import Tokenising

    seen: dict[str, set[int]] = {}
    original = Tokenising.__call__

    def watched(self: Any, rows: Any) -> Any:
        seen.setdefault(self.file, set()).update(row[0] for row in rows)
        return original(self, rows)

    monkeypatch.setattr(Tokenising, "__call__", watched)
    report = report_of("mix.toml", "--set", "task.cache=5", "--set", "sample.size=8")
    rows = sampled(report)
    assert len(rows) == 8
    for name in ("sums", "dots"):
        (numbers,) = (numbers for file, numbers in seen.items() if file.endswith(f"{name}.jsonl"))
        assert {row["row"] for row in rows if row["source"] == name} <= numbers
        assert len(numbers) <= 5 + 4


def test_it_runs_after_its_folder_has_moved(here: Path) -> None:
    report_of("sample", "mix.toml")
    shutil.move("runs", "elsewhere")
    done = call("sample", "mix.toml", "--out", "elsewhere")
    assert done.stderr.count("done before") == 3


def test_help_names_stages_and_options(here: Path) -> None:
    shown = call("--help")
    assert shown.exit_code == 0
    assert [
        line.split()[0] for line in shown.stdout.split("Commands:")[1].splitlines() if line.strip()
    ][:5] == ["all", "reweight", "certainty", "sample", "finetune"]
    assert "--device NAME" in call("evaluate", "--help").stdout


@pytest.mark.nightly
def test_the_demo_finds_the_source_that_matches(tmp_path: Path) -> None:
    """Three minutes on two cores: the mixture goes to the matching source and the test loss is
    below uniform's.
    """
    result = json.loads(call("--demo", "--out", str(tmp_path), "--json").stdout)
    assert result["difference"]["mean"] < 0
    assert abs(result["difference"]["mean"]) > result["difference"]["half_width"]
    for mix in result["methods"]["hg-ms"]["mixes"]:
        weights = {row["source"]: row["weight"] for row in mix["sources"]}
        assert max(weights, key=weights.__getitem__) == "word-problems"
        assert weights["blank-answers"] < 0.05
    assert Path(result["picture"]).exists()


@pytest.mark.extended
def test_the_demo_on_a_pretrained_model_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any folder of a model will do: here one that knows nothing, byte by byte, without a chat
    template.
    """
    from hgms_mix.lm import BaseModel
    from hgms_mix.lm.tokenizers import byte_tokenizer
    from hgms_mix.stages.demo import run_demo

    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 256}
    built = BaseModel(config={"model_type": "gpt2", **size}, tokenizer="bytes").load(
        torch.device("cpu"), vocabulary=259
    )
    built.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    byte_tokenizer().save_pretrained(tmp_path / "model")
    demo = run_demo(tmp_path / "out", seeds=1, model=str(tmp_path / "model"))
    assert demo.method == "hg-ms-mixture"
    assert 'template = "plain"' in (tmp_path / "out" / "demo.toml").read_text(encoding="utf-8")
    demo.print()
    shown = capsys.readouterr().out
    assert re.search(
        r"over the 60 test rows of this seed: -?\d\.\d+ \[.*\] \(95 % interval, paired\)", shown
    )
    tuned = Path(re.search(r"peft's format: (.*)", shown)[1])
    assert (tuned / "adapter_model.safetensors").is_file()
    assert (tuned / "tokenizer_config.json").is_file()
    assert shown.index("next:") < shown.index(
        f"a copy of {tmp_path / 'out' / 'demo.toml'}, and run hgms mix on that"
    )


def test_the_demos_file_describes_its_mixes_wherever_it_is_written(tmp_path: Path) -> None:
    from hgms_mix.stages.config import load
    from hgms_mix.stages.demo import configs

    out = tmp_path / 'a "quoted" TEMPLATE'
    out.mkdir()
    uniform, learned = configs(out, 1)
    assert load(out / "demo.toml", out=str(out)).resolved() == learned.resolved()
    text = (out / "demo.toml").read_text(encoding="utf-8")
    assert "FOLDER" not in text
    method = text[text.index("\n[method]\n") + 1 : text.index("[task]")]
    # as its head says
    other = (
        '[method]\nname = "uniform"\n' + method.splitlines()[2].replace("count = 2, ", "") + "\n\n"
    )
    (out / "other.toml").write_text(text.replace(method, other), encoding="utf-8")
    assert load(out / "other.toml", out=str(out)).resolved() == uniform.resolved()


def test_the_demos_texts_share_no_prompt_and_are_the_same_each_time(tmp_path: Path) -> None:
    from hgms_mix.stages.texts import write

    write(tmp_path / "one")
    write(tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == [
        "blank-answers.jsonl",
        "small-talk.jsonl",
        "test.jsonl",
        "validation.jsonl",
        "word-problems.jsonl",
    ]
    prompts = [
        json.loads(line)["prompt"]
        for name in names
        for line in (tmp_path / "one" / name).read_text().splitlines()
    ]
    assert len(set(prompts)) == len(prompts) == 1520
    assert all(
        (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        for name in names
    )


def test_no_text_of_the_demo_is_cut_and_its_words_are_words(tmp_path: Path) -> None:
    """A cut answer loses its end, which says the result: none may be left out or cut."""
    from hgms_mix.lm.table import left_out
    from hgms_mix.lm.tokenizers import byte_tokenizer
    from hgms_mix.stages.demo import configs
    from hgms_mix.stages.texts import write

    write(tmp_path / "texts")
    [config, _] = configs(tmp_path, 1)
    tables = {
        which: config.task.tables(byte_tokenizer(), which)
        for which in ("sources", "validation", "test")
    }
    assert left_out(tables) == ""
    assert (
        max(int(table.lengths.max()) for part in tables.values() for table in part.values())
        <= config.task.max_length
    )
    text = "".join(path.read_text() for path in (tmp_path / "texts").iterdir())
    assert "boxs" not in text
    assert "shelfs" not in text
    assert "shelves" in text


def test_the_word_problems_are_solved_rightly() -> None:
    import random
    import re

    from hgms_mix.stages.texts import word_problem

    generator = random.Random(0)
    for _ in range(300):
        _, answer = word_problem(generator)
        (formula,) = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", answer)
        a = int(formula[0])
        sign = formula[1]
        b = int(formula[2])
        result = int(formula[3])
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == result
        assert answer.endswith(f"The answer is {result}.")


LESS = [
    "--set",
    "method={name = 'less', epochs = 1, projection = 'none', batch_size = 4, lr = 1e-3}",
]


@pytest.mark.parametrize(
    ("method", "bases"),
    [([], 4), ([*LESS, "--set", "budget=60 steps", "--set", "sample.size=10"], 5)],
    ids=["uniform", "less"],
)
def test_one_base_is_in_memory_whenever_another_stage_loads_its_own(
    method: list[str], bases: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the collector, so that cycles do not go by luck; a stored ranking needs no base."""
    import gc
    import weakref

    from hgms_mix.lm import BaseModel

    loaded: list[weakref.ref[Any]] = []
    alive = []
    load = BaseModel.load

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        alive.append(sum(item() is not None for item in loaded))
        model = load(self, *arguments, **options)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(BaseModel, "load", counting)
    gc.collect()
    gc.disable()
    try:
        done = call("mix.toml", *method)
    finally:
        gc.enable()
    assert done.exit_code == 0, done.output
    # reweight, certainty (of a method that learns), finetune, evaluate (before tuning and after)
    assert alive == [0] * bases


def as_grid(text: str) -> str:
    """The file of a mix as a grid of two methods and without a test set."""
    text = text.replace("seed = 1\n", "seeds = [1, 2]\n").replace(
        '[task.test.sums]\npath = "test.jsonl"\n', ""
    )
    less = "{ name = 'less', epochs = 1, projection = 'none', batch_size = 4, lr = 1e-3 }"
    return text.replace('method = "uniform"', f"method = ['uniform', 'rho-loss', {less}]").replace(
        "3 steps", "60 steps"
    )


@pytest.mark.extended
def test_a_ranking_that_compare_learned_is_sampled_from(here: Path) -> None:
    Path("grid.toml").write_text(as_grid(MIX))
    compared = CliRunner().invoke(
        main, ["compare", "grid.toml", "--methods", "uniform,less", "--jobs", "0"]
    )
    assert compared.exit_code == 0, compared.output
    # without a test set the validation loss is compared; LESS's x is the warm-up's, so nothing is
    # said of it
    assert "validation loss" in compared.stdout
    assert "NaN" not in compared.stdout
    assert "worse than uniform" not in compared.stdout
    assert "no verdict: x is the warm-up's (train_steps = 0)" in compared.stdout
    assert (
        "compare by --metric recovery_error where a reference mixture is known, else by hgms mix "
        "compare"
    ) in compared.stdout
    done = call("sample", "grid.toml", "--method", "less", "--set", "sample.size=10")
    assert done.exit_code == 0, done.output
    assert "reweight: done before" in done.stderr
    (run,) = here.glob("runs/source-mixture/less-*/seed-1")
    assert json.loads((run / "report.json").read_bytes())["sample"]["by"] == "ranking"


def pairs_tokenizer(folder: Path) -> Path:
    """A tokenizer with a token for each two digits beside those of the bytes, and a chat
    template: other lengths than bytes.
    """
    from hgms_mix.lm.tokenizers import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"{i:02d}" for i in range(100)])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def test_a_small_model_learns_the_mixture_and_another_is_tuned(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very rows that were drawn, in the tokens of the model that is tuned."""
    from hgms_mix.stages import finetune

    target = pairs_tokenizer(here / "pairs")
    write_sums(Path("sums.jsonl"), 36, 40)  # from 0 + 36 to 1 + 35: prompts of six and seven bytes
    text = (
        MIX
        + f"""
[finetune.model]
config = {{ model_type = "gpt2", n_layer = 2, n_embd = 16, n_head = 2, n_positions = 40 }}
tokenizer = "{target}"
[finetune.adapter]
rank = 3
alpha = 6
"""
    )
    Path("target.toml").write_text(text)
    trained: list[Any] = []
    train = finetune.train

    def watched(settings: Any, model: Any, rows: Any, *rest: Any, **options: Any) -> Any:
        trained.append((model.config.n_embd, [rows[i][0].tolist() for i in range(len(rows))]))
        return train(settings, model, rows, *rest, **options)

    monkeypatch.setattr(finetune, "train", watched)
    report = report_of("target.toml")
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    [(width, rows)] = trained
    assert width == 16
    drawn = [[item["content"] for item in row["messages"]] for row in sampled(report)]
    assert [tokenizer.decode(ids) for ids in rows] == [
        f"{prompt}\n{answer}<eos>" for prompt, answer in drawn
    ]
    folder = Path(report["folder"]) / "finetune" / "adapter"
    assert json.loads((folder / "adapter_config.json").read_bytes())["r"] == 3
    saved = transformers.AutoTokenizer.from_pretrained(folder)
    assert saved("12 + 3 =")["input_ids"] == tokenizer("12 + 3 =")["input_ids"]
    assert saved.chat_template == tokenizer.chat_template
    assert report["test"]["sums"]["tokens"] == sum(
        len(tokenizer(json.loads(line)["completion"])["input_ids"]) + 1
        for line in Path("test.jsonl").read_text().splitlines()
    )
    again = call("target.toml")
    assert again.stderr.count("done before") == 5
    done = call("sample", "target.toml", "--set", "finetune.start=reweighted")
    assert done.exit_code == 2
    assert "finetune.start)" in done.stderr


def test_rows_too_long_for_the_tuned_model_are_left_out_and_said(here: Path) -> None:
    """Two digits are one token for the proxy, and two for the model that is tuned: "0 + 10 ="
    with its answer has 10 or 12.
    """
    target = pairs_tokenizer(here / "pairs")
    sets = [
        f"task.model.tokenizer={target}",
        "task.max_length=11",
        "finetune.model.tokenizer=bytes",
        "task.test={}",
        (
            "finetune.model.config={ model_type = 'gpt2', n_layer = 1, n_embd = 8, n_head = 2, "
            "n_positions = 40 }"
        ),
    ]
    done = call(
        "finetune", "mix.toml", "--json", *(part for item in sets for part in ("--set", item))
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    lengths = [
        "\n".join(item["content"] for item in row["messages"]).encode() + b"."
        for row in sampled(report)
    ]
    long = sum(len(item) > 11 for item in lengths)
    assert 0 < long < 30
    assert (
        f"  {long} of 30 rows have more than 11 tokens of finetune.model: left out" in done.stderr
    )
    assert report["finetune"]["rows"] == 30 - long


@pytest.mark.parametrize("budget", ["3 steps", "20 calls", "5 min"])
def test_a_dry_run_says_what_a_mix_takes_and_leaves_no_folder(here: Path, budget: str) -> None:
    done = call("--dry-run", "mix.toml", "--set", f"budget={budget}", "--json")
    assert done.exit_code == 0, done.output
    planned = json.loads(done.stdout)
    stages = planned["stages"]
    assert list(stages) == ["reweight", "certainty", "sample", "finetune", "evaluate"]
    assert planned["rows"] == {"learned on": 40, "sampled": 30, "tested": 15}
    assert planned["peak_bytes"] > 2**26
    assert all(stages[name]["seconds"] > 0 for name in ("reweight", "finetune", "evaluate"))
    assert stages["certainty"]["seconds"] == 0, "uniform learns nothing"
    if budget == "5 min":
        assert stages["reweight"]["seconds"] == pytest.approx(300 + planned["reading_seconds"])
    if budget == "3 steps":
        assert stages["reweight"]["seconds"] == pytest.approx(
            3 * planned["step_seconds"] + planned["reading_seconds"]
        )
    assert not (here / "runs").exists()
    shown = call("mix.toml", "--dry-run").stdout
    assert "MiB on disk" in shown
    assert "reweight is reading and the budget; of the other stages 8 rows were timed" in shown


def test_near_copies_between_sets_are_told_with_an_example(here: Path) -> None:
    pytest.importorskip("rensa", reason="rensa is not installed: pip install 'hgms[near]'")
    answer = " ".join(f"word{number}" for number in range(40))
    row = {"prompt": "Say the words from zero to forty.", "completion": answer}
    Path("dots.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({"prompt": "How?", "completion": "So it is."}) + "\n"
    )
    Path("test.jsonl").write_text(json.dumps(row | {"completion": answer + " more"}) + "\n")
    done = call("near", "mix.toml", "--json")
    assert done.exit_code == 0, done.output
    (pair,) = json.loads(done.stdout)
    assert (pair["name"], pair["other"], pair["count"], pair["size"]) == (
        "test sums",
        "sources dots",
        1,
        1,
    )
    shown = call("near", "mix.toml").stdout
    assert "test sums row 0 and sources dots row 0 agree by" in shown
    assert "Say the words from zero to forty." in shown
