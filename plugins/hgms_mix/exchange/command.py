"""``hgms mix export``: parse the options, call the functions, print."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hgms.cli import json_option, plugin_option, print_json, print_table, seed_option, set_option

FILE = click.Path(path_type=Path)


@click.command("export", short_help="Write a drawn sample for another trainer.")
@click.argument("place", metavar="CONFIG_OR_FOLDER", type=FILE)
@click.option(
    "--to", "trainer", required=True, type=click.Choice(["trl"]), help="The trainer to export to."
)
@click.option(
    "--out", "folder", required=True, type=FILE, metavar="DIR", help="The folder to write."
)
@click.option(
    "--mixes", "out", metavar="FOLDER", help="The folder of the mix, if it was written with --out."
)
@set_option
@seed_option
@click.option("--method", metavar="LABEL", help="A method of CONFIG, if it is a grid.")
@click.option("--scale", metavar="NAME", help="A scale of CONFIG, if it is a grid.")
@plugin_option
@json_option
def export(
    place: Path, trainer: str, folder: Path, sets: Sequence[str], as_json: bool, **choices: Any
) -> None:
    """Write a finished sample of hgms mix for another trainer: configuration and rows.

    CONFIG_OR_FOLDER is a mix file, or its folder of hgms mix (with mix.toml). The rows come from
    the stage `sample`.
    """
    from hgms_mix.exchange import trl
    from hgms_mix.exchange.sample import load_sample

    sample = load_sample(place, sets, **choices)
    notes = trl.export(sample, folder)
    rows = [
        {
            "source": name,
            "weight": sample.weights[name],
            "rows": len(drawn),
            "share": sample.shares[name],
        }
        for name, drawn in sample.rows.items()
    ]
    if as_json:
        print_json(
            {
                "trainer": trainer,
                "folder": str(folder),
                "files": trl.FILES,
                "sources": rows,
                "notes": notes,
            }
        )
        return
    print_table(
        ("source", "weight", "rows", "share"),
        [{**row, "weight": f"{row['weight']:.4f}", "share": f"{row['share']:.4f}"} for row in rows],
    )
    for name in trl.FILES:
        click.echo(f"  {folder / name}")
    for note in notes:
        click.echo(f"  {note}")
    click.echo(f"train with it: cd {shlex.quote(str(folder))} && {trl.COMMAND}")
