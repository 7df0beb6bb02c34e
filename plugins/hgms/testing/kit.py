"""What a check is, and how a failed one speaks: which check, what was expected, what came, where
to read more.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import attrs
import torch
from attrs import field, frozen
from torch import Tensor

from hgms.runs import line_of, pack, unpack
from hgms_core import ConfigError, Data, HgmsError, Key, Problem, Record, State, Tree
from hgms_core.registry import KINDS

PAGE = "docs/reference/kit.md"
"""Where every check is described, under a heading for each kind."""

F64 = torch.float64

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
    """
    before = _PLACE.set(torch.device(device))
    try:
        yield
    finally:
        _PLACE.reset(before)


class Fault(AssertionError):
    """What came instead of what a check demands."""


class NotAsked(Exception):
    """A check does not apply to a component; the text is the reason."""


class CheckFailed(AssertionError):
    """A component failed a check; the message says all there is to know."""


def fail(came: str) -> NoReturn:
    raise Fault(came)


def demand(condition: object, came: str) -> None:
    """Fails with what came instead, unless the condition holds."""
    if not condition:
        raise Fault(came)


def ask_if(condition: object, reason: str) -> None:
    """Leave a check that does not apply to a component, unless the condition holds."""
    if not condition:
        raise NotAsked(reason)


def ask_of_field(component: Any, name: str) -> None:
    """Leave a check of a field that a component does not have."""
    ask_if(has(component, name), f"it has no field {name}")


Exercise = Callable[[Any, torch.dtype, int], tuple[Any, Callable[[], Any]]]
"""(component, dtype, variant) → (its inputs, a call on them): one ordinary use of a component,
which the checks of every kind look at from outside. The variants 0 and 1 have different numbers."""


@frozen
class Check:
    """A named demand on a component: ``question(component, *more)`` fails or returns. Its
    docstring says what is demanded.
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
        """Of the part of the page that the check stands in."""
        everyone = self.question.__module__.endswith(".every_kind")
        return "every-kind" if everyone else KINDS[self.kind].label.replace(" ", "-") + "s"

    def answer(self, component: Any) -> tuple[str, str]:
        """(fault, reason): the fault, empty if the component passes, and the reason if the check
        does not apply to the component.
        """
        try:
            self.question(component, *self.more)
        except NotAsked as reason:
            return "", str(reason)
        except Fault as fault:
            return str(fault), ""
        except SystemExit as error:
            advice = "raise an error that says what is wrong"
            return f"it calls sys.exit({error}){_where(error)}; {advice}", ""
        except Exception as error:
            first, *remedies = error.lines() if isinstance(error, HgmsError) else [str(error)]
            where = line_of(error, [component]) or _where(error)
            came = f"it raised {type(error).__name__}: {first}{where}"
            return "\n    ".join([came, *remedies]), ""
        return "", ""

    def fault(self, component: Any) -> str:
        """What came instead of what is demanded; empty where the component passes."""
        return self.answer(component)[0]

    def __call__(self, component: Any) -> None:
        """Raises :class:`CheckFailed` where the component does not do what is demanded."""
        __tracebackhide__ = True  # pytest shows the line of the test, and the message
        came = self.fault(component)
        if came:
            raise CheckFailed(
                f"{self.kind} {getattr(component, 'name', type(component).__name__)!r} fails the "
                f"check {self.name}\n"
                f"  expected: {self.demands}\n  got: {came}\n  component: {component!r}\n"
                f"  read more: {PAGE}#{self.heading}"
            )


def _where(error: BaseException) -> str:
    """The last place outside torch and the kit's own folder, where there is one."""
    here = Path(__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if here not in Path(frame.filename).parents
    ]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def has(component: Any, name: str) -> bool:
    """Whether a component has a hyper-parameter of that name. ``ridge``, ``rtol``, ``max_steps``,
    ``clip``, ``count``, ``chunk``, ``mode``, ``noise``, ``temperature``, ``batch_size``,
    ``keep_graph`` and ``carry_rule`` mean the same everywhere; no check asks for others."""
    return attrs.has(type(component)) and name in attrs.fields_dict(type(component))


def with_fields(component: Any, **values: Any) -> Any:
    """The component with other values in those fields that it has."""
    return attrs.evolve(
        component, **{name: value for name, value in values.items() if has(component, name)}
    )


def refused(call: Callable[[], Any]) -> ConfigError | None:
    """The ConfigError of a component that says it is not for this, which is no fault."""
    try:
        call()
    except ConfigError as error:
        return error
    return None


def snapshot(value: Any) -> Any:
    """A copy of a nested value down to its tensors, to compare with later; functions are left
    out.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Data | Problem | Key) or callable(value):
        return None
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    if attrs.has(type(value)):
        return {
            attribute.name: snapshot(getattr(value, attribute.name))
            for attribute in attrs.fields(type(value))
        }
    return value


def tensors(value: Any, place: str = "") -> dict[str, Tensor]:
    """Every tensor of a snapshot by its place in it."""
    if isinstance(value, Tensor):
        return {place or "the value": value}
    if isinstance(value, Mapping):
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(i), item) for i, item in enumerate(value)]
    else:
        return {}
    return {
        name: leaf
        for key, item in pairs
        for name, leaf in tensors(item, f"{place}.{key}" if place else key).items()
    }


def difference(wanted: Any, came: Any, place: str = "", rtol: float = 0.0) -> str:
    """Where two snapshots differ, and how; empty where they are equal (bit for bit without
    ``rtol``).
    """
    at = place or "the value"
    if isinstance(wanted, Tensor) and isinstance(came, Tensor):
        if (wanted.shape, wanted.dtype) != (came.shape, came.dtype):
            return (
                f"{at} is {came.dtype} {list(came.shape)} instead of {wanted.dtype} "
                f"{list(wanted.shape)}"
            )
        close = (
            torch.allclose(wanted, came, rtol=rtol, atol=rtol, equal_nan=True)
            if wanted.dtype.is_floating_point
            else False
        )
        if not close and not torch.equal(wanted, came):
            return f"{at} is {shown(came)} instead of {shown(wanted)}"
        return ""
    if isinstance(wanted, Mapping) and isinstance(came, Mapping):
        if set(wanted) != set(came):
            return (
                f"{at} has the names {sorted(map(str, came))} instead of {sorted(map(str, wanted))}"
            )
        pairs = [
            (f"{place}.{key}" if place else str(key), wanted[key], came[key]) for key in wanted
        ]
    elif (
        isinstance(wanted, list | tuple)
        and isinstance(came, list | tuple)
        and len(wanted) == len(came)
    ):
        pairs = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(wanted, came, strict=True))]
    else:
        same = wanted == came or (wanted != wanted and came != came)
        if isinstance(wanted, float) and isinstance(came, float) and rtol:
            same = same or abs(wanted - came) <= rtol * (1 + abs(wanted))
        return "" if same else f"{at} is {came!r} instead of {wanted!r}"
    return next(filter(None, (difference(a, b, name, rtol) for name, a, b in pairs)), "")


def demand_equal(wanted: Any, came: Any, before: str, after: str = "", rtol: float = 0.0) -> None:
    """Fails with where the two differ, between the words ``before`` and ``after``, unless they are
    equal down to their tensors (bit for bit without ``rtol``)."""
    differs = difference(snapshot(wanted), snapshot(came), rtol=rtol)
    demand(not differs, f"{before} {differs}{after}")


def demand_saved(state: State, use: Callable[[State], Any]) -> None:
    """What ``use`` makes of a state is the same after the state was written to a run folder and
    read again, onto the device of the inputs.
    """
    structure, leaves = pack(state)
    read = dict(unpack(json.loads(json.dumps(structure)), leaves, place()))
    demand_equal(use(state), use(read), "after its state was saved and loaded")


def demand_modes(
    component: Any, use: Callable[[Any], Any], chunk: int, rtol: float, instead: str = ""
) -> None:
    """What ``use`` makes of a component is the same in a loop, stacked, and stacked one or
    ``chunk`` at a time.
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
    """What is wrong with leaves: that they have a graph, or hold a number that is not finite."""
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


def shown(tensor: Tensor) -> str:
    """A tensor for a message: a few numbers, and its shape where there are more."""
    few = tensor.detach().reshape(-1)[:6].tolist()
    some = [f"{number:.6g}" if isinstance(number, float) else str(number) for number in few]
    more = f", … (shape {list(tensor.shape)})" if tensor.numel() > 6 else ""
    return f"[{', '.join(some)}{more}]" if tensor.dim() else (some[0] if some else "[]")


def numbers(values: Any, dtype: torch.dtype = F64) -> Tensor:
    """A tensor where the checks make their inputs."""
    return torch.tensor(values, dtype=dtype, device=place())


def normal(*shape: int, seed: int, dtype: torch.dtype = F64) -> Tensor:
    """Gaussian numbers, the same in every precision and on every device."""
    return torch.randn(shape, generator=Key(seed).fold("kit").generator(), dtype=F64).to(
        place(), dtype
    )


def near(tree: Tree, size: float, seed: int) -> Tree:
    """The tree with Gaussian numbers of this size added."""
    return {name: leaf + size * normal(*leaf.shape, seed=seed) for name, leaf in tree.items()}


def differences(value: Callable[[float], Any], step: float = 1e-5) -> Any:
    """The derivative of ``value`` at 0 by a central difference."""
    return (value(step) - value(-step)) / (2 * step)


def stepped(
    method: Any, problem: Problem, state: State, of: int, steps: range | None = None
) -> Iterator[tuple[State, Record]]:
    """The state and the record after each of these steps of a run of ``of`` (None: all), up to
    the method's own end.
    """
    for step in steps or range(of):
        if getattr(method, "finished", lambda _: False)(state):
            return
        state, record = method.step(problem, state, step / of)
        yield state, record
