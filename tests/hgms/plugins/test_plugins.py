"""The plugin host: what loads, what fails, and what is said about it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from support.fakes import Site
from support.helpers import rejects

from hgms.plugins import Host, Registry, import_plugin
from hgms_core.errors import ConfigError, PluginError

BROKEN = "import does_not_exist_anywhere\n"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "source", [BROKEN, "def f(:\n", "raise RuntimeError\n", "import sys; sys.exit(3)\n"]
)
def test_a_broken_third_party_plugin_is_one_warning_and_under_strict_an_error(
    site: Site, source: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.module("bad_plugin", source)
    site.solver("good_plugin", "good")
    site.install("hgms-bad", {"bad": "bad_plugin"})
    site.install("hgms-good", {"good": "good_plugin"})
    host = Host.load()
    (warning,) = warnings_of(caplog)
    assert "'bad' (hgms-bad 1.0)" in warning
    assert "\n" not in warning
    assert host.infos["bad"].status == "failed"
    assert "bad_plugin" in (host.infos["bad"].traceback or "")
    assert Registry(host).find("solver", "good") is not None
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", "1")
    with rejects("plugin-failed", of=PluginError):
        Host.load()


def test_a_broken_plugin_of_ours_is_an_error_that_names_it(site: Site) -> None:
    site.module("bad_plugin", BROKEN)
    site.install("hgms", {"bad": "bad_plugin"}, version="0.1.0")
    with rejects("plugin-failed", of=PluginError) as caught:
        Host.load()
    assert "'bad' (hgms 0.1.0)" in caught.value.message
    assert Host.load(tolerant=True).infos["bad"].status == "failed"


@pytest.mark.parametrize(
    ("entries", "name", "shown"),
    [
        ({"fast-cg": "two_plugin"}, "fast-cg (theirs)", "hgms 0.1.0"),
        ({"Fast_CG": "two_plugin"}, "Fast_CG (theirs)", "'fast-cg'"),
        ({"zebra": "one_plugin"}, "zebra", "'fast-cg' and 'zebra'"),
    ],
    ids=["one name", "a name but for case and separator", "one module"],
)
def test_of_two_entry_points_that_clash_ours_is_loaded(
    site: Site, entries: dict[str, str], name: str, shown: str
) -> None:
    site.solver("one_plugin", "one")
    site.solver("two_plugin", "two")
    site.install("hgms", {"fast-cg": "one_plugin"}, version="0.1.0")
    site.install("theirs", entries)
    infos = Host.load().infos
    assert (infos["fast-cg"].distribution, infos["fast-cg"].status) == ("hgms", "loaded")
    assert infos[name].status == "failed"
    assert shown in str(infos[name].error)


def test_strict_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, strict in (("1", True), ("true", True), ("0", False)):
        monkeypatch.setenv("HGMS_STRICT_PLUGINS", text)
        assert Host().strict is strict
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", "maybe")
    with rejects("wrong-value", "HGMS_STRICT_PLUGINS", of=ConfigError):
        Host()


OWN = """
from hgms_core.errors import MissingExtra
raise MissingExtra("missing-package", "x requires fast", install="pip install 'hgms[fast]'")
"""


@pytest.mark.parametrize(
    ("entry", "source", "extra"),
    [("plug [sklearn]", "import anything_at_all\n", "sklearn"), ("plug", OWN, "fast")],
    ids=["by the entry point", "by the plugin"],
)
def test_a_missing_extra_is_listed_with_the_line_that_installs_it(
    site: Site, entry: str, source: str, extra: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.module("plug", source)
    site.install("hgms", {"cleaning": entry}, version="0.1.0", extras=["sklearn"])
    info = Host.load().infos["cleaning"]
    assert (info.status, info.install) == ("missing-extra", f"pip install 'hgms[{extra}]'")
    assert warnings_of(caplog) == []


TASKS = "hgms_register_tasks"
ERRORS = "[ConfigError('a', 'first'), ConfigError('b', 'second', place=('x',))]"


@pytest.mark.parametrize(
    ("body", "code", "place"),
    [
        (f"def {TASKS}(): return []", "unmarked-hook", (TASKS,)),
        ("x = 1", "no-hooks", ()),
        (f"@hookimpl\ndef {TASKS}(wrong): return []", "wrong-signature", ("odd",)),
        (f"@hookimpl(wrapper=True)\ndef {TASKS}(): yield", "not-supported", (TASKS,)),
        (f"@hookimpl\ndef {TASKS[:-1]}(): return []", "unknown-hook", (TASKS[:-1],)),
        (f"raise_all({ERRORS})", "several-errors", ()),
    ],
)
def test_a_file_without_usable_hooks_is_an_error_that_says_why(
    site: Site, body: str, code: str, place: tuple[str, ...]
) -> None:
    header = "from hgms_core import ConfigError, hookimpl\nfrom hgms_core.errors import raise_all\n"
    file = site.module("odd", f"{header}{body}\n")
    with rejects(code, *place, of=PluginError) as caught:
        Host.load([file])
    assert caught.value.did_you_mean == ((TASKS,) if code == "unknown-hook" else ())


def test_the_environment_blocks_and_allows(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site.solver("one_plugin", "one")
    site.solver("two_plugin", "two")
    site.install("hgms-two", {"one": "one_plugin", "two": "two_plugin"})

    def loaded(variable: str, value: str) -> list[str]:
        monkeypatch.setenv(variable, value)
        return [name for name, info in Host.load().infos.items() if info.status == "loaded"]

    assert loaded("HGMS_DISABLE_PLUGINS", "one, tow") == ["two"]
    (warning,) = warnings_of(caplog)
    assert "did you mean 'two'?" in warning
    monkeypatch.delenv("HGMS_DISABLE_PLUGINS")
    assert (loaded("HGMS_PLUGINS", "one"), loaded("HGMS_PLUGINS", "")) == (["one"], [])
    with rejects("unknown-plugin", "HGMS_PLUGINS", of=PluginError):
        loaded("HGMS_PLUGINS", "onee")


def test_a_single_file_is_a_plugin_and_its_failure_an_error_without_a_trace(
    site: Site, tmp_path: Path
) -> None:
    good = tmp_path / "my_solver.py"
    good.write_text(site.solver("template", "mine").read_text())
    host = Host.load([good])
    assert host.infos["my_solver"].owner == f"file {good}"
    assert host.add(good) is host.infos["my_solver"], "a file is loaded once"
    absent = str(tmp_path / "my_sovler.py")
    with rejects("missing-file", absent, of=PluginError):
        Host.load([absent])
    with rejects("plugin-failed", of=PluginError) as caught:
        Host.load([site.module("wrong", "x = 1\ndef f(:\n")])
    assert "SyntaxError: invalid syntax (wrong.py, line 2)" in caught.value.message


OBSERVER = """
from hgms_core import hookimpl
heard = []
@hookimpl
def hgms_step_finished(record):
    heard.append(record["step"])
    record["scores"].clear()
    {body}
@hookimpl
def hgms_run_finished(run, summary, error):
    heard.append(summary)
"""


@pytest.mark.parametrize("error", ["ValueError('disk on fire')", "SystemExit(3)"])
def test_an_observer_that_raises_is_reported_once_and_the_others_go_on(
    site: Site, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = site.module("good_observer", OBSERVER.format(body="record['step'] = 99"))
    bad = site.module("bad_observer", OBSERVER.format(body=f"raise {error}"))
    host = Host.load([bad, good])
    for step in (1, 2):
        host.notify("hgms_step_finished", run=None, record={"step": step, "scores": [0.5]})
    host.notify("hgms_run_finished", run=None, summary="the end", error=None)
    (warning,) = warnings_of(caplog)
    assert f"'bad_observer' (file {bad}): hgms_step_finished raised {error[:9]}" in warning
    assert sys.modules["hgms_file_good_observer"].heard == [1, 2, "the end"]
    assert sys.modules["hgms_file_bad_observer"].heard == [1]
    assert host.infos["bad_observer"].status == "incomplete"


# --- where a plugin is looked for


@pytest.mark.parametrize(
    ("where", "code", "near"),
    [
        ("folder/", "wrong-value", ()),
        ("./folder", "wrong-value", ()),
        ("./absent.txt", "wrong-value", ()),
        ("two words", "wrong-value", ()),
        ("besides.py", "missing-file", ("beside.py",)),
        ("no/such/folder/a.py", "missing-file", ()),
    ],
)
def test_what_is_neither_a_module_nor_a_python_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, code: str, near: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").touch()
    (tmp_path / "beside.py").write_text("x = 1")
    with rejects(code, where, of=PluginError) as caught:
        import_plugin(where)
    assert caught.value.did_you_mean == near
