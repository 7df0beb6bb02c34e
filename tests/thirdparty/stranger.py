"""Every distribution under ``docs/examples`` as a stranger has it: a wheel, in a virtual
environment with our wheel beside it.

The tests make such an environment in seconds: nothing is downloaded, a ``.pth`` file shows it what
this interpreter has installed, behind its own packages. The ``.pth`` files of those folders are not
read, so an editable install of this working tree stays out of sight.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = tuple(
    sorted(path.parent for path in (ROOT / "docs" / "examples").glob("*/pyproject.toml"))
)
"""The example distributions, whichever there are."""

# All wheels from one process: starting one for each takes longer than building them.
BUILD = """
import os, sys
from hatchling.builders.wheel import WheelBuilder
for project in sys.argv[2:]:
    os.chdir(project)
    list(WheelBuilder(project).build(directory=sys.argv[1], versions=["standard"]))
"""


@frozen
class Stranger:
    """Somebody else's machine: the ``wheels`` that were installed under ``prefix``, and
    ``home``, where commands run.
    """

    prefix: Path
    wheels: Path
    home: Path

    @property
    def site(self) -> Path:
        return Path(
            sysconfig.get_path(
                "purelib", vars={"base": str(self.prefix), "platbase": str(self.prefix)}
            )
        )

    def says(self, program: str, *arguments: str) -> str:
        """What one of the environment's own programs says, without anything that this process's
        environment says of Python or plugins.
        """
        passed = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "HGMS_PLUGINS", "PYTEST"))
        }
        answer = {
            **passed,
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HGMS_STRICT_PLUGINS": "1",
        }
        command = [str(self.prefix / "bin" / program), *arguments]
        done = subprocess.run(
            command,
            cwd=self.home,
            env=answer,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, (
            f"{program} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout


def build(wheels: Path, projects: Iterable[Path]) -> list[Path]:
    """A wheel of each project."""
    subprocess.run(
        [sys.executable, "-c", BUILD, str(wheels), *map(str, projects)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return sorted(wheels.glob("*.whl"))


def install(folder: Path) -> None:
    """Our wheel and those of all examples, in ``folder``/wheels and installed into
    ``folder``/venv.
    """
    prefix = folder / "venv"
    wheels = folder / "wheels"
    venv.create(prefix, symlinks=True)
    behind = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (Stranger(prefix, wheels, folder).site / "behind.pth").write_text(
        "".join(f"{path}\n" for path in behind)
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(prefix / "bin" / "python"),
        "install",
        "--no-index",
        "--no-deps",
    ]
    # Not even looked at: what is behind is another's, and must not be taken for an older version to
    # remove.
    pip += ["--ignore-installed", "--no-warn-script-location", "--disable-pip-version-check"]
    # whatever the environment says: those who import it later write no bytecode
    pip += ["--compile"]
    subprocess.run(
        [*pip, *map(str, build(wheels, (ROOT, *PROJECTS)))],
        check=True,
        capture_output=True,
        timeout=300,
    )


def metadata(project: Path) -> dict[str, Any]:
    """The table ``project`` of its pyproject.toml."""
    answer: dict[str, Any] = tomllib.loads(
        (project / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    return answer


def plugin_of(project: Path) -> tuple[str, str]:
    """The name and the module of its one entry point."""
    ((name, module),) = metadata(project)["entry-points"]["hgms"].items()
    return name, module
