"""Features on disk: written once, memory-mapped, and rejected for other rows, models or
settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms.store import Digest
from hgms_core import ConfigError, Data, Tree


@frozen(kw_only=True)
class FeatureStore:
    """The features of one checkpoint, with one row of the file per row of the pool, and flags for
    existing rows.

    ::

        features-<epoch>.npy     [rows, dims], half precision
        present-<epoch>.npy      [rows], written after the features
        store-<epoch>.json       digest, rows, dims

    Scores are also computed from half precision, so that stored features give the same scores as
    new features.
    """

    folder: Path
    epoch: int
    digest: str
    rows: int
    dims: int

    def _path(self, what: str, suffix: str = "npy") -> Path:
        return self.folder / f"{what}-{self.epoch}.{suffix}"

    def _mapped(self) -> tuple[np.memmap, np.memmap]:
        """Map the features and the flags; create the files if they do not exist.

        Errors: ConfigError for a store of other rows, models or settings.
        """
        about = {"digest": self.digest, "rows": self.rows, "dims": self.dims}
        marker = self._path("store", "json")
        if not marker.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            shapes = {
                "features": ((self.rows, self.dims), np.float16),
                "present": ((self.rows,), np.bool_),
            }
            for what, (shape, dtype) in shapes.items():
                np.lib.format.open_memmap(
                    self._path(what), mode="w+", dtype=dtype, shape=shape
                ).flush()
            marker.write_text(json.dumps(about), encoding="utf-8")
        try:
            stored = json.loads(marker.read_text(encoding="utf-8"))
            maps = tuple(
                np.lib.format.open_memmap(self._path(what), mode="r+")
                for what in ("features", "present")
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                "damaged-file",
                f"the feature store cannot be read: {error}",
                place=(str(self.folder),),
                hint="remove the folder",
            ) from None
        if (
            stored != about
            or maps[0].shape != (self.rows, self.dims)
            or maps[1].shape != (self.rows,)
        ):
            raise ConfigError(
                "other-settings",
                "the feature store belongs to other rows, another model or other settings",
                place=(str(marker),),
                hint="remove the folder, or use another `store`",
            )
        return maps[0], maps[1]

    def rows_of(self, first: int, last: int, like: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Return the features of rows first … last − 1 with the device and type of ``like``.

        If a row is missing, the features are computed and stored.
        """
        features, present = self._mapped()
        if not present[first:last].all():
            features[first:last] = compute().to("cpu", torch.float16).numpy()
            features.flush()
            present[first:last] = True
            present.flush()
        return torch.from_numpy(np.array(features[first:last])).to(like)


def fingerprint(data: Data, piece: int = 256) -> str:
    """Return the sha256 of all rows; other parts of a batch (a dropout seed) are excluded."""
    digest = Digest(str(data.size))
    for index in torch.split(torch.arange(data.size), piece):
        rows = data.rows(index.to(data.device))
        per_row = {name: leaf for name, leaf in rows.items() if leaf.shape[:1] == index.shape}
        digest.add(tree_digest(per_row))
    return digest.text


def tree_digest(tree: Tree) -> str:
    digest = Digest()
    for name, leaf in sorted(tree.items()):
        digest.add(f"{name} {leaf.dtype} {tuple(leaf.shape)}")
        # Hashed as bytes, since NumPy has no bfloat16.
        digest.add(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.text
