"""The entry-point group `hgms.mix`: commands below `hgms mix` that other plugins bring."""

from __future__ import annotations

import pytest
from support.fakes import Site
from support.small_mixes import fails, right

from hgms_mix.stages.command import mix

ADDED = """
import click

@click.command(short_help="Weigh it.")
@click.argument("what")
def weigh(what):
    click.echo(f"weighed {what}")

@click.command()
def reweight():
    click.echo("not ours")
"""


def test_a_command_of_another_plugin_is_carried_out_and_one_that_cannot_be_loaded_says_so(
    site: Site, request: pytest.FixtureRequest
) -> None:
    names = {"weigh": "weigh", "reweight": "reweight", "lost": "nothing"}
    site.module("added_to_mix", ADDED)
    commands = {name: f"added_to_mix:{function}" for name, function in names.items()}
    site.install("hgms-added", {}, mix=commands)
    # which are read once in a process
    request.addfinalizer(lambda: mix.__dict__.pop("others", None))
    mix.__dict__.pop("others", None)
    assert right("mix", "weigh", "it").stdout == "weighed it\n"
    # a stage of ours is not replaced
    assert "Learn the weights of the sources" in right("mix", "reweight", "--help").stdout
    fails("mix", "lost", "x", parts=["(hgms.mix: lost)", "has no attribute 'nothing'"])
