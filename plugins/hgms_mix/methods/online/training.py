"""Bases of methods that learn a mixture while a model trains: batches drawn by a mixture, and
training on them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.arguments import require
from hgms_core import Cost, Data, Key, Problem, Record, Sources, State, Tree, component
from hgms_core.capabilities import Capabilities, Finishes
from hgms_core.validators import not_negative, optional_positive, positive


@component
class ProxyMethod(hgms_mix.lm.TrainedMethod):
    """A method that learns the mixture as the mean of the weights α of a proxy's updates.

    x is then trained on batches drawn by this mixture.

    Parameters
    ----------
    steps
        Updates of the proxy.
    updates
        The maximum in one outer step.
    batch_size
        Lower rows of an update.
    """

    placeholder: ClassVar[str] = "x is the proxy's"

    steps: int = field(default=200, validator=positive)
    updates: int = field(default=10, validator=positive)
    weight_decay: float = field(default=0.01, validator=not_negative)
    batch_size: int = field(default=32, validator=positive)

    def start(self, problem: Problem, seed: int, phase: str, **more: Any) -> State:
        """Return the state before the first step: even weights.

        Raises
        ------
        ConfigError
            For more sources than ``batch_size``.
        """
        sources = self.sources(problem)
        require(
            self.batch_size >= len(sources.names),
            "out-of-range",
            f"batch_size={self.batch_size} must be at least {len(sources.names)}: method "
            f"{self.name!r} requires rows of all sources in a batch",
            place=("method", "batch_size"),
        )
        total = torch.zeros(len(sources.names), dtype=torch.float64)
        return super().start(problem, seed, phase, weights=even(sources), sum=total, **more)

    def proxy_changes(
        self, problem: Problem, state: State, train: Tree, weights: Tensor, total: Tensor
    ) -> State:
        """Return the changes of the state after a step of the proxy, ``total`` being Σ α."""
        at = state["at"] + min(self.updates, self.steps - state["at"])
        theta = self.theta(problem, total / at)
        changes = {"train": train, "weights": weights, "sum": total, "at": at, "theta": theta}
        if at == self.steps:
            changes |= {"phase": "train", "at": 0, **self.fresh(problem)}
        return changes

    def train(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run updates of x at the learned mixture."""
        count = self.next_updates(state, self.updates)
        key = Key(state["seed"]).fold("train")
        weights = state["sum"] / self.steps
        at = state["at"]
        train, record, cost = train_on_mixture(problem, weights, state, self, key, at, count)
        return {"train": train, "at": at + count}, record, cost


@component
class RoundsMethod(hgms_mix.lm.PhasedMethod):
    """A method that learns the mixture in rounds, from validation losses of the x it trains.

    Parameters
    ----------
    rounds
        How many (None: until the budget is spent).
    round_steps
        Updates at the mixture of each round.
    updates
        The maximum of updates in one outer step.
    batch_size
        Lower rows of an update.
    chunk
        Validation rows whose losses are computed at a time.
    """

    capabilities: ClassVar[Capabilities] = hgms_mix.lm.PhasedMethod.capabilities | {Finishes}

    rounds: int | None = field(default=10, validator=optional_positive)
    round_steps: int = field(default=50, validator=positive)
    updates: int = field(default=10, validator=positive)
    weight_decay: float = field(default=0.01, validator=not_negative)
    batch_size: int = field(default=32, validator=positive)
    chunk: int = field(default=32, validator=positive)

    def start(self, problem: Problem, seed: int, phase: str, **more: Any) -> State:
        """Return the state before the first step: even weights."""
        sources = self.sources(problem)
        hgms_mix.lm.check_role(problem, f"method {self.name!r} measures losses of", "differentiate")
        used = torch.zeros(len(sources.names), dtype=torch.float64)
        return super().start(problem, seed, phase, weights=even(sources), used=used, **more)

    @abstractmethod
    def is_finished(self, state: State) -> bool:
        """Return whether all rounds are complete."""

    def used_changes(self, problem: Problem, state: State, count: int) -> State:
        """Return the mean of the mixtures so far, after ``count`` updates at the current one."""
        used = state["used"] + count * state["weights"]
        return {"used": used, "theta": self.theta(problem, used / used.sum())}

    def losses(self, problem: Problem, train: Tree, state: State) -> tuple[Tensor, Cost]:
        """Return the mean loss of each validation set at x."""
        step = state["step"] + 1
        x = hgms_mix.lm.adamw_part(train, "x")
        return hgms_mix.lm.set_losses(problem, x, "differentiate", self.chunk, step)


def even(sources: Sources) -> Tensor:
    """Return ω = 1/S."""
    return torch.full((len(sources.names),), 1 / len(sources.names), dtype=torch.float64)


def tilt(weights: Tensor, scores: Tensor) -> Tensor:
    """Return ω_s e^(scores_s), normalised to sum 1: a step of exponentiated gradient.

    Examples
    --------
    >>> tilt(torch.tensor([0.5, 0.5]), torch.tensor([3.0, 1.0]).log())
    tensor([0.7500, 0.2500])
    """
    return torch.softmax(weights.log() + scores, 0)


def mixture_rows(
    data: Data, sources: Sources, weights: Tensor, key: Key, batch_size: int, steps: int
) -> Tensor:
    """Return row numbers ``[steps, batch_size]`` drawn by the mixture.

    Source s has ω_s·batch_size rows per batch, rounded up or down at random with this mean. Within
    one call, no row of a source is repeated before all its rows are used. Rows are drawn by the
    name of the source, not by its position.
    """
    strata = data.strata or ()
    shares = dict(zip(sources.names, weights.tolist(), strict=True))
    sizes = dict(strata)
    first = 0
    firsts = {}
    for name, size in strata:
        firsts[name], first = first, first + size
    names = sorted(sizes)
    ends = (
        torch.tensor([0.0, *(shares[name] for name in names)], dtype=torch.float64)
        .cumsum(0)
        .mul(batch_size)
    )
    ends = ends.clamp_max(batch_size)
    ends[-1] = batch_size
    luck = torch.rand(steps, 1, generator=key.fold("counts").generator(), dtype=torch.float64)
    counts = (ends + luck).floor().diff(dim=1).long()
    parts = []
    for position, name in enumerate(names):
        total = int(counts[:, position].sum())
        numbers = key.fold("rows", name).indices(sizes[name], max(1, total), 1)[0, :total]
        parts.append(torch.split(firsts[name] + numbers, counts[:, position].tolist()))
    return torch.stack([torch.cat(step) for step in zip(*parts, strict=True)])


def train_on_mixture(
    problem: Problem,
    weights: Tensor,
    state: State,
    method: ProxyMethod | RoundsMethod,
    key: Key,
    done: int,
    count: int,
) -> tuple[Tree, Record, Cost]:
    """Run ``count`` further updates of AdamW, after ``done``, on batches drawn by the mixture.

    Return the new state of AdamW, the loss of the last batch and the cost.

    Notes
    -----
    Cost: 1 lower gradient per update.
    """
    data = problem.lower_data
    sources = method.sources(problem)
    index = mixture_rows(data, sources, weights, key.fold(done), method.batch_size, count)
    train, loss = hgms_mix.lm.adamw_steps(
        sources.pooled,
        problem.theta0,
        (data.rows(numbers.to(data.device)) for numbers in index),
        state["train"],
        method,
        at=done,
        step=state["step"] + 1,
    )
    return train, {"lower_loss": loss}, Cost(lower_gradients=count, rows=count * method.batch_size)
