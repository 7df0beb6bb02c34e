"""What a check is, and how a failed one speaks: which check, what was expected, what came, where to read more."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import attrs
import torch
from attrs import field, frozen
from torch import Tensor

from hgms_core import ConfigError, Data, Key, Problem
from hgms_core.registry import KINDS

PAGE = "docs/reference/kit.md"
"""Where every check is described, under a heading for each kind."""


_PLACE: ContextVar[torch.device | None] = ContextVar("place", default=None)


def place() -> torch.device:
    """Where the checks make their inputs: on the CPU, or where :func:`inputs_on` says."""
    return _PLACE.get() or torch.device("cpu")


@contextlib.contextmanager
def inputs_on(device: torch.device | str) -> Iterator[None]:
    """Inside, all checks make their inputs on this device: the same numbers as on the CPU.

    >>> with inputs_on("cpu"):
    ...     normal(2, seed=0).device
    device(type='cpu')

    .. versionadded:: 0.2
    """
    before = _PLACE.set(torch.device(device))
    try:
        yield
    finally:
        _PLACE.reset(before)


class Fault(AssertionError):
    """What came instead of what a check demands."""


class CheckFailed(AssertionError):
    """A component failed a check; the message says all there is to know."""


def fail(came: str) -> NoReturn:
    raise Fault(came)


def demand(condition: object, came: str) -> None:
    """Fails with what came instead, unless the condition holds."""
    if not condition:
        raise Fault(came)


Exercise = Callable[[Any, torch.dtype, int], tuple[Any, Callable[[], Any]]]
"""(component, dtype, variant) → (its inputs, a call on them): one ordinary use of a component, which the checks of every kind
look at from outside. The variants 0 and 1 have different numbers."""


@frozen
class Check:
    """A named demand on a component: ``question(component, *more)`` fails or returns. Its docstring says what is demanded."""

    kind: str
    question: Callable[..., None]
    more: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        return str(self.question.__name__).removeprefix("check_").replace("_", "-")

    @property
    def demands(self) -> str:
        return " ".join((inspect.getdoc(self.question) or "").split())

    @property
    def heading(self) -> str:
        """Of the part of the page that the check stands in."""
        everyone = self.question.__module__.endswith(".every")
        return "every-kind" if everyone else KINDS[self.kind].label.replace(" ", "-") + "s"

    def fault(self, component: Any) -> str:
        """What came instead of what is demanded; empty where the component passes."""
        try:
            self.question(component, *self.more)
        except Fault as fault:
            return str(fault)
        except SystemExit as error:
            return f"it calls sys.exit({error}){_where(error)}; raise an error that says what is wrong"
        except Exception as error:
            return f"it raised {type(error).__name__}: {error}{_where(error)}"
        return ""

    def __call__(self, component: Any) -> None:
        """Raises :class:`CheckFailed` where the component does not do what is demanded."""
        __tracebackhide__ = True  # pytest shows the line of the test, and the message
        came = self.fault(component)
        if came:
            raise CheckFailed(
                f"{self.kind} {getattr(component, 'name', type(component).__name__)!r} fails the check {self.name}\n"
                f"  expected: {self.demands}\n  got: {came}\n  component: {component!r}\n  read more: {PAGE}#{self.heading}"
            )


def _where(error: BaseException) -> str:
    """The last place outside torch and the kit's own folder, where there is one."""
    here = Path(__file__).parent
    frames = [each for each in traceback.extract_tb(error.__traceback__) if here not in Path(each.filename).parents]
    own = [each for each in frames if "site-packages" not in each.filename] or frames
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def has(component: Any, name: str) -> bool:
    """Whether a component has a hyper-parameter of that name. ``ridge``, ``rtol``, ``max_steps``, ``clip``, ``count``,
    ``chunk``, ``mode``, ``noise``, ``temperature``, ``batch_size``, ``keep_graph`` and ``carry_rule`` mean the same everywhere;
    no check asks for others."""
    return attrs.has(type(component)) and name in attrs.fields_dict(type(component))


def with_fields(component: Any, **values: Any) -> Any:
    """The component with other values in those fields that it has."""
    return attrs.evolve(component, **{name: value for name, value in values.items() if has(component, name)})


def refused(call: Callable[[], Any]) -> ConfigError | None:
    """The ConfigError of a component that says it is not for this, which is no fault."""
    try:
        call()
    except ConfigError as error:
        return error
    return None


def snapshot(value: Any) -> Any:
    """A copy of a nested value down to its tensors, to compare with later; functions are left out."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Data | Problem | Key) or callable(value):
        return None
    if isinstance(value, Mapping):
        return {key: snapshot(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(each) for each in value]
    if attrs.has(type(value)):
        return {one.name: snapshot(getattr(value, one.name)) for one in attrs.fields(type(value))}
    return value


def tensors(value: Any, place: str = "") -> dict[str, Tensor]:
    """Every tensor of a snapshot by its place in it."""
    if isinstance(value, Tensor):
        return {place or "the value": value}
    if isinstance(value, Mapping):
        pairs = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(i), each) for i, each in enumerate(value)]
    else:
        return {}
    return {name: leaf for key, each in pairs for name, leaf in tensors(each, f"{place}.{key}" if place else key).items()}


def difference(one: Any, other: Any, place: str = "", rtol: float = 0.0) -> str:
    """Where two snapshots differ, and how; empty where they are equal (bit for bit without ``rtol``)."""
    at = place or "the value"
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{at} is {other.dtype} {list(other.shape)} instead of {one.dtype} {list(one.shape)}"
        close = torch.allclose(one, other, rtol=rtol, atol=rtol, equal_nan=True) if one.dtype.is_floating_point else False
        if not close and not torch.equal(one, other):
            return f"{at} is {shown(other)} instead of {shown(one)}"
        return ""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if set(one) != set(other):
            return f"{at} has the names {sorted(map(str, other))} instead of {sorted(map(str, one))}"
        found = (difference(one[key], other[key], f"{place}.{key}" if place else str(key), rtol) for key in one)
        return next(filter(None, found), "")
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return next(
            filter(None, (difference(a, b, f"{place}[{i}]", rtol) for i, (a, b) in enumerate(zip(one, other, strict=True)))), ""
        )
    same = one == other or (one != one and other != other)
    if isinstance(one, float) and isinstance(other, float) and rtol:
        same = same or abs(one - other) <= rtol * (1 + abs(one))
    return "" if same else f"{at} is {other!r} instead of {one!r}"


def shown(tensor: Tensor) -> str:
    """A tensor for a message: a few numbers, and its shape where there are more."""
    numbers = [f"{each:.6g}" if isinstance(each, float) else str(each) for each in tensor.detach().reshape(-1)[:6].tolist()]
    more = f", … (shape {list(tensor.shape)})" if tensor.numel() > 6 else ""
    return f"[{', '.join(numbers)}{more}]" if tensor.dim() else (numbers[0] if numbers else "[]")


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Gaussian numbers, the same in every precision and on every device."""
    drawn = torch.randn(shape, generator=Key(seed).fold("kit").generator(), dtype=torch.float64)
    return drawn.to(place(), dtype)
