"""Fixtures of the tests of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.programs import MAKING, Time
from torch import Tensor
from torch.fx import GraphModule

from hgms.compiled import programs


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are the traced graphs themselves: all but the compiler, which takes seconds for
    each.
    """

    def as_traced(
        graph: GraphModule, leaves: Sequence[Tensor], **settings: Any
    ) -> Callable[..., Any]:
        Time.now += MAKING
        return lambda inputs: graph(*inputs)

    monkeypatch.setattr(programs, "compile_graph", as_traced)
