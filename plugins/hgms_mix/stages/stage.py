"""The protocol of a stage: one step from data sources to an evaluated model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hgms_mix.stages.work import Work


class Stage(Protocol):
    """One step from data sources to an evaluated model.

    A stage reads the configuration of the mix and the earlier stages (``mix.done``), and writes
    files into a separate folder.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    beside: ClassVar[bool] = False
    """Whether later stages do not depend on this stage."""

    def packages(self, mix: Work) -> list[str]:
        """Return the optional packages that the stage imports."""
        return []

    def check(self, mix: Work) -> None:
        """Raise ConfigError or MissingExtra for failures detectable before the first stage."""
        return

    def inputs(self, mix: Work) -> dict[str, Any]:
        """Return everything that determines the result, except the version and the earlier stage.

        A finished stage with the same inputs is skipped.
        """

    def title(self, mix: Work) -> str:
        """Return a description of the work for the terminal."""

    def run(self, mix: Work, folder: Path) -> tuple[Iterable[Path], dict[str, Any]]:
        """Run or resume the stage; return the files written into ``folder``, and facts.

        Later stages and the report read the facts.
        """

    def summary(self, mix: Work, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return this stage's part of report.json.

        ``report`` contains the parts of the earlier stages.
        """
