"""MT-Bench ratings by a judge model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from typing import final

from attrs import field, frozen, validators

from hgms_core import ConfigError, MissingExtra
from hgms_evaluation import records
from hgms_evaluation.questions import REFERENCES, JudgePrompt, Question

_RATING = re.compile(r"\[\[(\d+\.?\d*)\]\]")
_LOOSE = re.compile(r"\[(\d+\.?\d*)\]")


@final
@frozen(kw_only=True)
class Judge:
    """The judge of MT-Bench: where it is, and how patiently it is asked.

    Use when: MT-Bench is among the benchmarks. Avoid comparing scores of different judges, or of one judge at different times:
    a GPT-4 judge at temperature 0 still varies by about 0.2 points between passes over the same answers.

    Args:
        base_url: the endpoint, as ``http://localhost:8000/v1`` (None: OpenAI's own).
        model: the judge's name there.
        api_key_env: the environment variable that holds the key. It may be unset where ``base_url`` is given. The key is
            written nowhere.
        temperature, max_tokens: of the judge's own replies.
        timeout: seconds for one reply.
        retries: how often a request that timed out, was turned away (429) or failed on the server's side (5xx, no connection)
            is sent again.
        backoff: seconds before the first such retry; doubled each time up to 60. A server's ``Retry-After`` has precedence, and
            holds for all requests.
        attempts: how often a reply without a rating is asked for in all; then the rating counts as failed.
        requests_per_minute: at most so many requests are started in a minute (None: no limit).
        concurrency: requests under way at the same time.

    Cost: one request per turn: 160 for MT-Bench.

    >>> Judge(base_url="http://localhost:8000/v1", model="judge").attempts
    3

    Source: Zheng et al. (2023), "Judging LLM-as-a-judge with MT-Bench and Chatbot Arena", single-answer grading.
    """

    base_url: str | None = None
    model: str = field(default="gpt-4o", validator=validators.min_len(1))
    api_key_env: str = field(default="OPENAI_API_KEY", validator=validators.min_len(1))
    temperature: float = field(default=0.0, validator=validators.ge(0))
    max_tokens: int = field(default=2048, validator=validators.ge(1))
    timeout: float = field(default=120.0, validator=validators.gt(0))
    retries: int = field(default=6, validator=validators.ge(0))
    backoff: float = field(default=1.0, validator=validators.ge(0))
    attempts: int = field(default=3, validator=validators.ge(1))
    requests_per_minute: float | None = field(default=None, validator=validators.optional(validators.gt(0)))
    concurrency: int = field(default=4, validator=validators.ge(1))

    @property
    def where(self) -> str:
        """The judge's name and place, as it stands in every record."""
        return f"{self.model} at {self.base_url or 'https://api.openai.com/v1'}"

    def key(self) -> str:
        """The key, or a word in its place where a server of one's own needs none.

        Raises:
            ConfigError: OpenAI's endpoint and no key.
        """
        key = os.environ.get(self.api_key_env, "")
        if key or self.base_url is not None:
            return key or "none"
        raise ConfigError(
            f"the judge {self.model} needs a key: the environment variable {self.api_key_env} is not set\n"
            "  set it, name another judge with [evaluate.judge] base_url and model,\n"
            '  or set evaluate.judge = "none": answers are then only generated, and can be rated later'
        )

    def require(self) -> None:
        """Raises MissingExtra or ConfigError where no request could be made."""
        for package in ("openai", "tenacity"):
            if importlib.util.find_spec(package) is None:
                raise MissingExtra(f"rating MT-Bench needs {package}, which is not installed\n  pip install 'hgms[llm]'")
        self.key()


def rating(text: str) -> float | None:
    """The first ``[[x]]`` of a judge's reply, else the first ``[x]``; None without one, or off the scale of 0 to 10.

    >>> rating("Good. Rating: [[8]]"), rating("Rating: [7.5]"), rating("Rating: 9"), rating("[[11]]")
    (8.0, 7.5, None, None)
    """
    match = _RATING.search(text) or _LOOSE.search(text)
    if match is None:
        return None
    value = float(match.group(1))
    return value if 0 <= value <= 10 else None


def messages(prompts: Mapping[str, JudgePrompt], question: Question, answers: Sequence[str], turn: int) -> list[dict[str, str]]:
    """What the judge is asked about turn 1 or 2: the whole conversation for the second, and the reference answers for
    mathematics, reasoning and coding."""
    name = ("single-math-v1" if question.category in REFERENCES else "single-v1") + ("-multi-turn" if turn == 2 else "")
    values = {f"ref_answer_{place}": text for place, text in enumerate(question.references, 1)}
    if turn == 1:
        values |= {"question": question.turns[0], "answer": answers[0]}
    else:
        values |= {f"question_{place}": text for place, text in enumerate(question.turns, 1)}
        values |= {f"answer_{place}": text for place, text in enumerate(answers, 1)}
    prompt = prompts[name]
    try:
        user = prompt.template.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"the judge prompt {name!r} cannot be filled: {error!r}") from None
    return [{"role": "system", "content": prompt.system}, {"role": "user", "content": user}]


@frozen
class Asked:
    """One request: about which question and turn, and what is said."""

    id: int
    turn: int
    messages: list[dict[str, str]]

    @property
    def digest(self) -> str:
        return records.digest(self.messages)
