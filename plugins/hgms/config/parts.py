"""Components as arguments of other components.

The functions check whether a component is of the kind that a field requires. If it is not, they
suggest a valid value.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from importlib.metadata import entry_points
from typing import Any

import torch

from hgms.config.shown import got
from hgms_core import (
    CandidateGenerator,
    ConfigError,
    HyperGradient,
    LinearSolver,
    Method,
    OuterOptimizer,
    Selector,
    Task,
    as_solver,
    closest,
)

KINDS: dict[Any, str] = {
    CandidateGenerator: "a candidate generator",
    Selector: "a selector",
    LinearSolver: "a linear solver",
    HyperGradient: "a hypergradient estimator",
    OuterOptimizer: "an outer optimiser",
    Task: "a task",
    Method: "a method",
}
"""Descriptions of the kinds of component, by protocol."""


@functools.cache
def methods(protocol: Any) -> frozenset[str]:
    """Return the methods of a protocol."""
    return frozenset(
        name
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and name[0] != "_"
    )


def is_of(kind: Any, value: object) -> bool:
    """Return whether a component, or its class, has the methods of a kind.

    The result is False if it also has the methods of a larger kind. For example, a method also has
    the methods of an outer optimiser.

    >>> from hgms_core import Pipeline
    >>> is_of(Method, Pipeline), is_of(OuterOptimizer, Pipeline)
    (True, False)
    """
    wanted = methods(kind)
    more = [methods(other) for other in KINDS if methods(other) > wanted]
    return _has(value, wanted) and not any(_has(value, names) for names in more)


def _has(value: object, names: frozenset[str]) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)


def part(value: Any, kind: Any) -> Any:
    """Return the component for a field of this kind.

    The result is ``None`` if ``value`` is not such a component. A function may solve linear
    systems: it is accepted as a linear solver.
    """
    if isinstance(value, type):
        return None
    if kind is LinearSolver and callable(value) and not hasattr(value, "solve"):
        return as_solver(value)
    return value if is_of(kind, value) else None


def instead(value: object, kind: Any) -> ConfigError:
    """Return the error for a value that is not a component of the kind.

    The hint suggests a valid value.
    """
    cls = value if isinstance(value, type) else type(value)
    needed = ", ".join(sorted(methods(kind)))
    message = f"expected {KINDS[kind]} (an object with {needed}), got {got(value)}"
    if isinstance(value, type) and is_of(kind, value):
        return ConfigError("wrong-part", message, hint=f"use {value.__name__}()")
    if kind is OuterOptimizer and issubclass(cls, torch.optim.Optimizer):
        outer = f"hgms.outer.TorchOptimizer(optimizer={cls.__name__!r}, settings={{…}})"
        return ConfigError("wrong-part", message, hint=f"use {outer}")
    classes = _classes(kind)
    name = closest(value, classes) if isinstance(value, str) else None
    if name is not None:
        hint = f"use {classes[name].__name__}(), with `{_imported(classes[name])}`"
        return ConfigError("wrong-part", message, hint=hint)
    what = next(
        (f", which is {words}" for other, words in KINDS.items() if is_of(other, value)), ""
    )
    names = ", ".join(sorted(cls.__name__ for cls in classes.values())) or "(none)"
    hint = f"available: {names}"
    if kind is Method:
        hint += ", Pipeline; names are for `run` and `compare`"
    return ConfigError("wrong-part", message + what, hint=hint)


def _imported(cls: type) -> str:
    # a class is exported by the package of its module
    package = cls.__module__.rpartition(".")[0] or cls.__module__
    return f"from {package} import {cls.__name__}"


def _classes(kind: Any) -> dict[str, type]:
    """Return the classes of a kind in the installed plugins.

    The keys are the names that configurations use for them.
    """
    classes: dict[str, type] = {}
    for point in entry_points(group="hgms"):
        with contextlib.suppress(Exception):  # skip a plugin that does not load
            hooks = [
                hook
                for name, hook in vars(point.load()).items()
                if name.startswith("hgms_register_") and name != "hgms_register_commands"
            ]
            offered = [target for hook in hooks for target in hook()]
            fitting: list[Any] = [
                cls for cls in offered if isinstance(cls, type) and is_of(kind, cls)
            ]
            classes |= {cls.name: cls for cls in fitting}
    return classes
