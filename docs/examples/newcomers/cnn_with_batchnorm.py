"""A CNN with batch normalisation, from a DataLoader: cleaning the labels of scikit-learn's
digits.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hgms.adapters import from_module
from hgms.comparison import compare

pixels, label = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
pixels = (pixels / 16).float().reshape(-1, 1, 8, 8)
# every other label is wrong
noisy = torch.where(torch.arange(len(label)) % 2 == 0, (label + 1) % 10, label)
loader = DataLoader(TensorDataset(pixels[:200], noisy[:200]), batch_size=50, shuffle=True)
conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
model = nn.Sequential(conv, nn.Flatten(), nn.Linear(72, 10))


def loss(model, batch):
    return cross_entropy(model(batch["0"]), batch["1"], reduction="none")


def evaluate(theta, model):
    return {"test_accuracy": (model(pixels[500:]).argmax(1) == label[500:]).float().mean()}


problem = from_module(model, loss, loader, (pixels[200:300], label[200:300]), evaluate=evaluate)
comparison = compare(
    {"digits": problem}, {"even": "uniform", "hg-ms": "hg-ms"}, budget="3 steps", seeds=2
)
print(comparison)
