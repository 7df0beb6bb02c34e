"""Every field of every registered class is given what it cannot take, and numbers of other
libraries.
"""

from __future__ import annotations

import importlib
import math
import re
import typing
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from hgms.plugins import Registry
from hgms.testing import instance_of
from hgms_core import ConfigError


def registered() -> dict[str, type]:
    """The classes of components, and those of objects in their fields."""
    classes: list[Any] = [
        getattr(component.target, "of", component.target)
        for component in Registry.load().components()
    ]
    hints = [
        typing.get_type_hints(cls)[part.name]
        for cls in classes
        for part in attrs.fields(cls)
        if part.init
    ]
    inner = [part for hint in hints for part in (hint, *typing.get_args(hint))]
    classes += [part for part in inner if isinstance(part, type) and attrs.has(part)]
    return {cls.__name__: cls for cls in classes if cls.__module__.partition(".")[0] != "hgms_core"}


CLASSES = registered()


BY_NAME = {"Auto"}  # has no class in Python: hgms.tune runs it
SINGLE = {"tasks", "methods"}
"""Packages in which some components have a package each."""


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - BY_NAME))
def test_a_package_of_the_class_exports_it(name: str) -> None:
    parts = CLASSES[name].__module__.split(".")
    depths = (2, 3) if parts[1] in SINGLE else (2,)
    packages = [importlib.import_module(".".join(parts[:depth])) for depth in depths]
    assert CLASSES[name] in [getattr(package, name, None) for package in packages]


BASES = {
    "Source": {"path": "rows.jsonl"},
    "BaseModel": {"path": "gpt2"},
    "Torch": {"build": torch.optim.RMSprop},
}

WRONG: dict[str, Any] = {
    "object": object(),
    "nan": math.nan,
    "list": [object()],
    "matrix": np.zeros((2, 2)),
    "huge": 10**400,
    "None": None,
    "True": True,
    "-1": -1,
    "-1.5": -1.5,
    "string": "nonsense",
    "dictionary": {"nonsense": 1},
    "class": dict,
}
FITS = {
    "None": "None|Optional",
    "True": "bool",
    "string": "str",
    "dictionary": "Mapping",
    "class": "Callable",
}
"""What a type must name for the wrong value to be a right one."""
SIGNED = {
    "CircleKink.low",
    "CircleDegenerate.low",
    "Projection.low",
    "Projection.high",
    "Search.low",
    "Search.high",
    "NystromCG.seed",
    "Roulette.seed",
    "GradientProjection.seed",
    "Source.shuffle_seed",
    "BaseModel.seed",
    "Start.theta0",
    "LogisticCv.theta0",
}
"""Numbers that may be negative."""


def arguments(cls: type) -> dict[str, Any]:
    base = cls(**BASES[cls.__name__]) if cls.__name__ in BASES else instance_of(cls)
    return {part.alias: getattr(base, part.name) for part in attrs.fields(cls) if part.init}


def outcome(cls: type, values: Mapping[str, Any]) -> Any:
    """The object with these arguments, or the error."""
    try:
        return cls(**values)
    except ConfigError as error:
        return error


HERE = {"Branches", "BestOfN", "CG", "Implicit", "Adam", "HyperCleaning", "Pipeline", "Schedule"}
"""One class of each kind, and one of objects in fields: the others are in ``extended``."""
each_class = pytest.mark.parametrize(
    "cls",
    [
        pytest.param(cls, id=name, marks=[] if name in HERE else pytest.mark.extended)
        for name, cls in CLASSES.items()
    ],
)


@each_class
def test_every_field_refuses_what_it_cannot_take(cls: type) -> None:
    known = arguments(cls)
    hints = typing.get_type_hints(cls)
    for part in attrs.fields(cls):
        place = f"{cls.__name__}.{part.alias}"
        for label, value in WRONG.items() if part.init else ():
            built = outcome(cls, {**known, part.alias: value})
            if isinstance(built, ConfigError):
                named = {error.place[0] for error in built.errors if error.place}
                # two fields that exclude each other have one place
                exclude = built.code == "conflicting-options" and part.alias in built.message
                assert part.alias in named or exclude, (place, label)
            else:
                fits = (
                    place in SIGNED
                    if label.startswith("-1")
                    else re.search(FITS.get(label, "$^"), str(hints[part.name]))
                )
                assert fits, f"{place} takes {value!r}"
                assert getattr(built, part.name) == value


@each_class
@pytest.mark.parametrize("library", [np.asarray, torch.tensor])
def test_every_number_may_be_numpy_s_or_torch_s(cls: type, library: Any) -> None:
    known = arguments(cls)
    numbers = {name: value for name, value in known.items() if type(value) in (int, float, bool)}
    same = cls(**{**known, **{name: library(value) for name, value in numbers.items()}})
    stored = {name: getattr(same, name) for name in numbers}
    assert stored == pytest.approx(numbers, rel=1e-6)  # a tensor is in float32
    assert [type(value) for value in stored.values()] == [*map(type, numbers.values())]
    assert library is torch.tensor or same == cls(**known)
