"""Every hook a plugin may implement, all in version 1 of the plugin API (``hgms_core.PLUGIN_API``).

A hook implementation may take fewer arguments than its specification, so specifications can grow. Registration hooks are called
once and return classes; what is returned is checked against the protocol of its kind. Observers are called one at a time, in
the order of the plugins' names, outside the budget's clock; one that raises is reported and not called again.

A plugin is a module with functions of these names, each marked ``@hgms_core.hookimpl``::

    from hgms_core import hookimpl

    @hookimpl
    def hgms_register_linear_solvers():
        return [MySolver]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click

    from hgms_core.protocols import (
        CandidateGenerator,
        HyperGradient,
        LinearSolver,
        Method,
        OuterOptimizer,
        Selector,
        Task,
    )
    from hgms_core.registry import Composition
    from hgms_core.runner import RunInfo

hookspec = pluggy.HookspecMarker("hgms")
hookimpl = pluggy.HookimplMarker("hgms")


@hookspec
def hgms_register_generators() -> Iterable[type[CandidateGenerator]]:
    """Candidate generators, as classes."""
    raise AssertionError("a specification is never called")


@hookspec
def hgms_register_selectors() -> Iterable[type[Selector]]:
    """Selectors, as classes."""
    raise AssertionError("a specification is never called")


@hookspec
def hgms_register_linear_solvers() -> Iterable[type[LinearSolver]]:
    """Linear solvers, as classes."""
    raise AssertionError("a specification is never called")


@hookspec
def hgms_register_hypergradients() -> Iterable[type[HyperGradient]]:
    """Hypergradient estimators, as classes."""
    raise AssertionError("a specification is never called")


@hookspec
def hgms_register_outer_optimizers() -> Iterable[type[OuterOptimizer]]:
    """Outer optimisers, as classes."""
    raise AssertionError("a specification is never called")


@hookspec
def hgms_register_tasks() -> Iterable[type[Task]]:
    """Tasks, as classes."""
    raise AssertionError("a specification is never called")


@hookspec
def hgms_register_methods() -> Iterable[type[Method] | Composition]:
    """Methods: classes, or compositions (named defaults for the parts of a Pipeline)."""
    raise AssertionError("a specification is never called")


@hookspec
def hgms_register_commands(cli: click.Group) -> None:
    """Add commands of your own to the ``hgms`` command line: ``@cli.command("my-command")``. A name that is taken stays."""


@hookspec
def hgms_ready() -> None:
    """A comparison is about to begin. ConfigError or MissingExtra says that what a person asked for (a tracker, say) cannot be
    had, before any run has failed for it."""


@hookspec
def hgms_run_started(run: RunInfo) -> None:
    """A run begins or resumes."""


@hookspec
def hgms_step_finished(run: RunInfo, record: dict[str, Any]) -> None:
    """An outer step is done; ``record`` holds plain numbers and strings. Called outside the budget's clock."""


@hookspec
def hgms_run_finished(run: RunInfo, summary: dict[str, Any] | None, error: BaseException | None) -> None:
    """A run ended: with its summary, or with the error that stopped it."""
