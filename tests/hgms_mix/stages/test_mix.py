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
    begin,
    fails,
    report_of,
    right,
    sampled,
    stage_folder,
    stages_of,
    write_sums,
)

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

import hgms_mix.lm.tokens
from hgms_mix.lm.tokens import tokenise_rows
from hgms_mix.stages.config import load
from hgms_mix.stages.finetune import chosen_rows
from hgms_mix.stages.mix import STAGES as GRAPH
from hgms_mix.stages.mix import runner_of
from hgms_mix.stages.reweight import reweight
from hgms_mix.stages.tuned_model import TunedModel

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
STAGES = ["reweight", "uncertainty", "sample", "finetune", "evaluate"]
FOUND = [f"{stage}: done before" for stage in STAGES]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a mix and the finished mix."""
    folder = tmp_path_factory.mktemp("mix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        begin(MIX)
        done = right("mix", "mix.toml")
        Path("said.txt").write_text(done.stderr)
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
    report = json.loads((folder / "report.json").read_bytes())
    for stage in ("sample", "finetune", "evaluate"):
        kept += [p for p in sorted(stage_folder(report, stage).rglob("*")) if p.is_file()]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in kept
        if path.name not in ("manifest.json", "env.json")
    }


@pytest.mark.extended
def test_a_mix_says_its_stages_and_reports_what_it_drew_and_how_it_was_tuned(here: Path) -> None:
    said = Path("said.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in said if line[0] != " "] == STAGES
    report = json.loads((finished() / "report.json").read_bytes())
    assert report["sample"]["counts"] == {"sums": 15, "dots": 15}
    assert report["uncertainty"]["skipped"] == "the method 'uniform' learns no weights"
    test = report["test"]["sums"]
    gap = test["token_loss"]["value"] - test["untuned"]
    assert test["against_untuned"]["value"] == pytest.approx(gap, abs=1e-9)
    rows = sampled(report)
    assert len({(row["source"], row["row"]) for row in rows}) == 30
    lines = {name: Path(f"{name}.jsonl").read_text().splitlines() for name in ("sums", "dots")}
    assert [[item["content"] for item in row["messages"]] for row in rows] == [
        list(json.loads(lines[row["source"]][row["row"]]).values()) for row in rows
    ]


def test_what_is_finished_is_found_again_wherever_it_lies_and_settings_come_back(
    here: Path,
) -> None:
    before = files_of(finished())
    assert stages_of(right("mix", "mix.toml")) == FOUND
    still = right("mix", "mix.toml", sets=["finetune.lr=1e-30"])
    assert stages_of(still) == [*FOUND[:3], "finetune: starts", "evaluate: starts"]
    # an adapter that tuning leaves as it was is the model before
    report = json.loads((finished() / "report.json").read_bytes())["test"]["sums"]
    assert report["token_loss"]["value"] == pytest.approx(report["untuned"], rel=1e-6)
    # the results of the earlier settings remain
    assert "finetune: done before" in right("mix", "mix.toml").stderr
    assert files_of(finished()) == before
    shutil.move("runs", "elsewhere")
    assert stages_of(right("mix", "sample", "mix.toml", "--out", "elsewhere")) == FOUND[:3]


@pytest.mark.extended
def test_an_interrupted_mix_ends_with_the_files_of_an_uninterrupted_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C in each stage, of fine-tuning between two checkpoints."""
    inside = {
        "reweight": ("hgms.runs.stepper", "check_numbers", 2),
        "sample": ("hgms_mix.stages.sample", "compress", 1),
        "finetune": ("hgms_mix.stages.training", "completion_loss", 5),
        "evaluate": ("hgms_mix.stages.evaluate", "row_losses", 1),
    }
    whole = files_of(finished())
    shutil.rmtree("runs")
    # A worker of pytest-xdist ignores Ctrl-C; a program does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    for stage, (module, function, last) in inside.items():
        where = importlib.import_module(module)
        calls = iter([False] * (last - 1) + [True])

        def press(*arguments: Any, kept: Any = getattr(where, function), **options: Any) -> Any:
            if next(calls, False):  # noqa: B023
                signal.raise_signal(signal.SIGINT)
            return kept(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(where, function, press)
            broken = fails("mix", "mix.toml", code=130)
        assert f"run the same command again to resume in stage {stage}" in broken.stderr
    again = right("mix", "mix.toml")
    assert stages_of(again)[:4] == FOUND[:4]
    assert "evaluate: resumes" in again.stderr
    assert files_of(finished()) == whole


def test_new_content_of_a_source_is_a_new_mix_and_an_old_sample_of_it_is_rejected(
    here: Path,
) -> None:
    config = load(Path("mix.toml"))
    learned = reweight(config.reweight, finished())
    rows = runner_of(config, learned).run(GRAPH["sample"]).path / "rows.jsonl.gz"
    facts = json.loads((rows.parent / "counts.json").read_bytes())
    write_sums("dots", range(100, 160), "!")
    with rejects("data-changed", "task", "sources", "dots"):
        chosen_rows(TunedModel.of(config), facts, rows, {}, print)
    report = report_of("mix", "sample", "mix.toml")
    answers = {row["messages"][1]["content"] for row in sampled(report) if row["source"] == "dots"}
    assert answers == {"!"}


def test_rows_do_not_depend_on_the_order_of_the_tables_and_a_short_source_gives_to_others(
    here: Path,
) -> None:
    sums, dots = (f'[task.sources.{name}]\npath = "{name}.jsonl"\n' for name in ("sums", "dots"))
    Path("turned.toml").write_text(MIX.replace(sums + dots, dots + sums))
    samples = []
    for file in ("mix.toml", "turned.toml"):
        shutil.rmtree("runs")  # which would have the sample of the other file
        rows = sampled(report_of("mix", "sample", file, sets=["sample.size=31"]))
        samples.append([(row["source"], row["row"]) for row in rows])
    assert samples[0] == samples[1]
    done = right("mix", "sample", "mix.toml", sets=["sample.size=90"])
    assert "source 'sums' has 40 rows, its weight 0.500 asks for 45" in done.stderr


RANKED = '''
from __future__ import annotations
from typing import Any, ClassVar, final
import torch
from attrs import frozen
from hgms_core import hookimpl
from hgms_core.capabilities import Finishes, RanksRows


@final
@frozen(kw_only=True)
class ByNumber:
    """Ranks the rows of lower_data by their numbers, leaves the first out, and is finished at once.

    >>> ByNumber().name
    'by-number'
    """

    name: ClassVar[str] = "by-number"
    capabilities = frozenset({Finishes, RanksRows})

    def init(self, problem: Any, seed: int) -> Any:
        return {"theta": problem.theta0, "x": problem.x0, "left": 2}

    def step(self, problem: Any, state: Any, progress: float) -> Any:
        return {**state, "left": state["left"] - 1}, {"oracle_calls": 0}

    def is_finished(self, state: Any) -> bool:
        return state["left"] == 0

    def result(self, state: Any) -> Any:
        return state["theta"], state["x"]

    def ranking(self, problem: Any, state: Any) -> torch.Tensor:
        scores = torch.arange(float(problem.lower_data.size))
        scores[0] = torch.nan
        return scores if self.is_finished(state) else scores * torch.nan


@hookimpl
def hgms_register_methods() -> list[type]:
    return [ByNumber]
'''


@pytest.mark.extended
def test_a_method_that_ranks_rows_gives_the_top_of_its_ranking(here: Path) -> None:
    Path("ranked.py").write_text(RANKED)
    words = ("mix", "sample", "mix.toml", "--plugin", "ranked.py")
    sets = ["method=by-number", "task.cache=20", "sample.size=25"]
    report = report_of(*words, sets=sets)
    drawn = {"by": "ranking", "counts": {"sums": 5, "dots": 20}}
    assert {key: report["sample"][key] for key in drawn} == drawn
    rows = sampled(report)
    # the twenty cached rows of `dots` have the numbers 20 … 39, those of `sums` 0 … 19 in the order
    # of the file
    assert sorted(row["score"] for row in rows) == [float(i) for i in range(15, 40)]
    fails(*words, sets=[*sets, "sample.size=40"], parts=["(dots 20, sums 19) (sample.size)"])


@pytest.mark.extended
def test_only_rows_that_are_drawn_become_tokens(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {"sums": set(), "dots": set(), "validation": set(), "test": set()}

    def watched(rows: Any, *, source: Any, original: Any = tokenise_rows, **options: Any) -> Any:
        seen[Path(source.path).stem].update(row[0] for row in rows)
        return original(rows, source=source, **options)

    monkeypatch.setattr(hgms_mix.lm.tokens, "tokenise_rows", watched)
    # a length of its own, so that nothing is in the cache
    sets = ["task.cache=5", "sample.size=8", "task.max_length=39"]
    rows = sampled(report_of("mix", "finetune", "mix.toml", sets=sets))
    assert len(rows) == 8
    for name in ("sums", "dots"):
        assert {row["row"] for row in rows if row["source"] == name} <= seen[name]
        assert len(seen[name]) <= 5 + 4
