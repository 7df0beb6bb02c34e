"""A lower level for the autograd nodes: its loss, its solver, and checks of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from attrs import define
from torch import Tensor
from torch.func import jvp

from hgms.torch_errors import differences_named, is_inside_functorch
from hgms_core import ConfigError, Ravel, Solution, Tree, curvature
from hgms_core.hypergrad import twice_differentiable_attention

LevelStrategy = Literal["vjp", "jvp"]

HIDDEN = ConfigError(
    "hidden-tensor",
    "the loss of a lower_solution uses a tensor that requires a gradient but is not in theta",
    place=("g",),
    hint='pass it in theta: `lower_solution(g, {"theta": theta, "y": y}, …)`, or call '
    "`y.detach()` if it is constant",
)
BATCHED = ConfigError(
    "hidden-tensor",
    "the loss of a lower_solution uses a tensor with an axis of candidates that is not in theta",
    place=("g",),
    hint='pass it in theta: `lower_solution(g, {"theta": theta, "rows": batch["a"]}, …)`, or '
    'set mode = "loop"',
)


@define(eq=False)
class Level:
    """Data for the derivatives that autograd does not track. Tensors are in the order θ, x."""

    loss: Callable[[Tree, Tree], Tensor]
    names: tuple[str, ...]
    find: Callable[[Tree], Tree] | None
    solver: Any
    strategy: LevelStrategy
    v0: Tensor | None
    report: Callable[[Solution, Tensor], None] | None
    lower: tuple[str, ...] = ()
    closed: bool = False

    def split(self, tensors: Sequence[Tensor]) -> tuple[Tree, Tree]:
        count = len(self.names)
        return dict(zip(self.names, tensors[:count], strict=True)), dict(
            zip(self.lower, tensors[count:], strict=True)
        )

    def solve(self, rhs: Sequence[Tensor], theta: Tree, x: Tree, v0: Tensor | None) -> list[Tensor]:
        """Return H⁻¹ ``rhs``, computed by the solver without a graph."""
        spec = Ravel.of(x)
        here = curvature(lambda at: self.check(theta, at), x, self.strategy)
        solution = self.solver.solve(here.matvec, spec.ravel_leaves(rhs), v0)
        # With jvp the products do not show whether g has a gradient in x.
        slope = here.gradient if self.report is not None or self.strategy == "jvp" else None
        if self.report is not None and slope is not None:
            self.report(solution, torch.linalg.vector_norm(slope))
        return spec.unravel_leaves(solution.value)

    def check(self, theta: Tree, x: Tree) -> Tensor:
        """Return the loss.

        At the first call, raise ConfigError if its graph starts at tensors other than ``x``.
        Parameters of modules may be constants.
        """
        value = self.loss(theta, x)
        nodes: list[Any] = [] if self.closed else [value.grad_fn]
        seen = {None}
        self.closed = True
        while nodes:
            if (node := nodes.pop()) in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if (
                leaf is not None
                and not isinstance(leaf, torch.nn.Parameter)
                and all(leaf is not own for own in x.values())
            ):
                raise HIDDEN.at()  # a copy: the traceback belongs to this error
            nodes.extend(before for before, _ in node.next_functions)
        return value

    def along(self, theta: Tree, x: Tree, *directions: Tree) -> Tensor:
        """Return the derivative of g in x along each of the ``directions``, in their order."""
        if not directions:
            return self.loss(theta, x)
        first, *rest = directions
        return jvp(lambda at: self.along(theta, at, *rest), (x,), (first,))[1]


@contextlib.contextmanager
def name_missing_derivatives() -> Iterator[None]:
    """Name missing derivatives of torch and the alternatives in errors inside the context."""
    try:
        with differences_named(), twice_differentiable_attention():
            yield
    except RuntimeError as error:
        if is_inside_functorch(error):
            raise BATCHED.at() from error
        raise
