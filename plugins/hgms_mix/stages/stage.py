"""What a stage is, and its folder, whose manifest says what the stage was made from, so that it is
made once.

``manifest.json`` holds the stage's *key*, the sha256 of everything its result depends on (its
settings, the contents of the files it reads, the outputs of the stage before, the version of its
code), and at the end the size and sha256 of each file it wrote. A finished stage with the same key
is not made again if its files are still what it wrote; an interrupted one continues.

A folder with another key is not overwritten: it is renamed to ``<stage>-<first 8 digits of its
key>``, and renamed back when its settings return.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attrs import field, frozen

from hgms.runs import replace_file
from hgms_core.errors import CheckpointError

if TYPE_CHECKING:
    from hgms.distributed import Ranks
    from hgms_mix.stages.mix import Mix

MANIFEST = "manifest.json"


class Stage(Protocol):
    """One step from data sources to an evaluated model. It reads the mix's configuration and the
    stages before it (``mix.done``), and writes files into a folder of its own."""

    name: ClassVar[str]
    version: ClassVar[str]
    beside: ClassVar[bool] = False
    """Whether later stages do without it."""

    def packages(self, mix: Mix) -> list[str]:
        """The optional packages that it imports."""
        return []

    def check(self, mix: Mix) -> None:
        """Raises ConfigError or MissingExtra for what can be known to fail before the first
        stage begins.
        """
        return

    def inputs(self, mix: Mix) -> dict[str, Any]:
        """Everything that its result depends on beside its version and the stage before: a finished
        stage with the same inputs is not made again."""

    def title(self, mix: Mix) -> str:
        """What it is about to do, for the terminal."""

    def run(self, mix: Mix, folder: Path) -> tuple[Iterable[Path], dict[str, Any]]:
        """Does the work, or the rest of it: the files it wrote into ``folder``, and facts for
        later stages and the report.
        """

    def parted(self, mix: Mix) -> bool:
        """Whether all ranks of a mix make it together: :meth:`run`, on rank 0, then calls the
        others (:func:`hgms_mix.stages.on_ranks.together`)."""
        return False

    def follow(self, mix: Mix, folder: Path, ranks: Ranks) -> None:
        """What another rank than 0 does while rank 0 is in :meth:`run` with all ranks together. It
        writes nothing that rank 0 writes."""
        return

    def summary(self, mix: Mix, report: Mapping[str, Any]) -> dict[str, Any]:
        """Its part of report.json, which is ``report`` after the stages before."""


def digest(value: Any) -> str:
    """The sha256 of a value as canonical JSON.

    >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    True
    """
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()


def file_digest(path: Path) -> str:
    """The sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@frozen(kw_only=True)
class Done:
    """A finished stage: its ``facts`` (small numbers that later stages and the summary need), and
    its ``key`` and ``digest``, which change with anything it was made from and with any file it
    wrote.
    """

    path: Path
    key: str
    facts: Mapping[str, Any]
    digest: str


@frozen(kw_only=True)
class StageFolder:
    """The folder of the stage ``name`` made from ``inputs``; nothing is written before
    :meth:`begin`.

    Errors: CheckpointError for a file or manifest that is damaged, and for a folder that no stage
        made.
    """

    name: str
    path: Path
    inputs: Mapping[str, Any]
    key: str = field(init=False)

    @key.default
    def _of_inputs(self) -> str:
        return digest([self.name, self.inputs])

    def done(self) -> Done | None:
        """The finished stage, if it was made from these inputs and its files are all there.
        Cost: one pass over the files.
        """
        for folder in (self.path, self._renamed(self.key)):
            manifest = manifest_of(folder)
            if (
                manifest is None
                or manifest.get("key") != self.key
                or manifest.get("status") != "done"
            ):
                continue
            outputs = manifest["outputs"]
            sizes = {
                name: (folder / name).stat().st_size
                for name in outputs
                if (folder / name).is_file()
            }
            if sizes != {name: file["bytes"] for name, file in outputs.items()}:
                continue
            for name, file in outputs.items():
                if file_digest(folder / name) != file["sha256"]:
                    raise _damaged(
                        folder / name, "the file does not match its recorded checksum", folder
                    )
            self._exchange()
            return Done(
                path=self.path, key=self.key, facts=manifest["facts"], digest=digest(outputs)
            )
        return None

    def begin(self) -> bool:
        """Makes the folder ready for these inputs; whether it holds something to continue from."""
        self._exchange()
        begun = manifest_of(self.path) is not None
        self.path.mkdir(parents=True, exist_ok=True)
        self._write("begun")
        return begun

    def finish(self, outputs: Iterable[Path], facts: Mapping[str, Any]) -> Done:
        """Records that the stage is finished, with the files it wrote."""
        written = {
            path.relative_to(self.path).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": file_digest(path),
            }
            for path in sorted(outputs)
        }
        self._write("done", outputs=written, facts=facts)
        return Done(path=self.path, key=self.key, facts=facts, digest=digest(written))

    def _write(self, status: str, **result: Any) -> None:
        manifest = {
            "stage": self.name,
            "key": self.key,
            "status": status,
            "inputs": self.inputs,
            **result,
        }
        manifest["sha256"] = digest(json.loads(json.dumps(manifest)))  # a changed digit is noticed
        replace_file(
            self.path / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False).encode()
        )

    def _renamed(self, key: str) -> Path:
        return self.path.with_name(f"{self.path.name}-{key[:8]}")

    def _exchange(self) -> None:
        """Renames a folder made from other inputs out of the way, and the one made from these
        back.
        """
        manifest = manifest_of(self.path)
        if manifest is None:
            # killed while it wrote the folder's first file
            self.path.joinpath(f"{MANIFEST}.part").unlink(missing_ok=True)
            if self.path.is_dir() and any(self.path.iterdir()):
                raise CheckpointError(
                    "file-exists",
                    f"the folder exists, but hgms mix did not create it: it has no {MANIFEST}",
                    place=(str(self.path),),
                    hint="move it, or use another --out",
                )
        elif manifest["key"] != self.key:
            self.path.rename(self._renamed(manifest["key"]))
        earlier = self._renamed(self.key)
        if earlier.is_dir() and not (self.path / MANIFEST).exists():
            if self.path.is_dir():
                self.path.rmdir()
            earlier.rename(self.path)


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """What a stage's folder says of itself; None where there is no manifest.

    Errors: CheckpointError where it is damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise _damaged(path, "the file is not valid JSON", folder) from None
    except OSError as error:
        raise CheckpointError(
            "unreadable-file",
            f"the file cannot be read: {error.strerror or error}",
            place=(str(path),),
            hint="check its permissions",
        ) from None
    if not _is_manifest(manifest):
        raise _damaged(path, "the file does not describe a stage", folder)
    if "sha256" in manifest and manifest.pop("sha256") != digest(manifest):
        raise _damaged(path, "the file does not match its own checksum", folder)
    return dict(manifest)


def _is_manifest(value: Any) -> bool:
    """Valid JSON is not yet a manifest."""
    if not isinstance(value, dict) or not isinstance(value.get("key"), str):
        return False
    if value.get("status") != "done":
        return True
    outputs = value.get("outputs")
    return (
        isinstance(value.get("facts"), dict)
        and isinstance(outputs, dict)
        and all(
            isinstance(file, dict) and {"bytes", "sha256"} <= set(file) for file in outputs.values()
        )
    )


def _damaged(path: Path, message: str, folder: Path) -> CheckpointError:
    return CheckpointError(
        "damaged-file",
        message,
        place=(str(path),),
        hint=f"remove the folder {folder} to repeat the stage",
    )
