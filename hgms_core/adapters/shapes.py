"""Shapes: θ and x as a person has them, nested as they like, and the flat trees that all parts
of a run work with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms_core.errors import ConfigError
from hgms_core.trees import Tree

Nested = Any
"""A tensor, or dictionaries, lists, tuples and named tuples of tensors, in any depth."""


@frozen
class Shape:
    """How a variable is nested. ``skeleton`` holds the same dictionaries, lists and tuples, with
    the name of each leaf in its place: the path to it, joined by dots, or ``name`` for a tensor
    alone. ``flat`` where it is a dictionary of tensors.

    >>> shape, tree = Shape.of({"layers": [torch.zeros(2), torch.ones(2)]}, "'x'", "x")
    >>> list(tree), shape.restore(tree)["layers"][1]
    (['layers.0', 'layers.1'], tensor([1., 1.]))
    """

    skeleton: Any
    name: str
    flat: bool

    @classmethod
    def of(cls, value: Nested, what: str, name: str) -> tuple[Shape, Tree]:
        """The shape and the flat tree of a value; ConfigError, with ``what`` it is, where a leaf
        is no tensor.
        """
        tree: Tree = {}

        def collected(path: tuple[str, ...], leaf: object) -> str:
            key = ".".join(path) or name
            if not isinstance(leaf, Tensor):
                raise ConfigError(_no_tensor(what, ".".join(path), leaf))
            if key in tree:
                raise ConfigError(
                    f"{what} has two leaves that are called {key!r} (a path joined by dots); "
                    "rename one"
                )
            tree[key] = leaf
            return key

        skeleton = _mapped(value, collected)
        flat = isinstance(skeleton, dict) and all(key == leaf for key, leaf in skeleton.items())
        return cls(skeleton, name, flat), tree

    def restore(self, tree: Tree) -> Nested:
        """A flat tree with these names, in the shape; leaves that the shape does not know are
        left out.
        """
        return tree if self.flat else _mapped(self.skeleton, lambda path, name: tree[name])

    def flatten(self, value: Nested, what: str) -> Tree:
        """The flat tree of another value in this shape."""
        other, tree = Shape.of(value, what, self.name)
        if other.skeleton != self.skeleton:
            raise ConfigError(
                f"{what} must be nested as it was at first, {self}, and not as {other}"
            )
        return tree

    def __str__(self) -> str:
        text = "of a tensor" if self.skeleton == self.name else str(self.skeleton)
        return text if len(text) < 300 else f"{text[:300]}…"


def _mapped(
    value: Any, leaf: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()
) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(child, leaf, (*path, str(key))) for key, child in value.items()}
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        parts = [
            _mapped(child, leaf, (*path, str(name)))
            for name, child in zip(names, value, strict=True)
        ]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return leaf(path, value)


def _no_tensor(what: str, name: str, leaf: object) -> str:
    place = f"{what}, at {name!r}," if name else what
    if isinstance(leaf, torch.nn.Module | Iterator):
        kind = type(leaf).__name__
        return (
            f"{place} must be tensors, not the "
            f"{'module' if isinstance(leaf, torch.nn.Module) else 'iterator'} {kind}\n"
            "  write `trainable(module)` for the parameters that training changes, or make the "
            "problem by `Problem.of_module`"
        )
    if leaf is None:
        return f"{place} is None; leave it out, or write a tensor"
    if isinstance(leaf, bool | int | float):
        return (
            f"{place} is the number {leaf!r}; write `torch.tensor({float(leaf)!r})`, and for "
            "a list of numbers one tensor"
        )
    advice = (
        "write `torch.as_tensor(…)` of it" if hasattr(leaf, "__array__") else "leaves are tensors"
    )
    return f"{place} is a {type(leaf).__name__}; {advice}"


def check_floating(what: str, tree: object) -> None:
    """ConfigError where ``tree`` is not a dictionary of floating-point tensors, which alone have
    derivatives.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{what} must be a dictionary of tensors by name, not a {type(tree).__name__}"
        )
    trained = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree.values())
    for name, leaf in tree.items():
        if not isinstance(leaf, Tensor):
            raise ConfigError(_no_tensor(what, str(name), leaf))
        if trained and isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad:
            raise ConfigError(
                f"{what} holds the frozen parameter {name!r} among trained ones\n"
                "  write `trainable(module)`"
            )
        if not leaf.is_floating_point():
            raise ConfigError(
                f"{what} must hold floating-point tensors, and {name!r} is "
                f"{str(leaf.dtype).removeprefix('torch.')}\n"
                "  write `.float()`; of a module take `trainable(module)`, its parameters: a "
                "state_dict has more"
            )
