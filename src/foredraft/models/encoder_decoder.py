"""Encoder–decoder models of transformers (T5 and its kind) behind the same contract.

A slot's tokens are the source, then the decoder's start token, then the output. So the prompt of a request is what the
encoder reads, ended by the start token; the encoder runs once, when that token arrives; and everything that works on
tokens works here: a smaller model of the kind drafts with a slot of its own, lookup copies from the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.models.base import Segment
from foredraft.models.cache_checks import check_cut, kept_rows
from foredraft.models.hf import CACHE_BYTES, HfTarget
from foredraft.models.hf_cache import HfCache, Slot, cut, nbytes
from foredraft.models.hf_layers import decoder_layers
from foredraft.models.hf_limits import cache_argument, takes
from foredraft.models.hf_load import load_model


@dataclass(slots=True)
class _Slot(Slot):
    """One request.

    Attributes:
        ids: Committed tokens: source, start token, output.
        pending: Tokens of the last pass.
        encoded: The encoder's output ``[1, source, d]``, once the start token was read.
        source: How many tokens the encoder read for it.
    """

    ids: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    encoded: Tensor | None = None
    source: int = 0


class _Cache(HfCache):
    """Slots that hold a source, what the encoder made of it, and the decoder's keys and values."""

    def _new_slot(self) -> Slot:
        return _Slot(self._make())

    def entry(self, slot: int) -> _Slot:
        found = self._get(slot)
        assert isinstance(found, _Slot)
        return found

    def commit(self, slot: int, keep: int | Sequence[int]) -> None:
        """Keeps the first ``keep`` pending rows and drops the rest."""
        entry = self.entry(slot)
        entry.ids += entry.pending[: len(kept_rows(keep, entry.depths))]
        self._settle(entry)

    def rollback(self, slot: int, length: int) -> None:
        """Cuts the slot back; cut back into its source, it will be encoded anew."""
        entry = self.entry(slot)
        check_cut(length, entry.length)
        del entry.ids[length:]
        self._settle(entry)

    def undo(self, slot: int) -> None:
        self._settle(self.entry(slot))

    def set_pending(self, slot: int, depths: Sequence[int]) -> None:
        entry = self.entry(slot)
        entry.depths = depths
        written = entry.length + len(depths) - entry.source
        if not self.bytes_per_token and entry.encoded is not None:
            own, cross = nbytes(entry.cache.self_attention_cache), nbytes(entry.cache.cross_attention_cache)
            self.bytes_per_token = max(own // written, cross // entry.source)

    def _settle(self, entry: _Slot) -> None:
        entry.length, entry.depths, entry.pending = len(entry.ids), (), []
        if entry.encoded is None:
            return
        if entry.length <= entry.source:  # the start token is gone, or was never committed
            entry.encoded, entry.source, entry.cache = None, 0, self._make()
        else:
            cut(entry.cache.self_attention_cache, entry.length - entry.source)


class EncoderDecoderTarget(HfTarget):
    """A sequence-to-sequence model of transformers that satisfies :class:`foredraft.models.base.Target`.

    Args:
        model: The model, with its LM head.
        max_context: Most tokens of source and output together; None for no limit.
        cache_bytes: Most bytes of keys and values of all slots together.

    Attributes:
        start: The decoder's start token, which ends every prompt. A source cannot contain it.

    Raises:
        UnsupportedModelError: It is no encoder–decoder model, or fails the trial.
    """

    def __init__(self, model: Any, max_context: int | None = None, cache_bytes: int = CACHE_BYTES) -> None:
        if not getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModelError("it has no encoder", field="model", remedy="load it as a causal model")
        if max_context is not None and max_context < 1:
            raise ConfigError(f"must be at least 1 (got {max_context})", field="max_context")
        self.model = model.eval()
        self.config = model.config
        self.start = int(model.config.decoder_start_token_id)
        self._argument = cache_argument(model)
        self._max_context = max_context
        self._cache = _Cache(lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), cache_bytes)
        self._windows = []
        layers = getattr(self.config, "num_decoder_layers", None) or self.config.num_hidden_layers
        self._layers = decoder_layers(model.get_decoder(), layers)
        self._slices = takes(model, "logits_to_keep")
        self.dtype, self.device = model.dtype, model.device
        self._vocab_size = int(self.config.vocab_size)
        self._try()

    @property
    def prompt_problem(self) -> str:
        return "an encoder reads its source whole"

    @property
    def tree_problem(self) -> str:
        return "its decoder measures distances in memory order"

    def call(self, tokens: Sequence[int], **arguments: Any) -> Any:
        """The decoder on one row of tokens."""
        ids = torch.tensor([list(tokens)], device=self.device)
        return self.model(decoder_input_ids=ids, return_dict=True, **arguments)

    def _check(self, segments: Sequence[Segment], taps: Sequence[int]) -> list[Sequence[int]]:
        if taps:
            raise UnsupportedModelError("its hidden states are not tapped", field="taps", remedy="use another drafter")
        steps = super()._check(segments, taps)
        for segment in segments:
            entry = self._cache.entry(segment.slot)  # type: ignore[attr-defined]
            first = self._source_rows(entry, segment.tokens)
            if segment.logits_from < first:
                raise ConfigError(
                    f"ends without the decoder's start token {self.start}",
                    field="prompt",
                    remedy=f"append {self.start} to the source's ids",
                )
        return steps

    def _source_rows(self, entry: _Slot, tokens: Sequence[int]) -> int:
        """How many of these tokens belong to the source."""
        if entry.encoded is not None:
            return 0
        found = list(tokens)
        return found.index(self.start) if self.start in found else len(found)

    def _run(self, segment: Segment, step: Sequence[int]) -> Tensor:
        entry: _Slot = self._cache.entry(segment.slot)  # type: ignore[attr-defined]
        entry.pending = list(segment.tokens)
        first = self._source_rows(entry, segment.tokens)
        if first == len(segment.tokens):  # all of it belongs to the source
            return torch.empty(0, self._vocab_size, device=self.device)
        if entry.encoded is None:
            source = [*entry.ids, *segment.tokens[:first]]
            if not source:
                raise ConfigError("the source is empty", field="prompt", remedy="give tokens before the start token")
            read = self.model.get_encoder()(input_ids=torch.tensor([source], device=self.device), return_dict=True)
            entry.encoded, entry.source = read.last_hidden_state, len(source)
        tokens = segment.tokens[first:]
        return self._read_into(entry.cache, tokens, segment.logits_from - first, encoder_outputs=(entry.encoded,))

    def _try(self) -> None:
        """Reads a short output in parts, with tokens taken back between them, and compares with reading it at once."""
        from foredraft.models import hf_probe

        ids = [token for token in hf_probe._random_ids(self) if token != self.start]
        source, output = ids[:4], [self.start, *ids[4:]]
        with torch.no_grad():
            whole = self.model(
                input_ids=torch.tensor([source], device=self.device),
                decoder_input_ids=torch.tensor([output], device=self.device),
                use_cache=False,
            ).logits[0]
        slot = self._cache.allocate()
        try:
            self.forward([Segment(slot, source, len(source))])
            self._cache.commit(slot, len(source))
            parts = []
            for tokens, junk in ((output[:2], ids[:3]), (output[2:], ids[:1])):
                parts.append(self.forward([Segment(slot, [*tokens, *junk])]).logits[0][: len(tokens)])
                self._cache.commit(slot, len(tokens))
        finally:
            self._cache.free(slot)
        hf_probe._require(self, hf_probe.distance(torch.cat(parts).double(), whole.double()), "cached decoding differs")
        self._vocab_size = int(whole.shape[-1])


def load_encoder_decoder(
    path: str,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> EncoderDecoderTarget:
    """Loads a sequence-to-sequence model through transformers; prompts of it are token ids.

    Args:
        path: A folder with ``config.json`` and safetensors, or a hub id.
        dtype: ``auto`` (the checkpoint's own), ``float32``, ``bfloat16``, ``float16``, ``float64`` or a torch dtype.
        device: A torch device.
        max_context: Most tokens of source and output together; None for no limit.
        cache_bytes: Most bytes of keys and values of all slots together.

    Raises:
        ModelLoadError: Nothing is there, the hub cannot be reached, or the weights are incomplete.
        UnsupportedModelError: It is no encoder–decoder model, or fails the trial.
    """
    model = load_model(path, dtype, device, trust_remote_code=False, kind="sequence-to-sequence model")
    return EncoderDecoderTarget(model, max_context, cache_bytes)
