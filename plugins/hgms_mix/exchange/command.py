"""``hgms mix export`` and ``hgms mix import``: parse the options, call the functions, print."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hgms.cli import json_option, plugin_option, print_json, print_table

FILE = click.Path(path_type=Path)
NAMES = ("axolotl", "datasets", "llamafactory", "ms-swift", "olmo", "trl")


@click.command("export", short_help="Write a drawn sample for another trainer.")
@click.argument("place", metavar="CONFIG_OR_FOLDER", type=FILE)
@click.option(
    "--to", "trainer", required=True, type=click.Choice(NAMES), help="The trainer to export to."
)
@click.option(
    "--out", "folder", required=True, type=FILE, metavar="DIR", help="The folder to write."
)
@click.option(
    "--mixes", "out", metavar="FOLDER", help="The folder of the mix, if it was written with --out."
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the file. Repeatable.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Replace the seed of the file.")
@click.option("--method", metavar="LABEL", help="A method of CONFIG, if it is a grid.")
@click.option("--scale", metavar="NAME", help="A scale of CONFIG, if it is a grid.")
@plugin_option
@json_option
def export(
    place: Path, trainer: str, folder: Path, sets: Sequence[str], as_json: bool, **choices: Any
) -> None:
    """Write a finished sample of hgms mix for another trainer: configuration, rows, and a README
    with the command.

    CONFIG_OR_FOLDER is a mix file, or its folder of hgms mix (with mix.toml). The rows come from
    the stage `sample`.
    """
    from hgms_mix.exchange.folder import TRAINERS
    from hgms_mix.exchange.folder import export as write
    from hgms_mix.exchange.sample import load_sample
    from hgms_mix.exchange.trainer import differences

    sample = load_sample(place, sets, **choices)
    files = write(sample, TRAINERS[trainer], folder)
    rows = [
        {
            "source": part.name,
            "weight": part.weight,
            "rows": len(part.rows),
            "share": sample.shares[part.name],
        }
        for part in sample.parts
    ]
    if as_json:
        notes = differences(sample)
        print_json(
            {
                "trainer": trainer,
                "folder": str(folder),
                "files": files,
                "sources": rows,
                "notes": notes,
            }
        )
        return
    print_table(
        ("source", "weight", "rows", "share"),
        [{**row, "weight": f"{row['weight']:.4f}", "share": f"{row['share']:.4f}"} for row in rows],
    )
    for name in files:
        click.echo(f"  {folder / name}")
    for note in differences(sample):
        click.echo(f"  {note}")
    click.echo(f"train with it: cd {shlex.quote(str(folder))} && {TRAINERS[trainer].command}")


@click.command("import", short_help="Create a mix file from another trainer's configuration.")
@click.argument("file", type=FILE)
@click.option(
    "--from",
    "trainer",
    required=True,
    type=click.Choice(NAMES),
    help="The trainer of the configuration FILE.",
)
@click.option(
    "--out",
    type=FILE,
    default=Path("mix.toml"),
    show_default=True,
    metavar="FILE",
    help="The mix file to write.",
)
@click.option("--validation", metavar="FILE", help="Validation rows, for the mix file.")
@json_option
def import_(file: Path, trainer: str, out: Path, validation: str | None, as_json: bool) -> None:
    """Read the data sets of another trainer's configuration, and write a mix file with them as
    sources.

    Their shares in the rows of the trainer, for its meaning of weights, become the mixture of the
    method `fixed`.
    """
    from hgms_mix.exchange.folder import TRAINERS
    from hgms_mix.exchange.import_mix import write_mix_file

    imported = write_mix_file(TRAINERS[trainer], file, out, validation)
    rows = [
        {
            "source": name,
            "share": share,
            "from": imported.sources[name].get("path") or imported.sources[name]["hub"],
        }
        for name, share in imported.mixture.items()
    ]
    if as_json:
        print_json(
            {"trainer": trainer, "file": str(out), "sources": rows, "notes": list(imported.notes)}
        )
        return
    print_table(
        ("source", "share", "from"), [{**row, "share": f"{row['share']:.4f}"} for row in rows]
    )
    for note in imported.notes:
        click.echo(f"  {note}")
    click.echo(f"  {out}")
