"""A mix: the run that learns the mixture, and the later stages in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tomlkit

from hgms.distributed import RankLost, alone
from hgms.packages import optional_module
from hgms.runs import Interrupted, Progress, RunFolder, View, device_called, follow_launched
from hgms.store import LEASE, DiskError, hold_lease, replace_file
from hgms_core import RunInfo
from hgms_core.errors import CheckpointError
from hgms_mix.stages import finetune
from hgms_mix.stages.config import MixConfig
from hgms_mix.stages.evaluate import EVALUATE
from hgms_mix.stages.finetune import FINETUNE
from hgms_mix.stages.graph import Finished, Log, Runner, Stage
from hgms_mix.stages.reweight import Learned, is_finished, reweight
from hgms_mix.stages.sample import SAMPLE
from hgms_mix.stages.summary import write_report
from hgms_mix.stages.training import Watch
from hgms_mix.stages.tuned_model import TunedModel
from hgms_mix.stages.uncertainty import UNCERTAINTY

STAGES: Mapping[str, Stage] = {
    stage.name: stage for stage in (UNCERTAINTY, SAMPLE, FINETUNE, EVALUATE)
}
"""The stages after reweighting, in the order in which a mix runs them."""
LEASES = (".mix.lease", LEASE)
"""The leases that a process acquires in the folder of a mix: for the mix, and for the run
that learns its mixture.
"""


def run_mix(
    config: MixConfig,
    *,
    upto: str = "evaluate",
    log: Log = lambda line: None,
    view: View | None = None,
    patience: float | None = None,
) -> dict[str, Any]:
    """Run the stages up to ``upto`` and report them. Finished stages are skipped.

    If another process runs the same mix, wait ``patience`` seconds for it (None: until that process
    is seen to be alive).

    Raises
    ------
    Interrupted
        Ctrl-C; the message explains how to resume.
    CheckpointError
        Another process works on the same mix, or a part of its folder is damaged.
    DiskError
        a file cannot be written; finished work is kept.
    RankLost
        a rank is gone; its work since the last checkpoint is lost.
    """
    view = view or Progress(enabled=False)
    folder = mix_path(config)
    ensure_runnable(config, upto)
    # ends every process of a launcher but one
    follow_launched(config.reweight, device_called(config.run.device))
    now = "reweight"
    with claim(folder, patience=patience):
        replace_file(folder / "mix.toml", tomlkit.dumps(config.as_dict()).encode())
        try:
            learned = reweight(config.reweight, folder, log, view)
            runner = runner_of(config, learned, log, view)
            finished = dict[str, Finished]()
            with alone():  # libraries of the later stages look for ranks in the environment
                for now in stages_up_to(upto):
                    finished[now] = runner.run(STAGES[now])
        except KeyboardInterrupt as error:
            raise Interrupted(
                error.message if isinstance(error, Interrupted) else "interrupted",
                Interrupted.number_of(error),
                hint=f"run the same command again to resume in stage {now}",
            ) from None
        except (DiskError, RankLost) as error:
            # The hint of the run names an option of `hgms run`.
            hint = (
                "run the same command again to resume from the last saved state"
                if isinstance(error, RankLost)
                else "free disk space or check the permissions, then run the same command again"
            )
            raise type(error)(error.code, error.message, place=error.place, hint=hint) from error
        return write_report(config, learned, finished)


def runner_of(
    config: MixConfig,
    learned: Learned,
    log: Log = lambda line: None,
    view: View | None = None,
    *,
    model: TunedModel | None = None,
) -> Runner:
    """Return the runner of the stages after reweighting.

    ``model``: the model to fine-tune, if its data are loaded already.
    """
    return Runner(
        root=learned.path,
        values={
            "learned": learned,
            "model": model or TunedModel.of(config),
            "seed": config.seed,
            **{name: getattr(config, name) for name in ("uncertainty", "sample", "finetune")},
        },
        tools={
            "log": log,
            "watch": watch_of(config, view),
            "untuned": learned.path.parent.parent / "untuned",
        },
        log=log,
    )


def watch_of(config: MixConfig, view: View | None) -> Watch:
    """Return the function that shows the progress of fine-tuning in ``view``."""
    if view is None:
        return lambda step, steps, loss: None
    info = RunInfo(task=config.task.name, method="finetune", seed=config.seed, budget=config.budget)

    def watch(step: int, steps: int, loss: float) -> None:
        view.watch(info, {"step": step, "lower_loss": loss}, step / steps)

    return watch


def stages_up_to(last: str) -> list[str]:
    """Return the names of the stages after reweighting up to and including ``last``."""
    return list(STAGES)[: ["reweight", *STAGES].index(last)]


def ensure_runnable(config: MixConfig, last: str) -> None:
    """Check that the requirements of the stages up to ``last`` are available.

    The check runs before the hours of reweighting.

    Raises
    ------
    MissingExtra
        a package is not installed.
    ConfigError
        fine-tuning does not support a setting.
    """
    tunes = "finetune" in stages_up_to(last)
    peft = ["peft"] if TunedModel.of(config).adapter is not None else []
    for package in ["transformers", *(["accelerate", *peft] if tunes else [])]:
        optional_module(package, f"the stage {last!r}", "llm", place=(last,))
    if tunes:
        finetune.ensure_supported(config)


def claim(folder: Path, *, patience: float | None = None) -> AbstractContextManager[object]:
    """Reserve the folder of a mix for this process. The run in it has a separate lease.

    Raises
    ------
    HgmsError
        The errors of ``leased``.
    """
    return hold_lease(folder, LEASES[0], patience=patience)


def finished_report(config: MixConfig) -> dict[str, Any] | None:
    """Return the report of a finished mix as :func:`run_mix` does, without loading a model.

    The result is ``None`` if work remains, or if :func:`run_mix` would raise an error.
    """
    folder = mix_path(config)
    if not (folder / "report.json").is_file():
        return None
    with contextlib.suppress(CheckpointError), claim(folder, patience=0.0):
        if is_finished(RunFolder(folder)):
            learned = reweight(config.reweight, folder)
            runner = runner_of(config, learned)
            finished = {name: runner.find(stage) for name, stage in STAGES.items()}
            whole = {name: stage for name, stage in finished.items() if stage is not None}
            if len(whole) == len(STAGES):
                return write_report(config, learned, whole)
    return None


def mix_path(config: MixConfig) -> Path:
    """Return the folder of a mix, which is the folder of its run.

    Mixes with other settings for sampling, fine-tuning or evaluation share the folder, so all of
    them use one learned mixture.

    Raises
    ------
    DataError
        For data that cannot be read.
    """
    config.task.data_fingerprint()  # type: ignore[attr-defined]  # the hash does not report errors
    return config.reweight.path
