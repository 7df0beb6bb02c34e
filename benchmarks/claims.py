"""Claims with figures in the README and the documentation, and the table that supports each.

``tables.py`` writes the table ``claims`` of docs/reference/benchmarks.md. The number of seeds comes
from the records.
"""

from __future__ import annotations

import json
from pathlib import Path

from attrs import frozen
from pyarrow import parquet

RESULTS = Path(__file__).resolve().parent / "results"


@frozen
class Claim:
    """A claim: its page, its text, the page and the name of its table, its file of records.

    ``where`` selects the records by their values.
    """

    page: str
    text: str
    table: tuple[str, str]
    file: str
    where: tuple[tuple[str, str], ...] = ()


CLAIMS = (
    Claim(
        "README",
        "`hg-ms-crossfit` is 2.1 points above the best of six baselines on MNIST with 80 % wrong "
        "labels; at 40 and 60 %, it cannot be distinguished from the filter, and is 2.1 and 5.2 "
        "points above the others",
        ("benchmarks-cleaning", "evidence-cleaning"),
        "evidence-cleaning.parquet",
        (("method", "hg-ms-crossfit"),),
    ),
    Claim(
        "README",
        "no method outperforms baselines with fixed θ on MLS-Bench (no claim of equality)",
        ("benchmarks", "evidence-mls"),
        "evidence-mls.parquet",
    ),
    Claim(
        "README",
        "N > 1 has no gain at equal time on MNIST with 80 % wrong labels",
        ("study-results", "equal processor time"),
        "study/cleaning-time.parquet",
    ),
    Claim("README", "the table of the demo", ("benchmarks", "`hgms demo`"), "demo.parquet"),
    Claim(
        "README, Tune",
        "`tune` against its baselines",
        ("benchmarks-zoo", "zoo-tune"),
        "zoo.jsonl",
        (("kind", "tune"),),
    ),
    Claim(
        "Tune",
        "where gradients win and lose against samplers",
        ("benchmarks-tune", "tune-tools"),
        "tune-tools.jsonl",
    ),
)


def seeds(claim: Claim) -> int:
    """Return the number of seeds of the records."""
    path = RESULTS / claim.file
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        rows = parquet.read_table(path).to_pylist()
    return len({row["seed"] for row in rows if all(row[name] == to for name, to in claim.where)})


def rows() -> list[list[str]]:
    """Return the claim, its page, its table and the number of seeds."""
    lines = []
    for claim in CLAIMS:
        page, table = claim.table
        count = seeds(claim)
        shown = str(count) if count >= 10 else f"{count}, stated with the claim"
        lines.append([claim.text, claim.page, f"[{table}]({page}.md)", shown])
    return lines
