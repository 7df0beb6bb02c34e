"""A finished sample of ``hgms mix`` for exporters.

It contains the rows by source, the weights, and the settings of the training.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from attrs import frozen

from hgms.arguments import require
from hgms.store import Folder, read_manifest
from hgms_mix.stages import MixConfig, fingerprint, load, mix_path, read_rows

Row = Mapping[str, Any]


@final
@frozen(kw_only=True, eq=False)
class Sampled:
    """A sample with the settings of the mix that drew it.

    ``facts`` are the facts of the stage `sample`, and ``rows`` the drawn rows by source, in the
    order of the task (as in ``rows.jsonl.gz``).
    """

    config: Any
    facts: Mapping[str, Any]
    rows: Mapping[str, Sequence[Row]]

    @property
    def is_ranked(self) -> bool:
        """Whether the rows are the best of a ranking, not drawn by weights."""
        return bool(self.facts["by"] == "ranking")

    @property
    def weights(self) -> dict[str, float]:
        """The learned weights of all sources; their sum is 1."""
        total = float(sum(self.facts["weights"].values()))
        return {name: float(weight) / total for name, weight in self.facts["weights"].items()}

    @property
    def size(self) -> int:
        return sum(map(len, self.rows.values()))

    @property
    def shares(self) -> dict[str, float]:
        """Share of each source in the rows of the sample."""
        return {name: len(rows) / self.size for name, rows in self.rows.items()}

    @property
    def model(self) -> Any:
        """The base model for fine-tuning."""
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
        """Whether the model's own chat template writes the turns; a trainer must also use it."""
        return bool(self.config.task.template == "model")

    def pieces_of(self, rows: Sequence[Row]) -> list[list[tuple[str, bool]]]:
        """Return each of the rows as the template writes it.

        A row is a list of pieces of text, each with a flag for learned text.
        """
        from hgms_mix.lm import Message, template_for

        template = template_for(self.config.task.template, self.tokenizer)
        chats = (
            [
                Message(turn["role"], turn["content"], turn.get("context", ""), is_learned(turn))
                for turn in row["messages"]
            ]
            for row in rows
        )
        token = self.tokenizer.convert_ids_to_tokens
        return [
            [
                (text if isinstance(text, str) else token(text), learned)
                for text, learned in template.pieces(chat)
            ]
            for chat in chats
        ]


def is_learned(turn: Mapping[str, Any]) -> bool:
    """Return whether a turn of a drawn row is learned, if it is an answer."""
    return bool(turn.get("weight", 1))


def load_sample(
    place: Path,
    sets: Sequence[str] = (),
    *,
    seed: int | None = None,
    out: str | None = None,
    method: str | None = None,
    scale: str | None = None,
    registry: Any = None,
) -> Sampled:
    """Return the sample of a mix file, or of the output folder of ``hgms mix``.

    Raises
    ------
    ConfigError
        If the sample does not exist, or was drawn with other settings.
    CheckpointError
        If it is damaged.
    """
    folder = place if place.is_dir() else None
    require(
        folder is None or (folder / "mix.toml").is_file(),
        "missing-file",
        "the folder is not a folder of hgms mix, because it has no mix.toml",
        place=(str(folder),),
        hint="use the folder that contains sample-…/, or the mix file",
    )
    file = place if folder is None else folder / "mix.toml"
    config = load(file, sets, seed=seed, out=out, method=method, scale=scale, registry=registry)
    folder = folder or mix_path(config)
    how = f"hgms mix sample {place if place.is_file() else file}"
    work = _finished_sample(folder, config, how)
    rows = work.verified_path("rows.jsonl.gz")
    by_source = dict[str, list[Row]]()
    for row in read_rows(rows):
        by_source.setdefault(row["source"], []).append(row)
    names = getattr(config.task, config.sample.of)
    return Sampled(
        config=config,
        facts=work.manifest().facts,
        rows={name: by_source[name] for name in names if name in by_source},
    )


def _finished_sample(folder: Path, config: MixConfig, how: str) -> Folder:
    """Return the folder of the finished sample with these settings; the latest of several.

    ``how`` is the command that draws it.
    """
    found = [
        (path.stat().st_mtime, path, manifest)
        for path in folder.glob("sample-*")
        if (manifest := read_manifest(path)) is not None and manifest.status == "done"
    ]
    require(
        found,
        "missing-file",
        "the folder contains no finished sample",
        place=(str(folder),),
        hint=f"draw it first: {how}",
    )
    settings = json.loads(json.dumps(fingerprint(config.sample)))
    same = [each for each in found if each[2].facts["inputs"]["sample"] == settings]
    require(
        same,
        "other-settings",
        "the samples were drawn with other settings than those of the mix file",
        place=(str(folder),),
        hint=f"draw it again: {how}",
    )
    _, path, manifest = max(same, key=lambda each: each[0])
    return Folder(path, manifest.key)
