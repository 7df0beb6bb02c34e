"""The rules by which a page's console blocks are compared and written anew."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))

import transcripts

OUTPUT = """\
[1/2] quadratic, uniform, seed 0: done after 0.6 s
[2/2] quadratic, hg-ms, seed 0: done after 4.1 s
quadratic: 3 outer steps each
                                                                \n\
 method    value ↓       outer steps   seconds   peak MiB   note
 ────────────────────────────────────────────────────────────────
 uniform   1.5 ± 6.4     3             0.1972    293.4
 hg-ms     0.904 ± 3.9   3             2.103     333.8      ahead
                                                                \n\
  3 outer steps, 2.9 s, 781 oracle calls
  runs/quadratic/hg-ms-78f80f8f/seed-0, /somewhere/else/it.toml, hgms 0.1.0, 12.5 MiB on 2026-11-21
"""
SHOWN = """\
...
quadratic: 3 outer steps each

 method    value ↓       outer steps   seconds   peak MiB   note
 ────────────────────────────────────────────────────────────────
 uniform   1.5 ± 6.4     3             ...       ...
 hg-ms     0.904 ± 3.9   3             ...       ...        ahead

  3 outer steps, ... s, 781 oracle calls
  runs/quadratic/hg-ms-.../seed-0, .../it.toml, hgms ..., ... MiB on ...
"""


def test_what_varies_is_masked_and_the_rest_is_shown() -> None:
    assert transcripts.renewed("...\n", OUTPUT, "/somewhere/else") == SHOWN
    again = OUTPUT.replace("2.103     ", "99.7      ").replace("78f80f8f", "0123abcd")
    again = again.replace("0.904 ± 3.9", "0.911 ± 12.5")
    assert not transcripts.differences(SHOWN, transcripts.renewed(SHOWN, again, "/somewhere/else"))


LONG = "first\n" + "".join(f" row {i} of many\n" for i in range(30)) + "\nlast: 7 of 30\n"


TABLE = LONG.replace(" row 6 of many\n", " name\n ─────────\n")
UNKNOWN = "error: unknown 'x' (known: ...)\n"
NAMES = ", ".join(f"name-{i}" for i in range(40))


@pytest.mark.parametrize(
    ("shown", "output", "expected"),
    [
        (
            "first\n...\n row 7 of some\n row 8 of some\n...\nlast: 6 of 30\n",
            LONG,
            "first\n...\n row 7 of many\n row 8 of many\n...\nlast: 7 of 30\n",
        ),
        ("...\nlast ...\n", LONG, "...\nlast: 7 of 30\n"),
        ("first\n...\n", LONG, "first\n...\n"),
        ("...\n", LONG, "...\n"),
        ("...\n name\n row 7 ...\n...\n", TABLE, "...\n name\n ─────────\n row 7 of many\n...\n"),
        # dots inside a line hide nothing unless the line is too long
        ("error: no ... here\n", "error: no such thing here\n", "error: no such thing here\n"),
        (UNKNOWN, UNKNOWN.replace("...", NAMES), UNKNOWN),
        (
            UNKNOWN,
            f"error: unknown 'y' (known: {NAMES})\n",
            f"error: unknown 'y' (known: {NAMES})\n",
        ),
        # no output on the page asks for none
        ("", LONG, ""),
        ("\n", LONG, "\n"),
    ],
)
def test_an_output_keeps_the_authors_cuts_and_renews_what_is_shown(
    shown: str, output: str, expected: str
) -> None:
    assert transcripts.renewed(shown, output) == expected
