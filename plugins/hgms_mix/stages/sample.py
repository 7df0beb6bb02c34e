"""The stage `sample`: select rows for fine-tuning.

The selection follows the learned weights, or the top of a ranking.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hgms.config.as_table import plain
from hgms.store import replace_file
from hgms_core import ConfigError, Problem
from hgms_mix.stages.apportion import apportion
from hgms_mix.stages.stage import Stage

if TYPE_CHECKING:
    from hgms_mix.stages.work import Work


class Sampling(Stage):
    """The stage `sample`. It writes the drawn rows with their texts, so that any other program can
    train on them too.

    ``row`` is the number of the row in its source. Some chat templates format the last answer of a
    conversation differently from earlier answers. In this case each answer is a row: answer n of
    row r has the number 1000 r + n, and earlier answers have ``"weight": 0``.
    """

    name: ClassVar[str] = "sample"
    version: ClassVar[str] = "3"

    def inputs(self, mix: Work) -> dict[str, Any]:
        settings = plain(mix.config.sample).items()
        return {
            "settings": {
                name: value for name, value in settings if (name, value) != ("of", "sources")
            },
            "seed": mix.config.seed,
        }

    def title(self, mix: Work) -> str:
        return f"{mix.config.sample.size} rows"

    def run(self, mix: Work, folder: Path) -> tuple[Iterable[Path], dict[str, Any]]:
        sample = mix.config.sample
        seed = mix.config.seed
        learned = sample.of == "sources"
        scores = row_scores(mix) if learned else None
        if not learned:
            tables = mix.tables(sample.of)
            weights = capacity = {name: table.size for name, table in tables.items()}
            chosen = sample.draw(weights, capacity, seed=seed)
        elif scores is not None:
            tables = mix.pool
            weights = mix.done["reweight"].facts["weights"]
            chosen = sample.top(scores)
            capacity = {name: index.size for name, index in mix.task.rows().items()}
        else:
            weights = mix.done["reweight"].facts["weights"]
            tables, capacity = drawn(mix, weights)
            chosen = {name: torch.arange(table.size) for name, table in tables.items()}
        counts = {name: len(chosen.get(name, ())) for name in capacity}
        short = [] if scores is not None else moved(weights, counts, sample.size)
        for line in short:
            mix.say(
                f"  {line}; "
                f"{'the set is smaller' if sample.allow_fewer else 'the others give the rest'}"
            )
        split = mix.task.split_answers()
        rows = listed(getattr(mix.task, sample.of), tables, chosen, scores, split=split)
        rows = [rows[i] for i in sample.order(len(rows), seed=seed).tolist()]
        write_rows(folder / "rows.jsonl.gz", rows)
        facts = {
            "size": len(rows),
            "of": sample.of,
            "by": "weights" if scores is None else "ranking",
            "weights": weights,
            "counts": counts,
            "capacity": capacity,
            "short": short,
            "sources": mix.data["files"][sample.of],
        }
        replace_file(
            folder / "counts.json", json.dumps(facts, indent=2, ensure_ascii=False).encode()
        )
        return [folder / "rows.jsonl.gz", folder / "counts.json"], facts

    def summary(self, mix: Work, report: Mapping[str, Any]) -> dict[str, Any]:
        facts = dict(mix.done[self.name].facts)
        counts = facts["counts"]
        capacity = facts["capacity"]
        rows = report["sources"]
        if facts.get("of") == "validation":
            rows = [
                {"source": name, "weight": count / facts["size"]} for name, count in counts.items()
            ]
        sources = [
            {**row, "rows": counts[row["source"]], "of": capacity[row["source"]]} for row in rows
        ]
        return {"sources": sources, "sample": facts}


def drawn(mix: Work, weights: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the drawn rows of each source as tokens, and the number of rows of each source.

    The number counts all rows with an answer. If a source proves to have too few rows, it counts
    only the rows that are not too long.
    """
    sample = mix.config.sample
    key = mix.config.sample._key(mix.config.seed)
    capacity = {name: index.size for name, index in mix.task.rows().items()}
    while True:
        counts = apportion(weights, capacity, sample.size, allow_fewer=sample.allow_fewer)
        wanted = {name: count for name, count in counts.items() if count}
        tables = mix.task.draw(mix.tokenizer, wanted, lambda name: key.fold("source", name))
        if not (
            fewer := {
                name: table.size for name, table in tables.items() if table.size < wanted[name]
            }
        ):
            return tables, capacity
        capacity |= fewer


def row_scores(mix: Work) -> dict[str, Tensor] | None:
    """Return the method's ranking as a score per row of the pool, or None without a ranking.

    The score is NaN for rows without a rank.
    """
    config = mix.config
    method = mix.config.method
    rank = getattr(method, "ranking", None)
    if rank is None:
        return None
    state = mix.state
    unbuilt = Unbuilt(
        lambda: config.task.problem(config.seed, mix.device, getattr(torch, config.run.dtype))
    )
    ranking = rank(unbuilt, state).detach().cpu()
    finished = getattr(method, "finished", None)
    if bool(ranking.isnan().all()) and finished is not None and not finished(state):
        raise ConfigError(
            "budget-too-small",
            f"method {config.method_name!r} ranks rows when it finishes, but its budget of "
            f"{config.budget} ended before",
            place=("budget",),
            hint="increase the budget",
        )
    parts = ranking.split([table.size for table in mix.pool.values()])
    return {name: part.double() for name, part in zip(mix.pool, parts, strict=True)}


class Unbuilt:
    """The problem of a run, built on first access.

    Rankings are mostly stored with the state, and a problem contains a base model.
    """

    def __init__(self, build: Callable[[], Problem]) -> None:
        self._build = functools.cache(build)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._build(), name)


def listed(
    sources: Mapping[str, Any],
    tables: Mapping[str, Any],
    chosen: Mapping[str, Tensor],
    scores: Mapping[str, Tensor] | None,
    *,
    split: bool = False,
) -> list[dict[str, Any]]:
    """Return the chosen rows, by source and then by position, with their texts.

    An answer that is not learned has the weight 0. ``split``: each answer of a conversation is a
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
                | ({} if message.learned else {"weight": 0})
                for message in texts[row]
            ]
            rows.append({"source": name, "row": row, **score, "messages": messages})
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write compressed JSON lines; the same rows give the same bytes (no time stamp)."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    replace_file(path, buffer.getvalue())


def moved(weights: Mapping[str, float], counts: Mapping[str, int], size: int) -> list[str]:
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
