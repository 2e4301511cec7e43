"""A decoder whose weights and cache are split over processes, by columns only.

Megatron's way (Shoeybi 2019, arXiv 1909.08053) splits every second product by rows and adds the partial sums, so that
each output is a sum in another order than in one process. Here every product is split by its *output* rows and the
columns are gathered (no sum is ever cut): each output is the whole sum that one process takes, in its order, and with
products whose bits do not depend on the rows beside them (:mod:`foredraft.kernels`) the logits are the same to the bit.
The price is more traffic: four gathers a layer instead of two sums.

Each process has its own heads with their keys and values, and a share of every other matrix. Rank 0 runs the engine;
before each pass it sends the others what to do, the commits and roll backs since the last pass first.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.models.base import ForwardOutput, Segment
from foredraft.models.build import DecoderBuilder
from foredraft.models.cache import KVCache
from foredraft.models.decoder import Decoder
from foredraft.models.linear import Linear, LinearFactory
from foredraft.models.memory import default_cache_bytes
from foredraft.models.norm import RMSNorm
from foredraft.models.parallel_group import Group, split
from foredraft.models.parallel_signals import uninterrupted
from foredraft.models.shape import DecoderShape
from foredraft.models.weights import TensorSource, require

Part = Literal["q", "kv", "hidden", "inner", "vocab"]
_PARTS: tuple[tuple[str, Part], ...] = (
    (r"attn_q", "q"),
    (r"attn_[kv]", "kv"),
    (r"attn_output|ffn_down(_exps\.\d+|_shexp)?", "hidden"),
    (r"ffn_(gate|up)(_exps\.\d+|_shexp)?", "inner"),
    (r"output|token_embd", "vocab"),
)
_STEP = 64
"""Shares that are not heads begin at multiples of this if there are enough columns. torch computes exponentials of so
many numbers of a row at once, and those of the rest, at the row's end, by another formula."""

ALLOCATE, FREE, KEEP, PICK, ROLLBACK, PASS, EMBED, LOGITS, END = range(9)


class SplitLinear:
    """``[N, own inputs] -> [N, out]`` or ``[N, in] -> [N, out]``: gathers inputs, multiplies own rows, gathers outputs.

    Args:
        own: This process's output rows over all inputs.
        group: The processes.
        inputs: Columns of the input that each has; None where all have all.
        outputs: Output rows of each.
    """

    def __init__(self, own: Linear, group: Group, inputs: Sequence[int] | None, outputs: Sequence[int]) -> None:
        self.own, self._group, self._inputs, self._outputs = own, group, inputs, outputs
        self.in_features, self.out_features = own.in_features, sum(outputs)

    def __call__(self, x: Tensor) -> Tensor:
        whole = x if self._inputs is None else self._group.gather(x, self._inputs)
        return self._group.gather(self.own(whole), self._outputs)

    def parameters(self) -> list[Tensor]:
        return self.own.parameters()


class ParallelBuilder(DecoderBuilder):
    """Reads this process's share of the weights.

    Raises:
        ConfigError: There are more processes than heads of keys and values.
    """

    def __init__(
        self,
        source: TensorSource,
        shape: DecoderShape,
        dtype: torch.dtype,
        device: torch.device,
        make_linear: LinearFactory,
        group: Group,
    ) -> None:
        super().__init__(source, shape, dtype, device, make_linear)
        check_processes(shape, group.size)
        self._group = group
        kv = split(shape.kv_heads, group.size)
        per, width = shape.heads // shape.kv_heads, shape.head_dim
        self._kv, self._q = [n * width for n in kv], [n * per * width for n in kv]
        self.shape = replace(shape, kv_heads=kv[group.rank], heads=kv[group.rank] * per)
        """With the heads of this process only."""

    def _widths(self, part: Part, total: int) -> list[int]:
        if part in ("q", "kv"):
            return self._q if part == "q" else self._kv
        return split(total, self._group.size, _STEP if total >= _STEP * self._group.size else 1)

    def _own(self, widths: Sequence[int]) -> Tensor:
        start = sum(widths[: self._group.rank])
        return torch.arange(start, start + widths[self._group.rank])

    def _linear(self, rows: dict[str, int], width: int, bias: bool) -> Linear:
        parts = [_part(name) for name in rows]
        if None in parts:  # routers and gates of experts are small, and each process needs their answers
            return super()._linear(rows, width, bias)
        weights, biases = [], []
        for (name, count), part in zip(rows.items(), parts, strict=True):
            assert part is not None
            own = self._own(self._widths(part, count))
            weights.append(require(self._source, self._weight_name(name), (count, width)).rows(own))
            if bias:
                biases.append(self._vector(name + ".bias", count)[own.to(self._device)])
        linear = self._make_linear(weights, torch.cat(biases) if biases else None, self._dtype, self._device)
        part, count = parts[0], next(iter(rows.values()))
        if part == "hidden":
            inputs = self._q if "attn_output" in next(iter(rows)) else self._widths("inner", width)
            return SplitLinear(linear, self._group, inputs, self._widths("hidden", count))
        if part == "vocab":
            return SplitLinear(linear, self._group, None, self._widths("vocab", count))
        return linear

    def _qk_norm(self, blk: str) -> RMSNorm:
        whole, shape = super()._qk_norm(blk), self._shape
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        own = [*range(heads), *range(shape.heads, shape.heads + kv_heads)]  # all heads of one kind have the same row
        return RMSNorm(whole.weight[own], whole.eps)

    def head(self, embedding: Tensor) -> Linear:
        return self._linear(
            {"token_embd" if self._shape.tied else "output": self._shape.vocab_size}, self._shape.hidden_size, False
        )

    def embedding(self) -> Tensor:
        """``[V, own columns]``."""
        own = self._own(self.columns)
        return super().embedding()[:, own.to(self._device)].contiguous()

    @property
    def columns(self) -> list[int]:
        """Columns of the embedding that each process has."""
        return self._widths("hidden", self._shape.hidden_size)


def _part(name: str) -> Part | None:
    last = re.sub(r"^blk\.\d+\.", "", name)
    return next((part for pattern, part in _PARTS if re.fullmatch(pattern, last)), None)


def check_processes(shape: DecoderShape, size: int) -> None:
    """Raises ConfigError if a model cannot be split over so many processes."""
    if size > shape.kv_heads:
        raise ConfigError(
            f"{size} processes for {shape.kv_heads} heads of keys and values",
            field="tensor_parallel",
            remedy=f"use at most {shape.kv_heads}",
        )


class LoggedCache(KVCache):
    """A cache that writes down, in :attr:`log`, what the others' caches must do too."""

    log: list[int] | None = None  # None in processes that only follow

    def _write(self, *words: int) -> None:
        if self.log is not None:
            self.log.extend(words)

    def allocate(self) -> int:
        slot = super().allocate()
        self._write(ALLOCATE)
        return slot

    def free(self, slot: int) -> None:
        super().free(slot)
        self._write(FREE, slot)

    def commit(self, slot: int, keep: int | Sequence[int]) -> None:
        super().commit(slot, keep)
        if isinstance(keep, int):
            self._write(KEEP, slot, keep)
        else:
            self._write(PICK, slot, len(keep), *keep)

    def rollback(self, slot: int, length: int) -> None:
        super().rollback(slot, length)
        self._write(ROLLBACK, slot, length)


class ParallelDecoder(Decoder):
    """This process's share of a decoder; in rank 0 it is the :class:`~foredraft.models.base.Target` of an engine."""

    group: Group
    columns: list[int]

    @classmethod
    def build(
        cls,
        builder: ParallelBuilder,
        group: Group,
        cache_bytes: int | None = None,
        max_context: int | None = None,
    ) -> ParallelDecoder:
        """Reads the weights. All processes hold as many tokens as rank 0, whatever their share of the heads."""
        with torch.inference_mode(False), torch.no_grad():
            embedding, layers, final = builder.embedding(), builder.layers(), builder.final_norm()
            head = builder.head(embedding)
        shape = builder.shape
        budget = default_cache_bytes(embedding.device) if cache_bytes is None else cache_bytes
        if group.rank:
            budget = 1 << 62  # rank 0 says when it is full
        cache = LoggedCache(shape.layers, shape.kv_heads, shape.head_dim, embedding.dtype, embedding.device, budget)
        cache.log = None if group.rank else []
        longest = shape.max_positions if max_context is None else min(max_context, shape.max_positions)
        decoder = cls(shape, embedding, layers, final, head, cache, longest)
        decoder.group, decoder.columns = group, builder.columns
        return decoder

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """One pass of all processes (see :meth:`foredraft.models.base.Target.forward`).

        Raises:
            ForedraftError: A process is gone; the model must be loaded again.
        """
        steps = self._check(segments, taps)  # what can be refused is refused before the others hear of it
        self.cache.reserve({segment.slot: len(step) for segment, step in zip(segments, steps, strict=True)})
        words = [PASS, len(self.layers), len(segments)]
        for segment in segments:
            words += [segment.slot, len(segment.tokens), segment.logits_from, int(segment.parents is not None)]
            words += [*segment.tokens, *(segment.parents or ())]
        with uninterrupted(), self.group.order(self._news() + words):
            return super().forward(segments, taps)

    def first_layers(self, count: int, rounded: bool = False) -> Decoder:
        early = copy.copy(self)
        early.shape, early.layers = self.shape.truncated(count), self.layers[:count]
        return early

    def full(self, tokens: Tensor, taps: Sequence[int] = (), logits_from: int = 0) -> tuple[Tensor, Tensor | None]:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError("a split model cannot be trained on", field="tensor_parallel", remedy="use 1")

    def embed(self, tokens: Tensor) -> Tensor:
        if self.group.busy:
            return self._embed(tokens)
        with self.group.order([*self._news(), EMBED, *tokens.tolist()]):
            return self._embed(tokens)

    def _embed(self, tokens: Tensor) -> Tensor:
        own = torch.nn.functional.embedding(tokens, self.embedding)
        x = self.group.gather(own, self.columns)
        if self.shape.embedding_scale == 1.0:
            return x
        return x * torch.tensor(self.shape.embedding_scale, dtype=self.dtype, device=self.device)

    def logits(self, x: Tensor) -> Tensor:
        if self.group.busy:
            return super().logits(x)
        with self.group.order([*self._news(), LOGITS, x.shape[0]]):
            return super().logits(self.group.share(x.to(self.dtype)))

    def _news(self) -> list[int]:
        """What happened to the cache since the last order."""
        assert isinstance(self.cache, LoggedCache)
        news, self.cache.log = self.cache.log or [], []
        return news

    def end(self) -> None:
        """Lets the other processes go."""
        with self.group.order([END]):
            pass

    # --- in the other processes

    def follow(self) -> None:
        """Does what rank 0 says, until it says that this is the end."""
        going = True
        while going:
            with self.group.order(None) as words:
                going = self._obey(words)

    @torch.inference_mode()
    def _obey(self, words: Sequence[int]) -> bool:
        rest, cache = iter(words), self.cache

        def take(count: int) -> list[int]:
            return list(islice(rest, count))

        for word in rest:
            if word == ALLOCATE:
                cache.allocate()
            elif word == FREE:
                cache.free(*take(1))
            elif word == KEEP:
                cache.commit(*take(2))
            elif word == PICK:
                slot, count = take(2)
                cache.commit(slot, take(count))
            elif word == ROLLBACK:
                cache.rollback(*take(2))
            elif word == PASS:
                layers, count = take(2)
                segments = []
                for _ in range(count):
                    slot, length, logits_from, tree = take(4)
                    segments.append(Segment(slot, take(length), logits_from, take(length) if tree else None))
                Decoder.forward(self if layers == len(self.layers) else self.first_layers(layers), segments)
            elif word == EMBED:
                self._embed(torch.tensor(list(rest), device=self.device))
            elif word == LOGITS:
                hidden = torch.empty(*take(1), sum(self.columns), dtype=self.dtype, device=self.device)
                super().logits(self.group.share(hidden))
            elif word == END:
                return False
        return True
