"""Convert images to rows: a balanced validation set, long-tailed training images, shifted views."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from hgms.tasks.images import Images
from hgms_core import Key, Tree
from hgms_core.errors import DataError


@frozen
class Split:
    """Row numbers of the training split, disjoint, in the order of use."""

    train: Tensor
    validation: Tensor
    test: Tensor


def even(size: int, classes: int) -> list[int]:
    """Split ``size`` into ``classes`` parts that differ by at most one, the larger parts first.

    Examples
    --------
    >>> even(32, 10)
    [4, 4, 3, 3, 3, 3, 3, 3, 3, 3]
    """
    return [size // classes + (c < size % classes) for c in range(classes)]


def split(
    label: Tensor,
    classes: int,
    validation_size: int,
    test_size: int,
    ratio: float,
    least: int,
    key: Key,
    where: str,
) -> Split:
    """Draw balanced validation and test sets, and a long tail of the remaining images, class by
    class.

    Of the m remaining images of class c, max(round(ratioᶜ m), min(least, m)) are kept. Validation
    and test rows are ordered so that every contiguous part is as balanced as possible. The training
    rows are shuffled.
    """
    held = [even(validation_size, classes), even(test_size, classes)]
    kept: list[list[Tensor]] = [[], [], []]
    for c in range(classes):
        rows = torch.nonzero(label == c).flatten()
        rows = rows[torch.randperm(len(rows), generator=key.fold("class", c).generator())]
        wanted = held[0][c] + held[1][c]
        if wanted + 1 > len(rows):
            raise DataError(
                "too-few-rows",
                f"class {c} has {len(rows)} images, but requires {held[0][c]} for validation, "
                f"{held[1][c]} for testing and at least one for training",
                place=(where,),
                hint="decrease validation_size or test_size",
            )
        left = len(rows) - wanted
        count = max(round(ratio**c * left), min(least, left))
        for part, piece in zip(
            kept, rows[: wanted + count].split([held[0][c], held[1][c], count]), strict=True
        ):
            part.append(piece)
    train = torch.cat(kept[2])
    train = train[torch.randperm(len(train), generator=key.fold("train").generator())]
    return Split(train, _interleave(kept[0]), _interleave(kept[1]))


def _interleave(parts: Sequence[Tensor]) -> Tensor:
    """Return one row of each class, then another row of each class, and so on."""
    place = torch.cat([torch.arange(len(part)) for part in parts])
    return torch.cat(list(parts))[torch.argsort(place, stable=True)]


def class_weights(label: Tensor, classes: int) -> Tensor:
    """Return u_c = n / (C n_c) for every row: the inverse frequency of its class, with mean 1.

    C counts the classes that occur.

    Examples
    --------
    >>> class_weights(torch.tensor([0, 0, 0, 1]), 2)
    tensor([0.6667, 0.6667, 0.6667, 2.0000], dtype=torch.float64)
    """
    counts = torch.bincount(label, minlength=classes).double()
    return (len(label) / ((counts > 0).sum() * counts.clamp_min(1)))[label]


def views(
    pixels: Tensor, label: Tensor, count: int, shift: int, degrees: float, key: Key
) -> tuple[Tensor, Tensor]:
    """Return ``count`` views of every image; with ``count`` 0, the unchanged images.

    Each view is rotated by an angle that is uniform on ±degrees, then shifted by whole pixels
    (uniform on {−shift, …, shift}²). Pixels from outside are 0.

    The numbers are drawn on the CPU, so that every device and precision has the same views.
    """
    if not count:
        return pixels, label
    rows, _, height, width = pixels.shape
    generator = key.generator()
    shifted = []
    for _ in range(count):
        turned = pixels.cpu()
        angle = math.radians(degrees) * (2 * torch.rand(rows, generator=generator) - 1)
        move = torch.randint(-shift, shift + 1, (rows, 2), generator=generator)
        if degrees:
            turned = _rotate(turned, angle.to(turned.dtype))
        padded = F.pad(turned, (shift, shift, shift, shift))
        down, right = (
            (shift - move[:, axis])[:, None] + torch.arange(size)
            for axis, size in ((0, height), (1, width))
        )
        row = torch.arange(rows)[:, None, None]
        shifted.append(padded[row, :, down[:, :, None], right[:, None, :]].movedim(-1, 1))
    return torch.cat(shifted).contiguous().to(pixels.device), label.repeat(count)


def _rotate(pixels: Tensor, angle: Tensor) -> Tensor:
    """Rotate every image about its centre, with bilinear interpolation."""
    height, width = pixels.shape[-2:]
    cos = angle.cos()
    sin = angle.sin()
    zero = torch.zeros_like(angle)
    # affine_grid uses coordinates from −1 to 1 along each axis, so an oblong image needs its aspect
    # ratio.
    matrix = torch.stack(
        [cos, -sin * height / width, zero, sin * width / height, cos, zero], dim=1
    ).reshape(-1, 2, 3)
    return F.grid_sample(
        pixels, F.affine_grid(matrix, list(pixels.shape), align_corners=False), align_corners=False
    )


def maps(images: Images, rows: Tensor, device: torch.device, dtype: torch.dtype) -> Tree:
    """Return the rows with ``pixels`` as ``[rows, colours, height, width]``."""
    part = images.tensors(rows, device, dtype)
    pixels = part["pixels"]
    shape = tuple(pixels.shape[1:])
    if len(shape) == 2:
        pixels = pixels.unsqueeze(1)
    elif len(shape) == 3 and shape[-1] in (1, 3, 4):
        pixels = pixels.movedim(-1, 1).contiguous()
    if pixels.dim() != 4 or min(pixels.shape[-2:]) < 4:
        raise DataError(
            "wrong-shape",
            f"images have the shape {shape}, but must have height × width or height × width × "
            "colours, at least 4 × 4",
            place=(images.where,),
            hint="save them in this shape, and use npz:FILE",
        )
    return {**part, "pixels": pixels}
