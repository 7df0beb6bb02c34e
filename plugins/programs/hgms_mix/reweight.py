"""The stage `reweight`: a run of the mix's method, which learns the weights of the sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from hgms_core import CheckpointError, Problem
from hgms_mix.config import held
from hgms_mix.stages import Stage
from hgms_run import RunFolder, replace_file, run_config

if TYPE_CHECKING:
    from hgms_mix.mix import Mix


class Reweight(Stage):
    """The folder is a run folder, as ``hgms run`` makes it; where ``hgms run`` or ``hgms compare`` made a finished run of this
    very configuration and data, that is copied."""

    name: ClassVar[str] = "reweight"
    version: ClassVar[str] = "1"

    def packages(self, mix: Mix) -> list[str]:
        return ["transformers"]

    def inputs(self, mix: Mix) -> dict[str, Any]:
        config = mix.config.reweight
        return {"task_version": config.task.version, "config": held(config), **mix.data}

    def title(self, mix: Mix) -> str:
        return f"{mix.config.method_name}, {mix.config.budget}"

    def run(self, mix: Mix, folder: Path) -> tuple[Iterable[Path], dict[str, Any]]:
        run = RunFolder(folder)
        if not run.config.exists() and (learned := finished_run(mix)) is not None:
            mix.say(f"  learned before, with the same data ({learned.path})")
            copy(learned, folder)
        result = run_config(
            mix.config.reweight, resume=True, view=mix.view, path=folder, ready=lambda problem: say_memory(mix, problem)
        )
        steps = [row for row in result.records if "step_forward_tokens" in row]
        if steps:
            forward, backward = (sum(row.get(f"step_{way}_tokens", 0) for row in steps) for way in ("forward", "backward"))
            count, seconds = len(steps), result.records[-1]["seconds"]
            mix.say(
                f"  an outer step: {forward / count:,.0f} tokens forward, {backward / count:,.0f} backward, "
                f"{seconds / count:.3g} s"
            )
        for remark in result.summary.get("remarks") or []:
            mix.say(f"  note: {remark}")
        last = result.records[-1]
        facts = {
            "weights": {key.removeprefix("weight."): value for key, value in last.items() if key.startswith("weight.")},
            "method": mix.config.method_name,
            "outer_steps": result.summary["outer_steps"],
            "seconds": result.seconds,
            **({"processor_seconds": result.seconds} if mix.config.run.clock == "cpu" else {}),
            "metrics": result.summary.get("metrics") or {},
            "validation_loss": result.summary.get("validation_loss"),
        }
        tensors = folder.glob("checkpoint-*.safetensors")
        return [run.config, run.steps, run.timings, run.checkpoint, run.summary, *tensors], facts

    def summary(self, mix: Mix, report: Mapping[str, Any]) -> dict[str, Any]:
        learned = mix.done[self.name].facts
        return {
            **{key: learned[key] for key in ("outer_steps", "seconds", "metrics")},
            "sources": [{"source": source, "weight": weight} for source, weight in learned["weights"].items()],
            "stages": {
                name: {"key": done.key, "folder": str(done.path), "processor_seconds": done.facts.get("processor_seconds")}
                for name, done in mix.done.items()
            },
        }


def finished_run(mix: Mix) -> RunFolder | None:
    """The finished run that ``hgms compare`` or ``hgms run`` made of this configuration and data, if there is one."""
    for out in mix.config.runs:
        run = RunFolder(attrs.evolve(mix.config.reweight, run=attrs.evolve(mix.config.run, out=out)).path)
        try:
            same = json.loads((run.path / "env.json").read_bytes())["task"]["made_of"] == mix.data
            if same and (run.read_summary() or {}).get("status") == "done":
                return run
        except (OSError, ValueError, TypeError, KeyError, RecursionError, CheckpointError):
            continue  # none, of another version, or damaged: it is learned here
    return None


def copy(run: RunFolder, target: Path) -> None:
    """Copies what says that the run is finished last: a copy that is interrupted is a run to continue."""
    tensors = run.path.glob("checkpoint-*.safetensors")
    others = (run.path / name for name in ("env.json", "resources.json"))
    for path in (run.config, run.steps, run.timings, *tensors, *others, run.checkpoint, run.summary):
        if path.is_file():
            replace_file(target / path.name, path.read_bytes())


def say_memory(mix: Mix, problem: Problem) -> None:
    """What a step will take, where the method has candidates of so many rows each."""
    from hgms_llm import predicted_memory

    task, generator = mix.task, getattr(mix.config.method, "generator", None)
    count, rows = (getattr(generator, name, None) for name in ("count", "batch_size"))
    if count is None or rows is None:
        return
    mode = getattr(generator, "mode", "auto")
    apart = mode == "loop" or (mode == "auto" and (mix.device.type == "cpu" or task.adapter is None))
    memory = predicted_memory(
        problem,
        candidates=count,
        batch=problem.lower_data.count(rows),
        chunk=1 if apart else getattr(generator, "chunk", None),
        length=max(int(table.lengths.max()) for table in mix.pool.values()),
    )
    if memory is not None:
        mix.say(f"  {memory}")
