"""A whole decoder pass in one call of the library: no Python and no thread start between layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.kernels import library
from foredraft.kernels.linear import PackedLinear
from foredraft.kernels.structs import CLayer, CModel, CPass, CProduct, CSegment

Pointers: TypeAlias = "ctypes.Array[ctypes.c_void_p]"


@dataclass(frozen=True, slots=True)
class PassLayer:
    """One layer: norm weights in float32, products packed, gate before up.

    Attributes:
        qk_norm: ``[heads + kv_heads, head_dim]``, a row for each head of q, then of k; None for no such norm.
        window: How many tokens, itself included, a token sees; None for all.
        rope: Which of the pass's two tables of angles it uses.
    """

    attn_norm: Tensor
    qkv: PackedLinear
    qk_norm: Tensor | None
    out: PackedLinear
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    post_mlp_norm: Tensor | None
    window: int | None = None
    rope: int = 0


@dataclass(frozen=True, slots=True)
class PassShape:
    """Sizes and switches, as in :class:`foredraft.models.shape.DecoderShape`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    tanh_gelu: bool = False


@dataclass(frozen=True, slots=True)
class PassSegment:
    """One request's rows, which follow each other in the pass.

    Attributes:
        cache: ``[layers, 2, kv_heads, capacity, head_dim]`` contiguous, room for ``start + rows`` tokens; the pass
            writes keys and values of its rows behind the ``start`` committed ones.
        parents: For a tree, one index a row, ``-1`` for the last committed token.
    """

    rows: int
    start: int
    cache: Tensor
    parents: Sequence[int] | None = None


class DecoderPass:
    """A decoder whose passes run inside the library.

    Every row's result is independent, to the bit, of the other rows, of their number and of the threads. A tree's
    row gets the bits of its path decoded alone.

    Args:
        shape: Sizes and switches.
        layers: One a layer.
        final_norm: ``[hidden]`` float32.
        embedding: A packed matrix ``[V, hidden]`` whose rows are looked up.
        head: ``hidden -> V``.
        cache_dtype: Of keys and values, float32 or bfloat16.

    Raises:
        ConfigError: A size does not fit another, or there is no compiled library.
    """

    def __init__(
        self,
        shape: PassShape,
        layers: Sequence[PassLayer],
        final_norm: Tensor,
        embedding: PackedLinear,
        head: PackedLinear,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._call, self._isa = library.library().fd_pass, library.isa()
        self.shape, self.layers, self.vocab = shape, tuple(layers), head.out_features
        self.cache_dtype = cache_dtype
        self._alive: list[object] = [embedding, head]  # what the structs point to
        _check(shape, self.layers, final_norm, embedding, head, cache_dtype)
        self._angles: tuple[Sequence[tuple[Tensor, Tensor]], int, Pointers, Pointers] | None = None
        packed = (CLayer * len(self.layers))(*(self._layer(layer) for layer in self.layers))
        self._alive.append(packed)
        self._model = CModel(
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate=shape.intermediate,
            layers=len(self.layers),
            vocab=self.vocab,
            tanh_gelu=int(shape.tanh_gelu),
            cache_type=int(cache_dtype == torch.bfloat16),
            activations=head.mode,
            norm_eps=shape.norm_eps,
            attention_scale=shape.attention_scale,
            attention_softcap=shape.attention_softcap or 0.0,
            logit_softcap=shape.logit_softcap or 0.0,
            embedding_scale=shape.embedding_scale,
            layer=packed,
            final_norm=self._vector(final_norm),
            embedding=c_product(embedding).part[0],
            head=c_product(head),
        )

    def __call__(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        angles: Sequence[tuple[Tensor, Tensor]],
        segments: Sequence[PassSegment],
        logit_rows: Sequence[int],
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Runs one pass. A pass leaves nothing in the caches but weights, and a call of torch's then takes tens of
        microseconds: here there is one, for the logits.

        Args:
            tokens: N ids, each inside the vocabulary.
            positions: N of them.
            angles: One or two tables (cosines, sines), ``[positions, head_dim/2]`` float32 each.
            segments: Their rows add up to ``N``.
            logit_rows: The R rows whose logits are wanted.
            taps: Layers whose outputs are wanted, 0 for the embedding's.

        Returns:
            Logits ``[R, V]`` and taps ``[N, len(taps), hidden]``, float32; None for no taps. For each row of logits the
            first index of the largest, -1 if one is NaN or that is not finite.
        """
        n, wanted = len(tokens), len(logit_rows)
        if len(positions) != n or sum([segment.rows for segment in segments]) != n or n == 0:
            raise ConfigError(f"positions and segments must describe the {n} rows, at least one", field="segments")
        if min(tokens) < 0 or max(tokens) >= self.vocab:
            raise ConfigError(f"an id lies outside 0 … {self.vocab - 1}", field="tokens")
        if wanted and (min(logit_rows) < 0 or max(logit_rows) >= n):
            raise ConfigError(f"a row lies outside 0 … {n - 1}", field="logit_rows")
        if min(positions) < 0:
            raise ConfigError("must not be negative", field="positions")
        cosines, sines = self._tables(angles, max(positions))
        logits = torch.empty(wanted, self.vocab)
        tapped = torch.empty(n, len(taps), self.shape.hidden) if taps else None
        likeliest = (ctypes.c_int64 * wanted)()
        views, keep = self._segments(segments)
        lists = [(ctypes.c_int64 * len(values))(*values) for values in (tokens, positions, logit_rows, taps)]
        request = CPass(
            rows=n,
            tokens=ctypes.addressof(lists[0]),
            positions=ctypes.addressof(lists[1]),
            cosine=cosines,
            sine=sines,
            segments=len(segments),
            segment=views,
            logit_rows=wanted,
            logit_row=ctypes.addressof(lists[2]),
            logits=logits.data_ptr(),
            likeliest=ctypes.addressof(likeliest),
            taps=len(taps),
            tap=ctypes.addressof(lists[3]),
            tapped=None if tapped is None else tapped.data_ptr(),
            threads=torch.get_num_threads(),
            isa=self._isa,
        )
        self._call(ctypes.byref(self._model), ctypes.byref(request))
        del keep, lists
        return logits, tapped, likeliest[:]

    def _tables(self, angles: Sequence[tuple[Tensor, Tensor]], longest: int) -> tuple[Pointers, Pointers]:
        """Where the cosines and the sines are; checked once for each set of tables."""
        if self._angles is None or self._angles[0] is not angles:
            half = self.shape.head_dim // 2
            if any(t.dim() != 2 or t.shape[1] != half or t.dtype != torch.float32 for table in angles for t in table):
                raise ConfigError(f"must be float32 [positions, {half}]", field="angles")
            cosines, sines = zip(*(angles if len(angles) == 2 else (angles[0], angles[0])), strict=True)
            cosine, sine = ((ctypes.c_void_p * 2)(*(t.data_ptr() for t in tables)) for tables in (cosines, sines))
            self._angles = angles, min(t.shape[0] for table in angles for t in table), cosine, sine
        _, positions, cosine, sine = self._angles
        if longest >= positions:
            raise ConfigError(f"have {positions} positions, {longest} is asked for", field="angles")
        return cosine, sine

    def _segments(self, segments: Sequence[PassSegment]) -> tuple[ctypes.Array[CSegment], list[object]]:
        views, first = (CSegment * len(segments))(), 0
        keep: list[object] = []
        wanted = (len(self.layers), 2, self.shape.kv_heads, self.shape.head_dim)
        for view, segment in zip(views, segments, strict=True):
            size, cache = segment.cache.shape, segment.cache
            fits = size[0] >= wanted[0] and (*size[1:3], size[4]) == wanted[1:]
            if not fits or cache.dtype != self.cache_dtype or not cache.is_contiguous():
                raise ConfigError(f"a slot's buffer has shape {list(size)} {cache.dtype}", field="cache")
            if segment.rows < 1 or not 0 <= segment.start <= size[3] - segment.rows:
                raise ConfigError(
                    f"{segment.rows} rows behind {segment.start} do not fit into {size[3]}", field="segments"
                )
            parents = None
            if segment.parents is not None:
                if any(not -1 <= p < i for i, p in enumerate(segment.parents)) or len(segment.parents) != segment.rows:
                    raise ConfigError("name an earlier row or -1 for each row", field="parents")
                parents = (ctypes.c_int32 * segment.rows)(*segment.parents)
                keep.append(parents)
            view.first, view.rows, view.start, view.capacity = first, segment.rows, segment.start, size[3]
            view.cache = cache.data_ptr()
            view.parents = None if parents is None else ctypes.addressof(parents)
            first += segment.rows
        return views, keep

    def _vector(self, values: Tensor | None) -> int | None:
        if values is None:
            return None
        kept = values.detach().to("cpu", torch.float32).contiguous()
        self._alive.append(kept)
        return kept.data_ptr()

    def _layer(self, layer: PassLayer) -> CLayer:
        self._alive.append(layer)
        return CLayer(
            attn_norm=self._vector(layer.attn_norm),
            qk_norm=self._vector(layer.qk_norm),
            post_attn_norm=self._vector(layer.post_attn_norm),
            mlp_norm=self._vector(layer.mlp_norm),
            post_mlp_norm=self._vector(layer.post_mlp_norm),
            qkv=c_product(layer.qkv),
            out=c_product(layer.out),
            gate_up=c_product(layer.gate_up),
            down=c_product(layer.down),
            window=layer.window or 0,
            rope=layer.rope,
        )


def c_product(linear: PackedLinear) -> CProduct:
    """How the library sees a product; ``linear`` must outlive it."""
    parts = linear.plan()
    result = CProduct(in_=linear.in_features, out=linear.out_features, parts=len(parts))
    for target, (number, weights, out, bias, _) in zip(result.part, parts, strict=False):
        target.format, target.weights, target.out, target.bias = number, weights, out, bias
    return result


def _check(
    shape: PassShape,
    layers: Sequence[PassLayer],
    final_norm: Tensor,
    embedding: PackedLinear,
    head: PackedLinear,
    cache_dtype: torch.dtype,
) -> None:
    d, dim, width = shape.hidden, shape.head_dim, shape.heads * shape.head_dim
    if dim % 8 or shape.kv_heads < 1 or shape.heads % shape.kv_heads:
        raise ConfigError("heads must be multiples of 8 wide and of kv_heads in number", field="head_dim")
    if cache_dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"must be float32 or bfloat16 (got {cache_dtype})", field="cache_dtype")
    wanted: list[tuple[str, PackedLinear, int, int]] = [
        ("embedding", embedding, d, head.out_features),
        ("head", head, d, head.out_features),
    ]
    norms: list[tuple[str, Tensor | None, tuple[int, ...]]] = [("final_norm", final_norm, (d,))]
    for layer in layers:
        wanted += [
            ("qkv", layer.qkv, d, width + 2 * shape.kv_heads * dim),
            ("out", layer.out, width, d),
            ("gate_up", layer.gate_up, d, 2 * shape.intermediate),
            ("down", layer.down, shape.intermediate, d),
        ]
        norms += [("attn_norm", layer.attn_norm, (d,)), ("mlp_norm", layer.mlp_norm, (d,))]
        norms += [("post_attn_norm", layer.post_attn_norm, (d,)), ("post_mlp_norm", layer.post_mlp_norm, (d,))]
        norms += [("qk_norm", layer.qk_norm, (shape.heads + shape.kv_heads, dim))]
        if layer.rope not in (0, 1):
            raise ConfigError(f"must be 0 or 1 (got {layer.rope})", field="rope")
    for name, linear, inner, outer in wanted:
        if (linear.in_features, linear.out_features) != (inner, outer):
            got = f"{linear.in_features} -> {linear.out_features}"
            raise ConfigError(f"is {got}, {inner} -> {outer} is wanted", field=name)
        most = 3 if name in ("qkv", "gate_up") else 1
        other = linear.mode != head.mode and name != "embedding"  # whose rows are only looked up
        if len(linear.matrices) > most or not linear.matrices[0].packed or other:
            raise ConfigError(f"must be up to {most} packed matrices with the head's activations", field=name)
    for name, values, size in norms:
        if values is not None and tuple(values.shape) != size:
            raise ConfigError(f"has shape {list(values.shape)}, {list(size)} is wanted", field=name)
