"""The plugin host: what loads, what fails, and what is said about it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from support.fakes import Site
from support.helpers import rejects

from hgms.cli.inspect import plugin_row
from hgms_core.errors import ConfigError, MissingExtra, PluginError
from hgms_core.host import Host
from hgms_core.registry import Registry

BROKEN = "import does_not_exist_anywhere\n"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_plugins_load_in_the_order_of_their_names(site: Site) -> None:
    site.solver("one_plugin", "one")
    site.solver("two_plugin", "two")
    site.install("hgms-two", {"b-two": "two_plugin"})
    site.install("hgms-one", {"a-one": "one_plugin"})
    host = Host.load()
    assert list(host.infos) == ["a-one", "b-two"]
    row = plugin_row(host.infos["a-one"])
    assert 0 < row.pop("seconds") < 1
    assert row == {
        "name": "a-one",
        "module": "one_plugin",
        "distribution": "hgms-one",
        "version": "1.0",
        "status": "loaded",
        "hooks": ["hgms_register_linear_solvers"],
        "error": None,
        "install": None,
        "notes": [],
    }


def test_a_broken_third_party_plugin_is_one_warning_and_a_row(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.module("bad_plugin", BROKEN)
    site.solver("good_plugin", "good")
    site.install("hgms-bad", {"bad": "bad_plugin"})
    site.install("hgms-good", {"good": "good_plugin"})
    host = Host.load()
    (warning,) = warnings_of(caplog)
    assert "'bad' (hgms-bad 1.0)" in warning
    assert "ModuleNotFoundError: No module named 'does_not_exist_anywhere'" in warning
    assert warning.count("`hgms plugins -v`") == 1
    assert host.infos["bad"].status == "failed"
    assert "import does_not_exist_anywhere" in (host.infos["bad"].traceback or "")
    assert Registry(host).find("solver", "good") is not None


@pytest.mark.parametrize(
    "source", ["def f(:\n", "raise RuntimeError\n", "import sys; sys.exit(3)\n", "1 / 0\n"]
)
def test_whatever_a_plugin_raises_the_others_load(
    site: Site, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.module("bad_plugin", source)
    site.solver("good_plugin", "good")
    site.install("hgms-bad", {"bad": "bad_plugin"})
    site.install("hgms-good", {"good": "good_plugin"})
    host = Host.load()
    assert (host.infos["bad"].status, host.infos["good"].status) == ("failed", "loaded")
    assert len(warnings_of(caplog)) == 1
    assert "\n" not in warnings_of(caplog)[0]


def test_a_broken_plugin_of_ours_is_an_error_that_names_it(site: Site) -> None:
    site.module("bad_plugin", BROKEN)
    site.install("hgms", {"bad": "bad_plugin"}, version="0.1.0")
    with rejects("plugin-failed", of=PluginError) as caught:
        Host.load()
    assert str(caught.value) == (
        "plugin 'bad' (hgms 0.1.0) failed to load: ModuleNotFoundError: No module named "
        "'does_not_exist_anywhere'\n"
        "  run `hgms plugins -v` for the traceback"
    )
    assert Host.load(tolerant=True).infos["bad"].status == "failed"


def test_one_module_under_two_names_is_named_with_both(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.solver("one_plugin", "one")
    site.install("hgms-one", {"a-one": "one_plugin", "b-one": "one_plugin"})
    host = Host.load()
    assert [info.status for info in host.infos.values()] == ["loaded", "failed"]
    assert "'a-one' and 'b-one'" in str(host.infos["b-one"].error)


@pytest.mark.parametrize(("text", "strict"), [("1", True), ("true", True), ("0", False)])
def test_strict_is_on_or_off(monkeypatch: pytest.MonkeyPatch, text: str, strict: bool) -> None:
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", text)
    assert Host().strict is strict
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", "maybe")
    with rejects("wrong-value", "HGMS_STRICT_PLUGINS", of=ConfigError):
        Host()


def test_strict_makes_every_failure_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.module("bad_plugin", BROKEN)
    site.install("hgms-bad", {"bad": "bad_plugin"})
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", "1")
    with rejects("plugin-failed", of=PluginError) as caught:
        Host.load()
    assert "'bad' (hgms-bad 1.0)" in caught.value.message


@pytest.mark.parametrize(
    ("entry", "missing"),
    [("plug", "no_such_module"), ("plug", "sklearnish"), ("plug [sklearn]", "anything_at_all")],
    ids=["by requirement", "by the extra's name", "by the entry point"],
)
def test_a_missing_extra_is_listed_with_the_line_that_installs_it(
    site: Site,
    entry: str,
    missing: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site.module("plug", f"import {missing}\n")
    site.install(
        "hgms",
        {"cleaning": entry},
        version="0.1.0",
        extras=["sklearn", "sklearnish"],
        requires=['no-such-module>=1; extra == "sklearn"'],
    )
    extra = "sklearnish" if missing == "sklearnish" else "sklearn"
    info = Host.load().infos["cleaning"]
    assert (info.status, info.install) == ("missing-extra", f"pip install 'hgms[{extra}]'")
    assert warnings_of(caplog) == []
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", "1")
    with rejects("missing-package", of=MissingExtra) as caught:
        Host.load()
    assert caught.value.install == f"pip install 'hgms[{extra}]'"


def test_a_plugin_may_name_its_missing_extra_itself(site: Site) -> None:
    site.module(
        "plug",
        (
            "from hgms_core import MissingExtra\n"
            "raise MissingExtra('missing-package', 'x requires fast',\n"
            "                   install=\"pip install 'hgms-x[fast]'\")\n"
        ),
    )
    site.install("hgms-x", {"x": "plug"})
    assert Host.load().infos["x"].install == "pip install 'hgms-x[fast]'"


def test_an_unknown_hook_is_refused_with_a_suggestion(site: Site) -> None:
    file = site.module(
        "typo",
        "from hgms_core import hookimpl\n@hookimpl\ndef hgms_register_linear_solvr(): return []\n",
    )
    with rejects("unknown-hook", "hgms_register_linear_solvr", of=PluginError) as caught:
        Host.load([file])
    assert f"'typo' (file {file})" in caught.value.message
    assert caught.value.did_you_mean == ("hgms_register_linear_solvers",)


@pytest.mark.parametrize(
    ("body", "code", "place"),
    [
        ("def hgms_register_tasks(): return []", "unmarked-hook", ("hgms_register_tasks",)),
        ("x = 1", "no-hooks", ()),
        ("@hookimpl\ndef hgms_register_tasks(wrong): return []", "wrong-signature", ("odd",)),
        (
            "@hookimpl(wrapper=True)\ndef hgms_register_tasks(): yield",
            "not-supported",
            ("hgms_register_tasks",),
        ),
    ],
)
def test_a_plugin_without_usable_hooks_says_why(
    site: Site, body: str, code: str, place: tuple[str, ...]
) -> None:
    file = site.module("odd", f"from hgms_core import hookimpl\n{body}\n")
    with rejects(code, *place, of=PluginError):
        Host.load([file])


def test_several_errors_of_one_plugin_are_listed(site: Site) -> None:
    raises = "raise_all([ConfigError('a', 'first'), ConfigError('b', 'second', place=('x',))])\n"
    file = site.module("odd", f"from hgms_core import ConfigError, raise_all\n{raises}")
    with rejects("several-errors", of=PluginError) as caught:
        Host.load([file])
    assert caught.value.lines()[1:] == ["first", "second (x)"]


def test_the_environment_blocks_and_allows(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site.solver("one_plugin", "one")
    site.solver("two_plugin", "two")
    site.install("hgms-two", {"one": "one_plugin", "two": "two_plugin"})

    def loaded() -> list[str]:
        return [name for name, info in Host.load().infos.items() if info.status == "loaded"]

    monkeypatch.setenv("HGMS_DISABLE_PLUGINS", "one, tow")
    assert loaded() == ["two"]
    (warning,) = warnings_of(caplog)
    assert "'tow' (HGMS_DISABLE_PLUGINS)" in warning
    assert "did you mean 'two'?" in warning
    assert "one, two" in warning
    monkeypatch.delenv("HGMS_DISABLE_PLUGINS")
    monkeypatch.setenv("HGMS_PLUGINS", "one")
    assert loaded() == ["one"]
    monkeypatch.setenv("HGMS_PLUGINS", "")
    assert loaded() == []
    monkeypatch.setenv("HGMS_PLUGINS", "onee")
    with rejects("unknown-plugin", "HGMS_PLUGINS", of=PluginError) as caught:
        Host.load()
    assert caught.value.did_you_mean == ("one",)


def test_two_entry_points_of_one_name_ours_wins(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.solver("ours_plugin", "ours")
    site.solver("theirs_plugin", "theirs")
    site.install("hgms", {"cg": "ours_plugin"}, version="0.1.0")
    site.install("fastcg", {"cg": "theirs_plugin"})
    host = Host.load()
    assert host.infos["cg"].distribution == "hgms"
    assert host.infos["cg (fastcg)"].status == "failed"
    assert "hgms 0.1.0 has a plugin with the name 'cg'" in warnings_of(caplog)[0]


def test_a_single_file_is_a_plugin_and_its_failure_an_error(site: Site, tmp_path: Path) -> None:
    good = tmp_path / "my_solver.py"
    good.write_text(site.solver("template", "mine").read_text())
    host = Host.load([good])
    assert host.infos["my_solver"].owner == f"file {good}"
    assert host.add(good) is host.infos["my_solver"], "a file is loaded once"
    absent = str(tmp_path / "absent.py")
    with rejects("missing-file", absent, of=PluginError) as caught:
        Host.load([absent])
    assert str(caught.value).count(absent) == 1
    with rejects("plugin-failed", of=PluginError) as caught:
        Host.load([site.module("bad", BROKEN)])
    assert "does_not_exist_anywhere" in caught.value.message


def test_what_a_plugin_prints_while_it_loads_does_not_reach_stdout(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.module(
        "loud",
        "print('hello')\n"
        + site.solver("template", "loud").read_text().replace("from __future__", "#"),
    )
    site.install("hgms-loud", {"loud": "loud"})
    assert Host.load().infos["loud"].status == "loaded"
    assert capsys.readouterr().out == ""


OBSERVER = """
from hgms_core import hookimpl
heard = []
@hookimpl
def hgms_step_finished(record):
    heard.append(record["step"])
    {body}
@hookimpl
def hgms_run_finished(run, summary, error):
    heard.append(summary)
"""


def test_an_observer_that_raises_is_reported_once_and_the_others_go_on(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    good = site.module("good_observer", OBSERVER.format(body=""))
    bad = site.module("bad_observer", OBSERVER.format(body="raise ValueError('disk on fire')"))
    host = Host.load([bad, good])
    for step in (1, 2):
        host.notify("hgms_step_finished", run=None, record={"step": step})
    host.notify("hgms_run_finished", run=None, summary="the end", error=None)
    assert warnings_of(caplog) == [
        f"plugin 'bad_observer' (file {bad}): hgms_step_finished raised ValueError: disk on fire; "
        "its observers are not called again, the run goes on"
    ]
    assert sys.modules["hgms_file_good_observer"].heard == [1, 2, "the end"]
    assert sys.modules["hgms_file_bad_observer"].heard == [1]
    assert host.infos["bad_observer"].status == "incomplete"


def test_under_strict_an_observer_s_error_stops_the_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", "1")
    host = Host.load(
        [site.module("bad_observer", OBSERVER.format(body="raise ValueError('disk on fire')"))]
    )
    with pytest.raises(ValueError, match="disk on fire") as caught:
        host.notify("hgms_step_finished", run=None, record={"step": 1})
    assert "raised by hgms_step_finished of the plugin 'bad_observer'" in caught.value.__notes__[0]


def test_the_core_needs_torch_attrs_pluggy_and_nothing_else() -> None:
    code = """
import importlib.metadata, sys

NOT_OURS = set("click rich tomlkit cattrs scipy safetensors filelock matplotlib sklearn".split())
NOT_OURS |= {"transformers", "datasets"}
ENTRIES = importlib.metadata.distribution("hgms").entry_points
PLUGINS = {entry.module.partition(".")[0] for entry in ENTRIES}
assert PLUGINS

class Blocked:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in NOT_OURS | PLUGINS:
            raise AssertionError(f"the core imports {name}")

sys.meta_path.insert(0, Blocked)
import hgms_core, hgms_core.host, hgms_core.registry
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
