"""The answer in a response, and the known answers of GSM8K and MATH.

The known answer of GSM8K follows ``####``. The known answer of MATH is the content of the last
balanced ``\\boxed{}`` of its solution. math-verify decides equality.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from typing import Literal

from attrs import frozen

from hgms.arguments import require
from hgms_core.errors import DataError, Place

_BOX = r"\\(?:boxed|fbox)\b\s*(?:(\{(?:[^{}\\]|\\.|(?1))*+\})|([^\s{}\\]))"
"""A box with balanced braces (a pattern of the library ``regex``), or with a single character."""
_CONNECTED = re.compile(r"[\s$]*(?:[,;]|(?:[,;][\s$]*)?(?:and\b|\\text\{\s*and\s*\}))[\s$]*")
_THINKING = re.compile(r"<think(?:ing)?>")
_THOUGHT = re.compile(r"</think(?:ing)?>")

# A letter of another script may precede a number without a space: 答案是18.
_NUMBER = r"(?<![A-Za-z0-9_.])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_EXPRESSION = re.compile(rf"{_NUMBER}(?:[eE][+-]?\d{{1,2}}(?![A-Za-z0-9])|\s*/\s*\d+)?")
_MARKED = re.compile(rf"####[\s*$€£¥]*({_NUMBER})")
_MARKED_LINE = re.compile(rf"{_MARKED.pattern}[.\s$*]*(?:\n|$|####)")
_SENTENCE = re.compile(
    r"(answer[\s*]+is|answer[\s*]*:|答案(?:是|为|為|[:：])|答えは)(.*?)(?=\n|[.!?](?=[\s*]|$)|[。！？]|$)",
    re.IGNORECASE,
)
_LATEX = re.compile(r"[\\^_](?!text|mathrm|[$,%!;()\[\]])")
"""LaTeX that changes a number."""


@frozen
class Extracted:
    """``text``: the answer, if a rule applies; ``by``: the rule that found it."""

    text: str | None
    by: Literal["boxed", "####", "answer is", "last number", "whole response", "nothing"]


def boxed_answer(text: str) -> str | None:
    """Return the content of the last ``\\boxed`` (or ``\\fbox``) with balanced braces.

    Empty boxes do not count. Boxes that only a comma or "and" connects are one answer.

    Examples
    --------
    >>> boxed_answer(r"so \\boxed{\\frac{1}{2}} or rather \\boxed{3} and \\boxed{4")
    '3'
    >>> boxed_answer(r"The roots are $\\boxed{2}$ and $\\boxed{1}$.")
    '2, 1'
    >>> boxed_answer(r"$\\boxed 5$ it is"), boxed_answer("no box")
    ('5', None)
    """
    import regex  # type: ignore[import-untyped]

    answer: list[str] = []
    following = len(text)
    for match in reversed(list(regex.finditer(_BOX, text, regex.DOTALL))):
        content = match[2] or match[1][1:-1].strip()
        if not content.strip(" $"):
            continue
        if answer and not _CONNECTED.fullmatch(text, match.end(), following):
            break
        answer.insert(0, content)
        following = match.start()
    return ", ".join(dict.fromkeys(answer)) or None


def without_thinking(response: str) -> str:
    """Return the response without ``<think>`` text.

    The text before ``</think>`` is removed even if a chat template wrote ``<think>`` into the
    prompt. A response that ends while it thinks has no answer.

    Examples
    --------
    >>> without_thinking("<think>maybe 20</think> It is 18.")
    ' It is 18.'
    """
    return _THINKING.split(_THOUGHT.split(response)[-1])[0]


def extract(response: str, *, number: bool) -> Extracted:
    """Return the answer of a response, after its ``<think>`` text is removed.

    The content of the last balanced box is the answer (for a ``number`` without its unit). Without
    a box it is

    - for answers that are a ``number`` (GSM8K): the number after the first ``####``; else
      the number in the last sentence with "answer is" (the first after its last "=") or "Answer:"
      (a sentence without "="); else the last number;
    - else (MATH): the whole response, in which math-verify locates the answer.

    Examples
    --------
    >>> extract("3 + 4 = 7. The answer is $7.50 per day. 12 is not.", number=True)
    Extracted(text='7.50', by='answer is')
    >>> extract(r"Thus \\boxed{18\\text{ dollars}}, for 3 days.", number=True)
    Extracted(text='18', by='boxed')
    """
    response = without_thinking(response)
    if box := boxed_answer(response):
        return Extracted(_number_in(box) if number else box, "boxed")
    if not number and response.strip():
        return Extracted(response, "whole response")
    text = _ascii(response)
    # The number of a heading ("#### 1. Add") is used only without such a line.
    if marked := _MARKED_LINE.search(text) or _MARKED.search(text):
        return Extracted(_plain(marked[1]), "####")
    for mark, sentence in reversed(_SENTENCE.findall(text)):
        if mark.endswith((":", "：")) and "=" in sentence:
            continue  # "Answer:" before the reasoning
        numbers = _EXPRESSION.findall(sentence.rpartition("=")[2]) or _EXPRESSION.findall(sentence)
        if numbers:
            return Extracted(_plain(numbers[0]), "answer is")
    numbers = _EXPRESSION.findall(text)
    return Extracted(_plain(numbers[-1]), "last number") if numbers else Extracted(None, "nothing")


def _number_in(box: str) -> str:
    """Return the number of a box with one number and no other LaTeX, else the box."""
    text = _ascii(box)
    numbers = _EXPRESSION.findall(text)
    return _plain(numbers[0]) if len(numbers) == 1 and not _LATEX.search(text) else box


def _ascii(text: str) -> str:
    """Digits and minus signs as ASCII characters, and -$5 as -5."""
    text = re.sub(r"\d", lambda match: str(unicodedata.decimal(match.group())), text)
    return text.replace("\u2212", "-").replace("-$", "-")


def _plain(number: str) -> str:
    digits = number.replace(",", "")
    return format(Decimal(digits), "f") if "e" in digits.casefold() else digits


def gsm8k_gold(answer: str, place: Place) -> str:
    """Return the text after ``####`` in the answer of a GSM8K row."""
    head, mark, tail = answer.rpartition("####")
    require(
        mark and re.search(_NUMBER, tail),
        "wrong-row",
        f"the answer has no number after '####': {head[-40:]!r}",
        place=place,
        error=DataError,
    )
    return _plain(tail.strip())


def math_gold(solution: str, place: Place) -> str:
    """Return the content of the last balanced box in the solution of a MATH row."""
    gold = boxed_answer(solution)
    if gold is None:
        raise DataError(
            "wrong-row",
            f"the solution has no balanced \\boxed{{}}: …{solution[-60:]!r}",
            place=place,
        )
    return gold
