"""Evaluate the tuned model of a finished mix on GSM8K, MATH and MT-Bench, as the paper does.

    python benchmarks/llm/evaluate.py FOLDER … --settings FILE
    python benchmarks/llm/evaluate.py FOLDER --benchmarks gsm8k --limit 100

FOLDER is the folder of `hgms mix` (with mix.toml). FILE is a TOML file with the fields of
``evaluation.Evaluate``; the files of the paper are in benchmarks/paper/llm/evaluation. Answers and
scores are in ``FOLDER/benchmarks-<key>``; the same command resumes an interrupted evaluation.
The script also adds the scores to ``FOLDER/scores.json``, which `hgms report` reads. A later
`hgms mix` replaces this file: then repeat the script, which reuses the stored answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation import Evaluate, Judge

from hgms.arguments import errors_at, require
from hgms.store import Folder, json_digest, json_object, replace_file
from hgms_core import ConfigError, HgmsError
from hgms_core.components import evolve
from hgms_core.errors import CheckpointError
from hgms_mix.stages import TunedModel, claim, fingerprint, load


def read_settings(path: Path | None, template: str) -> Evaluate:
    """Return the settings in a file; ``template`` (of fine-tuning) is the default of its field."""
    if path is None:
        return Evaluate(template=template)
    try:
        table = {"template": template, **tomllib.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError) as error:
        raise ConfigError("unreadable-file", str(error), place=(str(path),)) from None
    with errors_at(str(path)):
        if table.get("judge") == "none":
            table["judge"] = None
        elif "judge" in table:
            with errors_at("judge"):
                table["judge"] = Judge(**table["judge"])
        return Evaluate(**table)


def tuned_folder(folder: Path, model: TunedModel) -> Folder:
    """Return the folder of the stage `finetune` of the last `hgms mix` command.

    Raises
    ------
    CheckpointError
        The mix is not finished, or mix.toml has another model or adapter.
    """
    path = folder / "report.json"
    stages = json_object(path)["stages"] if path.exists() else {}
    require(
        "finetune" in stages,
        "unfinished-run",
        "the folder has no tuned model",
        place=(str(folder),),
        hint="finish the mix first: hgms mix FILE",
        error=CheckpointError,
    )
    stage = stages["finetune"]
    tuned = Folder(folder / Path(stage["folder"]).name, stage["key"])
    expected = json.loads(json.dumps(fingerprint(model)))
    require(
        tuned.is_done() and tuned.manifest().facts["inputs"]["model"] == expected,
        "other-settings",
        "the tuned model has another base model or adapter than mix.toml",
        place=(str(tuned.path),),
        hint="finish the mix first: hgms mix FILE",
        error=CheckpointError,
    )
    return tuned


def evaluate(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the tuned model of a mix, and return the results by benchmark."""
    path = folder / "mix.toml"
    config = load(path, device=options.device)
    task: Any = config.task
    evaluation = read_settings(options.settings, task.template)
    given = {name: getattr(options, name) for name in ("benchmarks", "limit", "batch_size")}
    given = {name: value for name, value in given.items() if value is not None}
    with errors_at("options"):
        evaluation = evolve(evaluation, **given)
    evaluation.check()
    model = TunedModel.of(config)
    with claim(folder):
        tuned = tuned_folder(folder, model)
        key = json_digest([tuned.key, *evaluation.generation])
        work = folder / f"benchmarks-{key[:8]}"
        if options.rate:
            results = evaluation.rate(work, print)
        else:
            loaded = model.load_tuned(tuned.path / "tuned")
            results = evaluation.run(loaded, model.tokenizer, work, print)
        add_scores(folder / "scores.json", results)
    return results


def add_scores(path: Path, results: Mapping[str, Any]) -> None:
    """Add scores to the file that `hgms report` reads; accuracies are between 0 and 1."""
    content = json_object(path) if path.exists() else {"metrics": {}, "higher_is_better": {}}
    for name, result in results.items():
        if result["score"] is not None:
            share = result["unit"] == "percent"
            key = f"{name}_accuracy" if share else f"{name}_score"
            content["metrics"][key] = result["score"] / (100 if share else 1)
            content["higher_is_better"][key] = True
    replace_file(path, json.dumps(content, indent=2, ensure_ascii=False).encode())


def line_of(name: str, result: Mapping[str, Any]) -> str:
    """Format a score with its interval.

    Examples
    --------
    >>> line_of("gsm8k", {"score": 62.5, "interval": {"low": 59.85, "high": 65.07}})
    'gsm8k: 62.50 [59.85, 65.07]'
    """
    if result["score"] is None:
        return f"{name}: not scored"
    interval = result["interval"]
    return f"{name}: {result['score']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    parser.add_argument("--settings", metavar="FILE", type=Path)
    parser.add_argument(
        "--benchmarks", metavar="NAMES", type=lambda names: names.split(","), help="by comma"
    )
    parser.add_argument("--limit", type=int, help="questions of each benchmark, from the first")
    parser.add_argument("--batch-size", type=int, help="prompts per batch")
    parser.add_argument("--device", help="default: the device in mix.toml")
    parser.add_argument("--rate", action="store_true", help="only rate stored answers to MT-Bench")
    options = parser.parse_args(arguments)
    try:
        for folder in options.folders:
            for name, result in evaluate(folder, options).items():
                print(f"{folder}: {line_of(name, result)}")
    except HgmsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
