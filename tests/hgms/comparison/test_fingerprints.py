"""Fingerprints of functions, objects and tensors: equal where a run would be, else distinct."""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
import torch
from support.own_problems import Follow

from hgms.config.fingerprinting import fingerprint

SCALE = 2.0


def scaled(x: float) -> float:
    return SCALE * x


def test_a_fingerprint_knows_values_code_closures_and_globals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_closure(power: int) -> Callable[[float], float]:
        return lambda x: x**power

    assert fingerprint(with_closure(2)) == fingerprint(with_closure(2))
    model = torch.nn.Linear(2, 1)
    before = fingerprint(scaled)
    monkeypatch.setitem(scaled.__globals__, "SCALE", 3.0)
    distinct = [
        before,
        fingerprint(scaled),
        fingerprint(with_closure(2)),
        fingerprint(with_closure(3)),
        fingerprint(model),
        fingerprint(Follow()),
        fingerprint(Follow(0.5)),
        fingerprint(torch.zeros(2)),
        fingerprint(torch.zeros(2).double()),
        fingerprint(torch.zeros(1, 2)),
        fingerprint({"a": 1}),
        fingerprint({"a": 1.0}),
        fingerprint(Follow),
    ]
    assert len(set(distinct)) == len(distinct)
    with torch.no_grad():
        model.weight.add_(1)
    assert fingerprint(model) != distinct[4]
    alike = [
        re.compile("a"),
        Decimal(1),
        range(3),
        deque([1]),
        torch.nn.Dropout(0.1),
        lambda: "x",
        partial(scaled, 1),
    ]
    other = [
        re.compile("b"),
        Decimal(2),
        range(4),
        deque([2]),
        torch.nn.Dropout(0.2),
        lambda: "y",
        partial(scaled, 2),
    ]
    assert [fingerprint(value) for value in alike] == [
        fingerprint(copy.deepcopy(value)) for value in alike
    ]
    assert all(fingerprint(a) != fingerprint(b) for a, b in zip(alike, other, strict=True))
    loop: list[Any] = []
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)
