"""Shell completion of kinds, component names and labels, for click's ``shell_complete=``.

A shell runs `hgms` with the incomplete line. If that line is invalid, the command prints no message
and does not fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import click

from hgms.cli.terminal import host_of
from hgms.plugins import KINDS, Registry

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def quietly(complete: Callable[[click.Context, click.Parameter, str], Iterable[str]]) -> Completer:
    """Return the words of ``complete`` that start with the typed text; no words after any error."""

    @functools.wraps(complete)
    def quiet(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        try:
            return [
                word for word in complete(ctx, parameter, incomplete) if word.startswith(incomplete)
            ]
        except Exception:
            return []

    return quiet


@quietly
def kind_names(_ctx: click.Context, _parameter: click.Parameter, _incomplete: str) -> Iterable[str]:
    """The kinds of components."""
    return KINDS


def component_names(*kinds: str) -> Completer:
    """The names of the components of these kinds (of all, if none is named)."""
    return quietly(lambda ctx, _parameter, _incomplete: _names(ctx, *kinds))


@quietly
def kind_then_name(
    ctx: click.Context, parameter: click.Parameter, _incomplete: str
) -> Iterable[str]:
    """For ``[KIND] NAME``: a kind or any name, then the names of that kind."""
    before = ctx.params.get(parameter.name or "") or ()
    return [*KINDS, *_names(ctx)] if not before else _names(ctx, before[0].removesuffix("s"))


def with_commas(complete: Completer) -> Completer:
    """Complete the last word of a comma-separated list."""

    def behind_comma(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        before, comma, word = incomplete.rpartition(",")
        return [
            f"{before}{comma}{name}"
            for name in complete(ctx, parameter, word)
            if name not in before.split(",")
        ]

    return behind_comma


def _names(ctx: click.Context, *kinds: str) -> list[str]:
    registry: Any = Registry(host_of(ctx).complete())
    return sorted(
        {component.name for kind in kinds or (None,) for component in registry.components(kind)}
    )
