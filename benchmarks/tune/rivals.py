"""Rivals of ``hgms.tune`` with its folds, its lower solver and its budget.

A trial trains one model per fold with fixed u, and a last model on all rows. Its loss is the mean
loss of the rows that the models of the folds have not used, as for the baselines of ``tune``.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import optuna
import torch
from attrs import evolve
from cleanlab.filter import find_label_issues
from problems import squares
from sklearn import linear_model
from torch import Tensor
from torch.func import vmap

from hgms.adapters import read_table
from hgms.config import Budget
from hgms.tuning.implicit import FINER, SHIFTS, Implicit
from hgms.tuning.meter import Meter
from hgms.tuning.online import SHARES, Online
from hgms.tuning.problem import build
from hgms.tuning.row_filter import filter_start, fold_masks, row_mask, threshold
from hgms_core import Key

Arguments = dict[str, Any]
optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore")


class Objective(ABC):
    """The mean held-out loss of u, with a budget in processor seconds; the base of both solvers.

    Attributes:
        best: the lowest loss and its u.
        kept: a factor of the training rows, ``[rows]``.
        trials: the number of trained u.
    """

    def __init__(
        self, arguments: Arguments, seed: int, seconds: float, only_validation: bool = False
    ) -> None:
        names = ("model", "loss", "train")
        rest = (arguments.get("validation"), arguments["learn"], None, seed)
        self.problem = build(*[arguments[name] for name in names], *rest).problem
        masks = self.problem.masks
        self.fit = masks.outer if only_validation else masks.fit + masks.outer
        self.meter = Meter(Budget(f"{seconds} s"), len(self.fit), "cpu")
        self.best = (math.inf, self.problem.space.start)
        self.kept: Tensor | float = 1.0
        self.trials = 0
        self.test_rows = read_table(arguments["test"], "test", self.problem.w0)

    @property
    def is_over(self) -> bool:
        return self.meter.share >= 1

    def __call__(self, u: Tensor) -> float:
        """Train with u; return the loss, and keep the best."""
        loss = self.train(u, self.fit * self.kept)
        self.trials += 1
        return loss

    @abstractmethod
    def train(self, u: Tensor, fit: Tensor) -> float:
        """Train with u on the rows of the masks; return the loss, and keep the best."""

    @abstractmethod
    def out_of_fold(self) -> tuple[Tensor, Tensor]:
        """Train on the other folds of the training rows; return w and the masks to judge on."""

    @abstractmethod
    def test_loss(self) -> float:
        """Return the loss of the test rows with the best u."""

    def scan(self) -> None:
        """Try shared shifts of all penalties, from large to small; then shifts near the best."""
        space = self.problem.space
        if not bool(space.is_penalty.any()):
            return
        for shifts in (SHIFTS, FINER):
            centre = space.start if shifts is SHIFTS else self.best[1]
            for shift in shifts:
                if not self.is_over:
                    moved = torch.where(space.is_penalty, centre + shift, centre)
                    self(moved.clamp(space.low, space.high))

    def filter(self) -> None:
        """Try the weights of rows of the out-of-fold filter of ``tune``."""
        if self.problem.space.is_per_row and not self.is_over:
            losses = self.problem.losses_under(*self.out_of_fold())
            keep = losses <= threshold(losses)
            self(filter_start(self.problem, self.best[1], keep[None])[0])


class Newton(Objective):
    """Trials by Newton's method, for convex losses."""

    def __init__(
        self, arguments: Arguments, seed: int, seconds: float, only_validation: bool = False
    ) -> None:
        super().__init__(arguments, seed, seconds, only_validation)
        masks = self.problem.masks
        judges = masks.held.any(1)
        self.held = masks.held[judges]
        self.fit = self.fit[judges]
        self.engine = Implicit(self.problem, self.meter)
        units = self.engine.units()
        self.engine.curvature = units["curvature"]
        self.engine.scale = float(units["scale"])
        self.w = self.problem.w0.expand(len(self.fit), -1)

    def train(self, u: Tensor, fit: Tensor) -> float:
        """Train from the parameters of the best trial."""
        w = self.engine.solve(self.w, u.expand(len(fit), -1), fit)
        losses = vmap(partial(self.problem.outer_loss, batch=self.problem.rows))(w, self.held)
        loss = float(losses.sum() / self.held.sum())
        if loss < self.best[0]:
            self.best = (loss, u)
            self.w = w
        return loss

    def out_of_fold(self) -> tuple[Tensor, Tensor]:
        fit, held = fold_masks(self.problem, Key(0).fold("filter"))
        return self.engine.models_at_start(fit), held

    def test_loss(self) -> float:
        """Train on all rows with the best u, outside the budget; return the loss of test rows."""
        every = torch.ones_like(self.fit[:1]) * self.kept
        w = self.engine.solve(self.w[:1], self.best[1][None], every, 1e-5, math.inf)
        return self.problem.mean_loss(w[0], self.test_rows)


class EarlyStopped(Objective):
    """Trials by Adam with early stopping, for networks; the start chooses the lower rate."""

    def __init__(
        self, arguments: Arguments, seed: int, seconds: float, only_validation: bool = False
    ) -> None:
        super().__init__(arguments, seed, seconds, only_validation)
        self.engine = Online(self.problem, self.meter, None, Key(seed).fold("online"))
        self.w = self.problem.w0
        fastest = float(self.engine.fastest_rate()["rate"])
        losses = {}
        for share in SHARES:
            self.engine.rate = share * fastest
            losses[self.engine.rate] = self(self.problem.space.start)
        self.engine.rate = min(losses, key=losses.__getitem__)

    def train(self, u: Tensor, fit: Tensor) -> float:
        engine = self.engine
        each = u.expand(len(fit), -1)
        key = engine.key.fold("trial", self.trials)
        engine.lowest = self.best[0]
        trained, _ = engine.train(each, fit, key, 1.0, is_baseline=True)
        loss = float(trained.judged.mean())
        if loss < self.best[0]:
            self.best = (loss, u)
            self.w = trained.w[-1]
            engine.best_step = trained.step
        return loss

    def out_of_fold(self) -> tuple[Tensor, Tensor]:
        fit, held = fold_masks(self.problem, self.engine.key.fold("filter"))
        return self.engine.models_at_start(fit, 1.0), held

    def test_loss(self) -> float:
        return self.problem.mean_loss(self.w, self.test_rows)


# --- samplers

SAMPLERS: dict[str, Callable[..., Any]] = {
    "TPE": optuna.samplers.TPESampler,
    "CMA-ES": optuna.samplers.CmaEsSampler,
    "GP": optuna.samplers.GPSampler,
    "random": optuna.samplers.RandomSampler,
}


def sample(objective: Objective, sampler: str, seed: int, with_level: bool) -> None:
    """Run a sampler of Optuna until the budget is spent, from the start or the best level."""
    space = objective.problem.space
    study = optuna.create_study(sampler=SAMPLERS[sampler](seed=seed))
    if with_level:
        objective.scan()
        objective.filter()
    first = objective.best[1]
    study.enqueue_trial({f"u{i}": float(number) for i, number in enumerate(first)})
    bounds = list(zip(space.low.tolist(), space.high.tolist(), strict=True))
    while not objective.is_over:
        trial = study.ask()
        u = [trial.suggest_float(f"u{i}", *bound) for i, bound in enumerate(bounds)]
        study.tell(trial, objective(torch.tensor(u)))


# --- other tools


def cross_validated(arguments: Arguments) -> dict[str, list[float]]:
    """Return the test loss and the processor seconds of scikit-learn's estimators.

    They use the training and the validation rows, and run to their end.
    """
    parts = [arguments[name] for name in ("train", "validation") if arguments.get(name)]
    x = torch.cat([part["x"] for part in parts]).numpy()
    y = torch.cat([part["y"] for part in parts]).numpy()
    test = arguments["test"]
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
        estimator.fit(x, y)
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


def cleaned(objective: Objective) -> None:
    """Remove the rows that cleanlab finds, then try the shared levels.

    The out-of-fold probabilities are those of the lower solver, at the start.
    """
    problem = objective.problem
    y = problem.rows["y"]
    w, held = objective.out_of_fold()
    losses = []
    for label in range(int(y.max()) + 1):
        rows = {**problem.rows, "y": torch.full_like(y, label)}
        losses.append(evolve(problem, rows=rows).losses_under(w, held))
    probabilities = (-torch.stack(losses, 1)).softmax(1)
    labels = y[: problem.train_size].long()
    issues = find_label_issues(labels.numpy(), probabilities.numpy(), n_jobs=1)
    objective.kept = row_mask(problem, ~torch.tensor(issues))
    objective.best = (math.inf, problem.space.start)
    objective(problem.space.start)
    objective.scan()
