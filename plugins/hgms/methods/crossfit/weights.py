"""Weights of lower rows as a function of three numbers and of scores. The score of a row comes from
a branch that was not trained on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hgms_core import Tree

SLOPE = "log_slope"
THRESHOLD = "threshold"
TILT = "log_tilt"
LARGEST = 12.0
"""Upper bound of the absolute value of scores and logits."""
BOUNDS = {SLOPE: (-2.0, 3.0), THRESHOLD: (-LARGEST, LARGEST), TILT: (-3.0, 3.0)}


def score(losses: Tensor) -> Tensor:
    """Return log p/(1 − p) with p = exp(−ℓ). For a cross-entropy these are the log-odds of a row's
    label according to the network.

    Examples
    --------
    >>> score(-torch.tensor([0.75, 0.9]).log())
    tensor([1.0986, 2.1972])
    """
    return (-losses - torch.log(-torch.expm1(-losses.clamp_min(1e-6)))).clamp(-LARGEST, LARGEST)


def logits(alpha: Tree, scores: Tensor) -> Tensor:
    """θ_i = exp(log_slope)·(s_i − threshold).

    Examples
    --------
    >>> alpha = {SLOPE: torch.tensor(0.0), THRESHOLD: torch.tensor(1.0)}
    >>> logits(alpha, torch.tensor([1.0, 3.0]))
    tensor([0., 2.])
    """
    return (alpha[SLOPE].exp() * (scores - alpha[THRESHOLD])).clamp(-LARGEST, LARGEST)


def begin(slope: float, tilt: float, like: Tensor) -> Tree:
    """Return α before the first outer step: this slope and tilt, and threshold 0."""
    return {
        SLOPE: like.new_tensor(slope).log(),
        THRESHOLD: like.new_zeros(()),
        TILT: like.new_tensor(tilt).log(),
    }


def clip_weights(alpha: Tree) -> Tree:
    """Return α with its three numbers clipped to :data:`BOUNDS`; other leaves are not changed."""
    return {
        name: leaf.clamp(*BOUNDS[name]) if name in BOUNDS else leaf for name, leaf in alpha.items()
    }
