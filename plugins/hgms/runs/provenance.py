"""Provenance of results: versions, the machine, and the code of third-party components.

A result depends on the code that computed it, in addition to the configuration. The versions of
``hgms`` and of the task identify the code of HGMS. A user's file may change at any time under the
same name, so its digest identifies it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import torch

from hgms.arguments import require
from hgms.config.fingerprinting import FIRST_PARTY, fingerprint, source_digests
from hgms.facts import metric_rows_of, metrics_of, version_of, walk_parts
from hgms.plugins import Host
from hgms.store import digest
from hgms_core import ConfigError, HgmsError
from hgms_core.capabilities import HasData, find
from hgms_core.errors import CheckpointError
from hgms_core.torch_errors import first_line


def digests(value: Any) -> dict[str, str]:
    """Return the source digest (twelve digits) of each third-party component in ``value``.

    The keys are ``module:Class``. A digest covers the file of the component and the local modules
    that the file imports. For a class in a script or a notebook, the result contains the
    fingerprint of the class instead, because the rest of the file changes frequently.

    Examples
    --------
    >>> from hgms.solvers import CG
    >>> digests(CG())
    {}
    """
    known = {}
    for _, part in walk_parts(value):
        cls = type(part)
        own = attrs.has(cls) and cls.__module__.partition(".")[0] not in FIRST_PARTY
        if own and (digest := _digest(cls.__module__) or fingerprint(cls)):
            known[f"{cls.__module__}:{cls.__qualname__}"] = digest
    return dict(sorted(known.items()))


def _digest(module: str) -> str | None:
    """Return the digest of the imported files of a module.

    The result is ``None`` if no file is readable (a notebook, an archive), or if the module is the
    script.
    """
    sources = source_digests(module)
    if module not in sources:
        return None
    return digest(json.dumps(sources))[:12]


def environment(device: torch.device, host: Host | None = None) -> dict[str, Any]:
    """Return the contents of ``env.json``.

    These are versions, plugins, the device, the number of threads, and the commit of the working
    directory. Plugins come from ``host`` (``None``: the installed plugins).
    """
    plugins = [info for info in (host or Host.load()).infos.values() if not info.program]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "versions": dict(_versions()),
        "plugins": [f"{info.name} ({info.owner})" for info in plugins if info.status == "loaded"],
        "git": _git(Path.cwd()),
    }


def data_of(task: Any) -> dict[str, Any]:
    """Return the data fingerprint of a task under the name ``data_fingerprint``.

    The result is empty for a task that reads no files. If the data is not readable, the result
    contains the reason. A run on such data has a separate folder, and fails for this reason when it
    builds its problem.

    Raises
    ------
    ConfigError
        If ``data_fingerprint`` of the task returns a value that JSON cannot store. Such a value
        could not distinguish two runs.
    """
    if (known := find(task, HasData)) is None:
        return {}
    try:
        contents = known.data_fingerprint()
    except (HgmsError, OSError) as error:
        return {"data_fingerprint": str(error)}
    try:
        json.dumps(contents)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "wrong-result",
            f"data_fingerprint of {type(task).__module__}:{type(task).__qualname__} returns "
            f"a value that JSON cannot store: {first_line(error)}",
            place=("task", "data_fingerprint"),
            hint="return strings, numbers, and lists and tables of them",
        ) from None
    return {"data_fingerprint": contents} if contents else {}


def ensure_same_inputs(before: Mapping[str, Any], task: Any, method: Any, place: str) -> None:
    """Reject a run that belongs to other data or other code.

    ``before`` is the ``env.json`` of the run.

    Raises
    ------
    CheckpointError
        (``data-changed``, ``code-changed``, or ``other-settings`` for another version of the task)
        at ``place``, the folder of the run.
    """
    about = before.get("task")
    about = about if isinstance(about, Mapping) else {}
    now = json.loads(json.dumps({**about_task(task), "code": digests([task, method])}))
    hint = "run without resuming to start a new run, or restore {}"
    require(
        not about or about.get("data_fingerprint") == now.get("data_fingerprint"),
        "data-changed",
        "the files of the task have changed since this run began",
        place=(place,),
        hint=hint.format("the files"),
        error=CheckpointError,
    )
    code = before.get("code")
    code = code if isinstance(code, Mapping) else now["code"]
    names = [name for name, digest in now["code"].items() if code.get(name) != digest]
    require(
        not names,
        "code-changed",
        f"the code of {', '.join(names)} has changed since this run began",
        place=(place,),
        hint=hint.format("the code"),
        error=CheckpointError,
    )
    require(
        not about or about.get("version") == now["version"],
        "other-settings",
        f"this run belongs to version {about.get('version')} of the task, but the task has "
        f"version {now['version']}",
        place=(place,),
        hint=hint.format("the version"),
        error=CheckpointError,
    )


def about_task(task: Any) -> dict[str, Any]:
    """Return the facts about a task that its configuration does not contain.

    These are the version, the better direction and the rows of each metric (``metric_rows``), and
    the data fingerprint (``data_fingerprint``) if the task has one.
    """
    rows = dict(metric_rows_of(task))
    return {
        "version": version_of(task),
        "metrics": dict(metrics_of(task)),
        **({"metric_rows": rows} if rows else {}),
        **data_of(task),
    }


def merge_environments(
    before: dict[str, Any], now: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the ``env.json`` of a run that resumed from ``before``, and the changes.

    If the environment is different, the new ``env.json`` also stores the earlier one.
    """
    earlier = before.pop("before", [])
    if not before or before == json.loads(json.dumps(now)):
        return now | ({"before": earlier} if earlier else {}), []
    was, known = (
        {key: table.get(key) for key in ("python", "device", "threads")}
        | (table["versions"] if isinstance(table.get("versions"), dict) else {})
        for table in (before, now)
    )
    changes = [
        f"{key} {was.get(key)} → {value}" for key, value in known.items() if was.get(key) != value
    ]
    return now | {"before": [*(earlier if isinstance(earlier, list) else []), before]}, changes


@functools.cache
def _versions() -> Mapping[str, str]:
    names = (
        "hgms",
        "torch",
        "numpy",
        "scipy",
        "attrs",
        "cattrs",
        "pluggy",
        "safetensors",
        "scikit-learn",
    )
    known = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


@functools.cache
def _git(directory: Path) -> str | None:
    """Return the commit of the working directory's repository; ``None`` outside a repository.

    The result is cached, because the imported code of this process does not change with the files.

    Only the name HEAD is looked up. A check for changed files would run programs that the
    repository's configuration names (``core.fsmonitor``, filters), and the repository may be
    untrusted.
    """
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        answer = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()[:12] or None


def undeclared_plugins(host: Host) -> list[str]:
    """Return the loaded plugins that no distribution announces, files with absolute paths.

    Another process must receive these names. It finds all other plugins automatically.
    """
    infos = [
        info
        for info in host.infos.values()
        if info.distribution is None and info.status in ("loaded", "incomplete")
    ]
    return [
        str(Path(info.module).absolute()) if info.module.endswith(".py") else info.module
        for info in infos
    ]
