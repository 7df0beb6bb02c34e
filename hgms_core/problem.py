"""A bilevel problem: two losses, their rows, and the start of a run.

A problem has a single form: flat dictionaries of tensors, and :class:`Data`. ``hgms.from_losses``
and ``hgms.from_module`` convert nested variables, modules, tables and loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from hgms_core.arguments import accepts, reports_errors
from hgms_core.data import Batch, Data, by_role, not_data
from hgms_core.errors import ConfigError
from hgms_core.seeding import Key
from hgms_core.trees import Tree, check_alike, check_tree, detach, summary

Loss = Callable[[Tree, Tree, Batch], Tensor]
"""``loss(theta, x, batch) -> scalar``: a pure function of tensors."""

Extension = TypeVar("Extension")


@frozen(kw_only=True, eq=False)
class Sources:
    """Extension of a problem: named data sources. g is a mixture of their losses::

        g(θ, x; batch) = Σ_s ω_s(θ) ℓ_s(x; batch),      ω(θ) on the simplex

    A batch has the leaf ``source``. It contains the position of each row's source in ``names``, or
    in ``parts`` for validation rows.

    Attributes
    ----------
    names
        In the order of ω.
    weights
        Maps θ to ω, ``[S]``.
    theta
        Maps weights by name to a θ with these weights.
    losses
        Maps ``(x, batch)`` to the ℓ_s, ``[S]``. Each is an unbiased estimate of the mean loss of
        its source for any batch.
    examples
        Maps ``(x, batch)`` to the loss of each row, ``[B]``, without random numbers.
    pooled
        Maps ``(θ, x, batch)`` to the training loss on any lower rows, without random numbers. Each
        row counts as in the mean of its source. The loss does not depend on θ.
    parts
        The names of the validation sets.
    """

    names: tuple[str, ...]
    weights: Callable[[Tree], Tensor]
    theta: Callable[[Mapping[str, float]], Tree]
    losses: Callable[[Tree, Batch], Tensor]
    examples: Callable[[Tree, Batch], Tensor]
    pooled: Loss = Factory(
        lambda own: lambda theta, x, batch: own.examples(x, batch).mean(-1), takes_self=True
    )
    parts: tuple[str, ...] = ("validation",)


@frozen(kw_only=True, eq=False)
class Rows:
    """Extension of a problem: one weight per lower row::

        g(θ, x; batch) = mean_i σ(θ_i) ℓ_i(x; batch) + r(θ, x; batch),      i in batch["index"]

    Methods may use other numbers as the weights of the rows of a batch.

    Attributes
    ----------
    leaf
        The name of the leaf of θ, ``[n]``, with the logits θ_i.
    losses
        Maps ``(x, batch)`` to the ℓ_i, ``[B]``, without weights and regulariser.
    regulariser
        Maps ``(θ, x, batch)`` to r, which does not depend on the leaf.

    Examples
    --------
    >>> rows = Rows(losses=lambda x, batch: (x["x"] - batch["a"]).square())
    >>> rows.leaf, rows.losses({"x": torch.zeros(1)}, {"a": torch.tensor([1.0, 2.0])})
    ('logits', tensor([1., 4.]))
    """

    leaf: str = "logits"
    losses: Callable[[Tree, Batch], Tensor]
    regulariser: Callable[[Tree, Tree, Batch], Tensor] = lambda theta, x, batch: next(
        iter(x.values())
    ).new_zeros(())

    def check(self, problem: Problem) -> None:
        """Require one entry of θ per lower row."""
        leaf = problem.theta0.get(self.leaf)
        if leaf is None or leaf.shape != (problem.lower_data.size,):
            raise ConfigError(
                "wrong-size",
                f"rows requires a leaf {self.leaf!r} of θ with one entry for each of the "
                f"{problem.lower_data.size} lower rows",
                place=("extensions", "rows"),
            )


def _start(value: Any) -> Any:
    # A start must not belong to a graph. The validator rejects values that are not trees.
    trained = isinstance(value, Mapping) and any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in value.values()
    )
    return detach(value) if trained else value


def _tree(problem: object, attribute: Any, value: object) -> None:
    check_tree(attribute.name, value)


def _data(problem: object, attribute: Any, value: object) -> None:
    if not isinstance(value, Data):
        raise not_data(attribute.name)


def _counts_no_calls(problem: Problem, attribute: Any, value: object) -> None:
    # Compiled functions would not count.
    if value is not None and problem.counters is not None:
        raise ConfigError(
            "conflicting-options",
            "the losses count their calls (counters), so they cannot be compiled (compiler)",
            place=("compiler",),
        )


@reports_errors
@frozen(kw_only=True, eq=False)
class Problem:
    """min over θ of f(θ, x), with x a minimiser of g(θ, ·) that is best for f.

    Attributes
    ----------
    theta0, x0
        The start of a run, floating-point tensors by name.
    g, f
        The lower and the upper loss, ``(theta, x, batch) -> scalar``.
    lower_data
        The rows of g.
    upper_data
        The rows of f by role (:data:`ROLES`), or the same rows for all roles.
    project
        Maps θ onto the feasible set.
    evaluate
        ``(theta, x) -> metrics``, for reports only. No decision depends on it.
    fresh
        Draws another initial x by a key.
    start
        Maps θ to the initial x, differentiably, if the start of the lower level is learned.
    references
        Special θ by name, such as weights computed from the correct labels.
    counters
        Returns numbers that only grow, such as the tokens processed so far.
    precision
        The dtype in which the losses are computed, if it is coarser than that of x. Finite
        differences then use a length that fits it.
    compiler
        Compiles functions of components; ``None``: all steps run eagerly. Losses that count their
        calls (``counters``) are not compiled.
    guard
        Runs the first step of a Pipeline, ``(problem, state, step) -> step()``, and explains wrong
        losses. ``hgms.from_losses`` and ``hgms.from_module`` set it.
    restore
        Maps ``(theta, x)`` to the form in which the user passed them.
    extensions
        Additional facts that some methods use, such as :class:`Sources`.
    kept
        Values that components store as long as the problem exists. ``attrs.evolve`` drops them.

    Raises
    ------
    ConfigError
        ``wrong-type`` for variables and rows of other types, ``wrong-signature`` for functions with
        other arguments, ``conflicting-options`` for ``compiler`` with ``counters``.

    Examples
    --------
    >>> loss = lambda theta, x, batch: (x["w"] - theta["t"]).square().sum()
    >>> problem = Problem(theta0={"t": torch.ones(2)}, x0={"w": torch.zeros(2)}, g=loss, f=loss)
    >>> problem.find(Sources) is None
    True
    """

    theta0: Tree = field(converter=_start, validator=_tree, repr=summary)
    x0: Tree = field(converter=_start, validator=_tree, repr=summary)
    g: Loss = field(validator=accepts("theta", "x", "batch"), repr=False)
    f: Loss = field(validator=accepts("theta", "x", "batch"), repr=False)
    lower_data: Data = field(factory=Data, validator=_data)
    upper_data: Mapping[str, Data] = field(factory=Data, converter=by_role)
    project: Callable[[Tree], Tree] = field(
        default=lambda theta: theta, validator=accepts("theta"), repr=False
    )
    evaluate: Callable[[Tree, Tree], Mapping[str, float]] = field(
        default=lambda theta, x: {}, validator=accepts("theta", "x"), repr=False
    )
    fresh: Callable[[Key], Tree] | None = field(
        default=None, validator=accepts("key", optional=True), repr=False
    )
    start: Callable[[Tree], Tree] | None = field(
        default=None, validator=accepts("theta", optional=True), repr=False
    )
    references: Mapping[str, Tree] = field(factory=dict, repr=lambda value: str(list(value)))
    counters: Callable[[], Mapping[str, int]] | None = field(
        default=None, validator=accepts(optional=True), repr=False
    )
    precision: torch.dtype | None = None
    compiler: Any = field(default=None, validator=_counts_no_calls, repr=False)
    guard: Callable[[Problem, Any, Callable[[], Any]], Any] | None = field(
        default=None, validator=accepts("problem", "state", "step", optional=True), repr=False
    )
    restore: Callable[[Tree, Tree], tuple[Any, Any]] = field(
        default=lambda theta, x: (theta, x), repr=False
    )
    extensions: tuple[object, ...] = ()
    kept: dict[Any, Any] = field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        rows = self.find(Rows)
        if rows is not None:
            rows.check(self)

    def find(self, kind: type[Extension]) -> Extension | None:
        """Return the extension of this kind, or None."""
        return next((item for item in self.extensions if isinstance(item, kind)), None)

    def with_extensions(self, *extensions: object) -> Problem:
        """Return the problem with these extensions; each replaces the extension of its kind."""
        kinds = tuple(type(item) for item in extensions)
        return evolve(self, extensions=(*self.without(*kinds).extensions, *extensions))

    def without(self, *kinds: type) -> Problem:
        """Return the problem without the extensions of these kinds."""
        kept = tuple(item for item in self.extensions if not isinstance(item, kinds))
        return evolve(self, extensions=kept)

    def initial(self, key: Key) -> Tree:
        """Return a lower state to start from: a fresh draw if the problem has one, or ``x0``."""
        if self.fresh is None:
            return self.x0
        x = self.fresh(key)
        check_alike("fresh", x, self.x0)
        return x
