"""What a person can do about an exception or about numbers that broke down: the errors that a
run ends with on record.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from hgms_core import ConfigError, HgmsError, NumericalError, OutOfMemory, Record
from hgms_core.registry import inside
from hgms_core.torch_errors import (
    first_line,
    is_freed_graph,
    is_overflow,
    once_differentiable,
    out_of_memory,
)


def explained(error: BaseException, step: int, kept: str, **components: object) -> HgmsError | None:
    """Return the error that a run ends with, for an exception in ``step``.

    None for an exception that the run can resume after, or that is unexpected. ``kept`` says which
    state is kept; ``components`` give memory hints.
    """
    if isinstance(error, NumericalError | ConfigError):
        return error
    if once_differentiable(error):
        return ConfigError(
            "no-second-derivative",
            f"step {step}: a loss has no second derivative: {first_line(error)}",
            place=("method", "hypergradient"),
            hint='use strategy = "difference" with the implicit hypergradient, or one of first '
            'order: through-step, carried, one-step with derivative = "difference"\n'
            "or use a model with eager attention, without activation checkpointing or "
            "micro-batches",
        )
    if is_overflow(error):
        return NumericalError(
            "not-finite",
            f"step {step}: a number of the method overflows the dtype of the run "
            f"({first_line(error)}); {kept}",
            place=("method",),
            hint="decrease lr, or the option that is too large",
        )
    if is_freed_graph(error):
        return ConfigError(
            "freed-graph",
            f"step {step}: the backward pass runs twice through one graph"
            f"{line_of(error, components.values())}, but the first pass frees it",
            place=("method",),
            hint="use torch.autograd.grad(…, retain_graph=True) for all gradients of a graph but "
            "the last; `slopes` and `backward` free the graph",
        )
    if out_of_memory(error):
        hints = [line for place, part in components.items() for line in _lighter(part, place)]
        return OutOfMemory(
            "out-of-memory",
            f"step {step}: out of memory: {first_line(error)}; {kept}",
            hint="\n".join(hints) or "use fewer rows or candidates at a time",
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


def check_numbers(record: Record, step: int) -> None:
    """Raise NumericalError for non-finite numbers, before the bad state replaces the good one."""
    kept = f"the state after step {step - 1} is kept"
    if record.get("finite_candidates", 1) == 0:
        raise NumericalError(
            "no-finite-candidate",
            f"step {step}: the scores of all candidates are non-finite: {record.get('scores')}; "
            f"{kept}",
            place=("method", "generator"),
            hint="decrease lr, or set clip",
        )
    if broken(record.get("hypergradient_norm")):
        raise NumericalError(
            "not-finite",
            f"step {step}: the hypergradient is not finite (norm {record['hypergradient_norm']}, "
            f"linear solve: {record.get('outcome', 'none')}); {kept}",
            place=("method", "hypergradient"),
            hint="increase the solver's ridge, or decrease the generator's lr",
        )
    if broken(record.get("upper_loss")):
        raise NumericalError(
            "not-finite",
            f"step {step}: the upper loss is {record['upper_loss']}; {kept}",
            place=("upper_loss",),
            hint="remove upper rows that are empty or not finite, or decrease the learning rates",
        )
    if broken(record.get("update_norm")) or "broken" in record:
        names = ", ".join(record.get("broken", ["theta"])[:8])
        distance = record.get("update_norm", "an unknown distance")
        raise NumericalError(
            "diverged",
            f"step {step}: {names} is no longer finite after a change of theta by {distance}; "
            f"{kept}",
            place=("method", "outer"),
            hint="decrease lr of the outer optimiser or of the lower level",
        )


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
