"""A bilevel problem: two losses, their data, and where to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from hgms_core.adapters.arguments import arguments_named, check_function
from hgms_core.adapters.checks import check_alike, numbers_by_name
from hgms_core.adapters.display import as_html, as_text, problem_rows
from hgms_core.adapters.modules import of_module
from hgms_core.adapters.shapes import Nested, Shape, check_floating
from hgms_core.data import Batch, Data, Rows, by_role, data_of
from hgms_core.errors import ConfigError
from hgms_core.seeding import Key
from hgms_core.trees import Tree, clone, detach

Loss = Callable[[Tree, Tree, Batch], Tensor]
"""``loss(theta, x, batch) -> scalar``: a pure function of tensors, so that it can be
differentiated, stacked and replayed.
"""


@frozen(kw_only=True, eq=False)
class Sources:
    """The named data sources whose losses g mixes::

        g(θ, x; batch) = Σ_s ω_s(θ) ℓ_s(x; batch),      ω(θ) on the simplex

    ``names`` are in the order of ω; ``weights(θ)`` gives ω, ``[S]``, and ``theta(weights by name)``
    an upper variable with these weights. ``losses(x, batch)`` are the ℓ_s, ``[S]``, each an
    unbiased estimate of its source's mean loss whatever the batch holds of it; ``examples(x,
    batch)`` is the loss of each row, ``[B]``, without anything random. ``pooled(θ, x, batch)`` is
    the loss of training on lower rows as they come, whatever their sources: each row counts as it
    does in its source's mean (by its tokens, where that is a mean over tokens), nothing is random,
    and θ does not matter. ``parts`` name the validation sets, where there are several. A batch has
    the leaf ``source``: each row's position in ``names`` (of validation rows, in ``parts``).
    """

    names: tuple[str, ...]
    weights: Callable[[Tree], Tensor]
    theta: Callable[[Mapping[str, float]], Tree]
    losses: Callable[[Tree, Batch], Tensor]
    examples: Callable[[Tree, Batch], Tensor]
    pooled: Loss = Factory(
        lambda self: lambda theta, x, batch: self.examples(x, batch).mean(-1), takes_self=True
    )
    parts: tuple[str, ...] = ("validation",)


def _everywhere(theta: Tree) -> Tree:
    return theta


def _nothing(theta: Tree, x: Tree) -> Mapping[str, float]:
    return {}


def _any(value: Any) -> Any:
    # for type checkers: what callers may give; Problem.__attrs_post_init__ says what becomes of it
    return value


_CALLED = {
    "g": ("theta", "x", "batch"),
    "f": ("theta", "x", "batch"),
    "project": ("theta",),
    "evaluate": ("theta", "x"),
    "fresh": ("key",),
    "start": ("theta",),
    "counters": (),
}
"""With what the functions of a problem are called."""


def _of_flat(loss: Any, theta: Shape, x: Shape) -> Any:
    """A loss of nested variables as a loss of flat ones, with its outputs and criterion if it has
    some."""
    flat: Any = wraps(loss)(lambda a, b, batch: loss(theta.restore(a), x.restore(b), batch))
    if hasattr(loss, "outputs") and hasattr(loss, "criterion"):
        flat.outputs = lambda b, batch: loss.outputs(x.restore(b), batch)
        flat.criterion = lambda a, b, z, batch: loss.criterion(
            theta.restore(a), x.restore(b), z, batch
        )
    return flat


@arguments_named
@frozen(kw_only=True, eq=False)
class Problem:
    """min_θ f(θ, x) over x ∈ argmin_x g(θ, x), ready to run.

    ``theta0`` and ``x0`` are where a run starts; ``g`` and ``f`` the lower and upper loss;
    ``lower_data`` what g is computed on and ``upper_data`` what f is computed on, by role, so that
    selection, differentiation and stopping can use different validation rows (both take rows of any
    kind, :meth:`Data.of`, and ``upper_data`` one table for all roles); ``project`` maps θ onto Θ;
    ``evaluate(theta, x)`` gives the metrics that are reported (outside the budget's clock, and
    outside every decision); a run calls it with copies of θ and x. ``fresh(key)`` draws another
    initial lower state; ``references`` names special upper variables, such as the weights that know
    which labels are right. ``sources`` is there where θ weights named data sources, ``rows`` where
    it weights lower rows. ``counters()`` gives numbers that only grow, such as tokens processed:
    every step records by how much they grew. ``start(theta)`` is there where the lower level's
    start is learned: the state to start from, as a differentiable function of θ. ``precision`` is
    the type the losses are computed in where that is coarser than x's (adapters in float32 on a
    base in bfloat16): finite differences are then taken over a length that fits it. ``compiler``
    makes programs of what components run often (None: none). ``kept`` is for what they keep as long
    as the problem; ``attrs.evolve`` leaves it behind.

    θ and x may be nested (:data:`Nested`); ``g``, ``f``, ``project``, ``evaluate``, ``fresh``,
    ``start`` and ``references`` then take and give that shape. The attributes of the problem, which
    methods and ``attrs.evolve`` take, are flat all the same; ``shapes`` leads back
    (:meth:`restore`).
    """

    theta0: Tree = field(converter=_any)
    x0: Tree = field(converter=_any)
    g: Loss
    f: Loss
    lower_data: Data = field(factory=Data.none, converter=_any)
    upper_data: Mapping[str, Data] = field(factory=Data.none, converter=_any)
    project: Callable[[Tree], Tree] = _everywhere
    evaluate: Callable[[Tree, Tree], Mapping[str, float]] = _nothing
    fresh: Callable[[Key], Tree] | None = None
    references: Mapping[str, Tree] = Factory(dict)
    sources: Sources | None = None
    rows: Rows | None = None
    counters: Callable[[], Mapping[str, int]] | None = None
    start: Callable[[Tree], Tree] | None = None
    precision: torch.dtype | None = None
    compiler: Any = None
    shapes: tuple[Shape, Shape] | None = field(default=None, repr=False)
    kept: dict[Any, Any] = field(init=False, factory=dict, repr=False)

    __repr__ = as_text
    _repr_html_ = as_html
    _rows = problem_rows

    def __attrs_post_init__(self) -> None:
        for name, arguments in _CALLED.items():
            if getattr(self, name) is not None or name in ("g", "f", "project", "evaluate"):
                check_function(name, getattr(self, name), *arguments)
        for name, value in self._flattened().items():
            object.__setattr__(self, name, value)
        for name in ("theta0", "x0"):
            check_floating(name, tree := getattr(self, name))
            if any(leaf.requires_grad for leaf in tree.values()):  # a start belongs to no graph
                object.__setattr__(self, name, detach(tree))
        like = next(iter(self.x0.values()), torch.empty(0))
        object.__setattr__(self, "lower_data", data_of(self.lower_data, "lower_data", like))
        object.__setattr__(self, "upper_data", by_role(self.upper_data, "upper_data", like))
        if self.rows is not None and self.theta0.get(self.rows.leaf, like[None]).shape != (
            self.lower_data.size,
        ):
            raise ConfigError(
                "wrong-size",
                f"rows requires a leaf {self.rows.leaf!r} of θ with one entry for each of the "
                f"{self.lower_data.size} lower rows",
                place=("rows",),
            )

    def _flattened(self) -> dict[str, Any]:
        """What has to be another where θ or x is no flat dictionary: the tree, and the functions
        that a person wrote for it.
        """
        # of attrs.evolve: all is flat already, but perhaps another start
        if self.shapes is not None:
            own = {
                name: (shape, getattr(self, name))
                for name, shape in zip(("theta0", "x0"), self.shapes, strict=True)
            }
            nested = {
                name: pair for name, pair in own.items() if not Shape.of(pair[1], name, "")[0].flat
            }
            return {name: shape.flatten(value, name) for name, (shape, value) in nested.items()}
        theta, theta0 = Shape.of(self.theta0, "theta0", "theta")
        x, x0 = Shape.of(self.x0, "x0", "x")
        if theta.flat and x.flat:
            return {}
        if self.sources is not None:
            raise ConfigError(
                "conflicting-options",
                "a problem with sources requires flat dictionaries of tensors for θ and x",
                place=("sources",),
            )
        g = self.g
        f = self.f
        project = self.project
        evaluate = self.evaluate
        fresh = self.fresh
        start = self.start
        flat: dict[str, Any] = {"shapes": (theta, x), "theta0": theta0, "x0": x0}
        flat["g"] = _of_flat(g, theta, x)
        flat["f"] = _of_flat(f, theta, x)
        if project is not _everywhere:
            flat["project"] = lambda a: theta.flatten(project(theta.restore(a)), "project")
        if evaluate is not _nothing:
            flat["evaluate"] = lambda a, b: evaluate(theta.restore(a), x.restore(b))
        if fresh is not None:
            flat["fresh"] = lambda key: x.flatten(fresh(key), "fresh")
        if start is not None:
            flat["start"] = lambda a: x.flatten(start(theta.restore(a)), "start")
        if rows := self.rows:
            flat["rows"] = evolve(rows, losses=lambda b, batch: rows.losses(x.restore(b), batch))
            more = rows.regulariser
            flat["rows"] = evolve(
                flat["rows"],
                regulariser=lambda a, b, batch: more(theta.restore(a), x.restore(b), batch),
            )
        named = {
            name: theta.flatten(value, f"references.{name}")
            for name, value in self.references.items()
        }
        return {**flat, "references": named}

    def restore(self, theta: Tree, x: Tree) -> tuple[Nested, Nested]:
        """θ and x, flat as a method has them, in the shapes in which ``theta0`` and ``x0`` were
        given.

        >>> loss = lambda theta, x, batch: (x[0] - theta).square().sum()
        >>> problem = Problem(theta0=torch.zeros(2), x0=[torch.ones(2)], g=loss, f=loss)
        >>> problem.x0, problem.restore(problem.theta0, problem.x0)
        ({'0': tensor([1., 1.])}, (tensor([0., 0.]), [tensor([1., 1.])]))
        """
        return (
            (theta, x)
            if self.shapes is None
            else (self.shapes[0].restore(theta), self.shapes[1].restore(x))
        )

    of_module = classmethod(of_module)

    def initial(self, key: Key) -> Tree:
        """A lower state to start from: ``x0``, or a fresh draw where the problem has one."""
        if self.fresh is None:
            return self.x0
        x = self.fresh(key)
        check_alike("fresh", x, self.x0)
        return x

    def metrics(self, theta: Tree, x: Tree) -> dict[str, float]:
        """What ``evaluate`` measures, as plain numbers; ConfigError where it is no dictionary of
        them. ``evaluate`` works on copies, so in-place operations there cannot change a run.
        """
        return numbers_by_name(self.evaluate(clone(theta), clone(x)))
