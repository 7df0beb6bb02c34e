"""The stepper: one checked outer step of a method. It does not use files or clocks."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms.arguments import require
from hgms.runs.advice import check_growth, check_numbers
from hgms_core import ConfigError, Method, Outcome, Problem, Record, Sources, State, Tree, norm
from hgms_core.capabilities import Finishes, find
from hgms_core.errors import raise_all

IDLE_STEPS = 1000
"""Outer steps without an oracle call after which a budget in calls is assumed not to end."""


@frozen(kw_only=True)
class Position:
    """The position of a run: all that its method needs to continue.

    ``state`` belongs to the method. ``step`` and ``calls`` count outer steps and oracle calls, and
    ``idle`` the outer steps since the last oracle call. ``first_loss`` is the first upper loss that
    is not 0, or 0.
    """

    state: State
    step: int = 0
    calls: int = 0
    idle: int = 0
    first_loss: float = 0.0


@frozen(kw_only=True)
class Stepper:
    """A method on a problem.

    ``name`` is the method's name in errors. ``in_calls`` is whether the budget counts oracle calls.

    Raises
    ------
    ConfigError
        ``wrong-result`` for a method whose return values violate its protocol, and
        ``budget-cannot-end`` for a budget in calls that no step spends.
    NumericalError
        For numbers that are not finite or grow without bound. The position before a failed step is
        unchanged.
    """

    method: Method
    problem: Problem
    name: str
    in_calls: bool

    def begin(self, seed: int) -> Position:
        """Return the position before the first step."""
        return Position(state=self.method.init(self.problem, seed))

    def step(self, position: Position, share: float) -> Any:
        """Run one step of the method, unchecked; ``share`` is the spent part of the budget."""
        with named_step(self.name, position.step + 1):
            return self.method.step(self.problem, position.state, share)

    def check_budget(self, position: Position) -> None:
        """Raise ConfigError if the budget counts oracle calls but recent steps made no calls."""
        require(
            not self.in_calls or position.idle < IDLE_STEPS,
            "budget-cannot-end",
            f"the method recorded 0 oracle calls in {IDLE_STEPS:,} steps, up to step "
            f"{position.step}, so a budget in calls cannot end",
            place=("budget",),
            hint="use steps or seconds, or record oracle_calls in each step",
        )

    def read(
        self, position: Position, outcome: Any, counted: Mapping[str, int]
    ) -> tuple[Position, Record]:
        """Return the position after a step, and its record as plain numbers.

        ``counted`` are the counters of the problem before the step.
        """
        state, raw = pair_of("step", "(state, record)", outcome)
        require(
            not self.in_calls or "oracle_calls" in raw,
            "wrong-result",
            f"the records of method {self.name!r} have no oracle_calls, which a budget "
            "in calls requires",
            place=("method", "step", "oracle_calls"),
            hint="record the calls of all steps so far, or use a budget in steps or seconds",
        )
        counters = self.counters()
        grown = {f"step_{name}": value - counted.get(name, 0) for name, value in counters.items()}
        theta, x = self.result(state, position.step)
        leaves = [*theta.values(), *x.values()]
        sizes = {"total": _total(leaves), "norm of theta": norm(theta)}
        record = named_zeros(to_numbers({**raw, **grown, **self.weights(theta), **sizes}), theta)
        if not math.isfinite(record.pop("total")):  # or it overflowed
            names = [
                name
                for name, leaf in zip([*theta, *x], leaves, strict=True)
                if not torch.isfinite(leaf).all()
            ]
            record |= {"broken": names} if names else {}
        size = record.pop("norm of theta")
        number = position.step + 1
        check_numbers(record, number)
        first = position.first_loss
        check_growth(record, number, first, size, self._start_norm)
        calls = int(record.get("oracle_calls", position.calls))
        idle = position.idle + 1 if calls <= position.calls else 0
        first = first or record.get("upper_loss") or 0.0
        after = Position(state=state, step=number, calls=calls, idle=idle, first_loss=first)
        return after, record

    @functools.cached_property
    def _start_norm(self) -> float:
        """‖θ‖ at the start of the problem."""
        return float(norm(self.problem.theta0))

    def is_finished(self, position: Position) -> bool:
        """Return whether the method ends before its budget."""
        method = find(self.method, Finishes)
        return method is not None and bool(method.is_finished(position.state))

    def result(self, state: State, step: int) -> tuple[Tree, Tree]:
        """Return (θ, x) of a state after ``step`` steps. A method may leave θ empty.

        Raises
        ------
        ConfigError
            If the leaves of the first result differ from those of the problem.
        """
        theta, x = pair_of("result", "(theta, x)", self.method.result(state))
        pairs = (("theta", theta, self.problem.theta0), ("x", x, self.problem.x0))
        for name, own, start in () if step else pairs:
            shapes = {key: getattr(leaf, "shape", None) for key, leaf in own.items()}
            require(
                not own or shapes == {key: leaf.shape for key, leaf in start.items()},
                "wrong-result",
                f"{name} of method {self.name!r} has the leaves {leaves_of(own)}, but "
                f"the problem has {leaves_of(start)}",
                place=("method", "result", name),
            )
        return theta, x

    def start(self, position: Position) -> Record:
        """Return the weights of data sources before the first step."""
        if self.problem.find(Sources) is None:
            return {}
        return to_numbers(self.weights(self.result(position.state, position.step)[0]))

    def weights(self, theta: Tree) -> Record:
        """Return the weight of every data source, under its name."""
        sources = self.problem.find(Sources)
        if sources is None:
            return {}
        omega = sources.weights(theta).detach()
        return {f"weight.{name}": weight for name, weight in zip(sources.names, omega, strict=True)}

    def counters(self) -> Mapping[str, int]:
        """Return the counters of the problem, such as processed tokens."""
        return {} if self.problem.counters is None else dict(self.problem.counters())


def pair_of(what: str, expected: str, outcome: Any) -> tuple[Any, Any]:
    """Return the two dictionaries that a method's function returned, else raise ConfigError."""
    if (
        isinstance(outcome, tuple | list)
        and len(outcome) == 2
        and all(isinstance(item, Mapping) for item in outcome)
    ):
        return outcome[0], outcome[1]
    kinds = (
        ", ".join(type(item).__name__ for item in outcome)
        if isinstance(outcome, tuple)
        else type(outcome).__name__
    )
    raise ConfigError(
        "wrong-result",
        f"`{what}` of a method returns ({kinds}), but must return two dictionaries, {expected}",
        place=("method", what),
    )


def leaves_of(tree: Tree) -> str:
    """Return the leaves with their shapes, or the type of a value: ``{w [3], b float}``."""
    shapes = (
        f"{name} {list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__}"
        for name, leaf in tree.items()
    )
    return f"{{{', '.join(shapes)}}}"


@contextlib.contextmanager
def named_step(method: str, step: int) -> Iterator[None]:
    """Add the method and the step to errors about numbers that are not finite."""
    try:
        yield
    except ConfigError as error:
        if all(cause.code != "not-finite" for cause in error.errors):
            raise
        raise_all(
            [
                ConfigError(
                    cause.code,
                    f"step {step} of method {method!r}: {cause.message}",
                    place=cause.place,
                    hint=cause.hint,
                )
                for cause in error.errors
            ]
        )


def named_zeros(record: Record, theta: Tree) -> Record:
    """Replace the hypergradient norm of each leaf by the names of the leaves where it is 0.

    The names are recorded only if some leaves, but not all, have a hypergradient of 0.
    """
    lengths: Any = record.pop("hypergradient_norms", None) or []
    zeros = [name for name, length in zip(theta, lengths, strict=False) if length == 0]
    return (
        {**record, "zero_gradient": ", ".join(zeros)} if 0 < len(zeros) < len(lengths) else record
    )


def _total(leaves: Iterable[torch.Tensor]) -> float | torch.Tensor:
    """Return the sum of all numbers, which is finite only if all numbers are finite.

    It is a single fast pass that does not wait for an accelerator.
    """
    sums = [leaf.sum() for leaf in leaves]
    if all(part.device.type == "cpu" for part in sums):
        return sum(part.item() for part in sums)
    widest = torch.float32 if sums[0].device.type == "mps" else torch.float64
    return torch.stack([part.to(widest) for part in sums]).sum()


def to_numbers(record: Mapping[str, Any]) -> Record:
    """Return the record with numbers and lists in place of tensors.

    The tensors of a device move to the CPU in one transfer.
    """
    tensors = {name: value.detach() for name, value in record.items() if isinstance(value, Tensor)}
    numbers: Record = {}
    for device in {value.device for value in tensors.values()}:
        here = {name: value for name, value in tensors.items() if value.device == device}
        moved = here.values() if device.type == "cpu" else _move_to_cpu(list(here.values()))
        numbers |= {name: value.tolist() for name, value in zip(here, moved, strict=True)}
    if "outcome" in numbers:
        numbers["outcome"] = list(Outcome)[numbers["outcome"]].label
    return {name: numbers.get(name, value) for name, value in record.items()}


def _move_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one device on the CPU, moved as one tensor of bytes."""
    flat = [value.contiguous().reshape(-1).view(torch.uint8) for value in tensors]
    parts = torch.cat(flat).cpu().split([part.numel() for part in flat])
    # a copy is aligned for its dtype
    return [
        part.clone().view(value.dtype).reshape(value.shape)
        for part, value in zip(parts, tensors, strict=True)
    ]
