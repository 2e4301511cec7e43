"""Attention inside the pass: a float64 reference, and the same bits from every instruction set, tile and company.

One layer whose output product is the identity and whose MLP adds nothing: what leaves it is its attention, but for an
embedding too small to hide a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from kernels_support import weights
from torch import Tensor

from foredraft.kernels import PackedLinear, available
from foredraft.kernels.decoder_pass import DecoderPass, PassLayer, PassSegment, PassShape

pytestmark = pytest.mark.skipif(not available(), reason="no compiled kernels")

VOCAB, LONGEST, ROOM, EPS = 50, 620, 600, 1e-20
BUSHY = (-1, -1, 0, 0, 1, 2, 5, 4, -1, 8, 9, 10, 3)
# heads, kv heads, width: groups of 1 … 8 heads, widths that fill no vector, one or several
SHAPES = [(1, 1, 8), (4, 2, 24), (6, 2, 64), (4, 1, 40), (5, 1, 16), (6, 1, 72), (14, 2, 32), (8, 1, 128)]
CASES = [
    (None, None, torch.float32),
    (9, 5.0, torch.float32),
    (300, None, torch.float32),
    (9, None, torch.bfloat16),
    (None, 5.0, torch.bfloat16),
]
Part = tuple[int, int, tuple[int, ...] | None]  # rows, committed tokens, parents


class Attention:
    """The layer of one shape, and the texts whose keys it finds in the cache."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, dtype: torch.dtype
    ) -> None:
        hidden, self.dtype, self.window, self.softcap = heads * dim, dtype, window, softcap
        self.heads, self.kv_heads, self.dim, self.scale = heads, kv_heads, dim, 2 / dim**0.5
        shape = PassShape(hidden, heads, kv_heads, dim, 8, EPS, self.scale, softcap)
        self.embedding, self.qkv = weights(VOCAB, hidden) * 1e-7, weights((heads + 2 * kv_heads) * dim, hidden)
        linear, ones = PackedLinear.from_float, torch.ones(hidden)
        layer = PassLayer(
            attn_norm=ones,
            qkv=linear(self.qkv),
            qk_norm=None,
            out=linear(torch.eye(hidden)),
            post_attn_norm=None,
            mlp_norm=ones,
            gate_up=linear(weights(16, hidden)),
            down=linear(torch.zeros(hidden, 8)),
            post_mlp_norm=None,
            window=window,
        )
        table = linear(self.embedding)
        self.run = DecoderPass(shape, [layer], ones, table, table, dtype)
        angles = torch.arange(LONGEST)[:, None] * torch.linspace(1, 0.01, dim // 2)
        self.angles = [(angles.cos(), angles.sin())]
        random = torch.Generator().manual_seed(3)
        self.cache = torch.randn(1, 2, kv_heads, ROOM, dim, generator=random).to(dtype)
        self.tokens = torch.randint(0, VOCAB, (LONGEST,), generator=random)

    def __call__(self, parts: Sequence[Part], tokens: Sequence[Tensor], isa: int | None = None) -> list[Tensor]:
        """What attention makes of every part's rows, ``[rows, heads * dim]`` each."""
        segments = [PassSegment(rows, start, self.cache.clone(), parents) for rows, start, parents in parts]
        places = [start + depth for rows, start, parents in parts for depth in depths(rows, parents)]
        if isa is not None:
            self.run._isa = isa
        _, taps, _ = self.run(
            torch.cat(list(tokens)), torch.tensor(places), self.angles, segments, torch.tensor([0]), (1,)
        )
        return list(torch.split(taps[:, 0], [part[0] for part in parts]))

    def reference(self, part: Part, tokens: Tensor) -> Tensor:
        """The same from the definition, in float64."""
        rows, start, parents = part
        x = self.embedding[tokens].double()
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        qkv = (x @ self.qkv.double().T).view(rows, -1, self.dim)
        places = start + torch.tensor(depths(rows, parents))
        turned = turn(qkv[:, : self.heads + self.kv_heads], *(table[places].double() for table in self.angles[0]))
        q, k, v = turned[:, : self.heads], turned[:, self.heads :], qkv[:, self.heads + self.kv_heads :]
        old = self.cache[0, :, :, :start].double().transpose(1, 2)
        keys, values = (torch.cat([a, b.to(self.dtype).double()]) for a, b in zip(old, (k, v), strict=True))
        at, made = torch.cat([torch.arange(start), places]), []
        for row in range(rows):
            seen = torch.tensor([*range(start), *(start + i for i in path(row, parents))])
            if self.window:
                seen = seen[at[seen] > places[row] - self.window]
            of = torch.arange(self.heads) // (self.heads // self.kv_heads)
            scores = torch.einsum("hd,khd->hk", q[row], keys[seen][:, of]) * self.scale
            if self.softcap:
                scores = self.softcap * (scores / self.softcap).tanh()
            made.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen][:, of]).flatten())
        return torch.stack(made)


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    (a, b), c, s = x.chunk(2, -1), cosine[:, None], sine[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def path(row: int, parents: Sequence[int] | None) -> list[int]:
    """A row's ancestors and itself, from the top."""
    if parents is None:
        return list(range(row + 1))
    return [*(path(parents[row], parents) if parents[row] >= 0 else ()), row]


def depths(rows: int, parents: Sequence[int] | None) -> list[int]:
    return [len(path(row, parents)) - 1 for row in range(rows)]


PARTS: list[Part] = [(1, 70, None), (2, 0, None), (3, 101, None), (8, 37, None), (19, 64, None), (13, 50, BUSHY)]
# Keys are summed over in blocks of 256 places: rows and trees before, across and far behind their bounds.
PARTS += [(1, 540, None), (4, 254, None), (13, 253, BUSHY), (13, 511, BUSHY), (1, 255, None), (1, 256, None)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_definition(shape: tuple[int, int, int], case: tuple[int, float, torch.dtype]) -> None:
    layer = Attention(*shape, *case)
    tokens = [layer.tokens[: part[0]] for part in PARTS]
    rough = 2e-2 if case[2] == torch.bfloat16 else 2e-5  # a key may round to the other of two bfloat16 neighbours
    for part, mine, ids in zip(PARTS, layer(PARTS, tokens), tokens, strict=True):
        torch.testing.assert_close(mine.double(), layer.reference(part, ids), atol=rough, rtol=rough)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_in_every_way(shape: tuple[int, int, int], case: tuple[int, float, torch.dtype]) -> None:
    layer = Attention(*shape, *case)
    best, tokens = layer.run._isa, [layer.tokens[: part[0]] for part in PARTS]
    together = layer(PARTS, tokens)
    try:
        for isa, threads in product(range(best + 1), (1, 2)):
            torch.set_num_threads(threads)
            for part, ids, wanted in zip(PARTS, tokens, together, strict=True):
                assert torch.equal(layer([part], [ids], isa)[0], wanted), (isa, threads, part)
            assert all(map(torch.equal, layer(PARTS, tokens, isa), together)), (isa, threads)
    finally:
        torch.set_num_threads(1)
    for part, ids, wanted in zip(PARTS, tokens, together, strict=True):
        for row in range(part[0]):
            way = path(row, part[2])
            alone = layer([(len(way), part[1], None)], [ids[way]], best)[0][-1]
            assert torch.equal(alone, wanted[row]), (part, row)


@pytest.mark.parametrize("tanh_gelu", [False, True])
@pytest.mark.parametrize(("hidden", "inner", "vocab"), [(24, 37, 41), (40, 88, 50), (72, 5, 33)])
def test_norms_gates_and_caps_of_odd_widths(hidden: int, inner: int, vocab: int, tanh_gelu: bool) -> None:
    linear, ones = PackedLinear.from_float, torch.ones(hidden)
    layer = PassLayer(
        attn_norm=ones * 0.7,
        qkv=linear(weights(3 * hidden, hidden)),
        qk_norm=torch.linspace(0.5, 1.5, 2 * hidden).view(2, hidden),
        out=linear(weights(hidden, hidden)),
        post_attn_norm=ones * 1.3,
        mlp_norm=torch.linspace(-1, 2, hidden),
        gate_up=linear(weights(2 * inner, hidden) * 9),
        down=linear(weights(hidden, inner)),
        post_mlp_norm=None,
    )
    table = linear(weights(vocab, hidden) * 30)
    shape = PassShape(hidden, 1, 1, hidden, inner, 1e-5, 0.3, None, 4.0, 1.5, tanh_gelu)
    run, tokens = DecoderPass(shape, [layer], ones, table, table), torch.arange(9)
    angles = tokens[:, None] * torch.linspace(1, 0.1, hidden // 2)
    results, best = [], run._isa
    for isa in range(best + 1):
        run._isa = isa
        cache = torch.zeros(1, 2, 1, 9, hidden)
        results.append(run(tokens, tokens, [(angles.cos(), angles.sin())], [PassSegment(9, 0, cache)], tokens, (1,)))
    for logits, taps, likeliest in results:
        assert torch.equal(logits, results[0][0])
        assert likeliest == results[0][2]
        assert torch.equal(taps, results[0][1])
    assert results[0][0].std() > 0.5
