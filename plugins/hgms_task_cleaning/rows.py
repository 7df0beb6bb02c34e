"""From images to rows: a seeded split, wrong labels, and validation parts for the three roles."""

from __future__ import annotations

import torch
from torch import Tensor

from hgms_core import ConfigError, Data, DataError, Key, Tree
from hgms_task_cleaning.images import Images

ROLES = ("differentiate", "select", "stop")


def draw(images: Images, sizes: tuple[int, ...], key: Key, device: torch.device, dtype: torch.dtype) -> list[Tree]:
    """Disjoint parts (train, validation, test) of the images, in a seeded order. Only the rows drawn become tensors."""
    if sum(sizes) > len(images.labels):
        raise DataError(
            f"{images.where}: {len(images.labels)} images, but train_size + validation_size + test_size = "
            f"{' + '.join(map(str, sizes))} = {sum(sizes)}\n  lower one of the three"
        )
    order = torch.randperm(len(images.labels), generator=key.generator())
    parts = []
    for rows in order[: sum(sizes)].split(sizes):
        # Bytes go to the device, and become floats there.
        pixels = torch.from_numpy(images.pixels[rows.numpy()]).reshape(len(rows), -1).to(device).to(dtype)
        label = torch.from_numpy(images.labels[rows.numpy()]).to(device)
        parts.append({"pixels": pixels.div_(images.scale), "label": label})
    return parts


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


def roles(validation: Tree, shares: tuple[float, ...]) -> dict[str, Data]:
    """The validation rows each role sees: consecutive parts (views, not copies), or all of them for shares (1, 1, 1)."""
    whole = Data.of(validation)
    if all(share == 1 for share in shares):
        return dict.fromkeys(ROLES, whole)
    ends = [round(whole.size * sum(shares[:i])) for i in range(len(ROLES) + 1)]
    parts = {}
    for role, first, end in zip(ROLES, ends, ends[1:], strict=False):
        if first == end:
            raise ConfigError(
                f"validation_split = {shares} leaves the role {role!r} none of the {whole.size} validation images\n"
                "  raise its share or validation_size"
            )
        parts[role] = Data.of({name: leaf[first:end] for name, leaf in validation.items()})
    return parts
