"""``hgms mix --demo``: all stages on embedded texts, with HG-MS and with uniform weights.

Both methods have the same budget. The demo takes three minutes. With ``--model`` it uses a
pretrained model, and takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import tomlkit

from hgms.config.tables import read_toml
from hgms.runs import Progress
from hgms.store import replace_file
from hgms_mix.stages import texts
from hgms_mix.stages.compare.outcome import Outcome
from hgms_mix.stages.config import MixConfig, read
from hgms_mix.stages.graph import Log
from hgms_mix.stages.mix import run_mix
from hgms_mix.stages.training import TUNED

REFERENCE = "uniform"


def show(outcome: Outcome, folder: Path) -> None:
    """Print the comparison, and what a user can do next."""
    outcome.print()
    method = next(label for label in outcome.roles if label != REFERENCE)
    report = next(report for (label, _), report in outcome.reports.items() if label == method)
    tuned = Path(report["stages"]["finetune"]["folder"]) / TUNED
    click.echo(
        f"  {folder}\nnext:\n"
        f"  hgms plot {folder} --mixture --out mixture.svg draws the weights over time\n"
        f"  put your files and model into a copy of {folder / 'demo.toml'}, and run hgms "
        "mix on it\n"
        "  hgms mix export that copy --to trl --out DIR writes its sample for another trainer\n"
        f"  the first tuned model or adapter, in the format of transformers or peft: {tuned}\n"
        "  docs/how-to/mix-data.md: your sources, other methods, and the limits of the figures"
    )


def configs(out: Path, seeds: int, model: str | None = None) -> list[MixConfig]:
    """Return every mix of the demo: both methods for each seed, uniform weights first.

    The shared settings are in one file, ``demo.toml``.
    """
    name = "demo.toml" if model is None else "demo-model.toml"
    text = files("hgms_mix.stages").joinpath(name).read_text(encoding="utf-8")
    if model is not None:
        text = text.replace('"TEMPLATE"', _quote(_template(model))).replace(
            '"MODEL"', _quote(model)
        )
    text = text.replace("FOLDER", _quote((out / "texts").as_posix())[1:-1])
    replace_file(out / "demo.toml", text.encode())
    mixes = []
    for seed in range(seeds):
        for uniform in (True, False):
            table = read_toml(text, "demo.toml") | {"seed": seed}
            table["run"]["out"] = str(out)
            if uniform:
                generator = table["method"]["generator"]
                kept = {key: value for key, value in generator.items() if key != "count"}
                table["method"] = {"name": REFERENCE, "generator": kept}
            mixes.append(read(table, "demo.toml"))
    return mixes


def _quote(text: str) -> str:
    return tomlkit.string(text).as_string()


def _template(model: str) -> str:
    from hgms_mix.lm import BaseModel

    return "model" if BaseModel(path=model).load_tokenizer().chat_template else "plain"


def run_demo(
    out: str | Path = "hgms-mix-demo",
    *,
    seeds: int = 3,
    model: str | None = None,
    log: Log = lambda line: None,
    view: Progress | None = None,
) -> Outcome:
    """Run both methods with every seed on the embedded texts.

    Results are in folders under ``out``; existing results are reused.

    ``model``: a pretrained model, in the form of ``task.model.path``; by default a small model that
    learns from scratch.
    """
    out = Path(out)
    texts.write(out / "texts")
    mixes = configs(out, seeds, model)
    reports = dict[tuple[str, int], Mapping[str, Any]]()
    for config in mixes:
        log(f"{config.method_name}, seed {config.seed}")
        reports[config.method_name, config.seed] = run_mix(
            config, log=lambda line: log(f"  {line}"), view=view
        )
    roles = {mixes[-1].method_name: "", REFERENCE: "floor"}
    return Outcome(reports=reports, failures={}, roles=roles, reference=REFERENCE)
