"""One rank of `test_sharded_model.py`: derivatives of a loss by parts beside those of the whole.

Arguments: rank, ranks, address.
"""

from __future__ import annotations

import sys

import torch

from hgms.adapters import from_losses
from hgms.distributed import by_rows, join
from hgms_core import Data, curvature


def loss(theta, x, batch):
    rows = (batch["a"] @ x["w"] + x["b"] - batch["y"]).square() + (batch["a"] @ x["w"]).sin()
    return (theta["logits"][batch["index"]].sigmoid() * rows).mean() + theta["penalty"].exp() * x[
        "w"
    ].square().sum()


def flat(value):
    return (
        torch.cat([flat(part) for part in (value.values() if isinstance(value, dict) else value)])
        if isinstance(value, dict | tuple)
        else value.reshape(-1)
    )


def derivatives(g, theta, x, batch, v):
    """All kinds that components ask for, of one loss."""
    tangent = {"w": v[:3], "b": v[3]}
    stacked = {name: torch.stack([leaf, 2 * leaf]) for name, leaf in x.items()}
    return {
        "value": g(theta, x, batch),
        "gradient": torch.func.grad(g, argnums=(0, 1))(theta, x, batch),
        "product by vjp": curvature(lambda x: g(theta, x, batch), x, strategy="vjp").matvec(v),
        "product by jvp": curvature(lambda x: g(theta, x, batch), x, strategy="jvp").matvec(v),
        "mixed": torch.func.jvp(lambda x: torch.func.grad(g)(theta, x, batch), (x,), (tangent,))[1],
        "stacked": torch.func.vmap(torch.func.grad(lambda x: g(theta, x, batch)))(stacked),
    }


def check() -> None:
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    data = Data.of({"a": random(12, 3), "y": random(12)})
    theta = {"logits": random(12), "penalty": random()}
    x = {"w": random(3), "b": random()}
    problem = from_losses(theta0=theta, x0=x, g=loss, f=loss, lower_data=data, upper_data=data)
    parted = by_rows(problem, torch.distributed.group.WORLD)
    assert parted.g is not loss
    at = (theta, x, data.batch(None), random(4))
    whole = derivatives(loss, *at)
    ours = derivatives(parted.g, *at)
    errors = {
        name: float((flat(ours[name]) - flat(value)).abs().max() / flat(value).abs().max())
        for name, value in whole.items()
    }
    assert max(errors.values()) < 1e-12, errors


if __name__ == "__main__":
    join(int(sys.argv[1]), int(sys.argv[2]), torch.device("cpu"), sys.argv[3])
    check()
