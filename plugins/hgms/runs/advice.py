"""What a person can do about an exception or about numbers that broke down: the errors that a
run ends with on record.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs

from hgms_core import (
    ConfigError,
    HgmsError,
    NumericalError,
    OutOfMemory,
    Record,
    once_differentiable,
    out_of_memory,
)
from hgms_core.registry import inside


def _too_large(error: BaseException) -> bool:
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and "cannot be converted to type" in text
        and "overflow" in text
    )


def _freed(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "backward through the graph a second time" in str(
        error
    )


_ADVICE: tuple[tuple[Callable[[BaseException], bool], type[HgmsError], str], ...] = (
    (
        once_differentiable,
        ConfigError,
        "step {step}: a loss has no second derivative here: {reason}\n"
        "  take a hypergradient of first order (through-step, carried, one-step with derivative "
        "= 'difference'), or\n"
        "  products by differences (implicit with strategy = 'difference'); or let the model do "
        "without what stops it:\n"
        "  eager attention, no activation checkpointing, no micro-batches",
    ),
    (
        _too_large,
        NumericalError,
        "step {step}: a number of the method is too large for the run's dtype ({reason})\n"
        "  {kept}; lower the lr, or whichever number is so large",
    ),
    (
        _freed,
        ConfigError,
        "step {step}: a graph is gone through a second time{where}, and the first time has freed "
        "it\n"
        "  take several gradients of one pass by torch.autograd.grad(…, retain_graph=True), all "
        "but the last: `slopes` and\n"
        "  `backward` free the graph",
    ),
    (out_of_memory, OutOfMemory, "step {step}: out of memory: {reason}\n  {kept}\n  {lighter}"),
)


def explained(error: BaseException, step: int, kept: str, **components: object) -> HgmsError | None:
    """The error that a run ends with on record, for an exception in ``step``; None for one that it
    can be resumed after, or that nobody expected. ``kept`` says what is saved; ``components`` are
    asked what would take less memory.
    """
    if isinstance(error, NumericalError | ConfigError):
        return error
    for recognised, kind, message in _ADVICE:
        if recognised(error):
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            parts = components.items() if kind is OutOfMemory else ()
            advice = "\n  ".join(line for place, part in parts for line in _lighter(part, place))
            advice = (
                advice or "let the method and the problem take fewer rows or candidates at a time"
            )
            where = line_of(error, components.values()) if "{where}" in message else ""
            return kind(
                message.format(step=step, reason=reason, kept=kept, lighter=advice, where=where)
            )
    return None


def line_of(error: BaseException, components: Iterable[object]) -> str:
    """The innermost line of the files that the components are written in, which is nearer to what
    is wrong than torch's.
    """
    files = set()
    for cls in (cls for part in components for cls in _classes(part)):
        # a class of `python -c` or a notebook, or one in C: it has no file
        with contextlib.suppress(OSError, TypeError):
            files.add(inspect.getfile(cls))
    lines = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files
    ]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


def _classes(component: object) -> Iterator[type]:
    """The class of a component and those of its parts."""
    cls = type(component)
    yield cls
    for field in attrs.fields(cls) if attrs.has(cls) else ():
        yield from _classes(getattr(component, field.name))


_UNSOUND: tuple[tuple[Callable[[Record], bool], str], ...] = (
    (
        lambda record: record.get("finite_candidates", 1) == 0,
        (
            "none of the candidates is finite (scores: {scores})\n"
            "  {kept}; lower the generator's lr, or set its clip"
        ),
    ),
    (
        lambda record: broken(record.get("hypergradient_norm")),
        "the hypergradient is not finite (norm {hypergradient_norm}, linear solve: {outcome})\n"
        "  {kept}; raise the solver's ridge, or lower the generator's lr",
    ),
    (
        lambda record: broken(record.get("upper_loss")),
        "the upper loss is {upper_loss}\n"
        "  {kept}; look for upper rows that are empty or not finite, or lower the learning rates",
    ),
    (
        lambda record: broken(record.get("update_norm")) or "broken" in record,
        "{broken} stopped being finite (θ moved by {update_norm})\n"
        "  {kept}; lower the outer optimiser's lr, or the lower level's",
    ),
)


def check_numbers(record: Record, step: int) -> None:
    """Stops a run whose numbers broke down, before the broken state replaces the good one."""
    for unsound, message in _UNSOUND:
        if unsound(record):
            words = {
                "scores": None,
                "outcome": "none",
                "update_norm": "an unknown distance",
                **record,
            }
            words |= {
                "broken": ", ".join(record.get("broken", ["θ"])[:8]),
                "kept": f"the state after step {step - 1} is kept",
            }
            raise NumericalError(f"step {step}: {message.format(**words)}")


def broken(value: object) -> bool:
    """Whether it is a number that is not finite."""
    return isinstance(value, float) and not math.isfinite(value)


def _lighter(component: object, place: str) -> Iterator[str]:
    """What a component and its parts say would take less memory (``lighter``), each with its
    place in the configuration.
    """
    cls = type(component)
    advice: list[str] = getattr(component, "lighter", list)()
    if advice:
        yield f"{place}: {', '.join(advice)}"
    for field in attrs.fields(cls) if attrs.has(cls) else ():
        part = getattr(component, field.name)
        if attrs.has(type(part)):
            yield from _lighter(
                part, place if field.name == inside(cls) else f"{place}.{field.name}"
            )
