"""Distributions made on the spot: fake plugins that are installed as far as importlib.metadata
can tell.
"""

from __future__ import annotations

import importlib.metadata
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

SOLVER = '''
from __future__ import annotations

from typing import ClassVar, final

from attrs import field, frozen, validators
from hgms_core import hookimpl


@final
@frozen(kw_only=True)
class {cls}:
    """Solves nothing, politely.

    >>> {cls}().rtol
    0.001
    """

    name: ClassVar[str] = "{name}"
    rtol: float = field(default=1e-3, validator=validators.gt(0))
    max_steps: int = field(default=10, validator=validators.ge(1))

    def solve(self, matvec, b, x0=None):
        return b


@hookimpl
def hgms_register_linear_solvers():
    return [{cls}]
'''

TOY = '''
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import click
import torch
from attrs import field, frozen, validators
from hgms_core import Problem, hookimpl


@final
@frozen(kw_only=True)
class Halve:
    """Halves x at every step.

    >>> Halve().rate
    0.5
    """

    name: ClassVar[str] = "halve"
    rate: float = field(default=0.5, validator=validators.gt(0))

    def init(self, problem, seed):
        return {"x": dict(problem.x0)}

    def step(self, problem, state, progress):
        x = {"x": state["x"]["x"] * self.rate}
        return {"x": x}, {"size": x["x"].sum(), "oracle_calls": 1}

    def result(self, state):
        return {}, state["x"]


@final
@frozen(kw_only=True)
class One:
    """One number."""

    name: ClassVar[str] = "one"
    version: ClassVar[str] = "1"
    metrics: ClassVar[Mapping[str, bool]] = {"size": False}

    def problem(self, seed, device, dtype):
        return Problem(
            theta0={}, x0={"x": torch.ones(1, device=device, dtype=dtype)},
            g=lambda t, x, b: x["x"].sum(), f=lambda t, x, b: x["x"].sum(),
            evaluate=lambda t, x: {"size": float(x["x"])},
        )


@hookimpl
def hgms_register_methods():
    return [Halve]


@hookimpl
def hgms_register_tasks():
    return [One]


@hookimpl
def hgms_register_commands(cli: click.Group):
    @cli.command("greet")
    def greet():
        """Says hello."""
        click.echo("hello")

    @cli.command("list")
    def not_this_one():
        click.echo("stolen")
'''
"""A plugin with the method `halve`, the task `one` and the command `greet`."""


def call(*arguments: str | Path) -> Result:
    """A command of ours, in this process."""
    from hgms.cli import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def json_of(*arguments: str | Path) -> Any:
    """What a command prints with --json."""
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


PROGRAMS, TABLES = (
    {entry.name: entry.value for entry in importlib.metadata.entry_points(group=group)}
    for group in ("hgms.programs", "hgms.tables")
)
"""Our commands, and the tables that they read of a file: they stay while a test hides every
plugin.
"""


class Site:
    """A folder on ``sys.path`` to write modules and installed distributions into."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: set[str] = set()

    def module(self, name: str, source: str) -> Path:
        path = self.root / f"{name}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        self.modules.add(name)
        return path

    def solver(self, module: str, name: str, cls: str = "Solver") -> Path:
        return self.module(module, SOLVER.format(name=name, cls=cls))

    def install(
        self,
        name: str,
        entry_points: Mapping[str, str],
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        extras: Sequence[str] = (),
        programs: Mapping[str, str] | None = None,
    ) -> None:
        folder = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras] + [
            f"Requires-Dist: {requirement}" for requirement in requires
        ]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
                for group, entries in {
                    "hgms": entry_points,
                    "hgms.programs": PROGRAMS if name == "hgms" else programs or {},
                    "hgms.tables": TABLES if name == "hgms" else {},
                }.items()
            )
        )
