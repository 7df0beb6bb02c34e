"""Results on disk by code and settings: which changes give another key, and what is stored."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.helpers import assert_same

from hgms.config.code_cache import CodeCache
from hgms.config.fingerprinting import Unidentified, identify
from hgms.runs import matrix_route
from hgms.store import SavedFile, cache_folder
from hgms_core import Data, Problem

LOSS = """
SCALE = 2.0

def inner(x):
    return SCALE * x

def loss(theta, x, batch):
    return inner(x["w"]).square().sum()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HGMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return cache_folder("results")


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Import a module with this source, as a new process does."""

    def load(source: str) -> ModuleType:
        (tmp_path / "loss_of_test.py").write_text(source)
        sys.modules.pop("loss_of_test", None)
        importlib.invalidate_caches()
        return importlib.import_module("loss_of_test")

    return load


def key(code: Any, *more: Any) -> str:
    return CodeCache.of("results", code, *more).file.key


def test_changes_of_code_and_settings_give_another_key(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = key(module(LOSS).loss)
    assert key(module("# a comment\n" + LOSS).loss) == first
    loss_module = module(LOSS)
    loss_module.SCALE = 2.5  # type: ignore[attr-defined]
    changed = [
        key(loss_module.loss),
        key(module(LOSS.replace("2.0", "3.0")).loss),
        key(module(LOSS.replace("SCALE *", "SCALE +")).loss),
        key(module(LOSS.replace(".sum()", ".mean()")).loss),
        key(partial(module(LOSS).loss, None)),
        key(module(LOSS).loss, (2, 3)),
    ]
    monkeypatch.setenv("TORCH_SWITCH", "1")
    changed.append(key(module(LOSS).loss))
    monkeypatch.delenv("TORCH_SWITCH")
    with matrix_route("fast"):
        changed.append(key(module(LOSS).loss))
    monkeypatch.setattr("hgms.config.code_cache.own_sources", lambda: "another version")
    changed.append(key(module(LOSS).loss))
    assert len({first, *changed}) == 1 + len(changed)


def test_tensors_count_by_position_and_shape() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert key([a, a]) == key([b, b])
    others = [
        key([a, b]),
        key([a[:1], a[:1]]),
        key([a.double()] * 2),
        key([torch.ones(4)[::2]] * 2),
    ]
    assert len({key([a, a]), *others}) == 5


def test_a_problem_counts_by_what_a_step_reads() -> None:
    def loss(theta: Any, x: Any, batch: Any) -> torch.Tensor:
        return x["w"].sum()

    def problem(seed: int, rows: int = 3, **more: Any) -> Problem:
        data = Data.of({"a": torch.full((rows,), float(seed))})
        x0 = {"w": torch.full((2,), float(seed))}
        return Problem(theta0={}, x0=x0, g=loss, f=loss, lower_data=data, **more)

    first = problem(0)
    first.kept["cache"] = object()
    assert key(first) == key(problem(1)) == key(problem(1, evaluate=lambda theta, x: {}))
    assert key(first) != key(problem(0, rows=4))
    assert key(first) != key(problem(0, project=lambda theta: theta))


def test_code_that_cannot_be_read_has_no_key() -> None:
    names: dict[str, Any] = {}
    exec("def loss(x):\n    return x", names)
    for code in (names["loss"], (one for one in ()), torch.eye(2).to_sparse()):
        with pytest.raises(Unidentified):
            identify(code)
    assert identify([names["loss"], 1], ignored=(type(names["loss"]),))[0]


def test_a_result_refers_to_the_tensors_of_the_code(folder: Path) -> None:
    old = torch.arange(3.0)
    CodeCache.of("results", {"t": old}).store(("result", old.detach()))
    new = torch.ones(3)
    name, found = CodeCache.of("results", {"t": new}).load()
    new.add_(1)
    assert name == "result"
    assert_same(found, torch.full((3,), 2.0), rtol=0, atol=0)
    assert CodeCache.of("results", {"s": new}).load() is None
    CodeCache.of("results", "other").store(torch.ones(2))
    CodeCache.of("results", "other").store(lambda: None)
    assert len(list(folder.iterdir())) == 1, "a foreign tensor and a lambda are not stored"


def test_damaged_files_are_ignored_and_replaced(folder: Path) -> None:
    place = CodeCache.of("results", "code")
    place.store([1, 2])
    (path,) = folder.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    assert place.load() is None
    place.store([1, 2])
    assert path.read_bytes() == content
    assert place.load() == [1, 2]
    place.file.store(b"no pickle")
    assert place.load() in (None, [1, 2])
    assert place.load() == [1, 2]
    place.file.delete()
    assert not list(folder.iterdir())


def test_a_damaged_file_in_a_cache_that_is_not_writable_is_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = CodeCache.of("results", "code")
    place.file.store(b"no pickle")

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    assert place.load() is None


def test_writers_of_one_key_leave_an_undamaged_file(folder: Path) -> None:
    content = bytes(range(256)) * 2000
    with ThreadPoolExecutor(8) as pool:
        for _ in range(80):
            pool.submit(SavedFile("results", "key", ".pickle").store, content)
    ((path, found),) = SavedFile("results", "key", ".pickle").contents()
    assert found == content
    assert [path] == list(folder.iterdir())
