"""Thirty deliberate mistakes, and whether the tests catch them.

Every mutation of ``mutations.toml`` is applied, one at a time, to a scratch copy of the working
tree; the tests that it names are run there, and at least one has to fail. Before that the same
tests have to pass on the unbroken copy. The working tree is only read.

::

    python benchmarks/mutations.py              # all of them, some minutes
    python benchmarks/mutations.py --list
    python benchmarks/mutations.py --only 7 12

A mutation says ``what`` is wrong, replaces the text ``old`` by ``new``, and names ``tests``. It
knows no path, so it survives a move: ``old`` is searched in all modules of ``hgms_core`` and
``plugins`` (line breaks and indentation do not matter) and has to stand in exactly one place; a
test function is searched in all test files. What is not found, or found in several places, counts
as not caught.

Exit code: 0 if all are caught, else 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

HERE = Path(__file__).resolve().parent
TREE = HERE.parent
PATIENCE = 180
"""Seconds that the tests of one mutation may take; a hang is not a test that fails."""

RUN = """
import importlib.util, pathlib, sys
scratch, packages, arguments = pathlib.Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
for package in packages:
    spec = importlib.util.find_spec(package)
    if spec is None or scratch not in pathlib.Path(spec.origin).resolve().parents:
        found = spec and spec.origin
        sys.exit(f"REFUSED: {package} would be imported from {found}, not from the scratch copy")
import pytest
sys.exit(pytest.main(arguments))
"""
"""Runs pytest in a process that imports the scratch copy, or nothing at all."""


class Trouble(Exception):
    """A mutation that cannot be tried."""


@frozen(kw_only=True)
class Mutation:
    area: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, modules: Sequence[Path]) -> tuple[Path, str]:
        """The one module that holds ``old``, and its text with ``new`` instead."""
        pattern = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        hits = [
            (path, match)
            for path in modules
            for match in pattern.finditer(path.read_text(encoding="utf-8"))
        ]
        if len(hits) != 1:
            places = ", ".join(sorted({path.name for path, _ in hits}))
            raise Trouble(
                f"snippet found in {len(hits)} places ({places})" if hits else "snippet not found"
            )
        path, match = hits[0]
        return path, match.string[: match.start()] + self.new + match.string[match.end() :]


def mutations() -> list[Mutation]:
    with (HERE / "mutations.toml").open("rb") as stream:
        rows = tomllib.load(stream)["mutation"]
    return [Mutation(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def copy_tree(source: Path, target: Path) -> None:
    """The files that git tracks, or would track."""
    command = [
        "git",
        "-C",
        str(source),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(
        "\0"
    ):
        if name and (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


class Tree:
    """A checkout: its packages and the folders to import them from, its modules, its test
    functions.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        files = [
            path
            for place in ("hgms_core", "plugins", "tests")
            for path in sorted((self.folder / place).rglob("*.py"))
        ]
        self.modules = [
            path for path in files if "tests" not in path.relative_to(self.folder).parts
        ]
        self._functions = {
            path: list(_functions(path)) for path in files if path.name.startswith("test_")
        }
        packages = [path.parent for path in self.modules if path.name == "__init__.py"]
        top = [package for package in packages if package.parent not in packages]
        self.packages = [package.name for package in top]
        self.places = list(dict.fromkeys(package.parent for package in top))

    def nodes(self, names: Sequence[str]) -> list[str]:
        """The test functions of these names, as pytest spells them."""
        nodes = []
        for name in names:
            places = [
                f"{path.relative_to(self.folder)}::{node}"
                for path, functions in self._functions.items()
                for node in functions
                if node.rpartition("::")[2] == name
            ]
            if not places:
                raise Trouble(f"test not found: {name}")
            nodes += places
        return list(dict.fromkeys(nodes))

    def run(
        self, nodes: Sequence[str], patience: float = PATIENCE
    ) -> subprocess.CompletedProcess[str]:
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:randomly"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [*map(str, self.places), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            # else a change of one character within a second could go unnoticed
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            [
                sys.executable,
                "-c",
                RUN,
                str(self.folder),
                ",".join(self.packages),
                *options,
                *nodes,
            ],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
        )


def _functions(path: Path) -> Iterator[str]:
    """The test functions of a file, those of classes as ``Class::function``."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name
        elif isinstance(statement, ast.ClassDef):
            yield from (
                f"{statement.name}::{part.name}"
                for part in statement.body
                if isinstance(part, ast.FunctionDef)
            )


def tried(mutation: Mutation, scratch: Tree) -> tuple[bool, str]:
    """Whether the mutation is caught, and by which test (or why not)."""
    try:
        nodes = scratch.nodes(mutation.tests)
        path, broken = mutation.applied(scratch.modules)
    except Trouble as trouble:
        return False, str(trouble)
    whole = path.read_text(encoding="utf-8")
    path.write_text(broken, encoding="utf-8")
    try:
        outcome = scratch.run(nodes)
    except subprocess.TimeoutExpired:
        return False, f"no end after {PATIENCE} s"
    finally:
        path.write_text(whole, encoding="utf-8")
    if outcome.returncode == 0:
        return False, "all its tests pass"
    failed = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+\.py::\S+)", outcome.stdout, re.MULTILINE)
    if outcome.returncode != 1 or failed is None:
        return False, f"the tests did not run: {_last_lines(outcome)}"
    return True, failed[1]


def _last_lines(outcome: subprocess.CompletedProcess[str], count: int = 5) -> str:
    return " | ".join((outcome.stdout + outcome.stderr).strip().splitlines()[-count:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Are deliberate mistakes caught by the tests?")
    parser.add_argument("--list", action="store_true", help="what the mutations are")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these alone")
    options = parser.parse_args(arguments)
    numbered = dict(enumerate(mutations(), start=1))
    if unknown := sorted(set(options.only or ()) - set(numbered)):
        parser.error(f"--only takes numbers from 1 to {len(numbered)}: {unknown}")
    chosen = {
        number: mutation
        for number, mutation in numbered.items()
        if options.only is None or number in options.only
    }
    if options.list:
        for number, mutation in chosen.items():
            print(
                f"{number:3} {mutation.area:14} {mutation.what}\n{'':19}{', '.join(mutation.tests)}"
            )
        return 0

    with tempfile.TemporaryDirectory(prefix="hgms-mutations-") as folder:
        copy_tree(TREE, Path(folder))
        scratch = Tree(Path(folder))
        nodes: list[str] = []
        for mutation in chosen.values():
            with contextlib.suppress(Trouble):  # said when its turn comes
                nodes += scratch.nodes(mutation.tests)
        outcome = scratch.run(list(dict.fromkeys(nodes)), patience=PATIENCE * len(chosen))
        if outcome.returncode != 0:
            print(
                "the unbroken copy does not pass:\n"
                f"{outcome.stdout[-3000:]}{outcome.stderr[-3000:]}"
            )
            return 1
        print(f"unbroken: {outcome.stdout.strip().splitlines()[-1]}\n", flush=True)
        missed = 0
        for number, mutation in chosen.items():
            began = time.monotonic()
            caught, why = tried(mutation, scratch)
            missed += not caught
            verdict = "caught" if caught else "MISSED"
            seconds = time.monotonic() - began
            print(
                (
                    f"{number:3} {verdict} {seconds:5.1f} s  {mutation.area:14} {mutation.what}\n"
                    f"{'':19}{why}"
                ),
                flush=True,
            )
    print(f"\n{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
