"""Search without derivatives.

Each step proposes θ in a box and trains the lower level from its start. The search keeps the best
θ.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms.packages import optional_module
from hgms_core import (
    CandidateGenerator,
    ConfigError,
    Cost,
    Key,
    Problem,
    Ravel,
    Record,
    Selector,
    State,
    Tree,
    component,
)
from hgms_core.validators import at_least

MOST_VARIABLES = 1000
"""Maximum number of upper variables for ``tpe``: in every step it builds one density per variable
from the whole history.
"""


@final
@component
class Search:
    """The zeroth-order baseline: each outer step tries one θ in a box, and keeps the best so far.

    The box is θ0 + [low, high]^p. Step k is::

        θ_0 = θ0,  θ_k = Proj(θ0 + u_k),
            u_k uniform (random) or from the densities of good and bad trials (tpe)
        x_k = selected(generator from x0 at θ_k),
            result: the (θ_k, x_k) of the lowest f on held-out validation rows

    Rows of the role ``select`` choose the candidate. Rows of the role ``stop`` (if the task has
    separate rows for it) compare the θ_k.

    Use as a baseline, or with a handful of hyper-parameters. Avoid with many: the volume of the box
    grows too fast.

    Parameters
    ----------
    generator, selector
        Train the lower level from x0 for every θ, so ``steps`` must suffice from x0.
    sampler
        ``random``, or ``tpe``, Optuna's tree-structured Parzen estimator on independent densities
        (needs the extra ``optuna``).
    low, high
        The box, as offsets from θ0 in its units.
    startup
        Random proposals before ``tpe`` has a model.

    Raises
    ------
    ConfigError
        For ``tpe`` with more than 1000 upper variables.
    MissingExtra
        Without Optuna. A training run that fails counts as the worst possible trial, and the search
        continues.

    Notes
    -----
    Cost: the generator's and selector's, and 1 upper value. ``tpe`` keeps all proposals; its
    computation time grows with their number.

    Source: Bergstra and Bengio 2012 (random search); Bergstra, Bardenet, Bengio, Kégl 2011 (TPE);
    Akiba et al. 2019 (Optuna).

    Examples
    --------
    >>> class Exact:  # a lower level that is solved at once: x = θ
    ...     name = "exact"
    ...
    ...     def init(self, problem, key):
    ...         return {}
    ...
    ...     def propose(self, problem, theta, start, key, progress):
    ...         from hgms_core import Candidates
    ...
    ...         return Candidates(x={"x": theta["t"][None]}, losses=torch.zeros(1))
    ...
    ...     def carry(self, start, candidates, index, key, problem):
    ...         return start
    >>> class Only:
    ...     name = "only"
    ...
    ...     def select(self, problem, theta, candidates, key):
    ...         from hgms_core import Selection
    ...
    ...         return Selection.of(torch.zeros(1))
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: ((x["x"] - 2) ** 2).sum(),
    ... )
    >>> method = Search(generator=Exact(), selector=Only())
    >>> state = method.init(problem, seed=0)
    >>> for _ in range(100):
    ...     state, record = method.step(problem, state, 0.0)
    >>> abs(float(method.result(state)[0]["t"]) - 2) < 0.1
    True
    """

    name: ClassVar[str] = "search"

    generator: CandidateGenerator
    selector: Selector
    sampler: Literal["random", "tpe"] = "random"
    low: float = -3.0
    high: float = 3.0
    startup: int = field(default=10, validator=at_least(1))

    def __attrs_post_init__(self) -> None:
        if not self.high > self.low:
            raise ConfigError(
                "out-of-range",
                f"high={self.high} must be greater than low={self.low}",
                place=("high",),
            )

    @property
    def needs(self) -> frozenset[str]:
        """Require few upper variables if the sampler models them."""
        return frozenset({"few-upper"} if self.sampler == "tpe" else ())

    def init(self, problem: Problem, seed: int) -> State:
        size = Ravel.of(problem.theta0).size
        if self.sampler == "tpe":
            _optuna()
            if size > MOST_VARIABLES:
                raise ConfigError(
                    "too-large",
                    f"method 'tpe' supports at most {MOST_VARIABLES} upper variables, but the "
                    f"problem has {size}",
                    place=("method",),
                    hint="use random-search, or a method with a hypergradient",
                )
        return {
            "seed": seed,
            "step": 0,
            "theta": dict(problem.theta0),
            "x": dict(problem.x0),
            "best": math.inf,
            "offsets": torch.empty(0, size, dtype=torch.float64),
            "values": torch.empty(0, dtype=torch.float64),
            "cost": Cost().numbers(),
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        key = Key(state["seed"]).fold("step", state["step"])
        offset = self._propose(state, key.fold("theta"))
        shift = Ravel.of(problem.theta0).unravel(offset)
        theta = problem.project(
            {name: leaf + shift[name].to(leaf) for name, leaf in problem.theta0.items()}
        )

        start = self.generator.init(problem, key.fold("init"))
        candidates = self.generator.propose(problem, theta, start, key.fold("propose"), progress)
        selection = self.selector.select(problem, theta, candidates, key.fold("select"))
        x = candidates.at(selection.index)
        role = "stop" if "stop" in problem.upper_data else "select"
        batch, rows = problem.upper_data[role].sample(key, None)
        with torch.no_grad():
            loss = problem.f(theta, x, batch)
        value = float(torch.where(selection.finite > 0, loss, torch.full_like(loss, torch.nan)))

        better = math.isfinite(value) and value < state["best"]
        cost = (
            Cost(**state["cost"])
            + candidates.cost
            + selection.cost
            + Cost(upper_values=1, rows=rows)
        )
        remember = self.sampler == "tpe"
        counts = cost.numbers()
        following = {
            **state,
            "step": state["step"] + 1,
            "theta": theta if better else state["theta"],
            "x": x if better else state["x"],
            "best": value if better else state["best"],
            "offsets": torch.cat([state["offsets"], offset[None]])
            if remember
            else state["offsets"],
            "values": torch.cat([state["values"], torch.tensor([value], dtype=torch.float64)])
            if remember
            else state["values"],
            "cost": counts,
        }
        record: Record = {
            "step": state["step"] + 1,
            "upper_loss": value
            if math.isfinite(value)
            else None,  # such a trial is the worst, and the search continues
            "stop_loss": following["best"],
            "lower_loss": candidates.losses[selection.index]
            if candidates.losses is not None
            else None,
            "selected": selection.index,
            "gap": selection.gap,
            "scores": selection.scores,
            "improved": better,
            **{f"cost_{name}": spent for name, spent in counts.items()},
            "oracle_calls": cost.calls,
        }
        return following, record

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], state["x"]

    def _propose(self, state: State, key: Key) -> Tensor:
        """Return the offset from θ0; zero in the first step."""
        size = state["offsets"].shape[1]
        if not state["step"]:
            return torch.zeros(size, dtype=torch.float64)
        if self.sampler == "tpe":
            return _parzen(
                state["offsets"],
                state["values"],
                key.derive() % 2**32,
                self.low,
                self.high,
                self.startup,
            )
        return self.low + (self.high - self.low) * torch.rand(
            size, generator=key.generator(), dtype=torch.float64
        )


def _optuna() -> Any:
    hint = "use random-search"
    return optional_module("optuna", "method 'tpe'", "optuna", place=("method",), hint=hint)


def _parzen(
    offsets: Tensor, values: Tensor, seed: int, low: float, high: float, startup: int
) -> Tensor:
    """Return the next proposal of a study of the whole history.

    The result depends only on the arguments, so a run can be resumed.
    """
    optuna = _optuna()
    distribution = optuna.distributions.FloatDistribution(low, high)
    distributions = {str(i): distribution for i in range(offsets.shape[1])}
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # otherwise every study logs a message
    try:
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
        )
        for offset, value in zip(offsets.tolist(), values.tolist(), strict=True):
            params = {str(i): min(max(number, low), high) for i, number in enumerate(offset)}
            study.add_trial(
                optuna.trial.create_trial(
                    params=params,
                    distributions=distributions,
                    value=value if math.isfinite(value) else math.inf,
                )
            )
        proposal = study.ask(distributions).params
    finally:
        optuna.logging.set_verbosity(verbosity)
    return torch.tensor([proposal[name] for name in distributions], dtype=torch.float64)
