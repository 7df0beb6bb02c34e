"""What a person can do about an exception or about numbers that broke down: the errors that a
run ends with on record.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import statistics
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hgms_core import ConfigError, HgmsError, NumericalError, Record
from hgms_core.errors import OutOfMemory
from hgms_core.registry import inside
from hgms_core.torch_errors import (
    first_line,
    is_freed_graph,
    is_overflow,
    once_differentiable,
    out_of_memory,
)

BOUND = 1e8
"""By how much the upper loss or ‖θ‖ may grow before a run counts as diverged."""
STILL = 5
"""Steps in a row without any gradient in a leaf of θ that are worth a warning."""
FEW = 3
"""Steps after which a run without any gradient is an error: the first one may be 0 by definition,
as with twins that start at one point or a penalty that begins at 0.
"""
OUTLIER = 1e3
"""How many times longer than those around it a hypergradient is that gets a warning."""
NEAR = 5
"""Steps before and after that count as around a step."""


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


def check_growth(record: Record, step: int, first: float, size: float, start: float) -> None:
    """Raise NumericalError if the upper loss, or ‖θ‖ (``size``), is more than :data:`BOUND` times
    its ``first`` value, or ``start``; of values below 1, more than the bound itself.
    """
    loss = record.get("upper_loss")
    grown = [
        f"{name} grew from {before:.4g} to {now:.4g}"
        for name, now, before in (
            ("the upper loss", loss, first),
            ("the norm of theta", size, start),
        )
        if isinstance(now, float) and abs(now) > BOUND * max(1.0, abs(before))
    ]
    if grown:
        raise NumericalError(
            "diverged",
            f"step {step}: {' and '.join(grown)}; the state after step {step - 1} is kept",
            place=("method",),
            hint="decrease lr of the outer optimiser or of the lower level",
        )


def leaves_without_gradient(row: Record, leaves: Iterable[str]) -> set[str]:
    """The leaves of θ whose hypergradient is exactly 0 in a step of a method that learns θ."""
    if not row.get("step") or row.get("cost_upper_gradients") == 0:
        return set()
    if row.get("hypergradient_norm") == 0:
        return set(leaves)
    return set(str(row["zero_gradient"]).split(", ")) if "zero_gradient" in row else set()


def still_leaves(
    records: Sequence[Record], leaves: Sequence[str], least: int = STILL
) -> dict[str, int]:
    """The leaves of θ without a gradient in each of the ``least`` last steps or more, and the step
    since which.

    >>> rows = [{"step": 1, "hypergradient_norm": 0.5}]
    >>> rows += [{"step": step, "hypergradient_norm": 0.0} for step in range(2, 8)]
    >>> still_leaves(rows, ["w"])
    {'w': 2}
    """
    since: dict[str, int] = {}
    remaining = set(leaves)
    for row in reversed(records):
        remaining &= leaves_without_gradient(row, leaves)
        if not remaining:
            break
        since |= dict.fromkeys(remaining, int(row["step"]))
    last = int(records[-1]["step"]) if records else 0
    return {name: since[name] for name in leaves if last - since.get(name, last) >= least - 1}


def still_note(since: Mapping[str, int]) -> str:
    """The warning about leaves of θ without a gradient."""
    names = [f"{name} (since step {step})" for name, step in list(since.items())[:8]]
    more = f" and {len(since) - 8} more" if len(since) > 8 else ""
    return (
        f"the hypergradient is exactly 0 for {', '.join(names)}{more}, so no step changes it; look "
        "for saturated weights, rounding, or units that are off"
    )


def outlier_note(records: Sequence[Record]) -> str:
    """The warning about a hypergradient far longer than those of the steps around it, after which
    the upper loss rose; empty if there is none.

    >>> rows = [{"step": 1, "hypergradient_norm": 8.8e4, "upper_loss": 0.56}]
    >>> rows += [
    ...     {"step": step, "hypergradient_norm": 0.6, "upper_loss": 0.69} for step in range(2, 6)
    ... ]
    >>> outlier_note(rows).partition(",")[0]
    'the hypergradient of step 1 is 8.8e+04 long'
    """
    rows = [row for row in records if isinstance(row.get("hypergradient_norm"), float)]
    for position, (row, following) in enumerate(itertools.pairwise(rows)):
        around = rows[max(0, position - NEAR) : position] + rows[position + 1 :][:NEAR]
        if len(around) < 3:
            continue
        length = row["hypergradient_norm"]
        usual = statistics.median(other["hypergradient_norm"] for other in around)
        before: Any = row.get("upper_loss")
        after: Any = following.get("upper_loss")
        rose = before is not None and after is not None and after > before
        if usual and length > OUTLIER * usual and rose:
            return (
                f"the hypergradient of step {row['step']} is {length:.2g} long, that of the steps "
                f"around it {usual:.2g}, and the upper loss rose from {before:.4g} to "
                f"{after:.4g}; set clip of the outer optimiser, or eps_root of unrolled AdamW"
            )
    return ""


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
