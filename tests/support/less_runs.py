"""LESS on a small network, and its scores by the definition, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hgms_core import Data, Problem, Sources, Tree
from hgms_mix.lm import adamw_part
from hgms_mix.methods.less import Less, Warmup
from support.helpers import F64
from support.source_problems import network_sources, through, token_losses

PROBLEM = network_sources()


def less(*, share: float = 0.5, epochs: int = 3, rising: float = 0.03, **options: Any) -> Less:
    settings = {
        "warmup": Warmup(share=share, epochs=epochs, rising=rising),
        "batch_size": 8,
        "lr": 0.02,
        "chunk": 7,
        "projection": None,
        "keep": 0.2,
    }
    return Less(**(settings | options))


def ranked(method: Less, problem: Problem) -> Tensor:
    """The ranking at the end of a run."""
    *_, (state, _) = through(method, problem)
    return method.ranking(problem, state)


def checkpoints(method: Less, problem: Problem) -> list[Tree]:
    """The states of Adam after each epoch of the warm-up."""
    results = [
        state["train"]
        for state, row in through(method, problem)
        if row["phase"] == "warmup" and state["at"] == 0
    ]
    assert len(results) == method.warmup.epochs
    return results


def _gradient(problem: Problem, x: Tree, data: Data, row: int) -> Tensor:
    """∇ of one row's loss as one vector: an ordinary backward pass."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    index = torch.tensor([row])
    if "mask" in data.rows(index):
        losses = token_losses(problem, leaves, data, index)
    else:
        losses = problem.find(Sources).examples(leaves, data.rows(index))
    return _flat(torch.autograd.grad(losses.sum(), list(leaves.values())))


def _flat(leaves: Any) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def scores_by_hand(method: Less, problem: Problem) -> Tensor:
    """The definition, with loops: one backward pass a row, no projection."""
    rates = [row["lr"] for _, row in through(method, problem) if row["phase"] == "warmup"]
    weights = np.array(rates).reshape(method.warmup.epochs, -1).mean(1)
    weights /= weights.sum()
    validation = problem.upper_data["differentiate"]
    pool = problem.lower_data
    total = torch.zeros(pool.size, validation.size, dtype=F64)
    for weight, trained in zip(weights, checkpoints(method, problem), strict=True):
        x, m, v = (adamw_part(trained, part) for part in "xmv")
        others = torch.stack(
            [_gradient(problem, x, validation, row) for row in range(validation.size)]
        )
        for row in range(pool.size):
            g = _gradient(problem, x, pool, row)
            first = method.betas[0] * _flat(m.values()) + (1 - method.betas[0]) * g
            second = method.betas[1] * _flat(v.values()) + (1 - method.betas[1]) * g**2
            inside = method.eps_placement == "inside"
            root = torch.sqrt(second + method.eps) if inside else torch.sqrt(second) + method.eps
            step = first / root
            total[row] += weight * (others @ step) / (step.norm() * others.norm(dim=1))
    part = validation.batch(None)["source"]
    return torch.stack([total[:, part == p].mean(1) for p in part.unique()]).amax(0)
