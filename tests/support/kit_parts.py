"""Sound solvers, selectors, estimators and outer optimisers, and the way to break them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ClassVar

import attrs
import torch
from attrs import evolve, field, frozen, validators
from torch import Tensor

from hgms.adapters import hypergradient
from hgms_core import (
    CallableSolver,
    Candidates,
    Cost,
    Estimate,
    Key,
    LinearSystem,
    MatVec,
    Mode,
    Outcome,
    Problem,
    Selection,
    Solution,
    State,
    Tree,
    values,
)
from hgms_core.capabilities import Capabilities, Randomized

DOC = """A small sound component to break in many ways.

    >>> 1 + 1
    2

    Source: these tests.
    """


def changed(sound: Any, **methods: Callable[..., Any]) -> Any:
    """The component with other methods: each is given the component, its own method as it was,
    and the arguments.
    """

    def method(name: str, new: Callable[..., Any]) -> Callable[..., Any]:
        plain = getattr(type(sound), name)

        @wraps(plain)
        def called(self: Any, *args: Any, **keywords: Any) -> Any:
            return new(self, partial(plain, self), *args, **keywords)

        return called

    body = {name: method(name, new) for name, new in methods.items()}
    return like(sound, type("Changed", (type(sound),), {"__doc__": DOC, **body}))


def like(component: Any, cls: type, **more: Any) -> Any:
    """One of that class with the component's fields."""
    own = {part.alias: getattr(component, part.name) for part in attrs.fields(cls)}
    return cls(**{**own, **more})


# --- solvers
# --------------------------------------------------------------------------------------------------


def exact(matvec: MatVec, b: Tensor) -> Solution:
    def dense(matvec: MatVec, b: Tensor) -> Tensor:
        return torch.linalg.solve(
            torch.stack([matvec(row) for row in torch.eye(len(b), dtype=b.dtype)], 1), b
        )

    return CallableSolver(dense).solve(matvec, b)


@frozen(kw_only=True)
class Exact:
    __doc__ = DOC
    name: ClassVar[str] = "exact"

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return exact(matvec, b)


@frozen(kw_only=True)
class MinimalResidual:
    """v ← v + α r with the α that makes the next residual smallest: a sound solver to break in many
    ways.

    >>> MinimalResidual().solve(lambda v: 2 * v, torch.ones(2)).outcome.label
    'converged'

    Source: Saad, "Iterative Methods for Sparse Linear Systems" (2003), section 5.3.2.
    """

    name: ClassVar[str] = "minimal-residual"
    ridge: float = field(default=0.0, validator=validators.ge(0))
    rtol: float = field(default=1e-8, validator=validators.gt(0))
    max_steps: int = field(default=100, validator=validators.ge(1))
    clip: float | None = None

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)
        x, r = system.start(x0)
        count = torch.zeros(system.size.shape, dtype=torch.int64)
        for _ in range(self.max_steps):
            active = system.norm(r) > system.target
            if not active.any():
                break
            product = system.apply(r)
            length = system.dot(product, product)
            rate = torch.where(active & (length > 0), system.dot(r, product) / length, 0.0)
            x = x + system.rows(rate) * r
            r = r - system.rows(rate) * product
            count = count + active
        done = system.norm(r) <= system.target
        codes = torch.where(
            done, system.codes(Outcome.CONVERGED), system.codes(Outcome.ITERATION_LIMIT)
        )
        return system.solution(
            x, system.norm(r), codes, count, torch.full_like(system.size, math.inf), self.clip
        )


@frozen(kw_only=True)
class Keyed(MinimalResidual):
    """Begins along a random vector of a seed of its own, which a key may decide.

    >>> Keyed().with_key(Key(1)).solve(lambda v: 2 * v, torch.ones(2)).outcome.label
    'converged'

    Source: randomised subspace methods in their smallest form.
    """

    name: ClassVar[str] = "keyed"
    capabilities: ClassVar[Capabilities] = frozenset({Randomized})
    seed: int = 0

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        if x0 is not None:
            return super().solve(matvec, b, x0)
        draw = torch.randn(
            b.shape[-1], generator=Key(self.seed).fold("start").generator(), dtype=b.dtype
        )
        along = matvec(draw.expand_as(b))
        product = matvec(along) + self.ridge * along
        length = LinearSystem.dot(product, b) / LinearSystem.dot(product, product)
        start = length[..., None] * along
        answer = super().solve(matvec, b, start if bool(start.isfinite().all()) else None)
        return evolve(answer, products=answer.products + 2)

    def with_key(self, key: Key) -> Any:
        return evolve(self, seed=key.derive())


# --- selectors, estimators and outer optimisers
# --------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Lowest:
    __doc__ = DOC
    name: ClassVar[str] = "lowest"
    batch_size: int | None = None
    mode: Mode = "loop"

    def scores(
        self, problem: Problem, theta: Tree, candidates: Candidates, key: Key
    ) -> torch.Tensor:
        data = problem.upper_data["select"]
        index = data.draw(key, self.batch_size, 1)
        losses = values(
            problem.f,
            theta,
            candidates.x,
            data.batch(None if index is None else index[0]),
            mode=self.mode,
        )
        sound = torch.stack(
            [leaf.reshape(candidates.count, -1).isfinite().all(1) for leaf in candidates.x.values()]
        ).all(0)
        return torch.where(sound, losses, math.nan)

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        scores = self.scores(problem, theta, candidates, key)
        cost = Cost(
            upper_values=len(scores),
            rows=len(scores) * problem.upper_data["select"].count(self.batch_size),
        )
        ranked = torch.where(scores.isfinite(), scores, math.inf)
        ordered = ranked.sort().values
        gap = (
            (ordered[1] - ordered[0]).nan_to_num(math.inf)
            if len(scores) > 1
            else torch.full_like(ordered[0], math.inf)
        )
        return Selection(
            index=ranked.argmin(), scores=scores, gap=gap, finite=scores.isfinite().sum(), cost=cost
        )


@frozen(kw_only=True)
class Thompson(Lowest):
    """Lowest of randomly shifted scores; it does not declare ``DrawsChoice``."""

    name: ClassVar[str] = "thompson"

    def scores(
        self, problem: Problem, theta: Tree, candidates: Candidates, key: Key
    ) -> torch.Tensor:
        scores = super().scores(problem, theta, candidates, key)
        noise = torch.randn(len(scores), generator=key.fold("noise").generator())
        return scores + noise.to(scores)


@frozen(kw_only=True)
class Exactly:
    __doc__ = DOC
    name: ClassVar[str] = "exactly"
    sign: float = 1.0
    ridge: float = 0.0

    def init(self, problem: Problem) -> State:
        return {"calls": 0}

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        branch = candidates.branch(selection.index)
        below = problem.lower_data.batch(None)
        above = problem.upper_data["differentiate"].batch(None)

        def dense(matvec: Any, b: torch.Tensor) -> torch.Tensor:
            columns = torch.stack([matvec(row) for row in torch.eye(len(b), dtype=b.dtype)], 1)
            return (
                self.sign
                * torch.linalg.pinv(
                    columns + self.ridge * torch.eye(len(b), dtype=b.dtype), rtol=1e-6
                )
                @ b
            )

        estimate = hypergradient(
            lambda t, x: problem.f(t, x, above),
            lambda t, x: problem.g(t, x, below),
            theta,
            branch.x,
            solver=dense,
        )
        return estimate, {"calls": state["calls"] + 1}


@frozen(kw_only=True)
class Step:
    __doc__ = DOC
    name: ClassVar[str] = "step"
    lr: float = 0.1
    decay: float = field(default=0.5)

    def init(self, theta: Tree) -> State:
        return {"m": {name: torch.zeros_like(leaf) for name, leaf in theta.items()}}

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        m = {name: self.decay * state["m"][name] + gradient[name] for name in theta}
        return {name: theta[name] - self.lr * m[name] for name in theta}, {"m": m}


@frozen
class Box:
    low: float = -1.0

    def apply(self, theta: Tree) -> Tree:
        return {name: leaf.clamp(self.low, 1.0) for name, leaf in theta.items()}


@frozen(kw_only=True)
class Boxed(Step):
    __doc__ = DOC
    projection: Box = Box()
