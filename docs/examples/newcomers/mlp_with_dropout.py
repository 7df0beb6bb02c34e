"""An MLP with dropout on labels of which 40 % are wrong: does it help to learn a weight for each
row?
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hgms.adapters import from_module
from hgms.comparison import compare

draw = torch.Generator().manual_seed(0)
points = torch.randn(260, 2, generator=draw)
label = (points.prod(1) > 0).long()
noisy = torch.where(torch.rand(260, generator=draw) < 0.4, 1 - label, label)
train = {"points": points[:120], "label": noisy[:120]}
validation = {"points": points[120:180], "label": label[120:180]}


def loss(model, batch):
    return cross_entropy(model(batch["points"]), batch["label"], reduction="none")


def evaluate(theta, model):
    return {"test_accuracy": (model(points[180:]).argmax(1) == label[180:]).float().mean()}


def problem(seed):  # another start for each seed
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    return from_module(model, loss, train, validation, evaluate=evaluate)


comparison = compare(problem, ["uniform", "hg-ms"], budget="5 steps", seeds=2)
print(comparison)
