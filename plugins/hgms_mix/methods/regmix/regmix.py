"""RegMix: find the best mixture by regression on validation losses of short runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.arguments import require
from hgms.config import lowering
from hgms_core import Cost, Key, Problem, Record, State, Tree, component
from hgms_core.validators import at_least, positive
from hgms_mix.methods.regmix.regression import Regressor, best, draw_mixtures, fit, sklearn


def _range(instance: object, attribute: object, value: tuple[float, float]) -> None:
    require(
        len(value) == 2 and 0 < value[0] <= value[1],
        "wrong-value",
        f"concentration={value} must be two positive numbers (low, high) with low <= high",
        place=("concentration",),
    )


@final
@component
class RegMix(hgms_mix.lm.MixtureMethod):
    """A regression from mixtures to validation losses, fitted on short proxy runs::

        ω_r ~ Dirichlet(c_r S prior),  log c_r uniform          r = 1 … runs
        x_r = x0 after ``steps`` AdamW updates on g(ω_r, ·),
            y_r = f(x_r) on the rows of the role ``select``
        ŷ = regression of y_r on ω_r,
            ω = mean of the ``top`` of ``simulated`` random mixtures with the lowest ŷ

    All runs use the same batches: their losses differ only by the mixture. One step is up to
    ``updates`` updates of a run.

    Use with a small number of sources, if short runs rank mixtures in the same order as long runs.
    Avoid ``quadratic`` with many sources: it has S(S + 3)/2 coefficients, and with fewer runs the
    penalty determines them.

    Parameters
    ----------
    runs, steps, updates
        Proxy runs, updates per run, and maximum updates in one outer step.
    lr, weight_decay, betas, eps, batch_size
        AdamW of the lower level (batch_size None: all rows).
    concentration
        The range of c.
    prior
        ``uniform`` over the sources, or their shares of all ``rows`` of their files, including rows
        that the task does not use.
    regressor
        ``linear`` or ``quadratic`` ridge regression, or ``boosting``.
    simulated, top
        The number of predicted mixtures, and the number of best mixtures to average.
    chunk
        Validation rows whose losses are computed at a time.
    train_steps
        Updates of a fresh x at the learned mixture; 0: x is the best proxy run's; None: until the
        budget is spent.

    Raises
    ------
    ConfigError
        For a problem without sources or rows of the role ``select``.
    NumericalError
        For infinite losses.

    Notes
    -----
    Cost: ``runs``·``steps`` lower gradients and ``runs`` upper values before the mixture is known.
    Memory: 4 lower states.

    Source: Liu et al., *RegMix: data mixture as regression for language model pre-training*, 2024.

    Examples
    --------
    >>> RegMix(runs=32, steps=50, regressor="boosting").top
    100
    """

    name: ClassVar[str] = "regmix"
    testing: ClassVar[Mapping[str, Any]] = {
        "runs": 12,
        "steps": 20,
        "updates": 10,
        "lr": 0.1,
        "simulated": 2000,
        "top": 20,
    }
    placeholder: ClassVar[str] = "x is a proxy run's"

    runs: int = field(default=64, validator=at_least(3))
    steps: int = field(default=100, validator=positive)
    concentration: tuple[float, float] = field(default=(0.1, 5.0), validator=_range)
    prior: Literal["uniform", "rows"] = "uniform"
    regressor: Regressor = "quadratic"
    simulated: int = field(default=100_000, validator=positive)
    top: int = field(default=100, validator=positive)
    chunk: int = field(default=32, validator=positive)

    memory_hints = lowering(same=["chunk"], other=["batch_size"])

    def __attrs_post_init__(self) -> None:
        require(
            self.top <= self.simulated,
            "out-of-range",
            f"top={self.top} must be at most simulated={self.simulated}",
            place=("top",),
        )

    def init(self, problem: Problem, seed: int) -> State:
        started = self.start(problem, seed, "proxies")
        hgms_mix.lm.check_role(problem, "method 'regmix' compares runs on", "select")
        sklearn()
        return {
            **started,
            "run": 0,
            "mixtures": self._draw(problem, Key(seed).fold("mixtures"), self.runs),
            "losses": torch.empty(0, dtype=torch.float64),
            "best": dict(problem.x0),
        }

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {"proxies": self._proxy, "train": self.train}

    def result(self, state: State) -> tuple[Tree, Tree]:
        """Return (θ, x): initially the even mixture and x of the best proxy run so far."""
        trained = state["phase"] == "train" and self.train_steps != 0
        return state["theta"], super().result(state)[1] if trained else state["best"]

    def _proxy(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run some updates of a proxy run.

        At its end the validation loss is computed, and after the last run the regression.
        """
        run = state["run"]
        mixtures = state["mixtures"]
        losses = state["losses"]
        theta = self.theta(problem, mixtures[run])
        count = min(self.updates, self.steps - state["at"])
        changes, record, spent = self.update_on(problem, theta, state, count, "batches")
        record = {"run": run + 1, **record}
        if changes["at"] < self.steps:
            return changes, record, spent
        x = hgms_mix.lm.adamw_part(changes["train"], "x")
        validation = self._validation_loss(problem, theta, x, state["step"] + 1)
        losses = torch.cat([losses, validation[None].cpu()])
        fresh = hgms_mix.lm.adamw_start(problem.x0)
        changes |= {"train": fresh, "at": 0, "run": run + 1, "losses": losses}
        if int(losses.argmin()) == run:
            changes["best"] = x
        if run + 1 == self.runs:
            key = Key(state["seed"])
            predict = fit(mixtures, losses, self.regressor, key.fold("regression").derive())
            simulated = self._draw(problem, key.fold("simulated"), self.simulated)
            omega, predicted = best(predict, simulated, self.top)
            changes |= {"phase": "train", "theta": self.theta(problem, omega)}
            record |= {
                "predicted_loss": predicted,
                "regression_error": float((predict(mixtures) - losses).square().mean().sqrt()),
                "lowest_run_loss": losses.min(),
            }
        spent += Cost(upper_values=1, rows=problem.upper_data["select"].size)
        return changes, {**record, "upper_loss": validation}, spent

    def _validation_loss(self, problem: Problem, theta: Tree, x: Tree, step: int) -> Tensor:
        """Return f on all rows of the role ``select``; f is a mean over rows."""
        data = problem.upper_data["select"]
        parts = torch.split(torch.arange(data.size, device=data.device), self.chunk)
        with torch.no_grad():
            sums = [len(part) * problem.f(theta, x, data.rows(part)).double() for part in parts]
        loss = torch.stack(sums).sum() / data.size
        hgms_mix.lm.check_finite(
            loss, "the validation loss of a proxy run", step, hint="decrease lr"
        )
        return loss

    def _draw(self, problem: Problem, key: Key, count: int) -> Tensor:
        shares = hgms_mix.lm.prior_shares(problem, self.prior)
        prior = [shares[name] for name in self.sources(problem).names]
        return draw_mixtures(key, count, prior, self.concentration)
