"""Write synthetic LIBSVM files with the shape of the benchmark's, only for timing.

    python benchmarks/bilevel/stand_ins.py FOLDER
            ijcnn1.bz2 and ijcnn1.t.bz2, 49,990 and 91,701 rows of 22
    python benchmarks/bilevel/stand_ins.py FOLDER --covtype 0.1
            covtype.bz2 as well: a tenth of 581,012 rows of 54, 7 classes

Columns resemble the originals (ijcnn1: the first ten mark a row's turn of ten, then twelve numbers;
covtype: ten numbers of very different size, forty-four binary columns). Classes have about their
frequencies, with nonlinear borders.
"""

from __future__ import annotations

import argparse
import bz2
import io
from pathlib import Path

import numpy as np
from sklearn.datasets import dump_svmlight_file


def write(path: Path, features: np.ndarray, target: np.ndarray) -> None:
    lines = io.BytesIO()
    dump_svmlight_file(np.round(features, 6), target, lines, zero_based=False)
    path.write_bytes(bz2.compress(lines.getvalue(), 1))


def ijcnn1(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers around 0 that depend on the previous ones; about one row in ten is
    positive.
    """
    turn = np.eye(10)[np.arange(rows) % 10]
    numbers = 0.3 * rng.normal(size=(rows, 12))
    for column in range(1, 12):
        numbers[:, column] += 0.5 * numbers[:, column - 1]
    slope = np.array([4.0, -3, 2, 0, 0, 0, 1, 0, 0, -1, 0, 0])
    score = (
        numbers @ slope
        + 6 * numbers[:, 3] * numbers[:, 4]
        + turn @ np.linspace(-1.5, 1.5, 10)
        - 3.2
    )
    return np.hstack([turn, numbers]), np.where(rng.random(rows) < 1 / (1 + np.exp(-score)), 1, -1)


def covtype(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return classes 1 … 7 of about covtype's frequencies, by a score per class with a product
    of two numbers.
    """
    numbers = rng.normal(size=(rows, 10))
    zones = np.hstack([np.eye(4)[rng.integers(0, 4, rows)], np.eye(40)[rng.integers(0, 40, rows)]])
    columns = np.hstack([numbers, zones])
    slope = 0.7 * np.random.default_rng(7).normal(size=(54, 7))
    score = columns @ slope + numbers[:, :1] * numbers[:, 1:2] * slope[:1]
    score += np.log([0.365, 0.488, 0.06, 0.005, 0.016, 0.03, 0.036])
    target = 1 + np.argmax(score + rng.gumbel(size=score.shape), axis=1)
    return np.hstack([numbers * np.geomspace(1, 1000, 10) + 2000, zones]), target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--covtype", type=float, default=0.0, metavar="SHARE", help="of covtype's rows"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, rows, seed in (("ijcnn1.bz2", 49_990, 0), ("ijcnn1.t.bz2", 91_701, 1)):
        write(options.folder / name, *ijcnn1(rows, np.random.default_rng(seed)))
    if options.covtype:
        write(
            options.folder / "covtype.bz2",
            *covtype(round(options.covtype * 581_012), np.random.default_rng(2)),
        )


if __name__ == "__main__":
    main()
