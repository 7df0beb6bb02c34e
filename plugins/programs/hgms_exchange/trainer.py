"""What a trainer is to the hand-over, and what exporters share: files of rows, YAML, and what a weight means."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from attrs import frozen

from hgms_core import ConfigError, MissingExtra
from hgms_exchange.sampled import Part, Sampled
from hgms_run import replace_file

COMMIT = "COMMIT"
"""Where a data set of the Hub is named without its commit, which a source has to have."""
UNNAMED = "MODEL"
"""Where a mix has no base model with a name: a network with random weights is built anew in every program."""


@final
@frozen(kw_only=True)
class Brought:
    """What a configuration says of data: rows for each source (tables as ``[task.sources.NAME]`` has them), the share of each
    in what is trained on, and the base model's name."""

    sources: Mapping[str, Mapping[str, Any]]
    mixture: Mapping[str, float]
    model: str | None = None
    notes: Sequence[str] = ()


@final
@frozen(kw_only=True)
class Trainer:
    """A trainer: what its weights mean, how a sample is written for it, and how its configuration is read.

    ``whole`` gives what to write for each source in order to draw from all of its rows instead of the sample.
    """

    name: str
    files: tuple[str, ...]
    meaning: str
    command: str
    write: Callable[[Sampled, Path], Sequence[str]]
    whole: Callable[[Sampled], Mapping[str, str]]
    read: Callable[[Path], Brought]


def write_rows(folder: Path, part: Part, rows: Iterable[Mapping[str, Any]]) -> str:
    """A file of the rows, relative to ``folder``."""
    lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path = folder / "rows" / f"{part.stem}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lines.encode())
    return path.relative_to(folder).as_posix()


def write_yaml(path: Path, table: Mapping[str, Any], head: str) -> None:
    text = yaml().safe_dump(dict(table), sort_keys=False, allow_unicode=True, width=120)
    replace_file(path, f"# {head}\n{text}".encode())


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """A YAML or JSON file (which is YAML) with a mapping in it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    try:
        table = json.loads(text) if path.suffix == ".json" else yaml().safe_load(text)
    except (ValueError, yaml().YAMLError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {str(error).splitlines()[0]}"
        ) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} holds no table, so it is no {what}")
    return table


def yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "configurations of trainers are YAML, and pyyaml is not installed\n  pip install 'hgms[llm]'"
        ) from error


def model_name(sample: Sampled) -> str:
    """The base model as other programs find it from the export's folder: where it lies, or its name on the Hub."""
    from hgms_llm import model_folder

    if sample.model.path is None:
        return UNNAMED
    folder = model_folder(sample.model.path, "task.model.path")
    return str(folder.resolve()) if folder.is_dir() else str(sample.model.path)


def numbers(value: Any, count: int, where: str) -> list[float]:
    """Probabilities or fractions: a list, or a text with commas; ConfigError unless there is one for each source."""
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    try:
        found = [float(part) for part in (listed if isinstance(listed, list) else [listed])]
    except (TypeError, ValueError):
        raise ConfigError(f"{where} = {value!r} is no list of numbers") from None
    if len(found) != count or any(not 0 <= part < float("inf") for part in found) or sum(found) <= 0:
        raise ConfigError(f"{where} = {value!r} must have a number ≥ 0 for each of the {count} data sets, not all of them 0")
    return found


def normalised(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights with the sum one.

    >>> normalised({"a": 3, "b": 1})
    {'a': 0.75, 'b': 0.25}
    """
    total = sum(weights.values())
    if total <= 0:
        raise ConfigError("every data set has the weight 0, so there is no mixture")
    return {name: weight / total for name, weight in weights.items()}


def located(name: str, file: Path) -> str:
    """A data file as the mix file shall have it: relative to here if it is below, else absolute. Trainers look from where they
    are started, so the place of the configuration comes second."""
    for base in (Path.cwd(), file.resolve().parent):
        if (base / name).exists():
            path = (base / name).resolve()
            return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else str(path)
    raise ConfigError(f"there is no file {name} here or beside {file}\n  run this where the trainer would be started")


def count_rows(name: str, table: Mapping[str, Any]) -> int:
    """Rows of a source; ConfigError for one of the Hub, whose rows are not here."""
    from hgms_llm import Source, read_examples

    if "path" not in table:
        raise ConfigError(
            f"the share of {name!r} depends on how many rows it has, and they are on the Hub ({table.get('hub')})\n"
            "  fetch it and name the file, or write the trainer's weights for it"
        )
    return len(read_examples(name, Source(**table)))


def named(sources: Mapping[str, Mapping[str, Any]], wanted: str) -> str:
    """``wanted``, with a number where a source is called so already."""
    taken, name, number = {known.casefold() for known in sources}, wanted, 1
    while name.casefold() in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name
