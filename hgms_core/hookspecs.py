"""Every hook a plugin may implement.

A plugin is a module with functions of these names, each marked ``@hgms_core.hookimpl``, and, if it
likes, the plugin API it was written for: ``hgms_plugin_api = 2``.

Registering hooks are called when a component is first looked up by name, and return classes; what
they return is checked against the protocol of its kind. Observers are called one at a time, in the
order of the plugins' names, outside the budget's clock; one that raises is reported and not called
again.

How this grows: a specification gets new arguments at its end, and an implementation may take fewer.
A hook that will go carries ``warn_on_impl=HookDeprecated(...)``, which `hgms plugins` shows on
those who implement it, for two minor versions. Only what breaks a plugin raises ``PLUGIN_API``.
"""

# mypy: disable-error-code=empty-body

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import field, frozen

if TYPE_CHECKING:
    import click

    from hgms_core.composition import Composition
    from hgms_core.protocols import (
        CandidateGenerator,
        HyperGradient,
        LinearSolver,
        Method,
        OuterOptimizer,
        Selector,
        Task,
    )

PLUGIN_API = 2
"""The version of hooks and protocols that plugins are written against; it grows only when an old
plugin would break.
"""

hookspec = pluggy.HookspecMarker("hgms")
hookimpl = pluggy.HookimplMarker("hgms")
"""Marks a function of a plugin as the implementation of the hook it is called like."""


@frozen(kw_only=True)
class RunInfo:
    """What an observer learns of a run. ``folder`` is where it writes (None: nowhere); ``config``
    is its resolved configuration as nested tables; ``resumed_from`` is the step a resumed run goes
    on from (0 for a new one); in ``state`` an observer keeps what it has open for this run, under
    its plugin's name. ``str(budget)`` is the budget as text.

    >>> RunInfo(task="quadratic", method="hg-ms", seed=0, budget="5 steps").resumed_from
    0
    """

    task: str
    method: str
    seed: int
    budget: Any
    folder: Path | None = None
    resumed_from: int = 0
    config: Mapping[str, Any] = field(factory=dict)
    state: dict[str, Any] = field(factory=dict, eq=False, repr=False)


@hookspec
def hgms_register_generators() -> Iterable[type[CandidateGenerator]]:
    """Candidate generators, as classes: what proposes N lower states."""


@hookspec
def hgms_register_selectors() -> Iterable[type[Selector]]:
    """Selectors, as classes: what picks one of the candidates."""


@hookspec
def hgms_register_linear_solvers() -> Iterable[type[LinearSolver]]:
    """Linear solvers, as classes: what solves (H + ridge·I) v = b from products with H.

    Called: as every registering hook, when a component is first looked up by name.

    >>> @hookimpl
    ... def hgms_register_linear_solvers():
    ...     from hgms.solvers import CG  # a class of your own
    ...
    ...     return [CG]
    """


@hookspec
def hgms_register_hypergradients() -> Iterable[type[HyperGradient]]:
    """Hypergradient estimators, as classes: what differentiates at the selected candidate."""


@hookspec
def hgms_register_outer_optimizers() -> Iterable[type[OuterOptimizer]]:
    """Outer optimisers, as classes: what turns a hypergradient into the next θ."""


@hookspec
def hgms_register_tasks() -> Iterable[type[Task]]:
    """Tasks, as classes: what builds a problem."""


@hookspec
def hgms_register_methods() -> Iterable[type[Method] | Composition]:
    """Methods: classes, or compositions (named defaults for the parts of a Pipeline).

    >>> from hgms_core import Composition
    >>> @hookimpl
    ... def hgms_register_methods():
    ...     return [
    ...         Composition(
    ...             name="my-method",
    ...             summary="One branch, MINRES.",
    ...             source="this page",
    ...             parts={
    ...                 "generator": {"name": "branches", "count": 1},
    ...                 "selector": {"name": "first"},
    ...                 "hypergradient": {"name": "implicit", "solver": {"name": "minres"}},
    ...                 "outer": {"name": "adam", "lr": 0.1},
    ...             },
    ...         )
    ...     ]
    """


@hookspec
def hgms_register_commands(cli: click.Group) -> None:
    """Add commands to the ``hgms`` command line. A name that is taken stays as it is; an HgmsError
    is a message, exit code 2.

    Called: when the command line is asked for a command that is not ours, or for the list of all.

    >>> import click
    >>> @hookimpl
    ... def hgms_register_commands(cli):
    ...     @cli.command("count-runs")
    ...     @click.argument("folder", type=click.Path(exists=True))
    ...     def count_runs(folder): ...  # how many runs are in FOLDER
    """


@hookspec
def hgms_register_executors() -> Iterable[type[Any]]:
    """Executors, as classes: what carries out the runs of a grid, here or on a cluster (see
    ``hgms.executors``).
    """


@hookspec
def hgms_ready(settings: Mapping[str, Any]) -> None:
    """A comparison is about to begin; ``settings`` is the table ``[run]`` of all its runs.
    ConfigError or MissingExtra says that what a person asked for (a tracker, say) cannot be had,
    before any run has failed for it.

    Called: once for each ``hgms compare``, before its first run.

    >>> @hookimpl
    ... def hgms_ready():
    ...     from hgms_core.errors import MissingExtra
    ...
    ...     try:
    ...         import attrs  # the client of your tracker
    ...     except ModuleNotFoundError:
    ...         raise MissingExtra(
    ...             "tracking needs attrs\\n  pip install 'hgms-mine[track]'"
    ...         ) from None
    """


@hookspec
def hgms_run_started(run: RunInfo) -> None:
    """A run begins or resumes (``run.resumed_from`` says from which step). ConfigError or
    MissingExtra stops it.

    Called: once for each run, when its method and problem have been built, before the first step.

    >>> @hookimpl
    ... def hgms_run_started(run):
    ...     print(run.task, run.method, run.seed, run.folder)
    """


@hookspec
def hgms_step_finished(run: RunInfo, record: dict[str, Any]) -> None:
    """An outer step is done; ``record`` is its row of ``steps.jsonl`` with ``seconds``: plain
    numbers, short lists and strings, a copy of your own.

    Called: after every outer step, outside the budget's clock; the step is on disk by then.

    >>> @hookimpl
    ... def hgms_step_finished(record):  # fewer arguments are fine
    ...     print(record["step"], record["upper_loss"])
    """


@hookspec
def hgms_run_finished(
    run: RunInfo, summary: dict[str, Any] | None, error: BaseException | None
) -> None:
    """A run ended: with its summary (a copy of your own), or with the error that stopped it (also
    KeyboardInterrupt).

    Called: once for each run that has begun, whatever ended it, after ``summary.json`` has been
        written.

    >>> @hookimpl
    ... def hgms_run_finished(run, summary):
    ...     print(run.method, summary and summary["metrics"])
    """
