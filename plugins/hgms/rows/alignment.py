"""Convert one number per source to the hypergradient of the mixture's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from hgms_core import Sources, Tree


def mixture_slope(
    sources: Sources, theta: Tree, alignments: Tensor, present: Tensor, *, redrawn: bool
) -> Tree:
    """Return −∇_θ Σ_s ω_s(θ) a_s from ``alignments`` a ``[S]``.

    Only the sources that are ``present`` ``[S]`` contribute::

        d_s = c (a_s − Σ_{r present} ω_r a_r / W),  W = Σ_{r present} ω_r,
            0 for a source that is missing
        h = −∇_θ Σ_s ω_s(θ) d_s    (in logits of a softmax −(c/W) ω_s Σ_{r present} ω_r (a_s − a_r))

    A missing source does not move. If all sources are present, c = W = 1. If some are missing, c
    depends on the reason.

    If the k sources of a batch are ``redrawn`` in every step, with equal probability for all
    choices of k, then c = W S(S − 1)/(k(k − 1)). A pair (s, r) is in a share
    k(k − 1)/(S(S − 1)) of the batches, so h is correct in the mean over batches.

    If a source is missing until its first row is drawn (running means keep earlier values), then c
    = 1. The source counts as equal to the mean of the others. The factor above would be wrong in
    this case: it would remain permanently if the weight of a source is too small for a row to be
    drawn.

    Examples
    --------
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
