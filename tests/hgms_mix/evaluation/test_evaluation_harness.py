"""lm-eval beside our evaluation: its own tasks on local files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects
from support.judge_files import read
from support.source_files import lines

from hgms_core import ConfigError
from hgms_core.errors import DataError
from hgms_mix.evaluation import Evaluate, LmEval, harness
from hgms_mix.lm import BaseModel

pytest.importorskip("transformers", reason="the extra hgms[llm] is not installed")
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-eval is not installed: pip install 'hgms[lm-eval]'",
)

TASKS = ("evaluate", "lm_eval", "tasks")
GSM8K = [
    {"question": "How much is 6 times 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
    {"question": "Half of 2,500?", "answer": "2500 / 2 = 1250\n#### 1,250"},
    {"question": "3 - 5?", "answer": "3 - 5 = -2\n#### -2"},
]
MATH = [
    {
        "problem": r"What is $\frac{1}{2}+\frac{1}{4}$?",
        "solution": r"It is $\boxed{\frac{3}{4}}$.",
        "subject": "Algebra",
    },
    {"problem": "Which interval?", "solution": r"So $x \in \boxed{[2,5)}$.", "subject": "Algebra"},
]


@pytest.fixture(autouse=True)
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data with three questions of GSM8K and two of MATH."""
    folder = tmp_path / "data"
    for name, rows in (("gsm8k", GSM8K), ("math", MATH)):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            lines(folder / name / f"{split}.jsonl.gz", rows)
    monkeypatch.setenv("HGMS_DATA", str(folder))
    return folder


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 1200}
    config = {"model_type": "gpt2", "initializer_range": 0.4, **shape}
    base = BaseModel(config=config, tokenizer="bytes", dtype="float32")
    tokenizer = base.load_tokenizer()
    return base.load(torch.device("cpu"), torch.float32, len(tokenizer)), tokenizer


@needs_harness
def test_its_own_gsm8k_reads_our_files_and_is_run_once(
    small: tuple[Any, Any], tmp_path: Path
) -> None:
    task = "gsm8k_cot_zeroshot"
    stage = Evaluate(lm_eval=LmEval(tasks=(task,), max_new_tokens=4, limit=2), judge=None)
    said: list[str] = []
    results = stage.run(*small, tmp_path / "out", said.append)
    name = f"lm-eval {task} flexible-extract exact_match"
    assert set(results) == {name, name.replace("flexible-extract", "strict-match")}
    assert (results[name]["n"], results[name]["unit"]) == (2, "percent")
    samples = read(tmp_path / "out" / f"lm-eval.{task}.samples.jsonl")
    assert [row["prompt"] for row in samples[:2]] == [
        f"Q: {row['question']}\nA: Let's think step by step." for row in GSM8K[:2]
    ]
    assert stage.run(*small, tmp_path / "out", said.append) == results
    assert said == [f"lm-eval: {task}"]


def test_figures_are_shares_with_intervals_only_where_they_are_means_of_zeros_and_ones() -> None:
    common = {"filter": "none", "metrics": ["right", "median"]}
    rows = [{**common, "right": i < 3, "median": i < 3} for i in range(4)]
    results = harness.summary("t", rows, {"right,none": 0.75, "median,none": 1.0})
    right = results["lm-eval t right"]
    found = (right["score"], right["interval"]["low"], right["interval"]["high"])
    assert found == pytest.approx((75, 30.064, 95.441), abs=1e-3)  # by hand
    plain = {"score": 1.0, "unit": "median", "n": 4, "interval": None}
    assert results["lm-eval t median"] == plain


@needs_harness
def test_data_that_are_missing_are_refused_before_a_model_is_trained(below: Path) -> None:
    (below / "math" / "train.jsonl.gz").unlink()
    with rejects("missing-file", *TASKS, of=DataError):
        LmEval(tasks=("hendrycks_math",)).check()


def test_an_unknown_task_is_refused() -> None:
    with rejects("unknown-choice", "tasks", 0, of=ConfigError):
        LmEval(tasks=("gsm9k",))  # type: ignore[arg-type]
