"""A callback that learns the weights of sources during a training run.

It works with the Trainer of transformers and TRL's SFTTrainer. The rules are in ``rules.py``, and
the order of rows is in ``plan.py``.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hgms.arguments import require
from hgms.integrations import move_batch, preserve_state
from hgms.runs import load_state, save_state
from hgms_core import Key, OuterOptimizer
from hgms_core.errors import CheckpointError, MissingExtra
from hgms_mix.exchange.plan import Epochs, Plan
from hgms_mix.exchange.rules import Alignment, Loss, Rule
from hgms_mix.lm import mixture_shares

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise MissingExtra(
        "missing-package",
        f"MixtureCallback requires transformers, but {error.name} is not installed",
        install="pip install 'hgms[llm]'",
    ) from error

__all__ = ["Alignment", "MixtureCallback"]

FILE = "mixture.safetensors"


class MixedRows(Dataset[Any]):
    """Rows in the order of a plan.

    ``rows`` contains the sources one after the other; an epoch has ``length`` rows.
    """

    def __init__(self, rows: Any, plan: Plan, length: int) -> None:
        self.rows = rows
        self.plan = plan
        self.length = length
        self.before = 0
        self.furthest = -1
        self._first = dict(
            zip(plan.names, torch.tensor([0, *plan.sizes]).cumsum(0).tolist(), strict=False)
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        place = self.before + index
        self.furthest = max(self.furthest, place)
        return self.of(*self.plan.row(place))

    def of(self, name: str, row: int) -> Any:
        return self.rows[self._first[name] + row]


@final
class MixtureCallback(TrainerCallback):
    """The weights of data sources, learned during a training run::

        θ ← outer step on h = −∇_θ Σ_s ω_s(θ) a_s,  ω = softmax(θ),
            after every ``every``-th optimiser step

    a_s are the scores of ``rule``, on fresh rows of every source and fresh validation rows, with
    the trainer's own loss. The new ω applies from the second batch after the change, since the
    first is already loaded. Within a source, rows come in shuffled epochs.

    ``attach(trainer)`` installs the callback. The trainer's ``train_dataset`` must contain the
    sources' rows one after the other, with the counts in ``sources``. Rows have the trainer's own
    format, which TRL's SFTTrainer has prepared by then.

    Use when the mixture should adapt during training, or when learning it before training costs too
    much. Avoid for comparing mixtures: the result is a path, and its end depends on the state of
    the model.

    The row of each change is in ``records`` and in the trainer's log: ``mixture/NAME`` and
    ``mixture/score/NAME``. During a change the model is in evaluation mode, and torch's global
    generators are restored afterwards. If a score is not finite, the mixture does not change, and
    the row contains the reason.

    Every checkpoint gets a file ``mixture.safetensors``: θ, the outer optimiser, and the start of
    each mixture. Training resumes from this file. On the CPU, the result equals that of an
    uninterrupted run bit for bit, also with gradient accumulation.

    Parameters
    ----------
    sources
        Rows of each source, by name, in the order of ``train_dataset``.
    outer
        An outer optimiser (``hgms.outer.DualAveraging()``, ``Sgd(lr=…)``, …); θ are logits.
    rule
        ``Alignment()``, or a user-defined class with its method and fields.
    every
        Optimiser steps between two changes, ≥ 1.
    start
        The first mixture, by name; None: in proportion to the rows.
    seed
        Seed of all draws.
    loss
        ``loss(model, inputs) -> scalar``; None: the trainer's ``compute_loss``.

    Raises
    ------
    ConfigError
        For several processes, an IterableDataset, loader workers, a sampling strategy, batch size
        search or ``ignore_data_skip``, since each takes rows outside the plan. ConfigError for
        packed rows, a wrong number of rows, and a trainer that already mixes. CheckpointError if
        training resumes without that file, or with a file of other sources, another seed or another
        type of outer optimiser.

    Notes
    -----
    Cost: every ``every`` steps the cost of the rule. For ``Alignment`` this is a gradient of
    ``rows`` rows per source, and one of ``upper`` validation rows.

    Source: this project; the update is the outer loop of HG-MS's source reweighting with one step
    of the training as its lower level.
    """

    def __init__(
        self,
        *,
        sources: Mapping[str, int],
        outer: OuterOptimizer,
        rule: Rule | None = None,
        every: int = 100,
        start: Mapping[str, float] | None = None,
        seed: int = 0,
        loss: Loss | None = None,
    ) -> None:
        require(
            len(sources) >= 2
            and all(isinstance(count, int) and count >= 1 for count in sources.values()),
            "wrong-value",
            f"sources={dict(sources)} must give the numbers of rows of at least two sources",
            place=("sources",),
        )
        require(every >= 1, "out-of-range", f"every={every} must be at least 1", place=("every",))
        self.outer = outer
        self.rule = rule or Alignment()
        self.every = every
        self.loss = loss
        shares = mixture_shares(sources if start is None else start, sources, "start")
        weights = torch.tensor(shares, dtype=torch.float64)
        self._start = (weights / weights.max()).clamp_min(math.exp(-30)).log()
        self.key = Key(seed)
        self._sizes = dict(sources)
        self.plan = Plan(sources, self.key.fold("mixture"))
        # Separate streams for the scored rows: the training's draws do not depend on them.
        self._lower = {
            name: Epochs(count, self.key.fold("scores", name)) for name, count in sources.items()
        }
        self.records: list[dict[str, Any]] = []
        self._trainer: Any = None
        self._loaded = False
        self.theta: Tensor
        self._reset()

    @property
    def weights(self) -> dict[str, float]:
        """The mixture ω by name."""
        return dict(zip(self.plan.names, self.theta.softmax(0).tolist(), strict=True))

    def attach(self, trainer: Any, validation: Sequence[Any] | None = None) -> None:
        """Install this mixture and its updates in ``trainer``.

        The scores use the rows ``validation``, in the trainer's format; None: the trainer's
        ``eval_dataset``. The loss on these rows is then no longer independent of the training.
        """
        rows = trainer.train_dataset
        validation = trainer.eval_dataset if validation is None else validation
        total = sum(self.plan.sizes)
        require(
            not isinstance(rows, MixedRows) and _is_indexed(rows) and len(rows) == total,
            "wrong-rows",
            f"train_dataset of type {type(rows).__name__} must have the {total} rows of "
            f"sources={self._sizes} by number, and no other mixture",
            place=("trainer", "train_dataset"),
            hint="concatenate the rows of the sources in this order, without packing, in a new "
            "trainer",
        )
        require(
            _is_indexed(validation) and len(validation),
            "no-rows",
            "MixtureCallback requires validation rows by number, but there are none",
            place=("validation",),
            hint="call attach(trainer, validation=...), or set eval_dataset of the trainer, "
            "with rows by number",
        )
        self._check_arguments(trainer.args)
        self._trainer = trainer
        self._validation = validation
        self._upper = Epochs(len(validation), self.key.fold("scores", ""))
        self.rows = MixedRows(rows, self.plan, total)
        trainer.train_dataset = self.rows
        trainer.args.train_sampling_strategy = "sequential"  # the plan determines the order
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        require(
            self._trainer is not None,
            "not-attached",
            "the callback is not attached to the trainer",
            place=("trainer",),
            hint="call callback.attach(trainer) instead of trainer.add_callback(callback)",
        )
        self._check_arguments(args)
        if state.global_step > 0 and not self._loaded:
            self.load(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        elif not self._loaded:
            self._reset()
        self._loaded = False
        self.rows.furthest = -1
        self._collate = kwargs["train_dataloader"].collate_fn

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch, steps = self._epoch(args)
        self.rows.before = state.global_step // steps * epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every:
            return
        scores = self._scores(kwargs["model"], kwargs.get("optimizer"))
        self._change(
            scores, state.global_step, min(1.0, state.global_step / max(state.max_steps, 1))
        )
        self.plan.begin(self._next_place(args, state.global_step), self.theta.softmax(0))
        row = {f"mixture/{name}": weight for name, weight in self.weights.items()}
        row |= {
            f"mixture/score/{name}": score
            for name, score in zip(self.plan.names, scores.tolist(), strict=True)
        }
        due = control.should_log
        # TRL's method would add and reset its own statistics.
        Trainer.log(self._trainer, row)
        control.should_log = due  # any log call counts as the Trainer's own

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def save(self, folder: str | Path) -> None:
        """Write the state into a checkpoint's folder, atomically."""
        history = self.plan.history()
        save_state(
            Path(folder) / FILE,
            {
                "sources": self._sizes,
                "seed": self.key.seed,
                "theta": self.theta,
                "memory": self._memory,
                "records": self.records,
                "starts": [start for start, _ in history],
                "mixtures": torch.stack([weights for _, weights in history]),
            },
        )

    def load(self, folder: str | Path) -> None:
        """Load the state from a checkpoint's folder.

        The next resumed training starts with it.
        """
        path = Path(folder) / FILE
        require(
            path.is_file(),
            "missing-file",
            "the checkpoint has no mixture, so the training cannot resume",
            place=(str(path),),
            hint="call callback.load with the folder of this file, or start the training again",
            error=CheckpointError,
        )
        state = load_state(path)
        theirs = state["sources"], state["seed"], list(state["memory"])
        mine = self._sizes, self.key.seed, list(self.outer.init({"logits": self.theta}))
        require(
            theirs == mine and list(state["sources"]) == list(self._sizes),
            "other-settings",
            f"the file has sources, seed and outer optimiser {theirs}, but the callback has {mine}",
            place=(str(path),),
            error=CheckpointError,
        )
        self.theta = state["theta"]
        self._memory = state["memory"]
        self.records[:] = [dict(row) for row in state["records"]]
        self.plan.replay(list(zip(state["starts"], state["mixtures"], strict=True)))
        self._loaded = True

    def _reset(self) -> None:
        self.theta = self._start.clone()
        self.records.clear()
        self._memory = self.outer.init({"logits": self.theta})
        self.plan.replay([(0, self.theta.softmax(0))])

    def _change(self, scores: Tensor, step: int, progress: float) -> None:
        """Update θ; do not change it if a score is not finite."""
        weights = self.theta.softmax(0)
        if bool(scores.isfinite().all()):
            h = -weights * (scores - weights @ scores)
            after, self._memory = self.outer.step(
                {"logits": self.theta}, {"logits": h}, self._memory, progress
            )
            self.theta = after["logits"].detach()
        now = self.theta.softmax(0)
        self.records.append(
            {
                "step": step,
                "weights": now.tolist(),
                "scores": scores.tolist(),
                "moved": float((now - weights).abs().sum()),
            }
        )

    def _scores(self, model: Any, optimizer: Any) -> Tensor:
        """Return the rule's scores of the sources."""
        device = next(model.parameters()).device
        loss = self.loss or self._trainer.compute_loss
        change = len(self.records)
        count = self.rule.rows
        many = self.rule.upper

        def batch(rows: list[Any]) -> Any:
            return move_batch(self._collate(rows), device)

        with preserve_state(model, device), _keep_statistics(self._trainer):
            lower = {
                name: batch([self.rows.of(name, row) for row in epochs.rows(change * count, count)])
                for name, epochs in self._lower.items()
            }
            rows = self._upper.rows(change * many, many)
            upper = batch([self._validation[row] for row in rows])
            return self.rule.scores(loss, model, lower, upper, optimizer).double().cpu()

    def _epoch(self, args: Any) -> tuple[int, int]:
        """Return the rows and the optimiser steps of an epoch."""
        batch = args.train_batch_size
        length = len(self.rows)
        taken = length // batch * batch if args.dataloader_drop_last else length
        return taken, max(1, math.ceil(math.ceil(taken / batch) / args.gradient_accumulation_steps))

    def _next_place(self, args: Any, step: int) -> int:
        """Return the first place of the mixture after optimiser step ``step``.

        It is after the batch that the loader has already loaded.
        """
        epoch, steps = self._epoch(args)
        passed, within = divmod(step, steps)
        place = (
            passed * epoch + (within * args.gradient_accumulation_steps + 1) * args.train_batch_size
        )
        require(
            self.rows.furthest < place,
            "not-supported",
            f"the data loader has read row {self.rows.furthest}, but must read at most one "
            f"batch ahead (row {place - 1}), so that a resumed training is the same",
            place=("train_dataloader",),
        )
        return int(place)

    def _check_arguments(self, args: Any) -> None:
        faults = (
            (
                args.world_size > 1,
                "world_size",
                "each process would change the mixture independently",
                "use one process",
            ),
            (
                args.dataloader_num_workers > 0,
                "dataloader_num_workers",
                "each worker would have a copy of the plan",
                "set dataloader_num_workers=0",
            ),
            (
                args.train_sampling_strategy not in ("random", "sequential"),
                "train_sampling_strategy",
                "the mixture determines the order of rows",
                "remove train_sampling_strategy",
            ),
            (
                args.auto_find_batch_size,
                "auto_find_batch_size",
                "the plan requires a fixed batch size",
                "remove auto_find_batch_size",
            ),
            (
                args.ignore_data_skip,
                "ignore_data_skip",
                "a resumed training would repeat the first rows",
                "remove ignore_data_skip",
            ),
        )
        for wrong, name, why, hint in faults:
            require(
                not wrong,
                "not-supported",
                f"{name}={getattr(args, name)!r} is not supported by MixtureCallback: {why}",
                place=("args", name),
                hint=hint,
            )


@contextlib.contextmanager
def _keep_statistics(trainer: Any) -> Iterator[None]:
    """Restore the statistics of TRL's trainers.

    TRL counts statistics of every loss in a private attribute. The losses here are not training
    losses.
    """
    before = copy.deepcopy(getattr(trainer, "_metrics", None))
    try:
        yield
    finally:
        if before is not None:
            trainer._metrics = before


def _is_indexed(rows: Any) -> bool:
    """Return whether rows are indexed by number: not a stream, nor data sets by name."""
    return isinstance(rows, Sized) and not isinstance(rows, IterableDataset | Mapping)
