"""What a number depends on besides its configuration: versions, the machine, and the code of
components that are not ours.

A result belongs to the code that made it. Our own is known by the version of ``hgms`` and of the
task; a file of a person's own may change at any time under one name, so it is known by its digest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import torch

from hgms.config.fingerprinting import fingerprint, first_party, source_digests
from hgms_core import ConfigError, HgmsError
from hgms_core.errors import CheckpointError
from hgms_core.host import Host
from hgms_core.torch_errors import first_line


def digests(value: Any) -> dict[str, str]:
    """The digest (twelve digits) of the source of each component in ``value`` that is not ours, by
    ``module:Class``: its file and the local modules that this imports. Of a class in a script or a
    notebook, where the rest of the file changes all the time, its fingerprint.

    >>> from hgms.solvers import CG
    >>> digests(CG())
    {}
    """
    ours = first_party()
    known = {}

    def walk(item: Any) -> None:
        if isinstance(item, list | tuple):
            for part in item:
                walk(part)
        elif attrs.has(cls := type(item)):
            own = cls.__module__.partition(".")[0] not in ours
            if own and (digest := _digest(cls.__module__) or fingerprint(cls)):
                known[f"{cls.__module__}:{cls.__qualname__}"] = digest
            for field in attrs.fields(cls):
                walk(getattr(item, field.name))

    walk(value)
    return dict(sorted(known.items()))


def _digest(module: str) -> str | None:
    """Of the files that were imported; None if there is none to read (a notebook, an archive), or
    it is the script.
    """
    sources = source_digests(module)
    if module not in sources:
        return None
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:12]


def environment(device: torch.device, host: Host | None = None) -> dict[str, Any]:
    """Versions, plugins (of ``host``; None: what is installed), device, threads and the working
    directory's commit, as ``env.json`` holds them."""
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
    """The data fingerprint of a task (``made_of``), under that name; empty for a task that reads
    no files.

    Of data that cannot be read it has the reason: a run on them has a folder of its own, and fails
    for that reason when it builds its problem.

    Errors: ConfigError for a task whose ``made_of`` gives what JSON cannot hold, in which a run
        could not be told from another.
    """
    if (made_of := getattr(task, "made_of", None)) is None:
        return {}
    try:
        contents = made_of()
    except (HgmsError, OSError) as error:
        return {"made_of": str(error)}
    try:
        json.dumps(contents)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "wrong-result",
            f"made_of of {type(task).__module__}:{type(task).__qualname__} returns a value that "
            f"JSON cannot store: {first_line(error)}",
            place=("task", "made_of"),
            hint="return strings, numbers, and lists and tables of them",
        ) from None
    return {"made_of": contents} if contents else {}


def ensure_same_inputs(before: Mapping[str, Any], task: Any, method: Any, place: str) -> None:
    """Reject a run whose ``env.json`` is ``before`` if it belongs to other data or other code.

    Errors: CheckpointError (``data-changed``, ``code-changed``, or ``other-settings`` for another
        version of the task) at ``place``, the folder of the run.
    """
    about = before.get("task")
    about = about if isinstance(about, Mapping) else {}
    now = json.loads(json.dumps({**about_task(task), "code": digests([task, method])}))
    hint = "run without resuming to start a new run, or restore {}"
    if about.get("made_of") != now.get("made_of") and about:
        raise CheckpointError(
            "data-changed",
            "the files of the task have changed since this run began",
            place=(place,),
            hint=hint.format("the files"),
        )
    code = before.get("code")
    code = code if isinstance(code, Mapping) else now["code"]
    names = [name for name, digest in now["code"].items() if code.get(name) != digest]
    if names:
        raise CheckpointError(
            "code-changed",
            f"the code of {', '.join(names)} has changed since this run began",
            place=(place,),
            hint=hint.format("the code"),
        )
    if about and about.get("version") != now["version"]:
        raise CheckpointError(
            "other-settings",
            f"this run belongs to version {about.get('version')} of the task, but the task has "
            f"version {now['version']}",
            place=(place,),
            hint=hint.format("the version"),
        )


def about_task(task: Any) -> dict[str, Any]:
    """What a reader of the run has to know of the task and its configuration does not say: version,
    which way is better, the rows of each metric (``metric_rows``), and what stood in its files,
    where it says so (``made_of``)."""
    rows = dict(getattr(task, "metric_rows", {}))
    return {
        "version": str(getattr(task, "version", "")),
        "metrics": dict(getattr(task, "metrics", {})),
        **({"metric_rows": rows} if rows else {}),
        **data_of(task),
    }


def goes_on(before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What ``env.json`` holds of a run that went on from ``before``, which it keeps where it was
    another; and what changed.
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
    known = {}
    for name in (
        "hgms",
        "torch",
        "numpy",
        "scipy",
        "attrs",
        "cattrs",
        "pluggy",
        "safetensors",
        "scikit-learn",
    ):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known


@functools.cache
def _git(directory: Path) -> str | None:
    """The commit of the working directory's repository; None outside one. Asked once: what this
    process has imported does not change when the files do.

    Nothing but the name HEAD is looked up: whether files are changed cannot be asked without
    running what the repository's own configuration names (``core.fsmonitor``, filters), and the
    repository may be a stranger's.
    """
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        answer = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()[:12] or None


def unannounced(host: Host) -> list[str]:
    """The plugins that no distribution announces, files by their whole paths: another process has
    to be told of them, others it finds itself.
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
