"""Losses of the model before fine-tuning, as the baseline for fine-tuning.

They are the same for all mixes of an experiment, so they are computed once.
"""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path
from typing import Any

from hgms.config.as_table import plain
from hgms.config.tables import parse_json
from hgms.store import json_digest, read_file, replace_file
from hgms_core.errors import CheckpointError
from hgms_mix.stages.losses import RowLosses, row_losses
from hgms_mix.stages.tuned_model import TunedModel


def untuned_losses(model: TunedModel, folder: Path) -> dict[str, RowLosses]:
    """Return the losses of every row of the test sets, by name of the set.

    The function reads them from ``folder`` if an earlier mix computed them. Otherwise it loads the
    model and releases it at the end.

    Cost: one forward pass over the test sets, once per experiment.
    """
    losses = dict[str, RowLosses]()
    base = None
    for name, table in model.test_tables.items():
        path = _place(model, table, folder)
        stored = None if path is None else _stored(path)
        if stored is None:
            base = model.load() if base is None else base
            stored = row_losses(base, table)
            if path is not None:
                path.parent.mkdir(exist_ok=True)
                replace_file(path, json.dumps(stored.as_dict()).encode())
        losses[name] = stored
    del base
    gc.collect()
    return losses


def _place(model: TunedModel, table: Any, folder: Path) -> Path | None:
    """Return the file of a table's losses.

    None for a model created from a configuration: it is small, and its weights are random.
    """
    if model.model.path is None:
        return None
    inputs = [plain(model.model), model.model.digest(), table.digest]
    return folder / f"{json_digest(inputs)[:16]}.json"


def _stored(path: Path) -> RowLosses | None:
    """Return the stored losses, or None. A damaged file is rewritten."""
    with contextlib.suppress(CheckpointError, OSError, KeyError, TypeError, ValueError):
        return RowLosses.of(parse_json(read_file(path), path.name))
    return None
