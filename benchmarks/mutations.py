"""Deliberate mistakes in a copy of the project, and whether the tests catch them.

Each mutation of ``mutations/*.toml`` is applied separately to a copy of the working tree. Then
the tests run that belong to the mutated package: the doctests of the module, the test file of the
module, the tests of its package, and those of the packages that import it. A mutation is caught
if a test fails, provided that this test passes in the copy without the mutation::

    python benchmarks/mutations.py                   # by the default tier
    python benchmarks/mutations.py --tier extended   # those that the default tier missed
    python benchmarks/mutations.py --only 7 12
    python benchmarks/mutations.py --list

A mutation has an ``area``, a description ``what``, and replaces the text ``old`` by ``new``. It
names no path and no test, so it survives a move: ``old`` occurs exactly once in all modules of
``hgms_core`` and ``plugins`` (line breaks and indentation do not count).

The results are stored in ``results/mutations.json``; docs/reference/benchmarks-scale.md shows
them. The exit code is 0 if all mutations are caught, else 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from attrs import asdict, evolve, frozen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORD = HERE / "results" / "mutations.json"
PACKAGES = ("hgms_core", "plugins")
TIERS = {"default": [], "extended": ["-m", "extended and not nightly"]}
"""The options of pytest that select a tier."""
PATIENCE = 900
"""The maximum time for the tests of one mutation, in seconds. A hang is not a failure."""

RUN = """
import importlib.util, pathlib, sys
copy = pathlib.Path(sys.argv[1])
for package in ("hgms", "hgms_core", "hgms_mix"):
    spec = importlib.util.find_spec(package)
    if spec is None or copy not in pathlib.Path(spec.origin).resolve().parents:
        sys.exit(f"{package} would not be imported from the copy, but from {spec and spec.origin}")
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
"""Runs pytest in a process that imports only the copy."""


class NotApplicable(Exception):
    """A mutation with a missing or ambiguous text."""


@frozen(kw_only=True)
class Mutation:
    area: str
    what: str
    old: str
    new: str

    def applied(self, texts: Mapping[Path, str]) -> tuple[Path, str]:
        """Return the single module that contains ``old``, and its text with ``new`` instead."""
        pattern = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        hits = [(path, match) for path, text in texts.items() for match in pattern.finditer(text)]
        if len(hits) != 1:
            places = ", ".join(sorted({path.name for path, _ in hits})) or "no module"
            raise NotApplicable(f"{self.old!r} occurs {len(hits)} times ({places})")
        path, match = hits[0]
        return path, match.string[: match.start()] + self.new + match.string[match.end() :]


@frozen(kw_only=True)
class Verdict:
    area: str
    what: str
    tier: Literal["default", "extended", "none"]
    reason: str
    """The failing test, or the reason why no test failed."""


def mutations() -> list[Mutation]:
    rows = []
    for path in sorted((HERE / "mutations").glob("*.toml")):
        rows += tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**row) for row in rows]


def modules(root: Path) -> list[Path]:
    return [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]


def texts(root: Path) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in modules(root)}


def package_of(module: Path, root: Path) -> str:
    """The dotted name of the package that the tests mirror: ``hgms.solvers``.

    >>> package_of(Path("/copy/plugins/hgms/solvers/krylov/cg.py"), Path("/copy"))
    'hgms.solvers'
    >>> package_of(Path("/copy/hgms_core/trees.py"), Path("/copy"))
    'hgms_core'
    """
    parts = module.relative_to(root).parts
    if parts[0] == "hgms_core":
        return "hgms_core"
    return ".".join(parts[1 : 3 if len(parts) > 3 else 2])


def folder_of(package: str, root: Path) -> Path:
    """The folder with the tests of a package."""
    names = ["core"] if package == "hgms_core" else package.split(".")
    return root.joinpath("tests", *names)


def users(package: str, root: Path) -> list[str]:
    """The packages that import a package, those with the fewest modules first."""
    sizes: dict[str, int] = {}
    importing = set()
    for module in modules(root):
        user = package_of(module, root)
        sizes[user] = sizes.get(user, 0) + 1
        if any(name.startswith(package) for name in _imports(module)):
            importing.add(user)
    return sorted(importing - {package}, key=lambda name: (sizes[name], name))


def _imports(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tests_of(module: Path, root: Path) -> list[Path]:
    """Return the tests for a mutated module, in order of their likelihood to fail."""
    package = package_of(module, root)
    own = folder_of(package, root)
    stem = module.parent.name if module.stem == "__init__" else module.stem
    named = sorted(own.rglob(f"test_{stem}*.py")) if own.is_dir() else []
    folders = [own, *(folder_of(user, root) for user in users(package, root))]
    return list(dict.fromkeys([module, *named, *(path for path in folders if path.is_dir())]))


def copy_tree(source: Path, target: Path) -> None:
    """Copy the files that git tracks, or would track."""
    listing = ["git", "-C", source, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, check=True, capture_output=True, text=True)
    for name in filter(None, done.stdout.split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)


def run(root: Path, nodes: Sequence[str], tier: str) -> subprocess.CompletedProcess[str]:
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *TIERS[tier]]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "plugins")]),
        # otherwise a change of one character within a second could go unnoticed
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-P", "-c", RUN, root, *options, *nodes],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def failing(root: Path, nodes: Sequence[str], tier: str) -> tuple[str | None, str]:
    """Return the first failing test, or the reason why none failed."""
    try:
        done = run(root, nodes, tier)
    except subprocess.TimeoutExpired:
        return None, f"no end after {PATIENCE} s"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found:
        return found[1], ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return None, lines[-1] if lines else "pytest printed nothing"


def tried(mutation: Mutation, root: Path, tier: Literal["default", "extended"]) -> Verdict:
    """Return whether the tests of a tier catch a mutation in the copy ``root``."""
    verdict = Verdict(area=mutation.area, what=mutation.what, tier="none", reason="")
    try:
        path, broken = mutation.applied(texts(root))
    except NotApplicable as error:
        return evolve(verdict, reason=str(error))
    nodes = [str(node.relative_to(root)) for node in tests_of(path, root)]
    whole = path.read_text(encoding="utf-8")
    path.write_text(broken, encoding="utf-8")
    try:
        test, why = failing(root, nodes, tier)
    finally:
        path.write_text(whole, encoding="utf-8")
    if test is None:
        return evolve(verdict, reason=why)
    unbroken, _ = failing(root, [test], tier)
    if unbroken is not None:
        return evolve(verdict, reason=f"{test} fails without the mutation as well")
    return evolve(verdict, tier=tier, reason=test)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Do the tests catch deliberate mistakes?")
    parser.add_argument("--list", action="store_true", help="print the mutations")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="try these")
    parser.add_argument("--tier", choices=TIERS, default="default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="copies at a time")
    options = parser.parse_args(arguments)
    numbered = dict(enumerate(mutations(), start=1))
    if unknown := sorted(set(options.only or ()) - set(numbered)):
        parser.error(f"--only accepts numbers from 1 to {len(numbered)}: {unknown}")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    chosen = {
        number: mutation
        for number, mutation in numbered.items()
        if number in (options.only or numbered)
        and (
            options.tier == "default"
            or record.get(mutation.what, {}).get("tier", "none") != "default"
        )
    }
    if options.list:
        for number, mutation in chosen.items():
            print(f"{number:3} {mutation.area:14} {mutation.what}")
        return 0

    with tempfile.TemporaryDirectory(prefix="hgms-mutations-") as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copy = Path(folder).resolve() / str(job)
            copy_tree(ROOT, copy)
            free.put(copy)

        def attempt(number: int) -> Verdict:
            copy = free.get()
            began = time.monotonic()
            verdict = tried(numbered[number], copy, options.tier)
            free.put(copy)
            word = "MISSED" if verdict.tier == "none" else "caught"
            print(
                f"{number:3} {word} {time.monotonic() - began:5.0f} s  {verdict.area:14} "
                f"{verdict.what}\n{'':19}{verdict.reason}",
                flush=True,
            )
            return verdict

        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(attempt, chosen))
    record |= {verdict.what: asdict(verdict) for verdict in verdicts}
    kept = {
        mutation.what: record[mutation.what]
        for mutation in numbered.values()
        if mutation.what in record
    }
    RECORD.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    caught = sum(verdict.tier != "none" for verdict in verdicts)
    print(f"\n{caught} of {len(verdicts)} caught by tier {options.tier}")
    return int(caught < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
