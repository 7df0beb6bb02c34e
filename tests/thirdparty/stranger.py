"""Every distribution under ``docs/examples`` as a stranger has it: a wheel, in a virtual environment with our wheel beside it.

Nothing is downloaded: a ``.pth`` file shows the environment what this interpreter has installed, behind its own packages. The
``.pth`` files of those folders are not read, so an editable install of this working tree stays out of sight.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any

from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = tuple(sorted(path.parent for path in (ROOT / "docs" / "examples").glob("*/pyproject.toml")))
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
    """Somebody else's machine: ``site`` is where its wheels were installed, ``home`` where commands run."""

    prefix: Path
    home: Path

    @property
    def wheels(self) -> Path:
        return self.prefix.parent / "wheels"

    @property
    def site(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.prefix), "platbase": str(self.prefix)}))

    def wheel(self, project: Path) -> Path:
        (found,) = self.wheels.glob(f"{project.name.replace('-', '_')}-*.whl")
        return found

    def does(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One of the environment's own programs, without anything that this process's environment says of Python or plugins."""
        passed = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HGMS_PLUGINS", "PYTEST"))
        }
        told = {**passed, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "HGMS_STRICT_PLUGINS": "1"}
        command = [str(self.prefix / "bin" / program), *arguments]
        return subprocess.run(command, cwd=self.home, env=told, capture_output=True, text=True, timeout=300, check=False)

    def says(self, program: str, *arguments: str) -> str:
        done = self.does(program, *arguments)
        assert done.returncode == 0, f"{program} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        assert "warning" not in done.stderr.lower(), done.stderr
        return done.stdout


def install(folder: Path) -> None:
    """Wheels of ours and of all examples, built and installed into ``folder``/venv."""
    wheels, prefix = folder / "wheels", folder / "venv"
    command = [sys.executable, "-c", BUILD, str(wheels), str(ROOT), *map(str, PROJECTS)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    venv.create(prefix, symlinks=True)
    stranger = Stranger(prefix, folder)
    behind = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (stranger.site / "behind.pth").write_text("".join(f"{path}\n" for path in behind))
    pip = [sys.executable, "-m", "pip", "--python", str(prefix / "bin" / "python"), "install", "--no-index", "--no-deps"]
    # Not even looked at: what is behind is another's, and must not be taken for an older version to remove.
    pip += ["--ignore-installed", "--no-warn-script-location", "--disable-pip-version-check"]
    subprocess.run([*pip, *map(str, wheels.glob("*.whl"))], check=True, capture_output=True, timeout=300)


def metadata(project: Path) -> dict[str, Any]:
    """The table ``project`` of its pyproject.toml."""
    told: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return told


def plugin_of(project: Path) -> tuple[str, str]:
    """The name and the module of its one entry point."""
    ((name, module),) = metadata(project)["entry-points"]["hgms"].items()
    return name, module
