"""The formats of rows of text, and the conversion of each into a conversation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, final

from attrs import frozen

from hgms_core.errors import closest

Row = Mapping[str, Any]
Role = Literal["system", "user", "assistant"]


class BadRow(ValueError):
    """A row that cannot be read; the message contains the reason, without the location."""


@final
@frozen
class Message:
    """One turn of a conversation.

    ``context`` is the end of ``text`` that a template may separate from the instruction (the
    ``input`` of an Alpaca row, which follows the instruction after a line break). An answer that is
    not ``learned`` (``"weight": 0``) is part of the prompt and excluded from the loss.
    """

    role: Role
    text: str
    context: str = ""
    learned: bool = True

    @property
    def instruction(self) -> str:
        """The text without the context."""
        return self.text[: -len(self.context) - 1] if self.context else self.text


@final
@frozen
class Format:
    """A name, a description of its rows, a test for a row, and a reader."""

    name: str
    looks: str
    fits: Callable[[Row], bool]
    read: Callable[[Row], tuple[Message, ...]]


ROLES: Mapping[str, Role] = {
    "system": "system",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bing", "bard"), "assistant"),
}
"""Names of speakers in turns, and their roles."""

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
"""Fields of a prompt and its completion, in the order of the search."""


MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})
DECIDING = MEDIA | {"context", "history", "documents", "tools", "functions"}
"""Columns that an answer may depend on.

A row with such a column is a bad row if its format does not read the column.
"""
DECIDING_OF_TEXTS = DECIDING | {"input", "instruction"}
"""The same for rows that are not conversations: in conversations such columns repeat a turn."""
DECIDING_OF_TURNS = MEDIA | {
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
}
"""The same for the keys of a turn: a row with such a key is a bad row."""
VERDICTS = frozenset({"label", "kto_tag", "is_correct", "correct", "accepted", "is_accepted"})
"""Columns that mark an answer as bad if they are false: such a row is a bad row."""
WEIGHTS = ("weight", "train", "loss")
"""Keys of a turn that determine whether it is learned: 1 or true, 0 or false."""


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise BadRow(f"{name!r} is {_kind(value)}, not text")
    return value


def _learnable(row: Row, name: str) -> str:
    """Return the text of an answer; null is an empty text."""
    return "" if row[name] is None else _text(row, name)


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
    """Return the error for missing fields, with a similar field of the row if there is one."""
    keys = [str(key) for key in row]
    near = [key for name in wanted if (key := closest(name, keys)) and key not in wanted]
    hint = f" (did you misspell it as {near[0]!r}?)" if near else ""
    return BadRow(
        f"no {' or '.join(map(repr, wanted))}{hint}; it has: {', '.join(keys) or '(none)'}"
    )


def _system(row: Row) -> tuple[Message, ...]:
    text = row.get("system") or row.get("system_prompt") or ""
    if not isinstance(text, str):
        raise BadRow(f"the system prompt is {_kind(text)}, not text")
    return (Message("system", text),) if text.strip() else ()


def _answer(row: Row, *names: str) -> str:
    """Return the completion, which may be blank or null.

    Real data sets contain such rows; the token table excludes and counts them.
    """
    for name in names:
        if name in row:
            return _learnable(row, name)
    raise _lacks(row, names)


def _alpaca(row: Row) -> tuple[Message, ...]:
    if "instruction" not in row:
        raise _lacks(row, ["instruction"])
    text = _prompt(row, "instruction")
    # Dolly names the input "context".
    given = next((name for name in ("input", "context") if not is_empty(row.get(name))), None)
    _check_columns(row, DECIDING - {given})
    context = "" if given is None else _text(row, given)
    prompt = (
        Message("user", f"{text}\n{context}", context) if context.strip() else Message("user", text)
    )
    return (*_system(row), prompt, Message("assistant", _answer(row, "output", "response")))


def _pair(row: Row, pairs: Sequence[tuple[str, str]]) -> tuple[Message, ...]:
    for prompt, answer in pairs:
        if prompt in row and answer in row:
            if isinstance(row[prompt], list) and isinstance(row[answer], list):
                _check_columns(row, DECIDING)
                return _conversation([*row[prompt], *row[answer]], f"{prompt!r} and {answer!r}")
            _check_columns(row, DECIDING_OF_TEXTS - {prompt})
            completion = Message("assistant", _learnable(row, answer))
            return (*_system(row), Message("user", _prompt(row, prompt)), completion)
    if here := [prompt for prompt, _ in pairs if prompt in row]:
        raise _lacks(row, [answer for prompt, answer in pairs if prompt == here[0]])
    raise _lacks(row, list(dict.fromkeys(prompt for prompt, _ in pairs)))


def _raw_text(row: Row) -> tuple[Message, ...]:
    _check_columns(row, DECIDING_OF_TEXTS)
    return (Message("assistant", _answer(row, "text")),)


def _check_columns(row: Row, deciding: Collection[str | None]) -> None:
    """Raise BadRow for a column in ``deciding``, and for a row that is marked as bad."""
    for name, value in row.items():
        if name in VERDICTS and str(value).strip().casefold() == "false":
            raise BadRow(f"{name!r} is false: the data mark the answer as bad")
        if name in deciding and not is_empty(value):
            raise BadRow(
                f"{name!r} is not read, but the answer may depend on it; to read it, set "
                f"fields = {{ input = {name!r} }} (alpaca rows); to ignore it, set "
                f"fields = {{ ignored = {name!r} }}"
            )


def _turns(row: Row, names: Sequence[str]) -> tuple[Message, ...]:
    for name in names:
        if name in row:
            _check_columns(row, DECIDING)
            messages = _conversation(row[name], repr(name))
            system = _system(row)
            if messages[0].role != "system":
                return (*system, *messages)
            if system and system[0].text.strip() != messages[0].text.strip():
                raise BadRow(f"the row and the turns of {name!r} have different system prompts")
            return messages
    raise _lacks(row, names)


def _conversation(value: object, where: str) -> tuple[Message, ...]:
    turns = turns_of(value)
    if turns is None:
        raise BadRow(f"{where} is {_kind(value)}, not a list of turns")
    messages = [_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    while messages and messages[-1].role != "assistant":
        messages.pop()  # a prompt without an answer is excluded
    if not messages:
        raise BadRow(f"{where} has no answer")
    opening = [message.role for message in messages if message.role != "system"]
    if opening[0] == "assistant":
        raise BadRow(f"{where} begins with an answer")
    return tuple(messages)


def turns_of(value: object) -> list[Any] | None:
    """Return the turns of a conversation; None if the value is not a list of turns."""
    if (
        isinstance(value, Mapping)
        and value
        and all(isinstance(column, list) for column in value.values())
    ):
        # Tables store lists of structs as one list per field.
        return [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]
    return value if isinstance(value, list) else None


def _turn(turn: object, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow(f"turn {number} is {_kind(turn)}, not an object")
    speaker = turn.get("role", turn.get("from"))
    text = turn.get("content", turn.get("value"))
    role = ROLES.get(speaker.casefold()) if isinstance(speaker, str) else None
    if role is None:
        raise BadRow(f"turn {number} has the role {speaker!r}; available: {', '.join(ROLES)}")
    for key in DECIDING_OF_TURNS & turn.keys():
        if not is_empty(turn[key]):
            raise BadRow(f"turn {number} has {key!r}, which is not read, but belongs to the turn")
    if text is None and role == "assistant":
        text = ""
    if not isinstance(text, str):
        raise BadRow(f"the text of turn {number} is {_kind(text)}, not text")
    if role == "user" and not text.strip():
        raise BadRow(f"the text of turn {number} is empty")
    return Message(role, text, learned=role != "assistant" or _is_learned(turn, number))


def _is_learned(turn: Mapping[Any, Any], number: int) -> bool:
    given = {key: turn[key] for key in WEIGHTS if turn.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadRow(f"{key}={value!r} of turn {number} is neither 0 nor 1")
    return all(given.values())


def is_empty(value: object) -> bool:
    """Return whether a value of a row is empty.

    Empty values are null, blank text, and an empty list or object (also as text, as some tables
    store them).
    """
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}")
    return value is None or value in ([], {})


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
            "prompt-completion",
            " or ".join(f"{prompt}, {answer}" for prompt, answer in PAIRS),
            lambda row: any(prompt in row and answer in row for prompt, answer in PAIRS),
            lambda row: _pair(row, PAIRS),
        ),
        Format(
            "text",
            'text, learned from its beginning (must be named: format = "text")',
            lambda row: False,
            _raw_text,
        ),
    )
}
"""All formats by name, in the order of detection."""


def detect(rows: Sequence[Row]) -> Format | None:
    """Return the format that most of ``rows`` have; None if no row has a known format.

    If several formats have equal counts, return the first one in :data:`FORMATS`.

    Examples
    --------
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
