"""Kills: a command that is interrupted several times at seeded moments, and resumed, must write the
same files as an undisturbed command.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import shutil
import signal
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import field, frozen

from campaigns.child import Ending, Strike, call

TASKS = {
    "quadratic": "",
    "sphere": "",
    "circle-kink": "",
    "circle-degenerate": "",
    "hyper-cleaning": "train_size = 60, validation_size = 20, test_size = 30, hidden = 4",
    "imbalanced-loss": (
        "validation_size = 20, test_size = 20, views = 1, "
        "network = { channels = [2, 2], hidden = 4 }"
    ),
    "ridge-cv": "",
    "logistic-cv": 'dataset = "sklearn:iris"',
}

RUN = """seed = {seed}
budget = "{steps} steps"
task = {{ name = "{task}"{settings} }}
method = {{ name = "{method}" }}
[run]
checkpoint_seconds = {checkpoint}
evaluate_every = {every}
dtype = "{dtype}"
"""

GRID = """budget = "{steps} steps"
seeds = 2
task = ["quadratic", "sphere"]
method = [{{ name = "{first}", outer.lr = 0.05 }}, {{ name = "{second}", label = "other" }}]
[run]
checkpoint_seconds = {checkpoint}
"""

MIX = """seed = {seed}
budget = "{steps} steps"
method = "{method}"
{task}
[run]
checkpoint_seconds = {checkpoint}
[sample]
size = 12
[finetune]
lr = 1e-2
micro_batch = 3
accumulation = 2
save_every = 1
"""


def mix_file(**settings: Any) -> str:
    """Return the file of the smallest mix with these settings. Tests use the same task."""
    task = Path(__file__).resolve().parents[2] / "tests" / "tiny_mix.toml"
    return MIX.format(task=task.read_text(), **settings)


AS_IT_LIKES = (".lock", "resources.json", "resources.json.part", ".png")
"""Endings of file names that a run may leave."""

CLOCKS = {"resources.json", "env.json", "timings.jsonl", ".lock", "manifest.json"}
"""Files that contain times or machines, or differ between runs."""


@frozen
class Command:
    """A command to interrupt: its input files, its arguments, and the arguments to resume."""

    what: str
    files: tuple[tuple[str, str], ...]
    argv: tuple[str, ...]
    again: tuple[str, ...] = ()
    seconds: float = 300.0

    def lay(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, text in self.files:
            (folder / name).write_text(text)


@frozen
class Whole:
    """The ending and the files of an undisturbed command."""

    ending: Ending
    left: dict[str, bytes] = field(repr=False)


def pairs() -> list[tuple[str, str]]:
    """Return all pairs of a task and a registered method that supports it."""
    return [(task, method) for task in TASKS for method in _methods(task)]


@functools.cache
def _methods(task: str) -> list[str]:
    from hgms.plugins import Registry
    from hgms.runs import RunConfig
    from hgms.runs import traits as compat
    from hgms_core.errors import HgmsError

    names = []
    for method in Registry.load().components("method"):
        if method.name == "kfac" and importlib.util.find_spec("curvlinops") is None:
            continue
        try:
            config = RunConfig.from_dict({"task": task, "method": method.name, "budget": "1 step"})
            compat.ensure_fits(config.method, config.task)
        except HgmsError:
            continue
        names.append(method.name)
    return names


def sums(first: int, count: int, completion: str | None = None) -> str:
    """Return the rows of a source: sums with different prompts."""
    rows = ((i // 40, i % 40) for i in range(first, first + count))
    return "".join(
        json.dumps({"prompt": f"{a} + {b} =", "completion": completion or str(a + b)}) + "\n"
        for a, b in rows
    )


SOURCES = (
    ("sums.jsonl", sums(0, 40)),
    ("dots.jsonl", sums(100, 40, ".")),
    ("validation.jsonl", sums(200, 20)),
    ("test.jsonl", sums(300, 10)),
)


def command(chance: random.Random, kind: str) -> Command:
    """Return a random command of the kind run, compare or mix."""
    common = {
        "seed": chance.randint(0, 1),
        "checkpoint": chance.choice([0.0, 0.0, 0.0, 0.05, 30.0]),
    }
    if kind == "run":
        task, method = chance.choice(pairs())
        steps = chance.choice([2, 5])
        every = chance.choice([1, 3])
        dtype = chance.choice(["float32", "float64"])
        text = RUN.format(
            task=task,
            method=method,
            settings=f", {TASKS[task]}" * bool(TASKS[task]),
            steps=steps,
            every=every,
            dtype=dtype,
            **common,
        )
        argv = ("run", "run.toml")
        return Command(f"{method} on {task}", (("run.toml", text),), argv, (*argv, "--resume"))
    if kind == "compare":
        first, second = chance.sample(["hg-baseline", "hg-implicit", "hg-ms", "soba", "uniform"], 2)
        text = GRID.format(first=first, second=second, steps=chance.choice([2, 3]), **common)
        jobs = "2" if chance.random() < 0.05 else "0"
        return Command(
            f"compare {first} and {second}, {jobs} jobs",
            (("grid.toml", text),),
            ("compare", "grid.toml", "--jobs", jobs),
        )
    # a ranking needs more steps
    method = chance.choice(["uniform", "hg-ms", "hg-implicit", "hg-baseline"])
    text = mix_file(method=method, steps=chance.choice([2, 3]), **common)
    return Command(f"mix {method}", (("mix.toml", text), *SOURCES), ("mix", "mix.toml"))


def trial(
    chance: random.Random,
    scratch: Path,
    wholes: dict[Command, Whole],
    counts: Counter[str],
    kind: str,
) -> Iterator[str]:
    """Kill and resume one command; yield its violations, and count the kills."""
    what = command(chance, kind)
    if what not in wholes:
        wholes[what] = undisturbed(what, scratch / "whole")
    whole = wholes[what]
    folder = scratch / "killed" / "work"
    struck = 0
    what.lay(folder)
    blows = chance.choice([1, 2, 4, 8])
    for number in range(blows + 1):
        strike, signals = (
            _blow(chance, whole.ending, again=struck > 0) if number < blows else (Strike(), [])
        )
        ending = _go(what, folder, again=number > 0, strike=strike, signals=signals)
        if number < blows and _was_struck(ending, signals):
            struck += 1
            name = "SIGKILL while writing" if strike.at else signal.Signals(signals[0][1]).name
            counts[f"{kind}: {name}"] += 1
        elif ending.late or ending.code not in (0, whole.ending.code) or "Traceback" in ending.err:
            late = f"over {what.seconds:.0f} s, " if ending.late else ""
            yield (
                f"{what.what}: after {struck} kills {late}it ended with {ending.code}: "
                f"{_last(ending)}"
            )
            return
        else:
            break  # it finished first
    differing = compared(whole.left, left(folder))
    if whole.ending.code not in (0, 1) or differing:
        yield (
            f"{what.what}: ended with {whole.ending.code}; after {struck} kills "
            f"{', '.join(differing)}"
        )


def _go(
    what: Command, folder: Path, *, again: bool, strike: Strike, signals: list[tuple[float, int]]
) -> Ending:
    """Start or resume the command.

    Before the first checkpoint, resuming may be rejected; the command is then restarted.
    """
    kept = any(folder.rglob("manifest.json"))
    ending = call(
        what.again or what.argv if again else what.argv,
        folder,
        seconds=what.seconds,
        strike=strike,
        signals=signals,
    )
    if ending.code == 2 and again and not kept:
        ending = call(what.argv, folder, seconds=what.seconds, strike=Strike(), signals=())
    return ending


def _was_struck(ending: Ending, signals: list[tuple[float, int]]) -> bool:
    if ending.late:
        return False
    # click prints "Aborted!" for a Ctrl-C just before the command starts or after it ends
    heard = bool(signals) and (ending.code not in (0, 1, 2) or ending.err.strip() == "Aborted!")
    return ending.code == -signal.SIGKILL or heard


def undisturbed(what: Command, place: Path) -> Whole:
    shutil.rmtree(place, ignore_errors=True)
    what.lay(place / "work")
    ending = call(what.argv, place / "work", seconds=what.seconds, strike=Strike())
    return Whole(ending, left(place / "work"))


def _blow(
    chance: random.Random, whole: Ending, *, again: bool
) -> tuple[Strike, list[tuple[float, int]]]:
    """Return a kill during an operation on files, a kill at any moment, or another signal."""
    way = chance.random()
    if way < 0.6:
        at = chance.randint(1, max(1, whole.operations if not again else whole.operations // 2 + 5))
        return Strike(at, chance.choice(["before", "midst", "after"])), []
    number = (
        signal.SIGKILL
        if way < 0.9
        else chance.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    )
    return Strike(), [(chance.uniform(0, whole.seconds), number)]


def left(folder: Path) -> dict[str, bytes]:
    """Return the files that must not depend on interruptions, by name, without times."""
    rows = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name in CLOCKS:
                content = b""
            elif path.name == "config.toml":
                content = _meaning(content)
            elif path.name == "report.json":
                content = json.dumps(_without_clock(json.loads(content)), sort_keys=True).encode()
            rows[path.relative_to(folder).as_posix()] = content
    return {name: content for name, content in rows.items() if not name.endswith(AS_IT_LIKES)}


def _meaning(config: bytes) -> bytes:
    """Return a configuration without settings that affect no result, or its bytes if invalid."""
    try:
        table = tomllib.loads(config.decode())
        run = {
            key: value
            for key, value in table["run"].items()
            if key not in ("out", "label", "task_label")
        }
        return json.dumps({**table, "run": run}, sort_keys=True, default=str).encode()
    except (ValueError, KeyError, AttributeError, RecursionError):
        return config


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        # the key of a stage depends on all earlier files, including times
        clocks = ("seconds", "peak", "key")
        return {
            key: _without_clock(below)
            for key, below in value.items()
            if not any(clock in key for clock in clocks)
        }
    return [_without_clock(below) for below in value] if isinstance(value, list) else value


def compared(whole: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Return the differences between two folders."""
    lacking = [f"{name} is missing" for name in whole if name not in other]
    more = [f"{name} was left" for name in other if name not in whole]
    return (
        lacking
        + more
        + [f"{name} differs" for name in whole if name in other and whole[name] != other[name]]
    )


def _last(ending: Ending) -> str:
    lines = ending.err.strip().splitlines()
    return " / ".join(line.strip() for line in lines[-3:])[-300:] if lines else "(no message)"
