"""Compiled functions on disk: another process loads them without a compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.helpers import assert_same
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from hgms.compiled import Programs
from hgms.compiled.library import Library, key_of
from hgms.store import cache_folder

STEP = """
import sys
import torch
from hgms.compiled import Programs, repeat

def step(a):
    values, turns = repeat(lambda x: 0.5 * torch.sin(a @ x), a.sum(0), 7)
    return {"x": values}

def run():
    programs = Programs()
    x = programs(("step",), step)(torch.linspace(-1, 1, 25).reshape(5, 5))["x"]
    assert programs.outcomes == {"step": "compiled"}
    return x
"""
PRINT = """
print(run().tolist())
print("torch._inductor.compile_fx" in sys.modules)
"""


def graph() -> GraphModule:
    return symbolic_trace(lambda a: [a + 1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HGMS_CACHE", str(tmp_path))
    return cache_folder("programs")


def test_a_key_depends_on_graph_shapes_settings_and_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = symbolic_trace(lambda a: [a + 2])
    x = torch.ones(2)
    keys = [
        key_of(graph(), [x], {}),
        key_of(other, [x], {}),
        key_of(graph(), [torch.ones(3)], {}),
        key_of(graph(), [x.double()], {}),
        key_of(graph(), [x], {"realize_reads_threshold": 2}),
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.append(key_of(graph(), [x], {}))
    assert len(set(keys)) == len(keys)
    assert key_of(graph(), [x], {}) == keys[-1]


def test_foreign_files_are_ignored(folder: Path) -> None:
    key = key_of(graph(), [torch.ones(2)], {})
    folder.mkdir()
    for name in (f"{key}-{'0' * 32}.so", f"{key}.so", "notes.txt"):
        (folder / name).write_text("no library")
    assert Library.load(key) is None


@pytest.mark.extended
def test_another_process_loads_a_program_and_a_damaged_file_is_rewritten(folder: Path) -> None:
    names: dict[str, object] = {}
    exec(STEP, names)
    run = names["run"]
    assert callable(run)
    first: Tensor = run()
    (path,) = folder.iterdir()
    shown = subprocess.run(
        [sys.executable, "-c", STEP + PRINT], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert_same(torch.tensor(json.loads(shown[0])), first, rtol=0, atol=0)
    assert shown[1] == "False", "no compiler is imported"
    content = path.read_bytes()
    path.write_bytes(content[:1000])
    assert_same(run(), first, rtol=0, atol=0)
    assert path.read_bytes() == content


def test_programs_of_an_interpreter_are_not_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hgms.compiled.programs._inductor", lambda graph, leaves, **_: lambda inputs: graph(*inputs)
    )
    assert float(Programs()(("double",), lambda x: 2 * x)(torch.ones(()))) == 2
    assert not folder.exists()
