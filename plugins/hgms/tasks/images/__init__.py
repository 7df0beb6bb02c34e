"""Labelled images by name: embedded digits, MNIST, a folder of IDX files, an .npz file, or an image
set from the Hub.

Shared by the tasks on images. Nothing beyond numpy is imported before a set that needs it is
loaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from attrs import Attribute, frozen
from torch import Tensor

from hgms.tasks.images.idx import IMAGES, LABELS, read_idx
from hgms_core import DataError, MissingExtra, Tree

FORMS = "digits, mnist, idx:FOLDER, npz:FILE or hub:NAME[@REVISION]"

MNIST_HUB = "ylecun/mnist@77f3279092a1c1579b2250db8eafed0ad422088c"
"""Where MNIST comes from when HGMS_DATA is not set: this revision, so that it cannot change
under a benchmark.
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
                f"{self.where}: pixels of shape {self.pixels.shape}, but images × height × width "
                "is needed\n"
                "  save the images in that shape"
            )
        if self.labels.ndim != 1 or len(self.pixels) != len(self.labels):
            raise DataError(
                f"{self.where}: {len(self.pixels)} images, but labels of shape "
                f"{self.labels.shape}\n"
                "  each image needs exactly one label: the two do not belong together"
            )

    def tensors(self, rows: Tensor, device: torch.device, dtype: torch.dtype) -> Tree:
        """The asked rows as ``pixels`` in [0, 1], of the images' own shape, and ``label``."""
        # Bytes go to the device, and become floats there.
        pixels = torch.from_numpy(self.pixels[rows.numpy()]).to(device).to(dtype)
        return {
            "pixels": pixels.div_(self.scale),
            "label": torch.from_numpy(self.labels[rows.numpy()]).to(device),
        }

    def check_labels(self, classes: int) -> Images:
        """Itself; DataError unless every label is one of 0 … classes − 1."""
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= classes))
        if len(wrong):
            first = wrong[0]
            raise DataError(
                f"{self.where}: label {self.labels[first]} of image {first} is not one of 0 … "
                f"{classes - 1} "
                f"({len(wrong)} such labels)\n  set `classes`, or check that these are the labels"
            )
        return self


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Of every row. A gather, because the rule of F.cross_entropy under vmap takes twice as many
    operations.
    """
    return -logits.log_softmax(-1).gather(-1, label.unsqueeze(-1)).squeeze(-1)


def image_set(instance: object, attribute: Attribute[str], value: str) -> None:
    """The attrs validator of a field that names an image set."""
    kind, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if value not in ("digits", "mnist") and not (kind in ("idx", "npz", "hub") and rest):
        raise ValueError(f"{attribute.name!r} must be {FORMS}: {value!r}")


def load_images(dataset: str, split: Split = "train") -> Images:
    """The images that ``dataset`` (one of :data:`FORMS`) names: its training split, or its test
    split where it has one.

    Raises DataError for files that are missing or damaged, and for the test split of the digits,
    which have none; MissingExtra where scikit-learn or datasets is needed and not installed.

    >>> images = load_images("digits")
    >>> images.pixels.shape, images.scale, len(images.labels)
    ((1797, 8, 8), 16.0, 1797)
    """
    kind, _, rest = dataset.partition(":")
    if kind == "digits":
        return _digits(split)
    if kind == "idx":
        return _idx_folder(Path(rest).expanduser(), split)
    if kind == "npz":
        return _npz(Path(rest).expanduser(), split)
    if kind == "hub":
        return _hub(rest, split)
    root = os.environ.get("HGMS_DATA")
    return _idx_folder(Path(root).expanduser() / "mnist", split) if root else _hub(MNIST_HUB, split)


def _digits(split: Split) -> Images:
    if split == "test":
        raise DataError(
            "scikit-learn's digits have no test split of their own\n  set `test_size` to draw one"
        )
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra(
            "the embedded digits need scikit-learn, which is not installed\n"
            "  pip install 'hgms[sklearn]'"
        ) from error
    digits = load_digits()
    return Images(
        digits.images.astype(np.uint8),
        digits.target.astype(np.int64),
        16.0,
        "scikit-learn's digits",
    )


def _idx_folder(folder: Path, split: Split) -> Images:
    arrays = {}
    for magic, name in IDX_FILES[split].items():
        choices = [folder / name, folder / f"{name}.gz"]
        present = [path for path in choices if path.is_file()]
        if not present:
            raise DataError(
                f"{folder}: no {' or '.join(path.name for path in choices)}"
                + ("" if folder.is_dir() else " (there is no such folder)")
                + "\n  looked for: "
                f"{', '.join(f'{file}[.gz]' for file in IDX_FILES[split].values())}\n"
                "  put them there, set HGMS_DATA to the folder that holds mnist/, name another "
                "folder with idx:FOLDER,\n"
                f"  or download MNIST with dataset = 'hub:{MNIST_HUB}' (pip install 'hgms[hub]')"
            )
        arrays[magic] = read_idx(present[0], magic)
    return Images(arrays[IMAGES], arrays[LABELS].astype(np.int64), 255.0, str(folder))


def _npz(path: Path, split: Split) -> Images:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device has no end
            raise OSError("it is not a file")
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            held = getattr(archive, "files", [])  # an .npy file holds one array without a name
            names = next((pair for pair in NPZ_NAMES[split] if set(pair) <= set(held)), None)
            if names is None:
                raise DataError(
                    f"{path}: holds {', '.join(held) or 'no named arrays'}, but needs "
                    + " or ".join(" and ".join(pair) for pair in NPZ_NAMES[split])
                    + (
                        f"\n  save it with numpy.savez(path, {NPZ_NAMES[split][0][0]}=…, "
                        f"{NPZ_NAMES[split][0][1]}=…)"
                    )
                )
            pixels = archive[names[0]]
            labels = archive[names[1]]
    except DataError:
        raise
    except Exception as error:
        # numpy passes on zipfile's, the decompressors', a parser's and its own: all mean the same
        what = str(error) or type(error).__name__
        raise DataError(
            f"{path}: cannot be read as an .npz file ({what})\n"
            "  check the path, or save the file again"
        ) from error
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{path}: labels are {labels.dtype}, expected integers\n"
            "  save class numbers, not one-hot rows or names"
        )
    return Images(pixels, labels.astype(np.int64), _scale_of(pixels, str(path)), str(path))


def _hub(reference: str, split: Split) -> Images:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            f"the image set {reference} comes from the Hub through `datasets`, which is not "
            "installed\n"
            "  pip install 'hgms[hub]', or (for MNIST) set HGMS_DATA to a folder that holds "
            "mnist/ with the IDX files"
        ) from error
    name, _, revision = reference.partition("@")
    where = f"hub:{reference}"
    try:
        rows = datasets.load_dataset(name, split=split, revision=revision or None)
    except Exception as error:
        # the library raises its own, requests', httpx' and pyarrow's errors: all mean the same here
        raise DataError(
            f"{where}: could not be loaded from the Hub ({type(error).__name__}: {error})\n"
            "  check the name, the revision and the network, or use local files: idx:FOLDER or "
            "npz:FILE"
        ) from error
    columns = {}
    for kind in ("Image", "ClassLabel"):
        columns[kind] = next(
            (name for name, feature in rows.features.items() if type(feature).__name__ == kind),
            None,
        )
        if columns[kind] is None:
            raise DataError(
                f"{where}: no column of type {kind} (columns: {', '.join(rows.features)})\n"
                "  choose an image classification set, or save its arrays and use npz:FILE"
            )
    table = rows.with_format("numpy")[:]
    shapes = {np.shape(image) for image in table[columns["Image"]]}
    if len(shapes) != 1:
        raise DataError(
            f"{where}: images of {len(shapes)} shapes, expected one\n  resize them and use npz:FILE"
        )
    pixels = np.stack([np.asarray(image) for image in table[columns["Image"]]])
    return Images(
        pixels, np.asarray(table[columns["ClassLabel"]], np.int64), _scale_of(pixels, where), where
    )


def _scale_of(pixels: np.ndarray, where: str) -> float:
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
        f"{where}: pixels are {pixels.dtype}, expected uint8, or floating point in [0, 1]\n"
        "  convert them, and use npz:FILE"
    )
