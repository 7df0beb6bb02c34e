"""Which part of a response is its answer, and whether it equals the known one.

The known answer of GSM8K is what follows ``####``, that of MATH the content of the last balanced
``\\boxed{}`` of its solution. Whether two answers are equal is math-verify's decision.
"""

from __future__ import annotations

import re
from typing import Literal

from attrs import frozen

from hgms_core import DataError, Place

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_ANSWER_IS = re.compile(r"answer\s+is\s*:?\s*", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])-?\.\d+")


@frozen
class Extracted:
    """``text``: the answer, None if there is none; ``by``: the rule that found it."""

    text: str | None
    by: Literal["boxed", "answer is", "last number", "whole response", "nothing"]


def boxed(text: str) -> str | None:
    """The content of the last ``\\boxed`` (or ``\\fbox``) whose braces balance and that is not
    empty.

    >>> boxed(r"so \\boxed{\\frac{1}{2}} or rather \\boxed{3} and \\boxed{4")
    '3'
    >>> boxed(r"$\\boxed 5$ it is"), boxed("no box")
    ('5', None)
    """
    ends = _ends(text)
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        braced = text[start : start + 1] == "{"
        content = text[start + 1 : ends.get(start, start)] if braced else text[start : start + 1]
        if content.strip(" $"):
            return content.strip()
    return None


def _ends(text: str) -> dict[int, int]:
    """Where each opening brace is closed, in one pass: a response can hold thousands of boxes
    that never are.
    """
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"[{}]", text):
        place = match.start()
        if text[max(place - 1, 0) : place] == "\\" and text[max(place - 2, 0) : place] != "\\\\":
            continue  # escaped
        if match.group() == "{":
            opened.append(place)
        elif opened:
            ends[opened.pop()] = place
    return ends


def numbers(text: str) -> list[str]:
    """The plain numbers of a text, without the commas between thousands.

    >>> numbers("From 1,234.50 take 4-3 and -2 of .5 in x3, so 7.")
    ['1234.50', '4', '3', '-2', '.5', '7']
    """
    return [
        match.group().replace(",", "") for match in _NUMBER.finditer(text.replace("\u2212", "-"))
    ]


def extract(response: str, *, number: bool) -> Extracted:
    """The answer of a response: the content of the last balanced box. Without one,

    - for questions whose answer is a ``number`` (GSM8K): what follows the last "answer is", to the
      end of its sentence; else the last number. A box or sentence that holds exactly one number is
      that number: "18 dollars" is 18;
    - else (MATH): the whole response, in which math-verify finds the answer by its own rules.

    No other rewriting, and in particular no comparison with the hundredfold.

    >>> extract("3 + 4 = 7. The answer is $7.50 per day. 12 is not.", number=True)
    Extracted(text='7.50', by='answer is')
    >>> extract(r"Thus \\boxed{18\\text{ dollars}}, for 3 days.", number=True)
    Extracted(text='18', by='boxed')
    """
    if (content := boxed(response)) is not None:
        return Extracted(_sole(content) if number else content, "boxed")
    if not number:
        return (
            Extracted(response, "whole response")
            if response.strip()
            else Extracted(None, "nothing")
        )
    if sentences := list(_ANSWER_IS.finditer(response)):
        rest = re.split(r"\n|[.!?](?=\s|$)", response[sentences[-1].end() :], maxsplit=1)[0].strip(
            " *$"
        )
        if rest:
            return Extracted(_sole(rest), "answer is")
    plain = numbers(response)
    return Extracted(plain[-1], "last number") if plain else Extracted(None, "nothing")


def _sole(text: str) -> str:
    plain = numbers(text)
    return (
        plain[0]
        if len(plain) == 1 and not re.search(r"[\\^/_](?!text|mathrm|\$|,|%)", text)
        else text
    )


def gsm8k_gold(answer: str, place: Place) -> str:
    """What follows ``####`` in GSM8K's own answer."""
    head, mark, tail = answer.rpartition("####")
    if not mark or not numbers(tail):
        raise DataError(
            "wrong-row", f"the answer has no number after '####': {head[-40:]!r}", place=place
        )
    return tail.strip().replace(",", "")


def math_gold(solution: str, place: Place) -> str:
    """The last balanced box of MATH's own solution."""
    gold = boxed(solution)
    if gold is None:
        raise DataError(
            "wrong-row",
            f"the solution has no balanced \\boxed{{}}: …{solution[-60:]!r}",
            place=place,
        )
    return gold
