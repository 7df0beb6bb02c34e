"""The zoo: 24 small problems for ``hgms.tune``, for its rivals and for registered methods.

``ZOO[name](seed)`` returns the arguments of a call, with test rows. Twelve problems have a
structure that many hyperparameters can use; twelve are ordinary real tables with one penalty per
feature. A seed draws the split, the noise and the initial weights. Data: tables of scikit-learn and
statsmodels, and images and texts of the folder ``HGMS_DATA``.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from problems import (
    Arguments,
    Images,
    binary,
    digits,
    linear,
    mnist,
    network,
    several,
    shifted,
    split,
    squares,
    synthetic,
    with_noise,
)
from sklearn import datasets
from sklearn.preprocessing import PolynomialFeatures
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hgms import hyper

Problem = Callable[[int], Arguments]


# --- tables


@lru_cache
def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and the targets of a real table."""
    if name in SCIKIT:
        found = getattr(datasets, f"load_{name}")()
        return found.data, SCIKIT[name](found.target)
    import statsmodels.datasets

    found = getattr(statsmodels.datasets, name).load_pandas()
    return found.exog.to_numpy(float), STATSMODELS[name](found.endog.to_numpy(float))


SCIKIT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "diabetes": lambda y: y,
    "breast_cancer": lambda y: y == 0,
    "wine": lambda y: y == 0,
    "iris": lambda y: y == 1,
    "digits": lambda y: y % 2,
}
STATSMODELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "star98": lambda y: y[:, 0] / y.sum(1),
    "anes96": lambda y: y >= 3,
    "fair": lambda y: y > 0,
    "randhie": np.log1p,
    "modechoice": lambda y: y,
}
"""The target of a table: a class, or a number."""

REGRESSIONS = frozenset({"diabetes", "star98", "randhie"})


def drawn(name: str, degree: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return up to 2,500 rows in random order, with standardised polynomial features."""
    features, target = table(name)
    order = np.random.default_rng(seed).permutation(len(target))[:2500]
    rows = features[order]
    scale = rows.std(0)
    rows = (rows - rows.mean(0)) / np.where(scale > 0, scale, 1)
    rows = PolynomialFeatures(degree, include_bias=False).fit_transform(rows)
    return torch.tensor(rows, dtype=torch.float32), torch.tensor(target[order]).float()


def ordinary(name: str, rows: int, degree: int = 1) -> Problem:
    """One penalty per feature of a linear model."""

    def problem(seed: int) -> Arguments:
        x, y = drawn(name, degree, seed)
        return linear(x, y, rows, squares if name in REGRESSIONS else binary)

    return problem


def wrong_table(name: str, train: int, validation: int, share: float) -> Problem:
    """Row weights and one penalty of a linear model, for wrong targets of training rows.

    Wrong classes are flipped, wrong numbers are those of another row.
    """

    def problem(seed: int) -> Arguments:
        x, y = drawn(name, 1, seed)
        draw = torch.Generator().manual_seed(seed)
        is_regression = name in REGRESSIONS
        if is_regression:
            y = (y - y.mean()) / y.std()
        rows = split(x, y, train, validation)
        own = rows["train"]["y"]
        other = own[torch.randperm(train, generator=draw)] if is_regression else 1 - own
        is_wrong = torch.rand(train, generator=draw) < share
        rows["train"]["y"] = torch.where(is_wrong, other, own)
        model = nn.Linear(x.shape[1], 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        learn = {"rows": hyper.PerRow(), "penalty": hyper.PerLayer(init=0.01)}
        loss = squares if is_regression else binary
        return {"model": model, "loss": loss, "learn": learn, **rows}

    return problem


# --- images


def small_mnist(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Return 14 × 14 images, 6,000 of the training set."""
    x, y, draw = _mnist(seed)
    pooled = torch.nn.functional.avg_pool2d(x[:6000].reshape(-1, 1, 28, 28), 2)
    return pooled.flatten(1), y[:6000], draw


@lru_cache(maxsize=1)
def _mnist(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    return mnist(seed)


def wrong_images(images: Images, train: int, validation: int, share: float, hidden: int) -> Problem:
    """Row weights of a network, for images of which a share has wrong labels."""

    def problem(seed: int) -> Arguments:
        x, y, draw = images(seed)
        rows = split(x, y, train, validation)
        rows["train"]["y"] = with_noise(rows["train"]["y"], share, draw)
        model = network(x.shape[1], hidden, seed)
        return {"model": model, "loss": several, "learn": {"rows": hyper.PerRow()}, **rows}

    return problem


def rare_images(images: Images, pool: int, validation: int, hidden: int) -> Problem:
    """Class weights and logit shifts of a network; 15 % of the images of half of the classes."""

    def problem(seed: int) -> Arguments:
        x, y, draw = images(seed)
        rows = split(x, y, pool, validation)
        keep = (rows["train"]["y"] < 5) | (torch.rand(pool, generator=draw) < 0.15)
        rows["train"] = {name: column[keep] for name, column in rows["train"].items()}
        learn = {
            "class": hyper.PerClass("y", count=10),
            "shift": hyper.Values(torch.zeros(10), low=-4.0, high=4.0),
        }
        model = network(x.shape[1], hidden, seed)
        return {"model": model, "loss": shifted, "learn": learn, **rows}

    return problem


# --- several tasks


def tasks_loss(model: Any, batch: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Tensor:
    outputs = model(batch["x"])
    main = cross_entropy(outputs[:, :10], batch["y"], reduction="none")
    extra = binary_cross_entropy_with_logits(outputs[:, 10:], batch["extra"], reduction="none")
    return main + extra @ values["tasks"]


def auxiliary_tasks(seed: int) -> Arguments:
    """Weights of 16 auxiliary labels: four properties of the digit, and twelve coins.

    40 % of the training labels are wrong; the four properties are those of the correct digit.
    """
    x, y, draw = digits(seed)
    properties = torch.stack([y % 2 == 0, y < 5, y % 3 == 0, (y == 0) | (y > 6)], 1)
    coins = torch.rand(len(y), 12, generator=draw) < 0.5
    rows = split(x, y, 300, 60)
    rows["train"]["y"] = with_noise(rows["train"]["y"], 0.4, draw)
    extra = torch.cat([properties, coins], 1).float()
    first = 0
    for part in rows.values():
        part["extra"] = extra[first : first + len(part["y"])]
        first += len(part["y"])
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 26))
    weights = hyper.Values(torch.full((16,), 0.25), low=0.0, high=4.0, neutral=torch.zeros(16))
    return {"model": model, "loss": tasks_loss, "learn": {"tasks": weights}, **rows}


class Heads(nn.Module):
    """One linear model per task."""

    def __init__(self, tasks: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(tasks, features))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return (x * self.weight[task]).sum(-1)


def shared_start_loss(
    model: Any, batch: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Tensor:
    error = (model(batch["x"], batch["task"]) - batch["y"]).square()
    return error + batch["pull"] * (model.weight - values["start"]).square().sum()


def shared_start(seed: int) -> Arguments:
    """The common start of 20 regressions with 8 rows each, which attracts them (as in iMAML)."""
    tasks, features = 20, 20
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(features, generator=draw)
    weights = common + 0.3 * torch.randn(tasks, features, generator=draw)
    rows: Arguments = {}
    for name, count, pull in (("train", 8, 0.02), ("validation", 4, 0.0), ("test", 50, 0.0)):
        task = torch.arange(tasks).repeat_interleave(count)
        x = torch.randn(len(task), features, generator=draw)
        y = (x * weights[task]).sum(1) + 0.5 * torch.randn(len(task), generator=draw)
        rows[name] = {"x": x, "y": y, "task": task, "pull": torch.full(task.shape, pull)}
    learn = {"start": hyper.Values(torch.zeros(features), low=-4.0, high=4.0)}
    return {"model": Heads(tasks, features), "loss": shared_start_loss, "learn": learn, **rows}


# --- texts

ALPHABET = " etaoinsrhldcumfpgwybvkxjqz0123456789.,+-*/=()$"
CONTEXT = 5
SOURCES = (
    "alpaca_de/alpaca_de_6000",
    "alpaca_de/alpaca_en_aligned_6000",
    "alpaca_zh/alpaca_zh_6000",
    "alpaca_gpt4_en/alpaca_gpt4_en_6000",
    "code_alpaca/code_alpaca_2000",
    "dart_math_uniform/dart_math_uniform_2000",
    "gpt4_llm_cleaned/gpt4_llm_cleaned_2000",
    "gpteacher_general_instruct/gpteacher_general_instruct_2000",
    "gpteacher_roleplay/gpteacher_roleplay_1923",
    "gsm8k/train",
    "math/train",
    "mathinstruct/mathinstruct_2000",
    "orca_math/orca_math_2000",
    "scalebio_data_tiny/train_alpaca",
    "scalebio_data_tiny/train_gpt4_alpaca",
    "scalebio_math_valtest/val",
)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)


@lru_cache
def characters(source: str) -> Tensor:
    """Return the first 60,000 characters of a source as numbers; others count as spaces."""
    path = Path(os.environ["HGMS_DATA"], f"{source}.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        lines = [line for line, _ in zip(stream, range(400), strict=False)]
    text = " ".join(string for line in lines for string in _strings(json.loads(line)))
    return torch.tensor([max(0, ALPHABET.find(letter)) for letter in text[:60_000].lower()])


def windows(source: str, number: int, count: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Draw places of a text: the characters before, the next character, and the source."""
    text = characters(source)
    places = torch.randint(0, len(text) - CONTEXT, (count,), generator=draw)
    seen = text[places[:, None] + torch.arange(CONTEXT)]
    return {"x": seen, "y": text[places + CONTEXT], "source": torch.full((count,), number)}


def sources(seed: int) -> Arguments:
    """Weights of 16 text sources of a small model of characters; the target is GSM8K."""
    draw = torch.Generator().manual_seed(seed)
    parts = [windows(source, number, 60, draw) for number, source in enumerate(SOURCES)]
    train = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    torch.manual_seed(seed)
    letters = len(ALPHABET)
    model = nn.Sequential(
        nn.Embedding(letters, 8),
        nn.Flatten(),
        nn.Linear(8 * CONTEXT, 32),
        nn.ReLU(),
        nn.Linear(32, letters),
    )
    return {
        "model": model,
        "loss": several,
        "train": train,
        "validation": windows("gsm8k/test", 0, 150, draw),
        "test": windows("gsm8k/test", 0, 4000, draw),
        "learn": {"source": hyper.PerClass("source", count=len(SOURCES))},
    }


# --- the zoo

STRUCTURED: dict[str, Problem] = {
    "rows-digits": wrong_images(digits, 400, 100, 0.4, 32),
    "rows-mnist": wrong_images(small_mnist, 500, 150, 0.6, 24),
    "rows-cancer": wrong_table("breast_cancer", 250, 80, 0.4),
    "rows-star98": wrong_table("star98", 150, 50, 0.4),
    "classes-digits": rare_images(digits, 600, 120, 24),
    "classes-mnist": rare_images(small_mnist, 700, 150, 24),
    "groups-16": synthetic(26, 208, 200, False, groups=16),
    "groups-classes": synthetic(24, 192, 300, True, groups=24),
    "sparse": synthetic(10, 210, 200, False),
    "tasks": auxiliary_tasks,
    "start": shared_start,
    "sources": sources,
}
ORDINARY: dict[str, Problem] = {
    "diabetes": ordinary("diabetes", 221),
    "diabetes-2": ordinary("diabetes", 221, 2),
    "cancer": ordinary("breast_cancer", 285),
    "cancer-2": ordinary("breast_cancer", 285, 2),
    "wine-2": ordinary("wine", 90, 2),
    "iris-2": ordinary("iris", 75, 2),
    "digits-even": ordinary("digits", 300),
    "star98-2": ordinary("star98", 150, 2),
    "anes96-2": ordinary("anes96", 300, 2),
    "fair-2": ordinary("fair", 300, 2),
    "randhie-2": ordinary("randhie", 300, 2),
    "modechoice-2": ordinary("modechoice", 300, 2),
}
ZOO = {**STRUCTURED, **ORDINARY}
NETWORKS = frozenset(
    {"rows-digits", "rows-mnist", "classes-digits", "classes-mnist", "tasks", "sources"}
)
"""Problems with a loss that is not convex."""
