"""Distributions made on the spot: fake plugins that are installed as far as importlib.metadata
can tell.
"""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

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


PROGRAMS, TABLES, MIX = (
    {entry.name: entry.value for entry in importlib.metadata.entry_points(group=group)}
    for group in ("hgms.programs", "hgms.tables", "hgms.mix")
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
        mix: Mapping[str, str] | None = None,
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
                    "hgms.mix": MIX if name == "hgms" else mix or {},
                }.items()
            )
        )
