"""Jobs on their way to another machine and back, in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects

from hgms.executors import Ending, Job, Needs, pack_job, run_message, transport
from hgms_core import ConfigError


def acts(arguments: Mapping[str, Any], tell: Any) -> Mapping[str, Any]:
    tell(event="step", share=0.5)
    if arguments.get("raises"):
        raise ERROR
    return {"folder": os.getcwd(), "threads": torch.get_num_threads(), "mark": os.environ[MARK]}


MARK = "HGMS_TRANSPORTED"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, "there")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


ERROR = ConfigError("missing-file", "no such data", place=("train.jsonl", 3))


def job(**arguments: Any) -> Job:
    return Job(
        title="one", function="test_transport:acts", arguments=arguments, needs=Needs(cpus=2)
    )


def message(made: Job, **changes: Any) -> dict[str, Any]:
    """As it arrives: JSON."""
    return {**json.loads(json.dumps(pack_job(made))), **changes}


def test_a_job_has_the_folder_the_threads_and_the_settings_of_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = message(job())
    monkeypatch.chdir("/")
    monkeypatch.setenv(MARK, "here")
    result = run_message(sent)
    assert result["outcome"] == {"folder": str(tmp_path), "threads": 2, "mark": "there"}


def test_another_installation_and_a_folder_that_is_not_there_are_refused() -> None:
    made = job()
    cases = (
        ({"installation": {"torch": "0.1"}}, "other-installation", ()),
        ({"folder": "/no/such/folder"}, "missing-file", ("/no/such/folder",)),
    )
    for changes, code, place in cases:
        result = run_message(message(made, **changes))
        assert list(result) == ["rejected"]
        with rejects(code, *place, of=ConfigError):
            Ending.of(made, result)


def test_a_build_of_torch_for_another_device_is_accepted() -> None:
    for version in ("2.11.0", "2.11.0+cpu", "2.11.0+cu130"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "__version__", version)
            assert transport.installation()["torch"] == "2.11.0"


def test_an_error_comes_back_with_its_code_and_place() -> None:
    made = job(raises=True)
    ending = Ending.of(made, run_message(message(made)))
    assert (getattr(ending.error, "place", None), ending.outcome) == (ERROR.place, None)
