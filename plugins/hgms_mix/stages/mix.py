"""A mix: the run that learns the mixture, the later stages in order, and their shared objects.

Each stage runs once.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from hgms.distributed import Ranks, device_of
from hgms.runs import Progress, RunFolder, View, counted, counting, device_called
from hgms_core.errors import MissingExtra
from hgms_mix.stages.certainty import Certain
from hgms_mix.stages.config import MixConfig
from hgms_mix.stages.evaluate import Evaluation
from hgms_mix.stages.finetune import Finetuning
from hgms_mix.stages.reweight import is_finished, reweight
from hgms_mix.stages.sample import Sampling, read_rows
from hgms_mix.stages.stage import Done, Stage, StageFolder

STAGES: Sequence[Stage] = (Certain(), Sampling(), Finetuning(), Evaluation())
"""The stages after reweighting. Reweighting is not a stage with a separate folder: it is the
run in the folder of the mix.
"""


@define(eq=False)
class Mix:
    """One mix in one folder, the folder of its run. Finished stages are skipped; an interrupted
    stage resumes.

    ``say`` receives a line per stage, ``view`` shows progress, and ``done`` contains the finished
    stages, ``reweight`` first. In a mix on several ranks, this object belongs to rank 0. In a stage
    that all ranks run, every other ``rank`` has a separate object.
    """

    config: MixConfig
    folder: Path
    say: Callable[[str], None] = lambda line: None
    view: View = field(factory=lambda: Progress(enabled=False))
    rank: int = field(default=0, kw_only=True)
    others_seconds: float = field(default=0.0, init=False)
    """Processor time of other ranks in stages that all ranks ran together."""
    done: dict[str, Done] = field(init=False, factory=dict)

    def check(self, last: str) -> None:
        """Check that the requirements of the stages up to ``last`` are available.

        The check runs before the hours of reweighting.

        Raises:
            MissingExtra: a package is not installed.
            ConfigError: a benchmark cannot be evaluated.
        """
        stages = up_to(last)
        packages = [
            "transformers",
            *(package for stage in stages for package in stage.packages(self)),
        ]
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            raise MissingExtra(
                "missing-package",
                f"the stage {last!r} requires {' and '.join(missing)}",
                place=(last,),
                install="pip install 'hgms[llm]'",
            )
        for stage in stages:
            stage.check(self)

    def run(self, last: str = "evaluate") -> Done:
        """Run the stage ``last`` and all earlier stages."""
        if "reweight" not in self.done:
            self.done["reweight"] = reweight(self)
        for stage in up_to(last):
            if stage.name not in self.done:
                self.done[stage.name] = self._finish(stage)
        return self.done[last]

    def finished(self) -> bool:
        """Return whether all stages are finished, and store them in ``done``; run no stage."""
        if not is_finished(RunFolder(self.folder)):
            return False
        self.done["reweight"] = reweight(self)
        for stage in STAGES:
            if (done := self.stage_folder(stage).done()) is None:
                return False
            self.done[stage.name] = done
        return True

    def stage_folder(self, stage: Stage) -> StageFolder:
        """Return the folder of a stage.

        Its key depends on the stage's inputs and on the finished earlier stage.
        """
        inputs = {"version": stage.version, **stage.inputs(self)}
        before = [
            "reweight",
            *(earlier.name for earlier in up_to(stage.name)[:-1] if not earlier.beside),
        ][-1]
        inputs[before] = [self.done[before].key, self.done[before].digest]
        return StageFolder(name=stage.name, path=self.folder / stage.name, inputs=inputs)

    def _finish(self, stage: Stage) -> Done:
        folder = self.stage_folder(stage)
        if (done := folder.done()) is not None:
            self.say(f"{stage.name}: done before ({folder.path})")
            return done
        # Hooks and trainers create reference cycles, which only a garbage collection frees. Free
        # the model of the last stage before this stage loads its model.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        going_on = folder.begin()
        self.say(f"{stage.name}: {'going on with ' if going_on else ''}{stage.title(self)}")
        spent = counting(going_on)
        self.others_seconds = 0.0
        outputs, facts = stage.run(self, folder.path)
        return folder.finish(
            outputs, {"processor_seconds": counted([spent(), self.others_seconds]), **facts}
        )

    # -- shared by the stages
    # ----------------------------------------------------------------------------------------------

    @property
    def task(self) -> Any:
        return self.config.task

    @property
    def device(self) -> torch.device:
        device = device_called(self.config.run.device)
        return device if self.config.run.ranks == 1 else device_of(device, self.rank)

    @functools.cached_property
    def data(self) -> Mapping[str, Any]:
        """Data fingerprint of the task's problem: digests of its files and of the model's files."""
        contents: Mapping[str, Any] = self.task.made_of()
        return contents

    @property
    def state(self) -> Any:
        """Final state of reweighting."""
        stored = RunFolder(self.done["reweight"].path).load(self.device)
        assert stored is not None  # a finished run has a checkpoint
        return stored[0]

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the model that learns the mixture."""
        return self.task.model.load_tokenizer()

    @functools.cache  # noqa: B019 - a mix lives as long as its command
    def tables(self, which: str) -> dict[str, Any]:
        """Return the token tables of the task's ``sources``, ``validation`` or ``test`` sets."""
        tables: dict[str, Any] = self.task.tables(self.tokenizer, which)
        return tables

    @functools.cached_property
    def pool(self) -> dict[str, Any]:
        """Rows on which the mixture is learned."""
        pool: dict[str, Any] = self.task.pool(self.tokenizer, self.config.seed)
        return pool

    @property
    def adapter(self) -> Any:
        """Adapter that is fine-tuned, or None for all parameters."""
        own = self.config.finetune.adapter
        return self.task.adapter if own is None else own

    @functools.cached_property
    def tuned_tokenizer(self) -> Any:
        """Tokenizer of the fine-tuned model."""
        model = self.config.finetune.model
        return self.tokenizer if model is None else model.load_tokenizer()

    @functools.cache  # noqa: B019
    def tuned_tables(self, which: str) -> dict[str, Any]:
        """Return the sets in tokens of the fine-tuned model."""
        if self.config.finetune.model is None:
            return self.tables(which)
        tables: dict[str, Any] = self.task.tables(self.tuned_tokenizer, which)
        return tables

    def base(self, ranks: Ranks | None = None) -> Any:
        """Load the model to fine-tune, in its state before fine-tuning.

        With ``model.shard``, each rank in ``ranks`` loads one part; all ranks must call this
        method.
        """
        from hgms_mix.lm import called_through, check_fits

        base = self.config.finetune.model or self.task.model
        where = self.device, torch.float32, len(self.tuned_tokenizer)
        model: Any = (
            called_through(base.in_parts(*where))
            if base.shard and ranks is not None
            else base.load(*where)
        )
        check_fits(model, {"sample": self.drawn_tables(), "test": self.tuned_tables("test")})
        return model

    def drawn_tables(self) -> dict[str, Any]:
        """Return the sampled rows of each source in tokens of the fine-tuned model.

        If the sample is from validation sets, the rows are by validation set.
        """
        sample = self.done["sample"]
        numbers = dict[str, list[int]]()
        for row in read_rows(sample.path / "rows.jsonl.gz"):
            numbers.setdefault(row["source"], []).append(row["row"])
        of = {name: torch.tensor(sorted(rows)) for name, rows in numbers.items()}
        tables: dict[str, Any] = self.task.picked(self.tuned_tokenizer, sample.facts["of"], of)
        return tables


def up_to(last: str) -> Sequence[Stage]:
    """Return the stages after reweighting up to and including ``last``."""
    return STAGES[: ["reweight", *(stage.name for stage in STAGES)].index(last)]
