"""Skill-It: favour sources that help validation sets with high losses.

A graph describes which source helps which set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.config import lowering
from hgms_core import Cost, Key, Problem, Record, State, component, hookimpl
from hgms_core.validators import positive
from hgms_mix.methods.online import training


@final
@component
class SkillIt(training.RoundsMethod):
    """A skills graph from a short run on every source, then multiplicative weights on validation
    losses::

        x_s = x0 after ``graph_steps`` AdamW updates on source s alone,
            A_sj = (L_j(x0) − L_j(x_s)) / L_j(x0)
        p_1 ∝ e^(η Σ_j A_sj),      x after round t = AdamW, ``round_steps`` updates at p_t
        p_{t+1} ∝ e^(η Σ_j A_sj Σ_τ L_j(x after round τ)),   τ the last ``window`` rounds up to t

    L_j is the mean loss of validation set j on its rows of the role ``differentiate``. The mixture
    is the mean of the p_t, weighted by the updates at each. x is the model trained on them. One
    step is up to ``updates`` updates.

    Use with several validation sets that benefit from different sources: weights then follow the
    sets with high losses. Avoid with one set: the p_t then rank the sources by A only, and become
    more even as the loss falls. Short runs must have the same effects as long runs.

    Parameters
    ----------
    graph_steps
        Updates of the run on each source.
    round_steps
        Between two weights.
    rounds
        How many (None: until the budget is spent).
    updates
        The maximum in one outer step.
    eta, window
        η, and the number of rounds in the sum of losses.
    lr, weight_decay, betas, eps, batch_size
        AdamW of all runs.
    chunk
        Validation rows whose losses are computed at a time.

    Raises
    ------
    ConfigError
        For a problem without sources or validation rows.
    NumericalError
        For infinite losses, and L_j(x0) <= 0.

    Notes
    -----
    Cost: S·``graph_steps`` + ``rounds``·``round_steps`` lower gradients, 1 + S + ``rounds`` upper
    values.

    Memory: 3 lower states between steps, 10 within one.

    Source: Chen et al., *Skill-it! A data-driven skills framework for understanding and training
    language models*, 2023.

    Examples
    --------
    >>> SkillIt(rounds=None).window
    3
    """

    name: ClassVar[str] = "skill-it"
    testing: ClassVar[Mapping[str, Any]] = {
        "graph_steps": 20,
        "round_steps": 10,
        "rounds": 5,
        "eta": 2.0,
        "lr": 0.1,
    }

    graph_steps: int = field(default=100, validator=positive)
    eta: float = field(default=0.2, validator=positive)
    window: int = field(default=3, validator=positive)

    memory_hints = lowering(same=["chunk"], other=["batch_size"])

    def init(self, problem: Problem, seed: int) -> State:
        return self.start(
            problem,
            seed,
            "graph",
            start=torch.empty(0, dtype=torch.float64),
            graph=torch.empty(0, 0, dtype=torch.float64),
            losses=torch.empty(0, 0, dtype=torch.float64),
        )

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {"graph": self._graph, "rounds": self._round}

    def is_finished(self, state: State) -> bool:
        """Whether all rounds are complete."""
        return (
            state["phase"] == "rounds"
            and self.rounds is not None
            and state["at"] >= self.rounds * self.round_steps
        )

    def _graph(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run some updates on one source.

        After the last update, its row of the graph is computed; after the last source, the first
        weights.
        """
        sources = self.sources(problem)
        at = state["at"]
        graph = state["graph"]
        start = state["start"]
        spent = Cost()
        number = len(graph)
        if start.numel() == 0:
            start, spent = self.losses(problem, state["train"], state)
            hgms_mix.lm.check_positive(
                start, "for the graph of 'skill-it', the validation losses at x0", state["step"] + 1
            )
        alone = torch.zeros(len(sources.names), dtype=torch.float64)
        alone[number] = 1
        count = min(self.updates, self.graph_steps - at)
        key = Key(state["seed"]).fold("graph", sources.names[number])
        train, record, cost = training.train_on_mixture(problem, alone, state, self, key, at, count)
        changes: State = {"train": train, "at": at + count, "start": start}
        spent += cost
        if changes["at"] == self.graph_steps:
            losses, cost = self.losses(problem, train, state)
            graph = append_row(graph, (start - losses) / start)
            spent = spent + cost
            changes |= {"graph": graph, "at": 0, "train": hgms_mix.lm.adamw_start(problem.x0)}
            record["upper_loss"] = losses.mean()
        if len(graph) == len(sources.names):
            changes |= {
                "phase": "rounds",
                "weights": self._weights(graph, torch.ones_like(start)[None]),
            }
            changes["theta"] = self.theta(problem, changes["weights"])
        return changes, {"source": sources.names[number], **record}, spent

    def _round(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run some updates of a round; after the last update, compute the losses and the next
        weights.
        """
        at = state["at"]
        count = min(self.updates, self.round_steps - at % self.round_steps)
        key = Key(state["seed"]).fold("rounds")
        train, record, spent = training.train_on_mixture(
            problem, state["weights"], state, self, key, at, count
        )
        changes: State = {"train": train, "at": at + count}
        changes |= self.used_changes(problem, state, count)
        if changes["at"] % self.round_steps == 0:
            losses, cost = self.losses(problem, train, state)
            recent = append_row(state["losses"], losses)[-self.window :]
            changes |= {"losses": recent, "weights": self._weights(state["graph"], recent)}
            record["upper_loss"], spent = losses.mean(), spent + cost
        return changes, {"round": at // self.round_steps + 1, **record}, spent

    def _weights(self, graph: Tensor, losses: Tensor) -> Tensor:
        """Return p ∝ e^(η A Σ_τ L(τ))."""
        return torch.softmax(self.eta * graph @ losses.sum(0), 0)


def append_row(rows: Tensor, row: Tensor) -> Tensor:
    return torch.cat([rows.reshape(len(rows), len(row)), row[None]])


@hookimpl
def hgms_register_methods() -> list[type]:
    return [SkillIt]
