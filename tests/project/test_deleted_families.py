"""A family of plugins can be deleted: its folder, its tests, its entry points and its row in the
table of its namespace. The tests of everything else still pass.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from support.helpers import load_script

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ["hgms.methods.crossfit", "hgms.methods.reweighting", "hgms_mix.methods.fastmix"]
TESTS = ["tests/core", "tests/hgms", "tests/hgms_mix", "plugins"]


def delete(copy: Path, family: str) -> None:
    """Delete a family from a copy of the project that has entry points of its own."""
    shutil.rmtree(copy.joinpath("plugins", *family.split(".")))
    for path in copy.joinpath("tests").rglob("*.py"):
        if re.search(rf"^ *(?:from|import) {re.escape(family)}\b", path.read_text(), re.MULTILINE):
            path.unlink()
    namespace = copy.joinpath("plugins", *family.split(".")[:-1])
    for table in (*copy.glob("plugins/*.dist-info/entry_points.txt"), *namespace.glob("__init__*")):
        lines = table.read_text().splitlines(keepends=True)
        table.write_text("".join(line for line in lines if not mentions(family, line)))


def mentions(family: str, line: str) -> bool:
    return re.search(rf"\b{re.escape(family)}\b", line) is not None


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_other_tests_pass_without_a_family(family: str, tmp_path: Path) -> None:
    mutations = load_script("hgms_benchmark_mutations", ROOT / "benchmarks" / "mutations.py")
    copy = tmp_path / "copy"
    mutations.copy_tree(ROOT, copy)
    record = Path(str(distribution("hgms").locate_file(""))).glob("hgms-*.dist-info")
    for folder in record:  # found before the installed one, because the copy is on the path
        shutil.copytree(folder, copy / "plugins" / folder.name)
    delete(copy, family)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "plugins"), str(copy / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    listing = "tests/hgms/testing/test_builtins.py::test_everything_promised_is_registered"
    options = ["-q", "-x", "-n", "2", "-p", "no:cacheprovider", "--tb=short", "--deselect", listing]
    done = subprocess.run(
        [sys.executable, "-P", "-c", mutations.RUN, copy, *options, *TESTS],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
