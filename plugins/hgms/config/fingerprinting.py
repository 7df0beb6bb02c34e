"""Fingerprints: digests that identify objects of this process.

Runs belong together if their fingerprints are equal. A configuration names its components. An
object from a script or a notebook has no identifying name, so its fingerprint depends on its values
and its code:

- the bytes of tensors and arrays, and the fields of objects;
- the source of functions (without comments and layout), with the defaults, closures and global
  variables that they use;
- the source of a local module, and the source of the local modules that it imports;
- the name of library code;
- the type of an object without readable values or code (a socket, a generator).

A function without readable source is equal only to itself in this process. If a file
changed after its import, the digest is of the file.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import functools
import importlib.util
import linecache
import os
import random
import sys
import sysconfig
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch.fx import GraphModule

from hgms.facts import module_file
from hgms.store import Digest, digest
from hgms_core import Problem

DEPTH = 200
"""Maximum levels of nested objects; deeper objects are identified by their type."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Random generators, which have another state after every draw."""

FIRST_PARTY = frozenset({"hgms", "hgms_core", "hgms_mix"})
"""The top-level modules of HGMS."""


def fingerprint(value: object) -> str:
    """Return twelve hex digits that identify the values and the code.

    They are the same for the same values and code, also in another process of the same Python.

    Examples
    --------
    >>> scale = 2.0
    >>> fingerprint(lambda x: x * scale) == fingerprint(lambda x: x * scale)
    True
    >>> fingerprint(lambda x: x * scale) == fingerprint(lambda x: x + scale)
    False
    >>> fingerprint({"t": torch.ones(2)}) == fingerprint({"t": torch.ones(3)})
    False
    """
    return _Fingerprints().of(value)[:12]


def fingerprints(problem: Problem) -> dict[str, str]:
    """Return the fingerprint of each field of a problem that is not at its default.

    If x0 names parameters of a module, their values are excluded, because a loss uses the values in
    x.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> list(fingerprints(problem))
    ['theta0', 'x0', 'g', 'f', 'upper_data']
    """
    memory = _Fingerprints(problem.x0)
    known = {}
    for field in attrs.fields(Problem):
        value = getattr(problem, field.name)
        default: Any = field.default
        if field.init and field.name != "compiler" and value is not default:
            is_factory = isinstance(default, attrs.Factory)  # type: ignore[arg-type]
            made = is_factory and not default.takes_self
            if not made or memory.of(value) != memory.of(default.factory()):
                known[field.name] = memory.of(value)[:12]
    return known


class Unidentified(Exception):
    """An object whose code or values cannot be read."""


def identify(value: object, ignored: tuple[type, ...] = ()) -> tuple[str, list[torch.Tensor]]:
    """Return a digest of the code and the settings of an object, and its tensors in their order.

    The digest contains the shapes and types of tensors and which of them are one object, but not
    their numbers. It contains no object of the ``ignored`` types. Code of libraries is represented
    by the name, the size and the time of its file.

    Raises
    ------
    Unidentified
        For an object without readable code or values, such as a function without source.

    Examples
    --------
    >>> a, b = torch.ones(2), torch.ones(2)
    >>> identify([a, a])[0] == identify([b, b])[0] != identify([a, b])[0]
    True
    """
    code = _Identities(ignored)
    return code.of(value), code.tensors


class _Fingerprints:
    """Digests of objects, each computed once. A cycle is cut at its closing reference."""

    _module_settings: tuple[type, ...] = (*_SCALARS, tuple, types.FunctionType)
    """The types of the settings of a library's module that a digest contains."""

    def __init__(self, replaced: Mapping[str, torch.Tensor] | None = None) -> None:
        self._replaced = {} if replaced is None else replaced
        self._shapes_only: set[int] = set()
        self._known: dict[int, str] = {}
        self._kept: list[object] = []  # keeps ids unique: Python reuses the id of a deleted object
        self._open: set[int] = set()

    def of(self, value: object) -> str:
        number = id(value)
        if number in self._known:
            return self._known[number]
        if number in self._open or len(self._open) > DEPTH:
            return _qualified_name(type(value))
        self._open.add(number)
        try:
            total = Digest()
            for part in self._parts(value):
                total.add(part if isinstance(part, bytes | memoryview) else str(part))
                total.add(b"\0")
            self._known[number] = total.text
        finally:
            self._open.discard(number)
        self._kept.append(value)
        return self._known[number]

    def _parts(self, value: Any) -> Iterator[object]:
        yield _qualified_name(type(value))
        for types_, parts in self._readers:
            if isinstance(value, types_):
                yield from parts(value)
                return
        yield from self._object(value)

    @functools.cached_property
    def _readers(self) -> list[tuple[tuple[type, ...], Callable[[Any], Iterable[object]]]]:
        """The functions that yield the parts of an object, by its type."""
        digest = self.of
        return [
            (_SCALARS, lambda value: [repr(value)]),
            ((torch.Tensor,), self._tensor),
            ((torch.nn.Module,), self._module),
            ((np.ndarray, np.generic), lambda value: self._array(np.asarray(value))),
            ((Mapping,), lambda value: [digest(item) for pair in value.items() for item in pair]),
            ((list, tuple), lambda value: map(digest, value)),
            ((Set,), lambda value: sorted(map(digest, value))),
            ((types.ModuleType,), lambda value: [value.__name__, *self._source(value.__name__)]),
            ((type,), self._class),
            ((types.FunctionType,), self._function),
        ]

    def _tensor(self, tensor: torch.Tensor) -> Iterator[object]:
        yield from (tensor.dtype, tuple(tensor.shape))
        if (
            id(tensor) not in self._shapes_only
            and tensor.layout is torch.strided
            and tensor.device.type != "meta"
        ):
            data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            yield data.view(torch.uint8).numpy().data if data.numel() else b""

    def _array(self, array: np.ndarray) -> Iterator[object]:
        yield from (array.dtype.str, array.shape)
        yield (
            self.of(array.tolist())
            if array.dtype.hasobject
            else np.ascontiguousarray(array).tobytes()
        )

    def _function(self, function: types.FunctionType) -> Iterator[object]:
        function = getattr(function, "_torchdynamo_orig_callable", function)
        library = _is_library(function.__module__) and not function.__code__.co_filename.startswith(
            "<"
        )
        yield function.__qualname__ if library else ""
        yield from (self.of(function.__defaults__), self.of(function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                yield self.of(cell.cell_contents)
            except ValueError:  # not bound yet
                yield "empty"
        if library:
            return
        code = function.__code__
        node = _definition(code)
        if node is None:
            yield self._identity(code)
            return
        yield ast.unparse(node)
        for name in _imports_in(node, function.__globals__.get("__package__")):
            yield from self._source(name)
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        for name in sorted(used & _names_of(code) & function.__globals__.keys()):
            yield from (name, self.of(function.__globals__[name]))

    def _source(self, module: str) -> Iterable[str]:
        """Return the digests of a module and of the local modules that it imports.

        Each digest covers the source of a module.
        """
        return () if _is_library(module) else source_digests(module).values()

    def _class(self, cls: type) -> Iterator[object]:
        if _is_library(cls.__module__):
            yield _qualified_name(cls)
            return
        yield cls.__qualname__.rpartition(".")[2]
        yield from map(self.of, cls.__bases__)
        for name, item in sorted(vars(cls).items()):
            item = getattr(item, "__func__", item)  # of a static or class method
            for part in (item.fget, item.fset) if isinstance(item, property) else (item,):
                if _is_behaviour(name, part):
                    yield from (name, self.of(part))

    def _module(self, module: torch.nn.Module) -> Iterator[object]:
        """Yield the classes, tensors, hooks and settings of a module and its submodules.

        For a module of a library, its other state is excluded. That state does not affect the
        result, or each process recomputes it.
        """
        if "_orig_mod" in module._modules:  # a compiled module
            yield self.of(module._modules["_orig_mod"])
            return
        if self._replaced:
            same = [
                leaf
                for name, leaf in module.named_parameters()
                if name in self._replaced and self._replaced[name].shape == leaf.shape
            ]
            self._shapes_only |= set(map(id, same))
        for name, part in module.named_modules(remove_duplicate=False):
            yield from (name, self.of(type(part)), part.training)
            library = _is_library(type(part).__module__)
            settings = self._module_settings if library else (object,)
            for key, item in vars(part).items():
                if (
                    key in ("_parameters", "_buffers")
                    or key.endswith("_hooks")
                    or isinstance(item, settings)
                ):
                    yield from (key, self.of(item)) if key != "_modules" else ()

    def _object(self, value: Any) -> Iterator[object]:
        library = type(value).__module__.partition(".")[0]
        if library == "datasets" and isinstance(mark := getattr(value, "_fingerprint", None), str):
            yield mark
        elif library != "logging" and not isinstance(value, _RANDOM):
            yield from (self.of(type(value)), getattr(value, "__module__", ""))
            yield self.of(getattr(value, "__wrapped__", None))
            yield from map(self.of, self._state(value))

    def _identity(self, code: types.CodeType) -> str:
        """Return the identity of a function without readable source."""
        return _WITHOUT_SOURCE.setdefault(code, uuid.uuid4().hex)

    def _state(self, value: object) -> list[object]:
        """Return the parts that pickle would store; the attributes if it cannot be pickled."""
        with contextlib.suppress(Exception):
            own = copyreg.dispatch_table.get(type(value))
            reduced: Any = value.__reduce_ex__(4) if own is None else own(value)
            parts = [reduced] if isinstance(reduced, str) else reduced
            return [list(part) if isinstance(part, Iterator) else part for part in parts]
        return [getattr(value, "__dict__", None)]


class _Identities(_Fingerprints):
    """Digests of code and settings; a tensor is its position, shape and type."""

    _module_settings = (object,)

    def __init__(self, ignored: tuple[type, ...]) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self._ignored = ignored

    def of(self, value: object) -> str:
        if len(self._open) > DEPTH:
            raise Unidentified("too many levels of nested objects")
        return super().of(value)

    def _parts(self, value: Any) -> Iterator[object]:
        if isinstance(value, self._ignored):
            return
        if isinstance(value, GraphModule):
            graphs = [part for part in value.modules() if isinstance(part, GraphModule)]
            yield from (part.code for part in graphs)
            yield from map(self.of, value.state_dict(keep_vars=True).values())
        elif isinstance(value, Problem):
            for field in attrs.fields(Problem):
                if field.init and field.name not in _OUTSIDE_STEPS:
                    yield self.of(getattr(value, field.name))
        else:
            yield from super()._parts(value)

    def _tensor(self, tensor: torch.Tensor) -> Iterator[object]:
        if tensor.layout is not torch.strided:
            raise Unidentified(f"a tensor with the layout {tensor.layout}")
        self.tensors.append(tensor)
        yield from (len(self.tensors), tensor.dtype, tensor.device, tuple(tensor.shape))
        yield from (tensor.stride(), tensor.requires_grad)

    def _function(self, function: types.FunctionType) -> Iterator[object]:
        yield from _library_file(function.__module__)
        yield from super()._function(function)

    def _class(self, cls: type) -> Iterator[object]:
        yield from _library_file(cls.__module__)
        yield from super()._class(cls)

    def _identity(self, code: types.CodeType) -> str:
        raise Unidentified(f"the function {code.co_name} without readable source")

    def _state(self, value: object) -> list[object]:
        parts = super()._state(value)
        if len(parts) == 1 and parts[0] is None:
            raise Unidentified(f"a {_qualified_name(type(value))} without readable values")
        return parts


_OUTSIDE_STEPS = ("evaluate", "compiler", "guard", "references")
"""Fields of a problem that a step does not read."""


def _library_file(module: str | None) -> Iterator[object]:
    """Yield the size and the time of the file of a library's module, except the modules of HGMS."""
    name = module or ""
    file = module_file(name)
    if file is not None and name.partition(".")[0] not in FIRST_PARTY and _is_library(name):
        about = os.stat(file)
        yield (about.st_size, about.st_mtime_ns)


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_behaviour(name: str, item: object) -> bool:
    """Return whether an attribute of a class was written by its author."""
    if isinstance(item, types.FunctionType):
        return not item.__code__.co_filename.startswith(("<attrs generated", "<string>"))
    is_slot = isinstance(item, types.MemberDescriptorType | types.GetSetDescriptorType)
    return not is_slot and not name.startswith(("__", "_abc_"))


_WITHOUT_SOURCE: weakref.WeakKeyDictionary[types.CodeType, str] = weakref.WeakKeyDictionary()
"""The identities of functions without readable source."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _definition(code: types.CodeType) -> _Definition | None:
    """Return the definition of a function in its source; ``None`` without readable source."""
    linecache.checkcache(code.co_filename)
    tree = _parse("".join(linecache.getlines(code.co_filename)))
    found = [
        node for node in ast.walk(tree) if isinstance(node, _Definition) and _defines(node, code)
    ]
    return found[-1] if found else None  # the innermost lambda


def _defines(node: _Definition, code: types.CodeType) -> bool:
    if not isinstance(node, ast.Lambda):
        first = node.decorator_list[0] if node.decorator_list else node
        return (node.name, first.lineno) == (code.co_name, code.co_firstlineno)
    start = (node.body.lineno, node.body.col_offset)
    end = (node.body.end_lineno or 0, node.body.end_col_offset or 0)
    places = [
        (line, column) >= start and (last or 0, last_column) <= end
        for line, last, column, last_column in code.co_positions()
        if column is not None and last_column is not None and (column or last_column)
    ]
    return code.co_name == "<lambda>" and bool(places) and all(places)


def _names_of(code: types.CodeType) -> set[str]:
    """Return the names of variables that a function and its inner functions do not define."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return {*code.co_names}.union(*map(_names_of, inner))


def source_digests(module: str) -> dict[str, str]:
    """Return the sha256 of the sources of a module and its local imports, by name.

    Imports may be direct or indirect. A module is local if it is outside of Python's folders, or in
    the package of the given module.

    The result is empty for a module without a readable source. The script itself (``__main__``) is
    not read, because it changes constantly and its functions have separate digests.

    Examples
    --------
    >>> list(source_digests("hgms.lazy"))
    ['hgms.lazy']
    """
    top = module.partition(".")[0]
    digests: dict[str, str] = {}
    waiting = [module]
    seen = set()
    while waiting:
        name = waiting.pop()
        spec = None if name in seen else _local_spec(name, top)
        seen.add(name)
        if spec is not None and spec.origin is not None:
            data = Path(spec.origin).read_bytes()
            digests[name] = digest(data)
            waiting += _imports_in(_parse(data), spec.parent)
    return dict(sorted(digests.items()))


def _local_spec(module: str, own: str) -> ModuleSpec | None:
    """Return the specification of a local module; ``None`` for modules of libraries.

    ``own`` is a top-level module that counts as local.
    """
    top = module.partition(".")[0]
    if module == "__main__" or (top != own and top in FIRST_PARTY):
        return None
    for name in (top, module):  # a search for a submodule imports its package
        spec = None
        with contextlib.suppress(Exception):
            spec = importlib.util.find_spec(name)
        file = "" if spec is None else str(spec.origin)
        if not file.endswith(".py") or (top != own and is_library_file(file)):
            return None
    return spec


@functools.lru_cache(maxsize=1024)
def _parse(source: str | bytes) -> ast.AST:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _imports_in(tree: ast.AST, package: str | None) -> list[str]:
    """Return the modules that code may import: a name of ``from … import`` may be a module."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # relative, but in no package
                name = "." * node.level + (node.module or "")
                module = importlib.util.resolve_name(name, package)
                names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return list(dict.fromkeys(names))


_LIBRARIES = tuple(
    dict.fromkeys(
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
)
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages that sysconfig does not name.

They belong to the user and the system.
"""


@functools.lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """Return whether a file is in a folder of Python or of installed packages."""
    return file.startswith(_LIBRARIES) or any(part in _INSTALLED for part in Path(file).parts)


def _is_library(module: str | None) -> bool:
    """Return whether a module belongs to an installed package or to Python.

    The name of such a module represents its code.
    """
    name = module or ""
    top = name.partition(".")[0]
    if top in FIRST_PARTY or top in sys.builtin_module_names:
        return True
    file = None if top == "__main__" else module_file(name)
    return file is not None and is_library_file(file)
