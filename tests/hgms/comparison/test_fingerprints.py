"""Fingerprints of functions, objects and tensors: equal where a run would be, else distinct."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_problems import Follow

from hgms.config.fingerprinting import fingerprint, source_digests

SCALE = 2.0


def scaled(x: float) -> float:
    return SCALE * x


def with_closure(power: int) -> Callable[[float], float]:
    return lambda x: x**power


def test_a_fingerprint_knows_values_code_closures_and_globals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(2, 1)
    before = [fingerprint(scaled), fingerprint(model)]
    monkeypatch.setitem(scaled.__globals__, "SCALE", 3.0)
    torch.nn.init.ones_(model.weight)
    objects = [scaled, model, with_closure(2), with_closure(3), Follow, Follow(), Follow(0.5)]
    tensors = [torch.zeros(2), torch.zeros(2).double(), torch.zeros(1, 2), {"a": 1}, {"a": 1.0}]
    distinct = [*before, *map(fingerprint, [*objects, *tensors])]
    assert len(set(distinct)) == len(distinct)
    assert fingerprint(with_closure(2)) == fingerprint(with_closure(2))
    pairs: list[tuple[Any, Any]] = [
        (re.compile("a"), re.compile("b")),
        (Decimal(1), Decimal(2)),
        (range(3), range(4)),
        (deque([1]), deque([2])),
        (torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)),
        (lambda: "x", lambda: "y"),
        (partial(scaled, 1), partial(scaled, 2)),
    ]
    assert all(fingerprint(one) == fingerprint(copy.deepcopy(one)) for one, _ in pairs)
    assert all(fingerprint(one) != fingerprint(other) for one, other in pairs)
    loop: list[Any] = []
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)


def test_a_function_is_its_source_without_comments_and_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(text: str) -> list[str]:
        (tmp_path / "losses.py").write_text(text)
        monkeypatch.delitem(sys.modules, "losses", raising=False)
        importlib.invalidate_caches()
        losses = importlib.import_module("losses")
        return [fingerprint(loss) for loss in (losses.g, losses.f, losses.h)]

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    before = read("g, f = lambda x: x + 1, lambda x: x + 2\ndef h(x):\n    return x\n")
    assert len(set(before)) == 3
    text = "# comment\ng, f = (lambda x:\n    x + 1), lambda x: x+2\ndef h(x): return x\n"
    assert read(text) == before
    assert read(text.replace("x + 1", "x - 1"))[0] != before[0]
    shown: dict[str, Any] = {}
    exec("def loss(x): return x", shown)
    assert fingerprint(shown["loss"]) == fingerprint(shown["loss"])


class Unpicklable:
    def __init__(self, value: int) -> None:
        self.value = value

    def __getstate__(self) -> None:
        raise TypeError("a handle")


def test_an_object_that_pickle_rejects_has_the_fingerprint_of_its_attributes() -> None:
    assert fingerprint(Unpicklable(1)) == fingerprint(Unpicklable(1))
    assert fingerprint(Unpicklable(1)) != fingerprint(Unpicklable(2))


def test_sources_are_those_of_modules_and_not_of_imported_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fingerprint_helper.py").write_text("def double(x): return 2 * x\n")
    (tmp_path / "fingerprint_user.py").write_text("from fingerprint_helper import double\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert list(source_digests("fingerprint_user")) == ["fingerprint_helper", "fingerprint_user"]
