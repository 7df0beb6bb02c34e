"""Read IDX files, the format of MNIST: a big-endian header (magic number, sizes) and bytes.

The files are plain or gzip-compressed.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from hgms_core.errors import DataError

IMAGES = 0x00000803
LABELS = 0x00000801
"""Magic numbers: unsigned bytes (08) along 3 axes (images, rows, columns), or along 1 (labels)."""

KIND = {IMAGES: "an IDX file of images", LABELS: "an IDX file of labels"}

PIECE = 1 << 20
"""Bytes per read: memory is allocated only for data that exist, not for sizes in the header."""


def read_idx(path: Path, magic: int) -> np.ndarray:
    """Return the array in ``path``, which must start with the number ``magic``.

    Errors: DataError for any other content; the place is the file.

    At most the number of bytes in the header is decompressed.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            sizes = _sizes(path, stream.read(4 + 4 * (magic & 0xFF)), magic)
            expected = math.prod(sizes)  # Python integers do not overflow
            content = bytearray()
            while len(content) <= expected and (
                piece := stream.read(min(PIECE, expected + 1 - len(content)))
            ):
                content += piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            "damaged-file",
            f"the gzip stream is truncated or damaged: {error}",
            place=(str(path),),
            hint="download a new copy of the file",
        ) from error
    except OSError as error:
        raise DataError(
            "unreadable-file",
            f"the file cannot be read: {error.strerror or error}",
            place=(str(path),),
            hint="check the path and its permissions",
        ) from error
    if len(content) != expected:
        is_short = len(content) < expected
        state = "truncated" if is_short else "damaged"
        found = len(content) if is_short else "more"
        raise DataError(
            "damaged-file",
            f"the file is {state}: its header states {' × '.join(map(str, sizes))} = {expected} "
            f"bytes, but {found} follow",
            place=(str(path),),
            hint="download a new copy of the file",
        )
    return np.frombuffer(content, np.uint8).reshape(sizes)


def _sizes(path: Path, header: bytes, magic: int) -> list[int]:
    """The sizes in the header, one per axis."""
    axes = magic & 0xFF
    if len(header) < 4 + 4 * axes:
        raise DataError(
            "damaged-file",
            f"the file is truncated: {KIND[magic]} has a header of {4 + 4 * axes} bytes, but the "
            f"file has {len(header)}",
            place=(str(path),),
            hint="download a new copy of the file",
        )
    begin, *sizes = struct.unpack(f">{1 + axes}I", header)
    if begin != magic:
        swapped = KIND.get(begin)
        raise DataError(
            "wrong-format",
            f"the file begins with 0x{begin:08x}, but {KIND[magic]} begins with 0x{magic:08x}",
            place=(str(path),),
            hint=f"check whether two file names are exchanged: this is {swapped}"
            if swapped
            else "use an IDX file of unsigned bytes",
        )
    if not all(sizes):
        shape = " × ".join(map(str, sizes))
        raise DataError(
            "no-rows",
            f"the header states {shape} bytes, so the file is empty",
            place=(str(path),),
            hint="download a new copy of the file",
        )
    return sizes
