"""What plugins do while they are found, imported and asked: noted, undone, and never in the way
of the others.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pluggy
import pytest
import torch
from support.fakes import Site
from support.helpers import rejects

from hgms.cli.inspect import plugin_row
from hgms_core import PLUGIN_API, Budget, RunInfo, hookimpl, hookspecs, sandbox
from hgms_core import host as plugins
from hgms_core.errors import PluginError
from hgms_core.host import Host
from hgms_core.registry import Registry

RUN = RunInfo(task="quadratic", method="hg-ms", seed=0, budget=Budget(outer_steps=1))
HOOK = "from hgms_core import hookimpl\n@hookimpl\ndef hgms_ready(): pass\n"


def installed(site: Site, source: str, name: str = "odd") -> Host:
    """A host with the plugin of that source, and one that is as it should be."""
    site.module(f"{name}_plugin", source)
    site.solver("good_plugin", "good")
    site.install(f"hgms-{name}", {name: f"{name}_plugin"})
    site.install("hgms-good", {"good": "good_plugin"})
    host = Host.load()
    assert Registry(host).find("solver", "good") is not None
    return host


class TestTheApiItWasWrittenFor:
    def test_the_present_one_is_fine(self, site: Site) -> None:
        assert (
            installed(site, f"hgms_plugin_api = {PLUGIN_API}\n{HOOK}").infos["odd"].status
            == "loaded"
        )

    @pytest.mark.parametrize(
        ("wanted", "code", "shown"),
        [
            ("99", "wrong-plugin-api", "upgrade hgms"),
            ("1", "wrong-plugin-api", f"hgms_plugin_api = {PLUGIN_API}"),
            ("'1'", "wrong-type", "hgms_plugin_api='1'"),
            ("True", "wrong-type", "hgms_plugin_api=True"),
        ],
    )
    def test_any_other_is_named(
        self, site: Site, monkeypatch: pytest.MonkeyPatch, wanted: str, code: str, shown: str
    ) -> None:
        host = installed(site, f"hgms_plugin_api = {wanted}\n{HOOK}")
        info = host.infos["odd"]
        assert info.status == "failed"
        assert info.error is not None
        assert shown in info.error
        if code == "wrong-plugin-api":
            assert f"plugin API {wanted}, but this hgms has {PLUGIN_API}" in info.error
        monkeypatch.setenv("HGMS_STRICT_PLUGINS", "1")
        with rejects(code, "hgms_plugin_api", of=PluginError):
            Host.load()


class TestHowTheApiGrows:
    """A host with tomorrow's specifications and yesterday's plugins."""

    def host(self, specification: object, plugin: object) -> Host:
        tomorrow = ModuleType("tomorrow")
        module = ModuleType("yesterday")
        tomorrow.hgms_tomorrow = specification  # type: ignore[attr-defined]
        module.hgms_tomorrow = plugin  # type: ignore[attr-defined]
        host = Host()
        host._manager.add_hookspecs(tomorrow)
        host.add(module)
        return host

    def test_a_hook_may_get_arguments_at_its_end(self) -> None:
        heard = []

        @hookspecs.hookspec
        def hgms_tomorrow(run: object, record: object, new: object) -> None: ...

        @hookimpl
        def implementation(run: object) -> None:
            heard.append(run)

        implementation.__name__ = "hgms_tomorrow"
        self.host(hgms_tomorrow, implementation).notify("hgms_tomorrow", run=1, record={}, new=3)
        assert heard == [1]

    def test_a_deprecated_hook_works_and_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")

            @pluggy.HookspecMarker("hgms")(
                warn_on_impl=sandbox.HookDeprecated("hgms_tomorrow goes in 0.6; use hgms_ready")
            )
            def hgms_tomorrow() -> None: ...

        @hookimpl
        def implementation() -> None: ...

        implementation.__name__ = "hgms_tomorrow"
        host = self.host(hgms_tomorrow, implementation)
        (info,) = host.infos.values()
        assert (info.status, info.notes) == (
            "loaded",
            ("hgms_tomorrow goes in 0.6; use hgms_ready",),
        )
        assert [record.getMessage() for record in caplog.records] == [
            "plugin 'yesterday' (file yesterday): hgms_tomorrow goes in 0.6; use hgms_ready"
        ]


def test_a_slow_import_is_reported_with_its_time(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugins, "SLOW", 0.05)
    info = installed(site, f"import time\ntime.sleep(0.1)\n{HOOK}").infos["odd"]
    assert info.status == "loaded"
    assert info.seconds > 0.1
    (note,) = info.notes
    assert note == (
        f"its import took {info.seconds:.1f} s, and every command waits for it; import heavy "
        "things at use"
    )
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == [f"plugin 'odd' (hgms-odd 1.0): {note}"]
    assert plugin_row(info)["seconds"] == round(info.seconds, 3)


def test_what_it_prints_is_noted(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    info = installed(site, f"print('hello')\n{HOOK}").infos["odd"]
    assert info.notes == ("it prints while it is imported (shown on stderr)",)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "hello\n")


CHANGES = {
    "torch.set_default_dtype(torch.float64)": (
        "torch's default dtype from torch.float32 to torch.float64"
    ),
    "torch.set_default_device('meta')": "torch's default device from cpu to meta",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "torch's number of threads from",
    "torch.set_grad_enabled(False)": "torch's gradient mode from True to False",
    "torch.use_deterministic_algorithms(True)": "torch's deterministic mode from False to True",
    "torch.set_float32_matmul_precision('medium')": (
        "torch's precision of float32 products from highest to medium"
    ),
    "os.chdir('/')": "the working directory from",
    "signal.signal(signal.SIGINT, signal.SIG_IGN)": "the handler of Ctrl-C from",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["imported", "asked"])
def test_what_it_changes_for_everybody_is_undone_and_said(
    site: Site, change: str, when: str
) -> None:
    before = {name: value for name, (value, _) in sandbox.settings().items()}
    body = "from hgms_core import hookimpl\nimport os, signal, torch\n"
    hook = "@hookimpl\ndef hgms_register_linear_solvers():\n"
    source = (
        body
        + (change + "\n" + hook if when == "imported" else hook + f"    {change}\n")
        + "    return []\n"
    )
    info = installed(site, source).infos["odd"]
    assert {name: value for name, (value, _) in sandbox.settings().items()} == before
    assert info.status == "loaded"
    # a switch of torch's may import much
    (note,) = [text for text in info.notes if "took" not in text]
    assert note.startswith(f"it changed {CHANGES[change]}")
    assert note.endswith("for everybody; this was undone")


def test_a_failing_import_changes_nothing_either(site: Site) -> None:
    info = installed(site, "import torch\ntorch.set_default_dtype(torch.float64)\n1 / 0\n").infos[
        "odd"
    ]
    assert info.status == "failed"
    assert torch.get_default_dtype() == torch.float32


def test_an_entry_point_to_a_missing_attribute(site: Site) -> None:
    site.module("odd_plugin", f"plugin = 1\n{HOOK}")
    site.install("hgms-odd", {"odd": "odd_plugin:plugins"})
    info = Host.load().infos["odd"]
    assert info.error is not None
    for shown in ("odd = 'odd_plugin:plugins'", "did you mean 'plugin'?", "odd = 'odd_plugin'"):
        assert shown in info.error


@pytest.mark.parametrize("second", ["Fast-CG", "fast_cg", "FAST.cg"])
def test_names_that_differ_by_case_or_separator_only(site: Site, second: str) -> None:
    site.solver("one_plugin", "one")
    site.solver("two_plugin", "two")
    site.install("hgms-a", {"fast-cg": "one_plugin"})
    site.install("hgms-b", {second: "two_plugin"})
    infos = Host.load().infos
    assert infos["fast-cg"].status == "loaded"
    error = infos[f"{second} (hgms-b)"].error
    assert error is not None
    assert "hgms-a 1.0" in error
    assert "'fast-cg'" in error
    assert f"({second})" in error


class TestHooksThatExit:
    def test_a_registering_hook(self, site: Site) -> None:
        host = installed(site, HOOK + "@hookimpl\ndef hgms_register_tasks(): raise SystemExit(3)\n")
        assert (
            host.infos["odd"].error == "hgms_register_tasks raised SystemExit: it calls sys.exit(3)"
        )

    def test_an_observer(self, site: Site, caplog: pytest.LogCaptureFixture) -> None:
        host = installed(site, HOOK + "@hookimpl\ndef hgms_step_finished(): raise SystemExit(3)\n")
        host.notify("hgms_step_finished", run=RUN, record={})
        assert (
            "hgms_step_finished raised SystemExit: it calls sys.exit(3); its observers are not "
            "called again"
        ) in caplog.text


def test_an_observer_cannot_change_what_is_recorded(site: Site) -> None:
    spoil = (
        "@hookimpl\ndef hgms_step_finished(record):\n    record['step'] = 99\n"
        "    record['scores'].clear()\n"
    )
    host = installed(site, HOOK + spoil)
    record = {"step": 1, "scores": [0.5]}
    host.notify("hgms_step_finished", run=RUN, record=record)
    assert record == {"step": 1, "scores": [0.5]}


class TestFilesNamedByAPerson:
    def test_a_missing_one_with_a_neighbour(self, tmp_path: Path) -> None:
        (tmp_path / "my_solver.py").write_text(HOOK)
        wanted = str(tmp_path / "my_sovler.py")
        with rejects("missing-file", wanted, of=PluginError) as caught:
            Host().add(wanted)
        assert caught.value.did_you_mean == (str(tmp_path / "my_solver.py"),)

    def test_no_python_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "notes.txt").write_text("hello")
        for where in (str(tmp_path / "notes.txt"), "notes.txt"):
            with rejects("not-a-file", where, of=PluginError):
                Host().add(where)

    def test_one_that_python_cannot_read(self, tmp_path: Path) -> None:
        (tmp_path / "wrong.py").write_text("x = 1\ndef f(:\n")
        with rejects("plugin-failed", of=PluginError) as caught:
            Host().add(str(tmp_path / "wrong.py"))
        assert "SyntaxError: invalid syntax (wrong.py, line 2)" in caught.value.message

    def test_it_leaves_no_trace(self, tmp_path: Path) -> None:
        (tmp_path / "wrong.py").write_text("1 / 0\n")
        with rejects("plugin-failed", of=PluginError):
            Host().add(str(tmp_path / "wrong.py"))
        assert "hgms_file_wrong" not in sys.modules
        assert os.getcwd()
