"""From images to rows: a seeded split, and wrong labels."""

from __future__ import annotations

import torch
from torch import Tensor

from hgms_core import DataError, Images, Key, Tree


def draw(images: Images, sizes: tuple[int, ...], key: Key, device: torch.device, dtype: torch.dtype) -> list[Tree]:
    """Disjoint parts (train, validation, test) of the images, in a seeded order. Only the rows drawn become tensors."""
    if sum(sizes) > len(images.labels):
        raise DataError(
            f"{images.where}: {len(images.labels)} images, but train_size + validation_size + test_size = "
            f"{' + '.join(map(str, sizes))} = {sum(sizes)}\n  lower one of the three"
        )
    order = torch.randperm(len(images.labels), generator=key.generator())
    parts = [images.tensors(rows, device, dtype) for rows in order[: sum(sizes)].split(sizes)]
    return [{**part, "pixels": part["pixels"].flatten(1)} for part in parts]


def corrupt(label: Tensor, rate: float, classes: int, noise: str, key: Key) -> Tensor:
    """A copy of ``label`` with exactly round(rate·n) entries redrawn: among the other classes (``uniform``), or among all.

    >>> true = torch.arange(10)
    >>> int((corrupt(true, 0.4, 10, "uniform", Key(0)) != true).sum())
    4
    """
    generator = key.generator()
    rows = torch.randperm(len(label), generator=generator)[: round(rate * len(label))]
    least = 1 if noise == "uniform" else 0  # a turn of 0 leaves the label as it is
    turn = torch.randint(least, classes, (len(rows),), generator=generator)
    rows, turn = rows.to(label.device), turn.to(label.device)
    noisy = label.clone()
    noisy[rows] = (label[rows] + turn) % classes
    return noisy
