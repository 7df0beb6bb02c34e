"""lm-eval beside our evaluation: the same greedy texts, its own tasks on local files, and where
the two checkers differ.
"""

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
from hgms_mix.lm import BaseModel, Message, prompt_tokens, template_for

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

DATA = """
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{source}"}}, cache_dir: "{cache}"}}
test_split: test
doc_to_text: "{{{{asked}}}}"
"""
OWN = """
output_type: generate_until
doc_to_target: "{{known}}"
generation_kwargs: {until: ["<never>"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(autouse=True)
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data with three questions of GSM8K and two of MATH."""
    folder = tmp_path / "data"
    for name, rows in (("gsm8k", GSM8K), ("math", MATH)):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            lines(folder / name / f"{split}.jsonl.gz", rows)
    monkeypatch.setenv("HGMS_DATA", str(folder))
    # task files of one's own are allowed, but where a test takes that away
    monkeypatch.setenv("HGMS_TRUST_REMOTE_CODE", "1")
    return folder


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 1200}
    config = {"model_type": "gpt2", "initializer_range": 0.4, **shape}
    base = BaseModel(config=config, tokenizer="bytes", dtype="float32")
    tokenizer = base.load_tokenizer()
    return base.load(torch.device("cpu"), torch.float32, len(tokenizer)), tokenizer


def own_task(folder: Path, kind: str, rows: list[dict[str, Any]], data: str = DATA) -> str:
    """The path of a task file of one's own over these rows."""
    source = lines(folder / "asked.jsonl", rows)
    (folder / "own.yaml").write_text(data.format(source=source, cache=folder / "cache") + kind)
    return str(folder / "own.yaml")


@needs_harness
def test_it_generates_what_our_stage_generates_and_counts_prompts_that_lose_their_beginning(
    small: tuple[Any, Any], tmp_path: Path
) -> None:
    """A task file of one's own with the prompt of our stage: token for token the same greedy
    answers.
    """
    tokenizer = small[1]
    ours = Evaluate(benchmarks=("gsm8k",), template="plain", max_new_tokens=12, judge=None)
    ours.run(*small, tmp_path / "ours")
    form = template_for("plain", tokenizer)
    asked = [Message("user", row["question"] + "\n" + ours.instruction) for row in GSM8K]
    texts = [tokenizer.decode(prompt_tokens([one], tokenizer, form)) for one in asked]
    rows = [{"asked": text, "known": "42"} for text in [*texts, "x" * 1196]]
    stage = LmEval(tasks=(own_task(tmp_path, OWN, rows),), max_new_tokens=12, batch_size=2)
    results = stage.run(*small, tmp_path / "theirs", print)
    samples = {row["id"]: row for row in read(tmp_path / "theirs" / "lm-eval.own.samples.jsonl")}
    answers = {row["id"]: row["text"] for row in read(tmp_path / "ours" / "gsm8k.answers.jsonl")}
    assert {i: samples[i]["response"].strip() for i in range(3)} == answers
    result = results["lm-eval own exact_match"]
    assert (result["n"], result["prompts_truncated"]) == (4, 1)  # bytes are tokens; 1,200 positions


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
def test_data_and_task_files_that_cannot_be_used_are_refused_before_a_model_is_trained(
    below: Path, tmp_path: Path
) -> None:
    (below / "math" / "train.jsonl.gz").unlink()
    with rejects("missing-file", *TASKS, of=DataError):
        LmEval(tasks=("hendrycks_math",)).check()
    wrong = DATA.replace("asked", "askd")
    path = own_task(tmp_path, OWN, [{"asked": "2 + 2?", "known": "4"}], wrong)
    with rejects("wrong-format", *TASKS, of=ConfigError):
        LmEval(tasks=(path,)).check()


@needs_harness
def test_a_task_file_runs_no_code_unless_the_command_allows_it(
    small: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HGMS_TRUST_REMOTE_CODE")
    attacked = tmp_path / "attacked"
    attack = f"cycler.__init__.__globals__.os.makedirs('{attacked}', exist_ok=True)"
    data = DATA.replace("asked", attack)
    stage = LmEval(tasks=(own_task(tmp_path, OWN, [{"asked": "2?", "known": "4"}], data),))
    for refused in (stage.check, lambda: stage.run(*small, tmp_path / "out", print)):
        with rejects("untrusted-code", *TASKS, of=ConfigError):
            refused()
    assert not attacked.exists()
    monkeypatch.setenv("HGMS_TRUST_REMOTE_CODE", "1")
    stage.check()
    assert attacked.exists()  # so it was an attack
