"""A finished sample of ``hgms mix``, as exporters need it: its rows by source, its weights, and how it was to be trained on."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from attrs import frozen

from hgms_core import CheckpointError, ConfigError
from hgms_mix import Mix, Sampling, load, mix_path, read_rows

Row = Mapping[str, Any]


@final
@frozen(kw_only=True)
class Part:
    """A source that gave rows: its learned ``weight``, the rows (as ``rows.jsonl.gz`` has them) and how many there were to
    choose from. ``stem`` is its name in file names."""

    name: str
    stem: str
    weight: float
    rows: Sequence[Row]
    available: int


@final
@frozen(kw_only=True, eq=False)
class Sampled:
    """A sample with the settings of the mix that drew it. ``ranked``: its rows are a ranking's best, so weights did not choose
    them."""

    title: str
    config: Any
    parts: Sequence[Part]
    ranked: bool

    @property
    def size(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    @property
    def shares(self) -> dict[str, float]:
        """Share of each source in the rows of the sample."""
        return {part.name: len(part.rows) / self.size for part in self.parts}

    @property
    def model(self) -> Any:
        """The base model that is fine-tuned."""
        return self.config.finetune.model or self.config.task.model

    @property
    def adapter(self) -> Any:
        return self.config.finetune.adapter or self.config.task.adapter

    @property
    def seed(self) -> int:
        settings = self.config.finetune
        return int(self.config.seed if settings.seed is None else settings.seed)

    @functools.cached_property
    def tokenizer(self) -> Any:
        return self.model.load_tokenizer()

    @property
    def chat(self) -> bool:
        """Whether turns are written by the model's own chat template, which a trainer then has to do, too."""
        return bool(self.config.task.template == "model")

    @property
    def turns(self) -> int:
        """The most answers that a row has."""
        return max(sum(turn["role"] == "assistant" for turn in row["messages"]) for part in self.parts for row in part.rows)

    def written(self, part: Part) -> list[list[tuple[str, bool]]]:
        """Each row of ``part`` as the template writes it: pieces of text, and whether they are learned."""
        from hgms_llm import Message, read_examples, template_for

        template = template_for(self.config.task.template, self.tokenizer)
        if template.name == "alpaca":  # an input stands apart from its instruction, which a conversation does not show
            source = getattr(self.config.task, self.config.sample.of)[part.name]
            known = {example.row: example.messages for example in read_examples(part.name, source)}
            chats: Iterable[Any] = (known[row["row"]] for row in part.rows)
        else:
            chats = ([Message(turn["role"], turn["content"]) for turn in row["messages"]] for row in part.rows)
        spelt = self.tokenizer.convert_ids_to_tokens
        return [
            [(text if isinstance(text, str) else spelt(text), learned) for text, learned in template.pieces(chat)]
            for chat in chats
        ]

    def pair(self, pieces: Sequence[tuple[str, bool]], *, bos: bool, eos: bool) -> tuple[str, str]:
        """Prompt and last answer of a written row; ``bos`` and ``eos``: with the marks of begin and end spelt out."""
        last = 1 + max((number for number, (_, learned) in enumerate(pieces) if not learned), default=-1)
        prompt, answer = ("".join(text for text, _ in some) for some in (pieces[:last], pieces[last:]))
        if not bos and self.tokenizer.bos_token:
            prompt = prompt.removeprefix(self.tokenizer.bos_token)
        if not eos and self.tokenizer.eos_token:
            answer = answer.removesuffix(self.tokenizer.eos_token)
        return prompt, answer


def sampled(
    place: Path, sets: Sequence[str] = (), *, seed: int | None = None, out: str | None = None, method: str | None = None,
    scale: str | None = None, registry: Any = None,
) -> Sampled:  # fmt: skip
    """The sample of a mix file, or of the folder that ``hgms mix`` wrote for one.

    Errors: ConfigError where the sample is not there, or was drawn with other settings; CheckpointError where it is damaged.
    """
    folder = place if place.is_dir() else None
    if folder is not None and not (folder / "mix.toml").is_file():
        raise ConfigError(
            f"{folder} is not a folder of hgms mix: it has no mix.toml\n  name the folder that holds sample/, or the mix file"
        )
    file = place if folder is None else folder / "mix.toml"
    config = load(file, sets, seed=seed, out=out, method=method, scale=scale, registry=registry)
    folder = folder or mix_path(config, place.stem)
    how = f"hgms mix sample {place if place.is_file() else file}"
    manifest = _manifest(folder / "sample" / "manifest.json", how)
    settings = json.loads(json.dumps(Sampling().inputs(Mix(config, folder))))
    if {key: manifest["inputs"].get(key) for key in settings} != settings:
        raise ConfigError(
            f"the sample in {folder / 'sample'} was drawn with other settings than {file} has\n  draw it anew: {how}"
        )
    rows = folder / "sample" / "rows.jsonl.gz"
    recorded = manifest["outputs"]["rows.jsonl.gz"]["sha256"]
    if not rows.is_file() or hashlib.sha256(rows.read_bytes()).hexdigest() != recorded:
        raise CheckpointError(
            f"damaged file {rows}: its contents do not match the recorded sha256\n  remove the folder {rows.parent}, then {how}"
        )
    facts, by_source = manifest["facts"], dict[str, list[Row]]()
    for row in read_rows(rows):
        by_source.setdefault(row["source"], []).append(row)
    stems = stems_of(sorted(by_source))
    total = float(sum(facts["weights"].values()))
    parts = [
        Part(
            name=name,
            stem=stems[name],
            weight=float(facts["weights"][name]) / total,
            rows=by_source[name],
            available=facts["capacity"][name],
        )
        for name in getattr(config.task, config.sample.of)
        if name in by_source
    ]
    return Sampled(title=folder.parent.parent.name, config=config, parts=parts, ranked=facts["by"] == "ranking")


def _manifest(path: Path, how: str) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        manifest = {}
    except ValueError:
        raise CheckpointError(
            f"damaged file {path}: it is not valid JSON\n  remove the folder {path.parent}, then {how}"
        ) from None
    if manifest.get("status") != "done":
        raise ConfigError(f"there is no finished sample in {path.parent}\n  draw it first: {how}")
    return dict(manifest)


def stems_of(names: Iterable[str]) -> dict[str, str]:
    """Names of sources as parts of file names that every trainer can read: commas, colons and # mean something to some.

    >>> stems_of(["code", "a,b", "a b"])
    {'code': 'code', 'a,b': 'a-b', 'a b': 'a-b-2'}
    """
    stems: dict[str, str] = {}
    for name in names:
        stem = base = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "source"
        number = 1
        while stem.casefold() in {other.casefold() for other in stems.values()}:
            number += 1
            stem = f"{base}-{number}"
        stems[name] = stem
    return stems
