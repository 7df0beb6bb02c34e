"""A model under torch.compile: the module inside is compared, and gets the best weights back."""

import torch
from torch import nn

from hgms.adapters import from_module
from hgms.comparison import compare
from hgms.runs import run

torch.manual_seed(0)
model = torch.compile(nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1)))
inputs = torch.randn(120, 3)
target = inputs.prod(1)
wrong = torch.where(torch.arange(120) < 20, 3 - target, target)  # the first twenty


def loss(model, batch):
    return (model(batch["a"]).squeeze(1) - batch["y"]).square()


train = {"a": inputs[:60], "y": wrong[:60]}
validation = {"a": inputs[60:], "y": target[60:]}
problem = from_module(model, loss, train, validation)
comparison = compare(problem, ["uniform", "hg-implicit", "hg-baseline"], budget="3 steps", seeds=2)
print(comparison)
result = run("hg-baseline", problem, "3 steps")
model.load_state_dict(result.x, strict=False)
