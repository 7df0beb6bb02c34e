"""What is wrong with the losses that a person wrote, said where a run starts instead of deep
inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hgms_core.adapters.arguments import kind_of
from hgms_core.adapters.display import sizes
from hgms_core.adapters.shapes import Shape
from hgms_core.data import Batch
from hgms_core.errors import ConfigError, HgmsError, NumericalError, closest
from hgms_core.seeding import Key, global_states
from hgms_core.torch_errors import NOT_REPEATABLE, RANDOM, explained, first_line, out_of_memory
from hgms_core.trees import Tree, clone, require_grad

if TYPE_CHECKING:
    from hgms_core.problem import Problem

Bound = Callable[[Tree, Tree], Tensor]
"""A loss with the batch already bound: ``loss(theta, x)``."""
FEW = 8
MANY = 4096
"""Rows that a loss is tried on: before the first step, and to explain why it failed."""
COPIES = "without .detach(), .item(), .data, NumPy or torch.no_grad()"
OTHERS = "compute with the arguments of the loss, not with other modules or tensors"


def check_losses(problem: Problem, theta: Tree, x: Tree, key: Key, few: int = FEW) -> None:
    """ConfigError where a loss, or the projection, of ``problem`` cannot be what a run needs, tried
    at (θ, x) on ``few`` rows:

    a loss returns one finite number, is a function of its arguments (no random draws, which
    :func:`check_repeats` looks for) and has a gradient: g in x, f in x or θ, and one of them in θ.
    Cost: a value and a gradient of each, in no budget.
    """
    check_alike("project", problem.project(clone(theta)), theta)
    uses: dict[str, list[bool]] = {}
    for name, loss, rows in (
        ("g", problem.g, problem.lower_data),
        ("f", problem.f, problem.upper_data["differentiate"]),
    ):
        batch, _ = rows.sample(key.fold("few"), few)
        device = next((leaf.device for leaf in x.values()), torch.device("cpu"))
        drawn = global_states(device)
        with _with_arguments(name, theta, x, batch):
            first, *uses[name] = used(bound := _bound(name, loss, batch), theta, x)
            with torch.no_grad():
                again = bound(theta, x)
            moved = any(
                not torch.equal(a, b) for a, b in zip(drawn, global_states(device), strict=True)
            )
            if moved or not torch.allclose(first, again, rtol=1e-3, equal_nan=True):
                check_repeats(bound, theta, x, RANDOM if moved else NOT_REPEATABLE)
            _check_finite(name, first, batch)
    _check_uses(uses["f"], uses["g"], theta, x)


@contextlib.contextmanager
def losses_checked(problem: Problem, theta: Tree, x: Tree, key: Key) -> Iterator[None]:
    """Inside, an exception is explained by :func:`check_losses`, where that finds its cause."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, HgmsError) and not out_of_memory(error):
            check_losses(problem, theta, x, key, MANY)
        raise


def used(loss: Bound, theta: Tree, x: Tree) -> tuple[Tensor, bool, bool]:
    """The value of a loss, and whether it has a gradient in θ, and in x. Cost: a value and a
    gradient.
    """
    upper = require_grad(theta)
    lower = require_grad(x)
    with torch.enable_grad(), explained():
        value = loss(upper, lower)
        leaves = [*upper.values(), *lower.values()]
        grads = (
            torch.autograd.grad(value, leaves, allow_unused=True)
            if value.requires_grad
            else [None] * len(leaves)
        )
    known = [grad is not None for grad in grads]
    return value.detach(), any(known[: len(upper)]), any(known[len(upper) :])


def check_used(f: Bound, g: Bound, theta: Tree, x: Tree) -> None:
    """ConfigError where the losses lack a gradient: asked where h is zero, as it is at an
    optimum. Cost: two gradients.
    """
    _check_uses(used(f, theta, x)[1:], used(g, theta, x)[1:], theta, x, "theta")


def _check_uses(
    f: Sequence[bool], g: Sequence[bool], theta: Tree, x: Tree, argument: str = "theta0"
) -> None:
    upper, lower = (", ".join(list(tree)[:5] + ["…"] * (len(tree) > 5)) for tree in (theta, x))
    if theta and not f[0] and not g[0]:
        raise ConfigError(
            "theta-unused",
            f"f and g do not depend on θ ({upper})",
            place=(argument,),
            hint=f"use it in a loss, {COPIES}",
        )
    if not any(f):
        raise ConfigError(
            "no-gradient",
            "f has no gradient with respect to θ or x",
            place=("f",),
            hint=f"use θ or x in f, {COPIES}\n{OTHERS}",
        )
    if x and not g[1]:
        raise ConfigError(
            "no-gradient",
            f"g has no gradient with respect to x ({lower})",
            place=("g",),
            hint=f"use its leaves in g, {COPIES}\n{OTHERS}",
        )


def check_repeats(loss: Bound, theta: Tree, x: Tree, cause: ConfigError = RANDOM) -> None:
    """ConfigError where a loss has another value the second time. Cost: two values."""
    with torch.no_grad():
        if not torch.allclose(loss(theta, x), loss(theta, x), rtol=1e-5, atol=0.0, equal_nan=True):
            raise cause.at()  # a copy: each raised error has a separate traceback


def check_alike(
    what: str, tree: object, other: Tree, verbs: tuple[str, str] = ("returns", "return")
) -> None:
    """ConfigError where a tree has other names, or leaves of other shapes, than it should.

    ``what`` returned it (or ``verbs``); dots separate the parts of the place.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(
            "wrong-result",
            f"{what} {verbs[0]} {kind_of(tree)}, but must {verbs[1]} {sizes(other)}",
            place=tuple(what.split(".")),
            hint="add a return statement" if tree is None else None,
        )
    shapes = [
        {name: getattr(leaf, "shape", None) for name, leaf in leaves.items()}
        for leaves in (tree, other)
    ]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            "wrong-result",
            f"{what} {verbs[0]} {sizes(Shape.of(dict(tree), what, '')[1])}, but must {verbs[1]} "
            f"{sizes(other)}",
            place=tuple(what.split(".")),
        )


def check_estimate(what: str, outcome: Any, theta: Tree) -> None:
    """ConfigError where an estimator returned anything but an Estimate with the shapes of θ, and
    a state.
    """
    items = outcome if isinstance(outcome, tuple) else (outcome,)
    if len(items) != 2 or not hasattr(items[0], "cost") or not isinstance(items[1], Mapping):
        raise ConfigError(
            "wrong-result",
            f"{what} returns {' and '.join(map(kind_of, items))}, but must return (Estimate, "
            "state)",
            place=tuple(what.split(".")),
        )
    check_alike(f"{what}.value", items[0].value, theta, ("is", "be"))


def numbers_by_name(measured: Any) -> dict[str, float]:
    """What ``evaluate`` returned, as plain numbers; ConfigError where it is no dictionary of
    them.
    """
    if not isinstance(measured, Mapping):
        raise ConfigError(
            "wrong-metric",
            f"evaluate returns {kind_of(measured)}, but must return numbers by name",
            place=("evaluate",),
            hint="add a return statement" if measured is None else "return {'name': number}",
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
    """The loss, refused where its first call gives no number, or draws from torch's global
    generators and a second one has another value."""
    called = False

    def watched(theta: Tree, x: Tree) -> Tensor:
        nonlocal called
        if called:
            return loss(theta, x)
        called = True
        device = next(iter(x.values())).device
        before = global_states(device)
        with _with_arguments(name, theta, x):
            value = check_number(name, loss(theta, x))
        if any(not torch.equal(a, b) for a, b in zip(before, global_states(device), strict=True)):
            check_repeats(loss, theta, x)
        return value

    return watched


def check_number(name: str, value: Any) -> Tensor:
    """What a loss returned; ConfigError where it is not one floating-point number in a tensor."""
    if not isinstance(value, Tensor):
        advice = {"NoneType": "add a return statement", "tuple": "return only the loss"}
        raise ConfigError(
            "not-scalar",
            f"{name} returns {kind_of(value)}, but must return a scalar tensor",
            place=(name,),
            hint=advice.get(type(value).__name__, f"compute it {COPIES}"),
        )
    if value.dim():
        raise ConfigError(
            "not-scalar",
            f"{name} returns a tensor of shape {list(value.shape)}, but must return a scalar",
            place=(name,),
            hint="add .mean() or .sum()",
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


def _bound(name: str, loss: Callable[..., Any], batch: Batch) -> Bound:
    return lambda theta, x: check_number(name, loss(theta, x, batch))


def _check_finite(name: str, value: Tensor, batch: Batch) -> None:
    if torch.isfinite(value):
        return
    broken = [
        column
        for column, leaf in batch.items()
        if leaf.is_floating_point() and not torch.isfinite(leaf).all()
    ]
    if broken:
        raise NumericalError(
            "not-finite",
            f"{name} is {float(value)} before the first step: the columns "
            f"{', '.join(map(repr, broken))} contain non-finite values",
            place=(name,),
            hint="remove or replace them",
        )
    raise NumericalError(
        "not-finite",
        f"{name} is {float(value)} before the first step",
        place=(name,),
        hint="check the initial values, and log(0) and 0/0 in the loss",
    )


@contextlib.contextmanager
def _with_arguments(name: str, theta: Tree, x: Tree, batch: Batch | None = None) -> Iterator[None]:
    """Inside, what a loss raises says what the loss was called with: where it is tried on a
    ``batch``, by a ConfigError.
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
        text = first_line(error)
        if "dtype" in text or "type (" in text or "scalar type" in text:
            shapes.append("convert a column in the loss: batch[name].float(), or .long()")
        if isinstance(error, TypeError):
            shapes.append(
                "define losses of (theta, x, batch), those of a module of (model, batch) or "
                "(theta, model, batch)"
            )
        if "same device" in text:
            shapes += [
                f"{label} is on {next(iter(tree.values())).device}"
                for label, tree in trees.items()
                if tree
            ]
        raise ConfigError(
            "loss-failed",
            f"{name} raises {type(error).__name__} for a few rows: {text}",
            place=(name,),
            hint="\n".join(shapes),
        ) from error
