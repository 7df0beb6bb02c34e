"""The four stages in their order, each made once: reweight → sample → finetune → evaluate."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import define, field
from torch import Tensor

from hgms_core import CheckpointError, ConfigError, DataError, MissingExtra, Problem, RunInfo
from hgms_mix import losses
from hgms_mix.config import MixConfig, comparable, held, settings
from hgms_mix.finetune import peft_behind
from hgms_mix.sample import moved, positions, read_rows, write_rows
from hgms_mix.stages import Done, Stage
from hgms_run import Progress, RunFolder, device_called, environment, replace_file, run_config

STAGES = ("reweight", "sample", "finetune", "evaluate")
REWEIGHT_VERSION = "1"
EVALUATE_VERSION = "1"


@define(eq=False)
class Mix:
    """One mix in one folder. Asking for a stage makes what it depends on first; what is finished is not made again.

    ``say`` gets a line for each stage: made, gone on with, or found. ``view`` shows progress.
    """

    config: MixConfig
    folder: Path
    say: Callable[[str], None] = lambda line: None
    view: Progress = field(factory=lambda: Progress(enabled=False))
    _done: dict[str, Done] = field(factory=dict)

    def check(self, stage: str) -> None:
        """Whether what ``stage`` needs is installed and can be had: known before the hours that reweighting takes.

        Raises:
            MissingExtra: a package is not installed.
            ConfigError: a benchmark cannot be evaluated.
        """
        wanted = ["transformers"]
        if STAGES.index(stage) >= STAGES.index("finetune"):
            wanted += ["accelerate", *([] if self._adapter is None else ["peft"])]
        missing = [name for name in wanted if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingExtra(f"the stage {stage} needs {' and '.join(missing)}\n  install it with: pip install 'hgms[llm]'")
        if "accelerate" in wanted and self.config.finetune.model is not None:
            from hgms_llm import template_for

            template_for(self._task.template, self.tuned_tokenizer)
        if stage == "evaluate":
            self.config.evaluate.check()

    def run(self, stage: str = "evaluate") -> Done:
        """The stage called ``stage`` and all before it."""
        if stage not in self._done:
            before = STAGES.index(stage) - 1
            if before >= 0:
                self.run(STAGES[before])
            self._done[stage] = getattr(self, f"_{stage}")()
        return self._done[stage]

    @property
    def done(self) -> Mapping[str, Done]:
        """The stages so far."""
        return self._done

    # -- the stages -------------------------------------------------------------------------------------------------

    def _reweight(self) -> Done:
        config = self.config.reweight
        stage = Stage(
            name="reweight",
            path=self.folder / "reweight",
            inputs={
                "version": REWEIGHT_VERSION, "task_version": config.task.version, "config": held(config), **self._made_of
            },
        )  # fmt: skip
        if (found := self._found(stage)) is not None:
            return found
        self._begin(stage, f"{config.method_name}, {config.budget}")
        if not (stage.path / "config.toml").exists() and (learned := self._learned()) is not None:
            self.say(f"  learned before, with the same data ({learned.path})")
            _copy(learned, stage.path)
        result = run_config(config, resume=True, view=self.view, path=stage.path, ready=self._tell_memory)
        self._tell_tokens(result.records)
        for remark in result.summary.get("remarks") or []:
            self.say(f"  note: {remark}")
        last = result.records[-1]
        weights = {key.removeprefix("weight."): value for key, value in last.items() if key.startswith("weight.")}
        facts = {
            "weights": weights,
            "method": config.method_name,
            "outer_steps": result.summary["outer_steps"],
            "seconds": result.seconds,
            "metrics": result.summary.get("metrics") or {},
            "validation_loss": result.summary.get("validation_loss"),
        }
        run = RunFolder(stage.path)
        return stage.finish(
            [run.config, run.steps, run.timings, run.checkpoint, run.summary, *stage.path.glob("checkpoint-*.safetensors")],
            facts,
        )

    @functools.cached_property
    def _made_of(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._task.made_of()
        return found

    def _learned(self) -> RunFolder | None:
        """The finished run that `hgms compare` or `hgms run` made of this very configuration and data, if there is one."""
        for out in self.config.runs:
            config = attrs.evolve(self.config, run=attrs.evolve(self.config.run, out=out))
            run = RunFolder(mix_path(config, config.task.name))
            try:
                known = json.loads((run.path / "env.json").read_bytes())["task"]["made_of"] == self._made_of
                if known and (run.read_summary() or {}).get("status") == "done":
                    return run
            except (OSError, ValueError, TypeError, KeyError, RecursionError, CheckpointError):
                continue  # none, of another version, or damaged: it is learned here
        return None

    def _tell_memory(self, problem: Problem) -> None:
        """What a step will take, where the method has candidates of so many rows each."""
        from hgms_llm import predicted_memory

        generator = getattr(self.config.method, "generator", None)
        count, rows = (getattr(generator, name, None) for name in ("count", "batch_size"))
        if count is None or rows is None:
            return
        mode = getattr(generator, "mode", "auto")
        apart = mode == "loop" or (mode == "auto" and (self.device.type == "cpu" or self._task.adapter is None))
        pool = self._task.cached(self.tables("sources"), self.config.seed)
        told = predicted_memory(
            problem,
            candidates=count,
            batch=problem.lower_data.count(rows),
            chunk=1 if apart else getattr(generator, "chunk", None),
            length=max(int(table.lengths.max()) for table in pool.values()),
        )
        if told is not None:
            self.say(f"  {told}")

    def _tell_tokens(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What went through the model in an outer step, on average."""
        steps = [row for row in records if "step_forward_tokens" in row]
        if steps:
            forward, backward = (
                sum(row.get(f"step_{way}_tokens", 0) for row in steps) / len(steps) for way in ("forward", "backward")
            )
            seconds = records[-1]["seconds"] / len(steps)
            self.say(f"  an outer step: {forward:,.0f} tokens forward, {backward:,.0f} backward, {seconds:.3g} s")

    def _sample(self) -> Done:
        before, sample = self.run("reweight"), self.config.sample
        inputs = {
            "version": sample.version,
            "settings": settings(sample),
            "seed": self.config.seed,
            "reweight": [before.key, before.digest],
        }
        stage = Stage(name="sample", path=self.folder / "sample", inputs=inputs)
        if (found := self._found(stage)) is not None:
            return found
        self._begin(stage, f"{sample.size} rows")
        tables, weights = self.tables("sources"), before.facts["weights"]
        capacity = {name: table.size for name, table in tables.items()}
        scores = self._scores(tables)
        chosen = sample.draw(weights, capacity, seed=self.config.seed) if scores is None else sample.top(scores)
        counts = {name: len(rows) for name, rows in chosen.items()}
        short = [] if scores is not None else moved(weights, counts, sample.size)
        for line in short:
            self.say(f"  {line}; {'the set is smaller' if sample.allow_fewer else 'the others give the rest'}")
        write_rows(stage.path / "rows.jsonl.gz", self._listed(tables, chosen, scores))
        facts = {
            "size": sum(counts.values()),
            "by": "weights" if scores is None else "ranking",
            "weights": weights,
            "counts": counts,
            "capacity": capacity,
            "short": short,
            "sources": {name: table.digest for name, table in tables.items()},
        }
        replace_file(stage.path / "counts.json", json.dumps(facts, indent=2, ensure_ascii=False).encode())
        return stage.finish([stage.path / "rows.jsonl.gz", stage.path / "counts.json"], facts)

    def _finetune(self) -> Done:
        before, finetune = self.run("sample"), self.config.finetune
        inputs = {
            "version": finetune.version,
            "settings": {
                key: value for key, value in settings(finetune).items() if key not in ("model", "adapter") or value != "none"
            },
            **({} if finetune.model is None else {"model": finetune.model.digest()}),
            "seed": self.config.seed,
            "sample": [before.key, before.digest],
        }
        stage = Stage(name="finetune", path=self.folder / "finetune", inputs=inputs)
        if (found := self._found(stage)) is not None:
            return found
        self._begin(stage, f"{before.facts['size']} rows")
        rows = self._chosen(list(read_rows(before.path / "rows.jsonl.gz")), before.facts["sources"])
        model = self.base()
        adapter = None if self._adapter is None else self._adapter.peft_config(model)
        info = RunInfo(task=self.config.task.name, method="finetune", seed=self.config.seed, budget=self.config.budget)
        replace_file(stage.path / "env.json", json.dumps(environment(self.device), indent=2, default=str).encode())
        facts = finetune.train(
            model, rows, stage.path, seed=self.config.seed, adapter=adapter, start=self._start(), pad=rows.pad,
            watch=lambda step, steps, loss: self.view.watch(info, {"step": step, "lower_loss": loss}, step / steps),
        )  # fmt: skip
        # The tokenizer and its chat template too, so that the folder is all that another program needs.
        self.tuned_tokenizer.save_pretrained(stage.path / facts["kind"])
        return stage.finish(
            [*(one for one in (stage.path / facts["kind"]).iterdir() if one.is_file()), stage.path / "losses.jsonl"], facts
        )

    def _evaluate(self) -> Done:
        before, evaluate = self.run("finetune"), self.config.evaluate
        inputs = {"version": EVALUATE_VERSION, "settings": settings(evaluate), "finetune": [before.key, before.digest]}
        stage = Stage(name="evaluate", path=self.folder / "evaluate", inputs=inputs)
        if (found := self._found(stage)) is not None:
            return found
        self._begin(stage, ", ".join([*self._task.test, *evaluate.benchmarks]) or "nothing to evaluate")
        model = self.tuned(before)
        tests: dict[str, Any] = {}
        for name, table in self._tuned_tables("test").items():
            found_losses = losses.row_losses(model, table)
            tests[name] = losses.summary(found_losses, seed=self.config.seed)
            kept = {"digest": table.digest, **found_losses.as_dict()}
            replace_file(stage.path / f"losses-{name}.json", json.dumps(kept).encode())
        benchmarks = {}
        if evaluate.benchmarks:
            benchmarks = evaluate.run(model, self.tuned_tokenizer, stage.path / "benchmarks", self.say)
        outputs = [stage.path / f"losses-{name}.json" for name in tests]
        return stage.finish(outputs, {"test": tests, "benchmarks": benchmarks})

    # -- what they need ---------------------------------------------------------------------------------------------

    @property
    def _task(self) -> Any:
        return self.config.task

    @property
    def device(self) -> torch.device:
        return device_called(self.config.run.device)

    @functools.cached_property
    def tokenizer(self) -> Any:
        return self._task.model.load_tokenizer()

    @functools.cache  # noqa: B019 - a mix lives as long as its command
    def tables(self, which: str) -> dict[str, Any]:
        """The token tables of the task's ``sources`` or ``test`` sets."""
        found: dict[str, Any] = self._task.tables(self.tokenizer, which)
        return found

    @property
    def _adapter(self) -> Any:
        """The adapter that is fine-tuned, None for all parameters."""
        own = self.config.finetune.adapter
        return self._task.adapter if own is None else own

    @functools.cached_property
    def tuned_tokenizer(self) -> Any:
        """That of the model that is fine-tuned."""
        model = self.config.finetune.model
        return self.tokenizer if model is None else model.load_tokenizer()

    @functools.cache  # noqa: B019
    def _tuned_tables(self, which: str) -> dict[str, Any]:
        """The sets in the tokens of the model that is fine-tuned."""
        if self.config.finetune.model is None:
            return self.tables(which)
        found: dict[str, Any] = self._task.tables(self.tuned_tokenizer, which)
        return found

    def _chosen(self, rows: list[dict[str, Any]], digests: Mapping[str, str]) -> ChosenRows:
        """The sampled rows, for the model that is fine-tuned: each source row again in its tokens, where that has another
        tokenizer. One that is too long in those is left out, and said."""
        tables = self._tuned_tables("sources")
        if self.config.finetune.model is None:
            return ChosenRows(tables, rows, digests)
        places = {name: {row: i for i, row in enumerate(table.rows.tolist())} for name, table in tables.items()}
        kept = [{**row, "position": places[row["source"]][row["row"]]} for row in rows if row["row"] in places[row["source"]]]
        if len(kept) < len(rows):
            most = self._task.max_length
            self.say(f"  {len(rows) - len(kept)} of {len(rows)} rows have more than {most} tokens of finetune.model: left out")
        if not kept:
            raise DataError("no row is left to fine-tune on\n  raise task.max_length")
        return ChosenRows(tables, kept, {name: table.digest for name, table in tables.items()})

    def base(self) -> Any:
        """The model that is fine-tuned, as it was before."""
        model = self.config.finetune.model or self._task.model
        found = model.load(self.device, torch.float32, len(self.tuned_tokenizer))
        self._task.fits(found, {which: self._tuned_tables(which) for which in ("sources", "test")})
        return found

    def tuned(self, finetuned: Done) -> Any:
        """The fine-tuned model, from its files."""
        path = finetuned.path / finetuned.facts["kind"]
        if finetuned.facts["kind"] == "adapter":
            from peft import PeftModel

            with peft_behind():
                return PeftModel.from_pretrained(self.base(), path).eval()
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(self.device).eval()

    def _state(self) -> Any:
        """The state that reweighting ended with."""
        found = RunFolder(self.run("reweight").path).load(self.device)
        assert found is not None  # a finished run has a checkpoint
        return found[0]

    def _scores(self, tables: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The method's ranking as a score for every row of every table, NaN where it ranked none; None if it ranks nothing."""
        rank = getattr(self.config.method, "ranking", None)
        if rank is None:
            return None
        config = self.config
        state = self._state()
        unbuilt = Unbuilt(lambda: config.task.problem(config.seed, self.device, getattr(torch, config.run.dtype)))
        flat = rank(unbuilt, state).detach().cpu()
        finished = getattr(config.method, "finished", None)
        if bool(flat.isnan().all()) and finished is not None and not finished(state):
            raise ConfigError(
                f"{config.method_name} ranks rows once it has finished, which it had not when its budget of "
                f"{config.budget} was spent\n  raise the budget"
            )
        pool = self._task.cached(tables, config.seed)
        scores = {}
        for (name, cached), part in zip(pool.items(), flat.split([each.size for each in pool.values()]), strict=True):
            place = {row: position for position, row in enumerate(tables[name].rows.tolist())}
            scores[name] = torch.full((tables[name].size,), torch.nan, dtype=torch.float64)
            scores[name][[place[row] for row in cached.rows.tolist()]] = part.double()
        return scores

    def _listed(
        self, tables: Mapping[str, Any], chosen: Mapping[str, Tensor], scores: Mapping[str, Tensor] | None
    ) -> Iterator[dict[str, Any]]:
        """The drawn rows in their order, with the text, so that any other program can train on them too."""
        from hgms_llm import read_examples

        listed = []
        for name in sorted(chosen):
            texts = (
                {one.row: one.messages for one in read_examples(name, self._task.sources[name])} if len(chosen[name]) else {}
            )
            for position in chosen[name].tolist():
                row = int(tables[name].rows[position])
                score = {} if scores is None else {"score": float(scores[name][position])}
                messages = [{"role": one.role, "content": one.text} for one in texts[row]]
                listed.append({"source": name, "row": row, "position": position, **score, "messages": messages})
        return (listed[i] for i in self.config.sample.order(len(listed), seed=self.config.seed).tolist())

    def _start(self) -> dict[str, Tensor] | None:
        """The lower variables that reweighting ended with, by the names that fine-tuning has for them."""
        if self.config.finetune.start == "fresh":
            return None
        lower = self.config.method.result(self._state())[1]
        if self._task.adapter is None:
            return dict(lower)
        return {f"base_model.model.{name.removesuffix('.weight')}.default.weight": leaf for name, leaf in lower.items()}

    def _found(self, stage: Stage) -> Done | None:
        found = stage.found()
        if found is not None:
            self.say(f"{stage.name}: done before ({stage.path})")
        return found

    def _begin(self, stage: Stage, what: str) -> None:
        # Hooks and trainers make cycles, which only a collection breaks: the last stage's model goes before this one's comes.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        going_on = stage.begin()
        self.say(f"{stage.name}: {'going on with ' if going_on else ''}{what}")


class Unbuilt:
    """The problem of a run, built when something of it is asked for. Rankings are mostly stored with the state, and a problem
    holds a base model."""

    def __init__(self, build: Callable[[], Problem]) -> None:
        self._build = functools.cache(build)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._build(), name)


class ChosenRows(Sequence[tuple[Tensor, Tensor]]):
    """The sampled rows as (tokens, completion mask), read from the token tables when asked for."""

    def __init__(self, tables: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], digests: Mapping[str, str]) -> None:
        for name in positions(rows):
            if tables[name].digest != digests[name]:
                raise DataError(f"source {name!r} changed since its rows were drawn\n  run the command again: it draws anew")
        self._tables, self._rows = tables, [(row["source"], row["position"]) for row in rows]
        self.pad = next(iter(tables.values())).pad_id

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        name, position = self._rows[index]
        table = self._tables[name]
        cut = slice(int(table.offsets[position]), int(table.offsets[position + 1]))
        return table.tokens[cut], table.mask[cut]


def _copy(run: RunFolder, target: Path) -> None:
    """What says that a run is finished comes last: a copy that is broken off is a run to go on with."""
    tensors = run.path.glob("checkpoint-*.safetensors")
    others = (run.path / name for name in ("env.json", "resources.json"))
    for path in (run.config, run.steps, run.timings, *tensors, *others, run.checkpoint, run.summary):
        if path.is_file():
            replace_file(target / path.name, path.read_bytes())


def mix_path(config: MixConfig, name: str) -> Path:
    """Where a mix lives: ``<out>/<name>/<method>-<hash>/seed-<n>``, with labels in place of names. The hash is the run's: mixes
    that only sample, fine-tune or evaluate in another way share a folder, so the mixture is learned once for all of them."""
    run = config.reweight
    method = run.run.label or run.method_name
    return Path(run.run.out, run.run.task_label or name, f"{method}-{run.config_hash}", f"seed-{run.seed}")


__all__ = ["STAGES", "Mix", "comparable", "mix_path"]
