"""Structured errors: each error that HGMS raises on purpose has a code, a place and a remedy.

Programs and tests compare ``code`` and ``place``; users read ``str(error)``. One function composes
the text from the parts, so no code parses or edits the text of an error. The command line prints
the text without a traceback and exits with ``exit_code`` (2: the input is wrong; 1: the run
failed).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, Self

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ErrorGroup",
    "HgmsError",
    "MissingExtra",
    "NumericalError",
    "OutOfMemory",
    "Place",
    "PluginError",
    "closest",
    "join_place",
    "one_of",
    "raise_all",
    "unknown_name",
]

Place = tuple[str | int, ...]
"""The path to a value, outermost first: ``("generator", "diversity", 0, "std")``."""

LINE = 2000
LINES = 200
MANY = 40
"""Limits of a message: characters per line, lines, and names in a list. A file may contain a key
of several megabytes.
"""


class HgmsError(Exception):
    """An error that a user can act on.

    Parameters
    ----------
    code
        a stable identifier in kebab case, such as ``"unknown-option"``.
    message
        One sentence with the actual value: ``"steps=0 must be at least 1"``.
    place
        The path to the value. Callers prepend their part with :meth:`at`.
    hint
        One imperative sentence per line.
    install
        The command that installs a missing package.
    did_you_mean
        The nearest valid spellings, the nearest first.

    Examples
    --------
    >>> error = HgmsError("out-of-range", "steps=0 must be at least 1", place=("steps",))
    >>> print(error.at("generator"))
    steps=0 must be at least 1 (generator.steps)
    """

    exit_code = 2

    def __init__(
        self,
        code: str,
        message: str,
        *,
        place: Place = (),
        hint: str | None = None,
        install: str | None = None,
        did_you_mean: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.place = place
        self.hint = hint
        self.install = install
        self.did_you_mean = tuple(did_you_mean)

    @property
    def errors(self) -> tuple[HgmsError, ...]:
        """The error itself, or the errors of a group."""
        return (self,)

    def at(self, *outer: str | int) -> Self:
        """Return the same error with ``outer`` in front of its place."""
        return type(self)(**{**self.as_dict(), "place": (*outer, *self.place)})

    def as_dict(self) -> dict[str, Any]:
        """Return the arguments by name, for a log or another process."""
        return {
            "code": self.code,
            "message": self.message,
            "place": self.place,
            "hint": self.hint,
            "install": self.install,
            "did_you_mean": self.did_you_mean,
        }

    def lines(self) -> list[str]:
        """Return the text: the message with its place, then one line per remedy."""
        message = [*self.message.split("\n", LINES)]
        if self.place:
            message[0] = f"{message[0]} ({join_place(self.place)})"
        remedies = []
        if self.did_you_mean:
            remedies.append(f"did you mean {' or '.join(map(repr, self.did_you_mean))}?")
        if self.hint:
            remedies += self.hint.split("\n", LINES)
        if self.install:
            remedies.append(f"install it: {self.install}")
        return [*message, *remedies]

    def __str__(self) -> str:
        return "\n  ".join(shorten(self.lines()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not survive pickling without this, and worker
        # processes send their errors back pickled.
        return partial(type(self), **self.as_dict()), ()


class ConfigError(HgmsError):
    """A configuration file, a command-line option or a constructor argument is wrong."""


class PluginError(HgmsError):
    """A plugin cannot be loaded, is incomplete, or clashes with another."""


class MissingExtra(HgmsError):
    """An optional package is not installed; ``install`` is the command that installs it."""


class DataError(HgmsError):
    """Data files are missing, truncated or inconsistent."""


class CheckpointError(HgmsError):
    """A run folder or one of its files cannot be used. It is left unchanged."""


class NumericalError(HgmsError):
    """The numbers of a run are not finite. The last good state is kept."""

    exit_code = 1


class OutOfMemory(HgmsError):
    """The memory of the device or machine is too small. The last good state is kept."""

    exit_code = 1


class ErrorGroup(ConfigError):
    """All errors of one file or one call, in the order of their places.

    Examples
    --------
    >>> wrong = HgmsError("out-of-range", "lr=0 must be greater than 0", place=("lr",))
    >>> print(ErrorGroup([wrong, wrong]).at("outer"))
    2 errors:
      lr=0 must be greater than 0 (outer.lr)
      lr=0 must be greater than 0 (outer.lr)
    """

    def __init__(self, errors: Sequence[HgmsError]) -> None:
        super().__init__("several-errors", f"{len(errors)} errors")
        self._errors = tuple(errors)

    @property
    def errors(self) -> tuple[HgmsError, ...]:
        return self._errors

    def at(self, *outer: str | int) -> Self:
        return type(self)([error.at(*outer) for error in self.errors])

    def as_dict(self) -> dict[str, Any]:
        return {"errors": self.errors}

    def lines(self) -> list[str]:
        """Return the number of errors, then the lines of each error."""
        text = [self.message + ":"]
        for error in self.errors:
            first, *remedies = error.lines()
            text += [first, *(f"  {remedy}" for remedy in remedies)]
        return text


def raise_all(errors: Sequence[HgmsError]) -> NoReturn:
    """Raise a single error unchanged, or several errors as one :class:`ErrorGroup`."""
    raise errors[0] if len(errors) == 1 else ErrorGroup(errors)


def join_place(place: Place) -> str:
    """Return the place as text; a file name is separated by a colon.

    Examples
    --------
    >>> join_place(("generator", "diversity", 0, "std"))
    'generator.diversity[0].std'
    >>> join_place(("runs.toml", "method", "count")), join_place(("train.jsonl", 12))
    ('runs.toml: method.count', 'train.jsonl:12')
    """
    text = ""
    after_file = False
    for part in place:
        if isinstance(part, int):
            text += f":{part}" if after_file else f"[{part}]"
        elif text:
            text += f": {part}" if after_file else f".{part}"
        else:
            text = part
        after_file = isinstance(part, str) and re.fullmatch(r"[\w*-]+", part) is None
    return text


def shorten(lines: Iterable[str]) -> list[str]:
    """Return the lines with the middle of long lines removed, and at most LINES of them."""
    kept = list(lines)
    if len(kept) > LINES:
        kept[LINES:] = ["… and more"]
    return [
        line
        if len(line) <= LINE
        else f"{line[: LINE // 2]} … ({len(line):,} characters) … {line[-LINE // 4 :]}"
        for line in kept
    ]


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is most similar to ``word``, ignoring case, or ``None``.

    Examples
    --------
    >>> closest("CGG", ["cg", "minres"])
    'cg'
    """
    if len(word) > 100:
        # No name is that long, and each choice would be compared letter by letter.
        return None
    folded = {choice.casefold(): choice for choice in choices}
    match = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    return folded[match[0]] if match else None


def unknown_name(
    kind: str, word: str, choices: Iterable[str], place: Place = (), label: str = ""
) -> ConfigError:
    """Return the error ``unknown-<kind>`` for a misspelt name, with the nearest valid name.

    ``label`` replaces the kind in the text.

    Examples
    --------
    >>> print(unknown_name("linear solver", "cgg", ["cg", "minres"]))
    unknown linear solver 'cgg'
      did you mean 'cg'?
      available: cg, minres
    """
    names = sorted(choices)
    near = closest(word, names)
    if len(names) > MANY:
        nearest = difflib.get_close_matches(word[:100], names, 8, 0.0) if word else names[:8]
        names = [*sorted(nearest), f"and {len(names) - 8} others"]
    return ConfigError(
        f"unknown-{kind.replace(' ', '-')}",
        f"unknown {label or kind} {word!r}",
        place=place,
        hint=f"available: {', '.join(names) or '(none)'}",
        did_you_mean=() if near is None else (near,),
    )


def one_of(name: str, value: object, choices: Collection[str], place: Place | None = None) -> None:
    """Require that ``value`` is one of ``choices``, else raise ConfigError ``unknown-choice``.

    The place is ``(name,)`` by default.
    """
    if value not in choices:
        where = (name,) if place is None else place
        raise unknown_name("choice", str(value), choices, where, label=name)
