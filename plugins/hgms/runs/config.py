"""Configurations: the TOML description of one run, and its hash.

Each table of a file contains the fields of one class. A field may have a protocol as its type (a
part, a solver, a task). Its value is a table with the ``name`` of a registered component, or only
the name. ``"none"`` represents Python's ``None``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import attrs
import tomlkit
from attrs import Factory, field

from hgms import facts
from hgms.arguments import require
from hgms.config import Budget, expand
from hgms.config.as_table import describe_component, plain
from hgms.config.budget import as_budget
from hgms.config.convert import role_of, structure, traits_of
from hgms.config.invalid import init_fields
from hgms.config.tables import read_toml
from hgms.facts import version_of
from hgms.plugins import Host, Registry
from hgms.runs.provenance import data_of, digests
from hgms.store import digest
from hgms_core import HgmsError, Method, RunInfo, Task, component
from hgms_core.components import evolve
from hgms_core.errors import raise_all
from hgms_core.validators import at_least, at_most, not_empty, optional, optional_positive

SCHEMA = 1
"""The version of configuration files; a file may state it."""

UNCOMPARED = ("out", "label", "task_label", "track", "diagnose", "ranks")
"""Settings of ``[run]`` that may differ between runs of the same configuration.

Runs that differ only in these settings may be averaged, or may resume from each other.
"""

UNSTATED = {"label": "none", "task_label": "none", "track": [], "diagnose": "none", "ranks": 1}
"""Settings of ``[run]`` that a configuration contains only if they differ from these values."""

LONGEST_LABEL = 200
"""Maximum number of characters of a label.

The name of a folder has at most 255 characters, and contains more than the label.
"""


def tables_of_others() -> frozenset[str]:
    """Return the top-level tables of a file that other programs read.

    Their entry points are in the group ``hgms.tables``. Runs and grids ignore these tables.
    """
    return frozenset(point.name for point in importlib.metadata.entry_points(group="hgms.tables"))


def _device(_settings: object, _attribute: object, value: str) -> None:
    require(
        re.fullmatch(r"cpu|cuda(:\d+)?|mps", value),
        "wrong-value",
        f'device={value!r} must be "cpu", "cuda", "cuda:N" or "mps"',
        place=("device",),
    )


def _label(_settings: object, attribute: attrs.Attribute[Any], value: str) -> None:
    require(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", value),
        "wrong-value",
        f"{attribute.name}={value!r} must consist of letters, digits and . _ + -, because a "
        "folder has this name",
        place=(attribute.name,),
    )
    require(
        len(str(value)) <= LONGEST_LABEL,
        "too-large",
        f"{attribute.name} has {len(str(value))} characters, but must have at most "
        f"{LONGEST_LABEL}, because a folder has this name",
        place=(attribute.name,),
    )


def _expand_path(value: Any) -> Any:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return str(expand(text, ("out",))) if isinstance(text, str) and text else text


@component
class RunSettings:
    """Settings for the execution of a run.

    Only ``device`` and ``dtype`` change the results. ``matmul`` and ``compile`` may change the last
    digits.

    ``out`` is the folder for run folders; ``~`` and ``$VARIABLES`` are replaced. ``threads`` is the
    number of CPU threads. ``None`` selects one thread or torch's default by a measurement at the
    start, unless ``OMP_NUM_THREADS`` is set.

    The run evaluates a row every ``evaluate_every`` outer steps. If ``evaluations`` is set, the run
    evaluates this number of rows at equal shares of the budget instead. Methods of very different
    speed then get curves of the same length. The run writes a checkpoint every
    ``checkpoint_seconds`` seconds (0: after every step).

    ``clock`` is the clock of a budget in seconds: ``wall`` for wall-clock time, or ``cpu`` for the
    processor time of the process, summed over its threads. Other programs on the machine disturb
    ``cpu`` less. A GPU requires ``wall``.

    ``label`` and ``task_label`` replace the names of the method and the task in folders and tables
    (``None``: the names are used). Labels distinguish two variants of one method. ``track`` lists
    the names of the trackers that follow the run.

    ``matmul`` is the route of float32 matrix products. ``exact`` is the exact route. ``fast`` is
    the fast route of the device: oneDNN on a CPU, TF32 on a GPU. ``auto`` measures both at the
    start. It selects ``fast`` if this is faster and its error is at most four times the error of
    the exact route.

    ``compile`` controls the compilation of the functions that take most of the time of a step. It
    is ``true``, ``false`` or ``auto``, which compiles if this is expected to save more time than it
    takes. The clock does not count the compilation.

    ``diagnose`` is the number of outer steps between two diagnosed steps (``None``: never). A
    diagnosis measures the reliability of the hypergradient and of the selection. It does not change
    the numbers of the run, and the budget does not count it.

    ``ranks`` is the number of processes that compute the steps together. Each has ``threads``
    threads, or a separate GPU. Candidates and rows are split across the ranks. Sums then have
    another order, so the last digits differ.
    """

    out: str = field(default="runs", converter=_expand_path, validator=not_empty)
    device: str = field(default="cpu", validator=_device)
    dtype: Literal["float32", "float64"] = "float32"
    threads: int | None = field(default=None, validator=optional([at_least(1), at_most(1024)]))
    evaluate_every: int = field(default=1, validator=at_least(1))
    evaluations: int | None = field(default=None, validator=optional(at_least(1)))
    clock: Literal["wall", "cpu"] = "wall"
    checkpoint_seconds: float = field(default=30.0, validator=at_least(0))
    label: str | None = field(default=None, validator=optional(_label))
    task_label: str | None = field(default=None, validator=optional(_label))
    track: tuple[str, ...] = ()
    matmul: Literal["auto", "exact", "fast"] = "auto"
    compile: Literal["auto", True, False] = "auto"
    diagnose: int | None = field(default=None, validator=optional_positive)
    ranks: int = field(default=1, validator=[at_least(1), at_most(1024)])


def _known_schema(_config: object, _attribute: object, value: int) -> None:
    require(
        value == SCHEMA,
        "not-supported",
        f"schema={value} is not supported: this version of hgms reads schema {SCHEMA}",
        place=("schema",),
    )


def _from(source: str, error: HgmsError, sets: Sequence[tuple[str, ...]]) -> HgmsError:
    by_option = any(error.place[: len(place)] == place for place in sets)
    return error if by_option or not source else error.at(source)


@component
class RunConfig:
    """One run: a task, a method, a seed and a budget.

    ``method_name`` is the registered name of the method (``hg-ms`` is a :class:`Pipeline`
    internally). Records and tables use it as the label. ``role`` is the role of the method in
    comparisons ("floor", "ceiling" or empty). ``RunConfig(task=…, method=Pipeline(…),
    budget=Budget.parse("60s"))`` needs no registry.

    ``host`` has the observers that follow the run (``None``: those of installed plugins). ``own``
    is True for objects of this process. The table then contains a digest for each value that TOML
    cannot express, and such a table cannot be converted back to objects.
    """

    schema: int = field(default=SCHEMA, validator=_known_schema)
    seed: int = field(default=0, validator=at_least(0))
    task: Task
    method: Method
    budget: Budget = field(converter=as_budget)
    run: RunSettings = RunSettings()
    method_name: str = field(
        default=Factory(lambda self: self.method.name, takes_self=True), metadata={"toml": False}
    )
    role: str = field(
        default=Factory(lambda self: facts.role_of(self.method), takes_self=True),
        eq=False,
        metadata={"toml": False},
    )
    host: Host | None = field(default=None, eq=False, repr=False, metadata={"toml": False})
    own: bool = field(default=False, eq=False, metadata={"toml": False})

    @classmethod
    def from_dict(
        cls,
        table: Mapping[str, Any],
        *,
        source: str = "",
        registry: Registry | None = None,
        sets: Iterable[tuple[str, ...]] = (),
    ) -> RunConfig:
        """Return the objects that ``table`` describes, or raise all errors in it at once.

        Components are looked up in ``registry`` (``None``: the installed components). The places of
        errors begin with ``source``, except below ``sets``, which the command line has set.
        """
        registry = registry or Registry.load()
        others = (
            tables_of_others()
            if table.keys() - (own := attrs.fields_dict(cast(Any, cls)))
            else frozenset()
        )
        read = {key: value for key, value in table.items() if key in own or key not in others}
        try:
            config: RunConfig = structure(
                read, cls, registry, traits_of(registry, table.get("task"))
            )
        except HgmsError as error:
            raise_all([_from(source, cause, tuple(sets)) for cause in error.errors])
        name = table["method"] if isinstance(table["method"], str) else table["method"]["name"]
        return evolve(config, method_name=name, role=role_of(registry, name), host=registry.host)

    @classmethod
    def from_toml(
        cls, text: str, *, source: str = "config.toml", registry: Registry | None = None
    ) -> RunConfig:
        return cls.from_dict(read_toml(text, source), source=source, registry=registry)

    def as_dict(self) -> dict[str, Any]:
        """Return the values of all fields, including defaults, as plain TOML values.

        ``from_dict`` converts the result back to this configuration.
        """
        if self.own:
            parts = {
                "task": describe_component(self.task, self.task.name),
                "method": describe_component(self.method, self.method_name),
            }
            settings = {
                key: plain(getattr(self, key)) for key in ("schema", "seed", "budget", "run")
            }
            table = {key: {**settings, **parts}[key] for key in init_fields(RunConfig)}
        else:
            table = plain(self)
        table["method"]["name"] = self.method_name
        # labels, observers and the number of processes do not define the results
        for key, default in UNSTATED.items():
            if table["run"][key] == default:
                del table["run"][key]
        return table

    def to_toml(self) -> str:
        return tomlkit.dumps(self.as_dict())

    @property
    def info(self) -> RunInfo:
        """The information about the run for observers and for its folder."""
        return RunInfo(
            task=self.task.name,
            method=self.method_name,
            seed=self.seed,
            budget=self.budget,
            config=self.as_dict(),
        )

    @property
    def path(self) -> Path:
        """The folder of the run: ``<out>/<task>/<method>-<hash>/seed-<n>``.

        Labels replace the names of the task and the method.
        """
        task = self.run.task_label or self.task.name
        method = self.run.label or self.method_name
        return Path(self.run.out, task, f"{method}-{self.config_hash}", f"seed-{self.seed}")

    @property
    def config_hash(self) -> str:
        """Eight hex digits that are equal for runs that may be averaged.

        The hash covers the configuration except for the seed and the settings in UNCOMPARED. It
        also covers the version of the task, the data fingerprint, and the code of third-party
        components.
        """
        table = self.as_dict()
        del table["seed"]
        for key in UNCOMPARED:
            table["run"].pop(key, None)
        code = digests([self.task, self.method])
        data = data_of(self.task)
        parts = [table, version_of(self.task), *([code] if code else []), *([data] if data else [])]
        return digest(json.dumps(parts, sort_keys=True))[:8]
