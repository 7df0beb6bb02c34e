"""The task: find the mixture of named data sources that best fits a validation set."""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, final

import attrs
import torch
from attrs import field
from torch import Tensor

from hgms.arguments import errors_at, require
from hgms.config import lowering, validation_shares
from hgms_core import HgmsError, Key, Problem, Sources, Tree, component, roles
from hgms_core.capabilities import Capabilities, HasData, HasTestingInstance, Sharded
from hgms_core.validators import at_least, optional_positive
from hgms_mix.lm.examples import content
from hgms_mix.lm.language import LanguageModel
from hgms_mix.lm.lora import Lora
from hgms_mix.lm.losses import (
    Average,
    Batches,
    Examples,
    MixtureLoss,
    Rows,
    UpperLoss,
    mean_lengths,
    token_loss,
    weights,
)
from hgms_mix.lm.models import BaseModel
from hgms_mix.lm.overlaps import overlap_warning
from hgms_mix.lm.rows import Index, index_of
from hgms_mix.lm.sources import Source, check_names, mixture_shares
from hgms_mix.lm.store import warn
from hgms_mix.lm.table import TokenTable, check_fits, skipped_rows
from hgms_mix.lm.templates import Template, check_template, template_for
from hgms_mix.lm.tokens import NoRowsLeft, drawn_table, token_table

T = TypeVar("T")
Which = Literal["sources", "validation", "test"]
SETS: tuple[Which, ...] = ("sources", "validation", "test")


def _check_sources(_task: object, attribute: Any, value: Mapping[str, Source]) -> None:
    require(
        value,
        "missing-option",
        f"{attribute.name} is empty, but must have at least one source",
        place=(attribute.name,),
        hint=f"add a table [task.{attribute.name}.<name>] with its path",
    )
    check_names(value, place=(attribute.name,))


class _Metrics:
    """The metrics: all for the class, and the available metrics for a task.

    A task without a test set has no test loss.
    """

    def __get__(self, task: SourceMixture | None, _class: type) -> Mapping[str, bool]:
        tested = task is None or task.test
        known = task is None or task.reference is not None
        names = [
            *(["test_loss"] if tested else []),
            "validation_loss",
            *(["recovery_error"] if known else []),
        ]
        return dict.fromkeys(names, False)


@final
@component
class SourceMixture:
    """Learn the weights of data sources by their use for a validation set::

        f(x) = mean loss of the validation rows,  g(θ, x) = Σ_s ω_s · mean loss of source s,
            ω = softmax(θ)

    x are LoRA adapters on one frozen base model, or all its parameters. The loss of a row is the
    mean −log p of its completion tokens. A batch contains equally many rows of every source.
    Therefore only ω_s determines the weight of a source, for any number of rows.

    Metrics: ``test_loss`` (with a test set) and ``validation_loss`` (role stop) are means over
    tokens, as is usual for log-likelihoods.

    Parameters
    ----------
    sources, validation, test
        Tables by name. Weights refer to sources by name, never by position. The method ``less``
        takes its maximum over the validation sets. Test rows are only evaluated.
    model, adapter
        The base, and the adapters on it (None: all parameters are lower variables).
    template
        How a row becomes text: the ``model``'s chat template, or ``plain``, ``alpaca``, ``chatml``.
    max_length, too_long
        The most tokens a row may have; longer rows are dropped, or cut.
    cache
        Rows of each source that are used for learning the mixture, chosen by the seed (None: all).
    average
        The unit of the mean over a source (and over the validation rows): ``example`` or completion
        ``token``. ``all-tokens``: over completion tokens, which count equally in all sources, as in
        trainers: ω_s is then a share of rows, and a source of long rows has a larger part of the
        gradient (ℓ_s is its mean over tokens times its mean length divided by the mean length of
        all sources).
    validation_split
        Shares of the roles differentiate, select and stop, or (1, 1, 1) to share all rows.
    prior
        The weights at the start of θ, and the centre for methods with a prior: ``uniform``;
        ``size``, in proportion to the rows of each source; or shares by name.
    reference
        a mixture known to be right; the metric ``recovery_error`` is then ‖ω − ω*‖₁.
    micro_batch
        Rows of one candidate in one pass through the model (None: the whole batch). Bounds memory.
    checkpointing
        Store only each layer's input for the backward pass. Saves most activations for a third more
        time.

    Notes
    -----
    Source: HG-MS paper, section on language models and appendix; the problem is ScaleBiO's (Pan et
    al. 2025).

    Examples
    --------
    >>> task = SourceMixture(
    ...     sources={"sums": Source(path="sums.jsonl"), "poems": Source(path="poems.jsonl.gz")},
    ...     validation={"sums": Source(path="held-out.jsonl")},
    ...     model=BaseModel(config={"model_type": "gpt2", "n_layer": 2}, tokenizer="bytes"),
    ...     adapter=Lora(rank=4),
    ... )
    >>> task.adapter.scaling
    8.0
    """

    name: ClassVar[str] = "source-mixture"
    capabilities: ClassVar[Capabilities] = frozenset({HasData, HasTestingInstance, Sharded})
    version: ClassVar[str] = "1"
    metric_rows: ClassVar[Mapping[str, str]] = {"validation_loss": "validation"}
    metrics: ClassVar[Mapping[str, bool]] = _Metrics()  # type: ignore[assignment]
    traits: ClassVar[frozenset[str]] = frozenset(
        {
            "sources",
            "per-example-losses",
            "representations",
            "few-upper",
            "smooth-lower",
            "stop-rows",
            "validation-rows",
            "reference:reference",
        }
    )

    sources: Mapping[str, Source] = field(validator=_check_sources, hash=False)
    validation: Mapping[str, Source] = field(validator=_check_sources, hash=False)
    test: Mapping[str, Source] = field(
        factory=dict,
        validator=lambda _task, _attribute, value: check_names(value, "test set", ("test",)),
        hash=False,
    )
    model: BaseModel
    adapter: Lora | None = None
    template: str = field(default="model", validator=check_template)
    max_length: int = field(default=512, validator=at_least(4))
    too_long: Literal["drop", "truncate"] = "drop"
    cache: int | None = field(default=None, validator=optional_positive)
    average: Average = "example"
    validation_split: tuple[float, float, float] = field(
        default=(0.5, 0.3, 0.2), validator=validation_shares
    )
    prior: Mapping[str, float] | Literal["uniform", "size"] = field(default="uniform", hash=False)
    reference: Mapping[str, float] | None = field(default=None, hash=False)
    micro_batch: int | None = field(default=None, validator=optional_positive)
    checkpointing: bool = False

    def __attrs_post_init__(self) -> None:
        require(
            len(self.sources) >= 2,
            "wrong-length",
            f"a mixture requires at least 2 sources, but there is {len(self.sources)}",
            place=("sources",),
        )
        if self.reference is not None:
            mixture_shares(self.reference, self.sources, "reference")
        if not isinstance(self.prior, str):
            mixture_shares(self.prior, self.sources, "prior")
        require(
            not self.model.shard or self.adapter is not None,
            "missing-option",
            "model.shard = true requires an adapter: it splits a frozen base",
            place=("adapter",),
            hint="add an adapter, or remove model.shard",
        )

    @property
    def sharded(self) -> bool:
        """Whether each rank of a run stores only a part of the base."""
        return self.model.shard

    def memory_hints(self) -> list[str]:
        """Return options that reduce memory without changing a result."""
        again = [] if self.checkpointing else ["set checkpointing = true (the same result)"]
        return [*lowering(same=["micro_batch"])(self), *again]

    @classmethod
    def testing_instance(cls) -> SourceMixture:
        """Return a task for ``hgms check``: all parameters of a tiny model of bytes, on a few rows.

        The class declares the metrics of a task with a test set and a reference, so this task has
        both.
        """
        files = {name: Source(path=str(path)) for name, path in _testing_files().items()}
        size = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 48}
        return cls(
            sources={name: files[name] for name in ("doubles", "dots")},
            validation={"doubles": files["validation"]},
            test={"doubles": files["test"]},
            model=BaseModel(config={"model_type": "gpt2", **size}, tokenizer="bytes"),
            template="plain",
            max_length=48,
            reference={"doubles": 1.0, "dots": 0.0},
        )

    def tables(self, tokenizer: Any, which: Which = "sources") -> dict[str, TokenTable]:
        """Return the rows of the sources (or of the validation or test sets) as tokens, by name.

        Rows that are too long are excluded.
        """
        return self._by_name(
            which,
            functools.partial(token_table, tokenizer=tokenizer, **self._token_options(tokenizer)),
        )

    def contents(self) -> dict[str, dict[str, str]]:
        """Return an identifier of the files' contents, by set and name.

        It is the sha256 of a file.
        """
        return {which: self._by_name(which, content) for which in SETS}

    def _by_name(
        self, which: str, read: Callable[[str, Source], T], names: Collection[str] | None = None
    ) -> dict[str, T]:
        """Apply ``read`` to every source of a set, or to the sources with these names.

        Places in errors of a source begin with its name; the place of the set is prepended.
        """
        results = {}
        for name, source in getattr(self, which).items():
            if names is not None and name not in names:
                continue
            try:
                results[name] = read(name, source)
            except HgmsError as error:
                if error.place[:1] != (name,):
                    raise
                raise error.at("task", which) from error
        return results

    def data_fingerprint(self) -> dict[str, Any]:
        """Return the inputs of the problem that are not in this configuration.

        These are the contents of its files, and of the model's folder.
        """
        return {"files": self.contents(), "model": self.model.digest()}

    def pool(self, tokenizer: Any, seed: int) -> dict[str, TokenTable]:
        """Return the rows for learning the mixture.

        They are ``cache`` rows of each source, drawn before tokenisation.
        """
        if self.cache is None:
            return self.tables(tokenizer)
        return self.draw(
            tokenizer,
            dict.fromkeys(self.sources, self.cache),
            lambda name: Key(seed).fold("cache", name),
        )

    def draw(
        self, tokenizer: Any, counts: Mapping[str, int], key: Callable[[str], Key]
    ) -> dict[str, TokenTable]:
        """Draw the given number of rows of each source without replacement.

        Each source has its own key, and rows are drawn before tokenisation. All rows are used if a
        source has fewer.
        """

        written = self._token_options(tokenizer)

        def some(name: str, source: Source) -> TokenTable:
            return drawn_table(
                name, source, tokenizer, count=counts[name], key=key(name), **written
            )

        return self._by_name("sources", some, counts)

    def tables_at(
        self, tokenizer: Any, which: Which, numbers: Mapping[str, Tensor]
    ) -> dict[str, TokenTable]:
        """Return the rows with these numbers of each set.

        Rows that are too long in the tokenizer's tokens are excluded.
        """

        written = self._token_options(tokenizer)

        def some(name: str, source: Source) -> TokenTable | None:
            try:
                return token_table(name, source, tokenizer, pick=numbers[name], **written)
            except NoRowsLeft:
                return None

        tables = self._by_name(which, some, numbers)
        return {name: table for name, table in tables.items() if table is not None}

    def rows(self, which: Which = "sources") -> dict[str, Index]:
        """Return the index of the rows with an answer, by name, without tokenisation."""
        read = functools.partial(index_of, split=self.split_answers())
        return self._by_name(which, read)

    def split_answers(self) -> bool:
        """Return whether each answer of a conversation is a separate row.

        This is required if the model's chat template writes the last answer in another way than
        earlier answers.
        """
        return self.template == "model" and self._template(self.model.load_tokenizer()).last_only

    def _template(self, tokenizer: Any) -> Template:
        """Return the template for this tokenizer.

        Raises
        ------
        ConfigError
            For a template that the tokenizer lacks.
        """
        with errors_at("task"):
            return template_for(self.template, tokenizer)

    def _token_options(self, tokenizer: Any) -> dict[str, Any]:
        """Return the settings of tokenisation.

        The task's own model determines which rows exist.
        """
        written = attrs.evolve(self._template(tokenizer), last_only=self.split_answers())
        return {"template": written, "max_length": self.max_length, "too_long": self.too_long}

    def language_model(
        self, tokenizer: Any, device: torch.device, dtype: torch.dtype
    ) -> LanguageModel:
        base = self.model.load(device, dtype, len(tokenizer), sharded=self.sharded)
        options: Any = {"rows": self.micro_batch, "checkpointing": self.checkpointing}
        return LanguageModel.of(base, self.adapter, length=self.max_length, **options)

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        tokenizer = self.model.load_tokenizer()
        pool = self.pool(tokenizer, seed)
        everything = {"sources": pool} | {
            which: self.tables(tokenizer, which) for which in SETS[1:]
        }
        indices = [self.rows(which) for which in SETS]
        read: Mapping[str, Index | TokenTable] = pool if self.cache is None else indices[0]
        for message in filter(None, (skipped_rows(everything), overlap_warning(*indices))):
            warn(message)
        model = self.language_model(tokenizer, device, dtype)
        check_fits(model.model, everything)

        names = tuple(pool)
        lower = Batches(
            tuple(pool.values()),
            device,
            dropout=self.adapter is not None and self.adapter.dropout > 0,
        )
        upper = Batches(tuple(everything["validation"].values()), device)
        test = Batches(tuple(everything["test"].values()), device) if everything["test"] else None
        # Shuffled, so that each role has rows of each validation set.
        generator = Key(seed).fold("validation").generator()
        order = {"row": torch.randperm(upper.size, generator=generator)}
        shares = {
            role: data.batch(None)["row"]
            for role, data in roles(order, self.validation_split).items()
        }

        training = Rows(model, self.average, mean_lengths(lower, device, dtype, self.average))
        g = MixtureLoss(training, len(names))
        f = UpperLoss(Rows(model, self.average, mean_lengths(upper, device, dtype)))

        def theta(mixture: Mapping[str, float]) -> Tree:
            # A weight of zero becomes e⁻³⁰ of the largest: a logit is finite.
            share = torch.tensor(
                mixture_shares(mixture, self.sources, "mixture"), dtype=dtype, device=device
            )
            return {"logits": (share / share.max()).clamp_min(math.exp(-30)).log()}

        sizes = {name: table.size for name, table in read.items()}
        priors: dict[str, Mapping[str, float]] = {"uniform": dict.fromkeys(names, 1), "size": sizes}
        prior = priors[self.prior] if isinstance(self.prior, str) else self.prior

        best = (
            None
            if self.reference is None
            else torch.tensor(mixture_shares(self.reference, self.sources, "reference"))
        )

        def evaluate(theta: Tree, x: Tree) -> Mapping[str, float]:
            metrics = {"validation_loss": token_loss(model, x, upper, shares["stop"])}
            if test is not None:
                metrics["test_loss"] = token_loss(model, x, test, torch.arange(test.size))
            if best is not None:
                gap = weights(theta).double().cpu() - best.double()
                metrics["recovery_error"] = float(gap.abs().sum())
            return metrics

        return Problem(
            theta0=theta(prior),
            x0=model.start(Key(seed).fold("start"), dtype),
            g=g,
            f=f,
            lower_data=lower.data(names),
            upper_data={role: upper.share(numbers) for role, numbers in shares.items()},
            evaluate=evaluate,
            # Fresh adapters; a whole model starts from its own weights each time.
            fresh=(lambda key: model.start(key, dtype)) if self.adapter is not None else None,
            references={} if self.reference is None else {"reference": theta(self.reference)},
            extensions=(
                Sources(
                    names=names,
                    parts=tuple(everything["validation"]),
                    weights=weights,
                    theta=theta,
                    losses=g.sources,
                    examples=Examples(Rows(model, "example", torch.ones(0)), sizes),
                    pooled=UpperLoss(training),
                ),
            ),
            counters=lambda: model.tokens,
            precision=model.precision,
        )


@functools.cache
def _testing_files() -> dict[str, Path]:
    """Write test rows of a few bytes into a folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="hgms-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    numbers = {
        "doubles": range(1, 13),
        "dots": range(13, 25),
        "validation": range(25, 33),
        "test": range(33, 37),
    }
    for name, which in numbers.items():
        answer = (lambda _: ".") if name == "dots" else (lambda number: str(2 * number))
        rows = [{"prompt": f"{number} twice", "completion": answer(number)} for number in which]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    return {name: folder / f"{name}.jsonl" for name in numbers}
