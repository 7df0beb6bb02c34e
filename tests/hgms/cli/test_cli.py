"""The command line, with plugins made in the test: what is printed where, and with which exit
code.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner, Result
from support.fakes import Site

import hgms_core
from hgms.cli import main
from hgms.runs import Interrupted
from hgms_core import PLUGIN_API, NumericalError

PLUGIN = '''
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import click
import torch
from attrs import field, frozen, validators
from hgms_core import Problem, hookimpl


@final
@frozen(kw_only=True)
class Halve:
    """Halves x at every step.

    >>> Halve().rate
    0.5
    """

    name: ClassVar[str] = "halve"
    rate: float = field(default=0.5, validator=validators.gt(0))

    def init(self, problem, seed):
        return {"x": dict(problem.x0)}

    def step(self, problem, state, progress):
        x = {"x": state["x"]["x"] * self.rate}
        return {"x": x}, {"size": x["x"].sum(), "oracle_calls": 1}

    def result(self, state):
        return {}, state["x"]


@final
@frozen(kw_only=True)
class One:
    """One number."""

    name: ClassVar[str] = "one"
    version: ClassVar[str] = "1"
    metrics: ClassVar[Mapping[str, bool]] = {"size": False}

    def problem(self, seed, device, dtype):
        return Problem(
            theta0={}, x0={"x": torch.ones(1, device=device, dtype=dtype)},
            g=lambda t, x, b: x["x"].sum(), f=lambda t, x, b: x["x"].sum(),
            evaluate=lambda t, x: {"size": float(x["x"])},
        )


@hookimpl
def hgms_register_methods():
    return [Halve]


@hookimpl
def hgms_register_tasks():
    return [One]


@hookimpl
def hgms_register_commands(cli: click.Group):
    @cli.command("greet")
    def greet():
        """Says hello."""
        click.echo("hello")

    @cli.command("list")
    def not_this_one():
        click.echo("stolen")
'''

CONFIG = """
task = "one"
method = "halve"
budget = "3 steps"
"""


@pytest.fixture
def fake(site: Site) -> Site:
    site.module("fake_plugin", PLUGIN)
    site.install("hgms-fake", {"fake": "fake_plugin"}, version="3.0")
    return site


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def json_of(*arguments: str | Path) -> Any:
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_list_prints_one_object_per_component(fake: Site) -> None:
    rows = json_of("list")
    assert [(row["kind"], row["name"], row["plugin"], row["summary"]) for row in rows] == [
        ("task", "one", "fake", "One number."),
        ("method", "halve", "fake", "Halves x at every step."),
        (
            "method",
            "pipeline",
            "core",
            "HG-MS's outer loop with replaceable parts (Algorithm 1 of the paper).",
        ),
    ]
    assert json_of("list", "tasks") == rows[:1]


def test_list_as_a_table_keeps_one_line_a_component(fake: Site) -> None:
    lines = call("list").stdout.splitlines()
    assert any(
        "halve" in line and "third party" in line and "Halves x at every step." in line
        for line in lines
    )


def test_list_shows_what_needs_an_extra(site: Site) -> None:
    site.module("plug", "import no_such_module\n")
    site.install(
        "hgms",
        {"fast": "plug"},
        version="0.1.0",
        extras=["sklearn"],
        requires=['no-such-module; extra == "sklearn"'],
    )
    (row,) = json_of("list", "solver")
    assert (row["name"], row["status"], row["install"]) == (
        "fast",
        "missing-extra",
        "pip install 'hgms[sklearn]'",
    )
    shown = call("list").stdout
    assert (
        "[not loaded: pip install 'hgms[sklearn]'] ModuleNotFoundError: No module named "
        "'no_such_module'"
    ) in shown


def test_list_of_an_unknown_kind(fake: Site) -> None:
    done = call("list", "metods")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: unknown kind of component 'metods' (KIND)\n"
        "  did you mean 'method'?\n"
        "  available: generator, hypergradient, method, outer, selector, solver, task\n"
    )


def test_describe_a_class(fake: Site) -> None:
    answer = json_of("describe", "method", "halve")
    assert answer["fields"] == [
        {"name": "rate", "type": "a number", "required": False, "default": 0.5, "range": "> 0"}
    ]
    assert answer["doc"].startswith("Halves x at every step.")
    assert answer["class"] == "fake_plugin:Halve"
    text = call("describe", "method", "halve").stdout
    assert text.startswith(
        "method halve  (hgms-fake 3.0, plugin 'fake', fake_plugin:Halve)\n\n"
        "Halves x at every step.\n"
    )
    assert re.search(r"rate +0\.5 +a number > 0", text)
    assert answer["needs"] == {}
    needing = PLUGIN.replace('= "one"', '= "two"').replace(
        '= "halve"', '= "needing"\n    needs = frozenset({"sources"})'
    )
    fake.module("needing", needing)
    fake.install("hgms-needing", {"needing": "needing"}, version="1.0")
    assert json_of("describe", "method", "needing")["needs"] == {"sources": "needing"}
    assert (
        "Needs sources: named data sources with one weight each\n"
        in call("describe", "method", "needing").stdout
    )


def test_describe_a_task_says_metrics_traits_and_sizes(fake: Site) -> None:
    answer = json_of("describe", "one")
    assert {key: answer[key] for key in ("metrics", "traits", "theta", "x", "unknown")} == {
        "metrics": {"size": False},
        "traits": [],
        "theta": {},
        "x": {"x": [1]},
        "unknown": None,
    }
    text = call("describe", "one").stdout
    assert "Metrics, lower is better: size\nTraits: none\n" in text
    assert "θ at these defaults: 0 numbers ()\nx at these defaults: 1 number (x [1])\n" in text
    broken = PLUGIN.replace('= "one"', '= "two"').replace('= "halve"', '= "third"')
    raises = "        raise ValueError('no data\\n.')\n"
    fake.module(
        "second", broken.replace("        return Problem(", f"{raises}        return Problem(")
    )
    fake.install("hgms-second", {"second": "second"}, version="1.0")
    assert (json_of("describe", "two")["theta"], json_of("describe", "two")["unknown"]) == (
        None,
        "ValueError: no data",
    )
    assert (
        "θ and x: known only with settings or data of yours (ValueError: no data)"
        in call("describe", "two").stdout
    )


def test_describe_says_which_fields_are_required(fake: Site) -> None:
    fields = {row["name"]: row for row in json_of("describe", "method", "pipeline")["fields"]}
    assert fields["generator"] == {
        "name": "generator",
        "type": "a candidate generator",
        "required": True,
        "default": None,
        "range": "",
    }
    assert fields["keep"]["default"] == "last"
    assert "(required)" in call("describe", "method", "pipeline").stdout


def test_describe_needs_a_kind_only_where_two_share_the_name(fake: Site) -> None:
    assert call("describe", "halve").stdout == call("describe", "method", "halve").stdout
    unknown = call("describe", "havle")
    assert unknown.exit_code == 2
    assert all(name in unknown.stderr for name in ("'havle'", "'halve'"))
    fake.module("second", PLUGIN.replace('= "one"', '= "two"').replace('= "halve"', '= "one"'))
    fake.install("hgms-second", {"second": "second"}, version="1.0")
    both = call("describe", "one")
    assert both.exit_code == 2
    assert "`hgms describe task one` or `hgms describe method one`" in both.stderr


def test_a_misspelt_command_gets_a_suggestion(fake: Site) -> None:
    for word, meant in (("compar", "compare"), ("gret", "greet")):
        done = call(word)
        assert done.exit_code == 2
        assert f"unknown command '{word}'" in done.stderr
        assert f"did you mean '{meant}'?" in done.stderr


def test_describe_an_unknown_component(fake: Site) -> None:
    done = call("describe", "task", "won")
    assert done.exit_code == 2
    assert all(word in done.stderr for word in ("'won'", "'one'", "`hgms list task`"))


def test_describe_a_composition(site: Site) -> None:
    site.module(
        "recipes",
        """
        from hgms_core import Composition, hookimpl
        parts = {"generator": {"name": "g", "count": 4}, "selector": "s"}
        parts |= {"hypergradient": "h", "outer": "o"}
        @hookimpl
        def hgms_register_methods():
            on = {"generator": {"count": 2}, "selector": {"name": "first", "batch_size": 3}}
            named = {"name": "mix", "summary": "A mix.", "source": "a cookbook"}
            return [Composition(**named, parts=parts, on={"sources": on})]
        """,
    )
    site.install("hgms-recipes", {"recipes": "recipes"})
    answer = json_of("describe", "method", "mix")
    assert answer["parts"]["generator"] == {"name": "g", "count": 4}
    assert "Source: a cookbook" in call("describe", "method", "mix").stdout
    assert answer["on"]["sources"]["generator"] == {"name": "g", "count": 2}
    text = call("describe", "method", "mix").stdout
    usual, sources = text.split("On a task with the trait 'sources' its defaults are\n")
    assert '[method.generator]\nname = "g"\ncount = 4' in usual
    assert 'hypergradient = "h"' in sources
    assert '[method.generator]\nname = "g"\ncount = 2' in sources
    assert '[method.selector]\nname = "first"\nbatch_size = 3' in sources


def test_plugins_works_whatever_is_broken(fake: Site) -> None:
    fake.module("bad_plugin", "import does_not_exist_anywhere\n")
    fake.install("hgms", {"ours": "bad_plugin"}, version="0.1.0")
    rows = {row["name"]: row for row in json_of("plugins")}
    assert rows["fake"].pop("seconds") > 0
    assert rows["fake"] == {
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
    assert rows["ours"]["status"] == "failed"
    assert rows["ours"]["error"] == "ModuleNotFoundError: No module named 'does_not_exist_anywhere'"
    done = call("plugins")
    assert f"plugin API {PLUGIN_API}" in done.stdout
    assert done.stderr.count("warning: plugin 'ours' (hgms 0.1.0) failed to load") == 1
    assert "Traceback" not in done.output
    assert "Traceback (most recent call last)" in call("plugins", "-v").stdout
    failed = call("list")
    assert failed.exit_code == 2
    assert failed.stderr.startswith(
        "error: plugin 'ours' (hgms 0.1.0) failed to load: ModuleNotFoundError"
    )


def test_two_of_one_name_stop_only_who_uses_it(fake: Site) -> None:
    fake.module("twin", PLUGIN)
    fake.install("hgms-twin", {"twin": "twin"})
    others = [row for row in json_of("plugins") if row["distribution"] != "hgms"]
    assert {row["name"]: row["status"] for row in others} == {
        "fake": "loaded",
        "twin": "incomplete",
    }
    listed = call("list")
    assert listed.exit_code == 0
    assert "HGMS_DISABLE_PLUGINS=twin" in listed.stderr
    used = call("describe", "task", "one")
    assert used.exit_code == 2
    for shown in ("'one'", "fake_plugin:One", "hgms-fake 3.0", "twin:One", "hgms-twin 1.0"):
        assert shown in used.stderr


def test_a_broken_third_party_plugin_is_a_warning_on_stderr(fake: Site) -> None:
    fake.module("bad_plugin", "1 / 0")
    fake.install("hgms-bad", {"bad": "bad_plugin"})
    done = call("list", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)
    assert done.stderr.startswith("warning: plugin 'bad' (hgms-bad 1.0) failed to load: ")
    assert "ZeroDivisionError" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any(
        type(handler).__name__ == "_Warnings" for handler in logging.getLogger("hgms").handlers
    )


def test_plugins_add_commands_but_take_none(fake: Site) -> None:
    assert call("greet").stdout == "hello\n"
    assert "stolen" not in call("list").stdout
    done = call("--help")
    assert "greet" in done.stdout
    assert "Says hello." in done.stdout


def test_a_plugin_whose_commands_break_spoils_nothing(fake: Site) -> None:
    fake.module(
        "bad_commands",
        (
            "from hgms_core import hookimpl\n@hookimpl\n"
            "def hgms_register_commands(cli): raise ValueError('no')\n"
        ),
    )
    fake.install("hgms-bad", {"bad": "bad_commands"})
    done = call("greet")
    assert done.stdout == "hello\n"
    assert "plugin 'bad' (hgms-bad 1.0)" in done.stderr


def test_a_plugins_command_leaves_with_the_code_it_likes(fake: Site) -> None:
    fake.module(
        "leaving",
        """
        import sys
        from hgms_core import hookimpl

        @hookimpl
        def hgms_register_commands(cli):
            @cli.command("leave")
            def leave():
                sys.exit(7)
        """,
    )
    fake.install("hgms-leaving", {"leaving": "leaving"})
    done = call("leave")
    assert done.exit_code == 7
    assert "error" not in done.stderr


def test_an_unknown_command(fake: Site) -> None:
    done = call("lst")
    assert done.exit_code == 2
    assert all(word in done.stderr for word in ("'lst'", "'list'"))


def test_check_passes_a_good_class(fake: Site) -> None:
    solver = f"{Path(__file__).parents[1] / 'testing' / 'test_testing_solvers.py'}:MinimalResidual"
    done = call("check", solver)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, f"{solver}: a linear solver")
    assert re.fullmatch(r"\d+ passed(, \d+ not asked)?", done.stdout.splitlines()[-1])


HEAD = """
from typing import ClassVar
from attrs import define, frozen
"""
CLASS = """
@{decorator}
class Mine:
    {doc}
    name: ClassVar[str] = "mine"
    {field}
    def solve(self, matvec, b, x0=None): return b
"""
DOC = '"""Mine.\n\n    >>> 1\n    1\n    """'


FAULTY = [
    (
        "frozen(kw_only=True)",
        '"""Mine."""',
        "",
        "docstring",
        "its docstring has no example (a line with >>>)",
    ),
    ("frozen(kw_only=True)", "", "", "docstring", "it has no docstring"),
    ("define(kw_only=True)", DOC, "rtol: float = 1.0", "frozen", "its attribute 'rtol' can be set"),
    (
        "frozen(kw_only=True)",
        DOC,
        "rtol: float",
        "construction",
        "it cannot be built without arguments",
    ),
    (
        "frozen(kw_only=True)",
        DOC,
        "rtol: list[int] = [1]",
        "hashable",
        "it cannot be hashed (unhashable type: 'list')",
    ),
    ("frozen(kw_only=True)", DOC, "rtol: object = print", "toml", "(rtol)"),
    ("frozen(kw_only=True)", DOC, "rtol: int = 1.5", "toml", "(its own TOML: rtol)"),
    ("frozen(kw_only=True)", DOC, "rtol: 'Nowhere' = 1", "types", "name 'Nowhere' is not defined"),
    ("(lambda cls: cls)", DOC, "", "registration", "it is not an attrs class"),
    ("frozen(kw_only=True)", DOC, "eta = 0.5", "types", "eta: float = 0.5"),
    (
        "frozen(kw_only=True)",
        DOC,
        "needs = {'source'}",
        "registration",
        "it needs 'source', which no task has; did you mean",
    ),
]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One module for all of them: what importing it does is seen from an interpreter of its own,
    which takes a second.
    """
    file = tmp_path_factory.mktemp("faulty") / "mine.py"
    classes = [
        CLASS.format(decorator=decorator, doc=doc, field=fields)
        for decorator, doc, fields, _, _ in FAULTY
    ]
    file.write_text(
        HEAD
        + "".join(text.replace("Mine:", f"Mine{number}:") for number, text in enumerate(classes))
    )
    return file


@pytest.mark.parametrize(
    ("number", "check", "fault"), [(number, *row[3:]) for number, row in enumerate(FAULTY)]
)
def test_check_names_the_fault(
    site: Site, faulty: Path, number: int, check: str, fault: str
) -> None:
    done = call("check", f"{faulty}:Mine{number}", "--json")
    assert done.exit_code == 1
    faults = {
        result["check"]: result["fault"]
        for result in json.loads(done.stdout)["results"]
        if result["fault"]
    }
    assert fault in faults[check]


def test_check_fills_required_parts_with_registered_ones(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call("check", "hgms_core.pipeline:Pipeline")
    assert (
        "FAIL construction: it needs a candidate generator, and none is installed to try it with"
        in done.stdout
    )
    assert "hashable" not in done.stdout, "there is no instance to ask about"
    site.solver("plug", "mine")
    site.install("hgms-mine", {"mine": "plug"})
    source = (
        (HEAD + CLASS)
        .format(decorator="frozen(kw_only=True)", doc=DOC, field="inner: LinearSolver")
        .replace("from typing", "from hgms_core import LinearSolver\nfrom typing")
    )
    file = site.module("outside", source)
    done = call("check", f"{file}:Mine")
    assert "  ok   construction\n" in done.stdout
    assert "  ok   toml\n" in done.stdout
    assert "  FAIL zero-rhs: solve returns Tensor; return a hgms_core.Solution\n" in done.stdout
    assert re.fullmatch(r"\d+ passed, \d+ failed(, \d+ not asked)?", done.stdout.splitlines()[-1])


def test_check_of_what_cannot_be_found(site: Site) -> None:
    file = site.module("mine", "class Mine: pass\n")
    for spec, place, shown in (
        ("mine", "(MODULE:CLASS)", "'mine'"),
        (f"{file}:Mne", f"({file})", "'Mine'"),
        (f"{file}:Mine", ":Mine)", "solver: solve"),
        ("no_such_module:Mine", "(no_such_module)", "ModuleNotFoundError"),
    ):
        done = call("check", spec)
        assert (done.exit_code, done.stdout) == (2, "")
        assert place in done.stderr
        assert shown in done.stderr


def config_file(folder: Path, text: str = CONFIG) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_run_writes_a_folder_and_prints_the_summary(fake: Site, tmp_path: Path) -> None:
    arguments = (
        "run",
        config_file(tmp_path),
        "--out",
        tmp_path / "runs",
        "--seed",
        "4",
        "--set",
        "method.rate=0.25",
    )
    summary = json_of(*arguments)
    assert summary["metrics"] == {"size": 0.25**3}
    assert (summary["task"], summary["method"], summary["seed"], summary["outer_steps"]) == (
        "one",
        "halve",
        4,
        3,
    )
    assert (Path(summary["folder"]) / "summary.json").exists()
    refused = call(*arguments)
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    resumed = call(*arguments, "--resume")
    assert resumed.exit_code == 0
    assert resumed.stdout.splitlines()[:2] == ["one, halve, seed 4: done", "  size: 0.015625"]


def test_a_metric_that_is_not_finite_is_shown_as_such(site: Site, tmp_path: Path) -> None:
    file = site.module("single", PLUGIN.replace('float(x["x"])', 'float("nan")'))
    done = call("run", config_file(tmp_path), "--out", tmp_path / "runs", "--plugin", file)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "  size: not finite" in done.stdout.splitlines()


def test_nothing_to_resume_is_said_with_what_there_is(fake: Site, tmp_path: Path) -> None:
    arguments = ("run", config_file(tmp_path), "--out", tmp_path / "runs")
    first = call(*arguments, "--resume")
    assert first.exit_code == 0
    assert "warning: there is nothing to resume in" in first.stderr
    other = call(*arguments, "--resume", "--set", "run.threads=1", "--set", 'budget="4 steps"')
    folder = json_of(*arguments, "--resume")["folder"]
    assert (
        other.stderr.splitlines()[1]
        == f"  {folder} holds a run with another budget.outer_steps, run.threads"
    )
    assert call(*arguments, "--resume").stderr == ""


@pytest.mark.parametrize(
    "how", [pytest.param("ascii", marks=pytest.mark.extended), "closed", "full pipe"]
)
def test_streams_of_any_kind(tmp_path: Path, how: str) -> None:
    command = f"{sys.executable} -m hgms.cli"
    grid = (
        "compare --task quadratic --methods uniform --budget '1 step' --seeds 2 --jobs 0 "
        f"--out {tmp_path}"
    )
    line = {
        "ascii": (
            f"PYTHONIOENCODING=ascii {command} {grid} && PYTHONIOENCODING=ascii {command} "
            f"{grid} --json"
        ),
        "closed": f"HGMS_PLUGINS=solver-cg {command} list >&-",
        "full pipe": (
            f"HGMS_PLUGINS=solver-cg {command} list solver | head -c 1 > /dev/null; exit "
            "${PIPESTATUS[0]}"
        ),
    }[how]
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    assert "sys.exit" not in done.stderr
    assert done.returncode == (0 if how != "full pipe" else done.returncode)
    if how == "ascii":
        assert "\\xb1" in done.stdout
        json.loads(done.stdout[done.stdout.index("\n{\n") :])


def test_run_with_a_plugin_from_a_file(site: Site, tmp_path: Path) -> None:
    file = site.module("single", PLUGIN)
    summary = json_of("run", config_file(tmp_path), "--out", tmp_path / "runs", "--plugin", file)
    assert summary["status"] == "done"


def test_errors_in_a_configuration_have_no_traceback(fake: Site, tmp_path: Path) -> None:
    done = call(
        "run",
        config_file(
            tmp_path, CONFIG.replace('"halve"', '{name = "halve", rate = -1}').replace("one", "won")
        ),
    )
    assert done.exit_code == 2
    assert done.stderr.startswith("error: 2 errors:\n")
    assert "'won' (run.toml: task)\n" in done.stderr
    assert "(run.toml: method.rate)\n" in done.stderr
    assert "Traceback" not in done.stderr
    debug = call("--debug", "run", tmp_path / "absent.toml")
    assert isinstance(debug.exception, hgms_core.ConfigError)


def test_exit_codes_of_a_run_that_fails_or_is_interrupted(
    fake: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException] = [
        NumericalError("not-finite", "step 3: nothing is finite"),
        Interrupted("interrupted; add --resume"),
    ]

    def stop(*_: Any, **__: Any) -> None:
        raise raised.pop(0)

    monkeypatch.setattr("hgms.runs.command.run_config", stop)
    failed = call("run", config_file(tmp_path))
    assert (failed.exit_code, failed.stderr) == (1, "error: step 3: nothing is finite\n")
    interrupted = call("run", config_file(tmp_path))
    assert (interrupted.exit_code, interrupted.stderr) == (130, "interrupted; add --resume\n")


def test_demo_prints_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hgms.comparison import Comparison, load
    from hgms.demo import demo
    from hgms.results.statistics import Interval
    from hgms.results.tables import Row, Table

    def fake_demo(out: Path, *, seeds: int, calls: int, jobs: int, progress: bool) -> demo.Demo:
        count = Interval.of([10.0] * seeds)
        row = Row(
            method="hg-ms",
            metrics={"test_accuracy": Interval.of([0.9, 0.92])},
            difference=Interval.of([0.1]),
            outer_steps=count,
            outer_steps_range=None,
            oracle_calls=count,
            seconds=count,
            compile_seconds=Interval.of([0.0]),
            peak_memory_bytes=Interval.of([]),
            ahead_of_floor=False,
        )
        rows = [
            row,
            evolve(row, method="uniform", role="floor", difference=None, ahead_of_floor=None),
        ]
        answer = Table(
            task="t",
            metric="test_accuracy",
            higher_is_better=True,
            reference="uniform",
            rows=rows,
            floor="uniform",
            percent=True,
        )
        grid = load(
            {"budget": "3 s", "seeds": seeds, "task": "quadratic", "method": ["hg-ms", "uniform"]}
        )
        comparison = Comparison(tables=[answer], failures=[], sweeps=[], grid=grid)
        return demo.Demo(
            comparison=comparison, pictures=[out / "accuracy.png"], folder=out, calls=calls
        )

    monkeypatch.setattr(demo, "run_demo", fake_demo)
    lines = call("demo", "--out", tmp_path, "--seeds", "2", "--calls", "4000").stdout.splitlines()
    assert (
        lines[0]
        == "4,000 oracle calls per run, 2 seeds; mean ± half width of the 95 % interval, of "
        "differences by Holm's rule (more with --json)"
    )
    assert [column.strip() for column in lines[2].split("  ") if column.strip()] == [
        "method",
        "role",
        "test accuracy (%) ↑",
        "− uniform",
        "outer steps",
        "oracle calls",
        "seconds",
    ]
    (row,) = [line.split() for line in lines if line.strip().startswith("hg-ms ") and "±" in line]
    assert row == ["hg-ms", "91.00", "±", "12.71", "+10.00", "10", "10", "10"]
    assert (
        "hg-ms is not ahead of uniform, the best of the references that learn nothing about θ"
        in lines
    )
    assert "2 seeds: no claim can be made from so few; a claim needs 10" in lines
    assert f"  {tmp_path / 'accuracy.png'}" in lines
    answer = json_of("demo", "--out", tmp_path, "--seeds", "2", "--calls", "4000")
    assert answer["methods"][0]["difference"] == {"mean": 0.1, "half_width": None, "n": 1}
    assert answer["floor"] == "uniform"


def test_version() -> None:
    from importlib.metadata import version

    assert hgms_core.__version__ == version("hgms")
    assert call("--version").stdout == f"hgms {hgms_core.__version__} (plugin API {PLUGIN_API})\n"


def test_the_command_line_loads_no_configuration_machinery_to_list() -> None:
    code = (
        "import sys\nfrom hgms.cli import main\n"
        "try: main(['list', '--json'])\nexcept SystemExit: pass\n"
        "print(sorted({'cattrs', 'tomlkit', 'scipy', 'matplotlib', 'sklearn', 'rich'} & "
        "set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"HGMS_PLUGINS": "", "PATH": ""},
    )
    assert done.stderr == "[]\n"
    assert [row["name"] for row in json.loads(done.stdout)] == ["pipeline"]


def test_an_installed_program_takes_the_place_of_ours(site: Site) -> None:
    site.module(
        "tidy_report",
        """
        import click
        from hgms_core import hookimpl

        @hookimpl
        def hgms_register_commands(cli):
            @cli.command("report")
            @click.argument("folder")
            def report(folder):
                "A report of another kind."
                click.echo(f"tidy: {folder}")
        """,
    )
    site.install("hgms-tidy", {}, programs={"report": "tidy_report"}, version="1.2")
    assert call("report", "runs").stdout == "tidy: runs\n"
    assert "A report of another kind." in call("--help").stdout
    assert ".svg" in call("plot", "--help").stdout, "the other commands stay"
    (row,) = [row for row in json_of("plugins") if row["distribution"] == "hgms-tidy"]
    assert (row["name"], row["status"], row["hooks"]) == (
        "tidy_report",
        "loaded",
        ["hgms_register_commands"],
    )
    site.module("tidy_report", "import does_not_exist_anywhere\n")
    del sys.modules["tidy_report"]
    broken = call("report", "--help")
    assert "plugin 'tidy_report' (hgms-tidy 1.2) failed to load" in broken.stderr
    assert "A report of another kind." not in broken.stdout, "ours is there where it fails"
    assert broken.exit_code == 0


def test_a_command_gets_the_host_of_its_invocation_and_its_registry(site: Site) -> None:
    site.solver("mine", "my-solver")
    site.module(
        "counting",
        """
        import click
        from hgms.cli import plugin_option
        from hgms_core import hookimpl

        @hookimpl
        def hgms_register_commands(cli):
            @cli.command("count")
            @plugin_option
            @click.pass_obj
            def count(host, registry):
                same = host is registry.host
                solvers = len(registry.components("solver"))
                click.echo(f"{same} {solvers} {len(host.installed['hgms'])}")
        """,
    )
    site.install("hgms-counting", {"counting": "counting"})
    assert call("count").stdout == "True 0 1\n"
    assert call("count", "--plugin", site.root / "mine.py").stdout == "True 1 1\n"
    assert call("count").stdout == "True 0 1\n", "nothing is kept from one invocation to the next"


def test_an_error_that_many_checks_meet_is_told_once_with_its_line(site: Site) -> None:
    source = (HEAD + CLASS).format(decorator="frozen(kw_only=True)", doc=DOC, field="")
    file = site.module("mine", source.replace("return b\n", "raise RuntimeError('no such luck')\n"))
    done = call("check", f"{file}:Mine")
    assert done.stdout.count("it raised RuntimeError: no such luck (mine.py:") == 1
    assert done.stdout.count(": the same as inputs\n") > 3
