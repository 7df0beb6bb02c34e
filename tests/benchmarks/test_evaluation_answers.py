"""Which part of a response counts, and what math-verify says of it."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from evaluation import boxed_answer, extract, verdicts, worker
from evaluation.answers import Extracted, gsm8k_gold, math_gold
from evaluation.questions import Question, load
from evaluation.scores import score
from evaluation.verifier import box
from support.helpers import rejects

from hgms_core.errors import DataError

pytestmark = pytest.mark.extended

data = pytest.mark.skipif(
    "HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no GSM8K and MATH to score"
)


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"\boxed{1}. No: \boxed{2}", "2"),
        (r"\boxed{\frac{a}{\sqrt{b}}} done", r"\frac{a}{\sqrt{b}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\end{pmatrix}"),
        (r"\boxed{7} and then \boxed{8 + ", "7"),
        (r"\boxed{7} and then \boxed{}", "7"),
        (r"} \boxed{1{2}3} } \boxed{a \} b", "1{2}3"),
        (r"\fbox{ 4 }", "4"),
        (r"$\boxed 5$", "5"),
        (r"the roots $\boxed{2}$ and $\boxed{1}$.", "2, 1"),
        (r"\boxed{2}, \boxed{1}, and \boxed{2}", "2, 1"),
        (r"\boxed{x + 1} or \boxed{1 + x}", "1 + x"),
        (r"\boxed{2} \boxed{1}", "1"),
        (r"\boxedtext{3}", None),
        ("", None),
    ],
)
def test_the_last_balanced_box(response: str, content: str | None) -> None:
    assert boxed_answer(response) == content


@pytest.mark.parametrize(
    ("response", "text", "by"),
    [
        (r"The answer is 3, so \boxed{4} in 5 days", "4", "boxed"),
        (r"\boxed{\$1,200}", "1200", "boxed"),
        (r"\boxed{18\text{ dollars}}", "18", "boxed"),
        (r"\boxed{18 eggs}", "18", "boxed"),
        (r"\boxed{x = 12}", "12", "boxed"),
        (r"\boxed{9 \times 2}", r"9 \times 2", "boxed"),
        (r"\boxed{9*2}", "9*2", "boxed"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", "boxed"),
        (r"\boxed{\sqrt{16}}", r"\sqrt{16}", "boxed"),
        (r"\boxed{3/4}", "3/4", "boxed"),
        ("The answer is 5. Or rather: the answer is: **-6.5**.", "-6.5", "answer is"),
        ("So the answer is $42 per week.\nThat is 6 per day.", "42", "answer is"),
        ("The answer is 3 + 4 = 7.", "7", "answer is"),
        ("The answer is", None, "nothing"),
        ("The answer is 18.00.", "18.00", "answer is"),
        ("The answer is −5.", "-5", "answer is"),
        ("The answer is -$5.", "-5", "answer is"),
        ("The answer is 1/2.", "1/2", "answer is"),
        ("The answer is 18 (i.e. 9 times 2).", "18", "answer is"),
        ("the answer is $18/day.", "18", "answer is"),
        ("The answer is $18$ dollars per day, for 7 days.", "18", "answer is"),
        ("The final answer is 9 x 2 = 18 dollars.", "18", "answer is"),
        (r"The answer is \(9 \times 2 = 18\).", "18", "answer is"),
        ("answer is 16 - 7 = 9, 9*2 = 18.", "18", "answer is"),
        ("The answer is clear. It is 18.", "18", "last number"),
        ("**Answer:** 18\n(That took 3 steps.)", "18", "answer is"),
        ("**Answer:** 18 dollars (2 ways)", "18", "answer is"),
        ("Answer: she has 16 - 3 = 13 eggs. 13 * 2 = 26 dollars", "26", "last number"),
        (r"\boxed{\$18/day}", "18", "boxed"),
        (r"\boxed{18 / \text{day}}", "18", "boxed"),
        ("答案是18。", "18", "answer is"),
        ("答案是18。共有3步。", "18", "answer is"),
        ("共有18个。", "18", "last number"),
        ("合計は18ドルです。", "18", "last number"),
        ("答えは１８ドルです。3日で。", "18", "answer is"),
        ("So it is 1e3", "1000", "last number"),
        ("The answer is 1e3 dollars.", "1000", "answer is"),
        (r"<think>maybe \boxed{20}</think> The answer is 18.", "18", "answer is"),
        (r"maybe \boxed{20}</think> The answer is 18.", "18", "answer is"),
        (r"<think>maybe \boxed{20}", None, "nothing"),
        ("#### 18 #### 20", "18", "####"),
        ("#### 1. Add\n9 + 9\n#### 18\nThat took 3 steps.", "18", "####"),
        ("#### **$1,800** for 3 days", "1800", "####"),
        ("It takes 3 days and 1,234 steps.", "1234", "last number"),
        ("#### 18", "18", "####"),
        ("from −3 to −2", "-2", "last number"),
        ("no idea", None, "nothing"),
    ],
)
def test_the_answer_of_a_question_with_a_number(response: str, text: str | None, by: str) -> None:
    assert extract(response, number=True) == Extracted(text, by)  # type: ignore[arg-type]


LM_EVAL = (
    "答案是18。",
    "共有18个。",
    "the answer is $18/day.",
    "The final answer is 9 x 2 = 18 dollars.",
    "answer is 16 - 7 = 9, 9*2 = 18.",
    "So it is $18",
    "#### 18 #### 20",
    r"<think>\boxed{20}</think> It is 18",
    r"\boxed{18\text{ dollars}}",
    r"\boxed{x = 18}",
    r"\boxed{\$18/day}",
    r"\boxed{18 eggs}",
    r"\boxed{\text{18 dollars}}",
    "Answer: she has 12 - 3 = 9 eggs. 9 * 2 = 18 dollars",
)


def test_numbers_that_lm_eval_finds_are_right() -> None:
    """By its patterns (0.4.13): the first after ####, or the last number of the text."""
    for text in LM_EVAL:
        strict = re.findall(r"#### (\-?[0-9\.\,]+)", text)
        flexible = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)
        reference = strict[0] if strict else next(filter(None, flexible[-1]))
        assert re.sub(r"[,$]|\.$", "", reference) == "18"
    questions = [Question(number, ("?",), "18") for number in range(len(LM_EVAL))]
    assert {row["verdict"] for row in score("gsm8k", questions, LM_EVAL)} == {"right"}


def test_malformed_known_answers_are_named() -> None:
    assert gsm8k_gold("5 * 500 = <<5*500=2500>>2500\n#### 2,500", ("f.jsonl", 5)) == "2500"
    with rejects("wrong-row", "f.jsonl", 3, of=DataError):
        math_gold(r"so \boxed{5", ("f.jsonl", 3))


HARD = [
    # known answer, given answer, equal?
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{3}", "0.333333", True),
    ("1{,}000", "1000", True),
    (r"5\text{ cm}", "5", True),
    (r"90^\circ", "90", True),
    (r"25\%", "25", True),
    ("25", "0.25", False),  # no hundredfold
    ("[1,2)", "(1,2)", False),
    (r"x\le 2", r"(-\infty,2]", True),
    (r"(-\infty, 2]", r"x \le 2", False),  # the order of the arguments matters
    (r"\{1,2\}", "2, 1", True),
    ("(1,2)", "(2,1)", False),
    (r"1\pm\sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}", True),
    (r"\text{east}", r"\text{East}", True),
    (r"\text{(B)}", "B", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    ("x=5", "5", True),
    (r"2\sqrt{3}", r"\sqrt{12}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("i", "-i", False),
    (r"\text{east}", r"\text{seat}", False),
    ("1,2,3", "1,2", False),
    ("18", "", False),
    # where it is generous
    (r"5\text{ cm}", r"5\text{ km}", True),
]


def test_hard_formats() -> None:
    found = verdicts([(box(gold), box(answer)) for gold, answer, _ in HARD])
    assert found == ["right" if equal else "wrong" for *_, equal in HARD]


def test_a_comparison_without_end_is_undecided_and_the_next_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    pairs = [(box("1"), box(answer)) for answer in ("9^{9^{9^9}}", "1", "9^{9^{9^9}}", "2")]
    assert verdicts(pairs, seconds=3) == ["undecided", "right", "undecided", "wrong"]


def test_smaller_limits_of_the_system_remain() -> None:
    script = Path(worker.__file__)
    limited = f"ulimit -v 4000000 && ulimit -t 60 && exec {sys.executable} -P {script} 90"
    pairs = "".join(json.dumps([box("1"), box(answer)]) + "\n" for answer in ("1", "2"))
    done = subprocess.run(["sh", "-c", limited], input=pairs, capture_output=True, text=True)
    assert done.stdout.split() == ["ready", "right", "wrong"], done.stderr


def solutions(name: str) -> tuple[list[Question], list[str]]:
    path = Path(os.environ["HGMS_DATA"], name, "test.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["answer" if name == "gsm8k" else "solution"] for line in file]
    return load(name, path)[0], texts  # type: ignore[arg-type]


@data
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gsm8k", 80),
        ("math", 80),
        *(pytest.param(*of, marks=pytest.mark.nightly) for of in (("gsm8k", 1319), ("math", 5000))),
    ],
)
def test_solutions_of_the_test_sets_are_right_and_those_of_other_questions_wrong(
    name: str, count: int
) -> None:
    """But for the few other questions whose answer is the same."""
    questions, texts = solutions(name)
    own = random.Random(1).sample(range(len(texts)), count)
    right, wrong = (
        [
            row["verdict"]
            for row in score(
                name,  # type: ignore[arg-type]
                [questions[place] for place in own],
                [texts[place - shift] for place in own],
            )
        ]
        for shift in (0, 101)
    )
    assert set(right) == {"right"}
    assert wrong.count("right") <= (0.04 if count < 1000 else 0.03) * count
