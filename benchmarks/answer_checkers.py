"""Compare two answer checkers on the same recorded texts: HGMS and the lm-eval harness.

    HGMS_DATA=… python benchmarks/answer_checkers.py [--questions 500]

Each text contains the known answer of a question of GSM8K or MATH in a possible form. For each form
and each filter of the harness, a table counts the texts that both accept, only HGMS, only the
harness, and neither.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# at the end: the folder has a script evaluate.py, and the harness imports a library of this name
sys.path.append(str(Path(__file__).resolve().parent / "llm"))

from evaluation import questions
from evaluation.questions import Question
from evaluation.scores import score

DEFINITIONS = {
    "gsm8k": "gsm8k/gsm8k.yaml",
    "hendrycks_math": "hendrycks_math/hendrycks_math_algebra.yaml",
}
"""The files of the harness that define its tasks."""

Form = Callable[[str, Mapping[str, Any]], str | None]
"""Creates a response from the known answer and the question's row; ``None`` if it cannot."""

NUMBER: Mapping[str, tuple[bool, Form]] = {
    "the data set's own solution": (True, lambda gold, row: row["answer"]),
    r"`\boxed{18}`": (True, lambda gold, row: rf"So it is \boxed{{{gold}}}."),
    "`The answer is 18.`": (True, lambda gold, row: f"The answer is {gold}."),
    "`The answer is 18`, without a period": (True, lambda gold, row: f"The answer is {gold}"),
    "`The answer is 1,234.` (thousands)": (True, lambda gold, row: _grouped(gold)),
    "`The answer is $18.`": (True, lambda gold, row: f"The answer is ${gold}."),
    "`The answer is 18.00.`": (
        True,
        lambda gold, row: f"The answer is {gold}.00." if "." not in gold else None,
    ),
    r"`\boxed{18\text{ dollars}}`": (True, lambda gold, row: rf"\boxed{{{gold}\text{{ dollars}}}}"),
    "`The answer is 18. That took 3 steps.`": (
        True,
        lambda gold, row: f"The answer is {gold}. That took 3 steps.",
    ),
    "`#### 18` and then another question": (
        True,
        lambda gold, row: f"#### {gold}\n\nQuestion: What is 5 + 6?\n#### 11",
    ),
    "wrong: 19 for 18": (False, lambda gold, row: f"{_solved(row)}#### {_plus(gold, 1)}"),
    "wrong: 1800 for 18": (False, lambda gold, row: f"The answer is {gold}00.\n#### {gold}00"),
    "wrong: `180` where 18 is meant, and 18 earlier": (
        False,
        lambda gold, row: f"From {gold} we get #### {gold}0",
    ),
}
LATEX: Mapping[str, tuple[bool, Form]] = {
    "the data set's own solution": (True, lambda gold, row: row["solution"]),
    r"`\boxed{…}` alone in dollars": (True, lambda gold, row: rf"$\boxed{{{gold}}}$"),
    "the answer alone in dollars": (True, lambda gold, row: f"${gold}$"),
    "the answer alone": (True, lambda gold, row: gold),
    "`The answer is $…$.`": (True, lambda gold, row: f"The answer is ${gold}$."),
    r"`Since $x > 0$, it is $\boxed{…}$.`": (
        True,
        lambda gold, row: rf"Since $x > 0$, it is $\boxed{{{gold}}}$.",
    ),
    r"`\dfrac` for `\frac`": (
        True,
        lambda gold, row: (
            "$" + gold.replace(r"\frac", r"\dfrac") + "$" if r"\frac" in gold else None
        ),
    ),
    "a fraction as `a/b`": (True, lambda gold, row: _slashed(gold)),
    "an integer as `7.0`": (
        True,
        lambda gold, row: f"${gold}.0$" if re.fullmatch(r"-?\d+", gold) else None,
    ),
    "an integer as a sum": (
        True,
        lambda gold, row: f"${_plus(gold, -1)} + 1$" if re.fullmatch(r"-?\d+", gold) else None,
    ),
    "`x = …`": (True, lambda gold, row: f"$x = {gold}$" if "=" not in gold else None),
    "wrong: one more": (
        False,
        lambda gold, row: f"${_plus(gold, 1)}$" if re.fullmatch(r"-?\d+", gold) else None,
    ),
    "wrong: the hundredfold": (
        False,
        lambda gold, row: f"${gold}00$" if re.fullmatch(r"-?[1-9]\d*", gold) else None,
    ),
}


def _grouped(gold: str) -> str | None:
    return f"The answer is {int(gold):,}." if re.fullmatch(r"-?\d{4,}", gold) else None


def _slashed(gold: str) -> str | None:
    match = re.fullmatch(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}", gold)
    return f"${match[1]}{match[2]}/{match[3]}$" if match else None


def _plus(gold: str, more: int) -> str:
    return str(int(float(gold)) + more)


def _solved(row: Mapping[str, Any]) -> str:
    return str(row["answer"]).rpartition("####")[0]


def harness_task(name: str, file: str) -> Any:
    """Return the harness's task with the rows of a file."""
    import lm_eval.tasks
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    table = load_yaml(Path(str(lm_eval.tasks.__file__)).parent / DEFINITIONS[name])
    rows, _ = questions.rows_of(questions.data_path(file, ()))
    data = Dataset.from_list([row for _, row in rows])
    splits = DatasetDict({"train": data, "test": data})
    own = {"task": name, "dataset_name": None, "custom_dataset": lambda **_: splits}
    return ConfigurableTask(config={**table, **own})


def theirs(task: Any, row: Mapping[str, Any], text: str) -> dict[str, bool]:
    """Return the verdict of the harness's filters and metric, on the text up to the task's stop."""
    from lm_eval.api.instance import Instance

    for stop in task.config.generation_kwargs["until"]:
        text = text.split(stop)[0]
    item = Instance(request_type="generate_until", doc=dict(row), arguments=("", {}), idx=0)
    item.resps = [text]
    task._instances = [item]
    task.apply_filters()
    answers = {
        name: answer if isinstance(answer, list) else [answer]
        for name, answer in item.filtered_resps.items()
    }
    return {
        name: bool(task.process_results(dict(row), answer)["exact_match"])
        for name, answer in answers.items()
    }


def compared(
    name: str, task: Any, rows: Sequence[Mapping[str, Any]], forms: Mapping[str, tuple[bool, Form]]
) -> Iterable[tuple[str, str, str, bool, bool]]:
    """Yield (form, filter, text, verdict of HGMS, verdict of the harness) per row with the form."""
    read = questions._gsm8k if name == "gsm8k" else questions._math
    golds = [read(row, "")[1] for row in rows]
    for form, (_, write) in forms.items():
        texts = {
            number: text
            for number, row in enumerate(rows)
            if (text := write(golds[number], row)) is not None
        }
        asked = [Question(number, ("",), golds[number]) for number in texts]
        records = score(name, asked, list(texts.values()))  # type: ignore[arg-type]
        for (number, text), record in zip(texts.items(), records, strict=True):
            for which, right in theirs(task, rows[number], text).items():
                yield form, which, text, record["verdict"] == "right", right


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--questions", type=int, default=500, help="spread evenly over each test set"
    )
    most = parser.parse_args().questions
    for name, task_name, forms in (("gsm8k", "gsm8k", NUMBER), ("math", "hendrycks_math", LATEX)):
        task = harness_task(task_name, f"{name}/test.jsonl.gz")
        every = list(task.test_docs())
        rows = every[:: max(1, len(every) // most)][:most]
        counts: dict[tuple[str, str], Counter[tuple[bool, bool]]] = {}
        for form, which, _, ours, right in compared(name, task, rows, forms):
            counts.setdefault((form, which), Counter())[ours, right] += 1
        print(f"\n{task_name}: {len(rows)} of {len(every)} questions\n")
        print("| the text | filter | texts | both right | only ours | only theirs | both wrong |")
        print("|---|---|---|---|---|---|---|")
        for (form, which), count in counts.items():
            cells = [
                count.total(),
                *(
                    count[pair]
                    for pair in ((True, True), (True, False), (False, True), (False, False))
                ),
            ]
            print(f"| {form} | {which} | " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
