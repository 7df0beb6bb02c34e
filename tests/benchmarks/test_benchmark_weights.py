"""The grids on real weights build. Nothing is run here."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.extended


WEIGHTS = Path(__file__).parents[2] / "benchmarks" / "llm" / "weights"


@pytest.mark.parametrize("name", ["denoising", "german", "mathematics", "ranking", "rate"])
def test_a_grid_builds_and_each_method_has_the_tables_that_are_meant_for_it(name: str) -> None:
    from hgms_mix.stages.compare.mixes import Contest

    contest = Contest.of(WEIGHTS / f"{name}.toml")
    assert (contest.reference, contest.roles["uniform-long"]) == ("uniform-long", "floor")
    assert {seed for _, seed in contest.mixes} == set(range(5))
    for (label, _), config in contest.mixes.items():
        trained = config.sample.size * config.finetune.epochs
        learns = label not in ("uniform-long", "random-long", "validation-rows", "oracle")
        if config.finetune.start != "reweighted":
            # what has spent passes on learning has fewer to train
            assert trained in (range(1, 201) if learns else range(320, 323)), label
