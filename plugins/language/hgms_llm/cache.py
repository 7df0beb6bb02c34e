"""Token tables on disk: each in a file that is named by what it was made from, mapped into memory when it is read."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
from torch import Tensor

from hgms_core import DataError
from hgms_llm.table import Report, TokenTable

LEAVES = {"tokens": torch.int32, "mask": torch.bool, "offsets": torch.int64, "rows": torch.int64, "keys": torch.int64}


def cache_folder() -> Path:
    """The default place of tables: ``tokens`` in ``$HGMS_CACHE``, or in ``hgms`` of the user's cache."""
    own = os.environ.get("HGMS_CACHE")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hgms"
    return root.expanduser() / "tokens"


def cached(folder: Path, digest: str, make: Callable[[], TokenTable]) -> TokenTable:
    """The table called ``digest``, from the folder or from ``make``; two processes that want one table make it once.

    Errors: DataError where the folder cannot be written.
    """
    from filelock import FileLock

    path = folder / f"{digest}.safetensors"
    table = _load(path, digest)
    if table is not None:
        return table
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
    try:
        table = _load(path, digest)  # another process may have made it while this one waited
        if table is not None:
            return table
        table = make()
        with _writing(folder):
            _save(path, table)
    finally:
        lock.release()
    return _load(path, digest) or table


@functools.cache
def warn(message: str) -> None:
    """A message of the library, once in a process."""
    logging.getLogger("hgms").warning(message)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write the token cache {folder}: {getattr(error, 'strerror', None) or error}\n"
            "  free some space there, or set HGMS_CACHE to another folder"
        ) from error


def _checksum(leaves: dict[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for leaf in LEAVES:
        sha.update(leaves[leaf].numpy().data)
    return sha.hexdigest()


def _save(path: Path, table: TokenTable) -> None:
    import safetensors.torch

    leaves = {leaf: getattr(table, leaf) for leaf in LEAVES}
    about = {"digest": table.digest, "sha256": _checksum(leaves), "report": json.dumps(attrs.asdict(table.report))}
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        safetensors.torch.save_file(leaves, aside, metadata=about)
        with aside.open("rb+") as stream:
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _load(path: Path, digest: str) -> TokenTable | None:
    """The entry, mapped into memory; None where there is none, or (with a warning) where it is damaged."""
    if not path.exists():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stored:
            about = stored.metadata() or {}
            leaves = {leaf: stored.get_tensor(leaf) for leaf in LEAVES}
        problem = _problem(leaves, about, digest)
        if problem is None:
            report = Report(**json.loads(about["report"]))
            return TokenTable(name="", digest=digest, report=report, **leaves)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    warn(f"the token cache entry {path} is damaged ({problem}): it is made anew")
    return None


def _problem(leaves: dict[str, Tensor], about: dict[str, str], digest: str) -> str | None:
    if about.get("digest") != digest:
        return "it is of another table"
    if any(leaves[leaf].dtype != dtype for leaf, dtype in LEAVES.items()):
        return "a tensor of the wrong type"
    if about.get("sha256") != _checksum(leaves):
        return "its contents do not match the recorded sha256"
    return None
