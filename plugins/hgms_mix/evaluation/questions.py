"""The benchmarks' questions, read from their published files."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from hgms_core import DataError
from hgms_mix.evaluation.answers import gsm8k_gold, math_gold

Benchmark = Literal["gsm8k", "math", "mt-bench"]

PLACES: Mapping[Benchmark, str] = {
    "gsm8k": "gsm8k/test.jsonl.gz",
    "math": "math/test.jsonl.gz",
    "mt-bench": "mt_bench",
}
"""Where each benchmark is below $HGMS_DATA."""

REFERENCES = ("math", "reasoning", "coding")
"""The categories of MT-Bench that are judged against a reference answer."""


@frozen
class Question:
    """``turns``: what the user says, one entry per turn; ``gold``: the known answer (None where a
    judge rates); ``references``: a reference answer for each turn, or ()."""

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
    """The benchmark's file (MT-Bench: folder): the one named, or the one below $HGMS_DATA."""
    if named is not None:
        path = Path(os.path.expandvars(named)).expanduser()
    elif "HGMS_DATA" in os.environ:
        path = Path(os.environ["HGMS_DATA"], PLACES[benchmark])
    else:
        raise DataError(
            f"where is {benchmark}? Set HGMS_DATA to the folder that holds {PLACES[benchmark]}, "
            "or name it in the mix file:\n"
            f'  [evaluate.paths]\n  {benchmark} = "…/{PLACES[benchmark]}"'
        )
    if not path.exists():
        # as written: variables stay unsaid
        raise DataError(f"{benchmark}: there is no {path if named is None else named}")
    return path


def load(benchmark: Benchmark, path: Path, limit: int | None = None) -> tuple[list[Question], str]:
    """The first ``limit`` questions (None: all) and the SHA-256 of the files they come from.

    GSM8K: JSON lines with ``question`` and ``answer`` (``#### N``); MATH: ``problem`` and
    ``solution`` (or ``answer``, where the file has the bare answer); ids are the rows' numbers from
    0. MT-Bench: a folder with question.jsonl and reference_answer_gpt-4.jsonl; ids are its own.

    Raises:
        DataError: a file is missing or empty, or a row lacks a field: the line is named.
    """
    if benchmark == "mt-bench":
        questions, digest = _mt_bench(path)
    else:
        rows, digest = rows_of(path)
        read = _gsm8k if benchmark == "gsm8k" else _math
        questions = [
            Question(number, *read(row, where)) for number, (where, row) in enumerate(rows)
        ]
    if not questions:
        raise DataError(f"{path}: no questions")
    return questions[:limit], digest


def judge_prompts(folder: Path) -> dict[str, JudgePrompt]:
    """The single-answer judge prompts of judge_prompts.jsonl by name."""
    path = folder / "judge_prompts.jsonl"
    prompts = {
        _text(row, "name", where): JudgePrompt(
            _text(row, "system_prompt", where), _text(row, "prompt_template", where)
        )
        for where, row in rows_of(path)[0]
    }
    for name in (
        "single-v1",
        "single-v1-multi-turn",
        "single-math-v1",
        "single-math-v1-multi-turn",
    ):
        if name not in prompts:
            raise DataError(f"{path}: the prompt {name!r} is missing")
    return prompts


def _gsm8k(row: Mapping[str, Any], where: str) -> tuple[tuple[str], str]:
    return (_text(row, "question", where),), gsm8k_gold(_text(row, "answer", where), where)


def _math(row: Mapping[str, Any], where: str) -> tuple[tuple[str], str]:
    problem = (_text(row, "problem", where),)
    return problem, row["answer"] if isinstance(row.get("answer"), str) else math_gold(
        _text(row, "solution", where), where
    )


def _mt_bench(folder: Path) -> tuple[list[Question], str]:
    rows, digest = rows_of(folder / "question.jsonl")
    answers, other = rows_of(folder / "reference_answer_gpt-4.jsonl")
    references: dict[int, tuple[str, ...]] = {}
    for where, row in answers:
        try:
            references[row["question_id"]] = tuple(row["choices"][0]["turns"])
        except (KeyError, IndexError, TypeError):
            raise DataError(f"{where}: no choices[0].turns") from None
    questions = []
    for where, row in rows:
        turns = row.get("turns")
        category = _text(row, "category", where)
        key = row.get("question_id")
        if not isinstance(key, int) or not isinstance(turns, list) or not turns or len(turns) > 2:
            raise DataError(f"{where}: expected a question_id and one or two turns")
        reference = references.get(key, ()) if category in REFERENCES else ()
        if category in REFERENCES and len(reference) < len(turns):
            raise DataError(
                f"{where}: question {key} ({category}) has no reference answer for each turn"
            )
        questions.append(Question(key, tuple(turns), category=category, references=reference))
    return questions, hashlib.sha256((digest + other).encode()).hexdigest()


def rows_of(path: Path) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """The JSON objects of a file, each with its place in words, and the SHA-256 of the text."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object")
        rows.append((where, row))
    return rows, hashlib.sha256(text.encode()).hexdigest()


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(row.get(key), str):
        raise DataError(f"{where}: no text in the field {key!r}")
    value: str = row[key]
    return value
