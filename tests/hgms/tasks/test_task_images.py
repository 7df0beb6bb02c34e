"""Labelled images by name: the files that are read, and what is wrong with them."""

from __future__ import annotations

import gzip
import io
import struct
import tracemalloc
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
from hgms_core import DataError

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


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        (f"{IMAGES}.gz", gzip.compress(PIXELS)[:5], "damaged-file"),
        (f"{IMAGES}.gz", gzip.compress(PIXELS)[:60], "damaged-file"),
        (f"{IMAGES}.gz", gzip.compress(PIXELS)[:-4], "damaged-file"),
        (f"{LABELS}.gz", b"<html>not found</html>", "damaged-file"),
        (IMAGES, idx(0x801, [40], bytes(60)), "wrong-format"),
        (IMAGES, b"P5 28 28" + PIXELS, "wrong-format"),
        (IMAGES, PIXELS[:-7], "damaged-file"),
        (IMAGES, PIXELS + bytes(3), "damaged-file"),
        # 2³² · 2³¹ · 2 is 0 in 64 bits: an empty file would do
        (IMAGES, idx(0x803, [1 << 31, 1 << 31, 4], b""), "damaged-file"),
        (f"{IMAGES}.gz", gzip.compress(idx(0x803, [1 << 31, 1 << 31, 4], b"")), "damaged-file"),
        (IMAGES, idx(0x803, [40, 0, 3], b""), "no-rows"),
        (LABELS, b"\0\0", "damaged-file"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path: Path, file: str, content: bytes, code: str) -> None:
    path = idx_folder(tmp_path, ".gz" if file.endswith(".gz") else "") / file
    path.write_bytes(content)
    with rejects(code, str(path), of=DataError):
        load_images(f"idx:{tmp_path}")


def test_no_more_is_decompressed_than_the_header_promises(tmp_path: Path) -> None:
    """16 MB of zeros in 16 kB behind a sound header: what is kept of them is less than a
    quarter.
    """
    path = idx_folder(tmp_path, ".gz") / f"{IMAGES}.gz"
    path.write_bytes(gzip.compress(idx(0x803, [40, 2, 3], bytes(1 << 24)), 1))
    tracemalloc.start()
    with rejects("damaged-file", str(path), of=DataError):
        load_images(f"idx:{tmp_path}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 22


@pytest.mark.parametrize(
    ("labels", "fields", "code", "place"),
    [
        (CLASSES[:39], {}, "wrong-shape", ("labels",)),
        (np.array([12, *CLASSES[1:]], np.uint8), {}, "out-of-range", ("labels",)),
        (CLASSES, {"validation_size": 11}, "too-few-rows", ()),
    ],
)
def test_rows_that_do_not_fit_are_located(
    tmp_path: Path, labels: np.ndarray, fields: dict[str, object], code: str, place: tuple[str, ...]
) -> None:
    (idx_folder(tmp_path) / LABELS).write_bytes(idx(0x801, [len(labels)], labels.tobytes()))
    with rejects(code, str(tmp_path), *place, of=DataError):
        problem_of(f"idx:{tmp_path}", **fields)
    if code == "out-of-range":  # a label is allowed where there are so many classes
        assert problem_of(f"idx:{tmp_path}", classes=13).x0["output.bias"].shape == (13,)


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


def test_test_splits_are_read_where_a_set_has_one(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    test = {"x_test": GREY[:7] // 2, "y_test": CLASSES[:7]}
    np.savez(path, x_train=GREY, y_train=CLASSES, **test)
    assert (load_images(f"npz:{path}", "test").pixels == GREY[:7] // 2).all()
    assert problem_of(f"npz:{path}", test_size=0, train_size=30).lower_data.size == 30
    assert len(load_images(f"idx:{idx_folder(tmp_path, split='t10k')}", "test").pixels) == 40


def test_what_a_set_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HGMS_DATA", str(tmp_path))
    path, folder, half = (tmp_path / name for name in ("a.npz", "idx", "half"))
    np.savez(path, images=GREY, labels=CLASSES)
    (idx_folder(half) / LABELS).unlink()
    for dataset, split, code, place in (
        (f"npz:{path}", "test", "missing-column", str(path)),
        (f"idx:{idx_folder(folder)}", "test", "missing-file", str(folder)),
        ("digits", "test", "not-supported", "test_size"),
        (f"idx:{half}", "train", "missing-file", str(half)),
        ("mnist", "train", "missing-file", str(tmp_path / "mnist")),
    ):
        with rejects(code, place, of=DataError):
            load_images(dataset, split)


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
    ("columns", "code"),
    [
        (None, "cannot-download"),
        ({"text": ((), object())}, "missing-column"),
        ({"image": ((), Image()), "text": ((), object())}, "missing-column"),
        (
            {"image": ([GREY[0], GREY[0][:1]], Image()), "label": (np.arange(2), ClassLabel())},
            "wrong-shape",
        ),
    ],
)
def test_what_the_hub_cannot_give_is_explained(
    columns: dict[str, tuple[object, object]] | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(monkeypatch, **{"b": Rows(**columns)} if columns else {})
    with rejects(code, "hub:a/b", of=DataError):
        load_images("hub:a/b")
