"""Damaged run folders: one file is flipped, cut or replaced; then the run is resumed or reported.

A resume must either raise an error without any change, or end with the result of the undamaged run.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from campaigns import kills, verdict
from campaigns.child import Strike, call
from hgms.store import is_marker

KINDS = {"resume": 0.6, "report": 0.38, "mix": 0.02}


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])


def zero_tail(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    kept = chance.randrange(len(data) + 1)
    path.write_bytes(data[:kept] + bytes(len(data) - kept))


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def repeat(path: Path, chance: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines))
    path.write_bytes(b"".join([*lines[:at], lines[at], *lines[at:]]))


def drop(path: Path, chance: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines))
    path.write_bytes(b"".join([*lines[:at], *lines[at + 1 :]]))


SHAPES = [
    "null",
    "[]",
    "{}",
    "3",
    '"text"',
    "true",
    "[[[]]]",
    "[" * 100_000,
    '{"a":' * 100_000,
    "9" * 10_000,
    "NaN",
    "",
    "\x00" * 50,
    '{"step": "two"}',
    '{"step": -1}',
    '{"step": 1e400, "tensors": 3}',
    '{"step": null, "seconds": null}',
    "\ufeff{}",
]


def shape(path: Path, chance: random.Random) -> None:
    path.write_text(chance.choice(SHAPES) + chance.choice(["", "\n"]))


def value(path: Path, chance: random.Random) -> None:
    """Replace one value in a text file."""
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return flip(path, chance)
    places = list(re.finditer(r"(?<=[:=] )[^\n,{}\[\]]+", text))
    if not places:
        return cut(path, chance)
    place = chance.choice(places)
    other = chance.choice(
        [
            "null",
            "-1",
            "1e308",
            "1e999",
            "true",
            '"text"',
            "[]",
            "{}",
            "9" * 5000,
            "0",
            "3",
            '"../x"',
            '"/etc"',
        ]
    )
    path.write_text(text[: place.start()] + other + text[place.end() :])
    return None


def replace(target: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def replaced(path: Path, chance: random.Random) -> None:
        path.unlink()
        target(path)

    return replaced


def outside_of(path: Path) -> Path:
    """Return the folder next to the working folder of the command."""
    return next(parent for parent in path.parents if parent.name == "work").parent / "outside"


def linked_copy(path: Path, chance: random.Random) -> None:
    """Replace a file by a link to a copy: a write would change a file outside."""
    copy = outside_of(path) / "copy"
    shutil.move(path, copy)
    path.symlink_to(copy)


def part_link(path: Path, chance: random.Random) -> None:
    """Put a link at the path of a temporary file."""
    path.with_name(path.name + chance.choice([".part", ".tmp", ".lock"])).symlink_to(
        outside_of(path) / "precious.json"
    )


DAMAGES: dict[str, tuple[float, Callable[[Path, random.Random], None]]] = {
    "bit flipped": (6, flip),
    "cut": (2, cut),
    "zeros at its end": (1, zero_tail),
    "removed": (1, remove),
    "line repeated": (1, repeat),
    "line dropped": (1, drop),
    "another shape": (2, shape),
    "another value": (3, value),
    "a link to itself": (0.3, replace(lambda path: path.symlink_to(path))),
    "a link to a secret": (0.5, replace(lambda path: path.symlink_to(outside_of(path) / "secret"))),
    "a link to /dev/zero": (0.5, replace(lambda path: path.symlink_to("/dev/zero"))),
    "a pipe": (0.5, replace(os.mkfifo)),
    "a folder": (0.5, replace(os.mkdir)),
    "a link to its copy": (0.5, linked_copy),
    "a link next to it": (0.7, part_link),
}

_begun: dict[tuple[str, ...], tuple[kills.Command, Path, kills.Whole]] = {}


def trial(chance: random.Random, scratch: Path, counts: Counter[str], kind: str) -> Iterator[str]:
    what, begun, whole = _folder(random.Random(chance.randrange(12)), scratch.parent, kind)
    folder = scratch / "work"
    outside = verdict.beside(scratch)
    shutil.copytree(begun, folder, symlinks=True)
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not is_marker(path.name) and path.suffix != ".png"
    )
    files = [path for path in files if path.parent != folder]  # inputs of the user
    if not files:
        return
    path = chance.choice(files)
    [damage] = chance.choices(list(DAMAGES), [weight for weight, _ in DAMAGES.values()])
    DAMAGES[damage][1](path, chance)
    counts[f"{kind}: {damage}"] += 1
    before = verdict.snapshot(folder)
    around = verdict.snapshot(outside)

    if kind == "report":
        suffix = chance.choice(["html", "html", "md", "tex", "parquet"])
        argv = ("report", "runs", "--out", f"page.{suffix}", *chance.choice([(), ("--json",)]))
    else:
        argv = what.again or what.argv
    ending = call(argv, folder, seconds=60.0 if kind == "mix" else 10.0)
    where = f"{what.what}, {path.name} {damage}"
    wrong = list(verdict.faults(ending))
    wrong += [
        f"outside the folder {change}"
        for change in verdict.changed(around, verdict.snapshot(outside), new=True)
    ]
    after = verdict.snapshot(folder)
    if kind == "report":
        written = {name for name in after if name.startswith("page")}
        after = {name: held for name, held in after.items() if name not in written}
        wrong += verdict.changed(before, after, new=True)
        wrong += [
            f"{name} holds the secret"
            for name in sorted(written)
            if verdict.SECRET.encode() in (folder / name).read_bytes()
        ]
    elif ending.code == 2:
        # a restarted stage first writes this to its manifest
        own = ("manifest.json", "manifest.json.part", "mix.toml") if kind == "mix" else ()
        differing = verdict.changed(before, after, new=True)
        wrong += [
            f"rejected, but {change}"
            for change in differing
            if change.split()[0].rpartition("/")[2] not in own
        ]
    elif ending.code == 0:
        left = {
            name: held
            for name, held in kills.left(folder).items()
            if name in whole.left or name not in before
        }
        wrong += [f"accepted, but {change}" for change in kills.compared(whole.left, left)]
    yield from (f"{where}: {change}" for change in wrong[:1])


def _folder(
    chance: random.Random, scratch: Path, kind: str
) -> tuple[kills.Command, Path, kills.Whole]:
    """Return the folder of a command: finished for reports, otherwise interrupted."""
    what = kills.command(
        chance, {"resume": "run", "report": chance.choice(["run", "compare"]), "mix": "mix"}[kind]
    )
    what = _steady(what)
    key = (kind, what.what, *(text for _, text in what.files))
    if key not in _begun:
        place = scratch / f"begun-{len(_begun)}"
        whole = kills.undisturbed(what, place / "whole")
        if kind == "report":
            _begun[key] = (what, place / "whole" / "work", whole)
        else:
            at = chance.randint(whole.ending.operations // 3, whole.ending.operations)
            what.lay(place / "begun" / "work")
            call(what.argv, place / "begun" / "work", seconds=60.0, strike=Strike(at, "after"))
            _begun[key] = (what, place / "begun" / "work", whole)
    return _begun[key]


def _steady(what: kills.Command) -> kills.Command:
    """Return the command with a checkpoint after every step."""
    files = tuple(
        (name, re.sub(r"checkpoint_seconds = \S+", "checkpoint_seconds = 0.0", text))
        for name, text in what.files
    )
    return kills.Command(what.what, files, what.argv, what.again, what.seconds)


__all__ = ["DAMAGES", "KINDS", "trial"]
