"""Test the command line in a campaign: kills, damaged files, hostile input.

::

    python benchmarks/campaign.py kills --count 1000
        # runs, comparisons, mixes: killed and resumed, against undisturbed ones
    python benchmarks/campaign.py damage --count 1000
        # files of run folders flipped, cut, replaced; then --resume and report
    python benchmarks/campaign.py inputs --count 10000
        # configurations, grids, data, command lines, third-party run folders

It prints one line per violation. Every trial is a function of its number and ``--seed`` (except the
times of signals); ``--only NUMBER`` repeats a trial and keeps its folder, ``--kind`` selects the
trials of one kind. The exit code is 1 after a violation. Flushing files takes most of the time:
``TMPDIR`` in memory (/dev/shm) is several times as fast.
"""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = (
        "1"  # before anything is imported: a process that forks may have no other threads
    )
os.environ |= {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import argparse  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import random  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

from campaigns import child, damage, inputs, kills  # noqa: E402

SMALL = f", {kills.TASKS['hyper-cleaning']}"
SOME = {"seed": 0, "steps": 2, "checkpoint": 30.0}
READY = kills.RUN.format(
    task="hyper-cleaning", settings=SMALL, method="hg-ms", every=1, dtype="float32", **SOME
)
READY_GRID = kills.GRID.format(first="hg-implicit", second="soba", sampler="random", **SOME)
READY_MIX = kills.mix_file(method="hg-ms", **SOME)

Trial = Callable[[random.Random, Path, str], Iterator[str]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("campaign", choices=["kills", "damage", "inputs"])
    parser.add_argument("--count", type=int, default=100, help="of kills, damages or inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", type=int, metavar="NUMBER", help="this trial alone; its folder is kept"
    )
    parser.add_argument("--kind", help="of trials, where a campaign has several")
    chosen = parser.parse_args(arguments)

    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))
    counts: Counter[str] = Counter()
    kinds, trial = _campaign(chosen.campaign, counts)
    if chosen.kind:
        kinds = {chosen.kind: kinds[chosen.kind]}
    prepare(scratch / "ready", set(kinds))
    began = time.monotonic()
    violations = 0
    number = chosen.only or 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # print the violations found so far
        while chosen.only is not None or sum(counts.values()) < chosen.count:
            chance = random.Random(f"{chosen.campaign} {chosen.seed} {number}")
            [kind] = chance.choices(list(kinds), list(kinds.values()))
            folder = scratch / str(number)
            for violation in trial(chance, folder, kind):
                violations += 1
                print(
                    f"{chosen.campaign} --seed {chosen.seed} --only {number}: {kind}: {violation}",
                    flush=True,
                )
            number += 1
            if chosen.only is not None:
                print(f"its folder: {folder}")
                break
            shutil.rmtree(folder, ignore_errors=True)
    if chosen.only is None:
        shutil.rmtree(scratch, ignore_errors=True)
    seconds = time.monotonic() - began
    print(
        f"{chosen.campaign}: {sum(counts.values())} in {number} trials, {violations} violations, "
        f"{seconds:.0f} s"
    )
    for what, count in sorted(counts.items()):
        print(f"  {what}: {count}")
    return 1 if violations else 0


def _campaign(name: str, counts: Counter[str]) -> tuple[dict[str, float], Trial]:
    """Return the kinds of trials with their shares, and the trial."""
    if name == "kills":
        wholes: dict[kills.Command, kills.Whole] = {}
        shares = {"run": 0.8, "compare": 0.15, "mix": 0.05}
        return shares, lambda chance, folder, kind: kills.trial(
            chance, folder, wholes, counts, kind
        )
    if name == "damage":
        return damage.KINDS, lambda chance, folder, kind: damage.trial(chance, folder, counts, kind)
    return inputs.KINDS, lambda chance, folder, kind: inputs.trial(chance, folder, counts, kind)


def prepare(folder: Path, kinds: set[str]) -> None:
    """Import the modules of the commands once; its runs are the input of reports."""
    folder.mkdir(parents=True)
    for name, text in (
        ("run.toml", READY),
        ("grid.toml", READY_GRID),
        ("mix.toml", READY_MIX),
        *kills.SOURCES,
    ):
        (folder / name).write_text(text)
    commands = [("run", "run.toml")]
    if kinds & {"compare", "report", "words"}:
        commands += [
            ("compare", "grid.toml", "--jobs", "0"),
            ("report", "runs"),
            ("plot", "runs"),
            ("list",),
        ]
    if kinds & {"mix", "template", "parquet", "gzip"}:
        commands += [("mix", "mix.toml")]
    child.ready(*commands, folder=folder)
    shutil.rmtree(folder / "runs" / "mix", ignore_errors=True)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
