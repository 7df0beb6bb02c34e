"""The folder of a stage with its manifest, so that each stage runs only once.

``manifest.json`` contains the *key* of the stage. The key is the sha256 of everything that
determines the result: the settings, the contents of input files, the outputs of the earlier stage,
and the code version. When the stage finishes, the manifest also contains the size and sha256 of
each output file. A finished stage with the same key is skipped if its files are unchanged; an
interrupted stage resumes.

A folder with another key is not overwritten. It is renamed to ``<stage>-<first 8 digits of its
key>``, and renamed back when the same settings are used again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from hgms.store import file_digest, json_digest, replace_file
from hgms_core.errors import CheckpointError

MANIFEST = "manifest.json"


@frozen(kw_only=True)
class Done:
    """A finished stage.

    ``facts`` are small numbers for later stages and the summary. ``key`` and ``digest`` change with
    any input of the stage and with any file that it wrote.
    """

    path: Path
    key: str
    facts: Mapping[str, Any]
    digest: str


@frozen(kw_only=True)
class StageFolder:
    """The folder of the stage ``name`` with these ``inputs``; no file is written before
    :meth:`begin`.

    Errors: CheckpointError for a damaged file or manifest, and for a folder that no stage created.
    """

    name: str
    path: Path
    inputs: Mapping[str, Any]
    key: str = field(init=False)

    @key.default
    def _of_inputs(self) -> str:
        return json_digest([self.name, self.inputs])

    def done(self) -> Done | None:
        """Return the finished stage, if its inputs are the same and all its files exist.

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
                path=self.path, key=self.key, facts=manifest["facts"], digest=json_digest(outputs)
            )
        return None

    def begin(self) -> bool:
        """Prepare the folder for these inputs; return whether the stage can resume."""
        self._exchange()
        begun = manifest_of(self.path) is not None
        self.path.mkdir(parents=True, exist_ok=True)
        self._write("begun")
        return begun

    def finish(self, outputs: Iterable[Path], facts: Mapping[str, Any]) -> Done:
        """Record that the stage is finished, with the files it wrote."""
        written = {
            path.relative_to(self.path).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": file_digest(path),
            }
            for path in sorted(outputs)
        }
        self._write("done", outputs=written, facts=facts)
        return Done(path=self.path, key=self.key, facts=facts, digest=json_digest(written))

    def _write(self, status: str, **result: Any) -> None:
        manifest = {
            "stage": self.name,
            "key": self.key,
            "status": status,
            "inputs": self.inputs,
            **result,
        }
        # detects a changed digit
        manifest["sha256"] = json_digest(json.loads(json.dumps(manifest)))
        replace_file(
            self.path / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False).encode()
        )

    def _renamed(self, key: str) -> Path:
        return self.path.with_name(f"{self.path.name}-{key[:8]}")

    def _exchange(self) -> None:
        """Rename a folder of other inputs, and rename the folder of these inputs back."""
        manifest = manifest_of(self.path)
        if manifest is None:
            # the process was killed while it wrote the first file of the folder
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
    """Return the manifest of a stage's folder, or None if there is no manifest.

    Errors: CheckpointError if the manifest is damaged.
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
    if "sha256" in manifest and manifest.pop("sha256") != json_digest(manifest):
        raise _damaged(path, "the file does not match its own checksum", folder)
    return dict(manifest)


def _is_manifest(value: Any) -> bool:
    """Return whether a JSON value has the fields of a manifest."""
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
