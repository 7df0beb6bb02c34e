"""A method whose steps all ranks run together: rank 0 selects the step, the others follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch.utils._pytree import tree_map_only

from hgms.distributed.group import Ranks
from hgms_core import ConfigError, Method, Problem, Record, State, Tree
from hgms_core.capabilities import (
    Capabilities,
    Finishes,
    HasPlaceholder,
    NotStackable,
    capabilities_of,
)


@define(eq=False)
class OnRanks:
    """``method`` (:func:`hgms.distributed.place_parts`) on rank 0, with all ranks in each step.

    The run does not depend on ranks. It calls ``init`` and ``step`` as for any method, and resumes,
    evaluates and writes on rank 0 only.

    Before each step rank 0 sends the share of the budget. It also sends the state if the other
    ranks have a different one, for example after a run resumes on a different number of ranks.
    After each step all ranks compare the sums of their θ.

    ``sharded``: the model of the problem is split across ranks, so all ranks compute each loss.
    Rank 0 then also sends the calls that the run makes between steps (f, g, ``evaluate``).
    """

    name: ClassVar[str] = "on-ranks"

    method: Any
    ranks: Ranks
    sharded: bool = False
    _step: int = field(default=0, init=False)
    _problem: Problem | None = field(default=None, init=False)
    _before: State | None = field(default=None, init=False)
    _after: State | None = field(default=None, init=False)

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(self.method) & {Finishes, HasPlaceholder}

    @property
    def placeholder_reason(self) -> str:
        return str(self.method.placeholder_reason)

    def is_finished(self, state: State) -> bool:
        return bool(self.method.is_finished(state))

    def build(self, make: Callable[[], Problem]) -> Problem:
        """Return the problem for the run; all other ranks build their problem at the same time."""
        with self.ranks.together("step 0"):
            self.ranks.say({"do": "build"})
            problem = self._problem = make()
        if not self.sharded:
            return problem
        shared: dict[str, Any] = {
            name: _OnAllRanks(self, name, getattr(problem, name)) for name in ("f", "g", "evaluate")
        }
        return attrs.evolve(problem, **shared)

    def init(self, problem: Problem, seed: int) -> State:
        with self.ranks.together("step 0"):
            self.ranks.say({"do": "init", "seed": seed})
            self._before, self._after = None, self.method.init(self._problem or problem, seed)
        return self._after

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        which = "after" if state is self._after else "before" if state is self._before else "sent"
        message = {"do": "step", "from": which, "progress": progress}
        self._step = int(state.get("step", 0)) + 1
        with self.ranks.together(f"step {self._step}"):
            self.ranks.say({**message, "state": state} if which == "sent" else message)
            following, record = self.method.step(self._problem or problem, state, progress)
            ensure_agreement(self.method.result(following)[0], self.ranks)
        self._before = state
        self._after = following
        return following, record

    def result(self, state: State) -> tuple[Tree, Tree]:
        return self.method.result(state)


@frozen(eq=False)
class _OnAllRanks:
    """A function of the problem that rank 0 calls between steps, together with the other ranks.

    It returns the value without a graph, and one candidate after the other: only calls are sent.
    """

    capabilities: ClassVar[Capabilities] = frozenset({NotStackable})

    run: OnRanks
    name: str
    function: Any

    def __call__(self, *args: Any) -> Any:
        with self.run.ranks.together(f"step {self.run._step}"), torch.no_grad():
            self.run.ranks.say({"do": "call", "name": self.name, "args": list(args)})
            return self.function(*args)


def follow(method: Method, make: Callable[[], Problem], ranks: Ranks) -> None:
    """Follow the calls of rank 0 on another rank until the run ends.

    If all ranks meet the same error, only rank 0 reports it.
    """
    before: State | None = None
    after: State | None = None
    while (message := ranks.say(None)) is not None:
        if message["do"] == "build":
            problem = make()
            device = next(iter(problem.x0.values())).device
        elif message["do"] == "call":
            with torch.no_grad():
                getattr(problem, message["name"])(*_move(message["args"], device))
        elif message["do"] == "init":
            before = None
            after = method.init(problem, message["seed"])
        else:
            known = {"after": after, "before": before, "sent": message.get("state")}
            before = _move(known[message["from"]], device)
            assert before is not None
            after, _ = method.step(problem, before, message["progress"])
            ensure_agreement(method.result(after)[0], ranks)


def ensure_agreement(theta: Tree, ranks: Ranks) -> None:
    """Raise ConfigError if another rank has computed a different θ.

    Such a rank computes differently, and all later results would be invalid. The check compares the
    sums of the leaves bit by bit.
    """
    if not theta:
        return
    own = torch.stack([leaf.double().sum() for leaf in theta.values()])
    gathered = [torch.empty_like(own) for _ in range(ranks.count)]
    dist.all_gather(gathered, own)
    first = gathered[0].nan_to_num()
    other = [
        rank for rank, sums in enumerate(gathered) if not torch.equal(sums.nan_to_num(), first)
    ]
    if other:
        raise ConfigError(
            "ranks-differ",
            f"rank {other[0]} has computed another theta than rank 0",
            place=("run", "ranks"),
            hint="use the same processor or GPU, torch version and number of threads on all ranks",
        )


def _move(state: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), state)
