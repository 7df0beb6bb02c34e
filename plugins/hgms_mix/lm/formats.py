"""The shapes that rows of text come in, each read into a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

from attrs import frozen

from hgms_core import closest

Row = Mapping[str, Any]
Role = Literal["system", "user", "assistant"]


class BadRow(ValueError):
    """A row that cannot be read; the message says why, without saying where."""


@final
@frozen
class Message:
    """One turn of a conversation.

    ``context`` is the end of ``text`` that a template may set apart from what is asked (the
    ``input`` of an Alpaca row, which follows the instruction after a line break).
    """

    role: Role
    text: str
    context: str = ""

    @property
    def instruction(self) -> str:
        """The text without the context."""
        return self.text[: -len(self.context) - 1] if self.context else self.text


@final
@frozen
class Format:
    """A name, what a row of it looks like, whether one does, and how it is read."""

    name: str
    looks: str
    fits: Callable[[Row], bool]
    read: Callable[[Row], tuple[Message, ...]]


ROLES: Mapping[str, Role] = {
    "system": "system",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bing", "bard"), "assistant"),
}
"""What a turn calls its speaker, and who that is."""

CONVERSATIONS = ("conversations", "items", "conversation")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("problem", "solution"),
    ("input", "output"),
)
"""Fields of a prompt and its completion, in the order they are looked for."""

RAW = "\0text"
"""The field of what was read as raw text: files of rows name theirs, and never so."""


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise BadRow(f"{name!r} is {_kind(value)}, not text")
    return value


def _prompt(row: Row, name: str) -> str:
    text = _text(row, name)
    if not text.strip():
        raise BadRow(f"{name!r} is empty")
    return text


def _kind(value: object) -> str:
    return (
        "null"
        if value is None
        else f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"
    )


def _lacks(row: Row, wanted: Sequence[str]) -> BadRow:
    """No field of these names: with what the row calls it instead, if that is near."""
    keys = [str(key) for key in row]
    near = [key for name in wanted if (key := closest(name, keys))]
    hint = f" (did you misspell it as {near[0]!r}?)" if near else ""
    return BadRow(
        f"no {' or '.join(map(repr, wanted))}{hint}; it has: {', '.join(keys) or '(none)'}"
    )


def _system(row: Row) -> tuple[Message, ...]:
    text = row.get("system") or row.get("system_prompt") or ""
    return (Message("system", text),) if isinstance(text, str) and text.strip() else ()


def _answer(row: Row, *names: str) -> str:
    """The completion: it may be blank (real sets hold such rows; the token table leaves them out
    and counts them).
    """
    for name in names:
        if name in row:
            return _text(row, name)
    raise _lacks(row, names)


def _alpaca(row: Row) -> tuple[Message, ...]:
    if "instruction" not in row:
        raise _lacks(row, ["instruction"])
    text = _prompt(row, "instruction")
    context = "" if row.get("input") is None else _text(row, "input")
    prompt = (
        Message("user", f"{text}\n{context}", context) if context.strip() else Message("user", text)
    )
    return (*_system(row), prompt, Message("assistant", _answer(row, "output", "response")))


def _pair(row: Row, pairs: Sequence[tuple[str, str]]) -> tuple[Message, ...]:
    for prompt, answer in pairs:
        if prompt in row and answer in row:
            if isinstance(row[prompt], list) and isinstance(row[answer], list):
                return _conversation([*row[prompt], *row[answer]], f"{prompt!r} and {answer!r}")
            completion = Message("assistant", _text(row, answer))
            return (*_system(row), Message("user", _prompt(row, prompt)), completion)
    for prompt, answer in pairs:
        if prompt in row:
            raise _lacks(row, [answer])
    raise _lacks(row, list(dict.fromkeys(prompt for prompt, _ in pairs)))


def _gsm8k(row: Row) -> tuple[Message, ...]:
    messages = _pair(row, [("question", "answer")])
    if "####" not in messages[-1].text:
        raise BadRow("'answer' has no '#### ' line with the final number")
    return messages


def _turns(row: Row, names: Sequence[str]) -> tuple[Message, ...]:
    for name in names:
        if name in row:
            messages = _conversation(row[name], repr(name))
            return messages if messages[0].role == "system" else (*_system(row), *messages)
    raise _lacks(row, names)


def _conversation(value: object, where: str) -> tuple[Message, ...]:
    if (
        isinstance(value, Mapping)
        and value
        and all(isinstance(column, list) for column in value.values())
    ):
        # how tables store lists of structs: one list for each field
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise BadRow(f"{where} is {_kind(value)}, not a list of turns")
    messages = [_turn(turn, number) for number, turn in enumerate(value, start=1)]
    while messages and messages[-1].role != "assistant":
        messages.pop()  # nothing is learned from what nobody answered
    if not messages:
        raise BadRow(f"{where} has no answer")
    opening = [message.role for message in messages if message.role != "system"]
    if opening[0] == "assistant":
        raise BadRow(f"{where} begins with an answer")
    return tuple(messages)


def _turn(turn: object, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow(f"turn {number} is {_kind(turn)}, not an object")
    speaker = turn.get("role", turn.get("from"))
    text = turn.get("content", turn.get("value"))
    role = ROLES.get(speaker.casefold()) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f"turn {number} has the role {speaker!r}; available: {', '.join(ROLES)}")
    if not isinstance(text, str):
        raise BadRow(f"the text of turn {number} is {_kind(text)}, not text")
    if role == "user" and not text.strip():
        raise BadRow(f"the text of turn {number} is empty")
    return Message(role, text)


FORMATS: Mapping[str, Format] = {
    form.name: form
    for form in (
        Format(
            "chat",
            "messages = [{role, content}, …]",
            lambda row: isinstance(row.get("messages"), list | Mapping),
            lambda row: _turns(row, ["messages"]),
        ),
        Format(
            "sharegpt",
            "conversations (or items) = [{from, value}, …]",
            lambda row: any(isinstance(row.get(name), list | Mapping) for name in CONVERSATIONS),
            lambda row: _turns(row, CONVERSATIONS),
        ),
        Format(
            "alpaca",
            "instruction, input (may be empty or absent), output (or response)",
            lambda row: "instruction" in row and ("output" in row or "response" in row),
            _alpaca,
        ),
        Format(
            "gsm8k",
            "question, answer that ends in '#### N'",
            lambda row: (
                "question" in row and isinstance(row.get("answer"), str) and "####" in row["answer"]
            ),
            _gsm8k,
        ),
        Format(
            "math",
            "problem, solution",
            lambda row: "problem" in row and "solution" in row,
            lambda row: _pair(row, [("problem", "solution")]),
        ),
        Format(
            "prompt-completion",
            " or ".join(f"{prompt}, {answer}" for prompt, answer in PAIRS),
            lambda row: any(prompt in row and answer in row for prompt, answer in PAIRS),
            lambda row: _pair(row, PAIRS),
        ),
        Format(
            "text",
            (
                'text, learned from its beginning (has to be named, format = "text", but for .txt '
                "files)"
            ),
            lambda row: set(row) == {RAW},
            lambda row: (Message("assistant", _answer(row, "text", RAW)),),
        ),
    )
}
"""Every format by its name, in the order in which rows are tried."""


def detect(rows: Sequence[Row]) -> Format | None:
    """The format that most of ``rows`` look like (the first of :data:`FORMATS` among equals), None
    if none does.

    >>> detect([{"instruction": "Say hi.", "input": "", "output": "Hi."}]).name
    'alpaca'
    >>> detect([{"question": "1 + 1?", "answer": "2"}]).name
    'prompt-completion'
    >>> detect([{"text": "no prompt, no answer"}]) is None
    True
    """
    votes = {name: sum(form.fits(row) for row in rows) for name, form in FORMATS.items()}
    best = max(votes, key=votes.__getitem__)
    return FORMATS[best] if votes[best] else None
