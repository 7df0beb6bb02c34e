"""A model and endpoints, and the folder of the package ``evaluation``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# at the end: the folder has a script evaluate.py, and a library has this name
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "llm"))

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
