"""Whose code a configuration runs: digests of the files that components of other people come from.

A result belongs to the code that made it. Our own is known by the version of ``hgms`` and of the task; a file of a person's own
changes ten times a day under one name.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import attrs

from hgms_core.discovery import FIRST_PARTY
from hgms_core.plugins import host


def digests(value: Any) -> dict[str, str]:
    """The sha256 (twelve digits) of the source file of each component in ``value`` that is not ours, by ``module:Class``.

    >>> from hgms_cg import CG
    >>> digests(CG())
    {}
    """
    found: dict[str, str] = {}
    if isinstance(value, list | tuple):
        for each in value:
            found |= digests(each)
    if attrs.has(type(value)):
        cls = type(value)
        digest = None if _is_ours(cls.__module__) else _digest(cls.__module__)
        if digest:
            found[f"{cls.__module__}:{cls.__qualname__}"] = digest
        for one in attrs.fields(cls):
            found |= digests(getattr(value, one.name))
    return dict(sorted(found.items()))


def _is_ours(module: str) -> bool:
    ours = {info.module.partition(".")[0] for info in host().infos.values() if info.distribution == FIRST_PARTY}
    return module.partition(".")[0] in {"hgms_core", *ours}


def _digest(module: str) -> str | None:
    """Of the file that was imported; None where there is none to read (a notebook, an archive)."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else None
    except OSError:
        return None
