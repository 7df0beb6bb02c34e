"""The compilation of the steps of a run: the decision, the time it takes, and its record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import attrs
import click
from attrs import define, field

from hgms.compiled import Programs
from hgms.runs.clock import Clock
from hgms.runs.execution import KEY, Compilation, Execution, device_of
from hgms.runs.plan import Plan
from hgms.runs.recorder import Recorder
from hgms_core import Problem

TIMED = 2
"""Steps of each kind that are timed, in turns, before compiled steps are used."""
ANNOUNCEMENT = "compiling the steps, once for this run; Ctrl-C interrupts it"


@define(eq=False)
class StepCompiler:
    """Compiles functions of the steps, and records how the steps are computed.

    ``programs`` compiles functions in addition to those that were compiled ``earlier``, before the
    run was interrupted.
    """

    plan: Plan
    recorder: Recorder
    execution: Execution
    programs: Programs | None = field(default=None, init=False)
    earlier: Compilation | None = field(default=None, init=False)
    is_announced: bool = field(default=False, init=False)

    def prepare(
        self,
        problem: Problem,
        clock: Clock,
        step: Callable[[Problem], tuple[float, float]] | None,
        before: Callable[[str], None],
    ) -> Problem:
        """Return the problem with a compiler, or unchanged if compilation saves no time.

        The decision depends on the budget, or else on the duration of ``step`` (``None``: no step
        is left). With ``compile = "auto"``, compiled steps are timed as well and used only if
        they are faster than eager steps. ``before`` is called before each compilation. The clock
        does not count compilation.
        """
        if self.execution.compile is None and step is not None:
            plan = self.plan
            settled = Compilation.decide_early(plan.settings.compile, plan.info.budget, problem)
            decided = settled or Compilation.decide_by_time(
                partial(step, problem), device_of(problem)
            )
            self._record(attrs.evolve(self.execution, compile=decided))
        self.earlier = self.execution.compile
        if self.earlier is None or not self.earlier.wanted:
            return problem
        self.programs = programs = Programs(clock=clock.now)
        programs.outcomes |= self.earlier.eager  # these functions stay eager

        def begin(name: str) -> None:
            before(name)
            if not self.is_announced:
                self.is_announced = True
                with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                    click.echo(ANNOUNCEMENT, err=True)

        programs.before = begin
        clock.apart = lambda: programs.seconds
        compiled = attrs.evolve(problem, compiler=programs)
        if step is None or self.plan.settings.compile != "auto" or self.earlier.measured:
            return compiled
        return compiled if self._confirm(step, problem, compiled) else problem

    def _confirm(
        self, step: Callable[[Problem], tuple[float, float]], problem: Problem, compiled: Problem
    ) -> bool:
        """Time eager and compiled steps; return whether to compile."""
        assert self.earlier is not None
        assert self.programs is not None
        step(compiled)  # compiles
        times = [(step(problem)[0], step(compiled)[0]) for _ in range(TIMED)]
        eager, fast = map(min, zip(*times, strict=True))
        self.earlier = self.earlier.confirm(eager, fast)
        if not self.earlier.wanted:
            self.earlier = attrs.evolve(self.earlier, seconds=self.programs.waited)
            self.programs = None
        self._record(attrs.evolve(self.execution, compile=self.earlier))
        return self.earlier.wanted

    @property
    def busy(self) -> bool:
        """Whether a function is being compiled."""
        return self.programs is not None and self.programs.busy

    @property
    def seconds(self) -> float:
        """The seconds of compilation so far, which no budget counts."""
        earlier = 0.0 if self.earlier is None else self.earlier.seconds
        return earlier + (0.0 if self.programs is None else self.programs.waited)

    def save(self) -> None:
        """Record which functions are compiled."""
        if self.earlier is not None and self.programs is not None:
            outcomes = {**self.earlier.outcomes, **self.programs.outcomes}
            compiled = attrs.evolve(self.earlier, seconds=self.seconds, outcomes=outcomes)
            self._record(attrs.evolve(self.execution, compile=compiled))

    def _record(self, execution: Execution) -> None:
        if execution != self.execution:
            self.recorder.note(KEY, execution.as_table())
        self.execution = execution
