"""Compiled functions of both levels at one (θ, x), from one trace.

They compute the values that do not depend on v, the Hessian product, and the mixed product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import is_not
from typing import Any, final

import torch
from attrs import define, frozen
from torch import Tensor
from torch.fx import GraphModule

from hgms.compiled.graph_code import Code
from hgms.compiled.library import is_on_cpu, plain
from hgms.compiled.programs import Programs, Runner
from hgms.compiled.trace import (
    arrangement,
    flatten,
    leaves_of,
    of_leaves,
    split,
    unflatten,
    without_mutations,
)
from hgms.compiled.verify import difference_nearby
from hgms_core import (
    Batch,
    Inexact,
    Linearization,
    LinearSystem,
    Loss,
    Ravel,
    Solution,
    Strategy,
    Tree,
    gradient,
    slopes,
    upper_gradients,
)

ITERATIONS = 10
"""Iterations per compiled function if a product is small. A large product is a separate compiled
function, and the solver's loop ends normally.
"""
NAMES = ("linearization", "mixed product")
"""The compiled functions of a linearization, as in the record of a run."""
SMALL = 100_000
"""Maximum count of numbers that a small product reads in addition to v."""

Iteration = Callable[[LinearSystem, Tree], Tree]
Products = tuple[tuple[Tensor, Tree, Tensor, Tensor], Tensor, Tree]
Operator = Callable[[Tree, Tree, Batch, Tree], Tree]


@final
@frozen(eq=False)
class CompiledProduct:
    """v ↦ Hv as a function of ``[*residuals, v]``.

    The residuals define H at one (θ, x); all points share the code.

    A solver can call the product, or compile its iterations with the product inside (:meth:`loop`).
    ``noise`` is the relative error of the product, as in :class:`hgms_core.Inexact`.
    """

    programs: Programs
    key: tuple[Hashable, ...]
    code: Code
    residuals: Sequence[Tensor]
    noise: float = 0.0

    def __call__(self, v: Tensor) -> Tensor:
        inputs = [*self.residuals, v]
        launch = self.programs.keep(
            ("product", *self.key),
            lambda: self.programs.compiled("product", self.code.as_module(), inputs),
        )
        return (self.code(*inputs) if launch is None else launch(inputs))[0]

    @property
    def small(self) -> bool:
        """Return whether the launch of a compiled function costs about as much as a product."""
        return sum(leaf.numel() for leaf in self.residuals) <= SMALL

    def at_once(self, most: int) -> int:
        """Return the number of iterations, of at most ``most``, in one compiled function."""
        return min(most, ITERATIONS) if self.small else 1

    def whole(
        self,
        name: str,
        settings: tuple[Any, ...],
        solve: Callable[..., Any],
        b: Tensor,
        x0: Tensor | None,
        most: int,
    ) -> Solution | None:
        """Solve a small system from b to the solution with one compiled function; None for a large
        system.

        The function is launched as often as needed. ``solve(matvec, b, x0, earlier, *settings,
        count)`` runs ``count`` iterations, at most ``most`` in total. It is a function of tensors
        only. It returns the fields of a solution, the number of products, whether iterations
        remain, and the state for the next call's ``earlier`` (None at first).
        """
        if not self.small:
            return None
        code = self.code
        count = self.at_once(most)

        def solved(
            residuals: list[Tensor], b: Tensor, x0: Tensor | None, earlier: Tree | None
        ) -> Any:
            product = Inexact(lambda v: code(*residuals, v)[0], self.noise)
            return solve(product, b, x0, earlier, *settings, count)

        program = self.programs((name, *self.key, *settings), solved)
        residuals = list(self.residuals)
        rhs = b.detach()
        start = None if x0 is None else x0.detach()
        numbers, products, going, state = program(residuals, rhs, start, None)
        if rhs.device.type != "cpu" and count == most:  # without a wait for the device
            return Solution(**numbers, products=products)
        total = int(products)
        while going:
            numbers, products, going, state = program(residuals, rhs, None, state)
            total += int(products)
        return Solution(**numbers, products=total)

    def loop(
        self,
        name: str,
        settings: tuple[Hashable, ...],
        ridge: float,
        iteration: Iteration,
        most: int,
    ) -> Callable[[Tree], Any]:
        """Return ``advance(state)``, a compiled function of some solver iterations, at most
        ``most``.

        It returns the new state and the number of iterations that were needed.

        ``iteration(system, state)`` is a function of tensors only that computes one product. If
        ``state["active"]`` is false, it changes no value. ``state["r"]`` is a vector of the system.
        ``settings`` contain all other values that it reads.
        """
        residuals = list(self.residuals)
        code = self.code
        count = self.at_once(most)

        def advance(residuals: list[Tensor], state: Tree) -> tuple[Tree, Tensor]:
            product = Inexact(lambda v: code(*residuals, v)[0], self.noise)
            system = LinearSystem.of(product, state["r"], ridge=ridge)
            needed = torch.zeros_like(state["steps"].sum())
            for _ in range(count):
                needed = needed + state["active"].any()
                state = iteration(system, state)
            return state, needed

        program = self.programs((name, *self.key, *settings, ridge), advance)
        return lambda state: program(residuals, state)


@frozen(eq=False, kw_only=True)
class Levels:
    """The losses of both levels, and how products with the lower Hessian are computed.

    ``operator(theta, x, batch, v)``, if given, replaces the Hessian in the products; it is a pure
    function with the shapes of x.
    """

    f: Loss
    g: Loss
    strategy: Strategy = "vjp"
    precision: torch.dtype | None = None
    operator: Operator | None = None

    def linearization(self, theta: Tree, x: Tree, below: Batch, above: Batch) -> Linearization:
        """Compute the eager linearization at (θ, x) on a lower and an upper batch."""
        return Linearization.of(
            lambda t, y: self.f(t, y, above),
            lambda t, y: self.g(t, y, below),
            theta,
            x,
            self.strategy,
            self.precision,
        )

    def products(self, theta: Tree, x: Tree, below: Batch, above: Batch, v: Tensor) -> Products:
        """Return the values that do not depend on v, the Hessian product, and the mixed product."""
        spec = Ravel.of(x)
        here = self.linearization(theta, x, below, above)
        product = (
            here.matvec(v)
            if self.operator is None
            else spec.ravel(self.operator(theta, x, below, spec.unravel(v)))
        )
        return (here.upper_loss, here.direct, here.rhs, here.slope), product, here.mixed(v)

    def products_in_reverse_mode(
        self, theta: Tree, x: Tree, below: Batch, above: Batch, v: Tensor
    ) -> Products:
        """Return :meth:`products` from one gradient of ⟨∇_x g, v⟩.

        Forward mode, and products with a given gradient, make torch import modules for a second.
        """
        spec = Ravel.of(x)
        upper, lower = (
            {name: leaf.detach().requires_grad_() for name, leaf in tree.items()}
            for tree in (theta, x)
        )
        upper_loss, direct, rhs = upper_gradients(lambda t, y: self.f(t, y, above), theta, x)
        slope = spec.ravel_leaves(gradient(self.g, upper, lower, below, graph=True)[0])
        second = slopes(slope @ v, [*lower.values(), *upper.values()])
        mixed = dict(zip(theta, second[len(x) :], strict=True))
        product = spec.ravel_leaves(second[: len(x)])
        return (upper_loss, direct, spec.ravel(rhs), slope.detach()), product, mixed


@define(eq=False)
class Linearized:
    """Compiled functions of two losses for arguments of given shapes, see :func:`linearized`."""

    constants: tuple[Tensor, ...]
    structure: Any
    prepare: Runner
    product: Code
    mixed: Runner
    kept: tuple[tuple[int, ...], ...]
    turned: tuple[bool, ...]
    passes: int
    noise: float

    @classmethod
    def of(
        cls,
        programs: Programs,
        key: tuple[Hashable, ...],
        levels: Levels,
        theta: Tree,
        x: Tree,
        below: Batch,
        above: Batch,
    ) -> Linearized | None:
        """Return the compiled functions, or None if tracing or compilation fails."""

        def make() -> Linearized | None:
            return cls._make(programs, levels, arguments)

        def check(found: Linearized) -> str:
            in_reverse = levels.strategy == "vjp" and levels.operator is None
            products = levels.products_in_reverse_mode if in_reverse else levels.products
            return difference_nearby(of_leaves(products, arranged), found.outputs, leaves)

        spec = Ravel.of(x)
        along = spec.ravel({name: torch.ones_like(leaf) for name, leaf in x.items()})
        arguments = (theta, x, below, above, along)
        leaves: list[Tensor] = []
        arranged = flatten(arguments, leaves)
        return programs.recall(NAMES, (*NAMES, key, levels, arranged), leaves, make, check)

    @classmethod
    def _make(
        cls, programs: Programs, levels: Levels, arguments: tuple[Any, ...]
    ) -> Linearized | None:
        theta, *_, along = arguments
        traced = programs.traced(
            "linearization", levels.products, arguments, turned=is_on_cpu([along])
        )
        if traced is None:
            return None
        leaves = leaves_of(arguments)
        done = len(traced.structure[0][1]) + 3

        graph = programs.attempt(
            "linearization",
            "split",
            lambda: without_mutations(traced.graph, [*leaves, *traced.constants]),
        )
        if graph is None:
            return None
        pieces = split(graph, range(len(leaves))[-1:], [1, len(theta)])
        inputs = [*leaves[:-1], *traced.constants]
        prepare = programs.compiled("linearization", pieces.before, inputs, once=True)
        if prepare is None:
            return None
        values = [*inputs, *prepare(inputs)[done:]]
        of_mixed = [*(values[i] for i in pieces.kept[1]), along]
        mixed = programs.compiled("mixed product", pieces.after[1], of_mixed, once=True)
        if mixed is None:
            return None
        passes = 2 if levels.strategy == "difference" else 1
        turned = turn_inputs(pieces.after[0], [values[i] for i in pieces.kept[0]])
        product = programs.attempt("linearization", "split", lambda: Code.of(pieces.after[0]))
        if product is None:
            return None
        # only the relative error of such products is used
        inexact = Inexact.difference(lambda v: v, levels.precision or along.dtype)
        noise = inexact.noise if levels.strategy == "difference" else 0.0
        return cls(
            traced.constants,
            traced.structure,
            prepare,
            product,
            mixed,
            pieces.kept,
            turned,
            passes,
            noise,
        )

    def at(
        self, programs: Programs, key: tuple[Hashable, ...], leaves: Sequence[Tensor]
    ) -> Linearization:
        """Return the linearization at the (θ, x) and batches with these leaves."""
        first, _, by_name = self.structure
        values, of_product, of_mixed = self._prepared(leaves)
        upper_loss, direct, rhs, slope = unflatten(first, values)

        def mixed(v: Tensor) -> Tree:
            return unflatten(by_name, self.mixed([*of_mixed, v]))

        matvec = CompiledProduct(programs, key, self.product, of_product, self.noise)
        return Linearization(upper_loss, direct, rhs, slope, matvec, mixed, self.passes)

    def outputs(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the values that do not depend on v, and both products, for ``[*leaves, v]``."""
        *here, v = leaves
        values, of_product, of_mixed = self._prepared(here)
        return [*values, *self.product(*of_product, v), *self.mixed([*of_mixed, v])]

    def _prepared(
        self, leaves: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor], list[Tensor]]:
        """Return the values that do not depend on v, and the arguments of both products."""
        done = len(self.structure[0][1]) + 3
        inputs = plain([*leaves, *self.constants])
        outputs = self.prepare(inputs)
        values = [*inputs, *outputs[done:]]
        of_product = [
            (values[i].t() if is_turned else values[i]).contiguous()
            for i, is_turned in zip(self.kept[0], self.turned, strict=True)
        ]
        of_mixed = [values[i] for i in self.kept[1]]
        return outputs[:done], of_product, of_mixed


def turn_inputs(module: GraphModule, examples: Sequence[Tensor]) -> tuple[bool, ...]:
    """Let a graph read matrices with rows as the last axis in memory as their transposes.

    Return which inputs are transposes; they require no copy.
    """
    turned = tuple(
        leaf.dim() == 2 and leaf.t().is_contiguous() and not leaf.is_contiguous()
        for leaf in examples
    )
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    for place, is_turned in zip(places, turned, strict=False):  # the last input is v
        if is_turned:
            with module.graph.inserting_after(place):
                view = module.graph.call_function(torch.ops.aten.t.default, (place,))
            place.replace_all_uses_with(view, delete_user_cb=partial(is_not, view))
    module.recompile()
    return turned


def linearized(
    programs: Programs,
    key: tuple[Hashable, ...],
    levels: Levels,
    theta: Tree,
    x: Tree,
    below: Batch,
    above: Batch,
) -> Linearization | None:
    """Return a compiled :class:`hgms_core.Linearization` at (θ, x) on a lower and an upper batch.

    The result is None if compilation fails.

    The losses are traced once as a function of (θ, x, batches, v), including derivatives, and the
    trace is split. The part that does not depend on v is computed once. A product computes only the
    remaining part, for example two matrix products per layer. ``key`` contains the losses and
    everything that they depend on in addition to the arguments.

    Notes
    -----
    Cost: 1 upper and 1 lower gradient, and the same once for the check.

    Source: linearisation of a program as in ``jax.linearize``, here by dependence in a traced
    graph.
    """
    leaves = leaves_of((theta, x, below, above))
    arranged = arrangement((theta, x, below, above))
    name = (
        *key,
        levels.strategy,
        levels.precision,
        levels.operator is None,
        arranged,
        *((leaf.shape, leaf.dtype) for leaf in leaves),
    )
    compiled = programs.keep(
        ("linearization", *name),
        lambda: Linearized.of(programs, name, levels, theta, x, below, above),
    )
    return None if compiled is None else compiled.at(programs, name, leaves)
