"""Where training starts: the best linear head, solved from recorded texts, in the shape of an EAGLE-3 layer.

Let y be the target's last state, scaled to unit mean square. The feature of a position starts as a linear map of its
taps to y. The layer starts as a linear map from y and the embedding of the next token to the y that follows, which is
what the head's own outputs then are, too, so that drafts of several tokens work from the first step on. A third of the
heads carry that map: their queries and keys are equal and nearly white, so that each row sees itself, and their values
and outputs are the map's best low-rank factors. Seconds of arithmetic stand for hundreds of optimiser steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from foredraft.drafters.eagle_head import HeadShape
from foredraft.models.mlp import GatedMlp
from foredraft.train.shards import Sample
from foredraft.train.target_parts import TargetParts, dense

RIDGE = 1e-3
"""Added to the diagonal of second moments, relative to their mean."""
SELF = 40.0
"""Score of a row with itself in the heads that carry the map; other rows score about zero."""
QUIET = 0.1
"""What the outputs of the target's own heads and MLP are multiplied with: ready to be used, not yet in the way."""


def initial_weights(
    parts: TargetParts, shape: HeadShape, samples: Iterable[Sample], tap_scale: Tensor
) -> dict[str, Tensor]:
    """Checkpoint names and values to start from; what the head shares no size of with the target is left out.

    Args:
        parts: The target.
        shape: The head's sizes.
        samples: Recorded texts with the taps of ``shape`` and of the last layer.
        tap_scale: ``[len(taps) * target_hidden]`` usual size of each dimension of the tapped states.
    """
    decoder, d = parts.decoder, shape.hidden
    if decoder.shape.hidden_size != d:
        return {}
    found = {"norm.weight": decoder.final_norm.weight, "lm_head.weight": parts.rows}
    moments = _Moments(parts, samples, tap_scale)
    found["fc.weight"] = moments.feature().T / tap_scale
    size = moments.size
    last = decoder.layers[-1]
    if isinstance(last.mlp, GatedMlp) and decoder.shape.intermediate_size == shape.intermediate:
        gate, up = dense(last.mlp.gate_up).chunk(2)
        found["layers.0.post_attention_layernorm.weight"] = last.mlp_norm.weight
        found |= {"layers.0.mlp.gate_proj.weight": gate, "layers.0.mlp.up_proj.weight": up}
        found["layers.0.mlp.down_proj.weight"] = dense(last.mlp.down) * (QUIET / size)
    own = shape.heads // 3 * shape.head_dim
    if shape.kv_heads == shape.heads and 0 < own <= d:
        width = shape.heads * shape.head_dim
        q, k, v = (torch.randn(width, 2 * d) / (2 * d) ** 0.5 for _ in range(3))
        out = torch.randn(d, width) * (QUIET / width**0.5)
        if (decoder.shape.heads, decoder.shape.head_dim) == (shape.heads, shape.head_dim):
            _borrow(dense(last.qkv).float() * last.attn_norm.weight.float(), decoder.shape.kv_heads, shape, (q, k, v))
            out = dense(last.out).float().cpu() * (QUIET / size)
        first = width - own
        q[first:] = k[first:] = moments.white(own, shape.head_dim)
        v[first:], out[:, first:] = moments.map(own)
        found |= {f"layers.0.self_attn.{n}_proj.weight": w for n, w in zip("qkvo", (q, k, v, out), strict=True)}
    return {name: value.detach().float() for name, value in found.items()}


def _borrow(qkv: Tensor, kv_heads: int, shape: HeadShape, parts: tuple[Tensor, Tensor, Tensor]) -> None:
    """The target's heads over the feature's half of the input; those over the embedding's half stay random."""
    sizes = [shape.heads * shape.head_dim, kv_heads * shape.head_dim, kv_heads * shape.head_dim]
    for mine, theirs in zip(parts, torch.split(qkv, sizes), strict=True):
        rows = theirs.view(-1, shape.head_dim, shape.hidden)
        mine[:, shape.hidden :] = rows.repeat_interleave(shape.heads // rows.shape[0], 0).flatten(0, 1)


class _Moments:
    """Second moments of recorded states, and the maps that follow from them.

    Attributes:
        size: Root mean square of the target's last states.
    """

    def __init__(self, parts: TargetParts, samples: Iterable[Sample], tap_scale: Tensor) -> None:
        d, wide = parts.rows.shape[1], len(tap_scale)
        taps, to_now = torch.zeros(wide, wide), torch.zeros(wide, d)
        self._pairs, self._to_next = torch.zeros(2 * d, 2 * d), torch.zeros(2 * d, d)
        self._rows, sizes = 0, 0.0
        for sample in samples:
            first, last = max(sample.prompt_length - 1, 0), len(sample.ids) - 2
            states = sample.taps[first:].float()
            scaled = states[: last - first, :-1].flatten(1) / tap_scale
            size = states[:, -1].square().mean(-1, keepdim=True).sqrt()
            y = states[:, -1] / size
            embedded = parts.embed(torch.tensor(sample.ids[first + 1 : last + 1], device=parts.rows.device)).cpu()
            pair = torch.cat([embedded / embedded.square().mean(-1, keepdim=True).sqrt(), y[:-1]], 1)
            taps += scaled.T @ scaled
            to_now += scaled.T @ y[:-1]
            self._pairs += pair.T @ pair
            self._to_next += pair.T @ y[1:]
            self._rows += len(pair)
            sizes += float(size[1:].sum())
        self.size = sizes / max(self._rows, 1)
        self._feature: Tensor = torch.linalg.solve(_ridged(taps), to_now)
        self._factor = torch.linalg.cholesky(_ridged(self._pairs) / max(self._rows, 1))

    def feature(self) -> Tensor:
        """``[wide, d]``: scaled taps to y."""
        return self._feature

    def map(self, rank: int) -> tuple[Tensor, Tensor]:
        """``[rank, 2d]`` and ``[d, rank]``: embedding and y to the change of y, at the least loss for the rank."""
        change = torch.linalg.solve(_ridged(self._pairs), self._to_next)
        d = change.shape[1]
        change[d:] -= torch.eye(d)  # the residual sum brings y itself
        basis = torch.linalg.svd(self._factor.T @ change, full_matrices=False)[2][:rank]
        return (change @ basis.T).T, basis.T

    def white(self, rows: int, head_dim: int) -> Tensor:
        """``[rows, 2d]``: random projections in which different rows are nearly orthogonal."""
        wide = self._factor.shape[0]
        scale = (SELF / (wide * head_dim**0.5)) ** 0.5
        projection = torch.linalg.solve_triangular(self._factor.T, torch.randn(wide, rows) * scale, upper=True)
        rows_of: Tensor = projection.T
        return rows_of


def _ridged(moments: Tensor) -> Tensor:
    return moments + torch.eye(len(moments)) * (RIDGE * float(moments.diagonal().mean()) + 1e-12)
