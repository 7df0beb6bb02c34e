"""MT-Bench ratings by a judge model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from attrs import field, frozen, validators

from hgms_core import ConfigError, HgmsError, MissingExtra
from hgms_evaluation import records
from hgms_evaluation.questions import REFERENCES, JudgePrompt, Question

if TYPE_CHECKING:
    from openai import OpenAI

_RATING = re.compile(r"\[\[(\d+\.?\d*)\]\]")
_LOOSE = re.compile(r"\[(\d+\.?\d*)\]")
_LONGEST_WAIT: Final = 60.0


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


def ratings_path(judge: Judge, folder: Path) -> Path:
    """Each judge has its own file."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", judge.model).strip("-.") or "judge"
    return folder / f"mt-bench.ratings.{name}-{hashlib.sha256(judge.where.encode()).hexdigest()[:6]}.jsonl"


def stored(judge: Judge, folder: Path, asked: Sequence[Asked]) -> dict[tuple[int, int], dict[str, Any]]:
    """The records this judge has of exactly these answers; the last one counts."""
    wanted = {(one.id, one.turn): one.digest for one in asked}
    found = {(record["id"], record["turn"]): record for record in records.read(ratings_path(judge, folder))}
    return {key: record for key, record in found.items() if wanted.get(key) == record["asked"]}


def rate(
    judge: Judge, folder: Path, asked: Sequence[Asked], report: Callable[[str], None]
) -> dict[tuple[int, int], dict[str, Any]]:
    """Has every turn rated that is not yet, and returns all records. Ratings that failed before are asked for again.

    Raises:
        HgmsError: the judge cannot be reached, does not answer or refuses; what was rated is kept.
    """
    judge.require()
    done = stored(judge, folder, asked)
    todo = [one for one in asked if done.get((one.id, one.turn), {}).get("rating") is None]
    if not todo:
        return done
    path = ratings_path(judge, folder)
    report(f"mt-bench: {judge.where} rates {len(todo)} of {len(asked)} turns")
    kept = len(asked) - len(todo)
    with records.Journal(path) as journal, _client(judge) as client:
        pace = _Pace(judge.requests_per_minute)
        try:
            for record in _each(todo, judge.concurrency, lambda one, stop: _rate_one(judge, client, pace, one, stop)):
                journal.write(record)
                done[record["id"], record["turn"]] = record
                kept += record["rating"] is not None
        except HgmsError as error:
            raise HgmsError(
                f"{error}\n  {kept} of {len(asked)} ratings are kept in {path}; the same command goes on from there"
            ) from None
    if not kept:
        reason = next(record["reason"] for record in done.values())
        raise HgmsError(f"no reply of the judge {judge.where} holds a rating: {reason}\n  the replies are in {path}")
    return done


def _each(
    todo: Sequence[Asked], concurrency: int, work: Callable[[Asked, threading.Event], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Results as they come. After the first failure nothing new is begun; what was under way is handed on."""
    stop, failure = threading.Event(), None
    waiting = iter(todo)
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            under_way: set[Future[dict[str, Any]]] = {
                pool.submit(work, one, stop) for one in itertools.islice(waiting, concurrency)
            }
            while under_way:
                ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in ended:
                    error = future.exception()
                    if error is None:
                        yield future.result()
                    else:
                        failure = failure or error
                        stop.set()
                    following = None if stop.is_set() else next(waiting, None)
                    if following is not None:
                        under_way.add(pool.submit(work, following, stop))
        finally:
            stop.set()  # also where the caller is interrupted: nobody sleeps on
    if failure is not None:
        raise failure


class _Pace:
    """Starts of requests, a fixed time apart; none before a time that a server named."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap = 60 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, stop: threading.Event) -> None:
        with self._lock:
            start = max(self._next, time.monotonic())
            self._next = start + self._gap
        stop.wait(max(0.0, start - time.monotonic()))

    def hold(self, seconds: float) -> None:
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


def _client(judge: Judge) -> OpenAI:
    from openai import OpenAI

    # retries are ours: they keep to the pace, and a Retry-After holds for all threads
    return OpenAI(base_url=judge.base_url, api_key=judge.key(), timeout=judge.timeout, max_retries=0)


def _rate_one(judge: Judge, client: OpenAI, pace: _Pace, one: Asked, stop: threading.Event) -> dict[str, Any]:
    record: dict[str, Any] = {"id": one.id, "turn": one.turn, "judge": judge.where, "asked": one.digest}
    for attempt in range(1, judge.attempts + 1):
        text, reason = _ask(judge, client, pace, one, stop)
        value = None if text is None else rating(text)
        record |= {"rating": value, "attempts": attempt, "reply": text}
        if value is not None:
            break
        record["reason"] = reason or "no rating in the reply"
    else:
        return record
    record.pop("reason", None)
    return record


def _ask(judge: Judge, client: OpenAI, pace: _Pace, one: Asked, stop: threading.Event) -> tuple[str | None, str]:
    """The judge's reply, or None and why it is of no use."""
    import openai

    try:
        reply = _answered(judge, client, pace, one, stop)
        text = reply.choices[0].message.content
    except openai.BadRequestError as error:
        return None, f"refused: {_told(error)}"
    except openai.APIStatusError as error:
        raise HgmsError(f"the judge {judge.where} refuses: {_told(error)}") from None
    except (openai.APIResponseValidationError, AttributeError, IndexError, TypeError, ValueError) as error:
        return None, f"malformed: {_told(error)}"
    return (text, "") if isinstance(text, str) and text.strip() else (None, "malformed: no text")


def _answered(judge: Judge, client: OpenAI, pace: _Pace, one: Asked, stop: threading.Event) -> Any:
    """What the endpoint sends, with as many retries as it takes."""
    from tenacity import RetryError, Retrying, retry_if_exception, stop_after_attempt, stop_when_event_set, wait_exponential

    doubling = wait_exponential(multiplier=judge.backoff, max=_LONGEST_WAIT)

    def pause(state: Any) -> float:
        named = _retry_after(state.outcome.exception())
        if named is None:
            return float(doubling(state))
        pace.hold(named)  # for every thread; this one waits there too
        return 0.0

    def send() -> Any:
        pace.wait(stop)
        if stop.is_set():
            raise HgmsError("stopped")
        calls: Any = client.chat.completions
        return calls.create(
            model=judge.model, messages=one.messages, temperature=judge.temperature, max_tokens=judge.max_tokens
        )

    def sleep(seconds: float) -> None:
        stop.wait(seconds)

    limit = stop_after_attempt(judge.retries + 1) | stop_when_event_set(stop)
    try:
        return Retrying(stop=limit, wait=pause, retry=retry_if_exception(_passing), sleep=sleep)(send)
    except RetryError as error:
        last, tries = error.last_attempt.exception(), error.last_attempt.attempt_number
        raise HgmsError(f"the judge {judge.where} does not answer: {_told(last)} ({tries} tries)") from None


def _passing(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    import openai

    if isinstance(error, openai.RateLimitError):
        return getattr(error, "code", None) != "insufficient_quota"  # waiting does not pay the bill
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 409) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


def _retry_after(error: BaseException | None) -> float | None:
    """The seconds a server asks to wait, at most ten minutes."""
    response = getattr(error, "response", None)
    try:
        return min(max(float(response.headers["retry-after"]), 0.0), 600.0) if response is not None else None
    except (KeyError, ValueError):
        return None


def _told(error: BaseException | None) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:200]}"
