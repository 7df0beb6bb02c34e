"""Errors a user can act on: what went wrong, where, the nearest right spelling, what there is, what
to do next.

Everything raised on purpose derives from :class:`HgmsError`; the command line prints its message
without a traceback and leaves with its ``exit_code`` (2: the input was wrong; 1: the run itself
failed).
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

LINE = 2000
LINES = 200
MANY = 40
"""Characters of a message's line, lines of a message (a file may hold a key of megabytes), and
names in a list, at most.
"""


class HgmsError(Exception):
    """Base of all errors meant for the person at the keyboard. What is too long to be read is
    shortened.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


def shortened(text: str) -> str:
    """The text with the middle of its long lines left out, and at most LINES of them."""
    lines = text.split("\n", LINES)
    if len(lines) > LINES:
        lines[LINES:] = ["  … and more"]
    return "\n".join(
        line
        if len(line) <= LINE
        else f"{line[: LINE // 2]} … ({len(line):,} characters) … {line[-LINE // 4 :]}"
        for line in lines
    )


class ConfigError(HgmsError):
    """A configuration file, ``--set`` or constructor argument is wrong."""


class UnknownComponent(HgmsError):
    """No component of that name is registered."""


class PluginError(HgmsError):
    """A plugin failed to load, is incomplete, or clashes with another."""


class MissingExtra(HgmsError):
    """An optional dependency is not installed; the message carries the line that installs it."""


class DataError(HgmsError):
    """Data files are missing, truncated or inconsistent."""


class CheckpointError(HgmsError):
    """A checkpoint or run folder cannot be used; it is named and left untouched."""


class NumericalError(HgmsError):
    """The run cannot go on (for example: every candidate is non-finite); the last good state is
    kept.
    """

    exit_code = 1


class OutOfMemory(HgmsError):
    """The device's memory, or the machine's, is not enough; the message says what to lower, and the
    last good state is kept.
    """

    exit_code = 1


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory was not enough: torch's own class, or a RuntimeError of
    an allocator or library.

    >>> out_of_memory(
    ...     RuntimeError(
    ...         "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    ...     )
    ... )
    True
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # the last of cuBLAS, cuSOLVER, cuDNN and their like, which have memory of their own
    signs = ("can't allocate memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def once_differentiable(error: BaseException) -> bool:
    """Whether torch has a first derivative here but no second one, nor one in forward mode: of a
    fused kernel, or through activations that are computed again."""
    text = str(error)
    missing = "derivative for aten::" in text and "not implemented" in text
    again = type(error).__name__ == "CheckpointError" and text.startswith("torch.utils.checkpoint")
    signs = (
        "differentiate twice a function",
        "don't yet support saved tensor hooks",  # activations computed again, under torch.func
        # a kernel of another library, under torch.func
        "must override the setup_context staticmethod",
        "no autograd formula was registered",  # the backward kernel of another library
        "Trying to use forward AD with",
    )
    return isinstance(error, RuntimeError) and (
        missing or again or any(sign in text for sign in signs)
    )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Inside, torch's errors about a loss that is no pure function, or whose compiled code cannot
    be differentiated again, become a :class:`ConfigError` with the way out."""
    try:
        yield
    except RuntimeError as error:
        for sign, message in _UNSOUND:
            if sign in str(error):
                raise ConfigError(message) from error
        raise


VARIES = (
    "a loss has another value when it is called again with the same arguments\n"
    "  it draws random numbers (of numpy, of `random`), or changes its rows, or what it holds, "
    "in place: write neither"
)
DRAWS = (
    "a loss draws random numbers, as dropout does in training mode\n"
    "  put the module into evaluation mode (`module.eval()`), or draw before the loss and hand "
    "it over in θ, x or the batch\n"
    "  in `Problem.of_module` layers of nn.Dropout may stay; dropout inside attention or from "
    "torch.nn.functional may not"
)
_CHANGES = (
    "a loss changes tensors that it holds, as batch normalisation in training mode changes its "
    "running statistics\n"
    "  put the module into evaluation mode (`module.eval()`), or build its normalisation with "
    "`track_running_stats=False`\n"
    "  `Problem.of_module` takes it as it is"
)
_COMPILED = (
    "a loss goes through torch.compile, and compiled code cannot be differentiated twice backward\n"
    '  take `strategy = "jvp"` or "difference", or the module as it was before torch.compile'
)
_UNSTACKED = (
    "torch cannot stack an operation of a loss, so candidates cannot be evaluated at once\n"
    '  take `mode = "loop"` in the generator and the selector; `Problem.of_module` does so for '
    "recurrent layers"
)
_UNSOUND = (
    ("randomness error mode", DRAWS),
    ("would mutate a captured Tensor", _CHANGES),
    ("Batch norm got a batched tensor as input while the running_mean", _CHANGES),
    ("Batching rule not implemented", _UNSTACKED),
    ("compiled with non-empty donated buffers", _COMPILED),
    ("aot_autograd does not currently support double backward", _COMPILED),
)


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like ``word``, ignoring case, or ``None``.

    >>> closest("CGG", ["cg", "minres"])
    'cg'
    """
    if len(word) > 100:
        # nothing is called so, and it would be compared letter by letter with every choice
        return None
    folded = {choice.casefold(): choice for choice in choices}
    match = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    return folded[match[0]] if match else None


def unknown(what: str, word: str, choices: Iterable[str]) -> str:
    """The sentence for a misspelt name, with a suggestion where one is close and the list: of MANY
    names the nearest.

    >>> print(unknown("linear solver", "cgg", ["cg", "minres"]))
    unknown linear solver 'cgg'; did you mean 'cg'?
      available: cg, minres
    """
    names = sorted(choices)
    word = shortened(word)
    hint = f"did you mean {near!r}?" if (near := closest(word, names)) else "no close match."
    if len(names) > MANY:
        names = [
            *difflib.get_close_matches(word[:100], names, 8, 0.0),
            f"… and {len(names) - 8} more",
        ]
    return f"unknown {what} {word!r}; {hint}\n  available: {', '.join(names) or '(none)'}"


def one_of(what: str, value: object, choices: Collection[str]) -> None:
    """Nothing where ``value`` is one of ``choices``, else a :class:`ConfigError` with the text
    of :func:`unknown`.
    """
    if value not in choices:
        raise ConfigError(unknown(what, str(value), choices))


def choice(*words: str) -> Callable[[object, Any, object], None]:
    """One of some words.

    >>> from attrs import field, frozen
    >>> @frozen
    ... class Step:
    ...     rule: str = field(default="sgd", validator=choice("sgd", "adamw"))
    >>> Step("adam")
    Traceback (most recent call last):
        ...
    hgms_core.errors.ConfigError: unknown rule 'adam'; did you mean 'adamw'?
      available: adamw, sgd
    """

    def check(instance: object, attribute: Any, value: object) -> None:
        one_of(attribute.name, value, words)

    return check
