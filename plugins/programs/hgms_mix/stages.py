"""What a stage of a mix is; the stages themselves have a file each: reweight, sample, finetune, evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from hgms_mix.mix import Mix


class Stage(Protocol):
    """One step from data sources to an evaluated model. It reads the mix's configuration and the stages before it
    (``mix.done``), and writes files into a folder of its own."""

    name: ClassVar[str]

    def packages(self, mix: Mix) -> list[str]:
        """The optional packages that it imports."""
        return []

    def check(self, mix: Mix) -> None:
        """Raises ConfigError or MissingExtra for what can be known to fail before the first stage begins."""
        return

    def inputs(self, mix: Mix) -> dict[str, Any]:
        """Everything that its result depends on: a finished stage with these inputs is not made again."""
        ...

    def title(self, mix: Mix) -> str:
        """What it is about to do, for the terminal."""
        ...

    def run(self, mix: Mix, folder: Path) -> tuple[Iterable[Path], dict[str, Any]]:
        """Does the work, or the rest of it: the files it wrote into ``folder``, and the facts that later stages need."""
        ...

    def summary(self, mix: Mix, report: Mapping[str, Any]) -> dict[str, Any]:
        """Its part of report.json, which is ``report`` after the stages before."""
        ...
