"""Writes a synthetic source of N rows as JSON lines: words drawn by a Zipf law, lengths by a
lognormal one, all from a seed.

python benchmarks/llm/synthetic_rows.py --rows 10000000 --out /tmp/rows.jsonl       # about 1.4 GB
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

CHUNK = 10_000


def words(draw: np.random.Generator, count: int = 5_000) -> np.ndarray:
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    share = 1 / np.arange(1, len(letters) + 1)
    lengths = draw.integers(2, 10, count)
    return np.array(
        ["".join(draw.choice(letters, size, p=share / share.sum())) for size in lengths],
        dtype=object,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mean-words", type=float, default=12.0, help="of an answer")
    options = parser.parse_args()
    draw = np.random.default_rng(options.seed)
    known = words(draw)
    zipf = 1 / np.arange(1, len(known) + 1)
    bounds = np.cumsum(zipf / zipf.sum())
    with options.out.open("w", encoding="utf-8") as stream:
        for first in range(0, options.rows, CHUNK):
            count = min(CHUNK, options.rows - first)
            asked = draw.integers(3, 10, count)
            answered = np.minimum(
                1 + draw.lognormal(np.log(options.mean_words) - 0.245, 0.7, count), 500
            ).astype(int)
            drawn = known[
                np.minimum(
                    np.searchsorted(bounds, draw.random(int(asked.sum() + answered.sum()))),
                    len(known) - 1,
                )
            ]
            ends = np.cumsum(np.stack([asked, answered], axis=1).ravel())
            parts = [" ".join(piece) for piece in np.split(drawn, ends[:-1])]
            rows = zip(range(first, first + count), parts[::2], parts[1::2], strict=True)
            stream.writelines(
                json.dumps({"prompt": f"{n} {ask}?", "completion": tell}) + "\n"
                for n, ask, tell in rows
            )


if __name__ == "__main__":
    main()
