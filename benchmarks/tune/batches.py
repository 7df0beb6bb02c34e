"""Compare mini-batches, batch normalisation and dropout with full batches in the online engine.

    OMP_NUM_THREADS=1 python benchmarks/tune/batches.py --out batches.jsonl [--seeds 20:25]
    python benchmarks/tune/batches.py --out batches.jsonl --summary

Digits with 40 % wrong labels: 600 training rows, 150 validation rows; one weight per training row,
one weight decay per layer. Budgets are processor seconds. A run that is in the file is skipped.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from problems import digits, several, split, with_noise
from records import main
from torch import nn
from tune_tables import batches

import hgms

SECONDS = 8.0
LAYERS = {
    "plain": list[nn.Module],
    "batch normalisation": lambda: [nn.BatchNorm1d(64)],
    "dropout 0.2": lambda: [nn.Dropout(0.2)],
}
SIZES = (None, 256, 64)


def run(layer: str, size: int | None, seed: int) -> dict[str, Any]:
    x, y, draw = digits(seed)
    rows = split(x, y, 600, 150)
    rows["train"]["y"] = with_noise(rows["train"]["y"], 0.4, draw)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), *LAYERS[layer](), nn.ReLU(), nn.Linear(64, 10))
    result = hgms.tune(
        model,
        several,
        rows["train"],
        rows["validation"],
        test=rows["test"],
        learn={"rows": hgms.hyper.PerRow(), "decay": hgms.hyper.PerLayer(init=1e-4)},
        budget=f"{SECONDS} s",
        batch_size=size,
        engine="online",
        seed=seed,
        clock="cpu",
    )
    learned = min((row for row in result.table if not row.is_baseline), key=lambda row: row.loss)
    assert result.test_loss is not None
    assert learned.test_loss is not None
    outputs = result.model.eval()(rows["test"]["x"])
    right = (outputs.argmax(1) == rows["test"]["y"]).float().mean()
    return {
        "layer": layer,
        "batch_size": size,
        "seed": seed,
        "selected": result.selected,
        "test_loss": round(result.test_loss, 5),
        "learned_test_loss": round(learned.test_loss, 5),
        "accuracy": round(float(right), 5),
        "steps": int(result.spent["steps"]),
        "over_budget": round(result.spent["seconds"] / SECONDS - 1, 4),
    }


def summary(rows: list[dict[str, Any]]) -> None:
    print(batches(rows))
    print(f"budgets were exceeded by at most {100 * max(row['over_budget'] for row in rows):.1f} %")


if __name__ == "__main__":
    main(__doc__, ["layer", "batch_size"], itertools.product(LAYERS, SIZES), run, summary)
