"""The smallest mix: files of sums, a model of bytes, and `hgms mix` in this process."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from hgms.cli import main

TASK = (Path(__file__).resolve().parents[1] / "tiny_mix.toml").read_text(encoding="utf-8")
"""Two sources, a validation and a test set, and a model of a few thousand parameters."""


def write_rows(name: str, rows: Iterable[Any]) -> None:
    """``name``.jsonl in the working directory."""
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sums(name: str, numbers: Iterable[int], answer: str | None = None) -> None:
    """Rows whose prompts depend on the numbers alone: other numbers have no prompt in common."""
    pairs = ((number // 40, number % 40) for number in numbers)
    write_rows(
        name, ({"prompt": f"{a} + {b} =", "completion": answer or str(a + b)} for a, b in pairs)
    )


def begin(text: str, **numbers: range) -> None:
    """mix.toml, and the files of its sources and sets, in the working directory."""
    usual = {"sums": range(40), "dots": range(100, 160)}
    usual |= {"validation": range(200, 220), "test": range(300, 315)}
    for name, rows in {**usual, **numbers}.items():
        write_sums(name, rows, "." if name == "dots" else None)
    Path("mix.toml").write_text(text)


def hgms(*arguments: object, sets: Iterable[str] = ()) -> Result:
    """The command line with ``--set`` for each of ``sets``."""
    words = [word for pair in sets for word in ("--set", pair)]
    return CliRunner().invoke(main, [*map(str, arguments), *words])


def right(*arguments: object, sets: Iterable[str] = ()) -> Result:
    """A command that succeeds."""
    done = hgms(*arguments, sets=sets)
    assert done.exit_code == 0, done.output
    return done


def report_of(*arguments: object, sets: Iterable[str] = ()) -> Any:
    """What a command that succeeds prints as JSON."""
    return json.loads(right(*arguments, "--json", sets=sets).stdout)


def fails(
    *arguments: object, sets: Iterable[str] = (), parts: Iterable[str] = (), code: int = 2
) -> Result:
    """A command that ends with ``code``, one error and no traceback; ``parts`` (places and values)
    are in what it says.
    """
    done = hgms(*arguments, sets=sets)
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output
    for part in parts:
        assert part in done.stderr, done.stderr
    return done


def stages_of(done: Result) -> list[str]:
    """What each stage said of itself first, without the folder."""
    lines = done.stderr.splitlines()
    return [line.partition(" (")[0] for line in lines if line and line[0] != " "]


def sampled(report: Any) -> list[dict[str, Any]]:
    """The rows that a mix drew."""
    with gzip.open(stage_folder(report, "sample") / "rows.jsonl.gz", "rt") as stream:
        return [json.loads(line) for line in stream]


def stage_folder(report: Any, stage: str) -> Path:
    """The folder of a finished stage."""
    return Path(report["stages"][stage]["folder"])
