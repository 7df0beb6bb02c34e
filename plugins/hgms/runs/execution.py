"""Execution of the steps of a run: matrix products and compilation.

A run decides once, at its start, how it executes its steps. The decision is in force until the end
of the run and is recorded in ``env.json``.

The decision depends on the machine and may change the last digits of results. A resumed run
therefore uses its recorded decision. The runs of a comparison use the decision of their first run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import cattrs
import torch
from attrs import Factory, evolve, frozen

from hgms.compiled import COMPILERS
from hgms.config import Budget
from hgms.runs.config import RunSettings
from hgms.runs.matmul import RouteChoice, calibrated
from hgms.runs.route import matrix_route
from hgms.runs.threads import ThreadChoice, are_set, choose_threads, number_of_threads
from hgms_core import Problem

KEY = "execution"
"""The key of the decision in ``env.json``."""
EXPECTED = {"cpu": (0.5, 30.0), "cuda": (0.74, 6.5)}
"""Time that compilation saves and takes, by type of device.

The first number is the share of the time of eager steps that compilation saves. The second number
is the seconds that compilation takes.

The numbers for GPUs are measured (one H200, torch 2.11, warm cache; docs/reference/gpu.md).
Compilation reduced a step from 95.9 ms to 24.5 ms, and took 6.5 s. Smaller steps gain more. Other
devices use the numbers of the CPU.
"""
LEAST = {"outer_steps": 50, "oracle_calls": 5000}
"""Minimum budgets for timing one step before a run.

The step is computed and discarded, to estimate the duration of the run. A run of three steps should
not take a third longer.
"""
_CONVERTER = cattrs.Converter()
"""One converter for all calls.

It generates a function at the first use of a class, which takes as long as reading a hundred runs.
"""


@frozen(kw_only=True)
class Compilation:
    """The decision whether to compile the functions of the steps, and its outcome.

    ``wanted`` is the decision, ``reason`` explains it. ``outcomes`` maps each function that
    occurred to "compiled", to "traced" (a graph that is too large to gain by compilation), or to
    "eager" and the reason. ``seconds`` is the wall-clock time of
    compilation, which no budget includes. ``measured`` are the seconds of an eager and of a
    compiled step, if they decide.
    """

    wanted: bool
    reason: str
    seconds: float = 0.0
    outcomes: Mapping[str, str] = Factory(dict)
    measured: Mapping[str, float] = Factory(dict)

    @classmethod
    def decide_by_gain(cls, seconds: float, device: str) -> Compilation:
        """Decide from the seconds that eager steps take.

        Compile if this saves at least as much time as it takes.

        Examples
        --------
        >>> Compilation.decide_by_gain(12.0, "cuda").reason
        'eager steps take about 12 s, of which compilation saves about 9 s in about 6.5 s'
        >>> Compilation.decide_by_gain(12.0, "cpu").wanted
        False
        """
        share, spent = EXPECTED.get(device, EXPECTED["cpu"])
        gained = share * seconds
        return cls(
            wanted=gained >= spent,
            reason=f"eager steps take about {seconds:.0f} s, of which compilation saves about "
            f"{gained:.0f} s in about {spent:g} s",
        )

    @classmethod
    def decide_early(
        cls, setting: str | bool, budget: Budget, problem: Problem
    ) -> Compilation | None:
        """Return the decision if it is possible before any step.

        The result is ``None`` if the time of a step must decide.

        Examples
        --------
        >>> problem = Problem(theta0={}, x0={}, g=lambda *_: None, f=lambda *_: None)
        >>> Compilation.decide_early("auto", Budget.parse("5 min"), problem).wanted
        True
        """
        if setting is False:
            return cls(wanted=False, reason="the settings say so")
        if problem.counters is not None:
            return cls(
                wanted=False, reason="the losses count what they do, which a program would not"
            )
        if setting is True:
            return cls(wanted=True, reason="the settings say so")
        device = device_of(problem)
        if device not in COMPILERS:
            return cls(wanted=False, reason=f"torch has no compiler for {device}")
        if budget.seconds is not None:
            return cls.decide_by_gain(budget.seconds, device)
        if any((getattr(budget, unit) or least) < least for unit, least in LEAST.items()):
            return cls(wanted=False, reason=f"a budget of {budget} is too short to time a step")
        return None

    @classmethod
    def decide_by_time(cls, step: Callable[[], tuple[float, float]], device: str) -> Compilation:
        """Decide from the seconds of an eager step and its share of the budget.

        The first step may also load modules. A decision for compilation therefore requires two
        steps.

        Examples
        --------
        >>> Compilation.decide_by_time(lambda: (0.01, 1 / 1000), "cpu").wanted
        False
        """
        seconds = math.inf
        for _ in range(2):
            spent, share = step()
            seconds = min(seconds, spent / share if share > 0 else 0.0)
            decision = cls.decide_by_gain(seconds, device)
            if not decision.wanted:
                break
        return decision

    @property
    def compiled_names(self) -> list[str]:
        """The names of the functions that are compiled."""
        return sorted(name for name, outcome in self.outcomes.items() if outcome == "compiled")

    @property
    def eager(self) -> dict[str, str]:
        """The functions that could not be compiled, with the reason."""
        return {name: why for name, why in self.outcomes.items() if why.startswith("eager")}

    def confirm(self, eager: float, compiled: float) -> Compilation:
        """Return the decision after steps of both kinds: eager steps if compiled ones are slower.

        Examples
        --------
        >>> decision = Compilation(wanted=True, reason="expected").confirm(0.1, 0.2)
        >>> decision.wanted, decision.reason
        (False, 'a compiled step takes 0.2 s, an eager step 0.1 s')
        """
        measured = {"eager": eager, "compiled": compiled}
        if compiled <= eager:
            return evolve(self, measured=measured)
        reason = f"a compiled step takes {compiled:.2g} s, an eager step {eager:.2g} s"
        return evolve(self, wanted=False, reason=reason, measured=measured)


def device_of(problem: Problem) -> str:
    """Return the type of the device of a problem."""
    leaves = [*problem.x0.values(), *problem.theta0.values()]
    return leaves[0].device.type if leaves else "cpu"


@frozen(kw_only=True)
class Execution:
    """The decisions on the execution of steps.

    ``matmul`` is the route of float32 matrix products, with the reason and the measurements.
    ``threads`` is the number of threads of torch, measured likewise (``None``: as the user or torch
    has set it). ``compile`` states whether functions of the steps are compiled, and which were
    compiled. It is ``None`` if the time of a step must decide.

    Examples
    --------
    >>> Execution.from_environment({"python": "3.12"}) is None
    True
    """

    matmul: RouteChoice
    compile: Compilation | None = None
    threads: ThreadChoice | None = None

    @classmethod
    def decide(cls, settings: RunSettings, budget: Budget, problem: Problem) -> Execution:
        """Decide by the settings.

        For open settings, select the best option for this problem on this machine.
        """
        route = (
            RouteChoice(route=settings.matmul, reason="the settings say so")
            if settings.matmul != "auto"
            else None
        )
        clock = time.process_time if settings.clock == "cpu" else time.perf_counter
        measure = settings.ranks == 1 and not are_set(settings.threads)
        threads = choose_threads(problem, clock) if measure else None
        with number_of_threads(None if threads is None else threads.threads):
            route = route or calibrated(problem)
        return cls(
            matmul=route,
            threads=threads,
            compile=Compilation.decide_early(settings.compile, budget, problem),
        )

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Execution:
        """Create an execution from the result of :meth:`as_table`."""
        return _CONVERTER.structure(table, cls)

    @classmethod
    def from_environment(cls, environment: Mapping[str, Any]) -> Execution | None:
        """Return the execution that ``env.json`` of a run records.

        The result is ``None`` if the record is missing or unreadable.
        """
        try:
            return cls.of(environment[KEY])
        except (cattrs.BaseValidationError, TypeError, ValueError, KeyError):
            return None

    def as_table(self) -> dict[str, Any]:
        """Return the execution as values of JSON."""
        return attrs.asdict(
            self, filter=lambda attribute, value: attribute.name == "matmul" or value is not None
        )

    @property
    def anew(self) -> Execution:
        """The same decisions for another run, which has not compiled any functions yet."""
        return (
            self
            if self.compile is None
            else evolve(self, compile=evolve(self.compile, seconds=0.0, outcomes={}))
        )

    @contextmanager
    def in_force(self, device: torch.device) -> Iterator[None]:
        """Use the route for all matrix products, and the number of threads, inside the context.

        The compiler of the problem compiles functions.
        """
        threads = None if self.threads is None else self.threads.threads
        with number_of_threads(threads), matrix_route(self.matmul.route, device):
            yield

    def choices(self) -> dict[str, str]:
        """Return the decisions that differ from torch's defaults, by name of the setting."""
        route = {} if self.matmul.route == "exact" else {"matmul": self.matmul.route}
        return route | (
            {"compile": "compiled"} if self.compile is not None and self.compile.wanted else {}
        )

    def remarks(self) -> list[str]:
        """Return a line for each of these choices, with its reason.

        Compilation has a line only if functions were compiled.
        """
        lines = (
            []
            if self.matmul.route == "exact"
            else [f"matmul: {self.matmul.route} ({self.matmul.reason})"]
        )
        if self.compile is not None and (names := self.compile.compiled_names):
            lines.append(
                f"compiled: {', '.join(names)} in {self.compile.seconds:.1f} s "
                f"({self.compile.reason})"
            )
        return lines
