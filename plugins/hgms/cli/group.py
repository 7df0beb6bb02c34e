"""The command line: parses, calls, prints. ``--json`` prints each table as JSON.

Exit codes: 0; 1 if a run or check failed; 2 if the input was wrong; 130 on Ctrl-C (143 on SIGTERM).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from hgms.cli.terminal import host_of
from hgms.config.control_characters import printable
from hgms.config.fingerprinting import FIRST_PARTY, is_library_file
from hgms.plugins import LOG, Host, PluginInfo, describe
from hgms_core import PLUGIN_API, HgmsError, __version__
from hgms_core.errors import PluginError, shorten, unknown_name


class _Warnings(logging.Handler):
    """Library warnings as lines on stderr; only the command line attaches it."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = f"{record.levelname.lower()}: {record.getMessage()}".split("\n")
        click.echo(printable("\n".join(shorten(lines))), err=True)


class _Commands(click.Group):
    """Commands of programs, then of plugins; only the requested program is loaded."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        host = host_of(ctx)
        names = set(host.programs)
        with contextlib.suppress(HgmsError):  # `hgms --help` must work with a broken plugin too
            names.update(self._of_plugins(host))
        return sorted(names)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        host = host_of(ctx)
        return self._of_programs(host, name) or self._of_plugins(host).get(name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (
            args
            and not ctx.resilient_parsing
            and not args[0].startswith("-")
            and self.get_command(ctx, args[0]) is None
        ):
            ctx.fail(str(unknown_name("command", args[0], self.list_commands(ctx))))
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **more: Any) -> Any:
        # torch has created hundreds of thousands of permanent objects. The collector must not
        # search them in every full collection, during the import of plugins and in runs.
        gc.freeze()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # the parent process closed it: it has no reader
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
            elif isinstance(stream, io.TextIOWrapper):
                # On an ASCII terminal ± is written as \\xb1 and causes no traceback.
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        handler = _Warnings(logging.WARNING)
        logger = logging.getLogger("hgms")
        logger.addHandler(handler)
        try:
            return super().invoke(ctx)
        except SystemExit as error:  # click's normal exit is another exception
            if ctx.invoked_subcommand not in host_of(ctx).programs:
                raise  # a plugin's command chooses its exit
            if isinstance(error.__context__, BrokenPipeError):
                raise  # `hgms describe cg | head`: rich exits this way
            raise _Shown(
                f"a component or plugin called sys.exit({error}), but must raise an error instead",
                1,
            ) from error
        except Exception as error:
            shown = None if ctx.params.get("debug") else _shown(error, host_of(ctx))
            if shown is None:
                raise
            raise shown from error
        except KeyboardInterrupt as error:
            click.echo(str(error) or "interrupted", err=True)
            ctx.exit(128 + getattr(error, "number", signal.SIGINT))
        finally:
            logger.removeHandler(handler)

    def _of_programs(self, host: Host, name: str) -> click.Command | None:
        """Return the command of the first program that provides it.

        Commands of third parties come first, so they can replace HGMS's commands.
        """
        for entry in host.programs.get(name, ()):
            command = self._of(host, host.add_program(entry)).get(name)
            if command is not None:
                return command
        return None

    def _of_plugins(self, host: Host) -> dict[str, click.Command]:
        commands: dict[str, click.Command] = {}
        for info, _ in host.complete().implementations("hgms_register_commands"):
            for name, command in ({} if info.program else self._of(host, info)).items():
                if name in host.programs or name in commands:
                    LOG.warning(
                        "plugin %r (%s): the command %r already exists, so this one is not added",
                        info.name,
                        info.owner,
                        name,
                    )
                else:
                    commands[name] = command
        return commands

    def _of(self, host: Host, info: PluginInfo) -> dict[str, click.Command]:
        """Return the commands of one plugin.

        Each plugin adds to a separate group, so a broken plugin does not affect the others.
        """
        group = click.Group()
        for owner, impl in host.implementations("hgms_register_commands"):
            if owner.name == info.name:
                try:
                    with host.watch_plugin(info):
                        impl.function(*[group for _ in impl.argnames])
                except (Exception, SystemExit) as error:
                    host.blame(
                        info,
                        PluginError(
                            "plugin-failed",
                            f"hgms_register_commands raised {describe(error)}",
                            place=(info.name,),
                        ),
                        part=True,
                    )
                    return {}
        return dict(group.commands)


def _line_of_plugin(error: BaseException, host: Host) -> str:
    """Return the innermost line of an error in the code of a third party; "" without one."""
    third_parties = {
        info.module.partition(".")[0] for info in host.infos.values() if not info.program
    } - FIRST_PARTY
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        top = str(frame.f_globals.get("__name__")).partition(".")[0]
        is_local = top not in {*FIRST_PARTY, "__main__"} and not is_library_file(file)
        if top in third_parties or is_local:
            found = f"{Path(file).name}:{number}"
    return found


class _Shown(click.ClickException):
    """Display an HGMS error as click displays its own: message and exit code, no traceback."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        click.echo(printable(f"error: {self.message}"), err=True, file=file)


def _shown(error: Exception, host: Host) -> _Shown | None:
    """Return the message for an error; None for click's own, and for faults of HGMS."""
    if isinstance(error, HgmsError):
        return _Shown(str(error), error.exit_code)
    if isinstance(error, OSError) and error.errno not in (None, errno.EPIPE):
        where = f" {error.filename}" if error.filename is not None else ""
        return _Shown(f"cannot use{where}: {error.strerror}", 1)
    if isinstance(error, OSError | click.ClickException | click.Abort | click.exceptions.Exit):
        return None
    line = _line_of_plugin(error, host)
    if not line:
        return None
    return _Shown(
        f"{describe(error)} ({line})\n"
        "  `hgms check` finds faults of components; `hgms --debug …` shows the traceback",
        1,
    )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    __version__, prog_name="hgms", message=f"%(prog)s %(version)s (plugin API {PLUGIN_API})"
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Bilevel optimization when the lower level has many minimisers: propose, select,
    differentiate, update.
    """
