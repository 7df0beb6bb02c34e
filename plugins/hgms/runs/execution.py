"""How the steps of a run are carried out: decided once at its start, in force to its end, recorded
in ``env.json``.

What is decided here depends on the machine, and may change results in their last digits. So a run
that is resumed takes what it recorded, and the runs of a comparison take what the first of them
decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import cattrs
import torch
from attrs import Factory, evolve, frozen

from hgms.compiled import COMPILERS, Programs, RouteChoice, calibrated, matrix_route
from hgms.config import Budget
from hgms.runs.config import RunSettings
from hgms_core import Problem

KEY = "execution"
"""What it is called in ``env.json``."""
EXPECTED = {"cpu": (0.5, 30.0), "cuda": (0.74, 6.5)}
"""By type of device: the share of the time of eager steps that compilation saves, and the seconds
that it takes. On a GPU measured: 95.9 ms of a step became 24.5 ms, in 6.5 s (one H200, torch 2.11,
warm cache; docs/how-to/run-on-gpus.md); smaller steps gain more. Other devices count as a CPU.
"""
LEAST = {"outer_steps": 50, "oracle_calls": 5000}
"""Budgets from which on a step is made and discarded to see how long the run takes: one of three
steps is not made a third longer."""
_CONVERTER = cattrs.Converter()
"""One for all: it writes a function for a class that it meets first, which takes as long as
reading a hundred runs.
"""


@frozen(kw_only=True)
class Compilation:
    """Whether functions of the steps are to be compiled (``wanted``), and why; how those that were
    met run (``outcomes``: "compiled", or "as written" and why), and the seconds that compiling took
    on the wall, which no budget contains.
    """

    wanted: bool
    reason: str
    seconds: float = 0.0
    outcomes: Mapping[str, str] = Factory(dict)

    @classmethod
    def weighed(cls, seconds: float, device: str) -> Compilation:
        """By the seconds that eager steps take: compile if that saves more time than it takes.

        >>> Compilation.weighed(12.0, "cuda").reason
        'eager steps take about 12 s, of which compilation saves about 9 s in about 6.5 s'
        >>> Compilation.weighed(12.0, "cpu").wanted
        False
        """
        share, spent = EXPECTED.get(device, EXPECTED["cpu"])
        gained = share * seconds
        reason = (
            f"eager steps take about {seconds:.0f} s, of which compilation saves about "
            f"{gained:.0f} s in about {spent:g} s"
        )
        return cls(wanted=gained >= spent, reason=reason)

    @classmethod
    def settled(cls, setting: str | bool, budget: Budget, problem: Problem) -> Compilation | None:
        """What is known before any step; None where the time of one has to tell.

        >>> problem = Problem(theta0={}, x0={}, g=lambda *_: None, f=lambda *_: None)
        >>> Compilation.settled("auto", Budget.parse("5 min"), problem).wanted
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
            return cls.weighed(budget.seconds, device)
        if any((getattr(budget, unit) or least) < least for unit, least in LEAST.items()):
            return cls(wanted=False, reason=f"a budget of {budget} is too short to time a step")
        return None

    @classmethod
    def timed(cls, step: Callable[[], tuple[float, float]], device: str) -> Compilation:
        """By the seconds of an eager step and the share of the budget that it spends. The first one
        may also load modules, so two steps are needed for compilation.

        >>> Compilation.timed(lambda: (0.01, 1 / 1000), "cpu").wanted
        False
        """
        seconds = math.inf
        for _ in range(2):
            spent, share = step()
            seconds = min(seconds, spent / share if share > 0 else 0.0)
            decision = cls.weighed(seconds, device)
            if not decision.wanted:
                break
        return decision

    @property
    def compiled(self) -> list[str]:
        """The names of the functions that run as programs."""
        return sorted(name for name, outcome in self.outcomes.items() if outcome == "compiled")

    def programs(self, clock: Callable[[], float]) -> Programs:
        """What makes the programs of a run that goes on from here: a function that could not be
        compiled is not tried again.
        """
        programs = Programs(clock=clock)
        programs.outcomes |= {
            name: outcome for name, outcome in self.outcomes.items() if outcome != "compiled"
        }
        return programs

    def with_those_of(self, programs: Programs) -> Compilation:
        """With the programs made since."""
        return evolve(
            self,
            seconds=self.seconds + programs.waited,
            outcomes={**self.outcomes, **programs.outcomes},
        )


def device_of(problem: Problem) -> str:
    """The type of the device of a problem."""
    leaves = [*problem.x0.values(), *problem.theta0.values()]
    return leaves[0].device.type if leaves else "cpu"


@frozen(kw_only=True)
class Execution:
    """``matmul`` is the route of float32 matrix products, why it was taken, and what was measured;
    ``compile`` whether functions of the steps are compiled, and which were (None: the time of a
    step has to tell).

    >>> Execution.recorded({"python": "3.12"}) is None
    True
    """

    matmul: RouteChoice
    compile: Compilation | None = None

    @classmethod
    def decided(cls, settings: RunSettings, budget: Budget, problem: Problem) -> Execution:
        """What the settings say, and where they leave it open, what is best for this problem on
        this machine.
        """
        route = (
            RouteChoice(route=settings.matmul, reason="the settings say so")
            if settings.matmul != "auto"
            else None
        )
        return cls(
            matmul=route or calibrated(problem),
            compile=Compilation.settled(settings.compile, budget, problem),
        )

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Execution:
        """From :meth:`as_table`."""
        return _CONVERTER.structure(table, cls)

    @classmethod
    def recorded(cls, environment: Mapping[str, Any]) -> Execution | None:
        """What a run's ``env.json`` says; None where it says nothing that can be read."""
        try:
            return cls.of(environment[KEY])
        except (cattrs.BaseValidationError, TypeError, ValueError, KeyError):
            return None

    def as_table(self) -> dict[str, Any]:
        """As JSON has it."""
        return attrs.asdict(
            self, filter=lambda attribute, value: attribute.name != "compile" or value is not None
        )

    @property
    def anew(self) -> Execution:
        """The same decisions for another run, which has compiled nothing yet."""
        return (
            self
            if self.compile is None
            else evolve(self, compile=evolve(self.compile, seconds=0.0, outcomes={}))
        )

    @contextmanager
    def in_force(self, device: torch.device) -> Iterator[None]:
        """Everything inside takes the route; programs are made by what the problem has as its
        compiler.
        """
        with matrix_route(self.matmul.route, device):
            yield

    def choices(self) -> dict[str, str]:
        """What was decided otherwise than torch does by itself, by the name of the setting."""
        route = {} if self.matmul.route == "exact" else {"matmul": self.matmul.route}
        return route | (
            {"compile": "compiled"} if self.compile is not None and self.compile.wanted else {}
        )

    def remarks(self) -> list[str]:
        """A line for each of these choices, with its reason; of programs only where there are
        any.
        """
        lines = (
            []
            if self.matmul.route == "exact"
            else [f"matmul: {self.matmul.route} ({self.matmul.reason})"]
        )
        if self.compile is not None and (names := self.compile.compiled):
            lines.append(
                f"compiled: {', '.join(names)} in {self.compile.seconds:.1f} s "
                f"({self.compile.reason})"
            )
        return lines
