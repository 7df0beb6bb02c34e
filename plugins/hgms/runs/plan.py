"""The definition of a run: its method, its problem and its settings, without its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen

from hgms.plugins import LOG
from hgms.runs.config import RunSettings
from hgms.runs.execution import KEY, Execution
from hgms.runs.folder import RunFolder
from hgms.runs.own_problem import OwnProblem
from hgms.runs.provenance import about_task, digests, environment, merge_environments
from hgms.runs.threads import are_set
from hgms_core import Method, Problem, RunInfo, Task, Tree


@frozen(kw_only=True)
class Plan:
    """The definition of a run.

    ``make`` builds the problem, of ``task`` if it has one. ``execution`` defines how the steps are
    computed, if another run has decided it. The recorded decision of a resumed run takes
    precedence. ``restore`` gives θ and x of the result the form of the user's problem. ``role`` is
    the role of the method in comparisons.
    """

    method: Method
    make: Callable[[], Problem]
    info: RunInfo
    device: torch.device
    settings: RunSettings
    task: Task | OwnProblem | None = None
    execution: Execution | None = None
    role: str = ""
    restore: Callable[[Tree, Tree], tuple[Any, Any]] = lambda theta, x: (theta, x)

    def decide(self, problem: Problem, before: Mapping[str, Any], resumed: bool) -> Execution:
        """Decide how the steps are computed.

        The recorded decision of a resumed run takes precedence, then :attr:`execution`. On several
        ranks the settings decide, because the other ranks only have the settings.
        """
        decided = partial(Execution.decide, self.settings, self.info.budget, problem)
        if self.settings.ranks > 1:
            return decided()
        recorded = Execution.from_environment(before)
        handed = None if self.execution is None else self.execution.anew
        if resumed and recorded is None:
            LOG.warning(
                "env.json no longer contains how this run was computed; its last digits may "
                "differ from here on"
            )
        execution = recorded or handed or decided()
        return evolve(execution, threads=None) if are_set(self.settings.threads) else execution

    def environment(
        self, folder: RunFolder, before: Mapping[str, Any], execution: Execution, host: Any
    ) -> dict[str, Any]:
        """Return the contents of ``env.json``.

        A run that resumes in another environment keeps its environment of ``before``, and a warning
        lists the differences.
        """
        about = {} if self.task is None else {"task": about_task(self.task)}
        if isinstance(self.task, OwnProblem) and self.task.varies:
            about["task"]["instance"] = self.task.instance(self.info.seed)
        own = {"code": digests([self.task, self.method]), KEY: execution.as_table()}
        table, changes = merge_environments(
            dict(before), {**environment(self.device, host), **own, **about}
        )
        if changes:
            kept = "".join(f"; as recorded, {remark}" for remark in execution.remarks())
            LOG.warning(
                "%s resumes in another environment (%s); env.json keeps both%s",
                folder.path,
                ", ".join(changes),
                kept,
            )
        return table
