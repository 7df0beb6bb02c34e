"""``hgms mix``: parse arguments, call functions, print results."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hgms.cli import (
    device_option,
    json_option,
    plugin_option,
    print_json,
    seed_option,
    set_option,
    track_option,
    trust_option,
)
from hgms.executors import to_stderr
from hgms_core.errors import unknown_name

FILE = click.Path(path_type=Path)
OTHERS = {
    "compare": "hgms_mix.stages.compare.command",
    "export": "hgms_mix.exchange.command",
    "surface": "hgms_mix.surface.command",
}
"""Commands that are imported at their first use: their modules, by name."""


class _Mix(click.Group):
    """A group whose first word may be a configuration: ``hgms mix FILE`` means ``hgms mix all
    FILE``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.list_commands(ctx) and args[0] not in ctx.help_option_names:
            word = args[0]
            if "--demo" in args:
                args = ["demo", *(word for word in args if word != "--demo")]
            elif re.fullmatch(r"[a-z]+", word) and not Path(word).exists():
                ctx.fail(str(unknown_name("stage", word, self.list_commands(ctx))))
            else:
                args = ["all", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *OTHERS]  # in the order of the stages

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in OTHERS:
            return super().get_command(ctx, name)
        return getattr(importlib.import_module(OTHERS[name]), name)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[STAGE] CONFIG [OPTIONS]  |  --demo [OPTIONS]")


@click.group(cls=_Mix, short_help="Learn a mixture of data sources and fine-tune on it.")
def mix() -> None:
    """Learn a data mixture, draw a fine-tuning set from it, fine-tune a language model on this set,
    and evaluate it.

    \b
    hgms mix mix.toml                  all stages
    hgms mix sample mix.toml           up to the stage sample
    hgms mix --demo                    on embedded texts, with a small model, in three minutes
    hgms mix --demo --model NAME       the same with a pretrained model: a folder, or a Hub name

    A stage first runs the earlier stages that are not finished. Finished stages are skipped;
    interrupted stages resume. For the options, see `hgms mix all --help`.
    """


def _stage(name: str, upto: str, text: str) -> None:
    @click.argument("config", type=FILE)
    @set_option
    @seed_option
    @click.option("--method", metavar="LABEL", help="A method of CONFIG, if it is a grid.")
    @click.option("--scale", metavar="NAME", help="A scale of CONFIG, if it is a grid.")
    @click.option("--out", metavar="FOLDER", help="The folder for mix folders.")
    @device_option
    @trust_option
    @track_option
    @plugin_option
    @json_option
    def stage(
        config: Path, sets: Sequence[str], track: Sequence[str], as_json: bool, **choices: Any
    ) -> None:
        from hgms.runs import Progress
        from hgms_mix.stages.config import load
        from hgms_mix.stages.mix import run_mix
        from hgms_mix.stages.summary import show

        settings = load(config, [*sets, *track], **choices)
        with Progress(enabled=not as_json) as view:
            report = run_mix(settings, upto=upto, log=to_stderr, view=view)
        if as_json:
            print_json(report)
        else:
            show(report)

    mix.command(name, help=text)(stage)


_stage("all", "evaluate", "All stages of a mix file: the same as `hgms mix CONFIG`.")
_stage("reweight", "reweight", "Learn the weights of the sources, as `hgms run` does.")
_stage("uncertainty", "uncertainty", "Resample rows: how certain the mixture's direction is.")
_stage("sample", "sample", "Draw the rows to fine-tune on, by the learned weights.")
_stage("finetune", "finetune", "Fine-tune the model on the drawn rows.")
_stage("evaluate", "evaluate", "Losses on the test sets.")


@mix.command("demo", short_help="Compare HG-MS with uniform weights on small texts.")
@click.option(
    "--out", type=FILE, help="Folder for results.  [default: hgms-mix-demo, then the model's name]"
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    help="Mixes of each method.  [default: 3; with --model 1]",
)
@click.option("--model", metavar="NAME", help="A pretrained model: a folder, or a name on the Hub.")
@json_option
def demo(out: Path | None, seeds: int | None, model: str | None, as_json: bool) -> None:
    """Compare HG-MS with uniform weights on three small embedded sources. The same as `hgms mix
    --demo`.
    """
    from hgms.runs import Progress
    from hgms_mix.stages.demo import run_demo, show

    with Progress(enabled=not as_json) as view:
        folder = out or Path(
            "hgms-mix-demo" if model is None else f"hgms-mix-demo-{Path(model).name}"
        )
        outcome = run_demo(
            folder,
            seeds=seeds or (3 if model is None else 1),
            model=model,
            log=to_stderr,
            view=view,
        )
    if as_json:
        print_json(outcome.as_dict())
    else:
        show(outcome, folder)
