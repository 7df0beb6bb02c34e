"""A simulated accelerator: a separate torch device whose tensors keep their numbers on the CPU.

Code that runs there moves its tensors to the device, does not mix tensors of two devices, and draws
with generators of the device. The simulation counts kernel calls, and transfers between the device
and the host with the line of code that causes them. Speed, memory, rounding and CUDA graphs are not
simulated.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from hgms_core import ConfigError
from support.fused_cells import FUSED

TYPE = "simulated"
"""The type of the device, as in ``torch.device("simulated", 0)``."""
_HOST = torch.device("cpu")
_MOVES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")
_READS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::repeat_interleave",
)
"""Operations whose result, or the shape of the result, the host must read from the device."""
_INDEXES = ("aten::index", "aten::_index", "aten::_unsafe_index")
_NO_KERNELS = ("aten::empty", "aten::_unsafe_view")
_FILLS = ("arange", "eye", "linspace", "logspace", "tril_indices", "triu_indices")
"""Functions that resize an empty tensor, which a wrapper does not support."""
_CODE = (str(Path(torch.__file__).parent), __file__)


@define
class Counts:
    """Counts of the exchange between the host and the simulated device.

    ``transfers`` are copies from the device to the host. ``uploads`` are copies to the device for
    which the host waits. ``kernels`` are the other operations on the device. ``places`` counts
    transfers and uploads by ``file:line`` of the code that causes them.
    """

    transfers: int = 0
    uploads: int = 0
    kernels: int = 0
    places: Counter[str] = field(factory=Counter)

    @property
    def waits(self) -> int:
        """The number of times the host waits for the device."""
        return self.transfers + self.uploads


_COUNTING: list[Counts] = []
_FORBIDDING: list[bool] = []


@contextmanager
def count_kernels() -> Iterator[Counts]:
    """Count the transfers and the kernel calls of the simulated device inside.

    In a process where the simulated device may be registered (:func:`simulated_device`)::

        with simulated_device() as device, count_kernels() as counts:
            x = torch.ones(3).to(device, non_blocking=True)
            total = float((x * x).sum())
        assert (counts.transfers, counts.uploads, counts.kernels) == (1, 0, 2)
    """
    counts = Counts()
    _COUNTING.append(counts)
    try:
        yield counts
    finally:
        _COUNTING.remove(counts)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise RuntimeError inside for an operation for which the host must wait."""
    _FORBIDDING.append(True)
    try:
        yield
    finally:
        _FORBIDDING.pop()


@contextmanager
def simulated_device() -> Iterator[torch.device]:
    """Provide the simulated device inside; some functions of torch are replaced meanwhile.

    As on a GPU, an operation cannot mix a tensor of the device and a tensor of the CPU. A number (a
    tensor without axes) of the CPU may be an argument of a kernel. Draws from a generator of the
    device give the numbers of the CPU.

    Errors: ConfigError if this version of torch has no devices written in Python.

    The registration of the device remains until the process ends, and torch then treats it as the
    accelerator of the machine. Use it in processes without other work::

        with simulated_device() as device:
            torch.ones(2, device=device) + torch.ones(2)  # RuntimeError: ... two devices ...
    """
    _register()
    threads = torch._C._is_multithreading_enabled()
    with ExitStack() as replaced:
        # This device can access host memory anyway.
        replaced.enter_context(_replace(Tensor, "pin_memory", lambda _: lambda leaf, *_: leaf))
        replaced.enter_context(_replace(torch, "Generator", lambda _: _Generator))
        for name in ("tensor", "as_tensor"):
            replaced.enter_context(_replace(torch, name, _from_host))
        for name in _FILLS:
            replaced.enter_context(_replace(torch, name, _fill))
        torch._C._set_multithreading_enabled(False)  # backward passes stay in this thread
        try:
            yield torch.device(TYPE, 0)
        finally:
            torch._C._set_multithreading_enabled(threads)


@contextmanager
def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the attribute of the owner inside by the result of ``make`` for it."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Simulated(Tensor):
    """A tensor of the device around a tensor of the CPU."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> _Simulated:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(TYPE, 0),
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {TYPE}:0 device type tensor to numpy. Use Tensor.cpu()")
        return self.detach().cpu().numpy()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_index(index), value)

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.raw!r} on {TYPE}:0"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Tensor:
        return _Simulated(inner["raw"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(op, args, kwargs or {})


def _index(index: Any) -> Any:
    """Replace lists in an index by tensors of the CPU; torch would create them on the device."""
    if isinstance(index, tuple):
        return tuple(_index(each) for each in index)
    return torch.tensor(index) if isinstance(index, list) else index


class _Generator(torch.Generator):
    """A generator, also for the simulated device."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        simulated = _is_simulated(device)
        make: Any = super().__new__
        made: Any = make(cls, _HOST if simulated else device)
        if simulated:
            # torch passes other objects for the same generator.
            _GENERATORS.add(made._cdata)
            weakref.finalize(made, _GENERATORS.discard, made._cdata)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(TYPE, 0) if _is_drawing(self) else super().device


_GENERATORS: set[int] = set()
"""The addresses of the generators of the device."""


def _is_drawing(generator: Any) -> bool:
    """Whether the generator is of the device."""
    return generator._cdata in _GENERATORS


def _is_simulated(device: Any) -> bool:
    return device is not None and torch.device(device).type == TYPE


def _wait(kind: str, name: str) -> None:
    """Count a transfer or an upload."""
    if _FORBIDDING:
        raise RuntimeError(f"the host waits for the device ({name} at {_place()})")
    for counts in _COUNTING:
        setattr(counts, kind, getattr(counts, kind) + 1)
        counts.places[_place()] += 1


def _place() -> str:
    """Return the innermost line of code outside torch and this file."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_CODE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation with at least one tensor, or with its result, on the device."""
    name = op.name().partition(".")[0]
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
        # Forward mode computes the shape of a sum with a zero on the meta device.
        return op(*tree_map(_shape, args), **tree_map(_shape, kwargs))
    inner, options = tree_map(lambda value: _on_host(name, value), (args, kwargs))
    options.pop("pin_memory", None)
    departs = _departs(name, args, kwargs)
    _count(op, name, args, kwargs, departs)
    if name == "aten::_efficientzerotensor":
        op = torch.ops.aten.zeros.default
    if name in FUSED:
        # A missing argument has the default None.
        absent = [None] * (len(op._schema.arguments) - len(inner))
        found = FUSED[name](*inner, *absent)
    else:
        found = op(*inner, **options)
    if departs:
        return args[0] if name == "aten::copy_" else found
    if isinstance(found, Tensor) and found.is_meta:
        return found
    found = tree_map(lambda value: _Simulated(value) if isinstance(value, Tensor) else value, found)
    return return_and_correct_aliasing(op, args, kwargs, found)


def _shape(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _on_host(name: str, value: Any) -> Any:
    """Return an argument of the operation for the CPU."""
    if isinstance(value, _Simulated):
        return value.raw
    if isinstance(value, torch.device):
        return _HOST if value.type == TYPE else value
    if isinstance(value, torch._C.Generator):
        if _is_drawing(value):
            return value
        raise RuntimeError(
            f"Expected a '{TYPE}' device type for generator but found '{value.device}'"
        )
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, FakeTensor):  # a trace computes without numbers
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if value.device.type == TYPE:  # a zero tangent of forward mode
        if not value._is_zerotensor():
            raise RuntimeError(f"{name}: a tensor of the device without numbers")
        return torch.zeros(value.shape, dtype=value.dtype)
    if value.dim() and name not in _MOVES and not _is_index(name, value):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{TYPE}:0 and {value.device}! ({name})"
        )
    return value


def _is_index(name: str, value: Tensor) -> bool:
    """Whether the value may stay on the CPU, because torch moves it to the device."""
    return name.startswith(_INDEXES) and value.dtype in (torch.long, torch.bool)


def _departs(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the operation copies to the CPU."""
    if name == "aten::copy_":
        return not isinstance(args[0], _Simulated)
    device = kwargs.get("device") or TYPE
    return name in ("aten::_to_copy", "aten::to") and torch.device(device).type not in (
        TYPE,
        "meta",
    )


def _count(op: Any, name: str, args: Any, kwargs: dict[str, Any], departs: bool) -> None:
    leaves = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
    masks = name.startswith(_INDEXES) and any(leaf.dtype == torch.bool for leaf in leaves[1:])
    source = leaves[-1] if leaves else None
    if departs or masks or name in _READS:
        _wait("transfers", name)
    elif name in _MOVES and source is not None and not isinstance(source, _Simulated):
        if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            _wait("uploads", name)
    elif not op.is_view and not name.startswith(_NO_KERNELS):
        for counts in _COUNTING:
            counts.kernels += 1
        for leaf in leaves[1:]:
            if leaf.device == _HOST and leaf.dim():
                _wait("uploads", name)


@cache
def _register() -> None:
    """Register the device with torch, once in a process."""
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError:
        raise ConfigError(
            "not-supported",
            f"torch {torch.__version__} has no devices that are written in Python",
            place=("device",),
            hint="install torch 2.10 or later",
        ) from None
    _setup_privateuseone_for_python_backend(rename=TYPE)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
"""Kept, because torch removes what a library registered when it is freed."""


def _from_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def call(
        data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any
    ) -> Tensor:
        if requires_grad:
            kwargs["requires_grad"] = True
        if device is None and isinstance(data, _Simulated):
            device = TYPE
        if not _is_simulated(device):
            return make(data, *args, device=device, **kwargs)
        if isinstance(data, _Simulated):
            return make(data, *args, **kwargs)
        kwargs.pop("requires_grad", None)
        return make(data, *args, device=_HOST, **kwargs).to(device).requires_grad_(requires_grad)

    return call


def _fill(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def call(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if not _is_simulated(device):
            return make(*args, device=device, **kwargs)
        return make(*args, device=_HOST, **kwargs).to(device, non_blocking=True)

    return call
