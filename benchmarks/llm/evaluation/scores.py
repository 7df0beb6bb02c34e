"""Compute the numbers in results.json from responses and ratings.

Scores have Wilson's interval, or a bootstrap interval over questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from evaluation.answers import extract
from evaluation.judge import Request
from evaluation.questions import Benchmark, Question
from evaluation.verifier import box, verdicts
from hgms.arguments import require

RESAMPLES: Final = 10_000
"""Resamples of the bootstrap of MT-Bench; its seed is 0. The paper specifies neither."""
PAPER_COUNTS: Final[Mapping[str, int]] = {"gsm8k": 1319, "math": 4989, "mt-bench": 80}


Range = tuple[float, float]
"""The ends of an interval."""


def wilson(correct: int, count: int, level: float = 0.95) -> Range:
    """Return Wilson's score interval of a share.

    It contains every p with |p̂ − p| ≤ z·√(p(1 − p)/n), with p̂ = correct/n.

    Examples
    --------
    >>> wilson(50, 100)
    (0.4038315303659956, 0.5961684696340044)
    """
    from scipy import stats

    interval = stats.binomtest(correct, count).proportion_ci(level, method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap(
    scores: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0, level: float = 0.95
) -> Range:
    """Return a percentile bootstrap interval of the mean of per-question scores.

    Questions are drawn with replacement, ``resamples`` times. With fewer than two questions, or
    equal scores, the interval is the mean itself.

    Examples
    --------
    >>> bootstrap([5.0, 5.0, 5.0])
    (5.0, 5.0)
    """
    import numpy as np
    from scipy import stats

    values = np.asarray(scores, dtype=np.float64)
    require(
        len(values),
        "no-rows",
        "scores is empty, but must have at least one score",
        place=("scores",),
    )
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    interval = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=resamples,
        confidence_level=level,
        method="percentile",
        batch=max(1, 4_000_000 // len(values)),  # at most 32 MB of resampled scores at once
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def score(
    name: Benchmark, questions: Sequence[Question], responses: Sequence[str], seconds: int = 5
) -> list[dict[str, Any]]:
    """Return the records of the answers to GSM8K or MATH.

    A record contains the extracted answer, the rule of extraction and the verdict.
    """
    answers = [extract(response, number=name == "gsm8k") for response in responses]
    pairs = [
        (
            box(str(question.gold)),
            answer.text if answer.by == "whole response" else box(answer.text),
        )
        for question, answer in zip(questions, answers, strict=True)
        if answer.text is not None
    ]
    decided = iter(verdicts(pairs, seconds))
    return [
        {
            "id": question.id,
            "gold": question.gold,
            "answer": None if answer.by == "whole response" else answer.text,
            "by": answer.by,
            "verdict": "wrong" if answer.text is None else next(decided),
        }
        for question, answer in zip(questions, answers, strict=True)
    ]


def accuracy(
    name: Benchmark, rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the accuracy in percent, with Wilson's interval.

    The result also counts undecided comparisons and responses without an answer.
    """
    correct = sum(row["verdict"] == "right" for row in rows)
    return {
        "score": 100 * correct / len(rows),
        "unit": "percent",
        "correct": correct,
        "n": len(rows),
        "paper_n": PAPER_COUNTS[name],
        "interval": share(correct, len(rows)),
        "no_answer": sum(row["by"] == "nothing" for row in rows),
        "undecided": sum(row["verdict"] == "undecided" for row in rows),
        **lengths(answers),
    }


def summary(
    requests: Sequence[Request], ratings: Mapping[tuple[int, int], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return MT-Bench's score: the mean over rated turns.

    Turns without a rating are counted; ``if_failed`` is the score if each of these turns had the
    lowest or the highest rating.
    """
    known = {
        key: record["rating"] for key, record in ratings.items() if record["rating"] is not None
    }
    by_question: dict[int, list[float]] = {}
    for request in requests:
        if request.key in known:
            by_question.setdefault(request.id, []).append(known[request.key])
    means = [_mean(values) for values in by_question.values()]
    values = [value for question in by_question.values() for value in question]
    failed = len(requests) - len(values)
    method = {
        "method": "percentile bootstrap over questions",
        "level": 0.95,
        "resamples": RESAMPLES,
        "seed": 0,
    }
    return {
        "score": _mean(values),
        "unit": "points of 10",
        "n": len({request.id for request in requests}),
        "paper_n": PAPER_COUNTS["mt-bench"],
        "turns": [
            _mean([rating for key, rating in known.items() if key[1] == turn]) for turn in (1, 2)
        ],
        "rated": len(values),
        "failed": failed,
        "if_failed": [(sum(values) + failed * bound) / len(requests) for bound in (0, 10)],
        "interval": _interval(bootstrap(means), 1, method) if means else None,
    }


def _mean(values: Sequence[float]) -> Any:
    return sum(values) / len(values) if values else None


def share(correct: int, count: int) -> dict[str, Any]:
    """Return Wilson's interval of a share in percent, in the form of the results."""
    return _interval(wilson(correct, count), 100, {"method": "wilson", "level": 0.95})


def _interval(ends: Range, scale: float, method: Mapping[str, Any]) -> dict[str, Any]:
    low, high = ends
    half = scale * (high - low) / 2
    return {"low": scale * low, "high": scale * high, "half_width": half, **method}


def lengths(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "prompts_truncated": sum(answer["truncated"] for answer in answers),
        "answers_unfinished": sum(not answer["finished"] for answer in answers),
        "new_tokens": sum(answer["new_tokens"] for answer in answers),
    }
