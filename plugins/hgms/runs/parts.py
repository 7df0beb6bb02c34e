"""Explanation of a failed first step: the part of a method that returned a wrong value.

The error names the part. Without this check, the user would see only an error of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from hgms.plugins import inside
from hgms_core import (
    Candidates,
    ConfigError,
    Cost,
    Key,
    Method,
    Pipeline,
    Problem,
    Selection,
    State,
    Tree,
)
from hgms_core.components import evolve


class WrongPart(ConfigError):
    """A part returned a value that its protocol does not allow."""


def wrong_part(method: Method, problem: Problem, state: State) -> WrongPart | None:
    """Return the error for the part that returned a wrong value.

    This function repeats the step from ``state`` and checks the return value of each part. The
    result is ``None`` if all values are valid, or if the method has no parts. Only failed runs pay
    for this check.
    """
    try:
        watched = _watched(method)
        if watched is not None:
            watched.step(problem, state, 0.0)
    except WrongPart as error:
        return error
    except Exception:  # the same failure as in the run: no part explains it
        return None
    return None


def _watched(method: Any) -> Any:
    """Return the method with parts that check their return values.

    For a wrapper, this applies to the method inside. The result is ``None`` if there are no parts.
    """
    if isinstance(method, Pipeline):
        parts: dict[str, Any] = {"generator": _Generator, "selector": _Selector, "outer": _Outer}
        watched: dict[str, Any] = {
            name: watch(getattr(method, name)) for name, watch in parts.items()
        }
        return evolve(method, **watched)
    field = inside(type(method))
    within = None if field is None else _watched(getattr(method, field))
    return None if field is None or within is None else attrs.evolve(method, **{field: within})


class _Part:
    """A proxy of a part. Attributes that are not defined here come from the part."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def fail(self, message: str, *place: str) -> None:
        cls = type(self.part)
        raise WrongPart(
            "wrong-result",
            f"{cls.__module__}:{cls.__qualname__}: {message}",
            place=("method", *place),
        )


class _Generator(_Part):
    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float
    ) -> Candidates:
        proposed = self.part.propose(problem, theta, start, key, progress)
        if not isinstance(proposed, Candidates):
            self.fail(
                f"propose returns {_described(proposed)}, but must return Candidates",
                "generator",
                "propose",
            )
        expected = _tree(
            {name: ["N", *leaf.shape] for name, leaf in problem.x0.items()}, problem.x0
        )
        wrong_x = f"x of the Candidates is {_described(proposed.x)}, but must be {expected}"
        if not isinstance(proposed.x, Mapping):
            self.fail(wrong_x, "generator", "propose", "x")
        own = {name: getattr(leaf, "shape", ())[1:] for name, leaf in proposed.x.items()}
        counts = {
            leaf.shape[0]
            for leaf in proposed.x.values()
            if isinstance(leaf, torch.Tensor) and leaf.dim()
        }
        if not _alike(proposed.x, problem.x0, own) or len(counts) != 1:
            self.fail(wrong_x, "generator", "propose", "x")
        [count] = counts
        if proposed.losses is not None and getattr(proposed.losses, "shape", None) != (count,):
            self.fail(
                f"losses of the Candidates is {_described(proposed.losses)}, but must be [{count}]",
                "generator",
                "propose",
                "losses",
            )
        if not isinstance(proposed.cost, Cost):
            self.fail(
                f"cost of the Candidates is {_described(proposed.cost)}, but must be a Cost",
                "generator",
                "propose",
                "cost",
            )
        return proposed


class _Selector(_Part):
    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        selection = self.part.select(problem, theta, candidates, key)
        if not isinstance(selection, Selection):
            self.fail(
                f"select returns {_described(selection)}, but must return a Selection",
                "selector",
                "select",
            )
        if (
            not isinstance(selection.index, torch.Tensor)
            or selection.index.dim()
            or selection.index.is_floating_point()
        ):
            self.fail(
                f"index of the Selection is {_described(selection.index)}, but must be one integer",
                "selector",
                "select",
                "index",
            )
        return selection


class _Outer(_Part):
    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        result = self.part.step(theta, gradient, state, progress)
        if (
            not isinstance(result, tuple)
            or len(result) != 2
            or not all(isinstance(item, Mapping) for item in result)
        ):
            items = (
                " and ".join(map(_described, result))
                if isinstance(result, tuple)
                else _described(result)
            )
            self.fail(
                f"step returns {items}, but must return two dictionaries, (theta, state)",
                "outer",
                "step",
            )
        if not _alike(
            result[0], theta, {name: getattr(leaf, "shape", ()) for name, leaf in result[0].items()}
        ):
            expected = _tree({name: [*leaf.shape] for name, leaf in theta.items()}, theta)
            self.fail(
                f"theta of step is {_described(result[0])}, but must be {expected}",
                "outer",
                "step",
                "theta",
            )
        return result[0], result[1]


def _alike(tree: Mapping[str, Any], other: Tree, shapes: Mapping[str, Any]) -> bool:
    """Return whether two trees have the same names, shapes and types.

    ``shapes`` are the shapes of the leaves of the first tree.
    """
    same = shapes == {name: leaf.shape for name, leaf in other.items()}
    return same and all(
        isinstance(tree[name], torch.Tensor) and tree[name].dtype == leaf.dtype
        for name, leaf in other.items()
    )


def _tree(shapes: Mapping[str, Any], types: Tree) -> str:
    leaves = [
        f"{name} [{', '.join(map(str, shape))}] {_dtype(types[name])}"
        for name, shape in shapes.items()
    ]
    return f"{{{', '.join(leaves[:8] + ['…'] * (len(leaves) > 8))}}}"


def _described(value: object) -> str:
    """
    >>> _described({"x": torch.zeros(3), "y": 1.0}), _described((1, 2)), _described(None)
    ('{x [3] float32, y float}', 'a tuple of 2', 'None')
    """
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {_dtype(value)}"
    if isinstance(value, Mapping):
        leaves = [
            f"{name} {_described(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__}"
            for name, leaf in value.items()
        ]
        return f"{{{', '.join(leaves[:8] + ['…'] * (len(leaves) > 8))}}}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a value of the type {type(value).__name__}"


def _dtype(leaf: torch.Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")
