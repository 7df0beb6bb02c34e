"""Outer steps inside a training loop of your own: as an autograd function, in Lightning, in a
Trainer.

``hgms.integrations.lightning`` and ``hgms.integrations.trainer`` hold the callbacks; they need the
libraries that they are for.
"""

from __future__ import annotations

from hgms.integrations.lower_solution import lower_solution
from hgms.integrations.outer_steps import OuterSteps
from hgms.integrations.training_state import moved as moved
from hgms.integrations.training_state import undisturbed as undisturbed

__all__ = ["OuterSteps", "lower_solution"]
