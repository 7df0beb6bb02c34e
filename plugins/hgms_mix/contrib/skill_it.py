"""Skill-It: favour sources that help validation sets with high losses.

A graph describes which source helps which set.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.config import lowering
from hgms_core import (
    Cost,
    Key,
    NumericalError,
    Problem,
    Record,
    Sources,
    State,
    Tree,
    component,
    hookimpl,
)
from hgms_core.capabilities import Capabilities, Finishes, HasTestingInstance
from hgms_core.validators import decay_rates, not_negative, optional_whole, positive, whole
from hgms_mix.methods.online import training


@final
@component
class SkillIt:
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

    Arguments:
        graph_steps: updates of the run on each source. ``round_steps``: between two weights.
            ``rounds``: how many (None: until the budget is spent). ``updates``: the maximum in one
            outer step.
        eta, window: η, and the number of rounds in the sum of losses.
        lr, weight_decay, betas, eps, batch_size: AdamW of all runs.
        chunk: validation rows whose losses are computed at a time.

    Errors: ConfigError for a problem without sources or validation rows; NumericalError for
        infinite losses, and L_j(x0) <= 0.

    Cost: S·``graph_steps`` + ``rounds``·``round_steps`` lower gradients, 1 + S + ``rounds`` upper
        values.
    Memory: 3 lower states between steps, 10 within one.

    >>> SkillIt(rounds=None).window
    3

    Source: Chen et al., *Skill-it! A data-driven skills framework for understanding and training
        language models*, 2023.
    """

    name: ClassVar[str] = "skill-it"
    capabilities: ClassVar[Capabilities] = frozenset({Finishes, HasTestingInstance})
    needs: ClassVar[frozenset[str]] = frozenset({"sources", "per-example-losses"})

    graph_steps: int = field(default=100, validator=whole)
    round_steps: int = field(default=50, validator=whole)
    rounds: int | None = field(default=10, validator=optional_whole)
    updates: int = field(default=10, validator=whole)
    eta: float = field(default=0.2, validator=positive)
    window: int = field(default=3, validator=whole)
    lr: float = field(default=1e-4, validator=positive)
    weight_decay: float = field(default=0.01, validator=not_negative)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=decay_rates)
    eps: float = field(default=1e-8, validator=positive)
    batch_size: int = field(default=32, validator=whole)
    chunk: int = field(default=32, validator=whole)

    memory_hints = lowering(same=["chunk"], other=["batch_size"])

    @classmethod
    def testing_instance(cls) -> SkillIt:
        """Return an instance for ``hgms check``.

        It ends within 60 outer steps, at a rate for a problem of size 1.
        """
        return cls(graph_steps=20, round_steps=10, rounds=5, eta=2.0, lr=0.1)

    def init(self, problem: Problem, seed: int) -> State:
        sources = _sources(problem)
        hgms_mix.lm.check_role(problem, "method 'skill-it' takes its graph from", "differentiate")
        return {
            **hgms_mix.lm.first_state(seed, "graph", sources),
            "train": hgms_mix.lm.adamw_start(problem.x0),
            "start": torch.empty(0, dtype=torch.float64),
            "graph": torch.empty(0, 0, dtype=torch.float64),
            "losses": torch.empty(0, 0, dtype=torch.float64),
            "weights": training.even(sources),
            "used": torch.zeros(len(sources.names), dtype=torch.float64),
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        phases = {"graph": self._graph, "rounds": self._round}
        return hgms_mix.lm.in_phases(phases, problem, state, finished=self.finished(state))

    def finished(self, state: State) -> bool:
        """Whether all rounds are complete."""
        return (
            state["phase"] == "rounds"
            and self.rounds is not None
            and state["at"] >= self.rounds * self.round_steps
        )

    def result(self, state: State) -> tuple[Tree, Tree]:
        """Return (θ, x).

        While the graph is learned: the even mixture and x of a run. Then: the mean mixture so far
        and its x.
        """
        return state["theta"], hgms_mix.lm.adamw_part(state["train"], "x")

    def _graph(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run some updates on one source.

        After the last update, its row of the graph is computed; after the last source, the first
        weights.
        """
        sources = _sources(problem)
        at = state["at"]
        graph = state["graph"]
        start = state["start"]
        spent = Cost()
        number = len(graph)
        if start.numel() == 0:
            start, spent = self._losses(problem, problem.x0, state)
            if not (start > 0).all():
                raise NumericalError(
                    "out-of-range",
                    f"step {state['step'] + 1}: the validation losses at x0, {start.tolist()}, "
                    "must be greater than 0: the graph of 'skill-it' divides by them",
                    place=("problem", "f"),
                )
        alone = torch.zeros(len(sources.names), dtype=torch.float64)
        alone[number] = 1
        count = min(self.updates, self.graph_steps - at)
        train, record, cost = self._updates(
            problem, state, alone, ("graph", sources.names[number]), count
        )
        changes: State = {"train": train, "at": at + count, "start": start}
        spent += cost
        if changes["at"] == self.graph_steps:
            losses, cost = self._losses(problem, hgms_mix.lm.adamw_part(train, "x"), state)
            graph = _followed(graph, (start - losses) / start)
            spent = spent + cost
            changes |= {"graph": graph, "at": 0, "train": hgms_mix.lm.adamw_start(problem.x0)}
            record["upper_loss"] = losses.mean()
        if len(graph) == len(sources.names):
            changes |= {
                "phase": "rounds",
                "weights": self._weights(graph, torch.ones_like(start)[None]),
            }
            changes["theta"] = training.theta_of(sources, changes["weights"])
        return changes, {"source": sources.names[number], **record}, spent

    def _round(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run some updates of a round; after the last update, compute the losses and the next
        weights.
        """
        sources = _sources(problem)
        at = state["at"]
        weights = state["weights"]
        count = min(self.updates, self.round_steps - at % self.round_steps)
        train, record, spent = self._updates(problem, state, weights, ("rounds",), count)
        used = state["used"] + count * weights
        changes: State = {
            "train": train,
            "at": at + count,
            "used": used,
            "theta": training.theta_of(sources, used / used.sum()),
        }
        if changes["at"] % self.round_steps == 0:
            losses, cost = self._losses(problem, hgms_mix.lm.adamw_part(train, "x"), state)
            recent = _followed(state["losses"], losses)[-self.window :]
            changes |= {"losses": recent, "weights": self._weights(state["graph"], recent)}
            record["upper_loss"], spent = losses.mean(), spent + cost
        return changes, {"round": at // self.round_steps + 1, **record}, spent

    def _weights(self, graph: Tensor, losses: Tensor) -> Tensor:
        """Return p ∝ e^(η A Σ_τ L(τ))."""
        return torch.softmax(self.eta * graph @ losses.sum(0), 0)

    def _losses(self, problem: Problem, x: Tree, state: State) -> tuple[Tensor, Cost]:
        return hgms_mix.lm.set_losses(problem, x, "differentiate", self.chunk, state["step"] + 1)

    def _updates(
        self, problem: Problem, state: State, weights: Tensor, label: tuple[str, ...], count: int
    ) -> tuple[Tree, Record, Cost]:
        key = Key(state["seed"]).fold(*label)
        step = state["step"] + 1
        train, loss, spent = training.trained(
            problem,
            weights,
            state["train"],
            self,
            key=key,
            done=state["at"],
            count=count,
            step=step,
        )
        return train, {"lower_loss": loss}, spent


def _followed(rows: Tensor, row: Tensor) -> Tensor:
    return torch.cat([rows.reshape(len(rows), len(row)), row[None]])


def _sources(problem: Problem) -> Sources:
    return hgms_mix.lm.sources_of(problem, "method 'skill-it' mixes")


@hookimpl
def hgms_register_methods() -> list[type]:
    return [SkillIt]
