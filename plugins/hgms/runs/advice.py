"""Remedies for exceptions and for numbers that are not finite or grow too much.

A run that ends with an error records an error from this module.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hgms.facts import walk_parts
from hgms.torch_errors import is_freed_graph, is_overflow, once_differentiable
from hgms_core import ConfigError, HgmsError, NumericalError, Record
from hgms_core.errors import OutOfMemory
from hgms_core.torch_errors import first_line, out_of_memory

BOUND = 1e8
"""Factor by which the upper loss or ‖θ‖ may grow before a run counts as diverged."""
TOO_FAST = (
    "decrease lr of the outer optimiser or of the lower level\n"
    "for a fixed lr of the lower level, set method.max_curvature below 2/lr"
)
STILL = 5
"""Steps in succession without a gradient in a leaf of θ that cause a warning."""


def explain_error(
    error: BaseException, step: int, kept: str, **components: object
) -> HgmsError | None:
    """Return the error that a run ends with, for an exception in ``step``.

    The result is ``None`` for an unexpected exception, and if the run can resume after the
    exception. ``kept`` describes the state that is kept. ``components`` provide memory hints.
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
        hints = [line for place, part in components.items() for line in _memory_hints(part, place)]
        return OutOfMemory(
            "out-of-memory",
            f"step {step}: out of memory: {first_line(error)}; {kept}",
            hint="\n".join(hints) or "use fewer rows or candidates at a time",
        )
    return None


def line_of(error: BaseException, components: Iterable[object]) -> str:
    """Return the innermost line of an error in the files that define the components.

    This line is closer to the cause than the line in torch.
    """
    files = set()
    for part in components:
        for _, item in walk_parts(part):
            # no file: a class of `python -c`, of a notebook, or in C
            with contextlib.suppress(OSError, TypeError):
                files.add(inspect.getfile(type(item)))
    lines = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files
    ]
    return f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""


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
    if is_broken(record.get("hypergradient_norm")):
        raise NumericalError(
            "not-finite",
            f"step {step}: the hypergradient is not finite (norm {record['hypergradient_norm']}, "
            f"linear solve: {record.get('outcome', 'none')}); {kept}",
            place=("method", "hypergradient"),
            hint="increase the solver's ridge, or decrease the generator's lr",
        )
    if is_broken(record.get("upper_loss")):
        raise NumericalError(
            "not-finite",
            f"step {step}: the upper loss is {record['upper_loss']}; {kept}",
            place=("upper_loss",),
            hint="remove upper rows that are empty or not finite, or decrease the learning rates",
        )
    if is_broken(record.get("update_norm")) or "broken" in record:
        names = ", ".join(record.get("broken", ["theta"])[:8])
        distance = record.get("update_norm", "an unknown distance")
        raise NumericalError(
            "diverged",
            f"step {step}: {names} is no longer finite after a change of theta by {distance}; "
            f"{kept}",
            place=("method", "outer"),
            hint=TOO_FAST,
        )


def check_growth(record: Record, step: int, first: float, size: float, start: float) -> None:
    """Raise NumericalError if the upper loss or ‖θ‖ (``size``) has grown too much.

    The limit is :data:`BOUND` times the initial value: ``first`` for the loss, ``start`` for ‖θ‖.
    For initial values below 1, the limit is the bound itself.
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
            hint=TOO_FAST,
        )


def leaves_without_gradient(row: Record, leaves: Iterable[str]) -> set[str]:
    """Return the leaves of θ whose hypergradient is exactly 0 in a step that learns θ."""
    if not row.get("step") or row.get("cost_upper_gradients") == 0:
        return set()
    if row.get("hypergradient_norm") == 0:
        return set(leaves)
    return set(str(row["zero_gradient"]).split(", ")) if "zero_gradient" in row else set()


def still_leaves(records: Sequence[Record], leaves: Sequence[str]) -> dict[str, int]:
    """Return the leaves of θ without a gradient in at least the :data:`STILL` last steps.

    The values are the first steps of these periods.

    Examples
    --------
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
    return {name: since[name] for name in leaves if last - since.get(name, last) >= STILL - 1}


def still_note(since: Mapping[str, int]) -> str:
    """Return the warning about leaves of θ without a gradient."""
    names = [f"{name} (since step {step})" for name, step in list(since.items())[:8]]
    more = f" and {len(since) - 8} more" if len(since) > 8 else ""
    return (
        f"the hypergradient is exactly 0 for {', '.join(names)}{more}, so no step changes it; look "
        "for saturated weights, rounding, or units that are off"
    )


def is_broken(value: object) -> bool:
    """Return whether the value is a number that is not finite."""
    return isinstance(value, float) and not math.isfinite(value)


def _memory_hints(component: object, place: str) -> Iterator[str]:
    """Yield the memory hints of a component and its parts (``memory_hints``).

    Each has its place in the configuration.
    """
    for inner, part in walk_parts(component, place):
        # a class as a value of a field has no settings
        hints: list[str] = [] if isinstance(part, type) else getattr(part, "memory_hints", list)()
        if hints:
            yield f"{inner}: {', '.join(hints)}"
