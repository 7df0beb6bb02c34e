"""The option ``--seeds`` of the commands of comparisons."""

from __future__ import annotations

import click


def _seeds(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> int | list[int] | None:
    """A count (``5``), a list (``0,1,7``) or a range (``10-14``)."""
    from hgms.comparison.grid import MOST_SEEDS

    if value is None:
        return None
    try:
        if "," not in value and "-" not in value:
            return int(value)
        seeds: list[int] = []
        for part in value.split(","):
            first, dash, last = part.partition("-")
            numbers = range(int(first), int(last if dash else first) + 1)
            if not numbers:
                raise ValueError
            if len(seeds) + numbers.stop - numbers.start > MOST_SEEDS:
                raise click.BadParameter(f"at most {MOST_SEEDS:,} seeds, not {value!r}")
            seeds += numbers
    except ValueError:
        raise click.BadParameter(
            f"write a count (5), a list (0,1,7) or a range (10-14), not {value!r}"
        ) from None
    return seeds


seeds_option = click.option(
    "--seeds", callback=_seeds, metavar="N|LIST", help="A count, a list (0,1,7) or a range (10-14)."
)
"""The option ``--seeds`` for a click command: a count, or a list of seeds."""
