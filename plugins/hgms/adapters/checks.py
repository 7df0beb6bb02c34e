"""Validate user-written losses before the first step instead of during the run."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hgms.adapters.display import sizes
from hgms.adapters.shapes import check_grad_mode
from hgms.arguments import require
from hgms_core import (
    Batch,
    Bound,
    ConfigError,
    Data,
    HgmsError,
    Key,
    NumericalError,
    Problem,
    Record,
    State,
    Tree,
    clone,
    detach,
)
from hgms_core.arguments import kind_of
from hgms_core.capabilities import find
from hgms_core.errors import closest
from hgms_core.hypergrad import check_dense, lacks_gradient
from hgms_core.torch_errors import NOT_REPEATABLE, RANDOM, explain_errors, first_line, out_of_memory
from hgms_core.trees import check_alike, require_grad

LOG = logging.getLogger("hgms")

VALUES = 5
"""Number of values that are compared for a loss that draws random numbers. On few rows, two masks
of dropout are equal with probability 1/30.
"""
FEW = 8
MANY = 4096
"""Number of rows on which a loss is evaluated before the first step, and to explain a failure."""
COPIES = "without .detach(), .item(), .data, NumPy or torch.no_grad()"
OTHERS = "compute with the arguments of the loss, not with other modules or tensors"


def global_states(device: torch.device) -> list[Any]:
    """Return the states of the global generators of torch, NumPy and Python."""
    states: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    if "numpy" in sys.modules:
        _, numbers, *others = sys.modules["numpy"].random.get_state()
        states += [numbers.tobytes(), others]
    return states


def check_losses(problem: Problem, theta: Tree, x: Tree, key: Key, few: int = FEW) -> None:
    """Raise ConfigError if a loss, or the projection, of ``problem`` is invalid at (θ, x) on
    ``few`` rows.

    A loss must return one finite number, be a function of its arguments (no random draws, see
    :func:`check_repeats`) and have a gradient: g in x, f in x or θ, and one of them in θ. ∇_x g and
    ∇f must be finite. The tested rows include rows with NaN or infinite numbers. Cost: two values
    and a gradient of each, not counted in any budget.
    """
    check_alike("project", problem.project(clone(theta)), theta)
    upper = problem.upper_data
    uses: dict[str, list[bool]] = {}
    for name, loss, rows, place in (
        ("g", problem.g, problem.lower_data, ("lower_data",)),
        ("f", problem.f, upper["differentiate"], ("upper_data",)),
    ):
        batch = _tried_rows(rows, key.fold("few"), few)
        bound = _bind_batch(name, loss, batch)
        with _with_arguments(name, theta, x, batch), arguments_unchanged(name, theta, x):
            value, above, below = _gradients(bound, theta, x)
            uses[name] = [any(grad is not None for grad in grads) for grads in (above, below)]
            with _explain_randomness(loss):
                check_repeats(name, bound, theta, x)
            slopes = dict(zip((f"x: {label}" for label in x), below, strict=True))
            if name == "f":
                slopes |= zip((f"θ: {label}" for label in theta), above, strict=True)
            _check_finite(name, value, slopes, rows.whole or batch, place)
    for role, rows in upper.items():
        if rows is not upper["differentiate"] and broken_rows(rows.whole):
            batch = _tried_rows(rows, key.fold("few"), few)
            with torch.no_grad():
                value = _bind_batch("f", problem.f, batch)(theta, x)
            _check_finite("f", value, {}, rows.whole, ("upper_data", role))
    _check_uses(uses["f"], uses["g"], theta, x)
    single = [role for role, rows in upper.items() if rows.size == 1]
    if single:
        LOG.warning(
            "there is only 1 validation row (roles: %s), so that results depend on this row",
            ", ".join(single),
        )


def broken_rows(table: Batch) -> dict[str, Tensor]:
    """Return the positions of the rows that contain NaN or infinite numbers, by column.

    Examples
    --------
    >>> broken_rows({"a": torch.tensor([1.0, torch.inf]), "b": torch.ones(2)})
    {'a': tensor([1])}
    """
    # a sum is finite only if all numbers are finite, and requires no memory
    columns = {name: leaf for name, leaf in table.items() if leaf.is_floating_point() and len(leaf)}
    found = {
        name: (~torch.isfinite(leaf).reshape(len(leaf), -1).all(1)).nonzero().flatten()
        for name, leaf in columns.items()
        if not torch.isfinite(leaf.sum())
    }
    return {name: numbers for name, numbers in found.items() if len(numbers)}


def _tried_rows(rows: Data, key: Key, few: int) -> Batch:
    """Draw ``few`` rows, and add the first rows with non-finite numbers."""
    numbers = rows.draw(key, few, 1)
    if numbers is None:
        return rows.batch(None)
    broken = [found[:few] for found in broken_rows(rows.whole).values()]
    return rows.batch(torch.cat([numbers[0], *broken]))


def guard_first_step(
    problem: Problem, state: State, step: Callable[[], tuple[State, Record]]
) -> tuple[State, Record]:
    """Run the first step of a pipeline, and explain wrong losses by :func:`check_losses`.

    The losses are checked if the step fails, draws from a global generator, or finds a
    hypergradient of 0.
    """
    theta = state["theta"]
    key = Key(state["seed"])
    device = next(iter(state["x"].values())).device
    before = global_states(device)
    try:
        advanced, record = step()
    except Exception as error:
        if not isinstance(error, HgmsError) and not out_of_memory(error):
            check_losses(problem, theta, state["x"], key, MANY)
        raise
    moved = global_states(device) != before
    is_idle = theta and record["cost_upper_gradients"] and not record["hypergradient_norm"]
    if moved or is_idle:
        check_losses(problem, theta, advanced["x"], key.fold("step", 0))
    return advanced, record


def _gradients(
    loss: Bound, theta: Tree, x: Tree
) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
    """Return the value of a loss, and its gradients in θ and in x; ``None`` for a leaf without a
    gradient. Cost: a value and a gradient.
    """
    check_grad_mode()
    upper = require_grad(theta)
    lower = require_grad(x)
    with torch.enable_grad(), explain_errors():
        value = loss(upper, lower)
        leaves = [*upper.values(), *lower.values()]
        grads: Sequence[Tensor | None] = (
            torch.autograd.grad(value, leaves, allow_unused=True)
            if value.requires_grad
            else [None] * len(leaves)
        )
    check_dense("loss", grads)
    return value.detach(), list(grads[: len(upper)]), list(grads[len(upper) :])


def gradients_exist(loss: Bound, theta: Tree, x: Tree) -> list[bool]:
    """Return whether a loss has a gradient in θ, and in x. Cost: a value and a gradient."""
    return [any(grad is not None for grad in grads) for grads in _gradients(loss, theta, x)[1:]]


def check_used(f: Bound, g: Bound, theta: Tree, x: Tree) -> None:
    """Raise ConfigError if the losses lack a gradient.

    Call this only if h is zero, since h is also zero at an optimum. Cost: two gradients.
    """
    _check_uses(gradients_exist(f, theta, x), gradients_exist(g, theta, x), theta, x, "theta")


def _check_uses(
    f: Sequence[bool], g: Sequence[bool], theta: Tree, x: Tree, argument: str = "theta0"
) -> None:
    if theta and not f[0] and not g[0]:
        raise ConfigError(
            "theta-unused",
            f"f and g do not depend on θ ({_names(theta)})",
            place=(argument,),
            hint=f"use it in a loss, {COPIES}",
        )
    require(
        any(f),
        "no-gradient",
        "f has no gradient with respect to θ or x",
        hint=f"use θ or x in f, {COPIES}\n{OTHERS}",
        place=("f",),
    )
    if x and not g[1]:
        raise lacks_gradient(x)


def _names(tree: Tree) -> str:
    return ", ".join(list(tree)[:5] + ["…"] * (len(tree) > 5))


class ExplainsRandomness(Protocol):
    """A capability of losses: names the layers that may cause random numbers."""

    def randomness_error(self) -> HgmsError:
        """Return the error for a loss that is not repeatable."""


@contextlib.contextmanager
def _explain_randomness(loss: Any) -> Iterator[None]:
    """Inside the context, the error of a random loss lists the layers that may be the cause."""
    try:
        yield
    except ConfigError as error:
        explains = find(loss, ExplainsRandomness)
        if error.code == RANDOM.code and explains is not None:
            raise explains.randomness_error() from None
        raise


def check_repeats(name: str, loss: Bound, theta: Tree, x: Tree) -> None:
    """Raise ConfigError if a loss has another value in a second call, or changes its arguments.

    The values are compared at a point near ``x``, because noise that multiplies a residual affects
    no value and no gradient at a residual of zero. If the loss is not finite there, they are
    compared at ``x``. Cost: two values; up to :data:`VALUES` for a loss that draws from a global
    generator.
    """
    device = next((leaf.device for leaf in x.values()), torch.device("cpu"))
    before = global_states(device)
    for point in (_displace(x), x):
        try:
            with torch.no_grad(), arguments_unchanged(name, theta, point):
                first, second = loss(theta, point), loss(theta, point)
            if not torch.isfinite(first):
                continue
        except HgmsError:
            raise
        except Exception:  # the loss is not defined there; at x the error reaches the caller
            continue
        moved = global_states(device) != before
        # GPU kernels that add in any order differ by less than 1e-3. A CPU repeats its results
        # exactly, and dropout in a new network may change a loss by less than the resolution of
        # float32.
        drawn, hidden = (0.0, 1e-5) if device.type == "cpu" else (1e-5, 1e-3)
        if not torch.allclose(first, second, rtol=drawn if moved else hidden, atol=0.0):
            # a copy: each raised error has a separate traceback
            raise (RANDOM if moved else NOT_REPEATABLE).at()
        if moved and any(_differs(loss, theta, point, first, drawn) for _ in range(VALUES - 2)):
            raise RANDOM.at()
        return


def _differs(loss: Bound, theta: Tree, x: Tree, first: Tensor, rtol: float) -> bool:
    with torch.no_grad():
        return not torch.allclose(first, loss(theta, x), rtol=rtol, atol=0.0)


def _displace(x: Tree) -> Tree:
    """Return x displaced by about 1 % of 1 + |x|, with a different share for each number."""
    points = {}
    for name, leaf in detach(x).items():
        shares = torch.arange(leaf.numel(), dtype=torch.float32, device=leaf.device).cos()
        points[name] = leaf + 0.01 * (1 + leaf.abs()) * shares.to(leaf.dtype).view(leaf.shape)
    return points


@contextlib.contextmanager
def arguments_unchanged(name: str, theta: Tree, x: Tree) -> Iterator[None]:
    """Raise ConfigError if a tensor of θ or x is changed in place inside the context."""
    leaves = {f"θ: {label}": leaf for label, leaf in theta.items()}
    leaves |= {f"x: {label}": leaf for label, leaf in x.items()}
    versions = [leaf._version for leaf in leaves.values()]
    yield
    for (label, leaf), version in zip(leaves.items(), versions, strict=True):
        require(
            leaf._version == version,
            "loss-with-state",
            f"{name} changes a tensor of its arguments in place ({label})",
            hint="clone a tensor before an in-place operation; nn.Embedding(max_norm=...) "
            "changes its weight, so remove max_norm",
            place=(name,),
        )


def evaluate_metrics(problem: Problem, theta: Tree, x: Tree) -> dict[str, float]:
    """Return what ``evaluate`` measures, as plain numbers.

    ``evaluate`` receives copies, so in-place operations there cannot change a run.
    """
    return numbers_by_name(problem.evaluate(clone(theta), clone(x)))


def numbers_by_name(measured: Any) -> dict[str, float]:
    """Convert the metrics of ``evaluate`` to plain numbers; raise ConfigError if they are not a
    dictionary of numbers.
    """
    require(
        isinstance(measured, Mapping),
        "wrong-metric",
        f"evaluate returns {kind_of(measured)}, but must return numbers by name",
        hint="add a return statement" if measured is None else "return {'name': number}",
        place=("evaluate",),
    )
    numbers = {}
    for name, value in measured.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            is_tensor = isinstance(value, Tensor)
            shown = f"a tensor of shape {list(value.shape)}" if is_tensor else kind_of(value)
            raise ConfigError(
                "wrong-metric",
                f"evaluate returns {shown} for {name!r}, but must return a number",
                place=("evaluate", str(name)),
                hint="return its mean" if is_tensor else None,
            ) from None
    return numbers


def pure(loss: Bound, name: str = "a loss") -> Bound:
    """Return a loss that checks its first call.

    The call raises an error if the loss returns no number or changes its arguments. It also raises
    an error if the loss draws from a global generator of torch, NumPy or Python, so that a second
    value differs (:func:`check_repeats`).
    """
    called = False

    def check_first_call(theta: Tree, x: Tree) -> Tensor:
        nonlocal called
        leaves = [*theta.values(), *x.values()]
        if called or any(map(torch._C._functorch.is_functorch_wrapped_tensor, leaves)):
            return loss(theta, x)
        called = True
        device = next((leaf.device for leaf in x.values()), torch.device("cpu"))
        before = global_states(device)
        with _with_arguments(name, theta, x), arguments_unchanged(name, theta, x):
            value = check_number(name, loss(theta, x))
            if global_states(device) != before:
                check_repeats(name, loss, theta, x)
        return value

    return check_first_call


def check_number(name: str, value: Any) -> Tensor:
    """Return ``value``; raise ConfigError if it is not one floating-point number in a tensor."""
    if not isinstance(value, Tensor):
        advice = {"NoneType": "add a return statement", "tuple": "return only the loss"}
        raise ConfigError(
            "not-scalar",
            f"{name} returns {kind_of(value)}, but must return a scalar tensor",
            place=(name,),
            hint=advice.get(type(value).__name__, f"compute it {COPIES}"),
        )
    require(
        not value.dim(),
        "not-scalar",
        f"{name} returns a tensor of shape {list(value.shape)}, but must return a scalar",
        hint="add .mean() or .sum()",
        place=(name,),
    )
    if not value.is_floating_point():
        kind = str(value.dtype).removeprefix("torch.")
        raise ConfigError(
            "wrong-dtype",
            f"{name} returns {kind}, which has no gradient, but must return a floating-point "
            "number",
            place=(name,),
        )
    return value


def _bind_batch(name: str, loss: Callable[..., Any], batch: Batch) -> Bound:
    return lambda theta, x: check_number(name, loss(theta, x, batch))


def _check_finite(
    name: str,
    value: Tensor,
    gradients: Mapping[str, Tensor | None],
    table: Batch,
    place: tuple[str, ...],
) -> None:
    """Raise NumericalError if a loss or its gradient is not finite.

    The error names the non-finite rows of ``table``, or the loss if all rows are finite.
    """
    steep = [
        label
        for label, grad in gradients.items()
        if grad is not None and not torch.isfinite(grad).all()
    ]
    what = f"{name} is {float(value):.4g} before the first step"
    hint = "check the initial values, and log(0) and 0/0 in the loss"
    if torch.isfinite(value):
        if not steep:
            return
        what = f"{what}, but its gradient is not finite ({steep[0]})"
        hint = (
            "check roots, norms and powers at 0: sqrt(sum(x**2)) has no gradient at x = 0\n"
            "or use other initial values"
        )
    for column, numbers in broken_rows(table).items():
        kind = "training" if place[0] == "lower_data" else "validation"
        first = table["index"][numbers[0]] if "index" in table else numbers[0]
        raise NumericalError(
            "not-finite",
            f"{what}: {len(numbers)} of {len(table[column])} {kind} rows have NaN or infinite "
            f"numbers in the column {column!r} (the first is row {int(first)})",
            place=(*place, column),
            hint="remove or replace them",
        )
    raise NumericalError("not-finite", what, place=(name,), hint=hint)


@contextlib.contextmanager
def _with_arguments(name: str, theta: Tree, x: Tree, batch: Batch | None = None) -> Iterator[None]:
    """Add the arguments of a loss to errors inside the context; on a test ``batch`` raise
    ConfigError.
    """
    try:
        yield
    except (HgmsError, MemoryError):
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        trees = {"θ": theta, "x": x} if batch is None else {"θ": theta, "x": x, "batch": batch}
        shapes = [f"{label}: {sizes(tree, 9)}" for label, tree in trees.items()]
        if isinstance(error, KeyError) and error.args:
            near = closest(str(error.args[0]), [leaf for tree in trees.values() for leaf in tree])
            raise ConfigError(
                "missing-column",
                f"{name} reads {error.args[0]!r}, which does not exist",
                place=(name,),
                hint="\n".join(shapes),
                did_you_mean=() if near is None else (near,),
            ) from error
        if batch is None:
            error.add_note("\n  ".join([f"{name} was called with", *shapes]))
            raise
        columns = ", ".join(f"batch[{name!r}]" for name in batch)
        text = first_line(error)
        raise ConfigError(
            "loss-failed",
            f"{name} raises {type(error).__name__} for a few rows: {text}",
            place=(name,),
            hint="\n".join([*shapes, f"the columns of a batch are {columns}"]),
        ) from error
