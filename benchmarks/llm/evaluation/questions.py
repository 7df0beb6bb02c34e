"""The questions of the benchmarks, read from their published files."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from evaluation.answers import gsm8k_gold, math_gold
from hgms import store
from hgms.arguments import require
from hgms.config import expand
from hgms_core.errors import DataError, Place
from hgms_core.torch_errors import first_line

Benchmark = Literal["gsm8k", "math", "mt-bench"]

PLACES: Mapping[Benchmark, str] = {
    "gsm8k": "gsm8k/test.jsonl.gz",
    "math": "math/test.jsonl.gz",
    "mt-bench": "mt_bench",
}
"""The path of each benchmark below $HGMS_DATA."""

PROMPTS = "judge_prompts.jsonl"
"""The file with the prompts of MT-Bench's judge."""

REFERENCES = ("math", "reasoning", "coding")
"""The categories of MT-Bench that are judged against a reference answer."""


@frozen
class Question:
    """A question. ``turns``: the user's messages, one per turn; ``gold``: the known answer
    (None if a judge rates); ``references``: a reference answer per turn, or ().
    """

    id: int
    turns: tuple[str, ...]
    gold: str | None = None
    category: str = ""
    references: tuple[str, ...] = ()


@frozen
class JudgePrompt:
    system: str
    template: str


def place(benchmark: Benchmark, named: str | None) -> Path:
    """Return the benchmark's file (MT-Bench: folder).

    It is the path ``named``, or the path below $HGMS_DATA.
    """
    option = ("paths", benchmark)
    if named is None:
        return data_path(PLACES[benchmark], option)
    path = expand(named, option)
    # report the unexpanded path, so that the message does not contain values of variables
    require(
        path.exists(),
        "missing-file",
        f"the path of {benchmark} does not exist",
        place=(*option, named),
        error=DataError,
    )
    return path


def data_path(file: str, option: Place) -> Path:
    """Return the path of a file below $HGMS_DATA; ``option`` is its place in errors."""
    require(
        "HGMS_DATA" in os.environ,
        "missing-variable",
        f"the path of {file} is unknown, because HGMS_DATA is not set",
        place=option,
        hint=f"set HGMS_DATA to the folder that contains {file}, or set the path of a "
        "benchmark in the table [paths]",
        error=DataError,
    )
    path = Path(os.environ["HGMS_DATA"], file)
    require(
        path.exists(),
        "missing-file",
        f"{file} does not exist below HGMS_DATA",
        place=option,
        error=DataError,
    )
    return path


def load(benchmark: Benchmark, path: Path, limit: int | None = None) -> tuple[list[Question], str]:
    """Return the first ``limit`` questions (None: all) and the SHA-256 of their files.

    GSM8K: JSON lines with ``question`` and ``answer`` (``#### N``). MATH: ``problem`` and
    ``solution`` (or ``answer``, if the file contains the bare answer). Ids are row numbers from 0.
    MT-Bench: a folder with question.jsonl and reference_answer_gpt-4.jsonl; ids are from the file.

    Raises
    ------
    DataError
        a file is missing or empty, or a row lacks a field; the error names the line.
    """
    if benchmark == "mt-bench":
        questions, digest = _mt_bench(path)
    else:
        rows, digest = rows_of(path)
        read = _gsm8k if benchmark == "gsm8k" else _math
        questions = [Question(number, *read(row, line)) for number, (line, row) in enumerate(rows)]
    require(
        questions, "no-rows", "the file contains no questions", place=(str(path),), error=DataError
    )
    return questions[:limit], digest


def judge_prompts(folder: Path) -> dict[str, JudgePrompt]:
    """Return the single-answer judge prompts of judge_prompts.jsonl by name."""
    path = folder / PROMPTS
    prompts = {
        _text(row, "name", line): JudgePrompt(
            _text(row, "system_prompt", line), _text(row, "prompt_template", line)
        )
        for line, row in rows_of(path)[0]
    }
    for name in (
        "single-v1",
        "single-v1-multi-turn",
        "single-math-v1",
        "single-math-v1-multi-turn",
    ):
        require(
            name in prompts,
            "wrong-format",
            f"the prompt {name!r} is missing in the file",
            place=(str(path),),
            error=DataError,
        )
    return prompts


def _gsm8k(row: Mapping[str, Any], line: Place) -> tuple[tuple[str], str]:
    return (_text(row, "question", line),), gsm8k_gold(_text(row, "answer", line), line)


def _math(row: Mapping[str, Any], line: Place) -> tuple[tuple[str], str]:
    problem = (_text(row, "problem", line),)
    return problem, row["answer"] if isinstance(row.get("answer"), str) else math_gold(
        _text(row, "solution", line), line
    )


def _mt_bench(folder: Path) -> tuple[list[Question], str]:
    rows, digest = rows_of(folder / "question.jsonl")
    answers, other = rows_of(folder / "reference_answer_gpt-4.jsonl")
    references: dict[int, tuple[str, ...]] = {}
    for line, row in answers:
        try:
            references[row["question_id"]] = tuple(row["choices"][0]["turns"])
        except (KeyError, IndexError, TypeError):
            raise DataError(
                "wrong-row", "the row has no question_id or no choices[0].turns", place=line
            ) from None
    questions = []
    for line, row in rows:
        turns: Any = row.get("turns")
        category = _text(row, "category", line)
        key: Any = row.get("question_id")
        require(
            isinstance(key, int) and isinstance(turns, list) and turns and len(turns) <= 2,
            "wrong-row",
            "the row must have a whole number question_id and one or two turns",
            place=line,
            error=DataError,
        )
        reference = references.get(key, ()) if category in REFERENCES else ()
        require(
            category not in REFERENCES or len(reference) >= len(turns),
            "wrong-row",
            f"question {key} ({category}) has {len(turns)} turns, but {len(reference)} "
            "reference answers",
            place=line,
            error=DataError,
        )
        questions.append(Question(key, tuple(turns), category=category, references=reference))
    return questions, store.digest(digest, other)


def rows_of(path: Path) -> tuple[list[tuple[Place, dict[str, Any]]], str]:
    """Return the JSON objects of a file, each with its place, and the SHA-256 of the text."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        why = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise DataError(
            "unreadable-file", f"the file cannot be read: {why}", place=(str(path),)
        ) from None
    rows: list[tuple[Place, dict[str, Any]]] = []
    for number, written in enumerate(text.split("\n"), 1):
        if not written.strip():
            continue
        line = (str(path), number)
        try:
            row = json.loads(written)
        except ValueError as error:
            raise DataError(
                "wrong-row", f"the row is not valid JSON: {first_line(error)}", place=line
            ) from None
        require(
            isinstance(row, dict),
            "wrong-row",
            f"the row must be a JSON object, but is a {type(row).__name__}",
            place=line,
            error=DataError,
        )
        rows.append((line, row))
    return rows, store.digest(text)


def _text(row: Mapping[str, Any], key: str, line: Place) -> str:
    require(
        isinstance(row.get(key), str),
        "wrong-row",
        f"the field {key!r} has no text",
        place=line,
        error=DataError,
    )
    return row[key]
