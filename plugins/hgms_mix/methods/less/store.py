"""Features on disk: written once, memory-mapped, and rejected for other rows or settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms.store import Digest, Folder, damaged_file, json_digest
from hgms_core import Data, Tree
from hgms_core.torch_errors import first_line

FEATURES = "features.npy"
PRESENT = "present.npy"


@frozen(kw_only=True)
class FeatureStore:
    """The features of one checkpoint, with one row of the file per row of the pool, and flags for
    existing rows.

    ::

        epoch-<n>/features.npy     [rows, dims], half precision
        epoch-<n>/present.npy      [rows], written after the features
        epoch-<n>/manifest.json    key of the digest, rows and dims; sha256 of complete features

    Scores are also computed from half precision, so that stored features give the same scores as
    new features. Complete features are checked when they are mapped, and are read-only.

    Errors: CheckpointError of :class:`hgms.store.Folder`: ``other-settings`` for a store of other
        rows, models or settings.
    """

    path: Path
    epoch: int
    digest: str
    rows: int
    dims: int

    @property
    def folder(self) -> Folder:
        key = json_digest([self.digest, self.rows, self.dims])
        return Folder(self.path / f"epoch-{self.epoch}", key)

    def rows_of(self, first: int, last: int, like: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Return the features of rows first … last − 1 with the device and type of ``like``.

        If a row is missing, the features are computed and stored.
        """
        folder = self.folder
        status = folder.manifest().status
        if status == "done":
            features = np.load(folder.verified_path(FEATURES), mmap_mode="r")
            return torch.from_numpy(np.array(features[first:last])).to(like)
        if status == "new":
            self._create(folder)
        features, present = (self._open_array(folder.path / name) for name in (FEATURES, PRESENT))
        if not present[first:last].all():
            features[first:last] = compute().to("cpu", torch.float16).numpy()
            features.flush()
            present[first:last] = True
            present.flush()
            if present.all():
                folder.commit([FEATURES], facts={}, done=True)
        return torch.from_numpy(np.array(features[first:last])).to(like)

    def _create(self, folder: Folder) -> None:
        """Create the files without features."""
        folder.path.mkdir(parents=True, exist_ok=True)
        open_memmap = np.lib.format.open_memmap
        shape = self.rows, self.dims
        open_memmap(folder.path / FEATURES, mode="w+", dtype=np.float16, shape=shape).flush()
        open_memmap(folder.path / PRESENT, mode="w+", dtype=np.bool_, shape=shape[:1]).flush()
        folder.commit([], facts={})

    def _open_array(self, path: Path) -> np.memmap:
        """Map a file of an incomplete store, which may be written."""
        try:
            array = np.lib.format.open_memmap(path, mode="r+")
        except (OSError, ValueError) as error:
            raise damaged_file(path, f"it does not contain features: {first_line(error)}") from None
        if len(array) != self.rows:
            raise damaged_file(path, f"it has {len(array)} rows, not {self.rows}")
        return array


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
