"""``python -m hgms_cli``."""

from hgms_cli import main

if __name__ == "__main__":
    main()
