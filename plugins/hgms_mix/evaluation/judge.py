"""MT-Bench ratings by a judge model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, final
from urllib.parse import urlsplit

from attrs import field, frozen

from hgms.arguments import require
from hgms.packages import optional_module
from hgms.store import json_digest
from hgms_core import ConfigError
from hgms_core.validators import at_least, greater_than, not_empty, optional
from hgms_mix.evaluation.questions import REFERENCES, JudgePrompt, Question

OWN_HOST = "api.openai.com"
OWN_KEY = "OPENAI_API_KEY"
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
        hint="use api_key_env for a key",
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
        The endpoint (default: the endpoint of OpenAI), and the name of the judge there.
    api_key_env
        The environment variable that contains the key; it may be unset if ``base_url`` is given.
        OPENAI_API_KEY is sent to OpenAI. Any other variable, or any other host, requires permission
        from the command (``--send-key HOST``; from Python HGMS_SEND_KEY=HOST). The key is never
        written to a file.
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
    api_key_env: str = field(default="OPENAI_API_KEY", validator=not_empty)
    temperature: float = field(default=0.0, validator=at_least(0))
    max_tokens: int = field(default=2048, validator=at_least(1))
    timeout: float = field(default=120.0, validator=greater_than(0))
    retries: int = field(default=10, validator=at_least(0))
    attempts: int = field(default=3, validator=at_least(1))
    concurrency: int = field(default=4, validator=at_least(1))

    @property
    def where(self) -> str:
        """The judge's name and endpoint, as in every record."""
        return f"{self.model} at {self.base_url or 'https://api.openai.com/v1'}"

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or "" if self.base_url is not None else OWN_HOST

    @property
    def sends(self) -> str:
        """A message that names the key in the requests to the judge, if any."""
        return (
            "no key is sent"
            if self.key() == NO_KEY
            else f"the key in {self.api_key_env} is sent to {self.host}"
        )

    def key(self) -> str:
        """Return the key, or a placeholder if a local server requires no key.

        Raises
        ------
        ConfigError
            OpenAI's endpoint has no key; or the file requests to send a key to a host that the
            command does not allow.
        """
        key = os.environ.get(self.api_key_env, "")
        secure = self.base_url is None or self.base_url.startswith("https:")
        own = self.api_key_env == OWN_KEY and self.host == OWN_HOST and secure
        if key and not own and self.host not in os.environ.get("HGMS_SEND_KEY", "").split(","):
            if self.api_key_env == OWN_KEY and self.host != OWN_HOST:
                return NO_KEY  # the default variable: its key is only for OpenAI
            raise ConfigError(
                "not-allowed",
                f"api_key_env={self.api_key_env!r} sends this environment variable to {self.host}, "
                "which the command does not allow",
                place=("evaluate", "judge", "api_key_env"),
                hint=f"add --send-key {self.host} to the command if it is a key for that host",
            )
        if key or self.base_url is not None:
            return key or NO_KEY
        raise ConfigError(
            "missing-variable",
            f"the judge {self.model} requires a key, but the environment variable "
            f"{self.api_key_env} is not set",
            place=("evaluate", "judge", "api_key_env"),
            hint=f"set {self.api_key_env}, or set base_url and model to another judge\n"
            'set evaluate.judge = "none" to generate the responses now and rate them later',
        )

    def require(self) -> None:
        """Raise MissingExtra or ConfigError if requests are not possible."""
        optional_module("openai", "the judge of MT-Bench", "llm", place=("evaluate", "judge"))
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
