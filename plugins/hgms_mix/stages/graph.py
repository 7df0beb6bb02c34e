"""The graph of stages: functions with declared inputs and outputs, and one runner.

A stage is a function of a work folder, of files of earlier stages (``reads``) and of values (its
other parameters). Earlier stages are referenced as Python objects, which excludes cycles. The key
of a stage is the digest of all its inputs and is part of the name of its folder: other settings
use another folder, and earlier results remain.
"""

from __future__ import annotations

import gc
import inspect
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen

from hgms.config.as_table import plain
from hgms.runs import counting
from hgms.store import Folder, json_digest, writing

Facts = Mapping[str, Any]
"""Small numbers for the report, as JSON."""
Log = Callable[[str], None]
"""Receives one line of text."""


class Value(ABC):
    """A parameter of stages that is not a setting of the mix file."""

    @abstractmethod
    def fingerprint(self) -> Any:
        """Return a JSON value that changes if a result that uses the value could change."""


@frozen(kw_only=True, eq=False)
class Stage:
    """A step from a learned mixture to an evaluated model.

    ``function(work, **reads, **values) -> facts`` writes ``writes`` (files, or folders of files)
    into the folder ``work``. After an interruption, the runner calls it with the same folder; the
    function may record its progress there. ``scratch`` are folders that the runner removes when
    the stage is done. ``version`` changes if the same inputs would give another result.
    """

    name: str
    version: str
    function: Callable[..., Facts]
    reads: Mapping[str, Output] = field(factory=dict)
    writes: Sequence[str] = ()
    scratch: Sequence[str] = ()

    @property
    def values(self) -> list[str]:
        """The parameters that are neither the work folder nor files of earlier stages."""
        names = list(inspect.signature(self.function).parameters)[1:]
        return [name for name in names if name not in self.reads]

    def output(self, name: str) -> Output:
        """Return a reference to one of ``writes``, for the ``reads`` of a later stage."""
        assert name in self.writes
        return Output(stage=self, name=name)

    def with_earlier(self) -> list[Stage]:
        """Return the stages that this stage depends on and itself, in the order of running."""
        earlier = [each for read in self.reads.values() for each in read.stage.with_earlier()]
        return list(dict.fromkeys([*earlier, self]))


@frozen(kw_only=True, eq=False)
class Output:
    """A file, or a folder of files, that a stage writes."""

    stage: Stage
    name: str


@frozen(kw_only=True)
class Finished:
    """A finished stage: its folder, key, facts, and the sha256 of each file."""

    path: Path
    key: str
    facts: Facts
    files: Mapping[str, str]

    @classmethod
    def of(cls, folder: Folder) -> Finished:
        manifest = folder.manifest()
        files = {name: record.sha256 for name, record in manifest.files.items()}
        return cls(path=folder.path, key=folder.key, facts=manifest.facts, files=files)

    def digest(self, output: str) -> str:
        """Return a digest of the file or folder ``output``."""
        below = f"{output}/"
        return json_digest(
            {
                name: digest
                for name, digest in self.files.items()
                if name == output or name.startswith(below)
            }
        )


@define(kw_only=True, eq=False)
class Runner:
    """Runs stages in folders below ``root``.

    ``values`` are parameters by name. They are settings or :class:`Value`; their fingerprints are
    part of the keys. ``tools`` are further parameters without effect on results. ``finished``
    contains the stages that this runner has run or found.

    Raises
    ------
    CheckpointError
        For a damaged file or manifest.
    """

    root: Path
    values: Mapping[str, Any]
    tools: Mapping[str, Any] = field(factory=dict)
    log: Log = lambda line: None
    finished: dict[Stage, Finished] = field(init=False, factory=dict)

    def run(self, last: Stage) -> Finished:
        """Run or resume ``last`` and the stages that it depends on; skip finished stages."""
        for stage in last.with_earlier():
            if stage not in self.finished:
                self.finished[stage] = self.run_or_resume(stage)
        return self.finished[last]

    def find(self, last: Stage) -> Finished | None:
        """Return the finished stage ``last``, or None; run no stage."""
        for stage in last.with_earlier():
            if stage not in self.finished:
                folder = self.folder(stage)
                if not folder.is_done():
                    return None
                self.finished[stage] = Finished.of(folder)
        return self.finished[last]

    def run_or_resume(self, stage: Stage) -> Finished:
        """Run a stage whose earlier stages are finished.

        A finished stage is verified and skipped. An interrupted one resumes in its folder.
        """
        folder = self.folder(stage)
        if folder.is_done():
            self.log(f"{stage.name}: done before ({folder.path})")
        else:
            status = folder.manifest().status
            self.log(f"{stage.name}: {'resumes' if status == 'open' else 'starts'}")
            seconds = counting(status == "open")
            if status != "open":
                with writing(folder.path):
                    folder.path.mkdir(parents=True, exist_ok=True)
                folder.commit([], facts={})
            release_memory()
            names = {**self.values, **self.tools}
            paths = {
                name: self.finished[read.stage].path / read.name
                for name, read in stage.reads.items()
            }
            facts = stage.function(folder, **paths, **{name: names[name] for name in stage.values})
            about = {"processor_seconds": seconds(), "inputs": self.inputs(stage)}
            files = [name for output in stage.writes for name in files_of(folder.path, output)]
            folder.commit(files, facts={**about, **facts}, done=True)
        for name in stage.scratch:
            shutil.rmtree(folder.path / name, ignore_errors=True)
        return Finished.of(folder)

    def folder(self, stage: Stage) -> Folder:
        """Return the folder of a stage whose earlier stages are finished."""
        reads = {
            name: [self.finished[read.stage].key, self.finished[read.stage].digest(read.name)]
            for name, read in stage.reads.items()
        }
        key = json_digest([stage.name, stage.version, self.inputs(stage), reads])
        return Folder(self.root / f"{stage.name}-{key[:8]}", key)

    def inputs(self, stage: Stage) -> dict[str, Any]:
        """Return the fingerprints of the values that a stage uses, by name."""
        return {
            name: fingerprint(self.values[name]) for name in stage.values if name in self.values
        }


def fingerprint(value: Any) -> Any:
    """Return the fingerprint of a value or of settings."""
    return value.fingerprint() if isinstance(value, Value) else plain(value)


def files_of(folder: Path, output: str) -> list[str]:
    """Return the names of the files of an output, relative to the folder."""
    path = folder / output
    if not path.is_dir():
        return [output]
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return [file.relative_to(folder).as_posix() for file in files]


def release_memory() -> None:
    """Free the model of the last stage before the next stage loads one.

    Hooks and trainers create reference cycles, which only a garbage collection frees.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
