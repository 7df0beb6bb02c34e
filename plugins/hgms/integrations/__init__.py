"""Outer steps inside a user's training loop: as an autograd function, in Lightning, in a Trainer.

``hgms.integrations.lightning`` and ``hgms.integrations.trainer`` contain the callbacks; each
requires its library.
"""

from __future__ import annotations

from hgms.integrations.lower_solution import lower_solution
from hgms.integrations.outer_steps import OuterSteps
from hgms.integrations.training_state import move_batch as move_batch
from hgms.integrations.training_state import preserve_state as preserve_state

__all__ = ["OuterSteps", "lower_solution"]
