"""Labelled images by name: the files that are read, and what is wrong with them."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.helpers import rejects
from support.hub_tables import Hub, Rows

import hgms_core
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.images import load_images
from hgms_core.errors import DataError

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"
GREY = np.random.default_rng(1).integers(0, 256, (40, 3, 2), np.uint8)
CLASSES = np.arange(40, dtype=np.uint8) % 10


def idx(magic: int, sizes: list[int], content: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + content


PIXELS = idx(0x803, [40, 3, 2], GREY.tobytes())


def idx_folder(folder: Path, ending: str = "", split: str = "train") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if ending else bytes
    for name, content in ((IMAGES, PIXELS), (LABELS, idx(0x801, [40], CLASSES.tobytes()))):
        (folder / f"{name.replace('train', split)}{ending}").write_bytes(pack(content))
    return folder


def problem_of(dataset: str, **fields: object) -> hgms_core.Problem:
    sizes = {"train_size": 20, "validation_size": 10, "test_size": 10}
    task = HyperCleaning(dataset=dataset, **(sizes | fields))
    return task.problem(0, torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_plain_and_compressed_from_a_folder_and_from_hgms_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    folder = idx_folder(tmp_path / "mnist", ending)
    monkeypatch.setenv("HGMS_DATA", str(tmp_path))
    for dataset in (f"idx:{folder}", "mnist"):
        images = load_images(dataset)
        assert (images.pixels == GREY).all()
        assert (images.labels == CLASSES).all()
    pixels = problem_of("mnist").lower_data.whole["pixels"]
    assert pixels.shape == (20, 6)
    assert {round(255 * value) for value in pixels.flatten().tolist()} <= {*GREY.flatten().tolist()}


def test_npz_files_are_read_under_both_pairs_of_names_and_both_pixel_types(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=GREY, labels=CLASSES)
    names = {"x_train": GREY / 255, "y_train": CLASSES, "x_test": GREY, "y_test": CLASSES}
    np.savez_compressed(tmp_path / "b.npz", **names)
    first, second = (problem_of(f"npz:{tmp_path / name}.npz").lower_data.whole for name in "ab")
    assert torch.allclose(first["pixels"], second["pixels"], atol=1e-15)
    assert torch.equal(first["label"], second["label"])


@pytest.mark.parametrize(
    ("images", "labels", "code", "column"),
    [
        (None, np.zeros(3), "missing-column", None),
        (np.zeros((3, 2)), np.eye(3), "wrong-type", "labels"),
        (np.full((3, 2), 7.0), np.arange(3), "wrong-type", "pixels"),
        (np.zeros((3, 2), np.uint8), np.eye(3, dtype=int), "wrong-shape", "labels"),
        (np.array([None, 1], dtype=object), np.arange(2), "unreadable-file", None),
        (np.uint8(3), np.arange(2), "wrong-shape", "pixels"),
        (np.zeros((3, 0), np.uint8), np.arange(3), "wrong-shape", "pixels"),
        (np.zeros((3, 2), ">f4"), np.arange(3), "wrong-type", "pixels"),
        (np.zeros((3, 2), np.longdouble), np.arange(3), "wrong-type", "pixels"),
        (np.array([[0.5, np.nan]]), np.arange(1), "not-finite", "pixels"),
        (np.array([[0.5, np.inf]]), np.arange(1), "not-finite", "pixels"),
    ],
)
def test_an_npz_file_with_other_contents_is_explained(
    tmp_path: Path, images: object, labels: np.ndarray, code: str, column: str | None
) -> None:
    path = tmp_path / "odd.npz"
    np.savez(path, **({"images": images} if images is not None else {}), labels=labels)
    with rejects(code, str(path), *filter(None, [column]), of=DataError):
        load_images(f"npz:{path}")


def promise(size: int) -> bytes:
    """An archive of arrays that are said to have so many bytes, and have none."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size}, 1), }}".ljust(117) + "\n"
    array = np.lib.format.magic(1, 0) + struct.pack("<H", 118) + header.encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as stored:
        for name in ("images.npy", "labels.npy"):
            stored.writestr(name, array)
    return archive.getvalue()


def locked(whole: bytes) -> bytes:
    """The archive says that it is encrypted, as its entry in the directory does."""
    content = bytearray(whole)
    content[6] |= 1
    content[whole.index(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        None,  # no file at all
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"no zip",
        lambda whole: whole[:70] + b"\xff" * 20 + whole[90:],
        locked,
        lambda whole: promise(810_000_000_000_000),
    ],
)
def test_a_damaged_npz_file_is_named(
    tmp_path: Path, damage: Callable[[bytes], bytes] | None
) -> None:
    path = tmp_path / "cut.npz"
    if damage:
        np.savez(path, images=np.zeros((9, 4), np.uint8), labels=np.arange(9))
        path.write_bytes(damage(path.read_bytes()))
    with rejects("unreadable-file", str(path), of=DataError):
        load_images(f"npz:{path}")


# --- image sets of the Hub
# --------------------------------------------------------------------------------------------------


class Image:
    """Stands for datasets.Image: columns are recognised by their feature's type."""


class ClassLabel:
    """Stands for datasets.ClassLabel."""


def test_image_sets_of_the_hub_are_mapped_by_their_features_and_mnist_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HGMS_DATA", raising=False)
    fine = (CLASSES.astype(int), ClassLabel())
    rows = Rows(id=(np.arange(40), object()), fine=fine, img=(list(GREY), Image()))
    hub = Hub(monkeypatch, pictures=rows, mnist=rows)
    for dataset in ("hub:someone/pictures@v2", "hub:someone/pictures", "mnist"):
        images = load_images(dataset)
        assert (images.pixels == GREY).all()
        assert (images.scale, images.labels.tolist()) == (255.0, CLASSES.tolist())
    assert hub.asked == [
        ("someone/pictures", "train", "v2"),
        ("someone/pictures", "train", None),
        ("ylecun/mnist", "train", "77f3279092a1c1579b2250db8eafed0ad422088c"),
    ]


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        (None, "cannot-download"),
        ({"fine": ClassLabel}, "missing-column"),
        ({"img": Image}, "missing-column"),
        ({"img": Image, "fine": ClassLabel, "ragged": None}, "wrong-shape"),
    ],
)
def test_an_image_set_of_the_hub_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, rows: dict[str, type] | None, code: str
) -> None:
    images = [GREY[0], GREY[1, :2]] if rows and "ragged" in rows else list(GREY[:2])
    values = {"img": images, "fine": CLASSES[:2].astype(int), "ragged": [0, 0]}
    columns = {name: (values[name], (kind or object)()) for name, kind in (rows or {}).items()}
    Hub(monkeypatch, **({} if rows is None else {"pictures": Rows(**columns)}))
    with rejects(code, "hub:pictures", of=DataError):
        load_images("hub:pictures")


# --- IDX files and labels that are wrong
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        (IMAGES, None, "missing-file"),
        (LABELS, None, "missing-file"),
        (IMAGES, PIXELS[:10], "damaged-file"),
        (IMAGES, PIXELS[:-1], "damaged-file"),
        (IMAGES, PIXELS + b"0", "damaged-file"),
        (IMAGES, idx(0x801, [40], bytes(240)), "wrong-format"),
        (IMAGES, idx(0x80D, [40, 3, 2], bytes(240)), "wrong-format"),
        (LABELS, idx(0x801, [0], b""), "damaged-file"),
        (f"{IMAGES}.gz", gzip.compress(PIXELS, mtime=0)[:-9], "unreadable-file"),
        (f"{IMAGES}.gz", b"no gzip stream", "unreadable-file"),
        (f"{IMAGES}.gz", gzip.compress(PIXELS, mtime=0)[:12] + b"\xff" * 30, "unreadable-file"),
    ],
)
def test_an_idx_file_that_is_not_whole_is_named(
    tmp_path: Path, name: str, content: bytes | None, code: str
) -> None:
    path = idx_folder(tmp_path) / name
    (tmp_path / name.removesuffix(".gz")).unlink()
    if content is not None:
        path.write_bytes(content)
    with rejects(code, str(path if content is not None else tmp_path), of=DataError):
        load_images(f"idx:{tmp_path}")
