"""Labelled images by name: embedded digits, MNIST, a folder of IDX files, an .npz file, or an image set from the Hub."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
from attrs import frozen

from hgms_core import DataError, MissingExtra
from hgms_task_cleaning.idx import IMAGES, LABELS, read_idx

FORMS = "digits, mnist, idx:FOLDER, npz:FILE or hub:NAME[@REVISION]"

MNIST_HUB = "ylecun/mnist@77f3279092a1c1579b2250db8eafed0ad422088c"
"""Where MNIST comes from when HGMS_DATA is not set: this revision, so that it cannot change under a benchmark."""

IDX_FILES = {IMAGES: "train-images-idx3-ubyte", LABELS: "train-labels-idx1-ubyte"}

NPZ_NAMES = (("images", "labels"), ("x_train", "y_train"))


@frozen(eq=False)
class Images:
    """n images as stored (``pixels / scale`` is in [0, 1]), their labels, and where they come from."""

    pixels: np.ndarray
    labels: np.ndarray
    scale: float
    where: str

    def __attrs_post_init__(self) -> None:
        if self.labels.ndim != 1 or len(self.pixels) != len(self.labels):
            raise DataError(
                f"{self.where}: {len(self.pixels)} images, but labels of shape {self.labels.shape}\n"
                "  each image needs exactly one label: the two do not belong together"
            )

    def check_labels(self, classes: int) -> None:
        """DataError unless every label is one of 0 … classes − 1."""
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= classes))
        if len(wrong):
            first = wrong[0]
            raise DataError(
                f"{self.where}: label {self.labels[first]} of image {first} is not one of 0 … {classes - 1} "
                f"({len(wrong)} such labels)\n  set `classes`, or check that these are the labels"
            )


def is_known_form(dataset: str) -> bool:
    kind, _, rest = dataset.partition(":")
    return dataset in ("digits", "mnist") or (kind in ("idx", "npz", "hub") and bool(rest))


def load_images(dataset: str) -> Images:
    """The images that ``dataset`` (one of :data:`FORMS`) names: its *training* split, where it has several."""
    kind, _, rest = dataset.partition(":")
    if kind == "digits":
        return _digits()
    if kind == "idx":
        return _idx_folder(Path(rest).expanduser())
    if kind == "npz":
        return _npz(Path(rest).expanduser())
    if kind == "hub":
        return _hub(rest)
    root = os.environ.get("HGMS_DATA")
    return _idx_folder(Path(root).expanduser() / "mnist") if root else _hub(MNIST_HUB)


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra(
            "the embedded digits need scikit-learn, which is not installed\n  pip install 'hgms[sklearn]'"
        ) from error
    digits = load_digits()
    return Images(digits.data.astype(np.uint8), digits.target.astype(np.int64), 16.0, "scikit-learn's digits")


def _idx_folder(folder: Path) -> Images:
    found = {}
    for magic, name in IDX_FILES.items():
        choices = [folder / name, folder / f"{name}.gz"]
        present = [path for path in choices if path.is_file()]
        if not present:
            raise DataError(
                f"{folder}: no {' or '.join(path.name for path in choices)}"
                + ("" if folder.is_dir() else " (there is no such folder)")
                + f"\n  looked for: {', '.join(f'{each}[.gz]' for each in IDX_FILES.values())}\n"
                "  put them there, set HGMS_DATA to the folder that holds mnist/, name another folder with idx:FOLDER,\n"
                f"  or download MNIST with dataset = 'hub:{MNIST_HUB}' (pip install 'hgms[hub]')"
            )
        found[magic] = read_idx(present[0], magic)
    return Images(found[IMAGES], found[LABELS].astype(np.int64), 255.0, str(folder))


def _npz(path: Path) -> Images:
    try:
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            held = getattr(archive, "files", [])  # an .npy file holds one array without a name
            names = next((pair for pair in NPZ_NAMES if set(pair) <= set(held)), None)
            if names is None:
                raise DataError(
                    f"{path}: holds {', '.join(held) or 'no named arrays'}, but needs "
                    + " or ".join(" and ".join(pair) for pair in NPZ_NAMES)
                    + "\n  save it with numpy.savez(path, images=…, labels=…)"
                )
            pixels, labels = archive[names[0]], archive[names[1]]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read as an .npz file ({error})\n  check the path, or save the file again"
        ) from error
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{path}: labels are {labels.dtype}, expected integers\n  save class numbers, not one-hot rows or names"
        )
    return Images(pixels, labels.astype(np.int64), _scale_of(pixels, str(path)), str(path))


def _hub(reference: str) -> Images:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            f"the image set {reference} comes from the Hub through `datasets`, which is not installed\n"
            "  pip install 'hgms[hub]', or (for MNIST) set HGMS_DATA to a folder that holds mnist/ with the IDX files"
        ) from error
    name, _, revision = reference.partition("@")
    where = f"hub:{reference}"
    try:
        rows = datasets.load_dataset(name, split="train", revision=revision or None)
    except Exception as error:  # the library raises its own, requests', httpx' and pyarrow's errors: all mean the same here
        raise DataError(
            f"{where}: could not be loaded from the Hub ({type(error).__name__}: {error})\n"
            "  check the name, the revision and the network, or use local files: idx:FOLDER or npz:FILE"
        ) from error
    columns = {}
    for kind in ("Image", "ClassLabel"):
        columns[kind] = next((name for name, feature in rows.features.items() if type(feature).__name__ == kind), None)
        if columns[kind] is None:
            raise DataError(
                f"{where}: no column of type {kind} (columns: {', '.join(rows.features)})\n"
                "  choose an image classification set, or save its arrays and use npz:FILE"
            )
    table = rows.with_format("numpy")[:]
    shapes = {np.shape(image) for image in table[columns["Image"]]}
    if len(shapes) != 1:
        raise DataError(f"{where}: images of {len(shapes)} shapes, expected one\n  resize them and use npz:FILE")
    pixels = np.stack([np.asarray(image) for image in table[columns["Image"]]])
    return Images(pixels, np.asarray(table[columns["ClassLabel"]], np.int64), _scale_of(pixels, where), where)


def _scale_of(pixels: np.ndarray, where: str) -> float:
    if pixels.dtype == np.uint8:
        return 255.0
    if np.issubdtype(pixels.dtype, np.floating) and pixels.size and pixels.min() >= 0 and pixels.max() <= 1:
        return 1.0
    raise DataError(
        f"{where}: pixels are {pixels.dtype}, expected uint8, or floating point in [0, 1]\n  convert them, and use npz:FILE"
    )
