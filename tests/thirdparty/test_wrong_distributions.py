"""Wrong plugins that are installed: all of them at once, as a person meets them, in processes of
their own. Each is named with its fault, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from plugin_mistakes import ENVIRONMENT, headed, hgms, solver
from support.fakes import Site

pytestmark = pytest.mark.extended

CONFIG = """
seed = 3
budget = "3 steps"
task = "quadratic"
method = { name = "hg-ms", generator = { steps = 4 } }
"""
RETURN = "    return [Mine]"
HOOK = "\n\n\n@hookimpl"
PRECISION = "\n\n\ntorch.set_default_dtype(torch.float64)"
REGISTER = "hgms_register_linear_solvers"
STEP = "hgms_step_finished"


def observer(hook: str, body: str) -> str:
    return f"from hgms_core import hookimpl\n\n@hookimpl\ndef {hook}:\n    {body}\n"


def own(name: str, old: str, new: str) -> tuple[str, str]:
    return name, solver(name, (old, new))


BROKEN: list[tuple[str, str, str, str]] = [
    # the plugin's name, its source, its status, and what is said of it
    ("import-error", "import nowhere_at_all", "failed", "ModuleNotFoundError"),
    ("syntax", "x = 1\ndef f(:\n", "failed", "SyntaxError"),
    ("exits", "import sys\nsys.exit(3)", "failed", "sys.exit(3)"),
    ("base", "raise BaseException('base')", "failed", "BaseException"),
    ("no-hook", "x = 1", "failed", "no hook"),
    ("hook", solver("hook", ("linear_solvers", "linear_solver")), "failed", f"'{REGISTER}'?"),
    ("observer", observer("hgms_step_finish(record)", "pass"), "failed", f"'{STEP}'?"),
    ("unmarked", solver("unmarked", ("@hookimpl\n", "")), "failed", "@hookimpl"),
    ("asks", observer(f"{STEP}(record, model)", "pass"), "failed", "'model'"),
    ("newer", headed("hgms_plugin_api = 99", "newer"), "failed", "API 99"),
    ("older", headed("hgms_plugin_api = 1", "older"), "failed", "API 1"),
    ("ULA", solver("ula-2"), "failed", "'ula'"),
    ("attribute:Plugin", solver("attribute"), "failed", "has no attribute 'Plugin'"),
    (*own("twice", RETURN, "    return [Mine, Mine]"), "incomplete", "'twice'"),
    (*own("raises", RETURN, "    return [Mine][1]"), "incomplete", "IndexError"),
    (*own("leaves", RETURN, "    raise SystemExit(4)"), "incomplete", "sys.exit(4)"),
    (*own("no-list", RETURN, "    return Mine"), "incomplete", "must return a list"),
    (*own("instance", RETURN, "    return [Mine()]"), "incomplete", "not a class"),
    (*own("method", "def solve", "def slove"), "incomplete", "solve(matvec, b, x0=None)"),
    (*own("signature", "b: torch.Tensor, x0", "rhs: torch.Tensor, x0"), "incomplete", "rhs"),
    ("capitals", solver("CG"), "incomplete", "kebab-case"),
    ("before", solver("cg"), "incomplete", "HGMS_DISABLE_PLUGINS=before"),
    ("zoo", solver("cg"), "incomplete", "HGMS_DISABLE_PLUGINS=zoo"),
    ("one", solver("fast-cg"), "loaded", ""),
    ("two", solver("fast-cg"), "incomplete", "hgms_third_one:Mine"),
    ("prints", headed('print("hello")', "prints"), "loaded", ""),
    (*own("dtype", HOOK, PRECISION + HOOK), "loaded", "torch's default dtype"),
    ("excepthook", headed("import sys\n\nsys.excepthook = print", "ex"), "loaded", "excepthook"),
    ("divides", observer(f"{STEP}(record)", "1 / 0"), "loaded", "ZeroDivisionError"),
    ("stops", observer("hgms_run_started(run)", "raise SystemExit(1)"), "loaded", "sys.exit(1)"),
    ("ends", observer("hgms_run_finished(summary)", "summary['x'][1]"), "loaded", "KeyError"),
    ("empties", observer(f"{STEP}(record)", "record.clear()"), "loaded", ""),
    ("draws", observer(f"{STEP}(record)", "import torch; torch.manual_seed(0)"), "loaded", ""),
    ("takes", observer("hgms_register_commands(cli)", "cli.command('run')(print)"), "loaded", ""),
    ("command", observer("hgms_register_commands(cli)", "cli.no"), "loaded", "AttributeError"),
]


def install(folder: Path, name: str, source: str) -> None:
    entry, _, attribute = name.partition(":")
    module = "hgms_third_" + entry.replace("-", "_")
    site = Site(folder)
    site.module(module, source)
    site.install(f"hgms-{entry}", {entry: f"{module}:{attribute}" if attribute else module})


Call = Callable[[Sequence[str]], tuple[int, str, str]]


Seen = tuple[int, list[bytes], list[dict[str, Any]]]
"""How a run ended, byte for byte, and what there was to choose from that is ours."""


def seen(folder: Path, call: Call) -> tuple[Seen, str]:
    """Lists, then runs; and what was said on stderr."""
    (folder / "run.toml").write_text(CONFIG)
    code, listing, said = call(["list", "--json"])
    assert code == 0, said
    ours = [item for item in json.loads(listing) if item["distribution"] == "hgms"]
    with contextlib.chdir(folder):
        code, out, error = call(["run", "run.toml", "--json", "--out", "runs"])
    assert json.loads(out)["status"] == "done", error
    files = [next(folder.rglob(name)).read_bytes() for name in ("steps.jsonl", "summary.json")]
    return (code, files, ours), said + error


def within(words: Sequence[str]) -> tuple[int, str, str]:
    result = hgms(*words)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, str, dict[str, Any]]:
    """With all of them: what was seen, what was said, and their rows in ``hgms plugins``."""
    folder = tmp_path_factory.mktemp("broken")
    for name, source, _, _ in BROKEN:
        install(folder, name, source)
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    environment["PYTHONPATH"] = str(folder)

    def call(words: Sequence[str]) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "hgms", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        return done.returncode, done.stdout, done.stderr

    result, said = seen(tmp_path_factory.mktemp("with"), call)
    code, out, error = call(["plugins", "--json"])
    assert code == 0, error
    rows = {row["distribution"]: row for row in json.loads(out)}
    return result, said + call(["no-such-command"])[2], rows


def test_nothing_else_changes(
    told: tuple[Seen, str, dict[str, Any]], fresh: Path, tmp_path: Path
) -> None:
    result, said, _ = told
    assert result == seen(tmp_path, within)[0]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "status", "words"), [(row[0].partition(":")[0], *row[2:]) for row in BROKEN]
)
def test_the_host_names_the_fault(
    told: tuple[Seen, str, dict[str, Any]], name: str, status: str, words: str
) -> None:
    _, said, rows = told
    row = rows[f"hgms-{name}"]
    assert row["status"] == status, row
    lines = [line for line in said.splitlines() if name in line]
    assert words in f"{row['error']} {' '.join(row['notes'])} {' '.join(lines)}"
