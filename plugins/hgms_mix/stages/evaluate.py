"""The stage `evaluate`: losses of the fine-tuned model on the test sets, and benchmarks.

The benchmarks are in hgms_mix.evaluation.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hgms.config.as_table import plain
from hgms.store import replace_file
from hgms_core import Key
from hgms_mix.stages.base_losses import untuned_losses
from hgms_mix.stages.losses import RowLosses, row_losses
from hgms_mix.stages.stage import Stage
from hgms_mix.stages.training import without_peft_warnings

if TYPE_CHECKING:
    from hgms_mix.stages.work import Work

UNIFORM = "uniform"
"""The method that a mix is compared with."""
RESAMPLES = 10_000


class Evaluation(Stage):
    """The stage `evaluate`. It writes the losses of every test row, so that two models can be
    compared by row.
    """

    name: ClassVar[str] = "evaluate"
    version: ClassVar[str] = "1"

    def check(self, mix: Work) -> None:
        mix.config.evaluate.check()

    def inputs(self, mix: Work) -> dict[str, Any]:
        return {"settings": plain(mix.config.evaluate)}

    def title(self, mix: Work) -> str:
        return ", ".join([*mix.task.test, *mix.config.evaluate.titles]) or "nothing to evaluate"

    def run(self, mix: Work, folder: Path) -> tuple[Iterable[Path], dict[str, Any]]:
        evaluate = mix.config.evaluate
        tests = dict[str, Any]()
        untuned = untuned_losses(mix)
        model = tuned(mix)
        for name, table in mix.tuned_tables("test").items():
            of_rows = row_losses(model, table)
            before = untuned[name]
            tests[name] = means(of_rows, seed=mix.config.seed) | {
                "untuned": float(before.total.sum() / before.tokens.sum()),
                "against_untuned": difference(of_rows, before, seed=mix.config.seed),
            }
            replace_file(
                losses_file(folder, name),
                json.dumps({"digest": table.digest, **of_rows.as_dict()}).encode(),
            )
        benchmarks = {}
        if evaluate.titles:
            benchmarks = evaluate.run(model, mix.tuned_tokenizer, folder / "benchmarks", mix.say)
        return [losses_file(folder, name) for name in tests], {
            "test": tests,
            "benchmarks": benchmarks,
        }

    def summary(self, mix: Work, report: Mapping[str, Any]) -> dict[str, Any]:
        facts = mix.done[self.name].facts
        tests = {
            name: {**row, "against_uniform": against_uniform(mix, report["comparable"], name)}
            for name, row in facts["test"].items()
        }
        return {"test": tests, "benchmarks": facts["benchmarks"]}


def losses_file(folder: Path, test: str) -> Path:
    return folder / f"losses-{test}.json"


def tuned(mix: Work) -> Any:
    """Load the fine-tuned model from its files."""
    finetuned = mix.done["finetune"]
    path = finetuned.path / finetuned.facts["kind"]
    if finetuned.facts["kind"] == "adapter":
        from peft import PeftModel

        with without_peft_warnings():
            return PeftModel.from_pretrained(mix.base(), path).eval()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(mix.device).eval()


def against_uniform(mix: Work, same: str, test: str) -> dict[str, Any] | None:
    """Return the loss of this mix − the loss with the method `uniform`, on the same rows.

    This requires the same mix with `uniform`: same file, seed and folder. Other methods and
    mixtures never count as uniform, for any label. If several labels use `uniform`, the label
    `uniform` is preferred.
    """
    if mix.config.method_name == UNIFORM:
        return None
    ours = json.loads(losses_file(mix.folder / "evaluate", test).read_bytes())
    others = mix.folder.parent.parent.glob(f"*/{mix.folder.name}")

    def order(folder: Path) -> tuple[bool, Path]:
        label = folder.parent.name.rpartition("-")[0]
        return label != UNIFORM, folder

    for other in sorted(others, key=order):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            report = json.loads((other / "report.json").read_bytes())
            if report["method"] != UNIFORM or report["comparable"] != same:
                continue
            theirs = json.loads(losses_file(other / "evaluate", test).read_bytes())
            if theirs["digest"] == ours["digest"]:
                return difference(RowLosses.of(ours), RowLosses.of(theirs), seed=mix.config.seed)
    return None


def means(losses: RowLosses, *, seed: int = 0) -> dict[str, Any]:
    """Return the mean over tokens (Σ loss / Σ tokens) and over examples (mean of the row means).

    Each mean has its 95 % percentile bootstrap interval over rows.

    >>> flat = RowLosses(total=torch.tensor([2.0, 3.0]).double(), tokens=torch.tensor([2, 3]))
    >>> means(flat)["token_loss"]
    {'value': 1.0, 'low': 1.0, 'high': 1.0}
    """
    per_row = losses.per_row
    tokens = losses.tokens.double()
    columns = torch.stack([losses.total, tokens, per_row], 1)
    total, count, means = _resampled(columns, seed).unbind(1)
    return {
        "rows": len(per_row),
        "tokens": int(tokens.sum()),
        "token_loss": _interval(float(losses.total.sum() / tokens.sum()), total / count),
        "example_loss": _interval(float(per_row.mean()), means / len(per_row)),
    }


def difference(ours: RowLosses, theirs: RowLosses, *, seed: int = 0) -> dict[str, Any]:
    """Return ours − theirs on the same rows: the mean over tokens with a bootstrap interval.

    The bootstrap is over rows. A resample contains the same rows for both.
    """
    gap = ours.total - theirs.total
    tokens = ours.tokens.double()
    total, count = _resampled(torch.stack([gap, tokens], 1), seed).unbind(1)
    return _interval(float(gap.sum() / tokens.sum()), total / count)


def _resampled(columns: Tensor, seed: int) -> Tensor:
    """Return sums of the columns over rows drawn with replacement, ``[RESAMPLES, columns]``.

    The function computes some resamples at a time.
    """
    rows = len(columns)
    generator = Key(seed).fold("bootstrap").generator()
    step = max(1, 2**22 // rows)
    sums = []
    for first in range(0, RESAMPLES, step):
        index = torch.randint(rows, (min(step, RESAMPLES - first), rows), generator=generator)
        sums.append(columns[index].sum(1))
    return torch.cat(sums)


def _interval(value: float, draws: Tensor) -> dict[str, float]:
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return {"value": value, "low": low, "high": high}
