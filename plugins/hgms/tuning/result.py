"""The result of :func:`hgms.tune`: learned values, a trained model, and the judged candidates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from hgms.tuning.candidate import Judgement


@frozen(eq=False, kw_only=True, repr=False)
class TuneResult:
    """The learned hyperparameters and the model that was trained with them.

    Attributes
    ----------
    model
        The module with the selected parameters, in the mode in which it was passed.
    values
        The hyperparameters by name.
    starts
        Their values at the start.
    selected
        The name of the selected candidate.
    table
        All candidates with their judged losses, the best baseline first.
    engine
        ``"implicit"`` or ``"online"``.
    spent
        Seconds and lower steps.
    test_loss
        The mean loss of the test rows, if they were given.
    warnings
        Remarks about the budget and the hyperparameters.
    """

    model: nn.Module
    values: Mapping[str, Tensor]
    starts: Mapping[str, Tensor]
    selected: str
    table: tuple[Judgement, ...]
    engine: str
    spent: Mapping[str, float]
    budget: str
    judged_rows: int
    test_loss: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_learned(self) -> bool:
        """Whether a learned candidate was selected, not a baseline."""
        return any(row.name == self.selected and not row.is_baseline for row in self.table)

    @property
    def recommendation(self) -> str:
        """Return one sentence: whether learning pays on this problem."""
        if self.is_learned:
            return f"use the learned values ({self.selected}): the gain exceeds the noise"
        learned = [row for row in self.table if not row.is_baseline]
        if not learned:
            return f"use {self.selected}; the budget ended before a hyperparameter was learned"
        return f"use {self.selected}; no learned value is better by more than the noise"

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"tuned by the {self.engine} engine: {self.selected}"
        yield ""
        width = max(12, *(len(name) for name in self.values))
        yield f"  {'value':<{width}}  {'start':>22}  learned"
        for name, value in self.values.items():
            yield f"  {name:<{width}}  {_short(self.starts[name]):>22}  {_short(value)}"
        yield ""
        width = max(len(row.name) for row in self.table)
        has_test = self.test_loss is not None
        test = "test loss  " if has_test else ""
        yield f"  {'candidate':<{width}}  held-out loss  {test}gain ± standard error"
        for row in self.table:
            mark = "→" if row.name == self.selected else " "
            kind = "baseline" if row.is_baseline else "learned"
            gain = "" if row.gain == 0 else f"{row.gain:+.4f} ± {row.error:.4f}"
            test = "" if row.test_loss is None else f"{row.test_loss:9.4f}  "
            yield f"{mark} {row.name:<{width}}  {row.loss:13.4f}  {test}{gain:<21} {kind}"
        yield ""
        yield (
            f"held-out loss: {self.judged_rows} rows, each judged by a model that has not used it"
        )
        if has_test:
            yield "test loss: reported only, no decision used it"
        yield (
            f"spent: {self.spent['seconds']:.3g} s, {self.spent['steps']:.0f} lower steps; "
            f"budget {self.budget}"
        )
        for warning in self.warnings:
            yield f"warning: {warning}"
        yield f"recommendation: {self.recommendation}"

    def save(self, folder: str | Path) -> Path:
        """Write ``model.pt`` (the state of the module), ``values.pt`` and ``table.txt``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), path / "model.pt")
        torch.save(dict(self.values), path / "values.pt")
        (path / "table.txt").write_text(f"{self}\n", encoding="utf-8")
        return path

    def report(self, path: str | Path) -> Path:
        """Write a web page with the table, the recommendation and the picture.

        Raises
        ------
        MissingExtra
            Without matplotlib.
        """
        from hgms.tuning.picture import page

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(self.plot(), str(self)), encoding="utf-8")
        return target

    def plot(self) -> Any:
        """Return a matplotlib figure: learned values, and held-out losses with standard errors.

        Raises
        ------
        MissingExtra
            Without matplotlib.
        """
        from hgms.tuning.picture import draw

        return draw(self.table, self.selected, self.values, self.starts)


def _short(value: Tensor) -> str:
    """Return a scalar, or the quartiles of a vector."""
    flat = value.detach().double().flatten()
    if len(flat) == 1:
        return f"{float(flat):.4g}"
    if len(flat) <= 4:
        return ", ".join(f"{number:.3g}" for number in flat.tolist())
    quartiles = torch.quantile(flat, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
    low, middle, high = (float(number) for number in quartiles)
    if math.isclose(low, high):
        return f"{len(flat)} × {low:.3g}"
    return f"{len(flat)}: {low:.3g} … {middle:.3g} … {high:.3g}"
