"""The stage `evaluate` of language models: GSM8K, MATH and MT-Bench, with intervals.

Importing this package loads no large library: transformers, math-verify, openai and scipy are
imported with the first question.
"""

from __future__ import annotations

from hgms_mix.evaluation.answers import Extracted, boxed_answer, extract
from hgms_mix.evaluation.evaluate import Evaluate
from hgms_mix.evaluation.judge import Judge, rating
from hgms_mix.evaluation.scores import bootstrap, wilson
from hgms_mix.evaluation.verifier import verdicts

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
