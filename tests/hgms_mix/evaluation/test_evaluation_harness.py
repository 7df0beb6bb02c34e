"""lm-eval beside our evaluation: the same greedy texts, its own tasks on local files, and where
the two checkers differ.
"""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import load_script, rejects

import hgms_mix.evaluation
from hgms.config.as_table import plain
from hgms.config.convert import converter_for
from hgms_core import CheckpointError, ConfigError, DataError, MissingExtra
from hgms_core.registry import Registry
from hgms_mix.evaluation import Evaluate, LmEval, Verifier, harness
from hgms_mix.lm import BaseModel, Message, prompt_tokens, template_for

pytest.importorskip("transformers", reason="the extra hgms[llm] is not installed")
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-eval is not installed: pip install 'hgms[lm-eval]'",
)

ROOT = Path(__file__).resolve().parents[3]
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
CHOICE = """
output_type: multiple_choice
doc_to_target: known
doc_to_choice: ["yes", "no"]
metric_list:
- {metric: acc, aggregation: mean, higher_is_better: true}
- {metric: f1, aggregation: f1, higher_is_better: true}
"""


@pytest.fixture(autouse=True)
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data with three questions of GSM8K and two of MATH."""
    folder = tmp_path / "data"
    for name, rows in (("gsm8k", GSM8K), ("math", MATH)):
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            with gzip.open(folder / name / f"{split}.jsonl.gz", "wt") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setenv("HGMS_DATA", str(folder))
    # task files of one's own are allowed, but where a test takes that away
    monkeypatch.setenv("HGMS_TRUST_REMOTE_CODE", "1")
    return folder


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 1200}
    base = BaseModel(
        config={"model_type": "gpt2", "initializer_range": 0.4, **shape},
        tokenizer="bytes",
        dtype="float32",
    )
    tokenizer = base.load_tokenizer()
    return base.load(torch.device("cpu"), torch.float32, len(tokenizer)), tokenizer


def own_task(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    """The path of a task file of one's own over these rows."""
    source = folder / "asked.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.yaml").write_text(DATA.format(source=source, cache=folder / "cache") + kind)
    return str(folder / "own.yaml")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@needs_harness
def test_it_generates_what_our_stage_generates(
    small: tuple[Any, Any], below: Path, tmp_path: Path
) -> None:
    """A task file of one's own with the prompt of our stage: token for token the same greedy
    answers.
    """
    ours = Evaluate(benchmarks=("gsm8k",), template="plain", max_new_tokens=12, judge=None)
    ours.run(*small, tmp_path / "ours")
    prompts = [row["question"] + "\n" + ours.instruction for row in GSM8K]
    tokenizer = small[1]
    form = template_for("plain", tokenizer)
    texts = [
        tokenizer.decode(prompt_tokens([Message("user", text)], tokenizer, form))
        for text in prompts
    ]
    task = own_task(tmp_path, OWN, [{"asked": text, "known": "42"} for text in texts])
    stage = LmEval(tasks=(task,), max_new_tokens=12, batch_size=2)
    results = stage.run(*small, tmp_path / "theirs", print)
    samples = {row["id"]: row for row in read(tmp_path / "theirs" / "lm-eval.own.samples.jsonl")}
    answers = {row["id"]: row for row in read(tmp_path / "ours" / "gsm8k.answers.jsonl")}
    assert [samples[i]["response"].strip() for i in range(3)] == [
        answers[i]["text"] for i in range(3)
    ]
    assert results["lm-eval own exact_match"]["n"] == 3


@needs_harness
def test_its_own_gsm8k_reads_our_files_and_is_run_once(
    small: tuple[Any, Any], tmp_path: Path
) -> None:
    stage = Evaluate(
        lm_eval=LmEval(tasks=("gsm8k_cot_zeroshot",), max_new_tokens=4, limit=2), judge=None
    )
    said: list[str] = []
    results = stage.run(*small, tmp_path / "out", said.append)
    assert said == ["lm-eval: gsm8k_cot_zeroshot"]
    name = "lm-eval gsm8k_cot_zeroshot flexible-extract exact_match"
    assert set(results) == {name, name.replace("flexible-extract", "strict-match")}
    assert (results[name]["n"], results[name]["unit"]) == (2, "percent")
    samples = read(tmp_path / "out" / "lm-eval.gsm8k_cot_zeroshot.samples.jsonl")
    assert [row["prompt"] for row in samples[:2]] == [
        f"Q: {row['question']}\nA: Let's think step by step." for row in GSM8K[:2]
    ]
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    assert stage.run(*small, tmp_path / "out", said.append) == results
    assert len(said) == 1


@needs_harness
def test_a_task_that_compares_choices_is_scored_as_the_harness_scores_it(
    small: tuple[Any, Any], tmp_path: Path
) -> None:
    from sklearn.metrics import f1_score

    task = own_task(
        tmp_path, CHOICE, [{"asked": f"Is {i} even?", "known": i % 2} for i in range(4)]
    )
    # it needs no room for answers
    results = LmEval(tasks=(task,), max_new_tokens=1200).run(*small, tmp_path / "out", print)
    rows = read(tmp_path / "out" / "lm-eval.own.samples.jsonl")
    said = [int(no > yes) for (yes, _), (no, _) in (row["response"] for row in rows)]
    known = [0, 1, 0, 1]
    assert [row["acc"] for row in rows] == [float(a == b) for a, b in zip(said, known, strict=True)]
    assert results["lm-eval own acc"]["score"] == 25 * sum(row["acc"] for row in rows)
    f1 = results["lm-eval own f1"]  # no mean over rows
    assert f1 == {
        "score": pytest.approx(f1_score(known, said)),
        "unit": "f1",
        "n": 4,
        "interval": None,
    }


@needs_harness
def test_a_task_file_is_run_again_where_its_rows_what_it_includes_or_its_code_changed(
    small: tuple[Any, Any], tmp_path: Path
) -> None:
    path = own_task(tmp_path, 'include: "base.yaml"\n', [{"asked": "Is 2 even?", "known": 0}])
    base = tmp_path / "base.yaml"
    code = tmp_path / "told.py"
    base.write_text(CHOICE.replace("doc_to_target: known", "doc_to_target: !function told.known"))
    code.write_text("def known(doc): return doc['known']\n")
    said: list[str] = []

    def scores(file: Path, text: str) -> float:
        file.write_text(text)
        results = LmEval(tasks=(path,)).run(*small, tmp_path / "out", said.append)
        return float(results["lm-eval own acc"]["score"])

    first = scores(code, code.read_text())
    assert (scores(code, code.read_text()), len(said)) == (first, 1)
    assert (
        scores(code, code.read_text().replace("doc['known']", "1 - doc['known']")),
        len(said),
    ) == (100 - first, 2)
    scores(base, base.read_text().replace('["yes", "no"]', '["no", "yes"]'))
    assert len(said) == 3
    rows = tmp_path / "asked.jsonl"
    scores(rows, 2 * rows.read_text())
    assert len(said) == 4


@needs_harness
def test_prompts_that_lose_their_beginning_are_counted(
    small: tuple[Any, Any], tmp_path: Path
) -> None:
    # bytes are tokens; 1,200 positions
    rows = [{"asked": "x" * length, "known": "y"} for length in (1100, 1196, 1300)]
    said: list[str] = []
    results = LmEval(tasks=(own_task(tmp_path, OWN, rows),), max_new_tokens=4).run(
        *small, tmp_path / "out", said.append
    )
    assert results["lm-eval own exact_match"]["prompts_truncated"] == 1
    assert said[1:] == ["lm-eval: 1 of 3 prompts cut to their last 1196 tokens"]


@needs_harness
def test_results_of_two_models_do_not_stand_in_one_folder(
    small: tuple[Any, Any], tmp_path: Path
) -> None:
    stage = LmEval(tasks=("gsm8k_cot_zeroshot",), max_new_tokens=4, limit=1)
    stage.run(*small, tmp_path / "out", print)
    other = copy.deepcopy(small[0])
    torch.nn.init.zeros_(other.lm_head.weight)
    with rejects("other-settings", str(tmp_path / "out"), of=CheckpointError) as caught:
        stage.run(other, small[1], tmp_path / "out", print)
    assert "lm-eval.gsm8k_cot_zeroshot" in caught.value.message
    ours = Evaluate(benchmarks=("gsm8k",), template="plain", max_new_tokens=4, judge=None)
    with rejects("other-settings", str(tmp_path / "out"), of=CheckpointError) as caught:
        ours.run(other, small[1], tmp_path / "out")
    assert "lm-eval.gsm8k_cot_zeroshot" in caught.value.message


def test_figures_are_shares_with_intervals_only_where_they_are_means_of_zeros_and_ones() -> None:
    metrics = ["right", "length", "median"]
    rows = [
        {"filter": "none", "metrics": metrics, "right": i < 3, "length": 2.5 * i, "median": i < 3}
        for i in range(4)
    ]
    results = harness.summary(
        "t", rows, {"right,none": 0.75, "length,none": 3.75, "median,none": 1.0}
    )
    right = results["lm-eval t right"]
    assert (right["score"], right["unit"]) == (75.0, "percent")
    # by hand
    assert (right["interval"]["low"], right["interval"]["high"]) == pytest.approx(
        (30.064, 95.441), abs=1e-3
    )
    assert results["lm-eval t length"] == {
        "score": 3.75,
        "unit": "length",
        "n": 4,
        "interval": None,
    }
    assert results["lm-eval t median"] == {"score": 1.0, "unit": "median", "n": 4, "interval": None}


@needs_harness
def test_where_the_two_checkers_differ_on_the_same_texts() -> None:
    """Every form of benchmarks/answer_checkers.py: both are right about wrong answers, and the
    harness knows fewer of the ways to write a right one."""
    script = load_script("answer_checkers", ROOT / "benchmarks" / "answer_checkers.py")
    pairs: dict[tuple[str, str], Counter[tuple[bool, bool]]] = {}
    with Verifier() as verifier:
        for name, task, rows, forms in (
            ("gsm8k", "gsm8k", GSM8K, script.NUMBER),
            ("math", "hendrycks_math", MATH, script.LATEX),
        ):
            loaded = harness.load(task)
            rows = list(loaded.test_docs())
            for form, which, text, ours, theirs in script.compared(
                verifier, name, loaded, rows, forms
            ):
                right = forms[form][0]
                assert not (theirs and not right), text
                assert ours == right or form == "the answer alone", text
                pairs.setdefault((form, which), Counter())[ours, theirs] += 1
    both, only_ours = {(True, True)}, {(True, False)}
    number = "`The answer is 18.`"
    longer = "`The answer is 18. That took 3 steps.`"
    assert set(pairs["the data set's own solution", "strict-match"]) == both
    assert set(pairs[number, "strict-match"]) == only_ours
    assert set(pairs[number, "flexible-extract"]) == both
    assert set(pairs[longer, "flexible-extract"]) == only_ours
    assert set(pairs["`#### 18` and then another question", "strict-match"]) == both
    assert set(pairs["the data set's own solution", "none"]) == only_ours
    assert set(pairs["the answer alone in dollars", "none"]) == both


@pytest.mark.parametrize(
    ("table", "code", "option", "near"),
    [
        ({"tasks": []}, "wrong-length", "tasks", ()),
        ({"tasks": ["gsm8"]}, "unknown-task", "tasks", ("gsm8k",)),
        ({"tasks": ["gsm8k", "gsm8k"]}, "duplicate-name", "tasks", ()),
        ({"tasks": ["a/own.yaml", "b/own.yaml"]}, "duplicate-name", "tasks", ()),
        ({"tasks": ["gsm8k"], "fewshot": 3}, "unknown-option", "fewshot", ("num_fewshot",)),
    ],
)
def test_wrong_settings_are_refused(
    table: dict[str, Any], code: str, option: str, near: tuple[str, ...]
) -> None:
    with rejects(code, "lm_eval", option) as caught:
        converter_for(Registry.load()).structure({"lm_eval": table}, Evaluate)
    assert caught.value.did_you_mean == near


def test_it_is_a_part_of_the_table_evaluate() -> None:
    converter = converter_for(Registry.load())
    stage = converter.structure({"lm_eval": {"tasks": ["gsm8k"], "limit": 5}}, Evaluate)
    assert stage == Evaluate(lm_eval=LmEval(tasks=("gsm8k",), limit=5))
    assert stage.titles == ["lm-eval gsm8k"]
    assert converter.structure(plain(stage), Evaluate) == stage


@needs_harness
def test_data_that_are_not_there(monkeypatch: pytest.MonkeyPatch, below: Path) -> None:
    (below / "math" / "train.jsonl.gz").unlink()
    with rejects("missing-file", "evaluate", "lm_eval", "tasks", of=DataError):
        LmEval(tasks=("hendrycks_math",)).check()
    with rejects("missing-file", "evaluate", "lm_eval", "tasks", of=ConfigError):
        LmEval(tasks=("none.yaml",)).check()
    monkeypatch.delenv("HGMS_DATA")
    with rejects("missing-variable", "evaluate", "lm_eval", "tasks", of=DataError):
        LmEval(tasks=("gsm8k",)).check()


@needs_harness
@pytest.mark.parametrize(
    "text",
    [
        "task: [",
        "",
        "group: g\ntask: [a, b]",
        "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: nowhere.jsonl}}\n"
        "test_split: test",
        DATA.replace("asked", "askd") + OWN.replace("{", "{{").replace("}", "}}"),
    ],
    ids=["syntax", "empty", "group", "data", "field"],
)
def test_a_task_file_that_cannot_be_used_is_refused_before_a_model_is_trained(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    (tmp_path / "asked.jsonl").write_text('{"asked": "2 + 2?", "known": "4"}\n')
    path.write_text(
        text.format(source=tmp_path / "asked.jsonl", cache=tmp_path / "cache")
        if "{{" in text
        else text
    )
    with rejects("wrong-format", "evaluate", "lm_eval", "tasks", of=ConfigError):
        LmEval(tasks=(str(path),)).check()


@needs_harness
def test_a_task_file_runs_no_code_unless_the_command_allows_it(
    small: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HGMS_TRUST_REMOTE_CODE")
    attack = (
        "{{{{{{{{ cycler.__init__.__globals__.os.makedirs('{}', exist_ok=True) }}}}}}}}".format(
            tmp_path / "attacked"
        )
    )
    path = tmp_path / "own.yaml"
    path.write_text(
        DATA.replace("{{{{asked}}}}", attack).format(
            source=tmp_path / "asked.jsonl", cache=tmp_path / "cache"
        )
        + OWN
    )
    (tmp_path / "asked.jsonl").write_text('{"asked": "2 + 2?", "known": "4"}\n')
    stage = LmEval(tasks=(str(path),))
    for refused in (stage.check, lambda: stage.run(*small, tmp_path / "out", print)):
        with rejects("untrusted-code", "evaluate", "lm_eval", "tasks", of=ConfigError):
            refused()
    assert not (tmp_path / "attacked").exists()
    monkeypatch.setenv("HGMS_TRUST_REMOTE_CODE", "1")
    stage.check()
    assert (tmp_path / "attacked").exists()  # so it was an attack


def test_where_the_harness_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hgms_mix.evaluation.harness.importlib.util, "find_spec", lambda name: None)
    with rejects("missing-package", "evaluate", "lm_eval", of=MissingExtra) as caught:
        Evaluate(lm_eval=LmEval(tasks=("gsm8k",))).check()
    assert caught.value.install == "pip install 'hgms[lm-eval]'"
