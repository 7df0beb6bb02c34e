"""Skill-It and Aioli against loops written here, with torch's AdamW and numpy, on the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import assert_same
from support.online_loops import (
    ADAMW,
    PROBLEM,
    SOURCES,
    Trainee,
    assert_costs,
    assert_ends,
    softmax,
)
from support.source_problems import convex_sources, through, watched, weights

from hgms_mix.contrib import Aioli, SkillIt


def test_skill_it_is_its_loop() -> None:
    method = SkillIt(
        **ADAMW, graph_steps=5, round_steps=7, rounds=4, updates=3, window=2, eta=0.8, chunk=4
    )
    problem, seen = watched(PROBLEM)
    states = list(through(method, problem))
    start = Trainee().targets()
    falls = []
    for number in range(3):
        own = Trainee()
        for index in seen["pool"][5 * number : 5 * number + 5]:
            assert_same(PROBLEM.lower_data.rows(index)["source"], torch.full((7,), number))
            own.on(index)
        falls.append((start - own.targets()) / start)
    graph = np.array(falls)
    x = Trainee()
    shares = softmax(0.8 * graph.sum(1))
    losses = []
    used = []
    for number in range(4):
        used.append(shares)
        for index in seen["pool"][15 + 7 * number : 22 + 7 * number]:
            x.on(index)
        losses.append(x.targets())
        shares = softmax(0.8 * graph @ np.sum(losses[-2:], 0))
    state, row = states[-1]
    assert_ends(method, state, np.mean(used, 0), x.x)
    assert_costs(method, row, seen)


@pytest.mark.parametrize("average", [None, 0.3])
def test_aioli_is_its_loop(average: float | None) -> None:
    method = Aioli(
        **ADAMW,
        rounds=3,
        round_steps=4,
        sweeps=2,
        sweep_steps=3,
        focus=0.6,
        eta=2.0,
        updates=3,
        chunk=4,
        average=average,
    )
    problem, seen = watched(PROBLEM)
    states = list(through(method, problem))
    batches = iter(seen["pool"])
    x = Trainee()
    shares = np.full(3, 1 / 3)
    law = np.zeros((2, 3))
    mixtures = np.full((3, 3), 0.2) + np.eye(3) * 0.4
    stretches = iter([row["source"] for _, row in states if row["phase"] == "sweeps"])
    used = []
    for number in range(3):
        before = x.targets()
        falls = np.zeros((2, 3))
        for _ in range(2):
            order = [SOURCES.names.index(next(stretches)) for _ in range(3)]
            for source in order:
                for index in (next(batches) for _ in range(3)):
                    x.on(index)
                after = x.targets()
                falls[:, source] += (before - after) / 2
                before = after
        new = np.stack([np.linalg.lstsq(mixtures, fall, rcond=None)[0] for fall in falls])
        new = new - min(new.min(), 0)
        new = new / new.sum()
        if average is None:
            shares = softmax(np.log(shares) + 2.0 * new.sum(0))
        else:
            law = new if number == 0 else 0.7 * new + 0.3 * law
            shares = softmax(2.0 * law.sum(0))
        used.append(shares)
        for _ in range(4):
            x.on(next(batches))
    state, row = states[-1]
    assert_ends(method, state, np.mean(used, 0), x.x)
    assert_costs(method, row, seen)


@pytest.mark.parametrize(
    "method",
    [
        SkillIt(graph_steps=20, round_steps=20, updates=20, rounds=5, lr=0.02, eta=0.2),
        Aioli(rounds=10, round_steps=10, sweeps=2, updates=10, lr=0.01),
    ],
    ids=lambda method: method.name,
)
def test_sources_that_help_weigh_more(method: Any) -> None:
    problem = convex_sources({"first": 0.6, "second": 0.3, "third": 0.1})
    *_, (state, _) = through(method, problem)
    first, second, third = weights(problem, method.result(state)[0]).tolist()
    assert first > second + 0.01 > third + 0.02
