"""Compare ``hgms.tune`` with common tools on linear models, at equal processor time.

    OMP_NUM_THREADS=1 python benchmarks/tune/tools.py --out tools.jsonl [--seeds 30:40]
    python benchmarks/tune/tools.py --out tools.jsonl --summary

Every rival has the same folds, the same Newton solver (except the estimators of scikit-learn), the
same box and the same start. It trains on all rows with its best values at the end, outside the
budget. Samplers of Optuna run with and without the best shared level as their first trials; the
scan of the level is inside their budget. Estimators of scikit-learn run to their end. The file has
one line of JSON per problem and seed; a run that is in the file is skipped.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import optuna
import torch
from problems import binary, linear, squares, synthetic, table
from records import main
from sklearn import datasets, linear_model
from statsmodels.datasets import star98
from torch import Tensor
from torch.func import vmap
from tune_tables import tools

import hgms
from hgms.config import Budget
from hgms.tuning.implicit import SHIFTS, Implicit
from hgms.tuning.meter import Meter
from hgms.tuning.problem import build, rows_of

Arguments = dict[str, Any]
SECONDS = 2.0
optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore")


def schools(seed: int) -> Arguments:
    """The share of pupils above the median in mathematics, of 303 districts."""
    found = star98.load_pandas()
    above = found.endog.to_numpy(dtype=float)
    features = found.exog.to_numpy(dtype=float)
    return _permuted(features, above[:, 0] / above.sum(1), 150, False, seed)


def two_digits(seed: int) -> Arguments:
    found = datasets.load_digits()
    either = (found.target == 3) | (found.target == 8)
    y = (found.target[either] == 3).astype(float)
    return _permuted(found.data[either], y, 150, True, seed)


def _permuted(
    features: np.ndarray, y: np.ndarray, rows: int, classes: bool, seed: int
) -> Arguments:
    scale = features.std(0)
    features = (features - features.mean(0)) / np.where(scale > 0, scale, 1)
    order = np.random.default_rng(seed).permutation(len(y))
    inputs = torch.tensor(features[order], dtype=torch.float32)
    targets = torch.tensor(y[order], dtype=torch.float32)
    return linear(inputs, targets, rows, binary if classes else squares)


GROUPED = {f"groups-{d}": synthetic(26, 208, 200, False, groups=d) for d in (1, 4, 16, 64, 208)}
STRUCTURED: dict[str, Callable[[int], Arguments]] = {
    **GROUPED,
    "sparse-1000": synthetic(10, 1000, 300, False),
    "sparse-classes": synthetic(10, 210, 300, True),
}
ORDINARY: dict[str, Callable[[int], Arguments]] = {
    "diabetes-2": table("diabetes", 221, False, 2),
    "breast-cancer-2": table("breast_cancer", 285, True, 2),
    "wine-2": table("wine", 90, True, 2),
    "digits-3-8": two_digits,
    "star98": schools,
}
PROBLEMS = STRUCTURED | ORDINARY


class Objective:
    """The mean held-out loss of u over the folds of ``tune``, with a budget."""

    def __init__(self, arguments: Arguments, seed: int) -> None:
        rest = (arguments["model"], arguments["loss"], arguments["train"], None, arguments["learn"])
        self.problem = build(*rest, None, seed).problem
        masks = self.problem.masks
        judges = masks.held.any(1)
        self.held = masks.held[judges]
        self.fit = (masks.fit + masks.outer)[judges]
        self.meter = Meter(Budget(f"{SECONDS} s"), len(self.fit), "cpu")
        self.engine = Implicit(self.problem, self.meter)
        units = self.engine.units()
        self.engine.curvature = units["curvature"]
        self.engine.scale = float(units["scale"])
        self.w = self.problem.w0.expand(len(self.fit), -1)
        self.best = (math.inf, self.problem.space.start)
        self.trials = 0

    @property
    def is_over(self) -> bool:
        return self.meter.share >= 1

    def __call__(self, u: Tensor) -> float:
        """Train from the parameters of the best trial; return the loss."""
        w = self.engine.solve(self.w, u.expand(len(self.fit), -1), self.fit)
        losses = vmap(partial(self.problem.outer_loss, batch=self.problem.rows))(w, self.held)
        loss = float(losses.sum() / self.held.sum())
        self.trials += 1
        if loss < self.best[0]:
            self.best = (loss, u)
            self.w = w
        return loss

    def scan(self) -> None:
        space = self.problem.space
        for shift in SHIFTS:
            if not self.is_over:
                self((space.start + shift).clamp(space.low, space.high))

    def test_loss(self, test: Any) -> float:
        """Train on all rows with the best values; return the loss of the test rows."""
        every = torch.ones_like(self.fit[:1])
        u = self.best[1][None]
        w = self.engine.solve(self.w[:1], u, every, 1e-5, math.inf)
        return self.problem.mean_loss(w[0], rows_of(test, "test", self.problem.w0))


def level(objective: Objective) -> None:
    objective.scan()


def start(objective: Objective) -> None:
    objective(objective.problem.space.start)


def sample(objective: Objective, sampler: str, seed: int, with_level: bool) -> None:
    space = objective.problem.space
    samplers = {
        "TPE": optuna.samplers.TPESampler,
        "CMA-ES": optuna.samplers.CmaEsSampler,
        "GP": optuna.samplers.GPSampler,
    }
    study = optuna.create_study(sampler=samplers[sampler](seed=seed))
    if with_level:
        objective.scan()
    first = objective.best[1]
    study.enqueue_trial({f"u{i}": float(number) for i, number in enumerate(first)})
    bounds = list(zip(space.low.tolist(), space.high.tolist(), strict=True))
    while not objective.is_over:
        trial = study.ask()
        u = [trial.suggest_float(f"u{i}", *bound) for i, bound in enumerate(bounds)]
        study.tell(trial, objective(torch.tensor(u)))


RIVALS: dict[str, Callable[[Objective, int], None]] = {
    "start": lambda objective, seed: start(objective),
    "shared level": lambda objective, seed: level(objective),
    **{
        name + (" + level" if with_level else ""): partial(
            lambda objective, seed, name, with_level: sample(objective, name, seed, with_level),
            name=name,
            with_level=with_level,
        )
        for name in ("TPE", "CMA-ES", "GP")
        for with_level in (False, True)
    },
}


def cross_validated(arguments: Arguments) -> dict[str, list[float]]:
    """Return the test loss and the processor seconds of scikit-learn's estimators."""
    train, test = arguments["train"], arguments["test"]
    is_regression = arguments["loss"] is squares
    folds = 4
    if is_regression:
        estimators = {
            "RidgeCV": linear_model.RidgeCV(alphas=np.logspace(-3, 4, 30)),
            "LassoCV": linear_model.LassoCV(cv=folds),
            "ElasticNetCV": linear_model.ElasticNetCV(cv=folds, l1_ratio=[0.1, 0.5, 0.9]),
        }
    else:
        options: dict[str, Any] = {
            "Cs": np.logspace(-4, 3, 15),
            "cv": folds,
            "scoring": "neg_log_loss",
            "solver": "liblinear",
            "use_legacy_attributes": False,
        }
        estimators = {
            "LogisticRegressionCV-l2": linear_model.LogisticRegressionCV(l1_ratios=(0,), **options),
            "LogisticRegressionCV-l1": linear_model.LogisticRegressionCV(l1_ratios=(1,), **options),
        }
    found = {}
    for name, estimator in estimators.items():
        began = time.process_time()
        estimator.fit(train["x"].numpy(), train["y"].numpy())
        seconds = time.process_time() - began
        outputs = (
            estimator.predict(test["x"].numpy())
            if is_regression
            else estimator.decision_function(test["x"].numpy())
        )
        outputs = torch.tensor(outputs, dtype=torch.float32)[:, None]
        loss = arguments["loss"](lambda _, outputs=outputs: outputs, test).mean()
        found[name] = [float(loss), seconds]
    return found


def run(name: str, seed: int) -> dict[str, Any]:
    arguments = PROBLEMS[name](seed)
    began = time.process_time()
    result = hgms.tune(**arguments, budget=f"{SECONDS} s", seed=seed, clock="cpu")
    losses = {"tune": [result.test_loss, result.spent["seconds"]]}
    row: dict[str, Any] = {"problem": name, "seed": seed, "selected": result.selected}
    trials = {}
    for rival, search in RIVALS.items():
        objective = Objective(arguments, seed)
        search(objective, seed)
        spent = objective.meter.seconds
        losses[rival] = [objective.test_loss(arguments["test"]), spent]
        trials[rival] = objective.trials
    losses |= cross_validated(arguments)
    row["d"] = len(objective.problem.space.start)
    row["trials"] = trials
    row["losses"] = losses
    row["seconds"] = time.process_time() - began
    return row


def summary(rows: list[dict[str, Any]]) -> None:
    print(tools(rows))


if __name__ == "__main__":
    main(__doc__, ["problem"], [(name,) for name in PROBLEMS], run, summary, seeds="30:40")
