"""What holds for every mix method among the contributed ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import assert_same, network_problem, rejects
from support.source_problems import (
    assert_goes_on,
    assert_shares,
    convex_sources,
    in_another_order,
    language_sources,
    network_sources,
    through,
    without_rows,
)

from hgms_core import ConfigError, NumericalError
from hgms_mix.contrib import Aioli, OpMix, SkillIt

PROBLEM = network_sources()
ADAMW: dict[str, Any] = {"lr": 0.02, "batch_size": 7, "updates": 3, "chunk": 4}
OP_MIX = OpMix(**ADAMW, steps=5, candidates=5)
SKILL_IT = SkillIt(**ADAMW, graph_steps=5, round_steps=7, rounds=3, window=2, eta=0.8)
AIOLI = Aioli(**ADAMW, rounds=2, round_steps=4, sweeps=2, sweep_steps=3, focus=0.6, eta=2.0)
METHODS: dict[str, Any] = {
    "op-mix": evolve(OP_MIX, train_steps=4, own=1.0),
    "skill-it": SKILL_IT,
    "aioli": AIOLI,
    "aioli-average": evolve(AIOLI, sweeps=1, average=0.3),
}
every_method = pytest.mark.parametrize("name", METHODS)


@every_method
def test_a_state_read_back_goes_on_bit_for_bit(name: str) -> None:
    method = METHODS[name]
    state = assert_goes_on(method, PROBLEM)
    assert method.finished(state)
    assert_same(method.result(method.step(PROBLEM, state)[0]), method.result(state))


@every_method
def test_it_begins_at_the_prior_and_needs_sources_and_validation_rows(name: str) -> None:
    method = METHODS[name]
    assert_shares(PROBLEM, method, method.init(PROBLEM, 3), [1, 1, 1])
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        method.init(network_problem(), 0)
    role = "select" if name == "op-mix" else "differentiate"
    with rejects("no-rows-for-role", "problem", "upper_data", role, of=ConfigError):
        method.init(without_rows(PROBLEM, role), 0)


@every_method
def test_where_sources_stand_in_the_table_does_not_matter(name: str) -> None:
    method = METHODS[name]
    *_, (state, row) = through(method, PROBLEM)
    *_, (other, again) = through(method, in_another_order(PROBLEM))
    assert_same(method.result(other), method.result(state), rtol=1e-6, atol=1e-9)
    assert row.keys() == again.keys()


@every_method
def test_a_language_model(name: str) -> None:
    problem = language_sources(2)
    state = METHODS[name].init(problem, 0)
    for _ in range(3):
        state, row = METHODS[name].step(problem, state)
    assert math.isfinite(row["lower_loss"])


@every_method
@pytest.mark.parametrize("loss", [torch.nan, 0.0, -1.0])
def test_losses_of_which_nothing_can_be_learned_stop_the_run(name: str, loss: float) -> None:
    """NaN in the training or the validation loss, and validation losses that nothing lowers."""
    broken = [evolve(PROBLEM, f=lambda theta, x, batch: 0 * x["v"].sum() + loss)]
    if math.isnan(loss):
        x0 = {leaf: value * torch.nan for leaf, value in PROBLEM.x0.items()}
        broken.append(evolve(PROBLEM, x0=x0))
    elif name.startswith("aioli") or (name == "op-mix" and loss == 0.0):
        return
    for problem in broken:
        code = "not-finite" if math.isnan(loss) else "out-of-range"
        with rejects(code, of=NumericalError):
            list(through(METHODS[name], problem))


@pytest.mark.parametrize(
    ("method", "code", "options"),
    [
        (OpMix, "out-of-range", {"kl": 0.0}),
        (OpMix, "out-of-range", {"own": 1.5}),
        (OpMix, "out-of-range", {"steps": 0}),
        (OpMix, "out-of-range", {"candidates": 3}),
        (Aioli, "out-of-range", {"average": 1.0}),
    ],
)
def test_wrong_settings_are_refused(method: Any, code: str, options: dict[str, Any]) -> None:
    with rejects(code, next(iter(options)), of=ConfigError):
        method(**options)


@pytest.mark.parametrize(
    ("method", "place"),
    [
        (OpMix(candidates=4), ("method", "candidates")),
        (OpMix(own=0.3), ("method", "own")),
        (Aioli(focus=0.3), ("method", "focus")),
    ],
)
def test_settings_that_need_fewer_sources_are_refused(method: Any, place: tuple[str, ...]) -> None:
    with rejects("out-of-range", *place, of=ConfigError):
        method.init(PROBLEM, 0)
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        evolve(METHODS[method.name]).init(convex_sources({"alone": 1.0}), 0)
