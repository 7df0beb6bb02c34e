"""A mix: the run that learns the mixture, the later stages in order, and their shared objects.

Each stage runs once.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Sequence

import torch
from attrs import define

from hgms.runs import RunFolder, counting
from hgms_core.errors import MissingExtra
from hgms_mix.stages.certainty import Certain
from hgms_mix.stages.evaluate import Evaluation
from hgms_mix.stages.finetune import Finetuning
from hgms_mix.stages.reweight import is_finished, reweight
from hgms_mix.stages.sample import Sampling
from hgms_mix.stages.stage import Stage
from hgms_mix.stages.stage_folder import Done, StageFolder
from hgms_mix.stages.work import Work

STAGES: Sequence[Stage] = (Certain(), Sampling(), Finetuning(), Evaluation())
"""The stages after reweighting. Reweighting is not a stage with a separate folder: it is the
run in the folder of the mix.
"""


@define(eq=False)
class Mix(Work):
    """One mix: its shared objects, and its stages in order. Finished stages are skipped; an
    interrupted stage resumes.
    """

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
        outputs, facts = stage.run(self, folder.path)
        return folder.finish(outputs, {"processor_seconds": spent(), **facts})


def up_to(last: str) -> Sequence[Stage]:
    """Return the stages after reweighting up to and including ``last``."""
    return STAGES[: ["reweight", *(stage.name for stage in STAGES)].index(last)]
