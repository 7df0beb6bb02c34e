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

from hgms_core.errors import DataError, Place

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_CONNECTED = re.compile(r"[\s$]*(?:[,;]|(?:[,;][\s$]*)?(?:and\b|\\text\{\s*and\s*\}))[\s$]*")
_ANSWER_IS = re.compile(
    r"answer[\s*]+is[\s:*]*|答案(?:是|为|為)[\s:：*]*|答えは[\s:：*]*", re.IGNORECASE
)
_ANSWER = re.compile(r"(?:answer|答案|答え)[\s*]*[:：][\s*]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=[\s*]|$)|[。！？]")
_THINKING = re.compile(r"<think(?:ing)?>")
_THOUGHT = re.compile(r"</think(?:ing)?>")

# A letter of another script may precede a number without a space: 答案是18.
_PLAIN = r"(?<![A-Za-z0-9_.])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(_PLAIN + r"(?:[eE][+-]?\d{1,2}(?![A-Za-z0-9]))?")
_MARKED = re.compile(r"####[\s*$€£¥]*(?=-?\.?\d)")
_LINE_END = re.compile(r"[.\s$*]*(?:\n|$|####)")
_EXPRESSION = re.compile(
    rf"{_NUMBER.pattern}(?:\s+\d+/\d+)?(?:\s*[-+*/×÷]\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+))*"
)
_LATEX = re.compile(r"[\\^_](?!text|mathrm|[$,%!;()\[\]])|/(?=\s*\\)")


@frozen
class Extracted:
    """``text``: the answer (None if no rule applies); ``by``: the rule that found it."""

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
    return ", ".join(dict.fromkeys(_last_boxes(text))) or None


def _last_boxes(text: str) -> list[str]:
    """Return the content of the last box, preceded by the contents of the boxes connected to it."""
    ends = _ends(text)
    found: list[str] = []
    following = len(text)
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        braced = text[start : start + 1] == "{"
        end = ends.get(start, start) if braced else start + 1
        content = text[start + 1 : end] if braced else text[start:end]
        if not content.strip(" $"):
            continue
        if found and not _CONNECTED.fullmatch(text, end + braced, following):
            break
        found.insert(0, content.strip())
        following = match.start()
    return found


def _ends(text: str) -> dict[int, int]:
    """Return the position of the closing brace for each opening brace, in one pass.

    A response can contain thousands of boxes that are never closed.
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

    Examples
    --------
    >>> numbers("From 1,234.50 take 4-3 and -2 of .5 in x3, so 7 or 1e3, 答案是18。")
    ['1234.50', '4', '3', '-2', '.5', '7', '1000', '18']
    """
    return [_plain(match.group()) for match in _NUMBER.finditer(_ascii(text))]


def _ascii(text: str) -> str:
    """Digits and minus signs as ASCII characters, and -$5 as -5."""
    text = re.sub(r"\d", lambda match: str(unicodedata.decimal(match.group())), text)
    return text.replace("\u2212", "-").replace("-$", "-")


def _plain(number: str) -> str:
    digits = number.replace(",", "")
    return format(Decimal(digits), "f") if "e" in digits.casefold() else digits


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

    The content of the last balanced box is the answer. Without a box it is

    - for questions whose answer is a ``number`` (GSM8K): the number after the first ``####``; else
      the number in the sentence after the last "answer is" or "Answer:"; else the last number. In
      a sentence or box the number is the first after the last "=", outside of parentheses;
    - else (MATH): the whole response, in which math-verify locates the answer.

    An answer is not compared with its hundredfold.

    Examples
    --------
    >>> extract("3 + 4 = 7. The answer is $7.50 per day. 12 is not.", number=True)
    Extracted(text='7.50', by='answer is')
    >>> extract(r"Thus \\boxed{18\\text{ dollars}}, for 3 days.", number=True)
    Extracted(text='18', by='boxed')
    """
    response = without_thinking(response)
    if boxes := _last_boxes(response):
        return Extracted(_value(boxes[-1]) if number else boxed_answer(response), "boxed")
    if not response.strip():
        return Extracted(None, "nothing")
    if not number:
        return Extracted(response, "whole response")
    if marked := _after_marks(response):
        return Extracted(marked, "####")
    if sentence := _answer_sentence(response):
        return Extracted(_value(sentence), "answer is")
    plain = numbers(response)
    return Extracted(plain[-1], "last number") if plain else Extracted(None, "nothing")


def _after_marks(response: str) -> str | None:
    """The number after the first ``####`` as in GSM8K; a numbered heading comes second."""
    text = _ascii(response)
    found = []
    for mark in _MARKED.finditer(text):
        match = _NUMBER.search(text, mark.end())
        if match is not None and match.start() == mark.end():
            found.append(match)
    whole = [match for match in found if _LINE_END.match(text, match.end())]
    return _plain((whole or found)[0].group()) if found else None


def _answer_sentence(response: str) -> str | None:
    """The last sentence that gives the answer.

    "Answer:" may also come before the reasoning, so its sentence counts only with one number.
    """
    marks = [(match, len(response)) for match in _ANSWER_IS.finditer(response)]
    marks += [(match, 1) for match in _ANSWER.finditer(response)]
    following = len(response)
    for match, most in sorted(marks, key=lambda mark: mark[0].start(), reverse=True):
        end = _SENTENCE_END.search(response, match.end(), following)
        sentence = response[match.end() : end.start() if end else following].strip(" *$")
        if 0 < len(numbers(_without_remarks(sentence))) <= most:
            return sentence
        following = match.start()
    return None


def _without_remarks(text: str) -> str:
    """The text without remarks in parentheses, if a number is left."""
    short = re.sub(r"(?<=[\s*])\([^()]*\)", " ", text)
    return short if numbers(short) else text


def _value(text: str) -> str:
    """The number of a sentence or box; math-verify reads LaTeX and arithmetic."""
    short = _ascii(_without_remarks(text))
    last = short.rpartition("=")[2]
    short = last if numbers(last) else short
    plain = numbers(short)
    if _LATEX.search(short) or not plain:
        return text if len(plain) != 1 or _LATEX.search(short) else plain[0]
    match = _EXPRESSION.search(short)
    assert match is not None
    whole = _NUMBER.fullmatch(match.group())
    return _plain(match.group()) if whole else match.group().replace(",", "")


def gsm8k_gold(answer: str, place: Place) -> str:
    """Return the text after ``####`` in the answer of a GSM8K row."""
    head, mark, tail = answer.rpartition("####")
    if not mark or not numbers(tail):
        raise DataError(
            "wrong-row", f"the answer has no number after '####': {head[-40:]!r}", place=place
        )
    return tail.strip().replace(",", "")


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
