"""Co-teaching: two networks, each of which selects the rows with small loss for the other."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers, launch
from hgms.methods.reweighting import base, joint_training
from hgms.rows import weighted_rows
from hgms_core import Batch, Cost, Key, Loss, Problem, Record, Rows, State, Tree, component
from hgms_core.trees import require_grad
from hgms_core.validators import all_of, at_least, less_than, not_negative, optional, positive


@final
@component
class SmallLoss(base.Reweighting):
    """Train two networks a and b on the same batches. Each network selects the rows with small
    loss, and the other network learns from these rows::

        R(T) = 1 − τ min(T / T_k, 1),      k = R(T)·B                       T: epochs so far
        P_a, P_b = the k rows of the batch with the smallest ℓ_i(a), ℓ_i(b)
        a ← a − η ∇[1/k Σ_{i ∈ P_b} ℓ_i(a) + r(a) + ε f(a)],
            b ← b − η ∇[1/k Σ_{i ∈ P_a} ℓ_i(b) + r(b) + ε f(b)]

    f is on the validation rows of the roles ``differentiate`` and ``select``. With these rows the
    method uses the same data as the methods that it is compared with. The paper uses no validation
    rows, which is ε = 0. No hypergradient is computed and no θ is learned. θ reports the number of
    networks that selected each row when its batch was last seen: logits 10, 0 or −10, and 0 before.

    The rate of noise τ is given, or estimated from validation rows in the first outer step. A
    network is trained only on the rows of the roles ``differentiate`` and ``select``. Let t be the
    0.8-quantile of its losses on the rows of the role ``stop``. Then τ = 1 − (share of lower rows
    with ℓ_i ≤ t) / 0.8, from 0 to 0.95.

    Use as a baseline for every method that learns weights: it is the usual method without bilevel
    optimisation for wrong labels. Avoid if g and f have different losses of a row, or if validation
    rows lack the columns of lower rows (then set ``noise_rate``).

    Cost of a lower step: 2 lower gradients, and 2 upper gradients for each of the two roles.

    Parameters
    ----------
    steps
        Lower steps of both networks in one outer step.
    noise_rate
        τ; ``None`` estimates it from validation rows.
    estimate_steps
        Steps of Adam at rate 0.01 for the estimate.
    forget_epochs
        T_k.
    tilt
        ε.
    optimizer, lr, momentum
        The update of both networks.
    schedule
        Lr over the budget, to 0 as a cosine or constant.
    batch_size, upper_batch_size
        Lower and validation rows of a step (``None``: all).
    keep
        ``best`` returns the network and step of the lowest upper loss on rows of ``stop``; ``last``
        returns the last a.

    Notes
    -----
    Memory: two graphs of a gradient.

    Source: Han, Yao, Yu, Niu, Xu, Hu, Tsang, Sugiyama, *Co-teaching: robust training of deep neural
    networks with extremely noisy labels*, NeurIPS 2018 (arXiv 1804.06872), algorithm 1.

    Examples
    --------
    >>> smallest(torch.tensor([3.0, 0.1, 2.0, 0.5]), 2)
    tensor([False,  True, False,  True])
    """

    name: ClassVar[str] = "small-loss"
    needs: ClassVar[frozenset[str]] = frozenset({"row-weights", "stop-rows"})

    noise_rate: float | None = field(
        default=None, validator=optional(all_of(at_least(0), less_than(1)))
    )
    estimate_steps: int = field(default=100, validator=positive)
    forget_epochs: float = field(default=10.0, validator=positive)
    tilt: float = field(default=1.0, validator=not_negative)

    @classmethod
    def testing_instance(cls) -> SmallLoss:
        return cls(steps=4, lr=0.05, estimate_steps=20)  # for problems of size 1

    def init(self, problem: Problem, seed: int) -> State:
        peer = problem.initial(Key(seed).fold("peer"))
        if problem.fresh is None:  # with equal starts, the two networks would stay equal
            draw = Key(seed).fold("apart").generator()
            noise = {
                name: torch.randn(leaf.shape, generator=draw, dtype=torch.float64)
                for name, leaf in peer.items()
            }
            peer = {
                name: leaf + 0.1 * leaf.square().mean().sqrt() * noise[name].to(leaf)
                for name, leaf in peer.items()
            }
        own, other = (base.no_moments(self.optimizer, x) for x in (problem.x0, peer))
        return base.begin(
            self,
            problem,
            seed,
            peer=peer,
            moments=own,
            peer_moments=other,
            noise_rate=self.noise_rate,
        )

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        rows = weighted_rows(problem, self.name)
        theta = state["theta"]
        cost = Cost()
        noise_rate = state["noise_rate"]
        if noise_rate is None:
            noise_rate, cost = self._estimate(problem, rows, Key(state["seed"]).fold("estimate"))
        pair = tuple(state[name] for name in ("x", "peer", "moments", "peer_moments"))
        shares = tuple(share for share, _ in base.joint_parts(problem)) if self.tilt else ()
        settings = (self.name, self, rows, problem.f, shares)
        function = partial(self._lower_step, rows, problem.f, shares)
        rate = self.rate(progress)
        picked = theta[rows.leaf]
        size = problem.lower_data.count(self.batch_size)
        steps = range(state["lower_steps"], state["lower_steps"] + self.steps)
        for number, below in base.lower_batches(problem, state["seed"], steps, self.batch_size):
            above, upper_size = base.joint_batches(
                problem, Key(state["seed"]).fold(number), self.upper_batch_size
            )
            epochs = number * size / problem.lower_data.size
            kept = max(
                1,
                round(
                    (1 - noise_rate * min(epochs / self.forget_epochs, 1.0)) * len(below["index"])
                ),
            )
            numbers = [float(kept), *base.numbers(rate, number + 1)]
            *pair, both, lower, upper = launch(
                problem.compiler,
                settings,
                function,
                numbers,
                *pair,
                theta,
                below,
                above if self.tilt else [],
            )
            picked = picked.index_copy(0, below["index"], (base.LARGEST * (both - 1)).to(picked))
            used = len(shares)
            spent = Cost(
                lower_gradients=2,
                upper_gradients=2 * used,
                rows=2 * size + 2 * upper_size * bool(used),
            )
            cost += spent
        changes = {
            **dict(zip(("x", "peer", "moments", "peer_moments"), pair, strict=True)),
            "noise_rate": noise_rate,
            "lower_steps": state["lower_steps"] + self.steps,
            "theta": base.as_theta(problem, rows, picked),
        }
        record: Record = {
            "upper_loss": upper,
            "lower_loss": lower,
            "kept": kept / size,
            "noise_rate": noise_rate,
        }
        return base.end_step(self, problem, state, changes, list(pair[:2]), cost, record)

    def _estimate(self, problem: Problem, rows: Rows, key: Key) -> tuple[float, Cost]:
        """Estimate τ from the losses of a network that is trained only on validation rows."""
        none = base.as_theta(
            problem, rows, torch.full_like(problem.theta0[rows.leaf], -base.LARGEST)
        )
        training = joint_training.Training(
            steps=self.estimate_steps,
            lr=1e-2,
            tilt=1.0,
            batch_size=self.batch_size,
            upper_batch_size=self.upper_batch_size,
        )
        start = problem.initial(key)
        x, _, _, cost = joint_training.train(problem, self.name, none, start, key, training)
        losses, spent = base.all_losses(problem, rows, x)
        usual, more = base.usual_loss(self, problem, rows, x, 0.8)
        share = float((losses <= usual).double().mean())
        return min(max(1 - share / 0.8, 0.0), 0.95), cost + spent + more

    def _lower_step(
        self,
        rows: Rows,
        f: Loss,
        shares: tuple[float, ...],
        numbers: Numbers,
        x: Tree,
        peer: Tree,
        moments: Tree,
        peer_moments: Tree,
        theta: Tree,
        below: Batch,
        above: list[Batch],
    ) -> tuple[Tree, Tree, Tree, Tree, Tensor, Tensor, Tensor]:
        """One lower step as a function of tensors.

        Return both networks and their moments, the number of networks that selected each row, and
        the first network's loss on its rows and on validation rows.
        """
        kept, *steps = numbers
        pair = [require_grad(tree) for tree in (x, peer)]
        with torch.enable_grad():
            losses = [rows.losses(leaves, below) for leaves in pair]
            picks = [smallest(loss.detach(), kept).to(loss) for loss in losses]
            means = [
                (pick * loss).sum() / kept
                for pick, loss in zip(reversed(picks), losses, strict=True)
            ]
            uppers = [
                joint_training.joint_loss(f, shares, theta, leaves, above) if shares else 0.0 * mean
                for leaves, mean in zip(pair, means, strict=True)
            ]
            totals = [
                mean + rows.regulariser(theta, leaves, below) + self.tilt * upper
                for leaves, mean, upper in zip(pair, means, uppers, strict=True)
            ]
            slopes = [
                base.gradient_of(total, leaves) for total, leaves in zip(totals, pair, strict=True)
            ]
        own = base.step_of_x(self.optimizer, self.momentum, steps, x, slopes[0], moments)
        other = base.step_of_x(self.optimizer, self.momentum, steps, peer, slopes[1], peer_moments)
        return (
            own[0],
            other[0],
            own[1],
            other[1],
            picks[0] + picks[1],
            means[0].detach(),
            uppers[0].detach(),
        )


def smallest(losses: Tensor, count: float | Tensor) -> Tensor:
    """Return a mask of the ``count`` smallest losses; of equal losses the first are selected."""
    return losses.argsort(stable=True).argsort() < count
