"""The conformance check, and the message of a failed check.

The message contains the name of the check, the requirement, the actual result and the page to read.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

import attrs
import torch
from attrs import field, frozen
from torch import Tensor

from hgms.facts import name_of
from hgms.plugins import KINDS
from hgms.runs import line_of, pack, unpack
from hgms_core import Data, HgmsError, Key, Problem, Record, State, Tree
from hgms_core.capabilities import Finishes, find

PAGE = "docs/reference/kit.md"
"""The page that describes all checks, with one heading per kind."""

F64 = torch.float64

_PLACE: ContextVar[torch.device | None] = ContextVar("place", default=None)


def place() -> torch.device:
    """Return the device of the inputs: the CPU, or the device of :func:`inputs_on`."""
    return _PLACE.get() or torch.device("cpu")


@contextlib.contextmanager
def inputs_on(device: torch.device | str) -> Iterator[None]:
    """Create the inputs of all checks inside on this device, with the same numbers as on the CPU.

    Examples
    --------
    >>> with inputs_on("cpu"):
    ...     normal(2, seed=0).device
    device(type='cpu')
    """
    before = _PLACE.set(torch.device(device))
    try:
        yield
    finally:
        _PLACE.reset(before)


class Fault(AssertionError):
    """The actual result, when it differs from the requirement of a check."""


class NotAsked(Exception):
    """A check does not apply to a component; the text is the reason."""


class CheckFailed(AssertionError):
    """A component failed a check; the message contains all details."""


def fail(came: str) -> NoReturn:
    raise Fault(came)


def demand(condition: object, came: str) -> None:
    """Raise Fault with the actual result unless the condition is true."""
    if not condition:
        raise Fault(came)


def ask_if(condition: object, reason: str) -> None:
    """Skip a check that does not apply to a component, unless the condition is true."""
    if not condition:
        raise NotAsked(reason)


def ask_of_field(component: Any, name: str) -> None:
    """Skip a check of a field that a component does not have."""
    ask_if(has(component, name), f"it has no field {name}")


Exercise = Callable[[Any, torch.dtype, int], tuple[Any, Callable[[], Any]]]
"""(component, dtype, variant) → (inputs, a call with them): an ordinary use of a component.

The checks of every kind observe this call. The variants 0 and 1 have different numbers.
"""


@frozen
class Check:
    """A named requirement on a component: ``question(component, *more)`` raises or returns.

    The docstring of ``question`` states the requirement.
    """

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
        """The heading of the check on the page."""
        everyone = self.question.__module__.endswith(".class_checks")
        return "every-kind" if everyone else KINDS[self.kind].label.replace(" ", "-") + "s"

    def answer(self, component: Any) -> tuple[str, str]:
        """Return (fault, reason).

        The fault is empty if the component passes. The reason is not empty if the check does not
        apply to the component.
        """
        try:
            self.question(component, *self.more)
        except NotAsked as reason:
            return "", str(reason)
        except Fault as fault:
            return str(fault), ""
        except SystemExit as error:
            advice = "raise an error that says what is wrong"
            return f"it calls sys.exit({error}){line_of(error, [component])}; {advice}", ""
        except Exception as error:
            first, *remedies = error.lines() if isinstance(error, HgmsError) else [str(error)]
            came = f"it raised {type(error).__name__}: {first}{line_of(error, [component])}"
            return "\n    ".join([came, *remedies]), ""
        return "", ""

    def fault(self, component: Any) -> str:
        """Return the actual result if the check fails; empty if the component passes."""
        return self.answer(component)[0]

    def __call__(self, component: Any) -> None:
        """Raise :class:`CheckFailed` if the component fails the check."""
        __tracebackhide__ = True  # pytest shows the line of the test, and the message
        came = self.fault(component)
        if came:
            raise CheckFailed(
                f"{self.kind} {name_of(component)!r} fails the "
                f"check {self.name}\n"
                f"  expected: {self.demands}\n  got: {came}\n  component: {component!r}\n"
                f"  read more: {PAGE}#{self.heading}"
            )


def has(component: Any, name: str) -> bool:
    """Whether a component has a hyper-parameter of this name.

    ``ridge``, ``rtol``, ``max_steps``, ``clip``, ``count``, ``chunk``, ``mode``, ``noise``,
    ``temperature``, ``batch_size``, ``keep_path`` and ``carry_rule`` have the same meaning in all
    components. Checks use no other names.
    """
    return attrs.has(type(component)) and name in attrs.fields_dict(type(component))


def with_fields(component: Any, **values: Any) -> Any:
    """Return the component with other values of those fields that it has."""
    return attrs.evolve(
        component, **{name: value for name, value in values.items() if has(component, name)}
    )


def snapshot(value: Any, place: str = "") -> dict[str, Any]:
    """Copy the leaves of a nested value by their place; functions, data and keys are excluded."""
    if isinstance(value, Tensor):
        return {place: value.detach().clone()}
    if isinstance(value, Data | Problem | Key) or callable(value):
        return {}
    if attrs.has(type(value)):
        value = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
    if isinstance(value, list | tuple):
        parts = [(f"{place}[{number}]", item) for number, item in enumerate(value)]
    elif isinstance(value, Mapping):
        parts = [(_part_of(place, key), item) for key, item in value.items()]
    else:
        return {place: value}
    if not parts:
        return {place: {} if isinstance(value, Mapping) else []}
    return {name: leaf for part, item in parts for name, leaf in snapshot(item, part).items()}


def _part_of(place: str, key: object) -> str:
    """Return the place of an entry; 3 and "3" are different keys."""
    name = key if isinstance(key, str) else f"({key!r})"
    return f"{place}.{name}" if place else name


def tensors(value: Any) -> dict[str, Tensor]:
    """Return every tensor of a nested value by its place."""
    return {
        place or "the value": leaf
        for place, leaf in snapshot(value).items()
        if isinstance(leaf, Tensor)
    }


def difference(wanted: Any, came: Any, place: str = "", rtol: float = 0.0) -> str:
    """Describe where two nested values differ, and how.

    The result is empty if they are equal (bit for bit without ``rtol``).
    """
    before = snapshot(wanted, place)
    after = snapshot(came, place)
    if before.keys() != after.keys():
        return f"{place or 'the value'} has the names {sorted(after)} instead of {sorted(before)}"
    found = (_leaf_difference(name, leaf, after[name], rtol) for name, leaf in before.items())
    return next(filter(None, found), "")


def _leaf_difference(place: str, wanted: Any, came: Any, rtol: float) -> str:
    at = place or "the value"
    if isinstance(wanted, Tensor) and isinstance(came, Tensor):
        if (wanted.shape, wanted.dtype) != (came.shape, came.dtype):
            return (
                f"{at} is {came.dtype} {list(came.shape)} instead of {wanted.dtype} "
                f"{list(wanted.shape)}"
            )
        close = wanted.dtype.is_floating_point and torch.allclose(
            wanted, came, rtol=rtol, atol=rtol, equal_nan=True
        )
        same = close or torch.equal(wanted, came)
        return "" if same else f"{at} is {show(came)} instead of {show(wanted)}"
    same = wanted == came or (wanted != wanted and came != came)
    if isinstance(wanted, float) and isinstance(came, float) and rtol:
        same = same or abs(wanted - came) <= rtol * (1 + abs(wanted))
    return "" if same else f"{at} is {came!r} instead of {wanted!r}"


def demand_equal(wanted: Any, came: Any, before: str, after: str = "", rtol: float = 0.0) -> None:
    """Fail if the two values differ; all tensors must be equal (bit for bit without ``rtol``).

    The message contains the difference between the texts ``before`` and ``after``.
    """
    differs = difference(wanted, came, rtol=rtol)
    demand(not differs, f"{before} {differs}{after}")


def demand_saved(state: State, use: Callable[[State], Any]) -> None:
    """Require that ``use`` returns the same for a state after saving and loading.

    The state is written to a run folder and loaded onto the device of the inputs.
    """
    structure, leaves = pack(state)
    read = dict(unpack(json.loads(json.dumps(structure)), leaves, place()))
    demand_equal(use(state), use(read), "after its state was saved and loaded")


def demand_modes(
    component: Any, use: Callable[[Any], Any], chunk: int, rtol: float, instead: str = ""
) -> None:
    """Require that ``use`` returns the same for every mode of the component.

    The modes are a loop, stacked, and stacked with chunks of 1 and of ``chunk``.
    """
    ask_of_field(component, "mode")
    loop = snapshot(use(with_fields(component, mode="loop")))
    for options in (
        {"mode": "stacked"},
        {"mode": "stacked", "chunk": 1},
        {"mode": "stacked", "chunk": chunk},
    ):
        demand_equal(
            loop, use(with_fields(component, **options)), f"with {options}{instead}", rtol=rtol
        )


def shapes(tree: Tree) -> dict[str, list[int]]:
    return {name: list(leaf.shape) for name, leaf in tree.items()}


def unsound(tree: Tree) -> list[str]:
    """Describe faults of leaves: a graph, or a number that is not finite."""
    graphs = [
        f"{name!r} has a graph; write `.detach()`"
        for name, leaf in tree.items()
        if leaf.requires_grad
    ]
    return [
        *graphs,
        *(
            f"{name!r} is not finite"
            for name, leaf in tree.items()
            if not torch.isfinite(leaf).all()
        ),
    ]


def show(tensor: Tensor) -> str:
    """Format a tensor for a message: a few numbers, and the shape if there are more."""
    few = tensor.detach().reshape(-1)[:6].tolist()
    some = [f"{number:.6g}" if isinstance(number, float) else str(number) for number in few]
    more = f", … (shape {list(tensor.shape)})" if tensor.numel() > 6 else ""
    return f"[{', '.join(some)}{more}]" if tensor.dim() else (some[0] if some else "[]")


def numbers(values: Any, dtype: torch.dtype = F64) -> Tensor:
    """Return a tensor on the device of the inputs."""
    return torch.tensor(values, dtype=dtype, device=place())


def normal(*shape: int, seed: int, dtype: torch.dtype = F64) -> Tensor:
    """Return Gaussian numbers, the same in every precision and on every device."""
    return torch.randn(shape, generator=Key(seed).fold("kit").generator(), dtype=F64).to(
        place(), dtype
    )


def near(tree: Tree, size: float, seed: int) -> Tree:
    """Return the tree plus Gaussian numbers of this size."""
    return {name: leaf + size * normal(*leaf.shape, seed=seed) for name, leaf in tree.items()}


def differences(value: Callable[[float], Any], step: float = 1e-5) -> Any:
    """Return the derivative of ``value`` at 0 by a central difference."""
    return (value(step) - value(-step)) / (2 * step)


def run_steps(
    method: Any, problem: Problem, state: State, of: int, steps: range | None = None
) -> Iterator[tuple[State, Record]]:
    """Yield the state and the record after each of ``steps`` (None: all) of a run of ``of`` steps.

    The iteration ends earlier if the method is finished.
    """
    finishes = find(method, Finishes)
    for step in steps or range(of):
        if finishes is not None and finishes.is_finished(state):
            return
        state, record = method.step(problem, state, step / of)
        yield state, record
