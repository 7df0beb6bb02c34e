"""From a number for each source to the hypergradient of the mixture's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from hgms_core import Sources, Tree


def mixture_slope(
    sources: Sources, theta: Tree, alignments: Tensor, present: Tensor, *, redrawn: bool
) -> Tree:
    """−∇_θ Σ_s ω_s(θ) a_s, from ``alignments`` a ``[S]`` of the sources that are ``present``
    ``[S]``::

        d_s = c (a_s − Σ_{r present} ω_r a_r / W),  W = Σ_{r present} ω_r,
            0 for a source that is missing
        h = −∇_θ Σ_s ω_s(θ) d_s    (in logits of a softmax −(c/W) ω_s Σ_{r present} ω_r (a_s − a_r))

    A source that is missing does not move, and with all of them present c = W = 1. What c is where
    some are missing depends on why. If the k sources of a batch are ``redrawn`` in every step, all
    choices of k equally often, c = W S(S − 1)/(k(k − 1)): a pair (s, r) is in that share of the
    batches, so h is right in the mean over batches. If a source is missing until its first row
    comes (running means: what was seen stays), c = 1: it counts as one that is as good as the mean
    of the others. The factor would be wrong there, since it stays for good beside a source whose
    weight is too small for a row to be drawn.

    >>> from hgms.testing.problems import mixture
    >>> problem = mixture()  # of two sources, θ their logits
    >>> both, half = torch.tensor([True, True]), torch.tensor([0.5, -0.5], dtype=torch.float64)
    >>> mixture_slope(problem.find(Sources), problem.theta0, half, both, redrawn=False)
    {'logits': tensor([-0.2500,  0.2500], dtype=torch.float64)}
    """
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
    with torch.enable_grad():
        omega = sources.weights(leaves)
        seen = present.to(omega.device)
        values = torch.where(seen, alignments.to(omega), 0)
        held = omega.detach() * seen
        whole = held.sum().clamp_min(torch.finfo(held.dtype).tiny)
        departures = torch.where(seen, values - (held * values).sum() / whole, 0)
        if redrawn:
            pairs = [
                count * max(1, count - 1) for count in (len(values), max(1, int(present.sum())))
            ]
            departures = departures * whole * pairs[0] / pairs[1]
        grads = torch.autograd.grad(
            -(omega * departures).sum(), list(leaves.values()), materialize_grads=True
        )
    return dict(zip(leaves, grads, strict=True))
