"""A model and endpoints; ``judge_files`` puts the package ``evaluation`` on the path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.generation import small_model
from support.judge_files import Act, Endpoint


@pytest.fixture(scope="session")
def llama() -> tuple[Any, Any]:
    pytest.importorskip("transformers", reason="the extra hgms[scores] is not installed")
    return small_model()


@pytest.fixture
def serve() -> Iterator[Callable[[Act], Endpoint]]:
    with contextlib.ExitStack() as stack:
        yield lambda act: stack.enter_context(contextlib.closing(Endpoint(act)))
