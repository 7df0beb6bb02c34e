"""Every built-in class does on the device what its protocol asks: its tensors are there, and
hold what they hold on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from placement import Draws, compare, elsewhere

from hgms.plugins import Registry, registry
from hgms.testing import Check, checks_of, failures_of, inputs_on, instance_of
from hgms.testing.kit import snapshot, tensors
from hgms.testing.suite import OF_KIND
from hgms_core import Composition

pytestmark = pytest.mark.nightly

CLASSES = [
    each for each in Registry.load().components() if not isinstance(each.target, Composition)
]
LEFT_OUT = {
    "registration",
    "docstring",
    "source",
    "types",
    "frozen",
    "hashable",
    "pickle",
    "toml",
    "import",
} | {"records", "budget", "failure"}
"""These look at the class or at what surrounds its steps, which is the same on every device; the
CPU's tests ask them.
"""
FEWER_STEPS = {"ula": 20}
"""Its 100 steps a proposal, kernel after kernel, would take most of the time here and show no
more.
"""


def _instance(component: registry.Component) -> Any:
    made = instance_of(component.target)
    return attrs.evolve(made, steps=FEWER_STEPS[made.name]) if made.name in FEWER_STEPS else made


def _asked() -> Iterator[Any]:
    for component in CLASSES:
        instance = _instance(component)
        checks = list(checks_of(instance, component.kind))
        excused = failures_of(type(instance), checks)
        for check in checks:
            if check.name not in LEFT_OUT:
                marks = (
                    [pytest.mark.xfail(strict=True, reason=excused[check.name])]
                    if check.name in excused
                    else []
                )
                name = f"{component.kind.name}-{component.name}-{check.name}"
                yield pytest.param(instance, check, id=name, marks=marks)


@pytest.mark.parametrize(("component", "check"), list(_asked()))
def test_conforms(component: Any, check: Check, device: torch.device) -> None:
    with inputs_on(device):
        check(component)


@pytest.mark.parametrize("component", CLASSES, ids=lambda each: f"{each.kind.name}-{each.name}")
def test_gives_what_the_cpu_gives(
    component: registry.Component, device: torch.device, draws: Draws
) -> None:
    """An ordinary use, in float64. Numbers that are drawn on the GPU are others than the CPU's:
    there, shapes and types.
    """
    instance = _instance(component)
    exercise = OF_KIND[component.kind.name].exercise
    here = snapshot(exercise(instance, torch.float64, 0)[1]())
    draws.clear()
    with inputs_on(device):
        there = snapshot(exercise(instance, torch.float64, 0)[1]())
    if not draws.on_device:
        compare(here, there, device)
        return
    assert device.type != "cpu"
    assert not elsewhere(there, device)
    forms = [
        {name: (leaf.shape, leaf.dtype) for name, leaf in tensors(each).items()}
        for each in (here, there)
    ]
    assert forms[0] == forms[1]
    numbers = {name: leaf for name, leaf in tensors(there).items() if leaf.is_floating_point()}
    assert not [name for name, leaf in numbers.items() if leaf.isnan().any()]
