"""A mix: the run that learns the mixture, the stages after it in their order, each made once,
and what they share.
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
"""What follows reweighting, which is no stage with a folder of its own: it is the run that the
mix's folder holds.
"""


@define(eq=False)
class Mix:
    """One mix in one folder, that of its run. What is finished is not made again, what was
    interrupted continues.

    ``say`` gets a line for each stage, ``view`` shows progress, ``done`` holds the stages so far,
    ``reweight`` first. Of a mix on ranks this is rank 0, or in one of its stages another ``rank``.
    """

    config: MixConfig
    folder: Path
    say: Callable[[str], None] = lambda line: None
    view: View = field(factory=lambda: Progress(enabled=False))
    rank: int = field(default=0, kw_only=True)
    others_seconds: float = field(default=0.0, init=False)
    """Of processor time, what other ranks took in stages that all made together."""
    done: dict[str, Done] = field(init=False, factory=dict)

    def check(self, last: str) -> None:
        """Whether what the stages up to ``last`` need is installed and can be had: before the hours
        that reweighting takes.

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
        """The stage ``last`` and all before it."""
        if "reweight" not in self.done:
            self.done["reweight"] = reweight(self)
        for stage in up_to(last):
            if stage.name not in self.done:
                self.done[stage.name] = self._finish(stage)
        return self.done[last]

    def finished(self) -> bool:
        """Whether all stages are done, which ``done`` then holds; nothing is made."""
        if not is_finished(RunFolder(self.folder)):
            return False
        self.done["reweight"] = reweight(self)
        for stage in STAGES:
            if (done := self.stage_folder(stage).done()) is None:
                return False
            self.done[stage.name] = done
        return True

    def stage_folder(self, stage: Stage) -> StageFolder:
        """The folder of a stage, made from its own inputs and from the stage before, which is
        done.
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
        # Hooks and trainers make cycles, which only a collection breaks: the last stage's model
        # goes before this one's comes.
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

    # -- what stages share
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
        """What the task's problem is made of: digests of its files and of the model's."""
        contents: Mapping[str, Any] = self.task.made_of()
        return contents

    @property
    def state(self) -> Any:
        """The state that reweighting ended with."""
        stored = RunFolder(self.done["reweight"].path).load(self.device)
        assert stored is not None  # a finished run has a checkpoint
        return stored[0]

    @functools.cached_property
    def tokenizer(self) -> Any:
        """That of the model with which the mixture is learned."""
        return self.task.model.load_tokenizer()

    @functools.cache  # noqa: B019 - a mix lives as long as its command
    def tables(self, which: str) -> dict[str, Any]:
        """The token tables of the task's ``sources``, ``validation`` or ``test`` sets."""
        tables: dict[str, Any] = self.task.tables(self.tokenizer, which)
        return tables

    @functools.cached_property
    def pool(self) -> dict[str, Any]:
        """The rows that the mixture is learned on."""
        pool: dict[str, Any] = self.task.pool(self.tokenizer, self.config.seed)
        return pool

    @property
    def adapter(self) -> Any:
        """The adapter that is fine-tuned, None for all parameters."""
        own = self.config.finetune.adapter
        return self.task.adapter if own is None else own

    @functools.cached_property
    def tuned_tokenizer(self) -> Any:
        """That of the model that is fine-tuned."""
        model = self.config.finetune.model
        return self.tokenizer if model is None else model.load_tokenizer()

    @functools.cache  # noqa: B019
    def tuned_tables(self, which: str) -> dict[str, Any]:
        """The sets in the tokens of the model that is fine-tuned."""
        if self.config.finetune.model is None:
            return self.tables(which)
        tables: dict[str, Any] = self.task.tables(self.tuned_tokenizer, which)
        return tables

    def base(self, ranks: Ranks | None = None) -> Any:
        """The model that is fine-tuned, as it was before. With ``model.shard`` each of the
        ``ranks``, which all ask for it, holds a part of it."""
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
        """The sampled rows of each source (or validation set) in the tokens of the model that is
        fine-tuned.
        """
        sample = self.done["sample"]
        numbers = dict[str, list[int]]()
        for row in read_rows(sample.path / "rows.jsonl.gz"):
            numbers.setdefault(row["source"], []).append(row["row"])
        of = {name: torch.tensor(sorted(rows)) for name, rows in numbers.items()}
        tables: dict[str, Any] = self.task.picked(self.tuned_tokenizer, sample.facts["of"], of)
        return tables


def up_to(last: str) -> Sequence[Stage]:
    """The stages after reweighting up to the one called ``last``."""
    return STAGES[: ["reweight", *(stage.name for stage in STAGES)].index(last)]
