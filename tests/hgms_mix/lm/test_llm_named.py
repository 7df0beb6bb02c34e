"""Models that installed packages bring, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fakes import Site
from support.helpers import rejects

from hgms_core import ConfigError
from hgms_core.errors import MissingExtra

pytest.importorskip("transformers")

from hgms_mix.lm import BaseModel, model_folder

PLACE = ("task", "model", "path")
MODULE = """
from pathlib import Path
from hgms_core.errors import MissingExtra
def folder(): return Path({folder!r})
def broken(): raise ValueError("no such tensor\\nsecond line")
def missing(): raise MissingExtra("missing-package", "it needs more", install="pip install more")
"""


def bring(site: Site, folder: Path, name: str = "their_models", **entries: str) -> None:
    """An installed distribution with a module and entries of the group."""
    site.module(name, MODULE.format(folder=str(folder)))
    models = {model: f"{name}:{function}" for model, function in entries.items()}
    site.install(name, {}, models=models)


def test_the_model_is_loaded_from_it_and_its_package_identifies_it(
    site: Site, tmp_path: Path
) -> None:
    import torch

    from hgms_mix.lm.tokenizers import byte_tokenizer

    size = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16}
    built = BaseModel(config={"model_type": "gpt2", **size}, tokenizer="bytes")
    weights = built.load(torch.device("cpu"), vocabulary=259)
    weights.save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    byte_tokenizer().save_pretrained(tmp_path / "weights")
    bring(site, tmp_path / "weights", theirs="folder")
    named = BaseModel(path="theirs")
    for name, leaf in named.load(torch.device("cpu")).named_parameters():
        assert torch.equal(leaf, weights.get_parameter(name)), name
    before = named.digest()
    assert built.digest() is None
    metadata = site.root / "their_models-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    assert named.digest() != before


def test_the_contents_of_a_folder_are_in_the_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    model = BaseModel(path=str(tmp_path), tokenizer="bytes")
    digests = []
    for contents in (b"0", b"0", b"1"):
        weights.write_bytes(contents)
        digests.append(model.digest())
    assert None is not digests[0] == digests[1] != digests[2]


def test_a_package_at_fault_is_named_and_two_with_one_name_are_refused(
    site: Site, tmp_path: Path
) -> None:
    entries = {"no": "folder", "theirs": "broken", "other": "missing", "gone": "nothing"}
    bring(site, tmp_path / "nowhere", **entries, twice="folder")
    bring(site, tmp_path, name="more_models", twice="folder", mine="folder")
    for name in ("no", "theirs", "gone"):
        with rejects("cannot-load", *PLACE, of=ConfigError) as caught:
            model_folder(name, PLACE)
        assert "their_models" in caught.value.message
    with rejects("missing-package", of=MissingExtra) as missing:
        model_folder("other", PLACE)
    assert missing.value.install == "pip install more"
    with rejects("duplicate-name", *PLACE, of=ConfigError):
        model_folder("twice", PLACE)
    assert model_folder("mine", PLACE) == tmp_path
