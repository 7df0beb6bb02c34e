"""Whether two machines have the same code: digests instead of version numbers, since a checkout
changes without one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from hgms.config.fingerprinting import first_party
from hgms_core import ConfigError

SHOWN = 4
"""Differences that a message names."""


def code_of(modules: Iterable[str]) -> tuple[str, ...]:
    """What has to be the same where a job is carried out: ``modules``, or files, and the parts
    of HGMS that are loaded here.
    """
    ours = first_party() & set(sys.modules)
    return tuple(
        sorted(
            {*ours, *(name if name.endswith(".py") else name.partition(".")[0] for name in modules)}
        )
    )


def installation(code: tuple[str, ...]) -> dict[str, str]:
    """The versions of Python and torch, and a digest of every module or file of ``code`` as it is
    found here.

    >>> sorted(installation(("hgms.executors",)))
    ['hgms.executors', 'python', 'torch']
    """
    return {"python": platform.python_version(), "torch": torch.__version__.partition("+")[0]} | {
        name: _digest(name) for name in code
    }


def ensure_same(expected: Mapping[str, str], where: str) -> None:
    """ConfigError where this process would not run the code that whoever asks has."""
    own = installation(tuple(name for name in expected if name not in ("python", "torch")))
    other = [name for name in expected if own[name] != expected[name]]
    if not other:
        return
    lines = [f"{name}: {own[name]} there, {expected[name]} here" for name in other[:SHOWN]]
    if len(other) > SHOWN:
        lines.append(f"and {len(other) - SHOWN} more")
    raise ConfigError(
        "other-installation",
        "\n".join([f"the worker on {where} has different packages than this machine", *lines]),
        hint="install the same packages there",
    )


@functools.cache
def _digest(name: str) -> str:
    """Of a file, or of all Python files of a module, by their places in it; a sentence where
    there is none.
    """
    if name.endswith(".py"):
        path = Path(name)
        return (
            hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else "no such file"
        )
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return "no such module"
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
    digest = hashlib.sha256()
    for file in files:
        digest.update(
            file.relative_to(origin.parent).as_posix().encode() + b"\0" + file.read_bytes()
        )
    return digest.hexdigest()[:12]
