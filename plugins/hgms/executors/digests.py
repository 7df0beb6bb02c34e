"""Check that two machines have the same code.

Digests are compared instead of version numbers, because a checkout can change without a new
version.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from hgms.config.fingerprinting import FIRST_PARTY
from hgms.store import Digest, digest
from hgms_core import ConfigError

SHOWN = 4
"""Maximum number of differences in a message."""


def code_of(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the code that must be equal on both machines.

    It consists of ``modules``, or files, and the parts of HGMS that are loaded here.
    """
    named = {name if name.endswith(".py") else name.partition(".")[0] for name in modules}
    return tuple(sorted(named | (FIRST_PARTY & set(sys.modules))))


def installation(code: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of Python and torch, and a digest per module or file of ``code``.

    The digests are computed from the files on this machine.

    Examples
    --------
    >>> sorted(installation(("hgms.executors",)))
    ['hgms.executors', 'python', 'torch']
    """
    return {"python": platform.python_version(), "torch": torch.__version__.partition("+")[0]} | {
        name: _digest(name) for name in code
    }


def ensure_same(expected: Mapping[str, str], where: str) -> None:
    """Raise ConfigError if the code of this process differs from the code of the requester."""
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
    """Return the digest of a file, or of all Python files of a module by their relative paths.

    If there is no such file or module, return a sentence that reports it.
    """
    if name.endswith(".py"):
        path = Path(name)
        return digest(path.read_bytes())[:12] if path.is_file() else "no such file"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return "no such module"
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
    contents = Digest()
    for file in files:
        contents.add(file.relative_to(origin.parent).as_posix())
        contents.add(b"\0" + file.read_bytes())
    return contents.text[:12]
