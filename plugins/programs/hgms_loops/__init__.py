"""Outer steps inside a training loop of your own: as an autograd function, in Lightning, in a Trainer.

``hgms_loops.lightning`` and ``hgms_loops.trainer`` hold the callbacks; they need the libraries that they are for.
"""

from __future__ import annotations

from hgms_loops.lower_solution import lower_solution
from hgms_loops.outer_steps import OuterSteps
from hgms_loops.surroundings import moved as moved
from hgms_loops.surroundings import undisturbed as undisturbed

__all__ = ["OuterSteps", "lower_solution"]
