"""`hgms mix` end to end: stages made once, resumed and found again, on a model of a few thousand
parameters.
"""

from __future__ import annotations

import importlib
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from support.helpers import rejects
from support.small_mixes import (
    TASK,
    fails,
    report_of,
    right,
    sampled,
    stages_of,
    write_rows,
    write_sums,
)

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
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
{TASK}
[sample]
size = 30
[finetune]
lr = 1e-2
micro_batch = 3
accumulation = 2
save_every = 2
"""
STAGES = ["reweight", "certainty", "sample", "finetune", "evaluate"]
FOUND = [f"{stage}: done before" for stage in STAGES]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a mix and the finished mix."""
    folder = tmp_path_factory.mktemp("mix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_sums("sums", range(40))
        write_sums("dots", range(100, 160), ".")
        write_sums("validation", range(200, 220))
        write_sums("test", range(300, 315))
        Path("mix.toml").write_text(MIX)
        done = right("mix", "mix.toml")
        Path("said.txt").write_text(done.stderr)
        Path("shown.txt").write_text(done.stdout)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finished() -> Path:
    (folder,) = Path("runs/source-mixture").glob("uniform-*/seed-1")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    """All that matters of a mix: not the clock, not the environment."""
    kept = [folder / "steps.jsonl", folder / "summary.json"]
    for stage in ("sample", "finetune", "evaluate"):
        kept += sorted((folder / stage).rglob("*"))
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in kept
        if path.is_file() and path.name not in ("manifest.json", "env.json")
    }


def test_a_mix_says_its_stages_and_reports_what_it_drew_and_how_it_was_tuned(here: Path) -> None:
    said = Path("said.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in said if line[0] != " "] == STAGES
    weights = said.index("  weights: sums 0.500, dots 0.500")
    assert weights < next(i for i, line in enumerate(said) if line.startswith("sample:"))
    folder = finished()
    assert {path.name for path in folder.iterdir()} >= {
        *("config.toml", "mix.toml", "mixture.png", "report.json"),
        *("sample", "finetune", "evaluate"),
    }
    report = json.loads((folder / "report.json").read_bytes())
    assert report["sample"]["counts"] == {"sums": 15, "dots": 15}
    assert report["certainty"]["left_out"] == "the method 'uniform' learns no weights"
    test = report["test"]["sums"]
    loss, gap = test["token_loss"], test["against_untuned"]
    assert test["rows"] == 15
    assert loss["low"] < loss["value"] < loss["high"]
    assert gap["low"] <= gap["value"] <= gap["high"]
    assert gap["value"] == pytest.approx(loss["value"] - test["untuned"], abs=1e-9)
    shown = Path("shown.txt").read_text()
    assert "sums     0.5000   15     40" in shown
    assert f" {test['untuned']:.4f} " in shown
    rows = sampled(report)
    assert len({(row["source"], row["row"]) for row in rows}) == 30
    for row in rows:
        line = Path(f"{row['source']}.jsonl").read_text().splitlines()[row["row"]]
        assert [item["content"] for item in row["messages"]] == list(json.loads(line).values())


def test_what_is_finished_is_not_made_again_and_settings_come_back(here: Path) -> None:
    before = files_of(finished())
    assert stages_of(right("mix", "mix.toml")) == FOUND
    assert files_of(finished()) == before
    still = right("mix", "mix.toml", sets=["finetune.lr=1e-30"])
    assert stages_of(still) == [*FOUND[:3], "finetune: 30 rows", "evaluate: sums"]
    # an adapter that tuning leaves as it was is the model before
    report = json.loads((finished() / "report.json").read_bytes())["test"]["sums"]
    assert report["token_loss"]["value"] == pytest.approx(report["untuned"], rel=1e-6)
    # the settings of before are found where they stepped aside to
    assert "finetune: done before" in right("mix", "mix.toml").stderr
    assert files_of(finished()) == before


def test_a_mix_is_found_by_its_resolved_file_in_a_moved_folder_but_not_while_it_is_made(
    here: Path,
) -> None:
    from hgms.runs import leased

    Path("again.toml").write_bytes((finished() / "mix.toml").read_bytes())
    assert stages_of(right("mix", "sample", "again.toml")) == FOUND[:3]
    with leased(finished(), ".mix.lease"):
        fails("mix", "sample", "mix.toml", parts=[f"({finished()})"])
    shutil.move("runs", "elsewhere")
    assert stages_of(right("mix", "sample", "mix.toml", "--out", "elsewhere")) == FOUND[:3]


def test_an_interrupted_mix_ends_with_the_files_of_an_uninterrupted_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C in each stage, of fine-tuning between two checkpoints."""
    inside = {
        "reweight": ("hgms.runs.loop", "check_numbers", 2),
        "sample": ("hgms_mix.stages.sample", "write_rows", 1),
        "finetune": ("hgms_mix.stages.trainers", "completion_loss", 5),
        "evaluate": ("hgms_mix.stages.evaluate", "row_losses", 1),
    }
    whole = files_of(finished())
    shutil.rmtree("runs")
    done: list[str] = []
    # A worker of pytest-xdist ignores Ctrl-C; a program does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    for stage, (module, function, last) in inside.items():
        where = importlib.import_module(module)
        kept = getattr(where, function)
        calls: list[str] = []

        def press(
            *arguments: Any, kept: Any = kept, calls: Any = calls, last: int = last, **options: Any
        ) -> Any:
            calls.append("")
            if len(calls) == last:
                signal.raise_signal(signal.SIGINT)
            return kept(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(where, function, press)
            broken = fails("mix", "mix.toml", code=130)
        assert f"run the same command again to resume in stage {stage}" in broken.stderr
        assert "--resume" not in broken.stderr
        resumed = [line.partition(":")[0] for line in stages_of(broken) if "going on with" in line]
        assert resumed == done[-1:]
        done.append(stage)
    again = right("mix", "mix.toml")
    assert stages_of(again)[:4] == FOUND[:4]
    assert "evaluate: going on with" in again.stderr
    assert files_of(finished()) == whole


def test_new_content_of_a_source_is_a_new_mix_and_an_old_sample_of_it_is_rejected(
    here: Path,
) -> None:
    from hgms_mix.stages.config import load
    from hgms_mix.stages.finetune import chosen_rows
    from hgms_mix.stages.mix import Mix

    mix = Mix(load(Path("mix.toml")), finished())
    mix.run("sample")
    assert len(chosen_rows(mix)) == 30
    write_sums("dots", range(100, 160), "!")
    with rejects("data-changed", "task", "sources", "dots"):
        chosen_rows(mix)
    report = report_of("mix", "sample", "mix.toml")
    assert Path(report["folder"]) != mix.folder
    answers = {row["messages"][1]["content"] for row in sampled(report) if row["source"] == "dots"}
    assert answers == {"!"}


def test_counts_and_rows_do_not_depend_on_the_order_of_the_tables(here: Path) -> None:
    sums, dots = (f'[task.sources.{name}]\npath = "{name}.jsonl"\n' for name in ("sums", "dots"))
    Path("turned.toml").write_text(MIX.replace(sums + dots, dots + sums))
    first, second = (
        sampled(report_of("mix", "sample", file, sets=["sample.size=31"]))
        for file in ("mix.toml", "turned.toml")
    )
    assert [(row["source"], row["row"]) for row in first] == [
        (row["source"], row["row"]) for row in second
    ]


def test_a_source_that_is_short_gives_the_rest_to_others_and_says_so(here: Path) -> None:
    done = right("mix", "sample", "mix.toml", sets=["sample.size=90"])
    assert "source 'sums' has 40 rows, its weight 0.500 asks for 45" in done.stderr
    counts = json.loads((finished() / "sample" / "counts.json").read_bytes())["counts"]
    assert counts == {"sums": 40, "dots": 50}
    fails("mix", "sample", "mix.toml", sets=["sample.size=101"], parts=["size=101", "sample.size)"])


def test_validation_rows_alone_are_a_set_too(here: Path) -> None:
    Path("mix.toml").write_text(MIX.replace("[task.validation.sums]", "[task.validation.held]"))
    before = finished()
    shown = right("mix", "mix.toml", sets=["sample.of=validation", "sample.size=7"]).stdout
    (folder,) = {path.parent for path in Path("runs").rglob("report.json")} - {before}
    report = json.loads((folder / "report.json").read_bytes())
    prompts = {row["messages"][0]["content"] for row in sampled(report)}
    assert len(prompts) == 7
    assert prompts <= {
        json.loads(line)["prompt"] for line in Path("validation.jsonl").read_text().splitlines()
    }
    assert [(row["source"], row["rows"]) for row in report["sources"]] == [("held", 7)]
    assert report["finetune"]["rows"] == 7
    # the weights that were learned have rows of their own
    assert "held     1.0000   7      20" in shown
    assert "dots" in shown


def test_benchmarks_are_answered_and_shown(here: Path) -> None:
    pytest.importorskip(
        "math_verify", reason="math-verify is not installed: pip install 'hgms[llm]'"
    )
    write_rows(
        "gsm8k",
        [{"question": f"{i} + 1 =", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(3)],
    )
    sets = [
        *("evaluate.benchmarks=['gsm8k']", "evaluate.paths.gsm8k=gsm8k.jsonl"),
        *("evaluate.max_new_tokens=4", "evaluate.max_prompt_tokens=30", "evaluate.instruction=''"),
    ]
    done = right("mix", "mix.toml", sets=sets)
    assert stages_of(done)[:5] == [*FOUND[:4], "evaluate: sums, gsm8k"]
    assert "\n  gsm8k: 0.00 [0.00, " in done.stdout
    report = json.loads((finished() / "report.json").read_bytes())
    assert report["benchmarks"]["gsm8k"]["score"] == 0.0  # four random bytes are no answer
    answers = finished() / "evaluate/benchmarks/gsm8k.answers.jsonl"
    assert len(answers.read_text().splitlines()) == 3


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
    words = ("mix", "sample", "mix.toml", "--plugin", "ranked.py")
    sets = ["method=by-number", "task.cache=20", "sample.size=25"]
    report = report_of(*words, sets=sets)
    assert report["outer_steps"] == 2  # of 3: the method said that it was done
    assert report["sample"]["by"] == "ranking"
    assert report["sample"]["counts"] == {"sums": 5, "dots": 20}
    rows = sampled(report)
    # the twenty cached rows of `dots` have the numbers 20 … 39, those of `sums` 0 … 19 in the order
    # of the file
    assert sorted(row["score"] for row in rows) == [float(i) for i in range(15, 40)]
    ordered = sorted((row for row in rows if row["source"] == "sums"), key=lambda row: row["score"])
    assert [row["row"] for row in ordered] == sorted(row["row"] for row in ordered)
    fails(*words, sets=[*sets, "sample.size=40"], parts=["(dots 20, sums 19) (sample.size)"])
    fails(*words, sets=[*sets, "budget=1 steps"], parts=["'by-number'", "1 outer step", "(budget)"])


def test_only_rows_that_are_drawn_become_tokens(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hgms_mix.lm.tokens import Tokenising

    seen: dict[str, set[int]] = {}
    original = Tokenising.__call__

    def watched(self: Any, rows: Any) -> Any:
        seen.setdefault(Path(self.file).stem, set()).update(row[0] for row in rows)
        return original(self, rows)

    monkeypatch.setattr(Tokenising, "__call__", watched)
    # a length of its own, so that nothing is in the cache
    sets = ["task.cache=5", "sample.size=8", "task.max_length=39"]
    rows = sampled(report_of("mix", "finetune", "mix.toml", sets=sets))
    assert len(rows) == 8
    for name in ("sums", "dots"):
        assert {row["row"] for row in rows if row["source"] == name} <= seen[name]
        assert len(seen[name]) <= 5 + 4


def test_a_dry_run_says_what_a_mix_takes_and_leaves_no_folder(here: Path) -> None:
    shutil.rmtree("runs")
    steps, minutes = (
        report_of("mix", "mix.toml", "--dry-run", sets=[f"budget={budget}"])
        for budget in ("3 steps", "5 min")
    )
    stages = steps["stages"]
    assert list(stages) == STAGES
    assert steps["rows"] == {"learned on": 40, "sampled": 30, "tested": 15}
    assert steps["peak_bytes"] > 2**26
    assert all(stages[name]["seconds"] > 0 for name in ("reweight", "finetune", "evaluate"))
    assert stages["certainty"]["seconds"] == 0, "uniform learns nothing"
    for planned, seconds in ((steps, 3 * steps["step_seconds"]), (minutes, 300)):
        assert planned["stages"]["reweight"]["seconds"] == pytest.approx(
            seconds + planned["reading_seconds"]
        )
    assert not Path("runs").exists()
