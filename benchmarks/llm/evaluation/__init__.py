"""Scores of a language model on GSM8K, MATH and MT-Bench, with intervals.

Importing this package loads no large library: transformers, math-verify, openai and scipy are
imported with the first question.
"""

from __future__ import annotations

from evaluation.answers import Extracted, boxed_answer, extract
from evaluation.judge import Judge, rating
from evaluation.run import Evaluate
from evaluation.scores import bootstrap, wilson
from evaluation.verifier import verdicts

__all__ = [
    "Evaluate",
    "Extracted",
    "Judge",
    "bootstrap",
    "boxed_answer",
    "extract",
    "rating",
    "verdicts",
    "wilson",
]
