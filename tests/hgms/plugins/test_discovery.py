"""What plugins do while they are found, imported and asked: noted, undone, and never in the way
of the others.
"""

from __future__ import annotations

import pytest
from support.fakes import Site
from support.helpers import rejects

from hgms.plugins import Host, Registry, sandbox
from hgms.plugins import host as plugins
from hgms_core import PLUGIN_API
from hgms_core.errors import PluginError

HOOK = "from hgms_core import hookimpl\n@hookimpl\ndef hgms_ready(): pass\n"


def installed(site: Site, source: str, attribute: str = "") -> plugins.PluginInfo:
    """The plugin of that source, beside one that is as it should be."""
    site.module("odd_plugin", source)
    site.solver("good_plugin", "good")
    site.install("hgms-odd", {"odd": f"odd_plugin{attribute}"})
    site.install("hgms-good", {"good": "good_plugin"})
    host = Host.load()
    assert Registry(host).find("solver", "good") is not None
    return host.infos["odd"]


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (str(PLUGIN_API), None),
        ("99", "wrong-plugin-api"),
        ("1", "wrong-plugin-api"),
        ("'1'", "wrong-plugin-api"),
        ("True", "wrong-plugin-api"),
    ],
)
def test_a_plugin_for_another_api_is_not_loaded(
    site: Site, monkeypatch: pytest.MonkeyPatch, wanted: str, code: str | None
) -> None:
    info = installed(site, f"hgms_plugin_api = {wanted}\n{HOOK}")
    assert info.status == ("failed" if code else "loaded")
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", "1")
    if code:
        with rejects(code, "hgms_plugin_api", of=PluginError):
            Host.load()


def test_what_it_prints_goes_to_stderr(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    installed(site, f"print('hello')\n{HOOK}")
    assert capsys.readouterr() == ("", "hello\n")


CHANGES = {
    "torch.set_default_dtype(torch.float64)": "torch's default dtype from torch.float32",
    "torch.set_default_device('meta')": "torch's default device from cpu to meta",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "torch's number of threads from",
    "torch.set_grad_enabled(False)": "torch's gradient mode from True to False",
    "torch.use_deterministic_algorithms(True)": "torch's deterministic mode from False to True",
    "torch.set_float32_matmul_precision('medium')": "torch's precision of float32 products",
    "os.chdir('/')": "the working directory from",
    "signal.signal(signal.SIGINT, signal.SIG_IGN)": "the handler of Ctrl-C from",
}
REGISTER = "@hookimpl\ndef hgms_register_linear_solvers():\n    {}\n    return []\n"


@pytest.mark.parametrize(
    ("change", "source"),
    [(change, f"{change}\n{REGISTER}") for change in CHANGES]
    + [(change, REGISTER.format(change)) for change in list(CHANGES)[::4]]
    + [("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float64)\n1 / 0")],
)
def test_what_it_changes_for_everybody_is_undone_and_said(
    site: Site, change: str, source: str
) -> None:
    """While it is imported, while it is asked, and where its import fails."""
    before = {name: value for name, (value, _) in sandbox.settings().items()}
    info = installed(site, f"from hgms_core import hookimpl\nimport os, signal, torch\n{source}")
    assert {name: value for name, (value, _) in sandbox.settings().items()} == before
    assert info.status == ("failed" if "1 / 0" in source else "loaded")
    # a switch of torch's may import much
    changed = [note for note in info.notes if note.startswith(f"it changed {CHANGES[change]}")]
    assert len(changed) == (info.status == "loaded")
