"""Hostile input: valid configurations, grids, data, command lines and run folders with errors."""

from __future__ import annotations

import copy
import gzip
import io
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tomlkit

from campaigns import formats, kills, verdict
from campaigns.child import call
from campaigns.damage import DAMAGES

KINDS = {
    "run": 0.3,
    "compare": 0.13,
    "mix": 0.12,
    "data": 0.08,
    "words": 0.07,
    "report": 0.1,
    "template": 0.05,
    "parquet": 0.05,
    "gzip": 0.05,
}
MEMORY = 3 << 30
"""The maximum memory of a command in bytes."""

VALUES: list[Any] = [
    *(
        0,
        -1,
        1,
        2,
        2**31,
        2**63,
        10**20,
        10**400,
        -(10**30),
        0.0,
        -0.5,
        1e-320,
        1e30,
        1e308,
        float("nan"),
        float("inf"),
        True,
    ),
    *(
        "",
        "none",
        "x",
        "x" * 10_000,
        "é🙂",
        "\u202eabc",
        "\x1b[31mred",
        "a\nb",
        "\x00",
        "../../x",
        "/dev/zero",
        "/dev/stdin",
        "~",
    ),
    *(
        "$HOME",
        "{0}",
        "%s",
        "<script>alert(1)</script>",
        "hg-ms",
        "cg",
        "quadratic",
        "adam",
        "1" + " " * 2000 + "!",
        "60s",
        "1e999 s",
    ),
    *(
        [],
        [[]],
        [1, "a"],
        {},
        [{}],
        {"name": "cg"},
        {"name": 3},
        {"name": "no-such"},
        {"a": {"b": {"c": 1}}},
    ),
    *(
        tomlkit.datetime("1979-05-27T07:32:00Z"),
        tomlkit.date("1979-05-27"),
        tomlkit.time("07:32:00"),
    ),
]

FOLDERS = [
    "runs/../runs",
    "",
    ".",
    "/proc/nothing",
    "/dev/null/x",
    "x" * 300,
    "a\x00b",
    "~nobody-at-all/x",
    "run.toml",
]
"""Values of ``out`` that leave no files outside the working folder."""

Place = tuple[Any, ...]


def leaves(table: Any, place: Place = ()) -> Iterator[Place]:
    """Yield every place in nested tables and lists."""
    for key, below in table.items() if isinstance(table, dict) else enumerate(table):
        yield (*place, key)
        if isinstance(below, dict | list):
            yield from leaves(below, (*place, key))


def mutate(table: dict[str, Any], chance: random.Random) -> None:
    """Insert one error: a value, a key, a table."""
    place = chance.choice(list(leaves(table)))
    holder: Any = table
    for key in place[:-1]:
        holder = holder[key]
    key = place[-1]
    way = chance.random()
    if way < 0.65 or isinstance(holder, list):
        holder[key] = copy.deepcopy(chance.choice(FOLDERS if key == "out" else VALUES))
    elif way < 0.75:
        del holder[key]
    elif way < 0.9:
        letters = list(str(key))
        at = chance.randrange(len(letters))
        letters[at : at + 1] = chance.choice([[], [letters[at]] * 2, ["x"], ["é"], ["."], ['"']])
        holder["".join(letters)] = holder.pop(key)
    elif key != "out":
        holder[key] = chance.choice([[holder[key]], {"name": holder[key]}, {str(key): holder[key]}])


def garble(text: bytes, chance: random.Random) -> bytes:
    """Change, double or cut a piece of the bytes, or insert a deep, long or strange piece."""
    at = chance.randrange(len(text) + 1)
    strange = [
        *(
            b"\xff\xfe",
            b"\x00",
            b"[" * 3000,
            b"{" * 3000,
            b"x = " + b"[" * 5000,
            b"a = " + b"9" * 6000,
            b"'''",
            b'"',
            b"\xef\xbb\xbf",
        ),
        *(
            b"a" + b".a" * 2000 + b" = 1\n",
            b"x = {" + b"a={" * 1000,
            b"\r",
            b"[[task]]\n",
            b"[run]\n",
            b"seed = 1\nseed = 2\n",
            b"\n",
            b"=",
        ),
    ]
    ways: list[Callable[[], bytes]] = [
        lambda: text[:at] + chance.choice(strange) + text[at:],
        lambda: text[:at],
        lambda: text[:at] + text[at + chance.randrange(1, 9) :],
        lambda: text[:at] + text[max(0, at - 20) :],
        lambda: text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :],
    ]
    return chance.choice(ways)()


def wrong(table: dict[str, Any], chance: random.Random) -> bytes:
    """Return the table as TOML with one to three errors."""
    table = copy.deepcopy(table)
    for _ in range(chance.choice([1, 1, 2, 3])):
        mutate(table, chance)
    try:
        text = tomlkit.dumps(table).encode(errors="surrogatepass")
    except Exception:  # values that TOML cannot express
        text = repr(table).encode(errors="replace")
    return garble(text, chance) if chance.random() < 0.2 else text


# --- the inputs
# --------------------------------------------------------------------------------------------------


def of_run(folder: Path, chance: random.Random) -> list[str]:
    what = kills.command(chance, "run")
    [(_, text)] = what.files
    table = tomlkit.parse(text).unwrap()
    if chance.random() < 0.7:  # all fields with defaults
        from hgms.runs import RunConfig

        table = RunConfig.from_dict(table).as_dict()
        table["run"]["label"] = "variant"
    (folder / "run.toml").write_bytes(wrong(table, chance))
    return ["run", "run.toml", *chance.choice([[], [], ["--json"], ["--resume"]])]


def of_compare(folder: Path, chance: random.Random) -> list[str]:
    what = kills.command(chance, "compare")
    [(_, text)] = what.files
    table = tomlkit.parse(text).unwrap()
    if chance.random() < 0.5:
        table |= {
            "metric": "value",
            "reference": "other",
            "scale": {"small": {"method": {"other": {"outer": {"lr": 0.1}}}}},
        }
        table["method"][1]["on"] = {"sphere": {"outer": {"lr": 0.1}}}
    (folder / "grid.toml").write_bytes(wrong(table, chance))
    return [
        "compare",
        "grid.toml",
        "--jobs",
        "0",
        *chance.choice([[], ["--json"], ["--dry-run"], ["--scale", "small"]]),
    ]


def of_mix(folder: Path, chance: random.Random) -> list[str]:
    what = kills.command(chance, "mix")
    for name, text in what.files:
        (folder / name).write_text(text)
    if chance.random() < 0.6:
        (folder / "mix.toml").write_bytes(wrong(tomlkit.parse(what.files[0][1]).unwrap(), chance))
    else:
        name = chance.choice([name for name, _ in kills.SOURCES])
        (folder / name).write_bytes(garble((folder / name).read_bytes(), chance))
    return ["mix", "reweight", "mix.toml"]


def of_data(folder: Path, chance: random.Random) -> list[str]:
    """Return image sets and tables, plain and compressed."""
    form = chance.choice(["idx", "npz", "libsvm"])
    task = chance.choice(["hyper-cleaning", "imbalanced-loss"])
    numbers = np.random.default_rng(chance.randrange(1000))
    images = numbers.integers(0, 256, (300, 4, 4), np.uint8)
    labels = np.arange(300) % 10
    if form == "libsvm":
        task = chance.choice(["ridge-cv", "logistic-cv"])
        text = "".join(f"{i % 3} 1:{i} 2:{i * i % 7} 5:{i % 11}\n" for i in range(60)).encode()
        odd = [
            b"1 99999999:1\n",
            b"1 2147483647:1\n",
            b"1 99999999999999999999:1\n",
            b"1 -1:1\n",
            b"nan 1:nan\n",
            b"1 1:1e999\n",
            b"0\n" * 60,
        ]
        text = text + chance.choice(odd) if chance.random() < 0.5 else garble(text, chance)
        (folder / "table").write_bytes(text)
        name = "libsvm:table"
    elif form == "npz":
        held = {"images": images, "labels": labels}
        dtype = chance.choice([None, ">f4", "f2", "i8", "c8", "U3", "M8[s]", "?", "O"])
        which = chance.choice(["images", "labels"])
        if dtype and chance.random() < 0.7:
            held[which] = held[which].astype(dtype)
        held[which] = held[which][chance.choice([..., slice(0, 0), slice(0, 7), 3, None])]
        stream = io.BytesIO()
        chance.choice([np.savez, np.savez_compressed])(stream, **held)
        data = stream.getvalue()
        (folder / "set.npz").write_bytes(data if chance.random() < 0.5 else garble(data, chance))
        name = "npz:set.npz"
    else:
        for kind, sizes, held in (
            ("images-idx3", [300, 4, 4], images),
            ("labels-idx1", [300], labels.astype(np.uint8)),
        ):
            data = struct.pack(f">{1 + len(sizes)}I", 0x800 + len(sizes), *sizes) + held.tobytes()
            way = chance.random()
            if way < 0.3:
                odd_sizes = [chance.choice([0, 1, 2**16, 2**31, 2**32 - 1, 300]) for _ in sizes]
                data = (
                    struct.pack(f">{1 + len(sizes)}I", 0x800 + len(sizes), *odd_sizes)
                    + held.tobytes()
                )
            elif way < 0.7:
                data = garble(data, chance)
            ending = chance.choice(["", ".gz"])
            if ending:
                data = gzip.compress(data + bytes(chance.choice([0, 0, 1 << 26])), 1)
                data = garble(data, chance) if chance.random() < 0.3 else data
            (folder / f"train-{kind}-ubyte{ending}").write_bytes(data)
        name = "idx:."
    sizes = (
        ", train_size = 60, validation_size = 50, test_size = 50, hidden = 4"
        if task == "hyper-cleaning"
        else ""
    )
    sizes = (
        ", validation_size = 50, test_size = 50, network.hidden = 4"
        if task == "imbalanced-loss"
        else sizes
    )
    text = 'budget = "1 step"\nmethod = { name = "hg-implicit", generator.steps = 2 }\n'
    text += f'task = {{ name = "{task}", dataset = "{name}"{sizes} }}\n'
    (folder / "run.toml").write_text(text)
    return ["run", "run.toml"]


WORDS = [
    "run",
    "compare",
    "report",
    "plot",
    "list",
    "describe",
    "compat",
    "plugins",
    "mix",
    "new",
    "method",
    "solver",
    "hg-ms",
    "cg",
    "run.toml",
    "grid.toml",
    "quadratic",
    "no-such",
    "-",
    "--",
    "--json",
    "--set",
    "--seed",
    "--out",
    "--resume",
    "--debug-not",
    "--help",
    "--jobs",
    "--methods",
    "--task",
    "--budget",
    "--seeds",
    "--metric",
    "--plugin",
    "--scale",
    "--dry-run",
    "0",
    "-1",
    "1,1",
    "0-99999999999",
    "=",
    "a.b=1",
    "method.outer.lr=nan",
    "method.outer.lr=",
    "run.device=mps",
    "seed=1e3",
    "seed=1979-05-27",
    "é🙂",
    "/dev/zero",
    "/dev/null",
    "./plugin.py",
    "./broken.py",
    "secret",
    ".",
    "runs",
    "page.html",
    "page.nope",
]
WORDS += [
    "",
    "2 steps",
    "9" * 400,
    "9" * 5000,
    "run.threads=" + "9" * 26,
    "task.rows=" + "9" * 12,
    "x" * 5000,
    "\x1b[31m",
]
WORDS += ["method.generator={name=" + "[" * 2000]


def of_words(folder: Path, chance: random.Random) -> list[str]:
    """Return a command line of valid words, most of them in the wrong place."""
    for kind in ("run", "compare"):
        for name, text in kills.command(chance, kind).files:
            (folder / name).write_text(text)
    (folder / "plugin.py").write_text("")
    (folder / "broken.py").write_text("raise SystemExit('no')\n")
    first = chance.choice(
        ["run", "compare", "report", "plot", "list", "describe", "compat", "plugins", "mix", "new"]
    )
    usual = {
        "run": ["run.toml"],
        "compare": ["grid.toml", "--jobs", "0"],
        "report": ["runs"],
        "describe": ["solver", "cg"],
    }
    words = [first, *(usual.get(first, []) if chance.random() < 0.7 else [])]
    for _ in range(chance.choice([1, 1, 2, 3])):
        words.insert(chance.randint(1, len(words)), chance.choice(WORDS))
    return words


def of_report(folder: Path, chance: random.Random) -> list[str]:
    """Return third-party run folders with unusual files and names."""
    shutil.copytree(folder.parent.parent / "ready" / "runs", folder / "runs")
    for _ in range(chance.choice([1, 2, 4])):
        files = sorted(
            path for path in (folder / "runs").rglob("*") if path.is_file() and path.name != ".lock"
        )
        path = chance.choice(files)
        if chance.random() < 0.5:
            _toned(path, chance)
        elif chance.random() < 0.8:
            name = chance.choice(
                ["another value", "another shape", "another value", "cut", *DAMAGES]
            )
            DAMAGES[name][1](path, chance)
        else:
            odd = chance.choice(
                [
                    "<script>alert(1)</script>",
                    "# heading",
                    "\x1b[31m",
                    "a|b",
                    "é🙂",
                    "x" * 200,
                    "-rf",
                    "seed-1e3",
                    "a\nb",
                ]
            )
            place = path.parent.parent / odd.replace("/", "")
            if not place.exists():
                path.parent.rename(place)
    suffix = chance.choice(["html", "html", "md", "tex", "parquet"])
    argv = ["report", "runs", "--out", f"page.{suffix}", *chance.choice([[], ["--json"]])]
    return argv if chance.random() < 0.85 else ["plot", "runs", "--out", "page.svg"]


def _toned(path: Path, chance: random.Random) -> None:
    """Return a label, name or error with markup, escapes or quotes; or rows with unusual
    numbers.
    """
    odd = [
        "<script>alert(1)</script>",
        "\\u001b[31m",
        "a|b\\n# head",
        '\\"quoted',
        "{x}",
        "\\\\input{secret}",
        "&amp;",
        "'",
        "$x$",
    ]
    text = path.read_bytes()
    word = chance.choice(
        [
            b"hg-",
            b"quadratic",
            b"value",
            b"upper_loss",
            b"selected",
            b"done",
            b"outer_steps",
            b"python",
            b"steps",
        ]
    )
    at = text.find(word)
    path.write_bytes(
        text if at < 0 else text[:at] + chance.choice(odd).encode() + text[at + len(word) :]
    )


MAKERS = {
    "run": of_run,
    "compare": of_compare,
    "mix": of_mix,
    "data": of_data,
    "words": of_words,
    "report": of_report,
}


def trial(chance: random.Random, scratch: Path, counts: Counter[str], kind: str) -> Iterator[str]:
    folder = scratch / "work"
    outside = verdict.beside(scratch)
    folder.mkdir()
    refused = False
    if kind in formats.MAKERS:
        argv, refused = formats.MAKERS[kind](folder, chance)
    else:
        argv = MAKERS[kind](folder, chance)
    before = verdict.snapshot(folder)
    around = verdict.snapshot(outside)
    running: list[bool] = []

    def enough() -> bool:
        """Return whether the input was accepted: the first row is written, and the rest is
        normal work.
        """
        if any((folder).rglob("steps.jsonl")) and kind != "report":
            running.append(True)
        return bool(running)

    ending = call(argv, folder, memory=MEMORY, enough=enough)
    outcome = (
        "stopped"
        if running
        else {0: "accepted", 1: "failed", 2: "rejected"}.get(ending.code, "other")
    )
    counts[f"{kind}: {outcome}"] += 1
    faults = list(verdict.faults(ending, stopped=bool(running)))
    if refused and ending.code != 2:
        faults.append(f"an invalid input is {outcome}, exit code {ending.code}")
    faults += [
        f"outside the folder {fault}"
        for fault in verdict.changed(around, verdict.snapshot(outside), new=True)
    ]
    after = verdict.snapshot(folder)
    out = argv[argv.index("--out") + 1] if "--out" in argv[:-1] else ""
    faults += [
        fault for fault in verdict.changed(before, after) if not out or not fault.startswith(out)
    ]
    for path in folder.glob("page*"):
        if path.is_file():
            text = path.read_bytes()
            if verdict.SECRET.encode() in text:
                faults.append(f"{path.name} holds the secret")
            if path.suffix == ".html" and b"<script>alert(1)" in text:
                faults.append(f"{path.name} runs a stranger's script")
    for fault in faults[:1]:
        yield f"hgms {' '.join(word[:40] for word in argv)}: {fault}"


__all__ = ["KINDS", "trial"]
