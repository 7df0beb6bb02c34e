"""The stage `sample`: select rows for fine-tuning.

The selection follows the learned weights, or the top of a ranking.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hgms.store import Folder
from hgms_mix.stages.apportion import apportion
from hgms_mix.stages.graph import Facts, Log, Stage
from hgms_mix.stages.reweight import Learned
from hgms_mix.stages.settings import Sample

ROWS = "rows.jsonl.gz"
COUNTS = "counts.json"


def draw_sample(work: Folder, *, learned: Learned, sample: Sample, log: Log) -> Facts:
    """Write the drawn rows with their texts, so that any other program can train on them too.

    ``row`` is the number of the row in its source. Some chat templates format the last answer of a
    conversation differently from earlier answers. In this case each answer is a row: answer n of
    row r has the number 1000 r + n, and earlier answers have ``"weight": 0``.
    """
    task = learned.task
    seed = learned.seed
    weights = learned.weights
    tokenizer = task.model.load_tokenizer()
    scores = None
    if sample.of != "sources":
        tables = task.tables(tokenizer, sample.of)
        weights = capacity = {name: table.size for name, table in tables.items()}
        chosen = sample.draw(weights, capacity, seed=seed)
    elif (ranking := learned.ranking()) is not None:
        tables = task.pool(tokenizer, seed)
        parts = ranking.split([table.size for table in tables.values()])
        scores = {name: part.double() for name, part in zip(tables, parts, strict=True)}
        chosen = sample.top(scores)
        capacity = {name: index.size for name, index in task.rows().items()}
    else:
        tables, capacity = draw_rows(learned, sample, tokenizer)
        chosen = {name: torch.arange(table.size) for name, table in tables.items()}
    counts = {name: len(chosen.get(name, ())) for name in capacity}
    short = [] if scores is not None else short_sources(weights, counts, sample.size)
    for line in short:
        log(f"  {line}; the others give the rest")
    rows = list_rows(getattr(task, sample.of), tables, chosen, scores, split=task.split_answers())
    rows = [rows[i] for i in sample.order(len(rows), seed=seed).tolist()]
    log(f"  {len(rows)} rows")
    work.write(ROWS, compress(rows))
    facts = {
        "size": len(rows),
        "of": sample.of,
        "by": "weights" if scores is None else "ranking",
        "weights": weights,
        "counts": counts,
        "capacity": capacity,
        "short": short,
        "sources": task.data_fingerprint()["files"][sample.of],
    }
    work.write(COUNTS, json.dumps(facts, indent=2, ensure_ascii=False).encode())
    return facts


SAMPLE = Stage(name="sample", version="5", function=draw_sample, writes=(ROWS, COUNTS))


def sources_summary(
    sources: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the weights of the report with the number of drawn rows and of all rows."""
    counts = facts["counts"]
    if facts["of"] == "validation":
        sources = [
            {"source": name, "weight": count / facts["size"]} for name, count in counts.items()
        ]
    return [
        {**row, "rows": counts[row["source"]], "of": facts["capacity"][row["source"]]}
        for row in sources
    ]


def draw_rows(
    learned: Learned, sample: Sample, tokenizer: Any
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the drawn rows of each source as tokens, and the number of rows of each source.

    The number counts all rows with an answer. If a source proves to have too few rows, it counts
    only the rows that are not too long.
    """
    key = sample.key(learned.seed)
    capacity = {name: index.size for name, index in learned.task.rows().items()}
    while True:
        counts = apportion(learned.weights, capacity, sample.size)
        wanted = {name: count for name, count in counts.items() if count}
        tables = learned.task.draw(tokenizer, wanted, lambda name: key.fold("source", name))
        fewer = {name: table.size for name, table in tables.items() if table.size < wanted[name]}
        if not fewer:
            return tables, capacity
        capacity |= fewer


def list_rows(
    sources: Mapping[str, Any],
    tables: Mapping[str, Any],
    chosen: Mapping[str, Tensor],
    scores: Mapping[str, Tensor] | None,
    *,
    split: bool = False,
) -> list[dict[str, Any]]:
    """Return the chosen rows, by source and then by position, with their texts.

    ``context`` is the end of a prompt that is the input of an Alpaca row. An answer that is not
    learned has the weight 0. ``split``: each answer of a conversation is a
    row.
    """
    from hgms_mix.lm import examples_at

    rows = []
    for name in sorted(name for name, positions in chosen.items() if len(positions)):
        numbers = tables[name].rows[chosen[name]]
        texts = {
            example.row: example.messages
            for example in examples_at(
                name, sources[name], numbers.sort().values.numpy(), split=split
            )
        }
        for position, row in zip(chosen[name].tolist(), numbers.tolist(), strict=True):
            score = {} if scores is None else {"score": float(scores[name][position])}
            messages = [
                {"role": message.role, "content": message.text}
                | ({"context": message.context} if message.context else {})
                | ({} if message.learned else {"weight": 0})
                for message in texts[row]
            ]
            rows.append({"source": name, "row": row, **score, "messages": messages})
    return rows


def compress(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return compressed JSON lines; the same rows give the same bytes (no time stamp)."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    return gzip.compress("".join(lines).encode(), mtime=0)


def short_sources(weights: Mapping[str, float], counts: Mapping[str, int], size: int) -> list[str]:
    """Return a line for each source with fewer rows than its weight requires."""
    total = sum(weights.values())
    lines = []
    for name, count in counts.items():
        wanted = size * weights[name] / total
        if count < wanted - 1:
            lines.append(
                f"source {name!r} has {count} rows, its weight {weights[name] / total:.3f} asks "
                f"for {round(wanted)}"
            )
    return lines
