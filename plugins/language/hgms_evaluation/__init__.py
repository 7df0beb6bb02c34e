"""The stage `evaluate` of language models: GSM8K, MATH and MT-Bench, with intervals.

Nothing heavy is loaded by importing this package: transformers, math-verify, openai and scipy come in with the first question.
"""

from __future__ import annotations

from hgms_evaluation.answers import Extracted as Extracted
from hgms_evaluation.answers import boxed as boxed
from hgms_evaluation.answers import extract as extract
from hgms_evaluation.evaluate import Evaluate as Evaluate
from hgms_evaluation.intervals import Range as Range
from hgms_evaluation.intervals import bootstrap as bootstrap
from hgms_evaluation.intervals import half_widths as half_widths
from hgms_evaluation.intervals import wilson as wilson
from hgms_evaluation.judge import Judge as Judge
from hgms_evaluation.judge import rating as rating
from hgms_evaluation.verifier import Verifier as Verifier
