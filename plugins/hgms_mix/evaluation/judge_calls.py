"""Requests to the judge: selection of turns, request rate, retries, and storage of the replies."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hgms.store import digest
from hgms_core import HgmsError
from hgms_mix.evaluation import records
from hgms_mix.evaluation.inspect_judge import InspectJudge
from hgms_mix.evaluation.judge import Judge, Request, rating

if TYPE_CHECKING:
    from openai import OpenAI

_LONGEST_WAIT: Final = 60.0
_LARGEST_REPLY: Final = 2**24
NEEDS: Final = ("id", "turn", "asked", "rating")

Ratings = dict[tuple[int, int], dict[str, Any]]
"""The records of a judge's ratings by question and turn."""


def ratings_path(judge: Judge | InspectJudge, folder: Path) -> Path:
    """Return the file of a judge's ratings; each judge has a separate file."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", judge.model).strip("-.") or "judge"
    return folder / f"mt-bench.ratings.{name}-{digest(judge.where)[:6]}.jsonl"


def stored(judge: Judge | InspectJudge, folder: Path, requests: Sequence[Request]) -> Ratings:
    """Return the stored records of this judge for exactly these answers; the last record counts."""
    wanted = {request.key: request.digest for request in requests}
    ratings = records.by_turn(ratings_path(judge, folder), NEEDS)
    return {key: record for key, record in ratings.items() if wanted.get(key) == record["asked"]}


def rate(
    judge: Judge | InspectJudge,
    folder: Path,
    requests: Sequence[Request],
    report: Callable[[str], None],
) -> Ratings:
    """Rate every turn without a rating, and return all records. Retry ratings that failed before.

    Raises:
        HgmsError: the judge cannot be reached, does not respond or rejects a request; finished
            ratings are kept.
    """
    judge.require()
    done = stored(judge, folder, requests)
    todo = [request for request in requests if done.get(request.key, {}).get("rating") is None]
    if not todo:
        return done
    path = ratings_path(judge, folder)
    report(f"mt-bench: {judge.where} rates {len(todo)} of {len(requests)} turns ({judge.sends})")
    kept = len(requests) - len(todo)
    with records.Journal(path) as journal, _asked(judge, folder, todo) as answers:
        try:
            for record in answers:
                journal.write(record)
                done[record["id"], record["turn"]] = record
                kept += record["rating"] is not None
        except HgmsError as error:
            saved = f"{kept} of {len(requests)} ratings are saved in {path}"
            again = f"repeat the command to continue: {saved}"
            raise HgmsError(
                error.code,
                error.message,
                place=error.place,
                hint=again if error.hint is None else f"{error.hint}\n{again}",
                install=error.install,
                did_you_mean=error.did_you_mean,
            ) from None
    if not kept:
        reason = next(record["reason"] for record in done.values())
        raise HgmsError(
            "judge-failed",
            f"no reply of the judge {judge.where} contains a rating: {reason}",
            place=("evaluate", "judge"),
            hint=f"read the replies in {path}",
        )
    return done


@contextlib.contextmanager
def _asked(
    judge: Judge | InspectJudge, folder: Path, todo: Sequence[Request]
) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the records of the requested ratings in the order of completion."""
    if isinstance(judge, InspectJudge):
        yield judge.rated(todo, folder / "inspect")
        return
    with _client(judge) as client:
        yield _Session(judge, client).rated(todo)


class _Session:
    """Requests to one judge from several threads.

    Requests start at a fixed interval, and not before a time that a server requires.
    """

    def __init__(self, judge: Judge, client: OpenAI) -> None:
        self._judge = judge
        self._client = client
        self._gap = 60 / judge.requests_per_minute if judge.requests_per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def rated(self, todo: Sequence[Request]) -> Iterator[dict[str, Any]]:
        """Yield records in the order of completion.

        After the first failure, start no new request, but yield the records of running requests.
        """
        failure = None
        waiting = iter(todo)
        with ThreadPoolExecutor(self._judge.concurrency) as pool:
            try:
                under_way: set[Future[dict[str, Any]]] = {
                    pool.submit(self._rate, request)
                    for request in itertools.islice(waiting, self._judge.concurrency)
                }
                while under_way:
                    ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    for future in ended:
                        error = future.exception()
                        if error is None:
                            yield future.result()
                        else:
                            failure = failure or error
                            self._stop.set()
                        following = None if self._stop.is_set() else next(waiting, None)
                        if following is not None:
                            under_way.add(pool.submit(self._rate, following))
            finally:
                self._stop.set()  # also after an interrupt of the caller: wake sleeping threads
        if failure is not None:
            raise failure

    def _rate(self, request: Request) -> dict[str, Any]:
        record: dict[str, Any] = {
            "id": request.id,
            "turn": request.turn,
            "judge": self._judge.where,
            "asked": request.digest,
        }
        for attempt in range(1, self._judge.attempts + 1):
            text, reason = self._reply(request)
            value = None if text is None else rating(text)
            record |= {"rating": value, "attempts": attempt, "reply": text}
            if value is not None:
                record.pop("reason", None)
                break
            record["reason"] = reason or "no rating in the reply"
        return record

    def _reply(self, request: Request) -> tuple[str | None, str]:
        """Return the judge's reply, or None with the reason why it cannot be used."""
        import openai

        try:
            text = self._sent(request).choices[0].message.content
        except openai.BadRequestError as error:
            return None, f"refused: {_short(error)}"
        except openai.APIStatusError as error:
            raise HgmsError(
                "judge-failed",
                f"the judge {self._judge.where} rejects the request: {_short(error)}",
                place=("evaluate", "judge"),
            ) from None
        except (
            openai.APIResponseValidationError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            return None, f"malformed: {_short(error)}"
        if not isinstance(text, str) or not text.strip():
            return None, "malformed: no text"
        return text.encode(errors="replace").decode(), ""  # half a surrogate pair cannot be written

    def _sent(self, request: Request) -> Any:
        """Send a request with retries, and return the response of the endpoint."""
        from tenacity import (
            RetryError,
            Retrying,
            retry_if_exception,
            stop_after_attempt,
            stop_when_event_set,
            wait_exponential,
        )

        judge = self._judge
        doubling = wait_exponential(multiplier=judge.backoff, max=_LONGEST_WAIT)

        def pause(state: Any) -> float:
            named = _retry_after(state.outcome.exception())
            if named is None:
                return float(doubling(state))
            with self._lock:  # for every thread; this thread waits in `send` too
                self._next = max(self._next, time.monotonic() + named)
            return 0.0

        def send() -> Any:
            with self._lock:
                start = max(self._next, time.monotonic())
                self._next = start + self._gap
            if self._stop.wait(max(0.0, start - time.monotonic())):
                raise HgmsError("interrupted", "another request to the judge failed")
            calls: Any = self._client.chat.completions
            return calls.create(
                model=judge.model,
                messages=request.messages,
                temperature=judge.temperature,
                max_tokens=judge.max_tokens,
            )

        def sleep(seconds: float) -> None:
            self._stop.wait(seconds)

        limit = stop_after_attempt(judge.retries + 1) | stop_when_event_set(self._stop)
        try:
            return Retrying(
                stop=limit, wait=pause, retry=retry_if_exception(_passing), sleep=sleep
            )(send)
        except RetryError as error:
            last = error.last_attempt.exception()
            tries = error.last_attempt.attempt_number
            raise HgmsError(
                "judge-failed",
                f"the judge {judge.where} does not respond (tries: {tries}): {_short(last)}",
                place=("evaluate", "judge"),
                hint=f"check base_url, or increase timeout={judge.timeout:g} (seconds) or "
                f"retries={judge.retries}",
            ) from None


def _client(judge: Judge) -> OpenAI:
    from openai import DefaultHttpxClient, OpenAI

    # Retry here, not in the client: retries respect the request rate, and a Retry-After applies to
    # all threads.
    client = DefaultHttpxClient(
        event_hooks={"response": [lambda response: _limit(response, judge.timeout)]}
    )
    return OpenAI(
        base_url=judge.base_url,
        api_key=judge.key(),
        timeout=judge.timeout,
        max_retries=0,
        http_client=client,
    )


def _limit(response: Any, seconds: float) -> None:
    """Limit the body of a reply to ``seconds`` seconds and 16 MiB.

    The client limits only each read. A server that sends single bytes slowly never exceeds that
    limit.
    """
    # httpx, or the replacement that openai uses
    http: Any = importlib.import_module(type(response).__module__.partition(".")[0])
    inner = response.stream
    end = time.monotonic() + seconds

    class Body(http.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            size = 0
            for piece in inner:
                size += len(piece)
                if time.monotonic() > end:
                    raise http.ReadTimeout("the reply takes too long", request=response.request)
                if size > _LARGEST_REPLY:
                    raise http.DecodingError(
                        "the reply is larger than 16 MiB", request=response.request
                    )
                yield piece

        def close(self) -> None:
            inner.close()

    response.stream = Body()


def _passing(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    import openai

    if isinstance(error, openai.RateLimitError):
        return getattr(error, "code", None) != "insufficient_quota"  # waiting does not pay the bill
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 409) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


def _retry_after(error: BaseException | None) -> float | None:
    """Return the seconds to wait that a server requests, at most ten minutes."""
    response = getattr(error, "response", None)
    try:
        return (
            min(max(float(response.headers["retry-after"]), 0.0), 600.0)
            if response is not None
            else None
        )
    except (KeyError, ValueError):
        return None


def _short(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
