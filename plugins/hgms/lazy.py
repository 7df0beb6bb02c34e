"""Namespaces that show every name and import a module when one of its names is first used.

``dir`` and tab completion list all names of a namespace. Type checkers read the stub
``__init__.pyi`` next to it, which ``python docs/generate.py`` writes from the same table.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

Places = Mapping[str, str]
"""For each module the names that a namespace takes from it, separated by spaces."""


def attach(
    package: str, places: Places, modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build ``__getattr__``, ``__dir__`` and ``__all__`` of a namespace.

    Parameters
    ----------
    package
        The name of the namespace, ``__name__`` in its ``__init__.py``.
    places
        The table of names.
    modules
        Subpackages that are part of the namespace.

    Examples
    --------
    >>> load, names, _ = attach("json", {"decimal": "Decimal"}, ["tool"])
    >>> load("Decimal").__name__, load("tool").__name__, names()
    ('Decimal', 'json.tool', ['Decimal', 'tool'])
    >>> load("Decimel")
    Traceback (most recent call last):
        ...
    AttributeError: module 'json' has no attribute 'Decimel'; did you mean 'Decimal'?
    """
    table = module_of_names(places)
    every = sorted([*table, *modules])

    def load(name: str) -> Any:
        if name in table:
            value = getattr(importlib.import_module(table[name]), name)
        elif name in modules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(_unknown(package, name, every))
        vars(sys.modules[package])[name] = value
        return value

    return load, lambda: list(every), every


def module_of_names(places: Places) -> dict[str, str]:
    """Return the module of each name.

    Examples
    --------
    >>> module_of_names({"decimal": "Decimal Context"})
    {'Decimal': 'decimal', 'Context': 'decimal'}
    """
    return {name: module for module, names in places.items() for name in names.split()}


def stub(package: str, places: Places, modules: Sequence[str] = ()) -> str:
    """Return the text that a type checker reads instead of :func:`attach`.

    Examples
    --------
    >>> print(stub("hgms", {"hgms.runs": "run"}, ["outer"]), end="")
    from hgms import outer as outer
    from hgms.runs import run as run
    """
    lines = [f"from {package} import {name} as {name}" for name in modules]
    for name, module in module_of_names(places).items():
        lines.append(f"from {module} import {name} as {name}")
    return "".join(f"{line}\n" for line in sorted(lines))


def _unknown(package: str, name: str, names: Sequence[str]) -> str:
    # Python itself looks up private names such as __path__: they have no nearest spelling.
    near = [] if name.startswith("_") else difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"module {package!r} has no attribute {name!r}{hint}"


SHAPES = ("add", "sub", "mul", "div")
"""Operations whose shapes forward-mode derivatives compute by functions of ``torch._refs``."""
HIDDEN = "__dynamo_disable"
"""The attribute with the form of a function that torch's compiler does not see."""


def avoid_compiler_import() -> None:
    """Let eager derivatives run without torch's compiler, whose import takes seconds.

    Without these attributes, torch imports the compiler to hide its functions for shapes from it.
    """
    import torch._refs as refs

    functions: list[object] = []
    if "torch._dynamo" not in sys.modules:
        functions += [getattr(refs, name) for name in SHAPES]
    while functions:
        function = functions.pop()
        if isinstance(function, FunctionType) and HIDDEN not in function.__dict__:
            function.__dict__[HIDDEN] = function
            functions += [cell.cell_contents for cell in function.__closure__ or ()]
