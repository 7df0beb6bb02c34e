"""RegMix: which mixture is best, from the validation losses of short runs at random ones."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, final

import torch
from attrs import Attribute, field, frozen, validators
from torch import Tensor

from hgms_core import ConfigError, Cost, Key, NumericalError, Problem, Record, Sources, State, Tree, gradient
from hgms_regmix.regression import Mixtures, Regressor, best, fit, sklearn

positive: Any = validators.gt(0)
whole: Any = [validators.instance_of(int), validators.gt(0)]
optional_whole: Any = validators.optional(whole)
optional_count: Any = validators.optional([validators.instance_of(int), validators.ge(0)])
not_negative: Any = validators.ge(0)


def _decay_rates(instance: object, attribute: object, value: tuple[float, float]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"'betas' must be two numbers in [0, 1): {value}")


def _range(instance: object, attribute: object, value: tuple[float, float]) -> None:
    if len(value) != 2 or not 0 < value[0] <= value[1]:
        raise ValueError(f"'concentration' must be two positive numbers (low, high) with low <= high: {value}")


@final
@frozen(kw_only=True)
class RegMix:
    """A regression from mixtures to validation losses, fitted on short proxy runs::

        ω_r ~ Dirichlet(c_r S prior),  log c_r uniform          r = 1 … runs
        x_r = x0 after ``steps`` AdamW updates on g(ω_r, ·),      y_r = f(x_r) on the rows of the role ``select``
        ŷ = regression of y_r on ω_r,      ω = mean of the ``top`` of ``simulated`` random mixtures with the lowest ŷ

    All runs see the same batches, so that their losses differ by the mixture and not by the draw of rows. One step is up to
    ``updates`` updates of one run.

    Use with a handful of sources, when short runs rank mixtures as long ones do. Avoid ``quadratic`` with many sources: it has
    S(S + 3)/2 coefficients, and fewer runs than that leave them to the penalty.

    Arguments:
        runs, steps, updates: proxy runs, updates of each, and at most how many in one outer step.
        lr, weight_decay, betas, eps, batch_size: AdamW of the lower level (batch_size None: all rows).
        concentration: the range of c. ``prior``: ``uniform`` over the sources, or their shares of all ``rows``.
        regressor: ``linear`` or ``quadratic`` ridge regression, or ``boosting``.
        simulated, top: mixtures that are predicted, and how many of the best are averaged.
        chunk: validation rows whose losses are computed at a time.
        train_steps: updates of a fresh x at the mixture found; 0: x is that of the best proxy run; None: until the budget is
            spent.

    Errors: ConfigError for a problem without sources or rows of the role ``select``; MissingExtra without scikit-learn;
    NumericalError for losses that are not finite.

    Cost: ``runs``·``steps`` lower gradients and ``runs`` upper values before the mixture is known. Memory: 4 lower states (x,
    two moments, the best run's x).

    >>> RegMix(runs=32, steps=50, regressor="boosting").top
    100

    Source: Liu et al., *RegMix: data mixture as regression for language model pre-training*, 2024.
    """

    name: ClassVar[str] = "regmix"
    needs: ClassVar[frozenset[str]] = frozenset({"sources", "per-example-losses"})

    runs: int = field(default=64, validator=[validators.instance_of(int), validators.ge(3)])
    steps: int = field(default=100, validator=whole)
    updates: int = field(default=10, validator=whole)
    lr: float = field(default=1e-4, validator=positive)
    weight_decay: float = field(default=0.0, validator=not_negative)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=_decay_rates)
    eps: float = field(default=1e-8, validator=positive)
    batch_size: int | None = field(default=32, validator=optional_whole)
    concentration: tuple[float, float] = field(default=(0.1, 5.0), validator=_range)
    prior: Literal["uniform", "rows"] = field(default="uniform", validator=validators.in_(["uniform", "rows"]))
    regressor: Regressor = field(default="quadratic", validator=validators.in_(["linear", "quadratic", "boosting"]))
    simulated: int = field(default=100_000, validator=whole)
    top: int = field(default=100, validator=whole)
    chunk: int = field(default=32, validator=whole)
    train_steps: int | None = field(default=0, validator=optional_count)

    @top.validator
    def _fewer_than_simulated(self, attribute: Attribute[int], value: int) -> None:
        if value > self.simulated:
            raise ValueError(f"'top' must be at most simulated ({self.simulated}): {value}")

    @classmethod
    def testing_instance(cls) -> RegMix:
        """For ``hgms check``: a regression that is done within 60 outer steps, at a rate for a problem of size 1."""
        return cls(runs=12, steps=20, updates=10, lr=0.1, simulated=2000, top=20)

    def init(self, problem: Problem, seed: int) -> State:
        sources = _sources(problem)
        if "select" not in problem.upper_data or problem.upper_data["select"].size == 0:
            raise ConfigError("method 'regmix' compares runs on validation rows of the role 'select', and there are none")
        sklearn()
        return {
            "seed": seed,
            "step": 0,
            "phase": "proxies",
            "run": 0,
            "at": 0,
            "mixtures": self._mixtures(problem).draw(Key(seed).fold("mixtures"), self.runs),
            "losses": torch.empty(0, dtype=torch.float64),
            "best": dict(problem.x0),
            "theta": sources.theta(dict.fromkeys(sources.names, 1.0)),
            **_fresh(problem.x0),
            "cost": Cost().numbers(),
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        record: Record = {"step": state["step"] + 1, "phase": state["phase"]}
        spent = Cost()
        changes: State = {}
        if not self.finished(state):
            changes, seen, spent = self._proxy(problem, state) if state["phase"] == "proxies" else self._train(problem, state)
            record |= seen
        cost = Cost(**state["cost"]) + spent
        record |= {**{f"cost_{name}": number for name, number in cost.numbers().items()}, "oracle_calls": cost.calls}
        return {**state, **changes, "step": state["step"] + 1, "cost": cost.numbers()}, record

    def finished(self, state: State) -> bool:
        """Whether the mixture is known and x is trained as long as asked."""
        return state["phase"] == "train" and self.train_steps is not None and state["at"] >= self.train_steps

    def result(self, state: State) -> tuple[Tree, Tree]:
        """(θ, x): the even mixture and the best proxy run's x so far, until there is more."""
        trained = state["phase"] == "train" and self.train_steps != 0
        return state["theta"], state["x"] if trained else state["best"]

    @property
    def untrained(self) -> str:
        """Why x is not one that was trained on the mixture; empty where it is."""
        return "x is a proxy run's (train_steps = 0)" if self.train_steps == 0 else ""

    def _proxy(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Some updates of a run; at its end its validation loss, and after the last run the regression."""
        sources, run = _sources(problem), state["run"]
        # On the CPU, wherever a checkpoint was read to.
        mixtures, losses = state["mixtures"].cpu(), state["losses"].cpu()
        weights = mixtures[run]
        theta = sources.theta(dict(zip(sources.names, weights.tolist(), strict=True)))
        count = min(self.updates, self.steps - state["at"])
        trained, loss, spent = self._updates(problem, theta, state, count, Key(state["seed"]).fold("batches"))
        record: Record = {"run": run + 1, "lower_loss": loss}
        changes: State = {**trained, "at": state["at"] + count}
        if changes["at"] < self.steps:
            return changes, record, spent

        validation = self._validation_loss(problem, theta, trained["x"], state["step"] + 1)
        losses = torch.cat([losses, validation[None].cpu()])
        changes |= {**_fresh(problem.x0), "at": 0, "run": run + 1, "losses": losses}
        if int(losses.argmin()) == run:
            changes["best"] = trained["x"]
        if run + 1 == self.runs:
            found = fit(mixtures, losses, self.regressor, Key(state["seed"]).fold("regression").derive())
            simulated = self._mixtures(problem).draw(Key(state["seed"]).fold("simulated"), self.simulated)
            omega, predicted = best(found, simulated, self.top)
            theta = sources.theta(dict(zip(sources.names, omega.tolist(), strict=True)))
            changes |= {"phase": "train", "theta": theta}
            record |= {"predicted_loss": predicted, "regression_error": found.error, "lowest_run_loss": losses.min()}
        rows = problem.upper_data["select"].size
        return changes, {**record, "upper_loss": validation}, spent + Cost(upper_values=1, rows=rows)

    def _train(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        count = self.updates if self.train_steps is None else min(self.updates, self.train_steps - state["at"])
        trained, loss, spent = self._updates(problem, state["theta"], state, count, Key(state["seed"]).fold("train"))
        return {**trained, "at": state["at"] + count}, {"lower_loss": loss}, spent

    def _updates(self, problem: Problem, theta: Tree, state: State, count: int, key: Key) -> tuple[State, Tensor, Cost]:
        """AdamW on the lower loss, ``count`` times, on copies."""
        data, (beta1, beta2) = problem.lower_data, self.betas
        x, m, v = ({name: leaf.clone() for name, leaf in state[part].items()} for part in "xmv")
        leaves, first, second = list(x.values()), list(m.values()), list(v.values())
        index = data.draw(key.fold(state["at"]), self.batch_size, count)
        loss = torch.empty(())
        for i in range(count):
            grads, loss = gradient(problem.g, theta, x, data.batch(None if index is None else index[i]))
            done = state["at"] + i + 1
            torch._foreach_lerp_(first, grads, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
            root = torch._foreach_sqrt(second)
            torch._foreach_div_(root, math.sqrt(1 - beta2**done))
            torch._foreach_add_(root, self.eps)
            torch._foreach_mul_(leaves, 1 - self.lr * self.weight_decay)
            torch._foreach_addcdiv_(leaves, first, root, -self.lr / (1 - beta1**done))
        if not torch.isfinite(loss):
            raise NumericalError(
                f"step {state['step'] + 1}: the training loss is {float(loss)}; lower lr, or check the rows and the model"
            )
        return {"x": x, "m": m, "v": v}, loss, Cost(lower_gradients=count, rows=count * data.count(self.batch_size))

    def _validation_loss(self, problem: Problem, theta: Tree, x: Tree, step: int) -> Tensor:
        """f on all rows of the role ``select``: it is a mean over rows."""
        data = problem.upper_data["select"]
        parts = torch.split(torch.arange(data.size, device=data.device), self.chunk)
        with torch.no_grad():
            sums = [len(part) * problem.f(theta, x, data.rows(part)).double() for part in parts]
        loss = torch.stack(sums).sum() / data.size
        if not torch.isfinite(loss):
            raise NumericalError(f"step {step}: the validation loss of a proxy run is {float(loss)}; lower lr")
        return loss

    def _mixtures(self, problem: Problem) -> Mixtures:
        sizes = dict(problem.lower_data.strata or ())
        names = _sources(problem).names
        shares = [sizes[name] / problem.lower_data.size if self.prior == "rows" else 1 / len(names) for name in names]
        return Mixtures(prior=tuple(shares), low=self.concentration[0], high=self.concentration[1])


def _sources(problem: Problem) -> Sources:
    if problem.sources is None or problem.lower_data.strata is None:
        raise ConfigError("method 'regmix' mixes data sources, and this problem has none")
    return problem.sources


def _fresh(x0: Tree) -> State:
    """Training that begins at ``x0``."""
    zeros = {name: torch.zeros_like(leaf) for name, leaf in x0.items()}
    return {"x": dict(x0), "m": zeros, "v": dict(zeros)}
