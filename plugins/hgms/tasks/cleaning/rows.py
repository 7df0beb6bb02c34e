"""Convert images to rows: a seeded split, and label noise."""

from __future__ import annotations

import torch
from torch import Tensor

from hgms.config import check_memory
from hgms.tasks.images import Images
from hgms_core import Key, Tree
from hgms_core.errors import DataError


def draw(
    images: Images, sizes: list[int], key: Key, device: torch.device, dtype: torch.dtype
) -> list[Tree]:
    """Return disjoint parts (train, validation, test) of the images, in a seeded order.

    Only the selected rows become tensors.
    """
    if sum(sizes) > len(images.labels):
        raise DataError(
            "too-few-rows",
            f"train_size + validation_size + test_size = {' + '.join(map(str, sizes))} = "
            f"{sum(sizes)} exceeds the {len(images.labels)} images",
            place=(images.where,),
            hint="decrease one of the three",
        )
    order = torch.randperm(len(images.labels), generator=key.generator())
    parts = [images.tensors(rows, device, dtype) for rows in order[: sum(sizes)].split(sizes)]
    return [{**part, "pixels": part["pixels"].flatten(1)} for part in parts]


def redrawn(count: int, rate: float, generator: torch.Generator) -> Tensor:
    """Return the rows whose labels :func:`corrupt` redraws, from a fresh generator of its key."""
    return torch.randperm(count, generator=generator)[: round(rate * count)]


def corrupt(label: Tensor, rate: float, classes: int, noise: str, key: Key) -> Tensor:
    """Return a copy of ``label`` with exactly round(rate·n) entries redrawn.

    ``uniform``: from the other classes. ``uniform-including-true``: from all classes. ``pair``: the
    next class. ``class-conditional``: from the other classes, with probabilities that depend on the
    true class (:func:`confusion`).

    Examples
    --------
    >>> true = torch.arange(10)
    >>> int((corrupt(true, 0.4, 10, "uniform", Key(0)) != true).sum())
    4
    """
    generator = key.generator()
    rows = redrawn(len(label), rate, generator)
    if noise == "pair":
        turn = torch.ones(len(rows), dtype=torch.int64)
    elif noise == "class-conditional":
        others = confusion(classes, key.fold("confusion"))[label[rows.to(label.device)].cpu()]
        turn = (
            1 + torch.multinomial(others, 1, generator=generator).flatten() if len(rows) else rows
        )
    else:
        least = 1 if noise == "uniform" else 0  # a shift of 0 keeps the label
        turn = torch.randint(least, classes, (len(rows),), generator=generator)
    rows = rows.to(label.device)
    turn = turn.to(label.device)
    noisy = label.clone()
    noisy[rows] = (label[rows] + turn) % classes
    return noisy


def confusion(classes: int, key: Key) -> Tensor:
    """Return the probabilities of wrong classes for each class.

    Row c contains the probabilities of c + 1, c + 2, … (mod ``classes``), drawn uniformly from the
    simplex (normalised exponentials).

    Examples
    --------
    >>> confusion(3, Key(0)).sum(1)
    tensor([1., 1., 1.], dtype=torch.float64)
    """
    check_memory("classes × classes", classes, classes)
    unit = torch.rand(classes, classes - 1, generator=key.generator(), dtype=torch.float64)
    weights = -torch.log1p(-unit)
    return weights / weights.sum(1, keepdim=True)


def standardise(parts: list[Tree]) -> list[Tree]:
    """Standardise every pixel with the mean and standard deviation of the first part.

    A pixel that is constant in the first part is only centred.
    """
    first = parts[0]["pixels"]
    mean = first.mean(0)
    spread = first.std(0, correction=0)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return [{**part, "pixels": (part["pixels"] - mean) / spread} for part in parts]
