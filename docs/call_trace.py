"""Record one outer step: the calls of a Pipeline to its parts, the problem and the observers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import attrs
import torch

from hgms.config import Budget
from hgms.config.convert import structure
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit, Unrolled
from hgms.optim import SGD
from hgms.outer import Adam
from hgms.plugins import Host, Registry
from hgms.runs import RunFolder, run
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.tasks.quadratic import Quadratic
from hgms_core import Candidates, Method, Pipeline, Problem

GIVES = {
    "generator.init": "start: what the first step starts from",
    "generator.propose": "Candidates: N lower states, stacked",
    "candidates.replay": "the selected state as a function of θ",
    "generator.carry": "start of the next step",
    "selector.select": "Selection: index, scores, gap",
    "hypergradient.init": "state: what is remembered between steps",
    "hypergradient.estimate": "Estimate h ≈ ∇F(θ), and state",
    "solver.solve": "Solution v of (H + γI) v = ∇_x f",
    "outer.init": "state: moments",
    "outer.step": "θ − lr·h or the like, and state",
    "problem.project": "the nearest θ in Θ",
    "problem.evaluate": "metrics on test data (the clock is stopped)",
    "method.init": "state before the first step",
    "method.step": "state after the step, and its record",
    "method.result": "(θ, x)",
}


@attrs.define
class Trace:
    """The recorded calls with their depths."""

    lines: list[tuple[int, str]] = attrs.field(factory=list)
    depth: int = 0

    def watched(
        self, label: str, call: Callable[..., Any], names: tuple[str, ...] = ()
    ) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            shown = ", ".join(names[: len(args)] + tuple(kwargs))
            self.lines.append((self.depth, f"{label}({shown})"))
            self.depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self.depth -= 1

        return noted


class Watched:
    """A component that records its calls and delegates everything to the original."""

    def __init__(self, trace: Trace, label: str, part: Any) -> None:
        self.trace = trace
        self.label = label
        self.part = part

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.part, name)
        if f"{self.label}.{name}" not in GIVES:
            return value
        parameters = value.__code__.co_varnames[1 : value.__code__.co_argcount]
        return self.trace.watched(
            f"{self.label}.{name}", self._watching_the_way_back(value), parameters
        )

    def _watching_the_way_back(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            value = call(*args, **kwargs)
            if isinstance(value, Candidates):
                value = attrs.evolve(
                    value,
                    replay=self.trace.watched(
                        "candidates.replay", value.replay, ("index", "theta", "last")
                    ),
                )
            return value

        return watching


def calls_of_a_step() -> str:
    """Return the calls of a run of one step with an implicit hypergradient.

    The differences of an unrolled one follow.
    """
    whole = _trace(lambda trace: Implicit(solver=Watched(trace, "solver", CG(max_steps=2))))
    unrolled = _trace(lambda trace: Unrolled())
    inner = unrolled[unrolled.index(next(line for line in unrolled if "estimate" in line[1])) :]
    lines = [
        *_shown(whole),
        "",
        "an estimator that follows the branch asks for it once more:",
        "",
        *_shown(inner[:2]),
    ]
    return "\n".join(lines)


def files_of_a_step() -> list[tuple[str, str]]:
    """Return the files that a step of ``hg-ms`` enters with the problem or one of its losses.

    An object with the problem as a field counts as the problem.

    Each file comes with the first line of its docstring.
    """
    registry = Registry.load()
    method: Any = structure({"name": "hg-ms", "generator": {"steps": 2}}, Method, registry)
    problem = Quadratic().problem(0, torch.device("cpu"), torch.float64)
    state = method.init(problem, 0)
    root = Path(__file__).resolve().parents[1]
    packages = (str(root / "hgms_core"), str(root / "plugins"))  # the root may hold an environment
    files: dict[str, None] = {}

    def enter(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(packages):
            return
        names = frame.f_code.co_varnames[
            : frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        ]
        values = [frame.f_locals[name] for name in names]
        if any(_contains(value, problem) for value in values):
            files[Path(path).relative_to(root).as_posix()] = None

    method.step(problem, state)  # imports
    sys.setprofile(enter)
    try:
        method.step(problem, state)
    finally:
        sys.setprofile(None)
    return [(name, _first_line(root / name)) for name in files]


def _contains(value: Any, problem: Problem) -> bool:
    """Return whether a value is the problem, one of its losses, or has the problem as a field."""
    fields = attrs.fields(type(value)) if attrs.has(type(value)) else ()
    held = [getattr(value, field.name, None) for field in fields]
    return any(item is problem for item in (value, *held)) or any(
        value is loss for loss in (problem.f, problem.g)
    )


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return " ".join((docstring or "").split("\n\n")[0].split())


def _trace(estimator: Callable[[Trace], Any]) -> list[tuple[int, str]]:
    trace = Trace()
    problem = Quadratic().problem(0, torch.device("cpu"), torch.float64)
    problem = attrs.evolve(
        problem,
        project=trace.watched("problem.project", problem.project, ("theta",)),
        evaluate=trace.watched("problem.evaluate", problem.evaluate, ("theta", "x")),
    )
    branches = Branches(count=2, steps=2, optimizer=SGD(lr=0.1))
    method = Pipeline(
        generator=Watched(trace, "generator", branches),  # type: ignore[arg-type]
        selector=Watched(trace, "selector", BestOfN()),  # type: ignore[arg-type]
        hypergradient=Watched(trace, "hypergradient", estimator(trace)),  # type: ignore[arg-type]
        outer=Watched(trace, "outer", Adam(lr=0.1)),  # type: ignore[arg-type]
    )

    class Observers(Host):
        def notify(self, hook: str, **arguments: Any) -> None:
            trace.watched(hook, lambda **_: None)(**arguments)

    with TemporaryDirectory() as folder:
        run(
            Watched(trace, "method", method),
            problem,
            Budget(outer_steps=1),
            folder=RunFolder(Path(folder)),
            watch=Observers(),
        )  # type: ignore[arg-type]
    return trace.lines


def _shown(lines: list[tuple[int, str]]) -> list[str]:
    width = max(4 * depth + len(call) for depth, call in lines) + 2
    shown = []
    for depth, call in lines:
        left = "    " * depth + call
        gives = GIVES.get(call.partition("(")[0])
        shown.append(f"{left:<{width}}→ {gives}" if gives else left)
    return shown


if __name__ == "__main__":
    print(calls_of_a_step())
