"""``hgms``, and ``python -m hgms_core``: the command line, started quickly."""

from __future__ import annotations

import gc


def main() -> None:
    """Torch is in memory by now: hundreds of thousands of objects that stay. Without this every full collection goes through
    all of them, while plugins are imported and in runs alike (a quarter of a second of `hgms list`)."""
    gc.freeze()
    from hgms_core import cli

    cli.main()


if __name__ == "__main__":
    main()
