"""What objects of this process are, as digests: runs belong together where these are the same.

A configuration names its components; an object made in a script or a notebook has no name that says
what it is. Its fingerprint is made of its values and of its code: bytes of tensors and arrays,
fields of objects, the bytecode of functions with the defaults, closures and global variables they
use. A local module counts by its source and that of the local modules that it imports. Code of
libraries is known by its name. What has neither values nor code that can be read (a
socket, a generator) counts by its type.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import dis
import functools
import hashlib
import importlib.util
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from hgms_core import Problem
from hgms_core.host import FIRST_PARTY

DEPTH = 200
"""Levels of objects in objects; what lies deeper counts by its type."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Their state is another after every draw."""

_UNTOLD = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__firstlineno__",
    "__static_attributes__",
    "__slots__",
} | {
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
"""Attributes of classes that say nothing of what they do."""


def fingerprint(value: object) -> str:
    """Twelve hex digits that are the same for the same values and code, also in another process of
    the same Python.

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
    """That of each field of a problem, of those that are not left at their defaults. A module's
    parameters that x0 names do not count: a loss takes those of x.

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
    """Digests of objects, each made once. A cycle is cut where it closes."""

    def __init__(self, replaced: Mapping[str, torch.Tensor] | None = None) -> None:
        self._replaced = {} if replaced is None else replaced
        self._shapes_only: set[int] = set()
        self._known: dict[int, str] = {}
        self._kept: list[
            object
        ] = []  # else another object could get the number of one that is gone
        self._open: set[int] = set()
        self._is_library = functools.cache(_libraries())

    def of(self, value: object) -> str:
        number = id(value)
        if number in self._known:
            return self._known[number]
        if number in self._open or len(self._open) > DEPTH:
            return _named(type(value))
        self._open.add(number)
        try:
            total = hashlib.sha256()
            for part in self._parts(value):
                total.update(
                    part
                    if isinstance(part, bytes | memoryview)
                    else str(part).encode(errors="backslashreplace")
                )
                total.update(b"\0")
            self._known[number] = total.hexdigest()
        finally:
            self._open.discard(number)
        self._kept.append(value)
        return self._known[number]

    def _parts(self, value: Any) -> Iterator[object]:
        yield _named(type(value))
        for types_, parts in self._readers:
            if isinstance(value, types_):
                yield from parts(value)
                return
        if callable(value) and not hasattr(value, "__dict__"):  # compiled code, known by its name
            yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        else:
            yield from self._object(value)

    @functools.cached_property
    def _readers(self) -> list[tuple[tuple[type, ...], Callable[[Any], Iterable[object]]]]:
        """What an object is made of, by its type."""
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
            ((types.CodeType,), self._code),
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
        if not library:
            yield self.of(function.__code__)
            package = function.__globals__.get("__package__")
            for name in _imports_of(function.__code__, package):
                yield from self._source(name)
            for name in sorted(set(_globals_of(function.__code__))):
                if name in function.__globals__:
                    yield from (name, self.of(function.__globals__[name]))

    def _code(self, code: types.CodeType) -> Iterator[object]:
        yield from (
            code.co_code,
            code.co_names,
            code.co_varnames[: code.co_argcount + code.co_kwonlyargcount],
        )
        yield from map(self.of, code.co_consts)

    def _source(self, module: str) -> Iterable[str]:
        """The digests of a module's source and of the local modules that it imports."""
        return () if self._is_library(module) else source_digests(module).values()

    def _class(self, cls: type) -> Iterator[object]:
        if self._is_library(cls.__module__):
            yield _named(cls)
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
        """Classes, tensors, hooks and settings of a module and those inside; of a library's also
        what it remembers is left out, which is of no use for the result or made anew in every
        process.
        """
        if "_orig_mod" in module._modules:  # a compiled one
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
            yield from (
                self.of(list(getattr(value, "columns", ()))),
                *self._array(np.asarray(value)),
            )
        elif library != "logging" and not isinstance(value, _RANDOM):
            names = dict.fromkeys(name for cls in type(value).__mro__ for name in _slots(cls))
            held = {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(
                value, "__dict__", {}
            )
            yield self.of(type(value))
            for name, item in (held or _reduced(value)).items():
                if not name.startswith("__") or name == "__wrapped__":
                    yield from (name, self.of(item))


def _reduced(value: object) -> dict[str, object]:
    """What the values of a compiled class are, as it tells pickle; nothing where it does not."""
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
    """The top-level modules of HGMS itself."""
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


def _named(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _slots(cls: type) -> Iterable[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """The global variables that a function and those defined in it read."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def _is_generated(function: object) -> bool:
    """Whether attrs or dataclasses wrote the method: it says what the fields say."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(("<attrs generated", "<string>"))


def _imports_of(code: types.CodeType, package: str | None) -> Iterator[str]:
    """The modules that a function and those defined in it import when they are called."""
    constants: list[object] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            level, names = constants[-2:]
            depth = level if isinstance(level, int) else 0
            yield from _imported(str(instruction.argval), names or (), depth, package)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports_of(constant, package)


def _imported(name: str, names: Any, level: int, package: str | None) -> Iterator[str]:
    """The modules of one import statement: the module, and those of its ``names`` that may be
    modules.
    """
    try:
        module = importlib.util.resolve_name("." * level + name, package)
    except ImportError:
        return
    yield module
    yield from (f"{module}.{part}" for part in names)


def source_digests(module: str) -> dict[str, str]:
    """The sha256 of the source of a module and of the local modules that it imports, directly or
    through others, by name. Local are modules outside of Python's folders, and those of the
    module's own package.

    Empty for a module without a readable source. The script itself (``__main__``) is not read: it
    changes all the time, and its functions have digests of their own.

    >>> list(source_digests("hgms.config.json_values"))[:1]
    ['hgms.config.json_values']
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
            digests[name] = hashlib.sha256(data).hexdigest()
            package = name if _is_package(name) else name.rpartition(".")[0]
            waiting += _imports_in(data, package)
    return dict(sorted(digests.items()))


def _is_package(module: str) -> bool:
    return hasattr(sys.modules.get(module), "__path__")


def _source_of(module: str, top: str) -> bytes | None:
    """The source of a local module; None for other modules."""
    parent, _, _ = module.rpartition(".")
    own = module.partition(".")[0] == top
    if module == "__main__" or (not own and module.partition(".")[0] in first_party()):
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    if module not in sys.modules and (not parent or parent in sys.modules):
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(module)
            file = None if spec is None else spec.origin
    if file is None or not str(file).endswith(".py") or (not own and is_library_file(file)):
        return None
    try:
        return Path(file).read_bytes()
    except OSError:
        return None


@functools.lru_cache(maxsize=1024)
def _imports_in(source: bytes, package: str) -> tuple[str, ...]:
    """The modules that a source imports anywhere in it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = [alias.name for alias in node.names if alias.name != "*"]
            names += _imported(node.module or "", parts, node.level, package)
    return tuple(dict.fromkeys(names))


_LIBRARIES = tuple(
    dict.fromkeys(
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    )
)
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages that sysconfig does not name: those of the user and the system."""


def is_library_file(file: str) -> bool:
    """Whether a file is in a folder of Python or of installed packages."""
    return file.startswith(_LIBRARIES) or any(part in _INSTALLED for part in Path(file).parts)


def _libraries() -> Callable[[str | None], bool]:
    """Whether a module's code is that of an installed package or of Python, which its name
    stands for.
    """
    known = first_party() | set(sys.builtin_module_names)

    def is_library(module: str | None) -> bool:
        top = (module or "").partition(".")[0]
        file = (
            getattr(sys.modules.get(module or ""), "__file__", None) if top != "__main__" else None
        )
        return top in known or (file is not None and is_library_file(file))

    return is_library
