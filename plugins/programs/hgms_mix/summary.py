"""Carries a mix out and says what came of it: a table, report.json and a picture."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import tomlkit
from attrs import frozen

from hgms_cli import print_table
from hgms_core import CheckpointError, MissingExtra
from hgms_mix import losses, pictures
from hgms_mix.config import MixConfig, comparable
from hgms_mix.mix import STAGES, Mix, mix_path
from hgms_run import DiskError, Interrupted, Progress, RunFolder, plain, replace_file

UNIFORM = "uniform"


@frozen(kw_only=True)
class Report:
    """What a mix came to: ``report.json``."""

    content: Mapping[str, Any]

    def as_dict(self) -> Mapping[str, Any]:
        return self.content

    def print(self) -> None:
        """The tables for a person."""
        told = self.content
        click.echo(
            f"{told['name']}: {told['method']}, seed {told['seed']}, {told['outer_steps']} outer steps, {told['seconds']:.1f} s"
        )
        columns = ("source", "weight", "rows", "of")
        print_table(
            columns if "sample" in told else columns[:2],
            [{**row, "weight": f"{row['weight']:.4f}"} for row in told["sources"]],
        )
        rows = list(_losses(told.get("test", {})))
        if rows:
            print_table(tuple(rows[0]), rows)
        for name, found in told.get("benchmarks", {}).items():
            click.echo(f"  {name}: {_benchmark(found)}")
        for path in told["pictures"]:
            click.echo(f"  {path}")
        for note in told["notes"]:
            click.echo(f"  {note}")
        click.echo(f"  {told['folder']}")


def carry_out(
    config: MixConfig,
    name: str,
    *,
    upto: str = "evaluate",
    say: Callable[[str], None] = lambda line: None,
    view: Progress | None = None,
) -> Report:
    """The stages up to ``upto``, then the report of all that is there.

    Raises:
        Interrupted: Ctrl-C; the message says how to go on.
        CheckpointError: another process works on the same mix, or something in its folder is damaged.
        DiskError: something cannot be written; what is done is kept.
    """
    folder = mix_path(config, name)
    mix = Mix(config, folder, say, view or Progress(enabled=False))
    mix.check(upto)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        replace_file(folder / "mix.toml", tomlkit.dumps(resolved(config)).encode())
        try:
            mix.run(upto)
        except KeyboardInterrupt as error:
            reason = str(error).splitlines()[0] if str(error) else "interrupted"
            at = next((stage for stage in STAGES if stage not in mix.done), upto)
            told = f"{reason}\n  in stage {at}; run the same command again to go on from there"
            raise Interrupted(told, getattr(error, "number", signal.SIGINT)) from None
        except DiskError as error:
            # the run's own message names an option that `hgms run` has
            raise DiskError(str(error).replace(" (hgms run: with --resume)", "")) from error
        return report(mix, name)


def resolved(config: MixConfig) -> dict[str, Any]:
    """The configuration with every value of every field; it can be given to ``hgms mix`` again."""
    table = config.resolved()
    judge = table["evaluate"].get("judge")
    if isinstance(judge, dict):
        table["evaluate"]["judge"] = {key: value for key, value in judge.items() if value != "none"}
    return table


def report(mix: Mix, name: str) -> Report:
    """Everything about the stages that are done, written to report.json beside a picture of the mixture."""
    config, done, notes = mix.config, mix.done, []
    learned = done["reweight"].facts
    content: dict[str, Any] = {
        "name": name,
        "method": learned["method"],
        "seed": config.seed,
        "budget": str(config.budget),
        "folder": str(mix.folder),
        "comparable": comparable(config),
        "outer_steps": learned["outer_steps"],
        "seconds": learned["seconds"],
        "metrics": learned["metrics"],
        "sources": [{"source": source, "weight": weight} for source, weight in learned["weights"].items()],
        "stages": {stage: {"key": one.key, "folder": str(one.path)} for stage, one in done.items()},
    }
    if "sample" in done:
        sampled = content["sample"] = dict(done["sample"].facts)
        for row in content["sources"]:
            row |= {"rows": sampled["counts"][row["source"]], "of": sampled["capacity"][row["source"]]}
    if "finetune" in done:
        content["finetune"] = dict(done["finetune"].facts)
    if "evaluate" in done:
        found = done["evaluate"]
        content["test"] = {test: dict(row) for test, row in found.facts["test"].items()}
        content["benchmarks"] = found.facts["benchmarks"]
        for test, row in content["test"].items():
            row["against_uniform"] = _against_uniform(mix, content["comparable"], test)
        kept = json.dumps(plain(_scores(content)), indent=2, ensure_ascii=False)
        replace_file(done["reweight"].path / "scores.json", kept.encode())
    records = RunFolder(done["reweight"].path).records()
    try:
        content["pictures"] = [str(pictures.mixture(records, mix.folder / "mixture.png"))]
    except MissingExtra as missing:
        content["pictures"] = []
        notes.append(f"no picture: {str(missing).replace(chr(10) + '  ', '; ')}")
    content["notes"] = notes
    replace_file(mix.folder / "report.json", json.dumps(plain(content), indent=2, ensure_ascii=False).encode())
    return Report(content=content)


def _against_uniform(mix: Mix, same: str, test: str) -> dict[str, Any] | None:
    """Our loss − that of uniform weights on the same rows, where the same mix was made with them: same file, seed, folder."""
    if mix.config.method_name == UNIFORM:
        return None
    ours = _kept(mix.folder, test)
    for other in sorted(mix.folder.parent.parent.glob(f"{UNIFORM}-*/{mix.folder.name}")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            told = json.loads((other / "report.json").read_bytes())
            theirs = _kept(other, test)
            if told["comparable"] == same and theirs["digest"] == ours["digest"]:
                return losses.difference(losses.RowLosses.of(ours), losses.RowLosses.of(theirs), seed=mix.config.seed)
    return None


def _scores(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What `hgms report` shows of the tuned model beside the run's own metrics: benchmarks, then test losses."""
    metrics: dict[str, float] = {}
    higher: dict[str, bool] = {}
    for name, found in content["benchmarks"].items():
        if isinstance(found, Mapping) and found.get("score") is not None:
            share = found.get("unit") == "percent"
            key = f"{name}_accuracy" if share else f"{name}_score"
            metrics[key], higher[key] = found["score"] / (100 if share else 1), True
    for name, row in content["test"].items():
        key = f"tuned_{name}_loss"
        metrics[key], higher[key] = row["token_loss"]["value"], False
    return {"metrics": metrics, "higher_is_better": higher}


def _kept(folder: Path, test: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluate" / f"losses-{test}.json").read_bytes())
    return found


def spell(interval: Mapping[str, float] | None) -> str:
    """A value with its interval.

    >>> spell({"value": 1.25, "low": 1.2, "high": 1.31})
    '1.2500 [1.2000, 1.3100]'
    """
    if interval is None:
        return ""
    return "{value:.4f} [{low:.4f}, {high:.4f}]".format(**interval)


def _losses(tests: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    shown = any(row.get("against_uniform") for row in tests.values())
    for name, row in tests.items():
        beside = {"token loss − uniform's": spell(row["against_uniform"])} if shown else {}
        yield {
            "test set": name, "rows": row["rows"], "token loss": spell(row["token_loss"]),
            "example loss": spell(row["example_loss"]), **beside,
        }  # fmt: skip


def _benchmark(found: Mapping[str, Any]) -> str:
    """A score with its interval, as hgms_evaluation gives them.

    >>> _benchmark({"score": 62.5, "interval": {"low": 59.85, "high": 65.07, "kind": "wilson"}, "questions": 1319})
    '62.50 [59.85, 65.07]'
    """
    interval = found.get("interval") or {}
    spread = f" [{interval['low']:.2f}, {interval['high']:.2f}]" if {"low", "high"} <= set(interval) else ""
    return "not scored" if found.get("score") is None else f"{found['score']:.2f}{spread}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise CheckpointError(f"another process works on {folder}; wait for it, or choose another --out") from None
