"""Measure the plugin host: a step with ten observers, and `hgms list` with 50 installed plugins.

    python benchmarks/bench_host.py [--observers 10] [--plugins 50] [--repeats 7] [--json FILE]

The first is the time of ``Host.notify`` on the record of a real step, compared with no observer.
The second is the processor time of a whole process beyond ``import torch``, in turns, with
temporary distributions up to that number. Targets: 1 ms, 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from hgms.plugins import Host
from hgms.runs import RunConfig, run_config
from hgms_core import hookimpl

PLUGIN = '''
from typing import ClassVar
import attrs
from hgms_core import LinearSystem, hookimpl

hgms_plugin_api = 2

@attrs.frozen(kw_only=True)
class Solver:
    """Nothing that anybody needs."""
    name: ClassVar[str] = "made-{number}"
    rtol: float = attrs.field(default=1e-3, validator=greater_than(0))
    def solve(self, matvec, b, x0=None): return LinearSystem.of(matvec, b)

@hookimpl
def hgms_register_linear_solvers(): return [Solver]

@hookimpl
def hgms_step_finished(run, record): pass
'''


def observed(observers: int) -> tuple[float, float]:
    """Return the milliseconds to notify this number of observers of a record, and none."""
    with TemporaryDirectory() as folder:
        table = {
            "task": "quadratic",
            "method": "hg-ms",
            "budget": "3 steps",
            "run": {"out": folder},
        }
        result = run_config(RunConfig.from_dict(table))
    record = result.records[-1]
    heard = []
    times = []
    for count in (observers, 0):
        plain = Host()
        for number in range(count):
            module = ModuleType(f"observer_{number}")

            def hgms_step_finished(run: object, record: dict[str, object]) -> None:
                heard.append(record["step"])

            module.hgms_step_finished = hookimpl(hgms_step_finished)  # type: ignore[attr-defined]
            plain.add(module)
        began = time.perf_counter()
        for _ in range(2000):
            plain.notify("hgms_step_finished", run=result.info, record=record)
        times.append((time.perf_counter() - began) / 2000 * 1e3)
    assert len(heard) == 2000 * observers
    return times[0], times[1]


def seconds(command: list[str], path: Path) -> float:
    """Return the processor seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(path)}
    subprocess.run(
        [sys.executable, *command], env=environment, check=True, stdout=subprocess.DEVNULL, cwd=path
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def listed(plugins: int, repeats: int) -> tuple[float, float]:
    """Return median seconds of `import torch`, and of `hgms list` with this number of plugins,
    in turns.
    """
    with TemporaryDirectory() as folder:
        site = Path(folder)
        missing = plugins - len(Host.load().infos)
        for number in range(missing):
            (site / f"made_{number}.py").write_text(PLUGIN.format(number=number))
            info = site / f"hgms_made_{number}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: hgms-made-{number}\nVersion: 1.0\n"
            )
            (info / "entry_points.txt").write_text(f"[hgms]\nmade-{number} = made_{number}\n")
        count = subprocess.run(
            [sys.executable, "-m", "hgms", "plugins"],
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.count(" hgms-made-")
        assert count == missing, f"{count} plugins listed"
        pairs = [
            (seconds(["-c", "import torch"], site), seconds(["-m", "hgms", "list"], site))
            for _ in range(repeats)
        ]
    return statistics.median(first for first, _ in pairs), statistics.median(
        second - first for first, second in pairs
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--observers", type=int, default=10)
    parser.add_argument("--plugins", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with_observers, without = observed(options.observers)
    print(
        f"a step with {options.observers} observers   {with_observers:.4f} ms (none: "
        f"{without:.4f} ms)"
    )
    torch, beyond = listed(options.plugins, options.repeats)
    print(f"import torch               {torch:.2f} s")
    print(f"hgms list, {options.plugins} plugins      {beyond:.2f} s beyond that")
    if options.json:
        step = {f"{options.observers} observers [ms]": with_observers, "no observer [ms]": without}
        listing = {
            "import torch [s]": torch,
            f"hgms list beyond it, {options.plugins} plugins [s]": beyond,
        }
        options.json.write_text(json.dumps({"step": step, "list": listing}, indent=2) + "\n")


if __name__ == "__main__":
    main()
