"""``hgms mix --demo``: all stages on embedded texts, with HG-MS and with uniform weights.

Both methods have the same budget. The demo takes three minutes. With ``--model`` it uses a
pretrained model, and takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
import click
import tomlkit
from attrs import frozen

from hgms.cli import print_table
from hgms.config.tables import read_toml
from hgms.results import Interval, paired
from hgms.runs import Progress, RunFolder
from hgms.store import replace_file
from hgms.uncertainty import Certainty, in_words, over_seeds
from hgms_mix.stages import pictures, texts
from hgms_mix.stages.config import MixConfig, read
from hgms_mix.stages.evaluate import UNIFORM
from hgms_mix.stages.graph import Log
from hgms_mix.stages.mix import run_mix
from hgms_mix.stages.summary import spell
from hgms_mix.stages.training import TUNED

REFERENCE = UNIFORM
TEST = "word-problems"


@frozen(kw_only=True)
class Demo:
    """The reports of the demo's mixes, by method and seed."""

    method: str
    reports: Mapping[str, Mapping[int, Mapping[str, Any]]]
    picture: Path | None
    folder: Path

    def losses(self, method: str) -> dict[int, float]:
        """Return the test losses by seed, as means over tokens."""
        return {
            seed: report["test"][TEST]["token_loss"]["value"]
            for seed, report in self.reports[method].items()
        }

    @property
    def difference(self) -> Interval:
        """HG-MS − uniform over the seeds."""
        return paired(self.losses(self.method), self.losses(REFERENCE))

    @property
    def certainty(self) -> Certainty | None:
        """Uncertainty of the learned weights over seeds; None for one seed."""
        runs = [
            {row["source"]: row["weight"] for row in report["sources"]}
            for report in self.reports[self.method].values()
        ]
        return over_seeds(runs, dict.fromkeys(runs[0], 1 / len(runs[0]))) if len(runs) > 1 else None

    def rows(self) -> list[dict[str, str]]:
        """Return the table: mean weights, row counts of the sources, test loss, per method."""
        rows = []
        for method, reports in self.reports.items():
            row = {"method": method}
            for sources in zip(*(report["sources"] for report in reports.values()), strict=True):
                weight = Interval.of([source["weight"] for source in sources])
                count = sum(source["rows"] for source in sources) / len(sources)
                row[sources[0]["source"]] = f"{weight.mean:.3f} ({count:.0f} rows)"
            row["test loss"] = str(Interval.of(list(self.losses(method).values())))
            rows.append(row)
        return rows

    def as_dict(self) -> dict[str, Any]:
        def spread(interval: Interval) -> dict[str, float | int]:
            return {"mean": interval.mean, "half_width": interval.half_width, "n": interval.count}

        methods = {}
        for method, reports in self.reports.items():
            losses = Interval.of(list(self.losses(method).values()))
            methods[method] = {
                "test_loss": spread(losses),
                "mixes": [dict(report) for report in reports.values()],
            }
        picture = None if self.picture is None else str(self.picture)
        return {
            "methods": methods,
            "difference": spread(self.difference),
            "picture": picture,
            "folder": str(self.folder),
        }

    def print(self) -> None:
        first = next(iter(self.reports[self.method].values()))
        click.echo(
            f"{first['budget']} of reweighting a mix; mean ± half width of the 95 % interval "
            "over seeds (more with --json)"
        )
        rows = self.rows()
        print_table(tuple(rows[0]), rows)
        gap = self.difference
        verdict = "lower" if gap.mean < 0 else "higher"
        sure = ""
        if gap.count >= 2:
            sure = (
                ", and the interval excludes zero"
                if gap.excludes_zero
                else ", but the interval holds zero"
            )
        click.echo(f"{self.method}'s test loss − {REFERENCE}'s, by seed: {gap}: {verdict}{sure}")
        if gap.count < 2:
            rows = first["test"][TEST]
            click.echo(
                f"  over the {rows['rows']} test rows of this seed: "
                f"{spell(rows['against_uniform'])} (95 % interval, paired)"
            )
        if (certainty := self.certainty) is not None:
            click.echo(f"{self.method}'s weights {in_words(certainty)}")
        if self.picture is not None:
            click.echo(f"  {self.picture}")
        click.echo(f"  {self.folder}")
        click.echo("next:")
        click.echo(
            f"  put your own files and model into a copy of {self.folder / 'demo.toml'}, and run "
            "hgms mix on that"
        )
        tuned = Path(first["stages"]["finetune"]["folder"]) / TUNED
        click.echo(
            "  hgms mix export that copy --to trl --out DIR hands its sample to a trainer you "
            "already use"
        )
        click.echo(f"  what was tuned first, in transformers' or peft's format: {tuned}")
        click.echo(
            "  docs/how-to/mix-data.md: your own sources, other methods, and what the figures do "
            "not say"
        )


def configs(out: Path, seeds: int, model: str | None = None) -> list[MixConfig]:
    """Return every mix of the demo: both methods for each seed, uniform weights first.

    The shared settings are in one file, ``demo.toml``.
    """
    name = "demo.toml" if model is None else "demo-model.toml"
    text = files("hgms_mix.stages").joinpath(name).read_text(encoding="utf-8")
    if model is not None:
        text = text.replace('"TEMPLATE"', _quoted(_template(model))).replace(
            '"MODEL"', _quoted(model)
        )
    text = text.replace("FOLDER", _quoted((out / "texts").as_posix())[1:-1])
    replace_file(out / "demo.toml", text.encode())
    mixes = []
    for seed in range(seeds):
        for uniform in (True, False):
            table = read_toml(text, "demo.toml") | {"seed": seed}
            table["run"]["out"] = str(out)
            if uniform:
                generator = table["method"]["generator"]
                kept = {key: value for key, value in generator.items() if key != "count"}
                table["method"] = {"name": REFERENCE, "generator": kept}
            mixes.append(read(table, "demo.toml"))
    return mixes


def _quoted(text: str) -> str:
    return tomlkit.string(text).as_string()


def _template(model: str) -> str:
    from hgms_mix.lm import BaseModel

    return "model" if BaseModel(path=model).load_tokenizer().chat_template else "plain"


def run_demo(
    out: str | Path = "hgms-mix-demo",
    *,
    seeds: int = 3,
    model: str | None = None,
    log: Log = lambda line: None,
    view: Progress | None = None,
) -> Demo:
    """Run both methods with every seed on the embedded texts.

    Results are in folders under ``out``; existing results are reused.

    ``model``: a pretrained model, in the form of ``task.model.path``; None: a small model that
    learns from scratch.
    """
    out = Path(out)
    texts.write(out / "texts")
    mixes = configs(out, seeds, model)
    method = mixes[-1].method_name
    reports: dict[str, dict[int, Mapping[str, Any]]] = {method: {}, REFERENCE: {}}
    for config in mixes:
        log(f"{config.method_name}, seed {config.seed}")
        reports[config.method_name][config.seed] = run_mix(
            config, log=lambda line: log(f"  {line}"), view=view
        )
    demo = Demo(method=method, reports=reports, picture=None, folder=out)
    if not reports[method][0]["pictures"]:
        return demo  # matplotlib is not installed; the report explains how to install it
    runs = [RunFolder(Path(report["folder"])).records() for report in reports[method].values()]
    losses = {method: list(demo.losses(method).values()) for method in reports}
    return attrs.evolve(demo, picture=pictures.against_uniform(runs, losses, out / "demo.png"))
