"""What a method looks like in every picture: a colour that depends on its name alone, and a dash.

Colours come in a set for light pages, one for dark ones, and one that can be seen on both, for a
notebook, whose theme a picture does not know. Most are after Okabe and Ito's, which colour-blind
readers can tell apart; dashes differ, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from attrs import frozen

LIGHT = (
    "#0072B2",
    "#C94F00",
    "#007F5F",
    "#A8447F",
    "#9A6B00",
    "#3D3D3D",
    "#6250C4",
    "#7A8C00",
    "#B3123B",
    "#6B4226",
)
"""Colours of methods on a light background."""
DARK = (
    "#56B4E9",
    "#FF8F4D",
    "#2FCBA0",
    "#EBA0CB",
    "#F0BE4A",
    "#D0D4DA",
    "#A99CFF",
    "#C3D64B",
    "#FF5C77",
    "#C9A27E",
)
"""The same on a dark one."""
EITHER = (
    "#2A86C8",
    "#D9661F",
    "#17906B",
    "#C2619B",
    "#A97B14",
    "#808080",
    "#8070DC",
    "#7F8F14",
    "#DB4560",
    "#A0714C",
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Kinds of lines, for more methods than there are colours."""
# with it, the methods that are most often compared have different colours
_SALT = (13648625).to_bytes(8, "big")


@frozen
class Look:
    """The number of a colour and a dash."""

    colour: int
    dash: str


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """The look of each method. Its colour is that of its name, in every report and picture; its
    dash as well, unless another of these methods has both.

    >>> looks(["uniform", "hg-ms"])["hg-ms"] == looks(["hg-ms", "search"])["hg-ms"]
    True
    """
    chosen: dict[str, Look] = {}
    for label in sorted(set(labels)):
        number = int.from_bytes(
            hashlib.blake2s(label.encode(errors="backslashreplace"), salt=_SALT).digest()[:4], "big"
        )
        dash, colour = divmod(number % (len(DASHES) * len(LIGHT)), len(LIGHT))
        order = [DASHES[(dash + turn) % len(DASHES)] for turn in range(len(DASHES))]
        taken = [look.dash for look in chosen.values() if look.colour == colour]
        chosen[label] = Look(colour, min(order, key=taken.count))
    return chosen
