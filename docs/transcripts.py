"""Update the console blocks of pages: ``python docs/transcripts.py [--check] [PAGE …]``.

The script runs every block of a page (tests/docs/run_page.py) and writes the new output of each ``$
hgms …``:

- ``...`` masks values that differ between runs: seconds, memory, versions, dates, absolute paths,
  and the hash in a run folder's name; the warning about the slow import of a plugin is removed;
  the lines that count the finished runs of a comparison (``[3/6] …``) become one line ``...``;
- a line ``...`` of the author skips text, unless the whole output has at most ``SHORT`` lines;
- a line longer than ``WIDE`` characters keeps an author's ``...`` inside it;
- a command without output on the page stays without output.

The tests compare in the same way. Numbers with a decimal point may differ by ``CLOSE``, because
processors round differently and runs amplify this. Differences may differ by this share of the
largest number of their line, numbers after ± by any amount. The width of columns is ignored.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN_PAGE = ROOT / "tests" / "docs" / "run_page.py"

CUT = "..."
SHORT = 12
WIDE = 135
CLOSE = 0.1
ROUNDING = 1e-6
"""Numbers below this are rounding errors and count as equal."""

VARYING_COLUMNS = frozenset({"seconds", "peak MiB", "version"})
PROGRESS = re.compile(r"\[\d+/\d+\] ")
RULE = re.compile(r"\s*─{5,}")
MASKS = (
    (re.compile(r"(outer steps?), [\d.]+ s,"), rf"\1, {CUT} s,"),
    (re.compile(r"\b(after|in) [\d.]+ s\b"), rf"\1 {CUT} s"),
    (re.compile(r"\b[\d.]+ (ms|s|MiB|GiB|MB|GB)(?= |$|[,;)])"), rf"{CUT} \1"),
    (re.compile(r"\bhgms \d+\.\d+\.\d+\w*"), f"hgms {CUT}"),
    (re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?)?"), CUT),
    (re.compile(r"-[0-9a-f]{8}(?=/|\s|$)"), f"-{CUT}"),
)


def masked(output: str, folder: str = "") -> list[str]:
    """Return the lines of an output without varying values and without outer blank lines."""
    lines: list[str] = []
    for line in (
        output.replace(folder + os.sep, CUT + "/").splitlines() if folder else output.splitlines()
    ):
        if not PROGRESS.match(line):
            lines.append(line.rstrip())
        elif lines[-1:] != [CUT]:
            lines.append(CUT)
    _mask_columns(lines)
    for pattern, instead in MASKS:
        lines = [pattern.sub(instead, line).rstrip() for line in lines]
    kept = [line for line, after in pairwise([*lines, ""]) if line or after]
    return kept[1:] if kept and not kept[0] else kept


def _mask_columns(lines: list[str]) -> None:
    for at in range(1, len(lines)):
        if not RULE.fullmatch(lines[at]):
            continue
        names = list(re.finditer(r"\S+(?: \S+)*", lines[at - 1]))
        ends = [following.start() for following in names[1:]] + [None]
        for row in range(at + 1, len(lines)):
            if not lines[row] and not re.match(r" \S", "".join(lines[row + 1 : row + 2])):
                break  # an empty line before further rows separates groups
            for name, end in reversed(list(zip(names, ends, strict=True))):
                cell = lines[row][name.start() : end]
                if name[0] in VARYING_COLUMNS and cell.strip():
                    instead = CUT.ljust(len(cell)) if end is not None else CUT
                    lines[row] = (
                        lines[row][: name.start()]
                        + instead
                        + (lines[row][end:] if end is not None else "")
                    )


def renewed(shown: str, output: str, folder: str = "") -> str:
    """Return the new text for the page, from its old text and the output of the command."""
    if not shown.strip():
        return shown
    old = [line.rstrip() for line in shown.rstrip("\n").splitlines()]
    now = masked(output, folder)
    lines = _narrowed(old, now) if CUT not in old or len(now) <= SHORT else _cut(old, now)
    return "".join(f"{line}\n" for line in lines)


def _narrowed(old: list[str], now: list[str]) -> list[str]:
    """Return all lines; long lines stay as the author shortened them."""
    shortened = [line for line in old if CUT in line and line != CUT]
    return [
        next((short for short in shortened if _stands_for(short, line)), line)
        if len(line) > WIDE
        else line
        for line in now
    ]


def _cut(old: list[str], now: list[str]) -> list[str]:
    """Find the parts that the author shows in the new output, with their old lengths."""
    lines: list[str] = []
    place = 0
    first_cut = old[0] == CUT
    last_cut = old[-1] == CUT
    text = "\n".join(old[int(first_cut) : len(old) - int(last_cut)])
    segments = [
        part.split("\n") for part in re.split(rf"(?m)^{re.escape(CUT)}$\n?", text) if part.strip()
    ]
    segments = [part[:-1] if not part[-1] else part for part in segments]
    for number, part in enumerate(segments):
        if number or first_cut:
            lines.append(CUT)
        if number == len(segments) - 1 and not last_cut:
            place = max(place, len(now) - len(part))
        elif number or first_cut:
            place = _match_of(part[0], now, place)
        length = len(part)
        if not any(map(RULE.fullmatch, part)):  # include the rule under a table's header
            length += sum(RULE.fullmatch(line) is not None for line in now[place : place + length])
        lines += _narrowed(part, now[place : place + length])
        place += length
    return lines + [CUT] * (last_cut or not segments)


def _match_of(line: str, now: list[str], start: int) -> int:
    """Return the position of a shown line: the matching line, or the most similar line."""
    for place in range(start, len(now)):
        if _stands_for(line, now[place]):
            return place
    likeness = [difflib.SequenceMatcher(None, line, candidate).ratio() for candidate in now[start:]]
    return start + max(range(len(likeness)), key=likeness.__getitem__) if likeness else start


def _stands_for(short: str, line: str) -> bool:
    parts = [re.escape(part) for part in " ".join(short.split()).split(CUT)]
    return re.fullmatch(".*?".join(parts), " ".join(line.split())) is not None


def differences(shown: str, wanted: str) -> list[str]:
    """Return the lines in which a page differs from the new text beyond the tolerance."""
    old = _comparable(shown)
    new = _comparable(wanted)
    if len(old) == len(new) and all(_same(a, b) for a, b in zip(old, new, strict=True)):
        return []
    pairs = difflib.ndiff([" ".join(line) for line in old], [" ".join(line) for line in new])
    return [line for line in pairs if not line.startswith("? ")]


def _comparable(text: str) -> list[list[str]]:
    return [re.sub("─{5,}", "─", line).split() for line in text.splitlines() if line.strip()]


def _same(a: list[str], b: list[str]) -> bool:
    if len(a) != len(b):
        return False
    largest = max((abs(number) for number in map(_number, a) if number is not None), default=0.0)
    before = ["", *a]
    return all(
        x == y or _close(x, y, before[i], largest)
        for i, (x, y) in enumerate(zip(a, b, strict=True))
    )


def _close(x: str, y: str, before: str, largest: float) -> bool:
    a = _number(x)
    b = _number(y)
    if a is None or b is None:
        return False
    size = max(abs(a), abs(b))
    # a difference (+0.09) is as uncertain as its operands, which are in the same
    # line
    scale = largest if x[0] in "+-" else size
    return before == "±" or size < ROUNDING or abs(a - b) <= CLOSE * scale


def _number(token: str) -> float | None:
    """Return a number with a decimal point or an exponent.

    Integers are counts and must match exactly.
    """
    match = re.fullmatch(r"[\[(]?([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)[\]),;]*", token)
    return float(match[1]) if match and re.search(r"[.e]", match[1]) else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Writes the output of the console blocks of pages again."
    )
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    arguments = parser.parse_args()
    pages = arguments.pages or [
        page
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        if not {"_build", "examples"} & set(page.parts)
        and "\n```console\n" in page.read_text(encoding="utf-8")
    ]
    stale = False
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                str(RUN_PAGE),
                str(page.resolve()),
                *([] if arguments.check else ["--write"]),
            ]
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False
            )
        stale |= done.returncode != 0
        print(f"{page}: {done.stdout.strip() if done.returncode == 0 else done.stderr.strip()}")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
