"""Recurrent and hybrid models of transformers (Mamba, Jamba, Qwen-Next, …) behind the same contract.

A running state cannot be cut back, so it is remembered: a copy of the state before each pass. When part of a pass is
rejected, the copy comes back, and the tokens accepted since are read again, in front of the next pass's own. Layers
that attend to keys and values are cut, as in :class:`foredraft.models.hf.HfTarget`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, cat
from transformers import DynamicCache

from foredraft.errors import UnsupportedModelError
from foredraft.models.base import Segment
from foredraft.models.hf import HfTarget
from foredraft.models.hf_cache import CacheFactory
from foredraft.models.hf_limits import cache_argument, refuse_encoder_decoder, text_config
from foredraft.models.hf_states import StateCache, has_state, state_cache_factory

LONGEST_REPLAY = 8
"""Tokens that a pass reads again at most; more are read in a call of their own, after which the state is copied."""


def has_running_state(model: Any) -> bool:
    """Whether a layer of this model keeps a state that transformers' cache holds and that cannot be cut."""
    refuse_encoder_decoder(model)
    cache_argument(model)
    return any(has_state(layer) for layer in DynamicCache(config=text_config(model)).layers)


class RecurrentTarget(HfTarget):
    """A transformers model with running states that satisfies :class:`foredraft.models.base.Target`.

    Some models can read several tokens from a state in one call, others read all but the first call of a text one by
    one (``stepwise``); which, is found out when the adapter is built, on the model itself. In the second case a pass
    over ``n`` tokens takes ``n`` calls and speculation cannot pay; it is as exact as in the first.

    Args, errors: those of :class:`foredraft.models.hf.HfTarget`. Trees and taps are refused.
    """

    stepwise = False
    _cache: StateCache

    def _make_cache(self, cache_bytes: int) -> StateCache:
        make: CacheFactory = state_cache_factory(self.config)
        return StateCache(make, cache_bytes)

    def _probe(self) -> int:
        try:
            return super()._probe()
        except UnsupportedModelError:
            self.stepwise = True
            return super()._probe()

    @property
    def tree_problem(self) -> str:
        return "its running state follows one path"

    def _check(self, segments: Sequence[Segment], taps: Sequence[int]) -> list[Sequence[int]]:
        if taps:
            raise UnsupportedModelError(
                "hidden states of a model with running states cannot be tapped",
                field="taps",
                remedy="use a drafter that needs no hidden states",
            )
        return super()._check(segments, taps)

    def _run(self, segment: Segment, step: Sequence[int]) -> Tensor:
        slot = self._cache.entry(segment.slot)
        slot.pending = list(segment.tokens)
        replay = slot.restore()
        if len(replay) > LONGEST_REPLAY or (replay and self.stepwise):
            self._read(slot.cache, replay, 1)
            slot.read(replay)
            replay = []
        tokens, rows = [*replay, *segment.tokens], len(segment.tokens) - segment.logits_from
        if not self.stepwise or not slot.at:
            if not replay:
                slot.save()
            logits = self._read(slot.cache, tokens, max(rows, 1))
            slot.read(tokens)
            return logits[len(logits) - rows :]
        found = []
        for row, token in enumerate(segment.tokens):
            if row == 0 or row >= segment.logits_from:  # a pass is cut only among rows whose logits were asked for
                slot.save()
            found.append(self._read(slot.cache, [token], 1))
            slot.read([token])
        return cat(found)[segment.logits_from :]

    def _read(self, store: Any, tokens: Sequence[int], rows: int) -> Tensor:
        """Appends tokens to a cache, in as many calls as the model needs; logits of the last ``rows``."""
        empty = not self._cache.holds_anything(store)
        parts = [tokens] if not self.stepwise or empty else [[token] for token in tokens]
        logits = [self._read_into(store, part, max(len(part) - rows, 0)) for part in parts]
        return cat(logits)[-rows:]
