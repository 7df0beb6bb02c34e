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

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from problems import Arguments, binary, linear, squares, synthetic, table
from records import main
from rivals import Newton, cross_validated, sample
from sklearn import datasets
from statsmodels.datasets import star98
from tune_tables import tools

import hgms

SECONDS = 2.0


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


def search(rival: str, objective: Newton, seed: int) -> None:
    """Spend the budget of a rival."""
    if rival == "start":
        objective(objective.problem.space.start)
    elif rival == "shared level":
        objective.scan()
    else:
        sampler, _, level = rival.partition(" + ")
        sample(objective, sampler, seed, bool(level))


SAMPLERS = ("TPE", "TPE + level", "CMA-ES", "CMA-ES + level", "GP", "GP + level")
RIVALS = ("start", "shared level", *SAMPLERS)


def run(name: str, seed: int) -> dict[str, Any]:
    arguments = PROBLEMS[name](seed)
    began = time.process_time()
    result = hgms.tune(**arguments, budget=f"{SECONDS} s", seed=seed, clock="cpu")
    losses = {"tune": [result.test_loss, result.spent["seconds"]]}
    row: dict[str, Any] = {"problem": name, "seed": seed, "selected": result.selected}
    trials = {}
    for rival in RIVALS:
        objective = Newton(arguments, seed, SECONDS)
        search(rival, objective, seed)
        spent = objective.meter.seconds
        losses[rival] = [objective.test_loss(), spent]
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
