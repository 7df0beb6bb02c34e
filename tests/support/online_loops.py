"""What the loops of online methods share that tests write with torch's AdamW and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hgms_core import Sources, State, Tree
from support.helpers import assert_same
from support.source_problems import network_sources, weights

PROBLEM = network_sources()
SOURCES = PROBLEM.find(Sources)
ADAMW: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "batch_size": 7}


class Trainee:
    """x under torch's AdamW."""

    def __init__(self) -> None:
        self.x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
        self.optimizer = torch.optim.AdamW(list(self.x.values()), lr=0.02, weight_decay=0.1)

    def move(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def losses(self, index: Tensor) -> Tensor:
        return SOURCES.examples(self.x, PROBLEM.lower_data.rows(index))

    def on(self, index: Tensor) -> None:
        """An update on rows as they come."""
        self.move(self.losses(index).mean())

    def gradient(self, loss: Tensor) -> np.ndarray[Any, Any]:
        grads = torch.autograd.grad(loss, list(self.x.values()))
        return np.concatenate([leaf.numpy().ravel() for leaf in grads])

    def targets(self) -> np.ndarray[Any, Any]:
        """Mean loss of both validation sets."""
        batch = PROBLEM.upper_data["differentiate"].whole
        with torch.no_grad():
            losses = SOURCES.examples(self.x, batch)
        return np.array([float(losses[batch["source"] == part].mean()) for part in (0, 1)])


def rows_of(index: Tensor) -> list[Tensor]:
    """A batch's rows, source by source."""
    source = PROBLEM.lower_data.rows(index)["source"]
    return [index.reshape(-1)[(source == number).reshape(-1)] for number in range(3)]


def counts_of(batches: list[Tensor]) -> Tensor:
    """How many rows of each source the batches have."""
    return torch.tensor([[len(rows) for rows in rows_of(index)] for index in batches]).double()


def softmax(logits: Any) -> Any:
    shares = np.exp(logits - np.max(logits))
    return shares / shares.sum()


def assert_ends(method: Any, state: State, omega: Any, x: Tree) -> None:
    """The mixture and x at the end are those of the loop."""
    theta, trained = method.result(state)
    found = weights(PROBLEM, theta)
    assert_same(found, torch.as_tensor(omega), rtol=1e-8)
    assert float((found - 1 / 3).abs().max()) > 1e-3  # a mixture, not the start
    expected = {name: leaf.detach() for name, leaf in x.items()}
    assert_same(trained, expected, rtol=1e-8, atol=1e-11)


def assert_costs(method: Any, row: dict[str, Any], seen: dict[str, list[Tensor]]) -> None:
    """What the last row says was read and computed is what was."""
    lower, upper = (
        sum(index.numel() for index in seen[role]) for role in ("pool", "differentiate")
    )
    # the proxy's rows go through the reference, too
    twice = 7 * method.steps if method.name == "doremi" else 0
    assert row["cost_rows"] == lower + upper + twice
    more = 2 * method.steps if method.name == "doge" else 0  # its gradients are of three sources
    assert row["cost_lower_gradients"] == len(seen["pool"]) + more
    if method.name == "doge":
        assert row["cost_upper_gradients"] == len(seen["differentiate"])
