"""A sound plugin file, and what spoils it."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from hgms.cli import group as cli

SOUND = (Path(__file__).parent / "sound_solver.py").read_text(encoding="utf-8")
ENVIRONMENT = ("HGMS_PLUGINS", "HGMS_DISABLE_PLUGINS", "HGMS_STRICT_PLUGINS")


def hgms(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(word) for word in words])


def spoilt(source: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
        source = source.replace(old, new)
    return source


def solver(name: str, *edits: tuple[str, str]) -> str:
    return spoilt(SOUND, ('"mine"', f'"{name}"'), *edits)


def headed(lines: str, name: str = "bad") -> str:
    """A solver's file with lines at its top."""
    return lines + "\n" + solver(name).replace("from __future__ import annotations", "")
