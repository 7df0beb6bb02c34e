"""Reads IDX files, the format of MNIST: a big-endian header (magic number, sizes) and the bytes.
Plain or gzip-compressed.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from hgms_core import DataError

IMAGES = 0x00000803
LABELS = 0x00000801
"""Magic numbers: unsigned bytes (08) along 3 axes (images, rows, columns), or along 1 (labels)."""

KIND = {IMAGES: "an IDX file of images", LABELS: "an IDX file of labels"}

PIECE = 1 << 20
"""Bytes that are read at once: what a header promises is not reserved before it is there."""


def read_idx(path: Path, magic: int) -> np.ndarray:
    """The array in ``path``, whose magic number must be ``magic``. Raises DataError, naming the
    file, for anything else.

    No more is decompressed than the header promises.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            sizes = _sizes(path, stream.read(4 + 4 * (magic & 0xFF)), magic)
            expected = math.prod(sizes)  # Python's integers do not overflow
            content = bytearray()
            while len(content) <= expected and (
                piece := stream.read(min(PIECE, expected + 1 - len(content)))
            ):
                content += piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip stream is truncated or damaged ({error})\n  fetch the file again"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error})\n"
            "  check the path and its permissions"
        ) from error
    if len(content) != expected:
        held, what = (len(content), "truncated") if len(content) < expected else ("more", "damaged")
        raise DataError(
            f"{path}: the header promises {' × '.join(map(str, sizes))} = {expected} bytes, but "
            f"{held} follow it\n"
            f"  the file is {what}: fetch it again"
        )
    return np.frombuffer(content, np.uint8).reshape(sizes)


def _sizes(path: Path, header: bytes, magic: int) -> list[int]:
    """The sizes in the header, one per axis."""
    axes = magic & 0xFF
    if len(header) < 4 + 4 * axes:
        raise DataError(
            f"{path}: {len(header)} bytes are too few for {KIND[magic]} (its header alone takes "
            f"{4 + 4 * axes})\n"
            "  the file is truncated: fetch it again"
        )
    begin, *sizes = struct.unpack(f">{1 + axes}I", header)
    if begin != magic:
        swapped = KIND.get(begin)
        raise DataError(
            f"{path}: magic number 0x{begin:08x}, but {KIND[magic]} begins with 0x{magic:08x}\n  "
            + (
                f"this is {swapped}: the two files may have changed names"
                if swapped
                else "this is not an IDX file of bytes"
            )
        )
    if not all(sizes):
        shape = " × ".join(map(str, sizes))
        raise DataError(
            f"{path}: the header promises {shape} bytes, which is none\n  fetch the file again"
        )
    return sizes
