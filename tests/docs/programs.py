"""The programs that a page's console blocks may call beside ``hgms``: cd, cat, ``pip install
-e`` and pytest.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

SITE = str(Path("site").resolve())
"""What stands for the reader's environment on this page."""

NOT_THE_READERS = ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "FORCE_COLOR", "NO_COLOR", "PY_COLORS")
"""Settings that make pytest and our commands print in another way than in the reader's terminal:
where CI is set, pytest no longer cuts the lines of its summary."""

SOURCES: list[str] = []
"""The sources of what is installed, which come before it: with -e a change of them is a change
of what is installed.
"""


def cd(arguments: list[str]) -> tuple[int, str]:
    (folder,) = arguments
    os.chdir(folder)
    return 0, ""


def cat(arguments: list[str]) -> tuple[int, str]:
    return 0, "".join(Path(file).read_text(encoding="utf-8") for file in arguments)


def pip(arguments: list[str]) -> tuple[int, str]:
    """Installs the project alone, without a network, into ``SITE``."""
    assert arguments[:2] == ["install", "-e"], f"pages install with pip install -e: {arguments}"
    project = arguments[2].partition("[")[0]
    code, output = _called(
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-t",
        SITE,
        project,
    )
    assert code == 0, output
    SOURCES.append(str(Path(project, "src").resolve()))
    sys.path[:0] = [SOURCES[-1], SITE]
    importlib.invalidate_caches()
    return 0, ""


def pytest(arguments: list[str]) -> tuple[int, str]:
    code, output = _called("pytest", "-p", "no:cacheprovider", "--color=no", *arguments)
    return code, re.sub(r"\bin [\d.]+s\b", "in ... s", output)


def _called(module: str, *arguments: str) -> tuple[int, str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in NOT_THE_READERS},
        "PYTHONPATH": os.pathsep.join([*SOURCES, SITE, os.environ.get("PYTHONPATH", "")]),
        "COLUMNS": "80",
    }
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    return done.returncode, done.stdout + done.stderr


PROGRAMS: Mapping[str, Callable[[list[str]], tuple[int, str]]] = {
    "cd": cd,
    "cat": cat,
    "pip": pip,
    "pytest": pytest,
}


def called(command: str, expected: str) -> str | None:
    """What the command prints, if it calls one of these programs."""
    program, *arguments = shlex.split(command)
    if program not in PROGRAMS:
        return None
    code, output = PROGRAMS[program](arguments)
    assert code == code_of(expected), f"$ {command}\nleft with {code}:\n{output}"
    return output


def code_of(expected: str) -> int:
    """The exit code that goes with an output: 2 for wrong input, 1 for checks, tests or runs
    that fail, else 0.
    """
    failed = re.search(
        r"^(\d+|\.\.\.) passed, (\d+|\.\.\.) failed|^(=+ )?\d+ failed|^failed: ",
        expected,
        re.MULTILINE,
    )
    return 2 if expected.startswith("error:") else 1 if failed else 0
