"""MT-Bench ratings by a judge model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from attrs import field, frozen

from evaluation.questions import REFERENCES, JudgePrompt, Question
from hgms.arguments import errors_at, require
from hgms.packages import optional_module
from hgms.store import json_digest
from hgms_core.validators import at_least, greater_than, not_empty, optional

OPENAI = "https://api.openai.com/v1"
ADDRESS = "OPENAI_BASE_URL"
KEY = "OPENAI_API_KEY"
"""The variables that OpenAI's client reads."""
NO_KEY = "none"
_RATING = re.compile(r"\[\[(\d+\.?\d*)\]\]")
_ADDRESS = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^\s/@:?#\[\]]+)(:[1-9]\d{0,4})?(/[^\s@]*)?")
_LOOSE = re.compile(r"\[(\d+\.?\d*)\]")


def _endpoint(_judge: object, _attribute: object, value: str) -> None:
    # without the value: it may contain a password
    require(
        _ADDRESS.fullmatch(value) is not None,
        "wrong-value",
        "base_url must be an address such as 'http://localhost:8000/v1', without a user or "
        "password, because it is stored with every rating",
        place=("base_url",),
        hint=f"use {KEY} for a key",
    )


@final
@frozen(kw_only=True)
class Judge:
    """The judge of MT-Bench: its endpoint, and the settings of requests and retries.

    Use when: the benchmarks include MT-Bench. Avoid comparing scores of different judges, or of one
    judge at different times. A GPT-4 judge at temperature 0 still varies by about 0.2 points
    between passes over the same responses.

    Parameters
    ----------
    base_url, model
        The endpoint, and the name of the judge there. By default OpenAI's client reads endpoint
        and key from OPENAI_BASE_URL (unset: OpenAI) and OPENAI_API_KEY. A ``base_url`` never
        receives a key. The key is never written to a file.
    temperature, max_tokens
        Of the judge's replies.
    timeout
        Seconds without data from the endpoint.
    retries
        Number of retries by the client of OpenAI. It retries requests that timed out, were rejected
        (429), or failed on the server (5xx, no connection), after 0.5, 1, 2, … 8 s, or the time in
        the server's ``Retry-After``.
    attempts
        Total number of requests if replies contain no rating; after these, the rating counts as
        failed.
    concurrency
        Largest number of concurrent requests.

    Notes
    -----
    Cost: one request per turn: 160 for MT-Bench.

    Source: Zheng et al. (2023), "Judging LLM-as-a-judge with MT-Bench and Chatbot Arena",
    single-answer grading.

    Examples
    --------
    >>> Judge(base_url="http://localhost:8000/v1", model="judge").attempts
    3
    """

    base_url: str | None = field(default=None, validator=optional(_endpoint))
    model: str = field(default="gpt-4o", validator=not_empty)
    temperature: float = field(default=0.0, validator=at_least(0))
    max_tokens: int = field(default=2048, validator=at_least(1))
    timeout: float = field(default=120.0, validator=greater_than(0))
    retries: int = field(default=10, validator=at_least(0))
    attempts: int = field(default=3, validator=at_least(1))
    concurrency: int = field(default=4, validator=at_least(1))

    @property
    def where(self) -> str:
        """The judge's name and endpoint, as in every record."""
        return f"{self.model} at {self.base_url or os.environ.get(ADDRESS) or OPENAI}"

    def key(self) -> str:
        """Return the key, or a placeholder for an endpoint of the file.

        Raises
        ------
        ConfigError
            There is no key, or the endpoint in OPENAI_BASE_URL contains a password.
        """
        key = os.environ.get(KEY, "") if self.base_url is None else NO_KEY
        require(
            key,
            "missing-variable",
            f"the judge {self.model} requires a key, but the environment variable {KEY} is not set",
            place=("judge",),
            hint=f"set {KEY}, or set base_url and model to another judge\n"
            'set judge = "none" to generate the responses now and rate them later',
        )
        with errors_at("judge"):
            _endpoint(self, None, os.environ.get(ADDRESS) or OPENAI)
        return key

    def require(self) -> None:
        """Raise MissingExtra or ConfigError if requests are not possible."""
        optional_module("openai", "the judge of MT-Bench", "scores", place=("judge",))
        self.key()


def rating(text: str) -> float | None:
    """Parse the first ``[[x]]`` of a judge's reply, else the first ``[x]``.

    Return None if there is no rating, or if it is outside the scale of 0 to 10.

    Examples
    --------
    >>> (
    ...     rating("Good. Rating: [[8]]"),
    ...     rating("Rating: [7.5]"),
    ...     rating("Rating: 9"),
    ...     rating("[[11]]"),
    ... )
    (8.0, 7.5, None, None)
    """
    match = _RATING.search(text) or _LOOSE.search(text)
    return float(match.group(1)) if match and 0 <= float(match.group(1)) <= 10 else None


def messages(
    prompts: Mapping[str, JudgePrompt], question: Question, answers: Sequence[str], turn: int
) -> list[dict[str, str]]:
    """Return the request to the judge about turn 1 or 2.

    For turn 2 it contains the whole conversation. For mathematics, reasoning and coding it contains
    the reference solutions.
    """
    name = ("single-math-v1" if question.category in REFERENCES else "single-v1") + (
        "-multi-turn" if turn == 2 else ""
    )
    values = {f"ref_answer_{place}": text for place, text in enumerate(question.references, 1)}
    if turn == 1:
        values |= {"question": question.turns[0], "answer": answers[0]}
    else:
        values |= {f"question_{place}": text for place, text in enumerate(question.turns, 1)}
        values |= {f"answer_{place}": text for place, text in enumerate(answers, 1)}
    # Only these fields are replaced: a format string of a file could read attributes.
    fields = "|".join(map(re.escape, values))
    user = re.sub(rf"\{{({fields})\}}", lambda match: values[match[1]], prompts[name].template)
    return [{"role": "system", "content": prompts[name].system}, {"role": "user", "content": user}]


@frozen
class Request:
    """The request to the judge about one turn of a question."""

    id: int
    turn: int
    messages: list[dict[str, str]]

    @property
    def key(self) -> tuple[int, int]:
        return self.id, self.turn

    @property
    def digest(self) -> str:
        return json_digest(self.messages)

    def record(self, judge: str, attempts: int, reply: str | None, failed: str) -> dict[str, Any]:
        """Return the stored record of this request to ``judge``, after some attempts.

        ``failed`` is the reason why there is no ``reply``.
        """
        value = None if reply is None else rating(reply)
        why = failed if reply is None else "no rating in the reply"
        return {
            "id": self.id,
            "turn": self.turn,
            "judge": judge,
            "asked": self.digest,
            "rating": value,
            "attempts": attempts,
            "reply": reply,
            **({"reason": why} if value is None else {}),
        }
