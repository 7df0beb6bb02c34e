"""The entry-point group `hgms.mix`: commands below `hgms mix` that other plugins bring."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result
from support.fakes import Site

from hgms.cli import main

ADDED = """
import click

@click.command(short_help="Weigh it.")
@click.argument("what")
def weigh(what):
    click.echo(f"weighed {what}")

@click.command()
def reweight():
    click.echo("not ours")

number = 3
"""


@pytest.fixture
def added(site: Site) -> Site:
    site.module("added_to_mix", ADDED)
    site.install(
        "hgms-added",
        {},
        mix={
            "weigh": "added_to_mix:weigh",
            "reweight": "added_to_mix:reweight",
            "lost": "added_to_mix:nothing",
            "odd": "added_to_mix:number",
        },
    )
    return site


def call(*arguments: str) -> Result:
    from hgms_mix.stages.command import mix

    mix.__dict__.pop("others", None)  # read once in a process
    try:
        return CliRunner().invoke(main, ["mix", *arguments])
    finally:
        mix.__dict__.pop("others", None)


def test_a_command_of_another_plugin_is_carried_out_and_shown(added: Site) -> None:
    assert call("weigh", "it").stdout == "weighed it\n"
    shown = call("--help")
    assert shown.exit_code == 0
    assert "Weigh it." in shown.stdout
    assert "(cannot be loaded)" in shown.stdout
    assert "did you mean 'weigh'?" in call("wiegh", "it").stderr
    # a stage of ours is not replaced
    assert "Learn the weights of the sources" in call("reweight", "--help").stdout


@pytest.mark.parametrize(
    ("name", "why"), [("lost", "has no attribute 'nothing'"), ("odd", "3 is no click command")]
)
def test_a_command_that_cannot_be_loaded_says_so_when_it_is_called(
    name: str, why: str, added: Site
) -> None:
    done = call(name, "mix.toml", "--out", "x")
    assert done.exit_code == 2
    assert f"(hgms.mix: {name})" in done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr
