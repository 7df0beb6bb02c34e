"""Labelled images by name: the files that are read, and what is wrong with them."""

from __future__ import annotations

import gzip
import io
import os
import struct
import sys
import tracemalloc
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.helpers import rejects

import hgms_core
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.images import load_images
from hgms_core import ConfigError, DataError, MissingExtra

IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"
GREY = np.random.default_rng(1).integers(0, 256, (40, 3, 2), np.uint8)


def idx(magic: int, sizes: list[int], content: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + content


PIXELS = idx(0x803, [40, 3, 2], GREY.tobytes())
CLASSES = bytes(i % 10 for i in range(40))


def idx_folder(folder: Path, ending: str = "", split: str = "train") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if ending else bytes
    for name, content in ((IMAGES, PIXELS), (LABELS, idx(0x801, [40], CLASSES))):
        (folder / f"{name.replace('train', split)}{ending}").write_bytes(pack(content))
    return folder


def problem_of(dataset: str, **fields: object) -> hgms_core.Problem:
    usual = {"train_size": 20, "validation_size": 10, "test_size": 10}
    task = HyperCleaning(dataset=dataset, **(usual | fields))
    return task.problem(0, torch.device("cpu"), torch.float64)


@pytest.mark.extended
@pytest.mark.skipif("HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no MNIST files")
def test_mnist_is_read_whole() -> None:
    images = load_images("mnist")
    assert images.pixels.shape == (60000, 28, 28)
    counts = np.bincount(images.labels).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_plain_and_compressed_from_a_folder_and_from_hgms_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    folder = idx_folder(tmp_path / "mnist", ending)
    monkeypatch.setenv("HGMS_DATA", str(tmp_path))
    for dataset in (f"idx:{folder}", "mnist"):
        images = load_images(dataset)
        assert (images.pixels == GREY).all()
        assert images.labels.tolist() == list(CLASSES)
    pixels = problem_of("mnist").lower_data.whole["pixels"]
    assert pixels.shape == (20, 6)
    assert {round(255 * value) for value in pixels.flatten().tolist()} <= {*GREY.flatten().tolist()}


def test_a_folder_without_the_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HGMS_DATA", str(tmp_path))
    with rejects("missing-file", str(tmp_path / "mnist"), of=DataError):
        load_images("mnist")
    (idx_folder(tmp_path / "half") / LABELS).unlink()
    with rejects("missing-file", str(tmp_path / "half"), of=DataError):
        load_images(f"idx:{tmp_path / 'half'}")


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        (f"{IMAGES}.gz", gzip.compress(PIXELS)[:5], "damaged-file"),
        (f"{IMAGES}.gz", gzip.compress(PIXELS)[:60], "damaged-file"),
        (f"{IMAGES}.gz", gzip.compress(PIXELS)[:-4], "damaged-file"),
        (f"{LABELS}.gz", b"<html>not found</html>", "damaged-file"),
        (IMAGES, idx(0x801, [40], CLASSES + bytes(20)), "wrong-format"),
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
    """64 MB of zeros in 64 kB behind a sound header: what is kept of them is less than a tenth."""
    path = idx_folder(tmp_path, ".gz") / f"{IMAGES}.gz"
    path.write_bytes(gzip.compress(idx(0x803, [40, 2, 3], bytes(1 << 26)), 1))
    tracemalloc.start()
    with rejects("damaged-file", str(path), of=DataError):
        load_images(f"idx:{tmp_path}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 22


@pytest.mark.parametrize(
    ("labels", "fields", "code", "place", "of"),
    [
        (CLASSES[:39], {}, "wrong-shape", ("labels",), DataError),
        (bytes([12, *CLASSES[1:]]), {}, "out-of-range", ("labels",), DataError),
        (CLASSES, {"validation_size": 11}, "too-few-rows", (), DataError),
        (
            CLASSES,
            {"validation_size": 2, "validation_split": (0.9, 0.05, 0.05)},
            "no-rows-for-role",
            None,
            ConfigError,
        ),
    ],
)
def test_rows_that_do_not_fit_are_located(
    tmp_path: Path, labels: bytes, fields: dict[str, object], code: str, place: object, of: type
) -> None:
    (idx_folder(tmp_path) / LABELS).write_bytes(idx(0x801, [len(labels)], labels))
    where = ("validation_split",) if place is None else (str(tmp_path), *place)
    with rejects(code, *where, of=of):
        problem_of(f"idx:{tmp_path}", **fields)


def test_a_label_is_allowed_where_there_are_so_many_classes(tmp_path: Path) -> None:
    (idx_folder(tmp_path) / LABELS).write_bytes(idx(0x801, [40], bytes([12, *CLASSES[1:]])))
    assert problem_of(f"idx:{tmp_path}", classes=13).x0["output.bias"].shape == (13,)


def test_npz_files_are_read_under_both_pairs_of_names_and_both_pixel_types(tmp_path: Path) -> None:
    labels = np.frombuffer(CLASSES, np.uint8)
    np.savez(tmp_path / "a.npz", images=GREY, labels=labels)
    names = {"x_train": GREY / 255, "y_train": labels, "x_test": GREY, "y_test": labels}
    np.savez_compressed(tmp_path / "b.npz", **names)
    first, second = (problem_of(f"npz:{tmp_path / name}.npz").lower_data.whole for name in "ab")
    assert torch.allclose(first["pixels"], second["pixels"], atol=1e-15)
    assert torch.equal(first["label"], second["label"])


@pytest.mark.parametrize(
    ("arrays", "code", "column"),
    [
        ({"data": np.zeros(3)}, "missing-column", ""),
        ({"images": np.zeros((3, 2)), "labels": np.eye(3)}, "wrong-type", "labels"),
        ({"images": np.full((3, 2), 7.0), "labels": np.arange(3)}, "wrong-type", "pixels"),
        (
            {"images": np.zeros((3, 2), np.uint8), "labels": np.eye(3, dtype=int)},
            "wrong-shape",
            "labels",
        ),
        (
            {"images": np.array([None, 1], dtype=object), "labels": np.arange(2)},
            "unreadable-file",
            "",
        ),
        ({"images": np.uint8(3), "labels": np.arange(2)}, "wrong-shape", "pixels"),
        ({"images": np.zeros((3, 0), np.uint8), "labels": np.arange(3)}, "wrong-shape", "pixels"),
        ({"images": np.zeros((3, 2), ">f4"), "labels": np.arange(3)}, "wrong-type", "pixels"),
        (
            {"images": np.zeros((3, 2), np.longdouble), "labels": np.arange(3)},
            "wrong-type",
            "pixels",
        ),
        ({"images": np.array([[0.5, np.nan]]), "labels": np.arange(1)}, "not-finite", "pixels"),
        ({"images": np.array([[0.5, np.inf]]), "labels": np.arange(1)}, "not-finite", "pixels"),
    ],
)
def test_an_npz_file_with_other_contents_is_explained(
    tmp_path: Path, arrays: dict[str, np.ndarray], code: str, column: str
) -> None:
    path = tmp_path / "odd.npz"
    np.savez(path, **arrays)
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
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"no zip",
        lambda whole: whole[:70] + b"\xff" * 20 + whole[90:],
        locked,
        lambda whole: promise(810_000_000_000_000),
    ],
)
def test_a_damaged_npz_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "cut.npz"
    np.savez(path, images=np.zeros((9, 4), np.uint8), labels=np.arange(9))
    path.write_bytes(damage(path.read_bytes()))
    with rejects("unreadable-file", str(path), of=DataError):
        load_images(f"npz:{path}")


def test_a_missing_or_misnamed_npz_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with rejects("unreadable-file", str(path), of=DataError):
        load_images(f"npz:{path}")
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with rejects("missing-column", str(path), of=DataError):
        load_images(f"npz:{path}")


def test_test_splits_are_read_where_a_set_has_one(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    labels = np.arange(40) % 10
    np.savez(path, x_train=GREY, y_train=labels, x_test=GREY[:7] // 2, y_test=labels[:7])
    assert (load_images(f"npz:{path}", "test").pixels == GREY[:7] // 2).all()
    assert problem_of(f"npz:{path}", test_size=0, train_size=30).lower_data.size == 30
    assert len(load_images(f"idx:{idx_folder(tmp_path, split='t10k')}", "test").pixels) == 40
    np.savez(path, images=GREY, labels=labels)
    lacking = [
        (f"npz:{path}", "missing-column", str(path)),
        (f"idx:{idx_folder(tmp_path / 'idx')}", "missing-file", str(tmp_path / "idx")),
        ("digits", "not-supported", "test_size"),
    ]
    for dataset, code, place in lacking:
        with rejects(code, place, of=DataError):
            load_images(dataset, "test")


# --- optional packages
# --------------------------------------------------------------------------------------------------


class Image:
    """Stands for datasets.Image: columns are recognised by their feature's type."""


class ClassLabel:
    """Stands for datasets.ClassLabel."""


class FakeRows:
    def __init__(self, **columns: tuple[object, object]) -> None:
        """Columns with their features."""
        self.features = {name: feature for name, (_, feature) in columns.items()}
        self.table = {name: values for name, (values, _) in columns.items()}

    def with_format(self, kind: str) -> FakeRows:
        assert kind == "numpy"
        return self

    def __getitem__(self, index: slice) -> dict[str, object]:
        assert index == slice(None)
        return self.table


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for the `datasets` module that remembers what was asked of it."""
    stand = types.SimpleNamespace(asked=[], answer=None)

    def load_dataset(name: str, *, split: str, revision: str | None) -> FakeRows:
        stand.asked.append((name, split, revision))
        if isinstance(stand.answer, Exception):
            raise stand.answer
        return stand.answer

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return stand


def test_mnist_comes_from_the_hub_at_a_pinned_revision_where_hgms_data_is_not_set(
    hub: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HGMS_DATA", raising=False)
    hub.answer = FakeRows(image=(GREY, Image()), label=(np.arange(40) % 10, ClassLabel()))
    images = load_images("mnist")
    assert hub.asked == [("ylecun/mnist", "train", "77f3279092a1c1579b2250db8eafed0ad422088c")]
    assert (images.pixels == GREY).all()
    assert (images.scale, images.labels.tolist()) == (255.0, list(CLASSES))


def test_any_image_set_of_the_hub_is_mapped_by_its_features(hub: types.SimpleNamespace) -> None:
    fine = (np.arange(40) % 7, ClassLabel())
    hub.answer = FakeRows(id=(np.arange(40), object()), fine=fine, img=(list(GREY), Image()))
    assert problem_of("hub:someone/pictures@v2").lower_data.whole["pixels"].shape == (20, 6)
    load_images("hub:someone/pictures")
    assert hub.asked == [("someone/pictures", "train", revision) for revision in ("v2", None)]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (ConnectionError("no route"), "cannot-download"),
        (FakeRows(text=((), object())), "missing-column"),
        (FakeRows(image=((), Image()), text=((), object())), "missing-column"),
        (
            FakeRows(image=([GREY[0], GREY[0][:1]], Image()), label=(np.arange(2), ClassLabel())),
            "wrong-shape",
        ),
    ],
)
def test_what_the_hub_cannot_give_is_explained(
    hub: types.SimpleNamespace, answer: object, code: str
) -> None:
    hub.answer = answer
    with rejects(code, "hub:a/b", of=DataError):
        load_images("hub:a/b")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("mnist", "datasets", "hub"), ("digits", "sklearn.datasets", "sklearn")],
)
def test_a_missing_extra_names_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    monkeypatch.delenv("HGMS_DATA", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with rejects("missing-package", "dataset", of=MissingExtra) as caught:
        load_images(name)
    assert caught.value.install == f"pip install 'hgms[{extra}]'"
