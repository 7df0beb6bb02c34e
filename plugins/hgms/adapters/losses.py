"""Losses of tensors and nested variables: as a problem, or for a single hypergradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, TypedDict, Unpack

import attrs
import torch
from attrs import evolve, frozen
from torch import Tensor

from hgms.adapters.checks import ExplainsRandomness, check_used, guard_first_step, pure
from hgms.adapters.display import as_text, number, sizes
from hgms.adapters.shapes import Nested, Shape, check_floating
from hgms.adapters.tables import read_roles, read_table
from hgms.arguments import arguments_named, require
from hgms.torch_errors import differences_named
from hgms_core import (
    Bound,
    ConfigError,
    Data,
    Estimate,
    Key,
    Linearization,
    Problem,
    Ravel,
    Rows,
    Solution,
    Sources,
    Strategy,
    norm,
)
from hgms_core.arguments import check_function
from hgms_core.capabilities import HasOutputs, NotStackable, find
from hgms_core.errors import unknown_name

NO_ROWS = Data()


class CommonOptions(TypedDict, total=False):
    """Further fields of a problem; θ and x have the form of the user."""

    project: Callable[..., Any]
    fresh: Callable[[Key], Nested] | None
    start: Callable[..., Nested] | None
    references: Mapping[str, Nested]
    counters: Callable[[], Mapping[str, int]] | None
    compiler: Any


class Options(CommonOptions, total=False):
    """Further arguments of :func:`from_losses`."""

    evaluate: Callable[..., Mapping[str, Any]]
    precision: torch.dtype | None
    extensions: tuple[object, ...]


@arguments_named
def from_losses(
    *,
    theta0: Nested,
    x0: Nested,
    g: Callable[..., Tensor],
    f: Callable[..., Tensor],
    lower_data: Any = NO_ROWS,
    upper_data: Any = NO_ROWS,
    **options: Unpack[Options],
) -> Problem:
    """Build a problem from two losses of tensors in any nesting.

    Parameters
    ----------
    theta0, x0
        Start of θ and x: a tensor, or dictionaries, lists, tuples and named tuples of
        floating-point tensors in any depth. All functions receive and return this form.
    g, f
        Lower and upper loss, ``(theta, x, batch) -> scalar``, pure functions of tensors.
    lower_data, upper_data
        Rows of g and f: all that :func:`hgms.as_data` reads. By default a loss has no rows.
        ``upper_data`` may be one table per role (``differentiate``, ``select``, ``stop``). Floats
        in arrays get the type of x, and all rows its device.
    options
        Further fields of :class:`hgms_core.Problem`: ``project(theta)``, ``evaluate(theta, x)``,
        ``fresh(key)``, ``start(theta)``, ``references``, ``counters()``, ``precision``,
        ``extensions``.

    Returns
    -------
    Problem
        In the strict form of the core; ``problem.restore(theta, x)`` leads back.

    Raises
    ------
    ConfigError
        For leaves that are not floating-point tensors, functions with other arguments, and tables
        that cannot be read.

    Examples
    --------
    >>> from torch import ones, zeros
    >>> loss = lambda theta, x, batch: (x[0] - theta).square().sum()
    >>> problem = from_losses(theta0=zeros(2), x0=[ones(2)], g=loss, f=loss)
    >>> problem.x0, problem.restore(problem.theta0, problem.x0)
    ({'0': tensor([1., 1.])}, (tensor([0., 0.]), [tensor([1., 1.])]))
    """
    check_options(from_losses, options, Options)
    theta_shape, theta = Shape.of(theta0, "theta0", "theta")
    x_shape, x = Shape.of(x0, "x0", "x")
    check_floating("theta0", theta)
    check_floating("x0", x)
    check_function("g", g, "theta", "x", "batch")
    check_function("f", f, "theta", "x", "batch")
    like = next(iter(x.values()), torch.empty(0))
    fields: dict[str, Any] = {"g": g, "f": f, **options}
    if not (theta_shape.flat and x_shape.flat):
        fields = _flatten_fields(fields, theta_shape, x_shape)
    return Problem(
        theta0=theta,
        x0=x,
        lower_data=read_table(lower_data, "lower_data", like),
        upper_data=read_roles(upper_data, "upper_data", like),
        guard=guard_first_step,
        **fields,
    )


def check_options(function: Callable[..., Any], options: Mapping[str, object], kind: Any) -> None:
    """Require names of the TypedDict ``kind``, else raise ConfigError ``unknown-option``."""
    arguments = [*inspect.signature(function).parameters][:-1]
    for name in options:
        if name not in kind.__annotations__:
            known = [*arguments, *kind.__annotations__]
            raise unknown_name("option", name, known, (name,), f"argument of {function.__name__}")


def _flatten_fields(fields: Mapping[str, Any], theta: Shape, x: Shape) -> dict[str, Any]:
    """The fields of a problem whose functions take and return nested variables."""
    flat = dict(fields)
    flat["g"] = _of_flat(fields["g"], theta, x)
    flat["f"] = _of_flat(fields["f"], theta, x)
    flat["restore"] = lambda a, b: (theta.restore(a), x.restore(b))
    if project := fields.get("project"):
        flat["project"] = lambda a: theta.flatten(project(theta.restore(a)), "project")
    if evaluate := fields.get("evaluate"):
        flat["evaluate"] = lambda a, b: evaluate(theta.restore(a), x.restore(b))
    if fresh := fields.get("fresh"):
        flat["fresh"] = lambda key: x.flatten(fresh(key), "fresh")
    if start := fields.get("start"):
        flat["start"] = lambda a: x.flatten(start(theta.restore(a)), "start")
    if references := fields.get("references"):
        flat["references"] = {
            name: theta.flatten(value, f"references.{name}") for name, value in references.items()
        }
    extensions = fields.get("extensions", ())
    if any(isinstance(item, Sources) for item in extensions):
        raise ConfigError(
            "conflicting-options",
            "a problem with sources requires flat dictionaries of tensors for θ and x",
            place=("extensions",),
        )
    flat["extensions"] = tuple(
        _rows_of_flat(item, theta, x) if isinstance(item, Rows) else item for item in extensions
    )
    return flat


def _of_flat(loss: Any, theta: Shape, x: Shape) -> Any:
    """A loss of nested variables as one of flat trees, with its outputs and criterion, if any."""
    flat: Any = wraps(loss)(lambda a, b, batch: loss(theta.restore(a), x.restore(b), batch))
    flat.capabilities = frozenset(
        kind for kind in (HasOutputs, ExplainsRandomness, NotStackable) if find(loss, kind)
    )
    if known := find(loss, HasOutputs):
        flat.outputs = lambda b, batch: known.outputs(x.restore(b), batch)
        flat.criterion = lambda a, b, z, batch: known.criterion(
            theta.restore(a), x.restore(b), z, batch
        )
    return flat


def _rows_of_flat(rows: Rows, theta: Shape, x: Shape) -> Rows:
    return evolve(
        rows,
        losses=lambda b, batch: rows.losses(x.restore(b), batch),
        regulariser=lambda a, b, batch: rows.regulariser(theta.restore(a), x.restore(b), batch),
    )


@frozen(kw_only=True)
class Hypergradient(Estimate):
    """The estimate of :func:`hypergradient`: ``value`` is nested as θ.

    ``residual``, ``iterations`` and ``curvature`` are those of ``solution``.
    """

    solution: Solution

    @property
    def residual(self) -> Tensor:
        """The relative residual of the linear solve."""
        return self.solution.residual

    @property
    def iterations(self) -> Tensor:
        """The iterations of the linear solve."""
        return self.solution.iterations

    @property
    def curvature(self) -> Tensor:
        """The smallest Rayleigh quotient that the solver computed."""
        return self.solution.curvature

    __repr__ = as_text

    def _rows(self) -> Iterator[tuple[str, str]]:
        _, value = Shape.of(self.value, "value", "theta")
        yield "value", f"{sizes(value)}, norm {number(norm(value))}"
        yield "outcome", f"{self.outcome.label}: {self.outcome.value}"
        for name in ("upper_loss", "residual", "iterations", "curvature", "lower_gradient_norm"):
            measured = getattr(self, name)
            if measured is not None:
                yield name.replace("_", " "), number(measured)
        yield "cost", f"{self.cost.calls} oracle calls"


def hypergradient(
    f: Callable[..., Tensor],
    g: Callable[..., Tensor],
    theta: Nested,
    x: Nested,
    *,
    solver: Any,
    strategy: Strategy = "vjp",
    v0: Tensor | None = None,
) -> Hypergradient:
    """Compute the implicit hypergradient of two losses at a lower solution ``x``.

    ∇F(θ) = ∇_θ f − ∇²_θx g·v with (∇²_xx g + γI) v = ∇_x f.

    Parameters
    ----------
    f, g
        Upper and lower loss, ``(theta, x) -> scalar``, pure functions of tensors.
    theta, x
        A tensor, or dictionaries, lists and tuples of tensors in any depth, as the losses receive
        them. :func:`trainable` returns x of a module.
    solver
        A LinearSolver (``hgms.solvers.CG(ridge=1e-3)``), or any function ``solve(matvec, b) -> v``.
    strategy
        How products with ∇²_xx g are computed, see :func:`hgms_core.curvature`.
    v0
        Start of the solver, for example the ``solution.value`` of the last call.

    Returns
    -------
    Hypergradient
        ``value`` is nested as θ. ``outcome``, ``residual``, ``iterations``, ``curvature`` and
        ``lower_gradient_norm`` (‖∇_x g‖, which the formula assumes to be 0) state its quality.

    Raises
    ------
    ConfigError
        For a loss that is not a pure function (random numbers, dropout or batch normalisation in
        training mode, in-place changes of its arguments) or lacks the second derivative that
        ``strategy`` needs; if no loss depends on θ, or g does not depend on x; for leaves that are
        not floating-point; and inside ``torch.inference_mode``.

    Notes
    -----
    Cost: 1 upper gradient, 1 lower gradient, one Hessian product per iteration, 1 cross product,
    and up to five values of a loss that draws from a global generator. A solve that does not
    converge is not an error: read ``outcome``.

    Source: HG-MS paper, equation (3); for a unique lower solution, the implicit function theorem.

    Examples
    --------
    >>> import torch
    >>> f = lambda theta, x: 0.5 * ((x - 1) ** 2).sum()
    >>> g = lambda theta, x: 0.5 * ((x - theta) ** 2).sum()  # x*(θ) = θ, so F(θ) = ½‖θ − 1‖²
    >>> theta = torch.tensor([3.0, 1.0])
    >>> hypergradient(f, g, theta, theta.clone(), solver=lambda matvec, b: b).value
    tensor([2., 0.])
    """
    above, upper = Shape.of(theta, "theta", "theta")
    below, lower = Shape.of(x, "x", "x")
    for what, tree in (("theta", upper), ("x", lower)):
        check_floating(what, tree)
        require(
            tree, "wrong-value", f"{what} contains no tensor to differentiate by", place=(what,)
        )

    size = Ravel.of(lower).size
    require(size != 0, "wrong-shape", "x contains no number to differentiate by", place=("x",))
    if v0 is not None and v0.shape != (size,):
        raise ConfigError(
            "wrong-shape",
            f"v0 must have shape [{size}], one entry per number in x, not {list(v0.shape)}",
            place=("v0",),
        )

    def bind(name: str, loss: Callable[..., Tensor]) -> Bound:
        check_function(name, loss, "theta", "x")
        return lambda a, b: loss(above.restore(a), below.restore(b))

    losses = bind("f", f), bind("g", g)
    with differences_named():
        levels = Linearization.of(
            pure(losses[0], "f"), pure(losses[1], "g"), upper, lower, strategy
        )
        estimate = levels.hypergradient(solver, v0)
    if not any(bool(leaf.any()) for leaf in estimate.value.values()):
        check_used(*losses, upper, lower)
    parts = attrs.asdict(estimate, recurse=False)
    return Hypergradient(**{**parts, "value": above.restore(estimate.value)})
