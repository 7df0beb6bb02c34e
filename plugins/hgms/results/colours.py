"""Look of a method in every picture: a colour and a dash.

The colour depends only on the method's name.

There is one set of colours for light pages and one for dark pages. Most colours
follow the palette by Okabe and Ito, which colour-blind readers can distinguish. Methods also differ
by dashes.
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
"""Colours of methods on a dark background."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Line styles, for more methods than there are colours."""
# this offset gives different colours to the methods that are most often compared
_SALT = (13648625).to_bytes(8, "big")


@frozen
class Look:
    """Return the position of the method's colour and dash in the lists above."""

    colour: int
    dash: str


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """Return the look of each method.

    The name determines the colour, which is the same in every report and picture. The name also
    determines the dash, unless another of these methods has the same colour and dash.

    Examples
    --------
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
