"""Several drafters in one: each step is drafted by the one that promises the highest speed.

Drafters that copy say before every step what to expect (:class:`~foredraft.drafters.outlook.Outlook`). Others promise
the speed that their own steps had in this request: tokens written over seconds priced, not what a rate would let
expect, which is wrong where acceptance comes and goes. The best promise drafts:

- **Hope.** Steps count for less the longer ago they were, and a speed known from ``n`` of them counts for
  ``1 + HOPE / sqrt(n)`` times as much (discounted UCB, Garivier and Moulines 2011, arXiv 0805.3415). Else a few early
  rejections would shut out the better drafter for good.
- **Stays.** One that is chosen stays for a few drafts. If each step were chosen anew, drafters that take turns at
  being right could each be tried just when they are wrong.

What holds of it, by ``tests/test_combined_regret.py``, where two drafters take turns at being right, drift or are
alike: trials included, no case takes a tenth longer than with the better drafter alone, and after 300 tokens 61 of 69
cases take at most 3 % longer. The others are drafters so close to each other that a text is too short to tell them
apart, that change places slowly, or that take turns every few tokens. Most texts in which the better one changes less
often than every ten tokens are faster than with either.

The choice looks at the past only, so it cannot bend the law.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from foredraft.drafters import registry
from foredraft.drafters.base import Drafter, DrafterContext, DraftRequest
from foredraft.drafters.outlook import FREE, Outlook, StepPrice
from foredraft.drafters.part import Part, Record, all_taps
from foredraft.errors import ConfigError
from foredraft.types import NO_DRAFT, Draft, Verdict

STAY = 3
TRIAL = 2  # tokens of a draft that is only tried
MARGIN = 1.02  # the engine drafts for more than this


NOTHING = Outlook(())


@dataclass(slots=True)
class _State:
    """One request: who drafts the coming step, and how each part did so far."""

    records: list[Record]
    chosen: int = 0
    choice_at: int = -1  # length of the text for which ``chosen`` was chosen
    outlook: Outlook = NOTHING  # of ``chosen``
    price: StepPrice = FREE
    latest: int = -1  # drafter without foresight that drafted last, and
    stayed: int = 0  # how many times in a row among those
    drafted: tuple[int, int] | None = None  # part and length of the draft under way


class CombinedDrafter(Drafter):
    """Lets the drafter with the best prospect draft, request by request and step by step.

    Args:
        drafters: Two or more. On equal terms the earlier one drafts.
        clock: Monotonic seconds.

    Raises:
        ConfigError: Fewer than two drafters, or one that is combined itself.
    """

    name = "combined"

    def __init__(self, drafters: Sequence[Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        if len(drafters) < 2 or any(isinstance(drafter, CombinedDrafter) for drafter in drafters):
            raise ConfigError(
                "needs two or more drafters that are not combined themselves",
                field="drafter combined",
                remedy="for example combined:suffix+model:NAME",
            )
        self.parts = [Part(drafter, clock=clock) for drafter in drafters]
        self._states: dict[str, _State] = {}
        self.taps = all_taps(self.parts)

    @classmethod
    def from_spec(cls, argument: str | None, context: DrafterContext) -> Self:
        names = "|".join(re.escape(entry.name) for entry in registry.entries())
        # An argument may hold a plus, a name does not: what is called so is refused by its own name.
        parts = re.split(rf"\+(?=(?:{names})(?:[:+]|$))", argument or "")
        specs = [spec for part in parts for spec in ([part] if ":" in part else part.split("+"))]
        if any(spec.partition(":")[0] == cls.name for spec in specs):
            raise ConfigError("cannot be nested", field="drafter combined", remedy="write A+B+C")
        return cls([registry.create(spec, context) for spec in specs] if argument else [])

    def attach(self, context: DrafterContext) -> None:
        for part in self.parts:
            part.drafter.attach(context)
        self.taps = all_taps(self.parts)

    def start(self, request: DraftRequest) -> None:
        self._states[request.id] = _State([Record() for _ in self.parts])
        try:
            for part in self.parts:
                part.drafter.start(request)
        except Exception:
            self.stop(request)
            raise

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook:
        state = self._states[request.id]
        outlooks = [
            part.outlook(request, record, limit, price) for part, record in zip(self.parts, state.records, strict=True)
        ]
        promises = [
            price.best(outlook)[0] if outlook.watched else record.promise(lambda o=outlook: price.best(o)[0])  # type: ignore[misc]
            for outlook, record in zip(outlooks, state.records, strict=True)
        ]
        stays = 0 < state.stayed < STAY

        def rank(i: int) -> tuple[bool, float]:
            return not stays or outlooks[i].watched or i == state.latest, promises[i]

        for i in sorted(range(len(outlooks)), key=rank, reverse=True):
            found = _paying(outlooks[i], limit, price) if promises[i] > 1.0 else None
            if found is not None:
                break
        else:  # nobody promises anything: if one is tried all the same, then one that needs trials
            i = next((i for i, outlook in enumerate(outlooks) if not outlook.watched), 0)
            found = outlooks[i]
        state.chosen, state.choice_at, state.outlook, state.price = i, len(request.ids), found, price
        return found

    def propose(self, request: DraftRequest, k: int) -> Draft:
        return self.propose_batch([request], [k])[0]

    def propose_batch(self, requests: Sequence[DraftRequest], ks: Sequence[int]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(requests)
        groups: dict[int, list[int]] = {}
        for n, (request, k) in enumerate(zip(requests, ks, strict=True)):
            state = self._states[request.id]
            state.drafted = None
            if k:
                if state.choice_at != len(request.ids):
                    self.outlook(request, k, FREE)
                groups.setdefault(state.chosen, []).append(n)
        for i, members in groups.items():
            asked = [requests[n] for n in members]
            records = [self._states[request.id].records[i] for request in asked]
            made = self.parts[i].propose(asked, records, [ks[n] for n in members])
            for n, draft in zip(members, made, strict=True):
                drafts[n] = draft
                self._states[requests[n].id].drafted = (i, draft.k)
        return drafts

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        state = self._states[request.id]
        drafted, state.drafted = state.drafted, None
        other = None if verdict is None else Verdict.chain(0, verdict.next_token, 0)
        if verdict is not None and drafted is not None:
            self._learn(state, *drafted, verdict.accepted, len(request.ids))
        for i, part in enumerate(self.parts):
            mine = drafted is not None and drafted[0] == i
            part.drafter.observe(request, verdict if mine else other, part.taken(taps))

    def _learn(self, state: _State, i: int, drafted: int, accepted: int, length: int) -> None:
        """Takes in a step of drafter ``i``; one that was asked in vain has written what a plain step writes."""
        for record in state.records:
            record.fade()
        record, outlook, price = state.records[i], state.outlook, state.price
        if not outlook.watched:
            state.stayed = state.stayed + 1 if state.latest == i else 1
            state.latest = i
        record.tokens += 1 + accepted / price.tokens
        record.seconds += _seconds(outlook, drafted, price) / price.seconds(0) if drafted else 1.0
        record.update(drafted, accepted)
        if drafted:
            record.ended = length

    def stop(self, request: DraftRequest) -> None:
        self._states.pop(request.id, None)
        for part in self.parts:
            part.drafter.stop(request)

    def reset(self) -> None:
        for part in self.parts:
            part.drafter.reset()


def _paying(outlook: Outlook, limit: int, price: StepPrice) -> Outlook | None:
    """The outlook if the engine will draft for it, or else one of a short trial; None if even that cannot pay."""
    if outlook.watched or price.best(outlook)[0] > MARGIN:
        return outlook
    trial = replace(outlook, reach=(1.0,) * min(TRIAL, limit))
    return trial if price.best(trial)[0] > MARGIN else None


def _seconds(outlook: Outlook, drafted: int, price: StepPrice) -> float:
    """Of a step with ``drafted`` tokens."""
    return price.seconds(drafted) + price.drafting(outlook, drafted)
