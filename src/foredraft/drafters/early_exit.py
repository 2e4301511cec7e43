"""Self-speculation: the target's own first layers and its LM head draft (Elhoushi 2024, LayerSkip, arXiv 2404.16710).

No second model: weights are the target's, and so are the keys and values. The prompt and all committed tokens are
already in the target's slot, so drafting starts at once; drafted rows are written behind them and taken back before
the target reads the same tokens through all its layers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Self

from torch import Tensor

from foredraft.drafters.base import DrafterContext, DraftRequest
from foredraft.drafters.early_exit_choice import Exit, choose_exit
from foredraft.drafters.model import LawRows, ModelDrafter, Writing
from foredraft.errors import CacheFullError, ConfigError, DrafterError
from foredraft.models.decoder import Decoder
from foredraft.types import NO_DRAFT, Draft, Verdict

log = logging.getLogger("foredraft")


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the first ``layers`` layers of the target, which must be one of the built-in decoder's families.

    Args:
        layers: How many, from 1 to all; None tries some out when an engine takes the drafter and keeps the one that
            promises the most tokens a second (:func:`foredraft.drafters.early_exit_choice.choose_exit`).

    Attributes:
        layers: After :meth:`attach`, those in use.
        tried: After :meth:`attach` with None, what was measured of each candidate.
    """

    name = "early-exit"

    def __init__(self, layers: int | None = None) -> None:
        self.layers = layers
        self.tried: list[Exit] = []

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        if argument in (None, "auto"):
            return cls(None)
        if not argument.isdecimal():
            raise ConfigError(
                f"{argument!r} is no number of layers", field="drafter early-exit", remedy="write early-exit:E or :auto"
            )
        return cls(int(argument))

    def attach(self, context: DrafterContext) -> None:
        target = context.target
        if not isinstance(target, Decoder):
            raise ConfigError(
                f"a {type(target).__name__} cannot stop after some of its layers",
                field="drafter early-exit",
                remedy="use a target of the built-in decoder's families (docs/models.md)",
            )
        if self.layers is None:
            self.tried = choose_exit(target, context.tokenizer)
            best = max(self.tried, key=lambda exit: exit.speed)
            self.layers = best.layers
            level = logging.INFO if best.speed > 1 else logging.WARNING
            log.log(level, "early exit after %d layers promises %.2f times the speed", best.layers, best.speed)
        super().__init__(target.first_layers(self.layers, rounded=True))
        self._width = target.vocab_size

    def propose_batch(self, requests: Sequence[DraftRequest], ks: Sequence[int]) -> list[Draft]:
        cache = self.model.cache
        lengths = {slot: cache.length(slot) for slot in map(_slot, requests)}
        try:
            return super().propose_batch(requests, ks)
        except CacheFullError:  # no room for drafts; the target may still find some for single tokens
            return [NO_DRAFT] * len(requests)
        finally:
            for slot, length in lengths.items():
                cache.rollback(slot, length)

    def _begin(self, request: DraftRequest, k: int) -> Writing | None:
        limit = self.model.max_context
        room = k if limit is None else limit - len(request.ids) + 1
        if room < 1:
            return None
        slot = _slot(request)
        feed = list(request.ids[self.model.cache.length(slot) :])
        return Writing(request, slot, k, min(k, room), feed, [], LawRows(k))

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        self._learn(request, verdict)


def _slot(request: DraftRequest) -> int:
    slot = getattr(request, "slot", None)
    if not isinstance(slot, int):
        raise DrafterError("needs the request's slot in the target's cache", field="drafter early-exit")
    return slot
