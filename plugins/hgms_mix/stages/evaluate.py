"""The stage `evaluate`: losses of the fine-tuned model on the test sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hgms.store import Folder
from hgms_core import Key
from hgms_mix.stages.finetune import FINETUNE, TUNED
from hgms_mix.stages.graph import Facts, Log, Stage
from hgms_mix.stages.losses import RowLosses, row_losses, untuned_losses
from hgms_mix.stages.tuned_model import TunedModel

RESAMPLES = 10_000
LOSSES = "losses"
"""The folder with the losses of every test row, one file per test set."""


def evaluate_model(
    work: Folder, tuned: Path, *, model: TunedModel, seed: int, untuned: Path, log: Log
) -> Facts:
    """Measure the losses of every test row.

    ``untuned`` is the folder with losses of models before fine-tuning.
    """
    log(f"  {', '.join(model.task.test) or 'nothing to evaluate'}")
    (work.path / LOSSES).mkdir(exist_ok=True)
    tests = dict[str, Any]()
    before = untuned_losses(model, untuned)
    loaded = model.load_tuned(tuned)
    for name, table in model.test_tables.items():
        losses = row_losses(loaded, table)
        tests[name] = means(losses, seed=seed) | {
            "untuned": float(before[name].total.sum() / before[name].tokens.sum()),
            "against_untuned": difference(losses, before[name], seed=seed),
        }
        work.write(f"{LOSSES}/{name}.json", json.dumps(losses.as_dict()).encode())
    return {"test": tests}


EVALUATE = Stage(
    name="evaluate",
    version="3",
    function=evaluate_model,
    reads={"tuned": FINETUNE.output(TUNED)},
    writes=(LOSSES,),
)


def means(losses: RowLosses, *, seed: int = 0) -> dict[str, Any]:
    """Return the mean over tokens (Σ loss / Σ tokens) and over examples (mean of the row means).

    Each mean has its 95 % percentile bootstrap interval over rows.

    Examples
    --------
    >>> flat = RowLosses(total=torch.tensor([2.0, 3.0]).double(), tokens=torch.tensor([2, 3]))
    >>> means(flat)["token_loss"]
    {'value': 1.0, 'low': 1.0, 'high': 1.0}
    """
    per_row = losses.per_row
    tokens = losses.tokens.double()
    columns = torch.stack([losses.total, tokens, per_row], 1)
    total, count, means = _resample(columns, seed).unbind(1)
    return {
        "rows": len(per_row),
        "tokens": int(tokens.sum()),
        "token_loss": _interval(float(losses.total.sum() / tokens.sum()), total / count),
        "example_loss": _interval(float(per_row.mean()), means / len(per_row)),
    }


def difference(first: RowLosses, second: RowLosses, *, seed: int = 0) -> dict[str, Any]:
    """Return the mean difference per token on the same rows, with a bootstrap interval.

    The bootstrap is over rows. A resample contains the same rows for both.
    """
    gap = first.total - second.total
    tokens = first.tokens.double()
    total, count = _resample(torch.stack([gap, tokens], 1), seed).unbind(1)
    return _interval(float(gap.sum() / tokens.sum()), total / count)


def _resample(columns: Tensor, seed: int) -> Tensor:
    """Return sums of the columns over rows drawn with replacement, ``[RESAMPLES, columns]``.

    The function computes some resamples at a time.
    """
    rows = len(columns)
    generator = Key(seed).fold("bootstrap").generator()
    step = max(1, 2**22 // rows)
    sums = []
    for first in range(0, RESAMPLES, step):
        index = torch.randint(rows, (min(step, RESAMPLES - first), rows), generator=generator)
        sums.append(columns[index].sum(1))
    return torch.cat(sums)


def _interval(value: float, draws: Tensor) -> dict[str, float]:
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return {"value": value, "low": low, "high": high}
