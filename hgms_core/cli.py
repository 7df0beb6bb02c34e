"""The command line: parses, calls, prints. Every table is also there as ``--json``.

Leaves with 0, with 1 if a run or check failed, with 2 if the input was wrong, with 130 on Ctrl-C (143 on SIGTERM).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from hgms_core import PLUGIN_API, __version__, plugins, registry
from hgms_core.budget import Budget
from hgms_core.composition import Composition
from hgms_core.errors import HgmsError, PluginError, UnknownComponent, shortened, unknown
from hgms_core.folder import RunFolder
from hgms_core.terminal import json_option, plugin_option, print_json, print_table, track_option, trust_option
from hgms_core.untrusted import parse_toml, printable, read_file

if TYPE_CHECKING:
    from hgms_core.config import RunConfig

BESIDES = {
    "compare": "hgms_core.commands.compare:compare",
    "compat": "hgms_core.commands.compat:compat",
    "check-gradient": "hgms_core.commands.compat:check_gradient",
    "report": "hgms_core.commands.report:report",
    "plot": "hgms_core.commands.report:plot",
    "new": "hgms_core.commands.new:new",
}
"""Our commands that live in modules of their own, imported when they are asked for."""


class _Warnings(logging.Handler):
    """Library warnings as lines on stderr; only the command line attaches it."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(printable(shortened(f"{record.levelname.lower()}: {record.getMessage()}")), err=True)


class _Commands(click.Group):
    """Our own commands, then those of plugins, which are loaded only when one of them can be meant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        with contextlib.suppress(HgmsError):  # `hgms --help` has to work with a broken plugin too
            return sorted({*self.commands, *BESIDES, *self._foreign()})
        return sorted({*self.commands, *BESIDES})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in BESIDES:
            module, _, attribute = BESIDES[name].partition(":")
            found: click.Command = getattr(importlib.import_module(module), attribute)
            return found
        return self.commands.get(name) or self._foreign().get(name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(unknown("command", args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **more: Any) -> Any:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # closed by whoever started us: nobody reads it
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
            elif isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # ± on a terminal of ASCII is \\xb1, not a traceback
        return super().main(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        handler = _Warnings(logging.WARNING)
        logger = logging.getLogger("hgms")
        logger.addHandler(handler)
        try:
            return super().invoke(ctx)
        except HgmsError as error:
            if ctx.params.get("debug"):
                raise
            raise _shown(error) from error
        except OSError as error:
            if ctx.params.get("debug") or error.errno in (None, errno.EPIPE):
                raise
            where = f" {error.filename}" if error.filename is not None else ""
            raise _Shown(f"cannot use{where}: {error.strerror}", 1) from error
        except SystemExit as error:  # click's own way out is another exception
            if ctx.invoked_subcommand not in {*self.commands, *BESIDES}:
                raise  # a plugin's command leaves as it likes
            raise _Shown(f"a component or plugin called sys.exit({error}); it is to raise an error instead", 1) from error
        except KeyboardInterrupt as error:
            click.echo(str(error) or "interrupted", err=True)
            ctx.exit(128 + getattr(error, "number", signal.SIGINT))
        finally:
            logger.removeHandler(handler)

    def _foreign(self) -> dict[str, click.Command]:
        """The plugins' commands. Each plugin adds to a group of its own, so that a broken one cannot spoil the others'."""
        host = plugins.host()
        found: dict[str, click.Command] = {}
        for info, impl in host.implementations("hgms_register_commands"):
            scratch = click.Group()
            try:
                with host.watched(info):
                    impl.function(*[scratch for _ in impl.argnames])
            except (Exception, SystemExit) as error:
                host.blame(info, PluginError(f"hgms_register_commands raised {plugins.describe(error)}"), part=True)
                continue
            for name, command in scratch.commands.items():
                if name in self.commands or name in BESIDES or name in found:
                    plugins.LOG.warning(
                        "plugin %r (%s): there is a command %r already; its own is left out", info.name, info.owner, name
                    )
                else:
                    found[name] = command
        return found


class _Shown(click.ClickException):
    """An error of ours the way click shows its own: a message and an exit code, no traceback."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        click.echo(printable(f"error: {self.message}"), err=True, file=file)


def _shown(error: HgmsError) -> click.ClickException:
    return _Shown(str(error), error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hgms", message=f"%(prog)s %(version)s (plugin API {PLUGIN_API})")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Bilevel optimization when the lower level has many minimisers: propose, select, differentiate, update."""


@main.command("list")
@click.argument("kind", required=False)
@plugin_option
@json_option
def list_components(kind: str | None, files: Sequence[str], as_json: bool) -> None:
    """What there is to choose from: all components, or those of one KIND.

    Kinds: generator, selector, solver, hypergradient, outer, task, method.
    """
    plugins.host(files)
    wanted = registry.kind_called(kind).name if kind else None
    found = registry.default()
    rows = [item.row() for item in found.components(wanted)] + [item.row() for item in found.absent(wanted)]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        if row["status"] != "available":
            row["summary"] = f"[not loaded: {row['install'] or 'see `hgms plugins -v`'}] {row['summary']}"
    print_table(("kind", "name", "plugin", "summary"), rows)


@main.command()
@click.argument("words", metavar="[KIND] NAME", nargs=-1, required=True)
@plugin_option
@json_option
def describe(words: Sequence[str], files: Sequence[str], as_json: bool) -> None:
    """Everything about one component: its fields with types and defaults, and its documentation.

    KIND may be left out where only one component has the NAME.
    """
    plugins.host(files)
    if len(words) > 2:
        raise click.UsageError(f"one KIND and one NAME, not {len(words)} words")
    *kind, name = words
    found = registry.default().get(registry.kind_called(kind[0]).name, name) if kind else _component(name)
    description = _description(found)
    if as_json:
        print_json(description)
        return
    click.echo(f"{found.kind.label} {found.name}  ({found.plugin.owner}, plugin {found.plugin.name!r}, {found.where})\n")
    click.echo(description["doc"] + "\n")
    if "parts" in description:
        import tomlkit

        click.echo(tomlkit.dumps({"method": {"name": found.name, **description["parts"]}}))
        for trait, parts in description["on"].items():
            click.echo(f"On a task with the trait {trait!r} its defaults are\n")
            click.echo(tomlkit.dumps({"method": {"name": found.name, **parts}}))
    elif description["fields"]:
        for row in description["fields"]:
            row["default"] = "(required)" if row["required"] else json.dumps(row["default"])
        print_table(("name", "type", "default"), description["fields"])
    else:
        click.echo("It has no fields.")


def _component(name: str) -> registry.Component:
    """The one component of that name, whatever its kind."""
    known = [item for item in registry.default().components() if item.kind.label]
    hits = [item for item in known if item.name == name]
    if not hits:
        raise UnknownComponent(unknown("component", name, {item.name for item in known}))
    if len(hits) > 1:
        kinds = " or ".join(f"`hgms describe {item.kind.name} {name}`" for item in hits)
        raise UnknownComponent(f"{len(hits)} components are called {name!r}\n  write {kinds}")
    return hits[0]


def _description(found: registry.Component) -> dict[str, Any]:
    import inspect

    from hgms_core import structure

    row = found.row() | {"class": found.where}
    target = found.target
    if isinstance(target, Composition):
        on = {trait: structure.plain(target.with_overrides({}, [trait])) for trait in target.on}
        doc = f"{target.summary}\n\nSource: {target.source}"
        return row | {"doc": doc, "parts": structure.plain(target.parts), "on": on}
    hints = structure.type_hints(target)
    fields = []
    for key, one in structure.init_fields(target).items():
        required = one.default is attrs.NOTHING
        default = None
        if not required:
            factory = one.default if isinstance(one.default, attrs.Factory) else None  # type: ignore[arg-type]
            value = one.default if factory is None else (None if factory.takes_self else factory.factory())
            try:
                default = structure.plain(value, hints[one.name])
            except HgmsError:
                default = f"{value!r}, from Python only"
        fields.append({"name": key, "type": structure.spell(hints[one.name]), "required": required, "default": default})
    return row | {"doc": inspect.cleandoc(target.__doc__ or ""), "fields": fields}


@main.command("plugins")
@click.option("-v", "--verbose", is_flag=True, help="Show errors with their tracebacks.")
@plugin_option
@json_option
def list_plugins(verbose: bool, files: Sequence[str], as_json: bool) -> None:
    """Every plugin found: where it is from, whether it loaded, what it does."""
    host = plugins.Host.load(files, tolerant=True)
    registry.Registry(host)  # what is wrong with components shows only when they are collected
    rows = [info.row() for info in host.infos.values()]
    if as_json:
        print_json(
            [
                row | {"traceback": info.traceback} if verbose else row
                for row, info in zip(rows, host.infos.values(), strict=True)
            ]
        )
        return
    click.echo(f"hgms {__version__}, plugin API {PLUGIN_API}")
    for row in rows:
        row["hooks"] = ", ".join(hook.removeprefix("hgms_") for hook in row["hooks"])
        row["remarks"] = row["install"] or (row["error"] or "").partition("\n")[0] or "; ".join(row["notes"])
    print_table(("name", "distribution", "version", "status", "hooks", "remarks"), rows)
    if verbose:
        for info in host.infos.values():
            said = [*filter(None, [info.error]), *info.notes]
            if said or info.seconds >= 0.1:
                shown = "\n".join(said)
                click.echo(f"\n{info.name} ({info.owner}): {info.status}, imported in {info.seconds:.2f} s")
                click.echo(f"{shown}\n{info.traceback or ''}".strip())


@main.command()
@click.argument("spec", metavar="MODULE:CLASS")
@plugin_option
@json_option
@click.pass_context
def check(ctx: click.Context, spec: str, files: Sequence[str], as_json: bool) -> None:
    """Is a class of yours fit to be a component? MODULE may be a file: ./my_solver.py:MySolver.

    A composition is named in the same way, and asked the checks of methods. In place of MODULE:CLASS a registered name is fine:
    cg, hg-ms; or generator:soba where two kinds have one of the name.
    """
    from hgms_core import check as checks

    kind, target = checks.found(spec, files)
    with contextlib.redirect_stdout(sys.stderr):  # what a component prints must not spoil --json
        results = list(checks.check(target, kind))
    failures = sum(bool(result.fault) for result in results)
    if as_json:
        print_json({"class": spec, "kind": kind.name, "results": [attrs.asdict(result) for result in results]})
    else:
        click.echo(f"{spec}: {kind.one}")
        for result in results:
            what = result.fault or (f"not to be passed: {result.excuse}" if result.excuse else "")
            label = "FAIL" if result.fault else ("but " if result.excuse else "ok  ")
            click.echo(f"  {label} {result.check}{': ' + what if what else ''}")
        excused = sum(bool(result.excuse) for result in results)
        but = f", but {excused} that the class says it is not to pass" if excused else ""
        click.echo((f"{failures} of {len(results)} checks failed" if failures else f"all {len(results)} checks passed") + but)
    ctx.exit(1 if failures else 0)


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Lay a value over the file's. Repeatable.")
@click.option("--seed", type=int, help="Another seed than the file's.")
@click.option("--out", help="Where run folders go.")
@click.option("--resume", is_flag=True, help="Go on from the run's checkpoint.")
@track_option
@trust_option
@plugin_option
@json_option
def run(
    config: Path, sets: Sequence[str], seed: int | None, out: str | None, resume: bool, files: Sequence[str], as_json: bool
) -> None:
    """Run what a CONFIG file describes, into a run folder of its own."""
    plugins.host(files)
    from hgms_core.config import load

    loaded = load(config, sets, seed=seed, out=out)
    from hgms_core.launch import run_config
    from hgms_core.progress import Progress

    if resume:
        _say_nothing_to_resume(loaded)
    with Progress(enabled=not as_json) as view:
        result = run_config(loaded, resume=resume, view=view)
    summary = {**result.summary, "seconds": result.seconds, "folder": str(result.info.folder)}
    if as_json:
        print_json(summary)
        return
    click.echo(f"{summary['task']}, {summary['method']}, seed {summary['seed']}: {summary['status']}")
    for name, value in (summary.get("metrics") or {}).items():
        click.echo(f"  {name}: " + ("not finite" if value is None else f"{value:.6g}"))
    for remark in summary.get("remarks") or []:
        click.echo(f"  note: {remark}")
    calls, steps = summary.get("oracle_calls"), Budget(outer_steps=max(1, summary["outer_steps"]))
    click.echo(f"  {steps}, {result.seconds:.1f} s" + (f", {calls} oracle calls" if calls else ""))
    click.echo(f"  {summary['folder']}")


def _say_nothing_to_resume(config: RunConfig) -> None:
    """A person who asks to go on has a run in mind: if this configuration has none, say so, and which ones there are."""
    from hgms_core.launch import run_path
    from hgms_core.results import difference

    folder = RunFolder(run_path(config))
    if folder.begun:
        return
    click.echo(f"warning: there is nothing to resume in {folder.path}; a new run begins", err=True)
    label = config.run.label or config.method_name
    for path in sorted(folder.path.parent.parent.glob(f"{label}-*/{folder.path.name}/config.toml"))[:5]:
        with contextlib.suppress(HgmsError, UnicodeDecodeError, OSError):
            keys = difference([parse_toml(read_file(path).decode(), path.name), config.resolved()])
            keys = [key for key in keys if key not in ("run.out", "run.label", "run.task_label")]
            what = f"another {', '.join(keys[:5])}" if keys else "another version of the task, or of a plugin's code"
            click.echo(printable(f"  {path.parent} holds a run with {what}"), err=True)


@main.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("hgms-demo"), show_default=True, help="Folder for results."
)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each method.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=54.0,
    show_default=True,
    help="Budget of all runs together.",
)
@json_option
def demo(out: Path, seeds: int, seconds: float, as_json: bool) -> None:
    """HG-MS, its baseline and uniform weights clean noisy digit labels under one budget: a table and pictures in a minute."""
    from hgms_core.demo import run_demo

    result = run_demo(out, seeds=seeds, seconds=seconds, progress=not as_json)
    if as_json:
        print_json(result.as_dict())
        return
    what = "mean ± half width of the 95 % interval, of differences by Holm's rule"
    click.echo(f"{result.seconds:.3g} s a run, {seeds} seeds; {what} (more with --json)")
    rows = result.table.columns
    print_table(tuple(rows[0]), rows)
    for path in result.pictures:
        click.echo(f"  {path}")
    click.echo(f"  {result.folder}")


if __name__ == "__main__":
    main()
