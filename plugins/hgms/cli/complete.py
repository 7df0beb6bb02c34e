"""What a shell offers at the tab key: kinds, names of components, labels. Given to click as
``shell_complete=``.

A shell asks by running `hgms` with the line so far; nothing is printed and nothing fails where
something is wrong with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import click

from hgms.cli.terminal import host_of
from hgms_core.registry import KINDS, Registry

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def quietly(complete: Callable[[click.Context, click.Parameter, str], Iterable[str]]) -> Completer:
    """The words of ``complete`` that begin as what is typed; none where anything goes wrong."""

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
    """The same for the last word of several with commas between them."""

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
