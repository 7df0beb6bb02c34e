"""Conversion between nested values of θ and x and the flat trees of a run.

Users may nest θ and x in any way. All parts of a run work with flat trees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from attrs import frozen
from torch import Tensor

from hgms.arguments import require
from hgms_core import ConfigError, Tree
from hgms_core.arguments import kind_of

Nested = Any
"""A tensor, or nested dictionaries, lists, tuples and named tuples of tensors.

The nesting may have any depth.
"""


@frozen
class Shape:
    """The nesting of a variable.

    ``skeleton`` has the same dictionaries, lists and tuples as the variable. In place of each leaf,
    it contains the name of the leaf. This name is the path to the leaf, joined by dots, or ``name``
    for a single tensor. ``flat`` is True if the variable is a dictionary of tensors.

    Examples
    --------
    >>> shape, tree = Shape.of({"layers": [torch.zeros(2), torch.ones(2)]}, "x", "x")
    >>> list(tree), shape.restore(tree)["layers"][1]
    (['layers.0', 'layers.1'], tensor([1., 1.]))
    """

    skeleton: Any
    name: str
    flat: bool

    @classmethod
    def of(cls, value: Nested, what: str, name: str) -> tuple[Shape, Tree]:
        """Return the shape and the flat tree of a value.

        ``what`` is the name of the value in errors, a place with dots.

        Raises
        ------
        ConfigError
            If a leaf is not a tensor, or if two leaves have the same name.
        """
        tree: Tree = {}
        place = tuple(what.split("."))

        def collect(path: tuple[str, ...], leaf: object) -> str:
            key = ".".join(path) or name
            if not isinstance(leaf, Tensor):
                raise _no_tensor((*place, *path), leaf)
            require(
                key not in tree,
                "duplicate-name",
                f"{what} has two leaves with the name {key!r}, a path joined by dots",
                hint="rename one of them",
                place=(*place, *path),
            )
            tree[key] = leaf
            return key

        skeleton = _map_leaves(value, collect)
        flat = isinstance(skeleton, dict) and all(key == leaf for key, leaf in skeleton.items())
        return cls(skeleton, name, flat), tree

    def restore(self, tree: Tree) -> Nested:
        """Return a flat tree with these names, nested in this shape.

        Leaves that are not in the shape are skipped. A flat shape returns the tree unchanged.
        """
        return tree if self.flat else _map_leaves(self.skeleton, lambda path, name: tree[name])

    def flatten(self, value: Nested, what: str) -> Tree:
        """Return the flat tree of another value in this shape.

        Raises
        ------
        ConfigError
            If the value is nested differently.
        """
        other, tree = Shape.of(value, what, self.name)
        if other.skeleton != self.skeleton:
            raise ConfigError(
                "wrong-shape",
                f"{what} must be nested like {self}, not {other}",
                place=tuple(what.split(".")),
            )
        return tree

    def __str__(self) -> str:
        text = "a tensor" if self.skeleton == self.name else str(self.skeleton)
        return text if len(text) < 300 else f"{text[:300]}…"


@runtime_checkable
class Array(Protocol):
    """Converts itself to an array of NumPy."""

    def __array__(self) -> Any: ...


def field_names(value: object) -> tuple[str, ...]:
    """Return the names of the items of a named tuple; empty for other values."""
    return getattr(value, "_fields", ())


def _map_leaves(
    value: Any, leaf: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()
) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_leaves(child, leaf, (*path, str(key))) for key, child in value.items()}
    if isinstance(value, list | tuple):
        names = field_names(value)
        parts = [
            _map_leaves(child, leaf, (*path, str(name)))
            for name, child in zip(names or range(len(value)), value, strict=True)
        ]
        return type(value)(*parts) if names else type(value)(parts)
    return leaf(path, value)


def _no_tensor(place: tuple[str, ...], leaf: object) -> ConfigError:
    return ConfigError(
        "wrong-type",
        f"{'.'.join(place)} must be a tensor, not {kind_of(leaf)}",
        place=place,
        hint="use torch.as_tensor(value) for numbers and arrays\nuse trainable(module) for the "
        "trained parameters of a module, or hgms.from_module",
    )


def check_grad_mode() -> None:
    """Raise ConfigError inside ``torch.inference_mode``.

    Derivatives do not exist in this mode.
    """
    require(
        not torch.is_inference_mode_enabled(),
        "inference-mode",
        "derivatives do not exist inside torch.inference_mode()",
        hint="leave inference_mode, or use torch.no_grad()",
    )


def check_floating(what: str, tree: Any) -> None:
    """Check that ``tree`` is a dictionary of floating-point tensors.

    Only floating-point tensors have derivatives. Tensors that were created inside
    ``torch.inference_mode`` have no derivatives.

    Raises
    ------
    ConfigError
        If ``tree`` is not such a dictionary, or contains both frozen parameters and trained leaves.
    """
    check_grad_mode()
    require(
        isinstance(tree, Mapping),
        "wrong-type",
        f"{what} must be a dictionary of tensors by name, not a {type(tree).__name__}",
        place=(what,),
    )
    trained = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree.values())
    for name, leaf in tree.items():
        if not isinstance(leaf, Tensor):
            raise _no_tensor((what, str(name)), leaf)
        if trained and isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad:
            raise ConfigError(
                "frozen-parameter",
                f"{what} contains the frozen parameter {name!r} and trained ones",
                place=(what, name),
                hint="use trainable(module)",
            )
        if not leaf.is_floating_point():
            raise ConfigError(
                "wrong-dtype",
                f"{name!r} has dtype {str(leaf.dtype).removeprefix('torch.')}, but {what} must "
                "contain floating-point tensors",
                place=(what, name),
                hint="call .float(); for a module use trainable(module), not its state_dict",
            )
        require(
            not leaf.is_inference(),
            "inference-mode",
            f"{name!r} was created inside torch.inference_mode(), so it has no derivative",
            hint="use .clone() outside inference_mode, or torch.no_grad() in its place",
            place=(what, name),
        )
