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

A function without readable source is equal only to itself in this process. A source that changed
after its import counts as it is on disk.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import functools
import importlib.machinery
import importlib.util
import linecache
import random
import sys
import sysconfig
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from hgms.facts import is_package, module_file
from hgms.plugins import FIRST_PARTY
from hgms.store import Digest, digest
from hgms_core import Problem

DEPTH = 200
"""Maximum levels of nested objects; deeper objects are identified by their type."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Random generators, which have another state after every draw."""

_UNTOLD = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__firstlineno__",
    "__static_attributes__",
    "__slots__",
    "__annotations__",
    "__attrs_attrs__",
    "__attrs_own_setattr__",
    "__attrs_props__",
    "__match_args__",
    "__abstractmethods__",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "_abc_impl",
    "__parameters__",
    "__orig_bases__",
    "__dataclass_fields__",
    "__dataclass_params__",
}
"""Attributes that do not describe the behaviour of a class."""


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


class _Fingerprints:
    """Digests of objects, each computed once. A cycle is cut at its closing reference."""

    def __init__(self, replaced: Mapping[str, torch.Tensor] | None = None) -> None:
        self._replaced = {} if replaced is None else replaced
        self._shapes_only: set[int] = set()
        self._known: dict[int, str] = {}
        self._kept: list[object] = []  # keeps ids unique: Python reuses the id of a deleted object
        self._open: set[int] = set()
        self._is_library = functools.cache(_libraries())

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
        if callable(value) and not hasattr(
            value, "__dict__"
        ):  # compiled code, identified by its name
            yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        else:
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
            ((types.MethodType,), lambda value: [digest(value.__func__), digest(value.__self__)]),
            (
                (functools.partial,),
                lambda value: [digest(value.func), digest(value.args), digest(value.keywords)],
            ),
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
        library = self._is_library(
            function.__module__
        ) and not function.__code__.co_filename.startswith("<")
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
            yield _WITHOUT_SOURCE.setdefault(code, uuid.uuid4().hex)
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
        return () if self._is_library(module) else source_digests(module).values()

    def _class(self, cls: type) -> Iterator[object]:
        if self._is_library(cls.__module__):
            yield _qualified_name(cls)
            return
        yield cls.__qualname__.rpartition(".")[2]
        yield from map(self.of, cls.__bases__)
        for name, item in sorted(vars(cls).items()):
            if name in _UNTOLD or isinstance(
                item, types.MemberDescriptorType | types.GetSetDescriptorType
            ):
                continue
            item = getattr(item, "__func__", item)  # of a static or class method
            for function in (item.fget, item.fset) if isinstance(item, property) else (item,):
                if not _is_generated(function):
                    yield from (name, self.of(function))

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
                if self._shape_of(name) == leaf.shape
            ]
            self._shapes_only |= set(map(id, same))
        for name, part in module.named_modules(remove_duplicate=False):
            yield from (name, self.of(type(part)), part.training)
            settings = (
                (*_SCALARS, tuple, types.FunctionType)
                if self._is_library(type(part).__module__)
                else (object,)
            )
            for key, item in vars(part).items():
                if (
                    key in ("_parameters", "_buffers")
                    or key.endswith("_hooks")
                    or isinstance(item, settings)
                ):
                    yield from (key, self.of(item)) if key != "_modules" else ()

    def _shape_of(self, name: str) -> torch.Size | None:
        return self._replaced[name].shape if name in self._replaced else None

    def _object(self, value: Any) -> Iterator[object]:
        library = type(value).__module__.partition(".")[0]
        if library == "datasets" and isinstance(mark := getattr(value, "_fingerprint", None), str):
            yield mark
        elif library in ("pandas", "polars"):
            columns = list(value.columns) if type(value).__name__ == "DataFrame" else []
            yield from (self.of(columns), *self._array(np.asarray(value)))
        elif library != "logging" and not isinstance(value, _RANDOM):
            names = dict.fromkeys(name for cls in type(value).__mro__ for name in _slots(cls))
            held = {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(
                value, "__dict__", {}
            )
            yield self.of(type(value))
            for name, item in (held or _pickle_state(value)).items():
                if not name.startswith("__") or name == "__wrapped__":
                    yield from (name, self.of(item))


def _pickle_state(value: object) -> dict[str, object]:
    """Return the state of an object of a compiled class, from its pickle protocol.

    The result is empty if the object does not provide its state.
    """
    with contextlib.suppress(Exception):
        own = copyreg.dispatch_table.get(type(value))
        reduced: Any = value.__reduce_ex__(2) if own is None else own(value)
        if isinstance(reduced, tuple):
            return {
                str(i): list(part) if i > 2 and part is not None else part
                for i, part in enumerate(reduced)
            }
    return {}


@functools.cache
def first_party() -> frozenset[str]:
    """Return the top-level modules of HGMS."""
    try:
        points = distribution(FIRST_PARTY).entry_points
    except PackageNotFoundError:
        return frozenset({"hgms_core"})
    return frozenset(
        {
            "hgms_core",
            *(point.module.partition(".")[0] for point in points if point.group.startswith("hgms")),
        }
    )


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _slots(cls: type) -> Iterable[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


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


def _is_generated(function: object) -> bool:
    """Return whether attrs or dataclasses generated the method.

    The fields already contain all information about such a method.
    """
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(("<attrs generated", "<string>"))


def _modules_of_import(
    name: str, names: list[str], level: int, package: str | None
) -> Iterator[str]:
    """Yield the modules of one import statement.

    These are the module, and each of its ``names`` that may be a module.
    """
    try:
        module = importlib.util.resolve_name("." * level + name, package)
    except ImportError:
        return
    yield module
    yield from (f"{module}.{part}" for part in names)


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
        if name in seen:
            continue
        seen.add(name)
        if (data := _source_of(name, top)) is not None:
            digests[name] = digest(data)
            package = name if _file_of(name)[1] else name.rpartition(".")[0]
            waiting += _imports_in(_parse(data), package)
    return dict(sorted(digests.items()))


def _source_of(module: str, top: str) -> bytes | None:
    """Return the source of a local module; ``None`` for other modules."""
    own = module.partition(".")[0] == top
    if module == "__main__" or (not own and module.partition(".")[0] in first_party()):
        return None
    file, _ = _file_of(module)
    if file is None or not file.endswith(".py") or (not own and is_library_file(file)):
        return None
    try:
        return Path(file).read_bytes()
    except OSError:
        return None


def _file_of(module: str) -> tuple[str | None, bool]:
    """Return the file of a module, and whether it is a package, without importing anything.

    The result is the same before and after the import, and so is a digest of the sources.
    """
    if sys.modules.get(module) is not None:
        return module_file(module), is_package(module)
    parent = module.rpartition(".")[0]
    folders = None
    if parent:
        file, has_modules = _file_of(parent)
        if file is None or not has_modules:
            return None, False
        folders = [str(Path(file).parent)]
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.machinery.PathFinder.find_spec(module, folders)
        if spec is not None:
            return spec.origin, spec.submodule_search_locations is not None
    return None, False


@functools.lru_cache(maxsize=1024)
def _parse(source: str | bytes) -> ast.AST:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _imports_in(tree: ast.AST, package: str | None) -> tuple[str, ...]:
    """Return the modules that a source imports at any place."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = [alias.name for alias in node.names if alias.name != "*"]
            names += _modules_of_import(node.module or "", parts, node.level, package)
    return tuple(dict.fromkeys(names))


_LIBRARIES = tuple(
    dict.fromkeys(
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
)
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages that sysconfig does not name.

They belong to the user and the system.
"""


def is_library_file(file: str) -> bool:
    """Return whether a file is in a folder of Python or of installed packages."""
    return file.startswith(_LIBRARIES) or any(part in _INSTALLED for part in Path(file).parts)


def _libraries() -> Callable[[str | None], bool]:
    """Return a predicate for modules of an installed package or of Python.

    The name of such a module represents its code.
    """
    known = first_party() | set(sys.builtin_module_names)

    def is_library(module: str | None) -> bool:
        top = (module or "").partition(".")[0]
        file = None if top == "__main__" else module_file(module or "")
        return top in known or (file is not None and is_library_file(file))

    return is_library
