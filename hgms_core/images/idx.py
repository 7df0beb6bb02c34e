"""Reads IDX files, the format of MNIST: a big-endian header (magic number, sizes) and the bytes. Plain or gzip-compressed."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from hgms_core.errors import DataError

IMAGES, LABELS = 0x00000803, 0x00000801
"""Magic numbers: unsigned bytes (08) along 3 axes (images, rows, columns), or along 1 (labels)."""

KIND = {IMAGES: "an IDX file of images", LABELS: "an IDX file of labels"}


def read_idx(path: Path, magic: int) -> np.ndarray:
    """The array in ``path``, whose magic number must be ``magic``. Raises DataError, naming the file, for anything else."""
    content = _read(path)
    axes = magic & 0xFF
    if len(content) < 4 + 4 * axes:
        raise DataError(
            f"{path}: {len(content)} bytes are too few for {KIND[magic]} (its header alone takes {4 + 4 * axes})\n"
            "  the file is truncated: fetch it again"
        )
    found, *sizes = struct.unpack(f">{1 + axes}I", content[: 4 + 4 * axes])
    if found != magic:
        swapped = KIND.get(found)
        raise DataError(
            f"{path}: magic number 0x{found:08x}, but {KIND[magic]} begins with 0x{magic:08x}\n  "
            + (f"this is {swapped}: the two files may have changed names" if swapped else "this is not an IDX file of bytes")
        )
    expected, held = int(np.prod(sizes, dtype=np.int64)), len(content) - 4 - 4 * axes
    if held != expected:
        shape = " × ".join(map(str, sizes))
        raise DataError(
            f"{path}: the header promises {shape} = {expected} bytes, but {held} follow it\n"
            f"  the file is {'truncated' if held < expected else 'damaged'}: fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(sizes)


def _read(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as stream:
            return stream.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip stream is truncated or damaged ({error})\n  fetch the file again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})\n  check the path and its permissions") from error
