"""A frozen backbone with a head: how much weight decay should the head have?"""

import torch
from torch import nn

from hgms.adapters import from_module
from hgms.comparison import compare

torch.manual_seed(0)
model = nn.Sequential(nn.Sequential(nn.Linear(5, 12), nn.Tanh()), nn.Linear(12, 1))
model[0].requires_grad_(False)
inputs = torch.randn(90, 5)
target = inputs[:, :2].sum(1) + 0.5 * torch.randn(90)


def loss(model, batch):
    return (model(batch["a"]).squeeze(1) - batch["y"]).square().mean()


def lower(theta, model, batch):
    return loss(model, batch) + theta.exp() * model[1].weight.square().sum()


rows = [
    {"a": inputs[part], "y": target[part]} for part in (slice(30), slice(30, 60), slice(60, 90))
]
test = {"evaluate": lambda theta, model: {"test_error": loss(model, rows[2]), "decay": theta.exp()}}
problem = from_module(model, loss, rows[0], rows[1], theta0=torch.tensor(0.0), lower=lower, **test)
comparison = compare(
    problem,
    {"as-it-is": "uniform", "implicit": "hg-implicit"},
    "3 steps",
    seeds=2,
    metric="test_error",
)
print(comparison)
