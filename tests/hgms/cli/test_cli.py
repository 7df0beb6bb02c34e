"""The command line, with plugins made in the test: broken ones, their commands, runs and exit
codes, streams.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.fakes import Site, call, json_of

import hgms_core
from hgms.runs import Interrupted
from hgms_core import PLUGIN_API, NumericalError

CONFIG = """
task = "one"
method = "halve"
budget = "3 steps"
"""
COMMANDS = """
import click, sys
from hgms.cli import plugin_option
from hgms_core import hookimpl

@hookimpl
def hgms_register_commands(cli):
    @cli.command("leave")
    def leave():
        sys.exit(7)

    @cli.command("report")
    @click.argument("folder")
    def report(folder):
        click.echo(f"tidy: {folder}")

    @cli.command("count")
    @plugin_option
    @click.pass_obj
    def count(host, registry):
        same = host is registry.host
        solvers = len(registry.components("solver"))
        click.echo(f"{same} {solvers} {len(host.installed_entries['hgms'])}")
"""


# --- plugins
# --------------------------------------------------------------------------------------------------


def test_plugins_works_whatever_is_broken(fake: Site) -> None:
    fake.module("bad_plugin", "import does_not_exist_anywhere\n")
    fake.install("hgms", {"ours": "bad_plugin"}, version="0.1.0")
    rows = {row["name"]: row for row in json_of("plugins")}
    assert rows["fake"] == {
        "seconds": rows["fake"]["seconds"],
        "name": "fake",
        "module": "fake_plugin",
        "distribution": "hgms-fake",
        "version": "3.0",
        "status": "loaded",
        "hooks": ["hgms_register_commands", "hgms_register_methods", "hgms_register_tasks"],
        "error": None,
        "install": None,
        "notes": [],
    }
    error = "ModuleNotFoundError: No module named 'does_not_exist_anywhere'"
    assert (rows["ours"]["status"], rows["ours"]["error"]) == ("failed", error)
    done = call("plugins")
    assert f"plugin API {PLUGIN_API}" in done.stdout
    assert done.stderr.count("warning: plugin 'ours' (hgms 0.1.0)") == 1
    assert "Traceback" not in done.output
    assert "Traceback (most recent call last)" in call("plugins", "-v").stdout
    failed = call("list")
    assert (failed.exit_code, failed.stderr.split(" (")[0]) == (2, "error: plugin 'ours'")


@pytest.mark.parametrize(
    "source",
    [
        "1 / 0",
        "from hgms_core import hookimpl\n@hookimpl\ndef hgms_register_commands(cli): 1 / 0\n",
    ],
)
def test_a_broken_third_party_plugin_is_one_warning_and_spoils_nothing(
    fake: Site, source: str
) -> None:
    fake.module("bad_plugin", source)
    fake.install("hgms-bad", {"bad": "bad_plugin"})
    assert call("list", "--json").exit_code == 0
    done = call("greet")
    assert done.stdout == "hello\n"
    lines = [line for line in done.stderr.splitlines() if "'bad'" in line]
    assert lines[0].startswith("warning: plugin 'bad' (hgms-bad 1.0)")
    assert "ZeroDivisionError" in lines[0]
    assert "stolen" not in call("list").stdout, "plugins add commands, but take none"


def test_a_command_has_its_own_exit_code_and_the_host_of_its_invocation(site: Site) -> None:
    site.module("commands", COMMANDS)
    site.install("hgms-commands", {"commands": "commands"})
    left = call("leave")
    assert (left.exit_code, "error" in left.stderr) == (7, False)
    file = site.solver("mine", "my-solver")
    shown = [call("count", *words).stdout for words in ((), ("--plugin", file), ())]
    # nothing is kept from one invocation to the next
    assert shown == ["True 0 1\n", "True 1 1\n", "True 0 1\n"]


def test_an_installed_program_takes_the_place_of_ours(site: Site) -> None:
    site.module("tidy_report", COMMANDS)
    site.install("hgms-tidy", {}, programs={"report": "tidy_report"}, version="1.2")
    assert call("report", "runs").stdout == "tidy: runs\n"
    (row,) = [row for row in json_of("plugins") if row["distribution"] == "hgms-tidy"]
    assert (row["name"], row["status"]) == ("tidy_report", "loaded")


# --- runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(fake: Site, tmp_path: Path) -> tuple[str | Path, ...]:
    """The words of a run."""
    (tmp_path / "run.toml").write_text(CONFIG)
    return "run", tmp_path / "run.toml", "--out", tmp_path / "runs"


def test_run_writes_a_folder_and_prints_the_summary(run: tuple[str | Path, ...]) -> None:
    arguments = (*run, "--seed", "4", "--set", "method.rate=0.25")
    summary = json_of(*arguments)
    assert summary["metrics"] == {"size": 0.25**3}
    assert (summary["task"], summary["method"], summary["seed"]) == ("one", "halve", 4)
    assert (Path(summary["folder"]) / "summary.json").exists()
    refused = call(*arguments)
    assert (refused.exit_code, "--resume" in refused.stderr) == (2, True)
    resumed = call(*arguments, "--resume")
    assert resumed.exit_code == 0
    assert resumed.stdout.splitlines()[:2] == ["one, halve, seed 4: done", "  size: 0.015625"]


def test_errors_in_a_configuration_have_no_traceback(
    run: tuple[str | Path, ...], tmp_path: Path
) -> None:
    wrong = CONFIG.replace('"halve"', '{name = "halve", rate = -1}').replace("one", "won")
    (tmp_path / "run.toml").write_text(wrong)
    done = call(*run)
    assert (done.exit_code, done.stderr.partition("\n")[0]) == (2, "error: 2 errors:")
    assert all(f"(run.toml: {place})\n" in done.stderr for place in ("task", "method.rate"))
    assert "Traceback" not in done.stderr
    debug = call("--debug", "run", tmp_path / "absent.toml")
    assert isinstance(debug.exception, hgms_core.ConfigError)


FAILING = """
from hgms_core import component, hookimpl

@component
class Failing:
    name = "failing"

    def init(self, problem, seed):
        return {"theta": problem.theta0, "x": problem.x0, "step": 0}

    def step(self, problem, state, progress):
        raise KeyError("lr")

    def result(self, state):
        return state["theta"], state["x"]

@hookimpl
def hgms_register_methods():
    return [Failing]
"""


def test_an_exception_of_a_component_is_one_line_with_its_place(
    run: tuple[str | Path, ...], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG.replace("halve", "failing"))
    (tmp_path / "failing.py").write_text(FAILING)
    command = [*run, "--plugin", tmp_path / "failing.py"]
    done = call(*command)
    assert (done.exit_code, "Traceback" in done.stderr) == (1, False)
    assert "KeyError: 'lr' (failing.py:12)" in done.stderr
    assert isinstance(call("--debug", *command, "--resume").exception, KeyError)


def test_faults_of_hgms_show_a_traceback(
    run: tuple[str | Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hgms.runs.command.run_config", Mock(side_effect=KeyError("lr")))
    assert isinstance(call(*run).exception, KeyError)


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (NumericalError("not-finite", "nothing is finite"), 1, "error: nothing is finite\n"),
        (Interrupted("interrupted; add --resume"), 130, "interrupted; add --resume\n"),
    ],
)
def test_exit_codes_of_a_run_that_fails_or_is_interrupted(
    run: tuple[str | Path, ...],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    shown: str,
) -> None:
    monkeypatch.setattr("hgms.runs.command.run_config", Mock(side_effect=error))
    done = call(*run)
    assert (done.exit_code, done.stderr) == (code, shown)


# --- streams and imports
# --------------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize(
    ("line", "escaped"),
    [
        (
            "PYTHONIOENCODING=ascii {0} compare --task quadratic --methods uniform "
            "--budget '1 step' --seeds 2 --jobs 0 --out {1}",
            True,
        ),
        ("HGMS_PLUGINS=solver-cg {0} list >&-", False),
        ("HGMS_PLUGINS=solver-cg {0} list solver | head -c 1 > /dev/null", False),
    ],
    ids=["ascii", "closed", "full pipe"],
)
def test_streams_of_any_kind(tmp_path: Path, line: str, escaped: bool) -> None:
    line = line.format(f"{sys.executable} -m hgms", tmp_path)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "sys.exit" not in done.stderr
    assert ("\\xb1" in done.stdout) is escaped


@pytest.mark.extended
def test_to_list_loads_no_configuration_machinery() -> None:
    code = (
        "import sys\nfrom hgms.cli import main\n"
        "try: main(['list', '--json'])\nexcept SystemExit: pass\n"
        "print(sorted({'cattrs', 'tomlkit', 'scipy', 'matplotlib', 'sklearn', 'rich'} & "
        "set(sys.modules)), file=sys.stderr)\n"
    )
    command, environment = [sys.executable, "-c", code], {"HGMS_PLUGINS": "", "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == "[]\n"
    assert [row["name"] for row in json.loads(done.stdout)] == ["pipeline"]


def test_version() -> None:
    assert hgms_core.__version__ == version("hgms")
    assert call("--version").stdout == f"hgms {hgms_core.__version__} (plugin API {PLUGIN_API})\n"


def test_demo_prints_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hgms.comparison import compare
    from hgms.demo import demo

    options = {"jobs": 0, "baselines": False, "progress": False}
    found = compare("quadratic", ["hg-ms", "uniform"], "1 steps", 2, tmp_path, **options)
    picture = tmp_path / "accuracy.png"
    result = demo.Demo(comparison=found, pictures=[picture], folder=tmp_path, calls=4000)
    made = Mock(return_value=result)
    monkeypatch.setattr(demo, "run_demo", made)
    words = ("demo", "--out", tmp_path, "--seeds", "2", "--calls", "4000")
    lines = call(*words).stdout.splitlines()
    made.assert_called_once_with(tmp_path, seeds=2, calls=4000, progress=True)
    assert lines[0].startswith("4,000 oracle calls per run, 2 seeds")
    [shown] = [line.split() for line in lines if line.strip().startswith("hg-ms ") and "±" in line]
    mean = found.tables[0].rows[0].metrics[found.tables[0].metric].mean
    assert float(shown[1]) == pytest.approx(mean, rel=5e-2)
    assert f"  {picture}" in lines
    answer = json_of(*words)
    assert (answer["methods"][0]["difference"]["n"], answer["floor"]) == (2, "uniform")
