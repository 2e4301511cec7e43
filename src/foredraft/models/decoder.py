"""One compact decoder for the whole Llama family: packed rows, slot cache, tree masks, taps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.errors import ContextLengthError
from foredraft.models.attention import SegmentAttention, attend, depths, visible
from foredraft.models.base import ForwardOutput, Segment
from foredraft.models.cache import KVCache
from foredraft.models.experts import PassPrior, prior_of_shape
from foredraft.models.linear import Linear
from foredraft.models.mlp import Mlp
from foredraft.models.norm import RMSNorm
from foredraft.models.rope import RopeTable, rotate
from foredraft.models.shape import DecoderShape

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, q [N, heads, head_dim], k and v [N, kv_heads, head_dim]) -> [N, heads * head_dim]``."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. ``qkv`` is fused; ``qk_norm`` holds a row of weights for each head of q and k."""

    attn_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    out: Linear
    post_attn_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: Mlp
    post_mlp_norm: RMSNorm | None


class Decoder:
    """A causal language model that satisfies :class:`foredraft.models.base.Target`.

    Args:
        shape: What kind of decoder it is.
        embedding: ``[V, d]`` token embeddings.
        layers: One a layer.
        final_norm: Before the LM head.
        head: LM head ``d -> V``.
        cache: Its slot cache.
        max_context: Most positions that a slot can hold.
    """

    def __init__(
        self,
        shape: DecoderShape,
        embedding: Tensor,
        layers: Sequence[Layer],
        final_norm: RMSNorm,
        head: Linear,
        cache: KVCache,
        max_context: int,
    ) -> None:
        self.shape = shape
        self.embedding = embedding
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.head = head
        self._cache = cache
        self._max_context = max_context
        self.dtype, self.device = embedding.dtype, embedding.device
        ropes = (shape.rope,) if shape.rope_local is None else (shape.rope, shape.rope_local)
        self._ropes = tuple(RopeTable(rope, self.dtype, self.device) for rope in ropes)
        self._local = tuple(int(shape.rope_local is not None and window is not None) for window in shape.windows)

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def pass_prior(self) -> PassPrior | None:
        """What a pass of several rows is expected to cost (see :mod:`foredraft.models.experts`)."""
        return prior_of_shape(self.shape)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """One pass over packed segments (see :meth:`foredraft.models.base.Target.forward`).

        A tap of the last layer is its output before the final norm.
        """
        steps = self._check(segments, taps)
        starts = [self._cache.length(segment.slot) for segment in segments]
        self._cache.reserve({segment.slot: len(step) for segment, step in zip(segments, steps, strict=True)})
        places = [start + depth for start, step in zip(starts, steps, strict=True) for depth in step]
        tokens = torch.tensor([token for segment in segments for token in segment.tokens], device=self.device)
        attention = SegmentAttention(self.shape, self._cache, segments, steps)
        positions = torch.tensor(places, device=self.device)
        x, tapped = self._run(self.embed(tokens), positions, max(places), attention, taps)
        for segment, step in zip(segments, steps, strict=True):
            self._cache.set_pending(segment.slot, step)
        sizes = [len(step) for step in steps]
        rows = [
            range(first + segment.logits_from, first + size)
            for segment, size, first in zip(segments, sizes, _starts(sizes), strict=True)
        ]
        logits = torch.split(self.logits(_select(x, rows)), [len(part) for part in rows])
        return ForwardOutput(list(logits), list(torch.split(torch.stack(tapped, 1), sizes)) if taps else [])

    def first_layers(self, count: int, rounded: bool = False) -> Decoder:
        """A drafter made of the first ``count`` layers and the LM head, without a weight or a slot of its own.

        It reads and writes the keys and values of those layers in this model's own slots. Whoever runs it takes its
        rows back (``cache.rollback``) before this model runs again: the other layers know nothing of them.

        Args:
            count: Layers, at least 1.
            rounded: Round the inputs of quantised products as far as the kernels can, where there are any.
        """
        early = copy.copy(self)
        early.shape, early.layers = self.shape.truncated(count), self.layers[:count]
        return early

    def full(self, tokens: Tensor, taps: Sequence[int] = (), logits_from: int = 0) -> tuple[Tensor, Tensor | None]:
        """Whole sequences without a cache; differentiable, for training.

        Args:
            tokens: ``[B, T]`` int64. Shorter rows are padded on the right; what follows a token cannot reach it.
            taps: Layers whose outputs are wanted.
            logits_from: Logits are wanted from this position on.

        Returns:
            Logits ``[B, T - logits_from, V]`` and taps ``[B, T, len(taps), d]`` (None if none was asked for).
        """
        batch, length = tokens.shape
        chain = Segment(0, range(length))
        masks: dict[int, Tensor] = {}
        for window in {window for window in self.shape.windows if window is not None and window < length}:
            hidden = ~visible(chain, range(length), 0, window)
            masks[window] = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf).to(self.device)

        def whole(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = masks.get(self.shape.windows[layer] or 0)
            q, k, v = (part.view(batch, length, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
            return attend(q, k, v, mask, mask is None, self.shape).transpose(1, 2).reshape(batch * length, -1)

        positions = torch.arange(length, device=self.device).repeat(batch)
        x, tapped = self._run(self.embed(tokens.reshape(-1)), positions, length - 1, whole, taps)
        last = x.view(batch, length, -1)[:, logits_from:]
        logits = self.logits(last.reshape(batch * last.shape[1], -1)).view(batch, last.shape[1], -1)
        return logits, torch.stack(tapped, 1).view(batch, length, len(taps), -1) if taps else None

    def embed(self, tokens: Tensor) -> Tensor:
        """``[N]`` ids -> ``[N, d]`` hidden states that enter the first layer (tap 0)."""
        x = functional.embedding(tokens, self.embedding)
        if self.shape.embedding_scale == 1.0:
            return x
        # Gemma rounds the factor itself to the model's dtype.
        return x * torch.tensor(self.shape.embedding_scale, dtype=self.dtype, device=self.device)

    def logits(self, x: Tensor) -> Tensor:
        """``[N, d]`` outputs of the last layer -> ``[N, V]`` logits in float32 or better."""
        logits = self.head(self.final_norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.shape.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    def _run(
        self, x: Tensor, positions: Tensor, longest: int, attention: Attend, taps: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        angles = [table(positions, longest) for table in self._ropes]
        kept = {0: x} if 0 in taps else {}
        for i, layer in enumerate(self.layers):
            x = self._layer(i, layer, x, angles[self._local[i]], attention)
            if i + 1 in taps:
                kept[i + 1] = x
        return x, [kept[tap] for tap in taps]

    def _layer(self, i: int, layer: Layer, x: Tensor, angles: tuple[Tensor, Tensor], attention: Attend) -> Tensor:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        qkv = layer.qkv(layer.attn_norm(x)).view(-1, heads + 2 * kv_heads, self.shape.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        qk = rotate(qk, *angles)
        mixed = layer.out(attention(i, qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]))
        x = x + (mixed if layer.post_attn_norm is None else layer.post_attn_norm(mixed))
        mixed = layer.mlp(layer.mlp_norm(x))
        return x + (mixed if layer.post_mlp_norm is None else layer.post_mlp_norm(mixed))

    def _check(self, segments: Sequence[Segment], taps: Sequence[int]) -> list[Sequence[int]]:
        """Depths of every segment's tokens, or an error before anything has changed."""
        if len({segment.slot for segment in segments}) != len(segments) or not segments:
            raise ValueError("segments: give at least one segment, and at most one a slot")
        if any(not 0 <= tap <= len(self.layers) for tap in taps):
            raise ValueError(f"taps: {list(taps)} are not all layers 0 … {len(self.layers)}")
        steps = []
        for segment in segments:
            size = len(segment.tokens)
            if size == 0 or not 0 <= segment.logits_from <= size:
                raise ValueError(f"logits_from: {segment.logits_from} does not fit a segment of {size} tokens")
            if min(segment.tokens) < 0 or max(segment.tokens) >= self.vocab_size:
                raise ValueError(f"tokens: ids must be between 0 and {self.vocab_size - 1}")
            step = depths(segment)
            end = self._cache.length(segment.slot) + max(step) + 1
            if end > self._max_context:
                raise ContextLengthError(
                    f"{end} tokens do not fit the context of {self._max_context}",
                    field="max_context",
                    remedy="shorten the prompt or lower max_tokens",
                )
            steps.append(step)
        return steps


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    return starts


def _select(x: Tensor, rows: Sequence[range]) -> Tensor:
    """The given rows of ``x``, without a copy where they lie together."""
    if len(rows) == 1:
        return x[rows[0].start : rows[0].stop]
    wanted = [row for part in rows for row in part]
    return x if len(wanted) == x.shape[0] else x[torch.tensor(wanted, dtype=torch.int64, device=x.device)]
