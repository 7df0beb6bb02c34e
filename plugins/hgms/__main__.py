"""``python -m hgms`` is the command ``hgms``."""

from __future__ import annotations

from hgms.cli import main

if __name__ == "__main__":
    main()
