"""What the host demands of a candidate generator, asked by its own kit."""

from __future__ import annotations

from hgms_cyclical import CyclicalLangevin

from hgms.testing import parametrize_with_checks

SAMPLER = CyclicalLangevin.testing_instance()
DESCENT = CyclicalLangevin(count=2, cycle_steps=2, exploration=1.0, carry_rule="restart")


def expected(component: CyclicalLangevin) -> dict[str, str]:
    if component == SAMPLER:
        return {}
    return {
        "wells": (
            "without a sampling step descent stays where the gradient is 0, on the top "
            "between the wells"
        )
    }


@parametrize_with_checks([SAMPLER, DESCENT], expected_failures=expected)
def test_conformance(component, check):
    check(component)
