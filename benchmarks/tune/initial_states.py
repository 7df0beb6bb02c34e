"""Train the networks from three initial states; append one line of JSON per problem and seed.

    OMP_NUM_THREADS=1 python benchmarks/tune/initial_states.py --out states.jsonl --seeds 20:30

The hyperparameters keep their start values. The rows measure whether minimisers of one training
loss differ in the held-out loss by more than its standard error, and the gain on test rows from the
selection of the best of three.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from problems import NETWORKS
from records import main
from torch import nn
from tune_tables import states

from hgms.adapters import read_table
from hgms.config.budget import Budget
from hgms.tuning.meter import Meter
from hgms.tuning.online import Online
from hgms.tuning.problem import build

STATES = 3


def run(name: str, seed: int) -> dict[str, Any]:
    arguments = NETWORKS[name](seed)
    model = arguments["model"]
    judged = []
    tests = []
    rate = 0.0
    for state in range(STATES):
        if state > 0:
            model = draw_again(model, state)
        parts = [arguments.get(key) for key in ("loss", "train", "validation", "learn")]
        problem = build(model, *parts, None, seed).problem
        engine = Online(problem, Meter(Budget("100000 steps"), len(problem.masks.group), "cpu"))
        rate = rate or 0.2 * float(engine.fastest_rate()["rate"])
        engine.rate = rate
        stage = engine.baseline("start", problem.space.start, problem.masks.fit)
        judged.append(stage["judged"])
        rows = read_table(arguments["test"], "test", problem.w0)
        tests.append(problem.mean_loss(stage["w"][-1], rows))
    means = [float(losses.mean()) for losses in judged]
    best = min(range(STATES), key=means.__getitem__)
    return {
        "problem": name,
        "seed": seed,
        "held_out": means,
        "errors": [error(losses - judged[best]) for losses in judged],
        "test": tests,
    }


def draw_again(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of the module with newly drawn parameters."""
    torch.manual_seed(seed)
    fresh = copy.deepcopy(model)
    for part in fresh.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return fresh


def error(differences: torch.Tensor) -> float:
    """Return the standard error of the mean."""
    return float(differences.std()) / len(differences) ** 0.5


def summary(rows: list[dict[str, Any]]) -> None:
    print(states(rows))


if __name__ == "__main__":
    main(__doc__, ["problem"], [(name,) for name in NETWORKS], run, summary, "20:30")
