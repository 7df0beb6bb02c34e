"""``python -m hgms.cli``."""

from hgms.cli import main

if __name__ == "__main__":
    main()
