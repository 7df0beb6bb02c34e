"""A language model as a pure function: (lower variables, tokens) → the loss of each row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from attrs import Factory, define
from torch import Tensor, nn
from torch.nn import functional

from hgms.arguments import require
from hgms_core import Key, Tree
from hgms_core.hypergrad import twice_differentiable_attention
from hgms_mix.lm.lora import Active, Adapters, Lora, checkpoint_layers, recompute
from hgms_mix.lm.passes import needed_lengths, passes, start_tokens
from hgms_mix.lm.sharding import FIRST_ORDER, FirstDerivative, ModelCall, Sharded

LOGITS = 2**26
"""The number of logits in memory at a time (a quarter of a gigabyte in float32)."""


@define(eq=False)
class LanguageModel:
    """A frozen base with adapters, or a model with all parameters as lower variables.

    ``nll(x, tokens, mask)`` is the negative log-likelihood of the masked tokens of each row, with
    their number. ``x`` may contain N stacked adapters; the rows are then ``[N, B, T]``.

    Rows are padded on the right. The causal mask then suffices to exclude padding from scores, and
    attention needs no mask (the fast kernels take none).

    Rows of similar length share a pass (:mod:`~hgms_mix.lm.passes`), each pass as wide as its
    longest row. The losses equal those of the batch's full width, up to rounding. A pass has at
    most ``rows`` rows of one candidate (None: all). With gradients, each such pass is computed
    again in the backward pass, so activations of one pass are in memory at a time. Passes have the
    full width if dropout masks are drawn, or if torch.func transforms the model (a Hessian
    product). ``tokens`` counts the processed tokens.

    ``parts`` is set if the base is split across ranks. All ranks must then call this model equally
    often: a batch has a number of passes that depends on ``rows`` and not on the lengths of its
    rows.
    """

    model: Any
    adapters: Adapters | None
    rows: int | None = None
    plain_head: bool = True
    quantised: bool = False
    start_tokens: int = 0
    parts: Any = None
    tokens: dict[str, int] = Factory(lambda: {"forward_tokens": 0, "backward_tokens": 0})

    @classmethod
    def of(
        cls,
        model: nn.Module,
        spec: Lora | None,
        *,
        length: int,
        rows: int | None = None,
        checkpointing: bool = False,
    ) -> LanguageModel:
        parts = model if isinstance(model, Sharded) else None
        model = model if parts is None else parts.model
        adapters = None if spec is None else Adapters.on(model, spec, length)
        quantised = any(not leaf.is_floating_point() for leaf in model.parameters())
        if checkpointing:
            checkpoint_layers(model, adapters)
        language = cls(
            model,
            adapters,
            rows,
            quantised=quantised,
            start_tokens=start_tokens(model),
            parts=parts,
        )
        language.plain_head = language._gather(language._head_is_plain)
        return language

    def start(self, key: Key, dtype: torch.dtype) -> Tree:
        """Return the start of the lower variables: fresh adapters, or the model's parameters."""
        device = next(self.model.parameters()).device
        if self.adapters is not None:
            return self.adapters.start(key, device, dtype)
        leaves = self.model.named_parameters()
        return {name: leaf.detach().to(dtype).clone() for name, leaf in leaves}

    def nll(
        self, x: Tree, tokens: Tensor, mask: Tensor, seeds: tuple[int, ...] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (Σ −log p of the masked tokens, their number) for each row.

        The shape is ``[B]``, or ``[N, B]`` for stacked adapters.
        """
        count = mask[..., 1:].sum(-1)
        *lead, batch, full = tokens.shape
        if seeds is not None or _is_transformed():
            step = self.rows or batch
            cut = [(first, min(first + step, batch), full) for first in range(0, batch, step)]
            back = None
        else:
            lengths = needed_lengths(mask)
            order, cut = passes(lengths, self.start_tokens, self.rows, equal=self.parts is not None)
            by_length = order.unsqueeze(-1).expand_as(tokens)
            tokens, mask = (leaf.gather(-2, by_length) for leaf in (tokens, mask))
            back = order.argsort(dim=-1)
        parts = []
        for first, last, width in cut:
            part, marked = (
                leaf[..., first:last, :width].reshape(-1, width) for leaf in (tokens, mask)
            )
            own = None if seeds is None else tuple(seed + first for seed in seeds)
            losses = self._pass(x, part, marked, own, again=(self.rows or batch) < batch)
            parts.append(losses.reshape(*lead, -1))
        losses = torch.cat(parts, dim=-1)
        return losses if back is None else losses.gather(-1, back), count

    def _pass(
        self,
        x: Tree,
        tokens: Tensor,
        mask: Tensor,
        seeds: tuple[int, ...] | None = None,
        *,
        again: bool,
    ) -> Tensor:
        """Compute one pass; ``again``: recompute it in the backward pass, to save memory."""
        arguments = (self._forward, x, seeds, tokens, mask)
        if again and torch.is_grad_enabled() and any(leaf.requires_grad for leaf in x.values()):
            return recompute(self._call, *arguments)
        return self._call(*arguments)

    def logits(
        self, x: Tree, tokens: Tensor, mask: Tensor, seeds: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return the logits for the masked tokens of rows ``[B, T]``, row after row.

        The result is ``[n, V]``, computed in one pass.
        """
        return self._call(self._wanted_logits, x, seeds, tokens, mask[:, 1:])

    def _call(
        self,
        function: Callable[..., Tensor],
        x: Tree,
        seeds: tuple[int, ...] | None,
        tokens: Tensor,
        *rest: Any,
    ) -> Tensor:
        """Compute ``function(tokens, *rest)`` of the model with adapters, or parameters, x."""
        if self.parts is not None and _is_transformed():
            raise FIRST_ORDER.at()
        # The kernels of quantised weights drop tangents without an error: the derivative would
        # be 0.
        require(
            not self.quantised or not _is_transformed(),
            "no-second-derivative",
            "a quantised base has no second derivative in forward mode or under torch.func",
            place=("task", "model", "quantize"),
            hint="use a hypergradient of first order: through-step with derivative = "
            "'difference', carried, one-step with derivative = 'difference', or implicit with "
            "strategy = 'difference'\n"
            "or remove quantize",
        )
        self._count(x, tokens)
        # Under vmap and jvp the fused attention kernels run row by row, or fail.
        with twice_differentiable_attention() if _is_transformed() else contextlib.nullcontext():
            if self.adapters is not None:
                with self.adapters.use(Active(x, seeds)):
                    return self._gather(function, tokens, *rest)
            parameters = {f"model.{name}": leaf for name, leaf in x.items()}
            call = ModelCall(self.model)
            return torch.func.functional_call(call, parameters, (function, tokens, *rest))

    def _gather(self, function: Callable[..., Any], *args: Any) -> Any:
        """Compute ``function(*args)`` while the model's modules may be called."""
        if self.parts is None:
            return function(*args)
        result: Any = self.parts(function, *args)
        if isinstance(result, Tensor) and result.requires_grad:
            return FirstDerivative.apply(result)  # the backward pass frees the gathered parts
        self.parts.reshard()
        return result

    def _count(self, x: Tree, tokens: Tensor) -> None:
        """Count the tokens, with padding, of one forward pass.

        The backward pass is included if a graph is kept. Under vmap, all rows of all candidates are
        counted.
        """
        leaves = [_unwrap(leaf) for leaf in x.values()]
        count = _unwrap(tokens).numel()
        if torch._C._functorch.is_batchedtensor(
            next(iter(x.values()))
        ) and not torch._C._functorch.is_batchedtensor(tokens):
            count *= leaves[0].shape[0]
        self.tokens["forward_tokens"] += count
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
            self.tokens["backward_tokens"] += count

    def _forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        inputs = tokens[:, :-1]
        target = tokens[:, 1:]
        wanted = mask[:, 1:]
        if not self.plain_head:
            return _mask_losses(
                self.model(input_ids=inputs, use_cache=False).logits, target, wanted
            )
        hidden = self._body(inputs)
        if _is_transformed():  # shapes must not depend on data here
            return _mask_losses(self._logits(hidden), target, wanted)
        # The head is expensive, and only completion tokens are scored.
        row, place = wanted.nonzero(as_tuple=True)
        picked = hidden[row, place]
        losses = self.head_losses(picked, target[row, place])
        return torch.zeros(len(tokens), dtype=losses.dtype, device=losses.device).index_add(
            0, row, losses
        )

    def _wanted_logits(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        if not self.plain_head:
            return _float(self.model(input_ids=tokens[:, :-1], use_cache=False).logits[wanted])
        return self._logits(self._body(tokens[:, :-1])[wanted])

    def head_losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return −log p of each target from the body's hidden state at its position.

        The result is ``[n]`` for hidden states ``[n, width]``. At most ``LOGITS`` logits are in
        memory at a time.
        """
        head = self.model.get_output_embeddings()
        step = max(1, LOGITS // int(head.weight.shape[0]))
        step -= step % 128 if step > 128 else 0  # whole tiles of a product
        if len(target) <= step:
            return self._score(hidden, target)
        pieces = [slice(first, first + step) for first in range(0, len(target), step)]
        if torch.is_grad_enabled() and hidden.requires_grad:
            weights = dict(head.named_parameters())
            if not any(leaf.requires_grad for leaf in weights.values()):
                return _InPieces.apply(hidden, target, self._score, pieces)
            # At the time of the second run the model has its original weights.
            return torch.cat(
                [recompute(self._score, hidden[piece], target[piece], weights) for piece in pieces]
            )
        return torch.cat([self._score(hidden[piece], target[piece]) for piece in pieces])

    def _score(self, hidden: Tensor, target: Tensor, weights: Tree | None = None) -> Tensor:
        return functional.cross_entropy(self._logits(hidden, weights), target, reduction="none")

    def _logits(self, hidden: Tensor, weights: Tree | None = None) -> Tensor:
        head = self.model.get_output_embeddings()
        logits: Tensor = (
            head(hidden)
            if weights is None
            else torch.func.functional_call(head, weights, (hidden,))
        )
        logits = _float(logits)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def precision(self) -> torch.dtype | None:
        """Return the coarsest type of the frozen base's weights.

        Return None if the weights are lower variables, which have their own type.
        """
        types = {leaf.dtype for leaf in self.model.parameters() if leaf.is_floating_point()}
        return (
            None if self.adapters is None else max(types, key=lambda dtype: torch.finfo(dtype).eps)
        )

    @torch.no_grad()
    def hidden_states(self, x: Tree, tokens: Tensor) -> Tensor:
        """Return the last hidden states, ``[B, T, width]``.

        These are the inputs of the head at each position of rows padded on the right.
        """
        return self._call(self._body, x, None, tokens)

    def _body(self, tokens: Tensor) -> Tensor:
        return self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state

    def _head_is_plain(self) -> bool:
        """Return whether only body, head and soft cap lie between tokens and logits.

        Some architectures scale in between.
        """
        if self.model.get_output_embeddings() is None or self.model.base_model is self.model:
            return False
        probe = torch.tensor([[0, 1, 2, 3]], device=next(self.model.parameters()).device)
        with torch.no_grad():
            whole = self.model(input_ids=probe, use_cache=False).logits
            own = self._logits(self._body(probe))
        return bool(torch.allclose(whole.to(own.dtype), own, rtol=1e-3, atol=1e-3))


class _InPieces(torch.autograd.Function):
    """The losses of a frozen head, computed for a group of positions at a time.

    The loss of a position depends only on that position. Its gradient is computed while its logits
    exist, so that no logits are stored or recomputed. For a second derivative, the plain graph is
    used.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        target: Tensor,
        scored: Callable[[Tensor, Tensor], Tensor],
        pieces: list[slice],
    ) -> Tensor:
        losses = []
        slopes = []
        # Hooks for saved tensors (a surrounding checkpoint) must not apply to the inner graph.
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept),
        ):
            for piece in pieces:
                leaf = hidden[piece].detach().requires_grad_()
                loss = scored(leaf, target[piece])
                slopes.append(torch.autograd.grad(loss.sum(), leaf)[0])
                losses.append(loss.detach())
        ctx.scored = scored
        ctx.pieces = pieces
        ctx.save_for_backward(hidden, target, torch.cat(slopes))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, target, slope = ctx.saved_tensors
        if torch.is_grad_enabled():
            losses = torch.cat([ctx.scored(hidden[piece], target[piece]) for piece in ctx.pieces])
            (product,) = torch.autograd.grad(losses, hidden, grad, create_graph=True)
        else:
            product = (grad.unsqueeze(-1) * slope).to(hidden.dtype)
        return product, None, None, None


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _mask_losses(logits: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
    """Return Σ −log p of the wanted targets of each row."""
    losses = functional.cross_entropy(
        _float(logits).flatten(0, 1), target.flatten(), reduction="none"
    )
    return (losses.reshape(target.shape) * wanted).sum(-1)


def _unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor under the wrappers of torch.func transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _is_transformed() -> bool:
    """Return whether this runs inside a torch.func transform (vmap or jvp)."""
    return torch._C._functorch.peek_interpreter_stack() is not None
