"""A process that compares answers, since to start one takes a second; a model; endpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.generation import small_model
from support.judge_files import Act, Endpoint

from hgms_mix.evaluation import Verifier


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    with Verifier(seconds=3) as process:
        yield process


@pytest.fixture(autouse=True, scope="session")
def _one_worker(verifier: Verifier) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hgms_mix.evaluation.evaluate.Verifier", lambda: contextlib.nullcontext(verifier)
        )
        yield


@pytest.fixture(scope="session")
def llama() -> tuple[Any, Any]:
    pytest.importorskip("transformers", reason="the extra hgms[llm] is not installed")
    return small_model()


@pytest.fixture
def serve() -> Iterator[Callable[[Act], Endpoint]]:
    with contextlib.ExitStack() as stack:
        yield lambda act: stack.enter_context(contextlib.closing(Endpoint(act)))
