"""Place the parts of a pipeline on the ranks of a mesh.

A placed part has the same interface as the part inside it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from hgms.arguments import require
from hgms.distributed.mesh import Mesh
from hgms.distributed.rows import by_rows
from hgms.facts import inner_method, name_of
from hgms_core import (
    CandidateGenerator,
    Candidates,
    Cost,
    Estimate,
    HyperGradient,
    Key,
    Pipeline,
    Problem,
    Selection,
    Selector,
    State,
    Tree,
)
from hgms_core.capabilities import ProposesSome, find
from hgms_core.components import evolve


@frozen(kw_only=True)
class PlacedGenerator:
    """Generator that proposes candidates in parts, one part per group of ranks.

    The inner generator must declare ``ProposesSome``. Otherwise all ranks propose all candidates
    together, by rows.
    """

    name: ClassVar[str] = "placed"

    generator: CandidateGenerator
    mesh: Mesh

    def init(self, problem: Problem, key: Key) -> State:
        return self.generator.init(problem, key)

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float
    ) -> Candidates:
        problem = by_rows(problem, self.mesh.rows)
        generator = find(self.generator, ProposesSome)
        if generator is None or dist.get_world_size(self.mesh.branches) == 1:
            return self.generator.propose(problem, theta, start, key, progress)
        members = self.mesh.members(generator.count)
        some = generator.propose_some(problem, theta, start, key, progress, members)
        x, aux = (self.mesh.gather(tree, generator.count) for tree in (some.x, some.aux))
        return attrs.evolve(
            some,
            x=x,
            aux=aux,
            losses=None
            if some.losses is None
            else self.mesh.gather({"": some.losses}, generator.count)[""],
            cost=self._of_all(some.cost, next(iter(x.values()))),
        )

    def _of_all(self, cost: Cost, like: Tensor) -> Cost:
        """Return the total cost of all parts."""
        numbers = cost.numbers()
        totals = torch.tensor(list(numbers.values()), device=like.device)
        dist.all_reduce(totals, group=self.mesh.branches)
        return Cost(**dict(zip(numbers, totals.tolist(), strict=True)))

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        return self.generator.carry(start, candidates, index, key, problem)


@frozen(kw_only=True)
class PlacedSelector:
    """Selector with upper values that all ranks compute together, by rows."""

    name: ClassVar[str] = "placed"

    selector: Selector
    mesh: Mesh

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        return self.selector.select(by_rows(problem, self.mesh.world), theta, candidates, key)


@frozen(kw_only=True)
class PlacedHyperGradient:
    """Estimator with gradients and products that all ranks compute together, by rows."""

    name: ClassVar[str] = "placed"

    hypergradient: HyperGradient
    mesh: Mesh

    def init(self, problem: Problem) -> State:
        return self.hypergradient.init(problem)

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        return self.hypergradient.estimate(
            by_rows(problem, self.mesh.world), theta, candidates, selection, key, state
        )


def place_parts(method: Any, ranks: int, device: torch.device, even: bool = False) -> Any:
    """Return the method with the parts of its pipeline on a mesh of all ranks.

    Wrappers around the pipeline are unchanged. ``even``: all ranks propose the same number of
    candidates, because they compute each loss together.

    Raises
    ------
    ConfigError
        For a method without parts.
    """
    if (inner := inner_method(method)) is not None:
        return attrs.evolve(method, method=place_parts(inner, ranks, device, even))
    require(
        isinstance(method, Pipeline),
        "not-supported",
        f"ranks={ranks} requires a Pipeline, but method {name_of(method)!r} is not one",
        hint="remove run.ranks, or use a Pipeline of generator, selector, hypergradient and "
        "outer optimiser",
        place=("run", "ranks"),
    )
    parts = find(method.generator, ProposesSome)
    mesh = Mesh.of(ranks, 1 if parts is None else parts.count, device, even)
    return evolve(
        method,
        generator=PlacedGenerator(generator=method.generator, mesh=mesh),
        selector=PlacedSelector(selector=method.selector, mesh=mesh),
        hypergradient=PlacedHyperGradient(hypergradient=method.hypergradient, mesh=mesh),
    )
