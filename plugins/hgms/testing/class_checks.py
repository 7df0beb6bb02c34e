"""Checks of components of every kind: the definition of the class, and side effects of its use."""

from __future__ import annotations

import pickle
import random
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import tomlkit
import torch

from hgms.adapters import global_states
from hgms.config.as_table import plain
from hgms.config.convert import structure
from hgms.config.invalid import plain_attribute, type_hints
from hgms.facts import CAPABILITIES, members_of, needs_of
from hgms.plugins import Kind, Registry, faults_of, inside, summary_of, watch_plugin
from hgms.runs import suggest_trait
from hgms.testing import imports
from hgms.testing.kit import Check, Exercise, demand, demand_equal, fail, place, snapshot, tensors
from hgms_core import CandidateGenerator, ConfigError, HgmsError, LinearSolver
from hgms_core.capabilities import capabilities_of


def checks(kind: Kind, exercise: Exercise, registry: Registry | None = None) -> Iterator[Check]:
    """Yield the checks of every kind for a component of this kind.

    ``exercise`` is an ordinary use of such a component.
    """
    yield from class_checks(kind)
    for question in (check_frozen, check_hashable, check_pickle):
        yield Check(kind.name, question)
    yield Check(kind.name, check_toml, (registry,))
    yield Check(kind.name, check_import)
    for use in (check_inputs, check_global_rng, check_repeatable, check_precision):
        yield Check(kind.name, use, (exercise,))


def class_checks(kind: Kind) -> Iterator[Check]:
    """Yield the checks that apply to a class without an instance."""
    yield Check(kind.name, check_registration, (kind,))
    yield Check(kind.name, check_capabilities, (kind,))
    for question in (check_docstring, check_source, check_types):
        yield Check(kind.name, question)


def _class(component: Any) -> type:
    return component if isinstance(component, type) else type(component)


def check_registration(component: Any, kind: Kind) -> None:
    """The class has a kebab-case name, is an attrs class, and has every method of the protocol
    with the parameters of the protocol. No name in `needs` is a misspelt trait.
    """
    faults = faults_of(kind, _class(component))
    demand(not faults, "; ".join(faults))
    for trait in needs_of(_class(component)):
        demand(
            not suggest_trait(trait),
            f"it needs {trait!r}, which no task has; did you mean {suggest_trait(trait)!r}?",
        )


def check_capabilities(component: Any, kind: Kind) -> None:
    """A component with all members of a capability declares it in `capabilities`, and has all
    members of each capability that it declares.
    """
    faults = capability_faults(_class(component), kind)
    demand(not faults, "; ".join(map(str, faults)))


def capability_faults(cls: type, kind: Kind) -> list[ConfigError]:
    """Return the errors in the capabilities of a class: undeclared, or without a member."""
    known = {*vars(cls), *dir(cls), *(attrs.fields_dict(cls) if attrs.has(cls) else ())}
    if any(isinstance(vars(base).get("capabilities"), property) for base in cls.__mro__):
        return []  # a wrapper: instances compute their capabilities
    faults = []
    for capability in sorted(
        {*CAPABILITIES[kind.name], *capabilities_of(cls)}, key=lambda c: c.__name__
    ):
        name = capability.__name__
        members = members_of(capability)
        missing = [member for member in members if member not in known]
        if capability in capabilities_of(cls) and missing:
            message = f"it declares {name}, but has no {' and no '.join(missing)}"
            faults.append(ConfigError("missing-member", message, place=("capabilities",)))
        if capability not in capabilities_of(cls) and members and not missing:
            message = f"it has {' and '.join(members)}, but does not declare {name}"
            hint = f"capabilities = frozenset({{{name}}}), of hgms_core.capabilities"
            faults.append(
                ConfigError("undeclared-capability", message, place=("capabilities",), hint=hint)
            )
    return faults


def check_docstring(component: Any) -> None:
    """The docstring has a first line to show in `hgms list`, and an example."""
    doc = _class(component).__doc__ or ""
    demand(summary_of(doc), "it has no docstring; its first line is what `hgms list` shows")
    demand(">>>" in doc, "its docstring has no example (a line with >>>)")


def check_source(component: Any) -> None:
    """The docstring has a line `Source: …` with the origin of the method."""
    source = re.search(r"^\s*Source:[ ]*\S", _class(component).__doc__ or "", re.MULTILINE)
    demand(source, "its docstring has no line that starts with Source:")


def check_types(component: Any) -> None:
    """The type of every field can be evaluated, so that a configuration can be loaded. A number
    with a default is a field.
    """
    cls = _class(component)
    hints = type_hints(cls)
    for name, value in vars(cls).items():
        number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and name[0] != "_"
            and name.islower()
        )
        if number and name not in hints:
            error = plain_attribute(cls, name)
            fail(f"{error.message}; {error.hint}")


def check_frozen(component: Any) -> None:
    """An instance is immutable: its fields are its hyper-parameters, and state is a value."""
    for name in ("name", *(field.name for field in attrs.fields(type(component)))):
        try:
            setattr(component, name, getattr(component, name))
        except (attrs.exceptions.FrozenError, AttributeError):
            continue
        fail(f"its attribute {name!r} can be set; put @component of hgms_core above the class")


def check_hashable(component: Any) -> None:
    """Two instances with equal fields are equal and have the same hash."""
    other = attrs.evolve(component)
    demand(component == other, "two instances with equal fields are not equal")
    try:
        same = hash(component) == hash(other)
    except TypeError as error:
        fail(f"it cannot be hashed ({error}); use tuples for fields that are lists")
    demand(same, "two equal instances have different hashes")


def check_pickle(component: Any) -> None:
    """The component can be pickled for another process."""
    if type(component).__qualname__ not in vars(sys.modules[type(component).__module__]):
        return  # a local class: pickle cannot find it by name
    again = pickle.loads(pickle.dumps(component))
    demand(again == component, f"it comes back as {again!r}")


def check_toml(component: Any, registry: Registry | None = None) -> None:
    """After writing and reading as TOML, the component is the same."""
    table = tomllib.loads(tomlkit.dumps(plain(component)))
    wanted: Any = type(component)
    if inside(wanted) == "generator":
        wanted = CandidateGenerator  # the name in the table is the name of the inner generator
    else:
        table.pop("name", None)
    try:
        again: Any = structure(table, wanted, registry or Registry.load())
    except HgmsError as error:
        fail(str(error.at("its own TOML")))
    demand(again == component, f"it comes back as {again!r} instead of {component!r}")


def check_import(component: Any) -> None:
    """Importing the module does not access CUDA, the network or a global random generator. It
    changes no setting of the process (torch's default dtype, threads, …), prints no text and
    does not exit.
    """
    module = type(component).__module__
    seen = imports.observe(module)
    demand(not seen["error"], f"importing {module} ends in {seen['error']}")
    demand(not seen["touched"], f"importing {module} touches {seen['touched']}")
    demand(not seen["changed"], f"importing {module} changes {seen['changed']} for everybody")
    demand(
        not seen["random"],
        f"importing {module} draws from (or seeds) a global random generator; draw from a Key",
    )
    demand(not seen["printed"], f"importing {module} prints {seen['printed']!r}")


def check_inputs(component: Any, exercise: Exercise) -> None:
    """The inputs do not change: tensors are not modified in place, dictionaries keep their
    entries, and settings of the process (torch's gradient mode, the working directory, …) keep
    their values.
    """
    inputs, call = exercise(component, torch.float64, 0)
    before = snapshot(inputs)
    with watch_plugin() as watch:
        call()
    demand(not watch.changed, f"the call changes {' and '.join(watch.changed)} for everybody")
    demand_equal(before, inputs, "after the call its input", "; work on a copy")


def check_global_rng(component: Any, exercise: Exercise) -> None:
    """The global random generators of torch, numpy and Python do not change; every random number
    comes from a Key.
    """
    _, call = exercise(component, torch.float64, 0)
    call()  # a component that seeds a generator does so in this first call
    with torch.random.fork_rng(devices=[place()] if place().type == "cuda" else []):
        kept = random.getstate(), np.random.get_state()  # noqa: NPY002 - to see draws from it
        torch.rand((), device=place())
        torch.rand(())
        random.random()
        np.random.random()  # noqa: NPY002
        before = global_states(place())
        call()
        is_drawn = global_states(place()) != before
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
    instead = "use key.generator()"
    # Numbers drawn without a key must come from a seed in a field, the same in every call.
    if isinstance(component, LinearSolver):
        instead = (
            "give it a field `seed`, use Key(self.seed).generator(), and let with_key(key) "
            "set the seed to key.derive()"
        )
    demand(not is_drawn, f"it draws from a global generator of torch, numpy or Python; {instead}")


def check_repeatable(component: Any, exercise: Exercise) -> None:
    """The same seed and inputs give the same result bit for bit, independent of other calls in
    between.
    """
    call = exercise(component, torch.float64, 0)[1]
    first = snapshot(call())
    second = snapshot(call())
    exercise(component, torch.float64, 1)[1]()
    for again in (second, exercise(component, torch.float64, 0)[1]()):
        demand_equal(
            first,
            again,
            "used again,",
            "; it remembers something between calls or draws without its key",
        )


def check_precision(component: Any, exercise: Exercise) -> None:
    """In float32 and in float64 the results have the dtype and the device of the inputs."""
    for dtype in (torch.float32, torch.float64):
        _, call = exercise(component, dtype, 0)
        for where, leaf in tensors(call()).items():
            demand(
                leaf.device.type == place().type,
                f"{where} is on {leaf.device}, the inputs on {place()}",
            )
            demand(
                leaf.dtype == dtype or not leaf.dtype.is_floating_point,
                f"{where} is {leaf.dtype}, the inputs are {dtype}",
            )
