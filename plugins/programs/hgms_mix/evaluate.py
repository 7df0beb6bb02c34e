"""The stage `evaluate`: losses of the fine-tuned model on the test sets, and the benchmarks of hgms_evaluation."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hgms_mix import losses
from hgms_mix.stages import Stage
from hgms_mix.training import without_peft_warnings
from hgms_run import plain, replace_file

if TYPE_CHECKING:
    from hgms_mix.mix import Mix

UNIFORM = "uniform"
"""The method that a mix is compared with."""


class Evaluation(Stage):
    """Writes the losses of every test row, so that two models can be compared row by row."""

    name: ClassVar[str] = "evaluate"
    version: ClassVar[str] = "1"

    def check(self, mix: Mix) -> None:
        mix.config.evaluate.check()

    def inputs(self, mix: Mix) -> dict[str, Any]:
        before = mix.done["finetune"]
        return {"version": self.version, "settings": plain(mix.config.evaluate), "finetune": [before.key, before.digest]}

    def title(self, mix: Mix) -> str:
        return ", ".join([*mix.task.test, *mix.config.evaluate.benchmarks]) or "nothing to evaluate"

    def run(self, mix: Mix, folder: Path) -> tuple[Iterable[Path], dict[str, Any]]:
        evaluate, model = mix.config.evaluate, tuned(mix)
        tests: dict[str, Any] = {}
        for name, table in mix.tuned_tables("test").items():
            of_rows = losses.row_losses(model, table)
            tests[name] = losses.summary(of_rows, seed=mix.config.seed)
            replace_file(losses_file(folder, name), json.dumps({"digest": table.digest, **of_rows.as_dict()}).encode())
        benchmarks = {}
        if evaluate.benchmarks:
            benchmarks = evaluate.run(model, mix.tuned_tokenizer, folder / "benchmarks", mix.say)
        return [losses_file(folder, name) for name in tests], {"test": tests, "benchmarks": benchmarks}

    def summary(self, mix: Mix, report: Mapping[str, Any]) -> dict[str, Any]:
        facts = mix.done[self.name].facts
        tests = {
            name: {**row, "against_uniform": against_uniform(mix, report["comparable"], name)}
            for name, row in facts["test"].items()
        }
        return {"test": tests, "benchmarks": facts["benchmarks"]}


def losses_file(folder: Path, test: str) -> Path:
    return folder / f"losses-{test}.json"


def tuned(mix: Mix) -> Any:
    """The fine-tuned model, from its files."""
    finetuned = mix.done["finetune"]
    path = finetuned.path / finetuned.facts["kind"]
    if finetuned.facts["kind"] == "adapter":
        from peft import PeftModel

        with without_peft_warnings():
            return PeftModel.from_pretrained(mix.base(), path).eval()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(mix.device).eval()


def against_uniform(mix: Mix, same: str, test: str) -> dict[str, Any] | None:
    """Our loss − that of uniform weights on the same rows, where the same mix was made with them: same file, seed, folder."""
    if mix.config.method_name == UNIFORM:
        return None
    ours = json.loads(losses_file(mix.folder / "evaluate", test).read_bytes())
    for other in sorted(mix.folder.parent.parent.glob(f"{UNIFORM}-*/{mix.folder.name}")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            report = json.loads((other / "report.json").read_bytes())
            theirs = json.loads(losses_file(other / "evaluate", test).read_bytes())
            if report["comparable"] == same and theirs["digest"] == ours["digest"]:
                return losses.difference(losses.RowLosses.of(ours), losses.RowLosses.of(theirs), seed=mix.config.seed)
    return None
