"""Read IDX files, the format of MNIST: a big-endian header (magic number, sizes) and bytes.

The files are plain or gzip-compressed.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from hgms_core.errors import DataError

IMAGES = 0x00000803
LABELS = 0x00000801
"""Magic numbers: unsigned bytes (08) along 3 axes (images, rows, columns), or along 1 (labels)."""

KIND = {IMAGES: "an IDX file of images", LABELS: "an IDX file of labels"}


def read_idx(path: Path, magic: int) -> np.ndarray:
    """Return the array in ``path``, which must start with the number ``magic``.

    Raises
    ------
    DataError
        For any other content; the place is the file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            "unreadable-file",
            f"the file cannot be read: {error}",
            place=(str(path),),
            hint="check its permissions, or download a new copy",
        ) from error
    length = 4 + 4 * (magic & 0xFF)
    begin, *sizes = np.frombuffer(content[:length].ljust(length, b"\0"), ">u4").tolist()
    if begin != magic:
        raise DataError(
            "wrong-format",
            f"the file begins with 0x{begin:08x}, but {KIND[magic]} begins with 0x{magic:08x}",
            place=(str(path),),
            hint="check whether two file names are exchanged, and use unsigned bytes",
        )
    if not all(sizes) or len(content) != length + math.prod(sizes):
        raise DataError(
            "damaged-file",
            f"the header states {' × '.join(map(str, sizes))} bytes, but "
            f"{max(len(content) - length, 0)} follow",
            place=(str(path),),
            hint="download a new copy of the file",
        )
    return np.frombuffer(content, np.uint8, offset=length).reshape(sizes)
