"""Specifications of all hooks that a plugin can implement.

A plugin is a module with functions of these names, each marked ``@hgms_core.hookimpl``. It may
declare the version of the plugin API that it requires: ``hgms_plugin_api = 2``.

HGMS calls the registering hooks when a component is first looked up by name. They return classes,
and HGMS checks each class against the protocol of its kind.

HGMS calls observers one at a time, in the order of the plugins' names, outside the budget's clock.
If an observer raises, HGMS reports the error and does not call the plugin's observers afterwards.

Rules for changes:

- New arguments are added at the end of a specification. An implementation may accept fewer.
- A hook that will be removed has ``warn_on_impl=DeprecationWarning(...)`` for two minor versions.
- ``hgms_core.PLUGIN_API`` increases only if a change breaks plugins.
"""

# mypy: disable-error-code=empty-body

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click

    from hgms_core import (
        CandidateGenerator,
        Composition,
        HyperGradient,
        LinearSolver,
        Method,
        OuterOptimizer,
        RunInfo,
        Selector,
        Task,
    )

hookspec = pluggy.HookspecMarker("hgms")


@hookspec
def hgms_register_generators() -> Iterable[type[CandidateGenerator]]:
    """Register candidate generators: classes that propose N lower states."""


@hookspec
def hgms_register_selectors() -> Iterable[type[Selector]]:
    """Register selectors: classes that select one of the candidates."""


@hookspec
def hgms_register_linear_solvers() -> Iterable[type[LinearSolver]]:
    """Register linear solvers: classes that solve (H + ridge·I) v = b from products with H.

    Called: like every registering hook, when a component is first looked up by name.

    Examples
    --------
    >>> from hgms_core import hookimpl
    >>> @hookimpl
    ... def hgms_register_linear_solvers():
    ...     from hgms.solvers import CG  # a class of your own
    ...
    ...     return [CG]
    """


@hookspec
def hgms_register_hypergradients() -> Iterable[type[HyperGradient]]:
    """Register hypergradient estimators: classes that differentiate at the selected candidate."""


@hookspec
def hgms_register_outer_optimizers() -> Iterable[type[OuterOptimizer]]:
    """Register outer optimisers: classes that compute the next θ from a hypergradient."""


@hookspec
def hgms_register_tasks() -> Iterable[type[Task]]:
    """Register tasks: classes that build a problem."""


@hookspec
def hgms_register_methods() -> Iterable[type[Method] | Composition]:
    """Register methods: classes, or compositions (named defaults for parts of a Pipeline).

    Examples
    --------
    >>> from hgms_core import Composition, hookimpl
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
    """Add commands to the ``hgms`` command line.

    A plugin cannot replace an existing command. If a command raises HgmsError, ``hgms`` prints the
    message and exits with its ``exit_code``.

    Called: when the user runs a command that is not built in, or requests the list of commands.

    Examples
    --------
    >>> import click
    >>> from hgms_core import hookimpl
    >>> @hookimpl
    ... def hgms_register_commands(cli):
    ...     @cli.command("count-runs")
    ...     @click.argument("folder", type=click.Path(exists=True))
    ...     def count_runs(folder): ...  # how many runs are in FOLDER
    """


@hookspec
def hgms_register_executors() -> Iterable[type[Any]]:
    """Register executors: classes that execute the runs of a grid.

    An executor runs them on this machine or on a cluster (see ``hgms.executors``).
    """


@hookspec
def hgms_ready(settings: Mapping[str, Any]) -> None:
    """Prepare a comparison; ``settings`` is the table ``[run]`` of all its runs.

    Raise ConfigError or MissingExtra if a requested feature, such as a tracker, is not available.
    The comparison then stops before its first run, instead of failing in each run.

    Called: once for each ``hgms compare``, before its first run.

    Examples
    --------
    >>> from hgms_core import hookimpl
    >>> @hookimpl
    ... def hgms_ready():
    ...     from hgms_core.errors import MissingExtra
    ...
    ...     try:
    ...         import attrs  # the client of your tracker
    ...     except ModuleNotFoundError:
    ...         raise MissingExtra(
    ...             "missing-package",
    ...             "tracking requires attrs, which is not installed",
    ...             install="pip install 'hgms-mine[track]'",
    ...         ) from None
    """


@hookspec
def hgms_run_started(run: RunInfo) -> None:
    """Observe a run that starts, or that resumes from step ``run.resumed_from``.

    If the observer raises ConfigError or MissingExtra, the run stops.

    Called: once for each run, after its method and problem are built, before the first step.

    Examples
    --------
    >>> from hgms_core import hookimpl
    >>> @hookimpl
    ... def hgms_run_started(run):
    ...     print(run.task, run.method, run.seed, run.folder)
    """


@hookspec
def hgms_step_finished(run: RunInfo, record: dict[str, Any]) -> None:
    """Observe a finished outer step; ``record`` is its row of ``steps.jsonl`` plus ``seconds``.

    The values are plain numbers, short lists and strings. Each observer gets a separate copy.

    Called: after every outer step, outside the budget's clock, when the step is already on disk.

    Examples
    --------
    >>> from hgms_core import hookimpl
    >>> @hookimpl
    ... def hgms_step_finished(record):  # fewer arguments are fine
    ...     print(record["step"], record["upper_loss"])
    """


@hookspec
def hgms_run_finished(
    run: RunInfo, summary: dict[str, Any] | None, error: BaseException | None
) -> None:
    """Observe the end of a run: its summary, or the error that stopped it.

    Each observer gets a separate copy of the summary. The error may be a KeyboardInterrupt.

    Called: once for each started run, also if it failed, after ``summary.json`` has been
        written.

    Examples
    --------
    >>> from hgms_core import hookimpl
    >>> @hookimpl
    ... def hgms_run_finished(run, summary):
    ...     print(run.method, summary and summary["metrics"])
    """
