"""A graph compiled for a CPU as a shared library, which other processes load from disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor
from torch.fx import GraphModule

from hgms.store import DIGITS, SavedFile, digest

ENTRY = "inductor_entry_cpp"
"""The function of a library that inductor's C++ wrapper generates."""
KIND = "programs"
"""The folder of stored libraries below the cache folder. It can be deleted at any time."""
FORMAT = "scratch"
"""Version of the generated code; libraries of other versions are compiled again."""


@define(eq=False)
class Library:
    """The function of a shared library, for inputs of fixed shapes.

    ``key`` is the key of the stored library (empty before it is stored).

    Notes
    -----
    Source: the C++ wrapper of torch's inductor. A library does not require inductor, whose import
    takes seconds.

    Examples
    --------
    >>> graph = torch.fx.symbolic_trace(lambda a: [a + 1])
    >>> Library.load(key_of(graph, [torch.ones(2)], {"an example": True})) is None
    True
    """

    path: Path
    entry: Callable[[Any], Any]
    key: str = ""

    @classmethod
    def of(cls, compiled: Any) -> Library | None:
        """Return the library of inductor's result, if it reads its inputs only."""
        try:
            entry = compiled.current_callable.__globals__["inductor_entry"]
            path = Path(entry.__self__.__file__)
        except (AttributeError, KeyError):  # another version of torch
            return None
        return None if compiled.constants else cls(path, entry)

    @classmethod
    def load(cls, key: str) -> Library | None:
        """Return the stored library, if an undamaged file exists."""
        return next(cls._stored(key), None)

    @classmethod
    def _stored(cls, key: str) -> Iterator[Library]:
        for path, _ in SavedFile(KIND, key, ".so").contents():
            with contextlib.suppress(OSError, ImportError, AttributeError):
                yield cls(path, _entry(path), key)

    def store(self, key: str) -> None:
        """Store a copy under this key, if the cache is writable."""
        with contextlib.suppress(OSError):
            SavedFile(KIND, key, ".so").store(self.path.read_bytes())
            self.key = key

    @classmethod
    def existing(cls, key: str) -> Library:
        """Return the stored library. Errors: StopIteration."""
        return next(cls._stored(key))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.existing, (self.key,)

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(plain(inputs))
        return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(self.entry(handles))


def plain(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the same numbers as contiguous tensors without a graph."""
    return [
        leaf if leaf.is_contiguous() and not leaf.requires_grad else leaf.detach().contiguous()
        for leaf in leaves
    ]


def key_of(graph: GraphModule, leaves: Sequence[Tensor], settings: Mapping[str, Any]) -> str:
    """Return a key of the graph, the inputs, the settings, torch, and the processor."""
    parts = (
        [module.code for module in graph.modules() if isinstance(module, GraphModule)],
        [(leaf.shape, leaf.dtype) for leaf in leaves],
        sorted(settings.items()),
        *software(),
    )
    return digest(repr(parts))[:DIGITS]


def software() -> tuple[Any, ...]:
    """Return the versions, the number of threads and the processor of this process."""
    return (
        (torch.__version__, torch.version.git_version, sys.implementation.cache_tag),
        FORMAT,
        torch.get_num_threads(),  # a constant of parallel loops
        getattr(torch.cpu, "get_capabilities", torch.backends.cpu.get_cpu_capability)(),
    )


def is_on_cpu(leaves: Sequence[Tensor]) -> bool:
    return all(leaf.device.type == "cpu" for leaf in leaves)


def _entry(path: Path) -> Callable[[Any], Any]:
    guards: Any = torch._C._dynamo.guards
    address = guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    loader = ExtensionFileLoader(f"{path.stem}.{ENTRY}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return getattr(module, ENTRY)
