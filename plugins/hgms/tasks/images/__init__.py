"""Labelled images by name: embedded digits, MNIST, a folder of IDX files, an .npz file, or an image
set from the Hub.

Shared by the tasks on images. Only numpy is imported until an image set requires another package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from attrs import Attribute, frozen
from torch import Tensor

from hgms.config import data_fingerprint, expand
from hgms.packages import optional_module
from hgms.tasks.images.idx import IMAGES, LABELS, read_idx
from hgms_core import ConfigError, Tree
from hgms_core.errors import DataError

FORMS = "digits, mnist, idx:FOLDER, npz:FILE or hub:NAME[@REVISION]"

MNIST_HUB = "ylecun/mnist@77f3279092a1c1579b2250db8eafed0ad422088c"
"""The source of MNIST without HGMS_DATA; the revision is fixed, so that benchmarks do not
change.
"""

IDX_FILES = {
    "train": {IMAGES: "train-images-idx3-ubyte", LABELS: "train-labels-idx1-ubyte"},
    "test": {IMAGES: "t10k-images-idx3-ubyte", LABELS: "t10k-labels-idx1-ubyte"},
}

NPZ_NAMES = {
    "train": (("images", "labels"), ("x_train", "y_train")),
    "test": (("x_test", "y_test"),),
}

Split = Literal["train", "test"]


@frozen(eq=False)
class Images:
    """n images as stored (``pixels / scale`` is in [0, 1]), their labels, and their source."""

    pixels: np.ndarray
    labels: np.ndarray
    scale: float
    where: str

    def __attrs_post_init__(self) -> None:
        if self.pixels.ndim < 2 or not self.pixels.size:
            raise DataError(
                "wrong-shape",
                f"pixels have the shape {self.pixels.shape}, but must have images × height × width",
                place=(self.where, "pixels"),
            )
        if self.labels.ndim != 1 or len(self.pixels) != len(self.labels):
            raise DataError(
                "wrong-shape",
                f"labels have the shape {self.labels.shape}, but there are {len(self.pixels)} "
                "images",
                place=(self.where, "labels"),
                hint="use images and labels that belong together, with one label per image",
            )

    def tensors(self, rows: Tensor, device: torch.device, dtype: torch.dtype) -> Tree:
        """Return the given rows as ``pixels`` in [0, 1], with the shape of the images, and
        ``label``.
        """
        # Transfer bytes to the device, and convert them to floats there.
        pixels = torch.from_numpy(self.pixels[rows.numpy()]).to(device).to(dtype)
        return {
            "pixels": pixels.div_(self.scale),
            "label": torch.from_numpy(self.labels[rows.numpy()]).to(device),
        }

    def check_labels(self, classes: int) -> Images:
        """Return the images; raise DataError unless every label is one of 0 … classes − 1."""
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= classes))
        if len(wrong):
            first = wrong[0]
            raise DataError(
                "out-of-range",
                f"label {self.labels[first]} of image {first} must be between 0 and {classes - 1} "
                f"(number of such labels: {len(wrong)})",
                place=(self.where, "labels"),
                hint="set classes, or check the labels",
            )
        return self


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Return the cross-entropy of every row.

    It uses a gather, because the rule of F.cross_entropy under vmap takes twice as many operations.
    """
    return -logits.log_softmax(-1).gather(-1, label.unsqueeze(-1)).squeeze(-1)


def image_set(instance: object, attribute: Attribute[str], value: str) -> None:
    """The attrs validator of a field that names an image set."""
    kind, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if value not in ("digits", "mnist") and not (kind in ("idx", "npz", "hub") and rest):
        message = f"{attribute.name}={value!r} must be {FORMS}"
        raise ConfigError("wrong-value", message, place=(attribute.name,))


def load_images(dataset: str, split: Split = "train") -> Images:
    """Load the images named by ``dataset`` (see :data:`FORMS`): the training or the test split.

    Raises DataError for files that are missing or damaged, and for the test split of the digits,
    which does not exist; MissingExtra if scikit-learn or datasets is needed and not installed.

    Examples
    --------
    >>> images = load_images("digits")
    >>> images.pixels.shape, images.scale, len(images.labels)
    ((1797, 8, 8), 16.0, 1797)
    """
    kind, _, rest = dataset.partition(":")
    if kind == "digits":
        return _digits(split)
    if kind == "idx":
        return _idx_folder(expand(rest, ("dataset",)), split)
    if kind == "npz":
        return _npz(expand(rest, ("dataset",)), split)
    if kind == "hub":
        return _hub(rest, split)
    folder = _mnist_folder()
    return _hub(MNIST_HUB, split) if folder is None else _idx_folder(folder, split)


def contents(dataset: str) -> dict[str, list[str]]:
    """Return the checksums of the files of an image set.

    The result is empty for the digits and for sets of the Hub, whose name contains the revision.
    """
    kind, _, rest = dataset.partition(":")
    if kind == "npz":
        return data_fingerprint([expand(rest, ("dataset",))])
    folder = {"idx": lambda: expand(rest, ("dataset",)), "mnist": _mnist_folder}.get(kind)
    root = None if folder is None else folder()
    if root is None:
        return {}
    names = [name for files in IDX_FILES.values() for name in files.values()]
    choices = [_present(root, name) for name in names]
    return data_fingerprint(paths[0] for paths in choices if paths)


def _mnist_folder() -> Path | None:
    """Return the folder with the IDX files of MNIST; None if MNIST comes from the Hub."""
    root = os.environ.get("HGMS_DATA")
    return expand(root, ("HGMS_DATA",)) / "mnist" if root else None


def _present(folder: Path, name: str) -> list[Path]:
    """Return the files that contain an array of an IDX folder; the first file is read."""
    return [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]


def _digits(split: Split) -> Images:
    if split == "test":
        raise DataError(
            "not-supported",
            "the data set 'digits' has no test split",
            place=("test_size",),
            hint="set test_size to use some of its images for testing",
        )
    user = "the data set 'digits'"
    datasets = optional_module("sklearn.datasets", user, "sklearn", place=("dataset",))
    digits = datasets.load_digits()
    return Images(
        digits.images.astype(np.uint8),
        digits.target.astype(np.int64),
        16.0,
        "scikit-learn's digits",
    )


def _idx_folder(folder: Path, split: Split) -> Images:
    arrays = {}
    for magic, name in IDX_FILES[split].items():
        present = _present(folder, name)
        if not present:
            files = ", ".join(f"{file}[.gz]" for file in IDX_FILES[split].values())
            raise DataError(
                "missing-file",
                f"the folder has no {name} or {name}.gz"
                if folder.is_dir()
                else "the folder does not exist",
                place=(str(folder),),
                hint=f"add the files {files}, set HGMS_DATA to the folder that contains mnist/, or "
                "use idx:FOLDER\n"
                f"download MNIST with dataset = 'hub:{MNIST_HUB}' (pip install 'hgms[hub]')",
            )
        arrays[magic] = read_idx(present[0], magic)
    return Images(arrays[IMAGES], arrays[LABELS].astype(np.int64), 255.0, str(folder))


def _npz(path: Path, split: Split) -> Images:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device has no end
            raise OSError("it is not a file")
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            # an .npy file contains one array without a name
            held = archive.files if isinstance(archive, np.lib.npyio.NpzFile) else []
            names = next((pair for pair in NPZ_NAMES[split] if set(pair) <= set(held)), None)
            if names is None:
                pairs = " or ".join(" and ".join(pair) for pair in NPZ_NAMES[split])
                pixels, labels = NPZ_NAMES[split][0]
                raise DataError(
                    "missing-column",
                    f"the file must contain the arrays {pairs}, but contains "
                    f"{', '.join(held) or 'no named arrays'}",
                    place=(str(path),),
                    hint=f"save it with numpy.savez(path, {pixels}=…, {labels}=…)",
                )
            pixels = archive[names[0]]
            labels = archive[names[1]]
    except DataError:
        raise
    except Exception as error:
        # numpy raises errors of zipfile, decompressors, parsers and its own: all mean the same here
        what = str(error) or type(error).__name__
        raise DataError(
            "unreadable-file",
            f"the file cannot be read as .npz: {what}",
            place=(str(path),),
            hint="check the path, or save the file again",
        ) from error
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            "wrong-type",
            f"labels have the type {labels.dtype}, but must be integers",
            place=(str(path), "labels"),
            hint="save class numbers instead of one-hot rows or names",
        )
    return Images(pixels, labels.astype(np.int64), _scale_of(pixels, str(path)), str(path))


def _hub(reference: str, split: Split) -> Images:
    hint = "or, for MNIST, set HGMS_DATA to a folder that contains mnist/ with the IDX files"
    user = f"the image set {reference!r}"
    datasets = optional_module("datasets", user, "hub", place=("dataset",), hint=hint)
    name, _, revision = reference.partition("@")
    where = f"hub:{reference}"
    try:
        rows = datasets.load_dataset(name, split=split, revision=revision or None)
    except Exception as error:
        # The library raises its own errors and errors of requests, httpx and pyarrow: all mean the
        # same here.
        raise DataError(
            "cannot-download",
            f"the Hub does not provide the image set: {type(error).__name__}: {error}",
            place=(where,),
            hint="check the name, the revision and the network, or use local files: idx:FOLDER or "
            "npz:FILE",
        ) from error
    columns = {}
    for kind in ("Image", "ClassLabel"):
        columns[kind] = next(
            (name for name, feature in rows.features.items() if type(feature).__name__ == kind),
            None,
        )
        if columns[kind] is None:
            raise DataError(
                "missing-column",
                f"the columns {', '.join(rows.features)} include none of type {kind}",
                place=(where,),
                hint="choose an image classification set, or save its arrays and use npz:FILE",
            )
    table = rows.with_format("numpy")[:]
    shapes = {np.shape(image) for image in table[columns["Image"]]}
    if len(shapes) != 1:
        raise DataError(
            "wrong-shape",
            f"the images have {len(shapes)} different shapes, but must have one",
            place=(where,),
            hint="resize them, and use npz:FILE",
        )
    pixels = np.stack([np.asarray(image) for image in table[columns["Image"]]])
    return Images(
        pixels, np.asarray(table[columns["ClassLabel"]], np.int64), _scale_of(pixels, where), where
    )


def _scale_of(pixels: np.ndarray, where: str) -> float:
    if pixels.dtype.kind == "f" and (count := int((~np.isfinite(pixels)).sum())):
        raise DataError(
            "not-finite",
            f"pixels are NaN or infinite (number of such values: {count})",
            place=(where, "pixels"),
            hint="replace them, or remove the images",
        )
    if pixels.dtype == np.uint8:
        return 255.0
    if (
        pixels.dtype in (np.float16, np.float32, np.float64)
        and pixels.size
        and pixels.min() >= 0
        and pixels.max() <= 1
    ):
        return 1.0
    raise DataError(
        "wrong-type",
        f"pixels have the type {pixels.dtype}, but must be uint8, or floating-point in [0, 1]",
        place=(where, "pixels"),
        hint="convert them, and use npz:FILE",
    )
