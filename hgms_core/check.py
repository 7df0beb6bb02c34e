"""Is this class fit to be a component? What ``hgms check MODULE:CLASS`` asks: the checks of :mod:`hgms_core.testing`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping

from attrs import frozen

from hgms_core import discovery, plugins, registry
from hgms_core.errors import ConfigError, PluginError, closest
from hgms_core.testing import checks_of, failures_of, instance_of, verdict
from hgms_core.testing import kind_of as kind_of
from hgms_core.testing.every import class_checks


@frozen
class Result:
    """The answer to one question: ``fault`` is empty where all is well, or where ``excuse`` says why it is not to be."""

    check: str
    fault: str = ""
    excuse: str = ""


def check(cls: type, kind: registry.Kind | None = None) -> Iterator[Result]:
    """Every check of a class, in order, on an instance made of its ``testing_instance()`` or its defaults. The rest is left out
    where there is no instance to ask about."""
    kind = kind if kind is not None else kind_of(cls)
    asked = []
    declared = getattr(cls, "testing_failures", None)
    for question in class_checks(kind):
        asked.append(question.name)
        result = Result(question.name, *verdict(question, cls, declared if isinstance(declared, Mapping) else {}))
        yield result
        if result.fault and question.name == "registration":
            return
    try:
        instance = instance_of(cls)
        questions = list(checks_of(instance, kind))
        expected = failures_of(cls, questions)
    except (Exception, SystemExit) as error:
        yield Result("construction", str(error) if isinstance(error, AssertionError) else plugins.describe(error))
        return
    yield Result("construction")
    for question in questions:
        if question.name not in asked:
            yield Result(question.name, *verdict(question, instance, expected))


def import_class(spec: str) -> type:
    """``package.module:Class`` or ``file.py:Class``."""
    where, colon, name = spec.rpartition(":")
    if not where or not colon or not re.fullmatch(r"\w+", name):
        raise ConfigError(f"{spec!r} is not of the form MODULE:CLASS, such as my_solver:MySolver or ./my_solver.py:MySolver")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a random.py there is not to be taken for the standard library's
    try:
        with discovery.watched():
            module = discovery.import_plugin(where) if where.endswith(".py") else importlib.import_module(where)
    except (PluginError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(f"{where} cannot be imported: {plugins.describe(error)}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        names = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = closest(name, names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise PluginError(f"{where} has no class {name!r}{hint}")
    return found
