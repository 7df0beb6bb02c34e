"""A plugin file that a person names: what is wrong with it is an error at once, by its place."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from plugin_mistakes import headed, hgms, solver
from support.helpers import rejects

from hgms.plugins import Registry

pytestmark = pytest.mark.extended

HOOK = "hgms_register_linear_solver"
FILES: list[tuple[str, str | None, str, tuple[str, ...] | None]] = [
    # the file, its text, the error's code and place; None is the file itself
    ("my_slover.py", None, "missing-file", None),
    ("my_solver.txt", "hello", "wrong-value", None),
    ("folder/", "", "wrong-value", None),
    ("syntax.py", "x = 1\ndef f(:\n", "plugin-failed", ()),
    ("imports.py", "import nowhere_at_all", "plugin-failed", ()),
    ("exits.py", "raise SystemExit(3)", "plugin-failed", ()),
    ("latin.py", 'x = "\udce9"', "plugin-failed", ()),
    ("hook.py", solver("bad", ("_solvers()", "_solver()")), "unknown-hook", (HOOK,)),
    ("mark.py", solver("bad", ("@hookimpl\n", "")), "unmarked-hook", (HOOK + "s",)),
    ("name.py", solver("cg"), "duplicate-name", ()),
    ("method.py", solver("bad", ("def solve", "def slove")), "incomplete-component", ()),
    ("api.py", headed("hgms_plugin_api = 99"), "wrong-plugin-api", ("hgms_plugin_api",)),
]


@pytest.mark.parametrize(("name", "source", "code", "place"), FILES)
def test_a_named_file_is_an_error_by_code_and_place(
    fresh: Path, name: str, source: str | None, code: str, place: tuple[str, ...] | None
) -> None:
    if name.endswith("/"):
        (fresh / name).mkdir()
    elif source is not None:
        (fresh / name).write_text(source, errors="surrogateescape")
    with rejects(code, *((str(fresh / name),) if place is None else place)):
        Registry.load([fresh / name]).get("solver", "bad")
    result = hgms("list", "solver", "--plugin", fresh / name)
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert name.strip("/") in result.stderr


def test_one_file_named_in_two_ways_is_one_plugin_and_two_of_one_name_are_two(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh / "other").mkdir()
    (fresh / "mine.py").write_text(solver("one"))
    (fresh / "other" / "mine.py").write_text(solver("two"))
    monkeypatch.chdir(fresh)
    monkeypatch.setenv("HOME", str(fresh))
    files = ["mine.py", "./mine.py", fresh / "mine.py", "~/mine.py", "other/mine.py"]
    words = [word for item in files for word in ("--plugin", item)]
    rows = json.loads(hgms("list", "solver", "--json", *words).stdout)
    plugins = [row["plugin"] for row in rows if row["distribution"] is None]
    assert plugins == ["mine", "other/mine.py"]
    registry = Registry.load(files)
    classes = [registry.get("solver", name).target for name in ("one", "two")]
    # each under a module of its own
    assert pickle.loads(pickle.dumps(classes)) == classes
