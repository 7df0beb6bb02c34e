"""benchmarks/llm/evaluate.py: the tuned model of a finished mix, in the paper's procedure."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from evaluation import Evaluate, Judge
from support.helpers import load_script
from support.judge_files import good, write_bench
from support.small_mixes import TASK, begin, right, write_rows

from hgms.results import scan
from hgms_core import HgmsError

for needed in ("transformers", "peft", "math_verify", "openai"):
    pytest.importorskip(needed, reason="the extra hgms[scores] is not installed")

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2] / "benchmarks"
MIX = f"""
seed = 1
budget = "2 steps"
method = "uniform"
{TASK}
[sample]
size = 30
[finetune]
lr = 1e-2
"""
SETTINGS = """
benchmarks = ["gsm8k"]
paths = { gsm8k = "gsm8k.jsonl" }
max_new_tokens = 4
max_prompt_tokens = 30
instruction = ""
judge = "none"
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("hgms_benchmark_evaluate", ROOT / "llm" / "evaluate.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished mix and three questions."""
    folder = tmp_path_factory.mktemp("mix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        begin(MIX)
        rows = [{"question": f"{i} + 1 =", "answer": f"#### {i + 1}"} for i in range(3)]
        write_rows("gsm8k", rows)
        Path("settings.toml").write_text(SETTINGS)
        right("mix", "mix.toml")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the mix, in a copy."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (folder,) = Path("runs/source-mixture").glob("uniform-*/seed-1")
    return folder


def scored(script: ModuleType, folder: Path, *words: str) -> dict[str, Any]:
    script.main([str(folder), "--settings", "settings.toml", *words])
    (found,) = folder.glob("benchmarks-*")
    return json.loads((found / "results.json").read_bytes())


def test_the_scores_of_a_mix_are_stored_resumed_and_in_the_tables(
    script: ModuleType, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = json.loads((here / "scores.json").read_bytes())["metrics"]
    results = scored(script, here, "--limit", "2")
    assert results["gsm8k"]["n"] == 2
    results = scored(script, here)
    assert results["gsm8k"]["score"] == 0.0  # four random bytes are no answer
    said = capsys.readouterr().out
    assert "gsm8k: 1 questions\n" in said
    assert f"{here}: gsm8k: 0.00 [0.00, " in said
    (stored,) = here.glob("benchmarks-*")
    before = {path.name: path.read_bytes() for path in stored.iterdir()}
    scored(script, here)
    assert {path.name: path.read_bytes() for path in stored.iterdir()} == before
    assert "questions\n" not in capsys.readouterr().out
    content = json.loads((here / "scores.json").read_bytes())
    assert content["metrics"] == {**losses, "gsm8k_accuracy": 0.0}
    ([run], skipped) = scan("runs")
    assert (run.metrics["gsm8k_accuracy"], skipped) == (0.0, [])
    assert run.higher_is_better["gsm8k_accuracy"] is True
    # other settings have another folder; the mix is finished still
    script.main([str(here), "--settings", "settings.toml", "--batch-size", "1"])
    Path("settings.toml").write_text(SETTINGS.replace("tokens = 4", "tokens = 5"))
    script.main([str(here), "--settings", "settings.toml"])
    assert len(list(here.glob("benchmarks-*"))) == 2
    assert "evaluate: done before" in right("mix", "mix.toml").stderr


def test_conversations_are_rated_by_a_judge(
    script: ModuleType, here: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bench(Path(), 2)
    endpoint = serve(good)
    text = 'benchmarks = ["mt-bench"]\nmax_new_tokens = 4\npaths = { mt-bench = "bench" }\n'
    Path("settings.toml").write_text(text + 'judge = "none"\n')
    assert scored(script, here)["mt-bench"]["score"] is None
    assert "mt-bench: not scored" in capsys.readouterr().out
    judge = f'judge = {{ base_url = "{endpoint.url}", model = "m" }}\n'
    Path("settings.toml").write_text(text + judge)
    rated = scored(script, here, "--rate")["mt-bench"]
    assert (rated["rated"], len(endpoint.bodies)) == (4, 4)
    content = json.loads((here / "scores.json").read_bytes())
    assert content["metrics"]["mt-bench_score"] == rated["score"]


def test_a_model_that_the_settings_do_not_describe_is_rejected(
    script: ModuleType, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*words: str) -> tuple[str, str]:
        """The code of the error, and its place as it is printed."""
        with pytest.raises(SystemExit) as ended:
            script.main([str(here), *words])
        assert ended.value.code == 2
        cause = ended.value.__context__
        assert isinstance(cause, HgmsError)
        shown = capsys.readouterr()
        assert shown.err == f"error: {cause}\n"
        assert not shown.out
        return cause.code, ".".join(map(str, cause.place))

    assert error("--settings", "none.toml") == ("unreadable-file", "none.toml")
    Path("wrong.toml").write_text("benchmark = 3\n")
    assert error("--settings", "wrong.toml") == ("unknown-option", "wrong.toml.benchmark")
    assert error("--settings", "settings.toml", "--limit", "0") == ("out-of-range", "options.limit")
    path = here / "mix.toml"
    path.write_text(path.read_text().replace("rank = 2", "rank = 1"))
    (tuned,) = here.glob("finetune-*")
    assert error("--settings", "settings.toml") == ("other-settings", str(tuned))
    (here / "report.json").unlink()
    assert error("--settings", "settings.toml") == ("unfinished-run", str(here))


def test_the_settings_of_the_paper(script: ModuleType) -> None:
    folder = ROOT / "paper" / "llm" / "evaluation"
    read = {path.stem: script.read_settings(path, "model") for path in folder.glob("*.toml")}
    assert read == {
        "mathematics": Evaluate(benchmarks=("gsm8k", "math"), template="alpaca"),
        "instructions": Evaluate(
            benchmarks=("mt-bench",),
            template="alpaca",
            judge=Judge(model="gpt-4o", temperature=0.0),
            max_prompt_tokens=1024,
            max_new_tokens=512,
        ),
    }
    assert script.read_settings(None, "chatml") == Evaluate(template="chatml")


@pytest.mark.skipif("HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no questions")
def test_the_procedure_of_the_paper_on_a_small_model(
    script: ModuleType, tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of the paper, with one question of each benchmark."""
    endpoint = serve(good)
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.chdir(tmp_path)
    larger = MIX.replace("n_positions = 40", "n_positions = 2100").replace('"plain"', '"alpaca"')
    begin(larger.replace("max_length = 40", "max_length = 400"))
    right("mix", "mix.toml")
    (folder,) = Path("runs/source-mixture").glob("uniform-*/seed-1")
    for kind in ("mathematics", "instructions"):
        settings = ROOT / "paper" / "llm" / "evaluation" / f"{kind}.toml"
        script.main([str(folder), "--settings", str(settings), "--limit", "1"])
    assert {body["model"] for body in endpoint.bodies} == {"gpt-4o"}
    scores = json.loads((folder / "scores.json").read_bytes())["metrics"]
    assert scores.keys() == {
        *("tuned_sums_loss", "gsm8k_accuracy", "math_accuracy", "mt-bench_score")
    }


@pytest.mark.parametrize(
    "name", ["answers", "judge", "run", "scores", "verifier", "hgms_benchmark_evaluate"]
)
def test_examples_of_docstrings(script: ModuleType, name: str) -> None:
    module = script if name == script.__name__ else importlib.import_module(f"evaluation.{name}")
    failed, attempted = doctest.testmod(module)
    assert (failed, attempted > 0) == (0, True)
