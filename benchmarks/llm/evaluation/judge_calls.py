"""Requests to the judge: selection of turns, request rate, attempts, and storage of the replies."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from evaluation import records
from evaluation.judge import Judge, Request
from hgms.store import digest
from hgms_core import HgmsError

if TYPE_CHECKING:
    from openai import OpenAI

NEEDS: Final = ("id", "turn", "asked", "rating")

Ratings = dict[tuple[int, int], dict[str, Any]]
"""The records of a judge's ratings by question and turn."""


def ratings_path(judge: Judge, folder: Path) -> Path:
    """Return the file of a judge's ratings; each judge has a separate file."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", judge.model).strip("-.") or "judge"
    return folder / f"mt-bench.ratings.{name}-{digest(judge.where)[:6]}.jsonl"


def stored_ratings(judge: Judge, folder: Path, requests: Sequence[Request]) -> Ratings:
    """Return this judge's stored records for exactly these requests; the last record counts."""
    wanted = {request.key: request.digest for request in requests}
    ratings = records.by_turn(ratings_path(judge, folder), NEEDS)
    return {key: record for key, record in ratings.items() if wanted.get(key) == record["asked"]}


def rate(
    judge: Judge, folder: Path, requests: Sequence[Request], report: Callable[[str], None]
) -> Ratings:
    """Rate every turn without a rating, and return all records. Retry ratings that failed before.

    Raises
    ------
    HgmsError
        The judge cannot be reached, does not respond or rejects a request; finished ratings are
        kept.
    """
    done = stored_ratings(judge, folder, requests)
    todo = [request for request in requests if done.get(request.key, {}).get("rating") is None]
    if not todo:
        return done
    path = ratings_path(judge, folder)
    report(f"mt-bench: {judge.where} rates {len(todo)} of {len(requests)} turns")
    kept = len(requests) - len(todo)
    with contextlib.closing(_rate_requests(judge, todo)) as answers:
        try:
            for record in answers:
                records.add(path, record)
                done[record["id"], record["turn"]] = record
                kept += record["rating"] is not None
        except HgmsError as error:
            saved = f"{kept} of {len(requests)} ratings are saved in {path}"
            hint = "\n".join(filter(None, [error.hint, f"repeat the command to continue: {saved}"]))
            raise HgmsError(**{**error.as_dict(), "hint": hint}) from None
    if not kept:
        reason = next(record["reason"] for record in done.values())
        raise HgmsError(
            "judge-failed",
            f"no reply of the judge {judge.where} contains a rating: {reason}",
            place=("judge",),
            hint=f"read the replies in {path}",
        )
    return done


def _rate_requests(judge: Judge, todo: Sequence[Request]) -> Generator[dict[str, Any], None, None]:
    """Yield records in the order of completion.

    After the first failure, start no new request, but yield the records of running requests.
    """
    from openai import OpenAI

    failure = None
    stop = threading.Event()
    client = OpenAI(
        base_url=judge.base_url,
        api_key=judge.key(),
        timeout=judge.timeout,
        max_retries=judge.retries,
    )
    with client, ThreadPoolExecutor(judge.concurrency) as pool:
        try:
            rate = functools.partial(_rate, judge, client, stop)
            for future in as_completed([pool.submit(rate, each) for each in todo]):
                failure = failure or future.exception()
                if future.exception() is None and (record := future.result()) is not None:
                    yield record
        finally:
            stop.set()  # also after an interrupt of the caller
    if failure is not None:
        raise failure


def _rate(
    judge: Judge, client: OpenAI, stop: threading.Event, request: Request
) -> dict[str, Any] | None:
    """Return the record of a request, or None if another request failed before it."""
    record = None
    for attempt in range(1, judge.attempts + 1):
        if stop.is_set():
            return None
        try:
            reply, failed = _reply(judge, client, request)
        except BaseException:
            stop.set()
            raise
        record = request.record(judge.where, attempt, reply, failed)
        if record["rating"] is not None:
            break
    return record


def _reply(judge: Judge, client: OpenAI, request: Request) -> tuple[str | None, str]:
    """Return the judge's reply, or None with the reason why it cannot be used."""
    import openai

    calls: Any = client.chat.completions
    try:
        reply = calls.create(
            model=judge.model,
            messages=request.messages,
            temperature=judge.temperature,
            max_tokens=judge.max_tokens,
        )
        text = reply.choices[0].message.content
    except openai.BadRequestError as error:
        return None, f"rejected: {_short(error)}"
    except (openai.APIStatusError, openai.APIConnectionError) as error:
        raise HgmsError(
            "judge-failed",
            f"the judge {judge.where} does not respond: {_short(error)}",
            place=("judge",),
            hint=f"check base_url and the key, or increase timeout={judge.timeout:g} "
            f"(seconds) or retries={judge.retries}",
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


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
