"""``hgms mix --demo``: the whole way on embedded texts, HG-MS against uniform weights under one budget, in three minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from attrs import frozen

from hgms_cli import print_table
from hgms_mix import pictures, texts
from hgms_mix.config import MixConfig, read
from hgms_mix.evaluate import UNIFORM
from hgms_mix.summary import Report, carry_out
from hgms_results import Interval, paired
from hgms_run import Progress, RunFolder, read_toml, replace_file

METHOD, REFERENCE = "hg-ms", UNIFORM
TEST = "word-problems"


@frozen(kw_only=True)
class Demo:
    """What the demo found: the reports of its mixes, by method and seed."""

    reports: Mapping[str, Mapping[int, Report]]
    picture: Path | None
    folder: Path

    def losses(self, method: str) -> dict[int, float]:
        """Test losses by seed, a mean over tokens."""
        return {seed: one.content["test"][TEST]["token_loss"]["value"] for seed, one in self.reports[method].items()}

    @property
    def difference(self) -> Interval:
        """HG-MS − uniform over the seeds."""
        return paired(self.losses(METHOD), self.losses(REFERENCE))

    def rows(self) -> list[dict[str, str]]:
        """The table: per method the mean weights and counts of the sources, and the test loss."""
        found = []
        for method, reports in self.reports.items():
            told = [one.content for one in reports.values()]
            row = {"method": method}
            for i, source in enumerate(told[0]["sources"]):
                name = source["source"]
                weight = Interval.of([each["sources"][i]["weight"] for each in told])
                rows = sum(each["sources"][i]["rows"] for each in told) / len(told)
                row[name] = f"{weight.mean:.3f} ({rows:.0f} rows)"
            row["test loss"] = str(Interval.of(list(self.losses(method).values())))
            found.append(row)
        return found

    def as_dict(self) -> dict[str, Any]:
        def spread(interval: Interval) -> dict[str, float | int]:
            return {"mean": interval.mean, "half_width": interval.half_width, "n": interval.count}

        methods = {}
        for method, reports in self.reports.items():
            losses = Interval.of(list(self.losses(method).values()))
            methods[method] = {"test_loss": spread(losses), "mixes": [dict(one.content) for one in reports.values()]}
        return {
            "methods": methods,
            "difference": spread(self.difference),
            "picture": None if self.picture is None else str(self.picture),
            "folder": str(self.folder),
        }

    def print(self) -> None:
        budget = next(iter(self.reports[METHOD].values())).content["budget"]
        click.echo(f"{budget} of reweighting a mix; mean ± half width of the 95 % interval over seeds (more with --json)")
        rows = self.rows()
        print_table(tuple(rows[0]), rows)
        gap = self.difference
        verdict = "lower" if gap.mean < 0 else "higher"
        sure = (
            ""
            if gap.count < 2
            else ", and the interval excludes zero"
            if gap.excludes_zero
            else ", but the interval holds zero"
        )
        click.echo(f"{METHOD}'s test loss − {REFERENCE}'s, by seed: {gap}: {verdict}{sure}")
        if self.picture is not None:
            click.echo(f"  {self.picture}")
        click.echo(f"  {self.folder}")
        click.echo(f"next: put your own files and model into a copy of {self.folder / 'demo.toml'}, then run hgms mix on it")


def configs(out: Path, seeds: int) -> list[MixConfig]:
    """Every mix of the demo: both methods with each seed. What they share is one file, ``demo.toml``."""
    text = files("hgms_mix").joinpath("demo.toml").read_text(encoding="utf-8").replace("FOLDER", (out / "texts").as_posix())
    replace_file(out / "demo.toml", text.encode())
    found = []
    for seed in range(seeds):
        for name in (METHOD, REFERENCE):
            table = read_toml(text, "demo.toml") | {"seed": seed}
            table["run"]["out"] = str(out)
            if name == REFERENCE:
                generator = table["method"]["generator"]
                table["method"] = {"name": name, "generator": {key: generator[key] for key in ("lr", "batch_size", "mode")}}
            found.append(read(table, "demo.toml"))
    return found


def run_demo(
    out: str | Path = "hgms-mix-demo",
    *,
    seeds: int = 3,
    say: Callable[[str], None] = lambda line: None,
    view: Progress | None = None,
) -> Demo:
    """Mixes the embedded texts with both methods and every seed, in folders under ``out``; what is there already is kept."""
    out = Path(out)
    texts.write(out / "texts")
    reports: dict[str, dict[int, Report]] = {METHOD: {}, REFERENCE: {}}
    for config in configs(out, seeds):
        say(f"{config.method_name}, seed {config.seed}")
        reports[config.method_name][config.seed] = carry_out(config, "demo", say=lambda line: say(f"  {line}"), view=view)
    made = Demo(reports=reports, picture=None, folder=out)
    if not reports[METHOD][0].content["pictures"]:
        return made  # matplotlib is not installed; the report says how to get it
    runs = [RunFolder(Path(one.content["stages"]["reweight"]["folder"])).records() for one in reports[METHOD].values()]
    losses = {method: list(made.losses(method).values()) for method in reports}
    return Demo(reports=reports, picture=pictures.against_uniform(runs, losses, out / "demo.png"), folder=out)


__all__ = ["Demo", "configs", "run_demo"]
