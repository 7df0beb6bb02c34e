"""Digests of contents and of whole files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from hgms.store import Digest, digest, file_digest, json_digest


def test_a_digest_is_the_sha256_of_its_parts_of_any_kind() -> None:
    numbers = np.arange(6, dtype=np.int64)
    running = Digest("é", b"\0")
    running.add(numbers.data)
    whole = "é".encode() + b"\0" + numbers.tobytes()
    assert running.text == digest(whole) == hashlib.sha256(whole).hexdigest()
    assert running.size == len(whole)
    assert digest("lone surrogate \udcff") == digest(r"lone surrogate \udcff")
    assert json_digest({"b": [1], "a": "é"}) == digest('{"a": "é", "b": [1]}')


def test_a_byte_in_the_middle_of_a_large_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    data = bytearray(18 << 20)
    file.write_bytes(data)
    before = file_digest(file)
    about = file.stat()
    data[9 << 20] = 1
    file.write_bytes(data)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))  # the change is hidden as well
    assert file_digest(file) == hashlib.sha256(data).hexdigest() != before
