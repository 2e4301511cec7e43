"""Any causal language model of transformers behind the contract of :class:`foredraft.models.base.Target`.

The simplest correct form: one transformers cache a slot and one call a segment. Models of the families that
:mod:`foredraft.models.decoder` knows run faster there; this adapter is for all the others. What cannot be run
losslessly is refused when the adapter is built, after a test on the model itself (:mod:`foredraft.models.hf_probe`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CacheFullError, ContextLengthError, UnsupportedModelError
from foredraft.models.attention import depths, visible
from foredraft.models.base import ForwardOutput, Segment
from foredraft.models.experts import PassPrior, prior_of_module
from foredraft.models.hf_cache import HfCache, cache_factory, windows
from foredraft.models.hf_devices import DeviceMap, first_device
from foredraft.models.hf_layers import decoder_layers, watching
from foredraft.models.hf_limits import cache_argument, context_limit, refuse_encoder_decoder, takes, text_config
from foredraft.models.hf_load import load_model, quiet_log, quiet_transformers

__all__ = ["HfTarget", "load_hf"]

CACHE_BYTES = 4 << 30
"""Default budget of the slot cache."""


class HfTarget:
    """A transformers model that satisfies :class:`foredraft.models.base.Target`.

    Args:
        model: A causal language model of transformers, already built; it is put into evaluation mode.
        max_context: Most tokens a slot can hold; None for what the model can do.
        cache_bytes: Most bytes of keys and values of all slots together.

    Raises:
        UnsupportedModelError: It has an encoder, is not causal, or keeps a state that cannot be rolled back.
        ConfigError: ``max_context`` or ``cache_bytes`` cannot be honoured.
    """

    def __init__(self, model: Any, max_context: int | None = None, cache_bytes: int = CACHE_BYTES) -> None:
        refuse_encoder_decoder(model)
        self.model = model.eval()
        self.config = text_config(model)
        self._argument = cache_argument(model)
        self._max_context = context_limit(self.config, max_context)
        self._cache = self._make_cache(cache_bytes)
        self._windows = windows(self.config)
        self._layers = decoder_layers(model, self.config.num_hidden_layers)
        self._slices = takes(model, "logits_to_keep")
        self.dtype: torch.dtype = model.dtype
        self.device = first_device(model)
        self._vocab_size = int(self.config.vocab_size)
        with quiet_transformers():
            self._vocab_size = self._probe()

    def _make_cache(self, cache_bytes: int) -> HfCache:
        return HfCache(cache_factory(self.config), cache_bytes)

    def _probe(self) -> int:
        from foredraft.models import hf_probe  # it runs an HfTarget

        return hf_probe.check(self)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context(self) -> int | None:
        return self._max_context

    @property
    def cache(self) -> HfCache:
        return self._cache

    @cached_property
    def pass_prior(self) -> PassPrior | None:
        """What a pass of several rows is expected to cost (see :mod:`foredraft.models.experts`)."""
        return prior_of_module(self.model, self.config)

    @cached_property
    def tree_problem(self) -> str | None:
        """Why this model cannot read trees of tokens; None if it can. Tried out when first asked."""
        from foredraft.models import hf_probe

        if self._windows:
            return "its sliding windows follow the order of tokens in memory, which in a tree is not their distance"
        if not takes(self.model, "position_ids"):
            return "it takes no position_ids, so two tokens cannot share a position"
        with quiet_transformers():
            return hf_probe.tree_problem(self)

    @torch.no_grad()
    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """One pass (see :meth:`foredraft.models.base.Target.forward`).

        A tap of the last layer is its output before the final norm.

        Raises:
            UnsupportedModelError: A segment is a tree, or a tap is wanted, and the model allows none.
        """
        steps = self._check(segments, taps)
        self._cache.reserve({segment.slot: len(step) for segment, step in zip(segments, steps, strict=True)})
        logits: list[Tensor] = []
        tapped: list[Tensor] = []
        done = False
        try:
            for segment, step in zip(segments, steps, strict=True):
                with watching(self._layers, taps) as kept:
                    logits.append(self._run(segment, step))
                if taps:
                    tapped.append(torch.stack([kept[tap][0].to(self.device) for tap in taps], 1))
            done = True
        except torch.OutOfMemoryError as error:
            raise CacheFullError("the device has no memory left", field="cache_bytes", remedy="lower it") from error
        finally:
            for segment, step in zip(segments, steps, strict=True):
                if done:
                    self._cache.set_pending(segment.slot, step)
                else:
                    self._cache.undo(segment.slot)
        return ForwardOutput(logits, tapped)

    def call(self, tokens: Sequence[int], **arguments: Any) -> Any:
        """The model on one row of tokens, as transformers answers."""
        ids = torch.tensor([list(tokens)], device=self.device)
        with quiet_log():  # it advises a padding mask whenever a text holds the padding token; nothing is padded here
            return self.model(input_ids=ids, return_dict=True, **arguments)

    def _run(self, segment: Segment, step: Sequence[int]) -> Tensor:
        extra = {} if _is_chain(segment) else self._tree_arguments(segment, step)
        return self._read_into(self._cache.store(segment.slot), segment.tokens, segment.logits_from, **extra)

    def _read_into(self, store: Any, tokens: Sequence[int], logits_from: int, **arguments: Any) -> Tensor:
        """Appends tokens to a transformers cache; logits of the rows from ``logits_from`` on, float32 or better."""
        rows = len(tokens) - logits_from
        arguments |= {self._argument: store, "use_cache": True}
        if self._slices:
            arguments["logits_to_keep"] = max(rows, 1)  # 0 would mean all
        output = self.call(tokens, **arguments)
        if getattr(output, self._argument, None) is not store:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not use the cache that it is given",
                field="model",
                remedy="use a model whose layers all attend to stored keys and values",
            )
        logits: Tensor = output.logits[0]
        return logits[len(logits) - rows :].to(torch.promote_types(logits.dtype, torch.float32))

    def _tree_arguments(self, segment: Segment, step: Sequence[int]) -> dict[str, Any]:
        start = self._cache.length(segment.slot)
        seen = visible(segment, step, start, None).to(self.device)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~seen, torch.finfo(self.dtype).min)
        positions = torch.tensor([[start + depth for depth in step]], device=self.device)
        return {"attention_mask": mask[None, None], "position_ids": positions}

    def _check(self, segments: Sequence[Segment], taps: Sequence[int]) -> list[Sequence[int]]:
        """Depths of every segment's tokens, or an error before anything has changed."""
        if len({segment.slot for segment in segments}) != len(segments) or not segments:
            raise ValueError("segments: give at least one segment, and at most one a slot")
        if any(not 0 <= tap <= self.config.num_hidden_layers for tap in taps):
            raise ValueError(f"taps: {list(taps)} are not all layers 0 … {self.config.num_hidden_layers}")
        return [self._check_segment(segment) for segment in segments]

    def _check_segment(self, segment: Segment) -> Sequence[int]:
        size = len(segment.tokens)
        if size == 0 or not 0 <= segment.logits_from <= size:
            raise ValueError(f"logits_from: {segment.logits_from} does not fit a segment of {size} tokens")
        if min(segment.tokens) < 0 or max(segment.tokens) >= self.vocab_size:
            raise ValueError(f"tokens: ids must be between 0 and {self.vocab_size - 1}")
        step = depths(segment)
        end = self._cache.length(segment.slot) + max(step) + 1
        if self._max_context is not None and end > self._max_context:
            raise ContextLengthError(
                f"{end} tokens do not fit the context of {self._max_context}",
                field="max_context",
                remedy="shorten the prompt or lower max_tokens",
            )
        if not _is_chain(segment) and self.tree_problem:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot read a tree of tokens: {self.tree_problem}",
                field="parents",
                remedy="draft chains",
            )
        return step


def _is_chain(segment: Segment) -> bool:
    return segment.parents is None or list(segment.parents) == list(range(-1, len(segment.tokens) - 1))


def load_hf(
    path: str,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    max_context: int | None = None,
    trust_remote_code: bool = False,
    cache_bytes: int = CACHE_BYTES,
    device_map: DeviceMap | None = None,
) -> HfTarget:
    """Loads a causal language model through transformers.

    Args:
        path: A folder with ``config.json`` and safetensors, a ``.gguf`` file of an architecture that transformers
            can read, or a hub id.
        dtype: ``auto`` (the checkpoint's own), ``float32``, ``bfloat16``, ``float16`` or a torch dtype.
        device: A torch device.
        max_context: Most tokens a slot can hold; None for what the model can do.
        trust_remote_code: Run model code that comes with the checkpoint. Only for sources that you trust.
        cache_bytes: Most bytes of keys and values of all slots together.
        device_map: Distributes the layers over devices (instead of ``device``), see docs/multi-device.md.

    Raises:
        ModelLoadError: Nothing is there, the hub cannot be reached, or the weights are incomplete.
        UnsupportedModelError: The model cannot be run losslessly; the message says why.
    """
    from foredraft.models.hf_recurrent import RecurrentTarget, has_running_state

    model = load_model(path, dtype, device, trust_remote_code, device_map=device_map)
    kind = RecurrentTarget if has_running_state(model) else HfTarget
    return kind(model, max_context, cache_bytes)
