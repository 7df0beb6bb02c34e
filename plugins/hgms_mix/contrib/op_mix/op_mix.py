"""OP-Mix: one short run per source; averages of their final states replace runs on mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.arguments import require
from hgms.config import lowering
from hgms_core import Cost, Key, Problem, Record, State, component
from hgms_core.validators import at_least, positive
from hgms_mix.contrib.op_mix.law import fit, propose


@final
@component
class OpMix(hgms_mix.lm.MixtureMethod):
    """A law of the validation losses of mixtures that are simulated, not trained::

        x_s = x0 after ``steps`` AdamW updates on g(p_s, ·)
            one probe for each source; p_s: ``own`` of source s,
                                                                         the rest even
        x(λ) = Σ_s λ_s x_s,   ω(λ) = Σ_s λ_s p_s    λ: ``candidates`` points of the simplex
        y_p(λ) = mean loss of validation set p at x(λ)                   rows of the role ``select``
        ŷ_p(ω) = e^{c_p} + e^{t_p·ω},      fitted to (ω(λ), y_p(λ))
        ω* = argmin (1/P) Σ_p e^{t_p·ω} + kl · KL(ω‖prior)

    Adapters are averaged by their changes of the weights, Σ_s λ_s B_s A_s, not by their two
    factors. All probes use the same batches. One step is up to ``updates`` updates of a probe, or
    the validation losses of one candidate.

    Use when training on each source separately is affordable, and many mixtures must be compared.
    Avoid long probes: the mean of two final states is similar to the final state of a mixture only
    near their start.

    Parameters
    ----------
    steps, updates
        Updates of each probe, and the maximum in one outer step.
    lr, weight_decay, betas, eps, batch_size
        AdamW of the lower level (batch_size None: all rows).
    own
        The share of the probe's source in its mixture, above 1/S; 1: it is trained on that source
        only.
    candidates
        Points λ: the corners (the probes themselves), even weights, and random points, uniform over
        the simplex.
    kl
        The weight of the prior, the initial mixture of the problem (``task.prior``: even, by size,
        or custom).
    chunk
        Validation rows whose losses are computed at a time.
    train_steps
        Updates of a fresh x at the learned mixture; 0: x is the best probe's; None: until the
        budget is spent.

    Raises
    ------
    ConfigError
        For a problem without sources or rows of the role ``select``, for fewer ``candidates`` than
        S + 2 and an ``own`` of at most 1/S.
    NumericalError
        For infinite losses, and validation losses of at most 0.

    Notes
    -----
    Cost: S·``steps`` lower gradients and ``candidates`` upper values (of all rows of ``select``)
    before the mixture is known.

    Memory: S + 2 lower states between steps, at most 2S + 9 within one.

    Source: Hu et al., *Always learning, always mixing: efficient and simple data mixing all the
    time*, 2026 (arXiv 2605.15220).

    Examples
    --------
    >>> OpMix(steps=50, own=1.0).kl
    0.05
    """

    name: ClassVar[str] = "op-mix"
    testing: ClassVar[Mapping[str, Any]] = {"steps": 20, "lr": 0.1, "candidates": 9, "kl": 1e-3}
    placeholder: ClassVar[str] = "x is a probe's"

    steps: int = field(default=100, validator=positive)
    own: float = field(default=0.9, validator=hgms_mix.lm.some_share)
    candidates: int = field(default=32, validator=at_least(4))
    kl: float = field(default=0.05, validator=positive)
    chunk: int = field(default=32, validator=positive)

    memory_hints = lowering(same=["chunk"], other=["batch_size"])

    def init(self, problem: Problem, seed: int) -> State:
        count = len(self.sources(problem).names)
        hgms_mix.lm.check_role(problem, "method 'op-mix' compares mixtures on", "select")
        require(
            self.candidates >= count + 2,
            "out-of-range",
            f"candidates={self.candidates} must be at least {count + 2}: the law of {count} "
            f"sources has {count + 1} parameters",
            place=("method", "candidates"),
        )
        require(
            self.own > 1 / count,
            "out-of-range",
            f"own={self.own} must be greater than 1/{count}, the even share of {count} sources",
            place=("method", "own"),
        )
        return {
            **self.start(problem, seed, "probes"),
            "theta": dict(problem.theta0),
            "run": 0,
            "probes": {},
            "losses": torch.empty(0, 0, dtype=torch.float64),
        }

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {"probes": self._probe, "candidates": self._candidate, "train": self.train}

    def _probe(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run some updates of a probe; all probes use the same batches."""
        sources = self.sources(problem)
        run = state["run"]
        at = state["at"]
        mixture = hgms_mix.lm.focused_mixtures(len(sources.names), self.own)[run]
        theta = self.theta(problem, mixture)
        count = min(self.updates, self.steps - at)
        changes, record, spent = self.update_on(problem, theta, state, count, "batches")
        if changes["at"] == self.steps:
            probes = {**state["probes"], str(run): hgms_mix.lm.adamw_part(changes["train"], "x")}
            changes |= {
                "probes": probes,
                "run": run + 1,
                "at": 0,
                "train": hgms_mix.lm.adamw_start(problem.x0),
            }
            if run + 1 == len(sources.names):
                changes["phase"] = "candidates"
        return changes, {"probe": sources.names[run], **record}, spent

    def _candidate(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Compute the validation losses of one mixture of the probes.

        After the last mixture, the laws and the best mixture are computed.
        """
        sources = self.sources(problem)
        at = state["at"]
        probes = list(state["probes"].values())
        points = self._points(len(probes), Key(state["seed"]).fold("points"))
        x = hgms_mix.lm.interpolate(probes, points[at].tolist())
        step = state["step"] + 1
        by_set, spent = hgms_mix.lm.set_losses(problem, x, "select", self.chunk, step)
        hgms_mix.lm.check_positive(by_set, "for the law of 'op-mix', the validation losses", step)
        losses = torch.cat([state["losses"].reshape(at, len(by_set)), by_set[None]])
        changes: State = {"losses": losses, "at": at + 1}
        record: Record = {"upper_loss": by_set.mean()}
        if at + 1 == self.candidates:
            mixtures = points @ hgms_mix.lm.focused_mixtures(len(probes), self.own)
            laws = [fit(mixtures, own) for own in losses.T]
            omega = propose(laws, sources.weights(problem.theta0).cpu(), self.kl)
            predicted = torch.stack([law(omega[None])[0] for law in laws]).mean()
            means = losses.mean(1)
            record |= {
                "predicted_loss": predicted,
                "law_error": max(law.error for law in laws),
                "lowest_loss": means.min(),
            }
            best = (
                probes[int(means[: len(probes)].argmin())] if self.train_steps == 0 else problem.x0
            )
            changes |= {
                "phase": "train",
                "at": 0,
                "theta": self.theta(problem, omega),
                "probes": {},
                "train": hgms_mix.lm.adamw_start(best),
            }
        return changes, record, spent

    def _points(self, count: int, key: Key) -> Tensor:
        """Return the λ of all candidates, ``[candidates, S]``."""
        even = torch.full((1, count), 1 / count, dtype=torch.float64)
        draw = torch.rand(
            self.candidates - count - 1, count, generator=key.generator(), dtype=torch.float64
        )
        spacings = -draw.clamp_min(torch.finfo(torch.float64).tiny).log()
        return torch.cat(
            [torch.eye(count, dtype=torch.float64), even, spacings / spacings.sum(1, keepdim=True)]
        )
