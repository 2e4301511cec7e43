"""Several drafters beside one another: each request names the one that drafts for it.

Unlike :mod:`foredraft.drafters.combined`, where every drafter follows every request and each step picks one, here a
request has one drafter for all its life and the others never hear of it. Requests with different drafters share the
target's passes. What a drafter takes is measured apart from the others, so that a dear one does not make drafts of a
cheap one look dear.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterContext, DraftRequest
from foredraft.drafters.outlook import Outlook, StepPrice
from foredraft.drafters.part import Part, Record, all_taps
from foredraft.drafters.registry import create
from foredraft.errors import ConfigError
from foredraft.types import NO_DRAFT, Draft, Verdict

NONE = "none"
"""What stands for "no drafter" where drafters are named."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NAMED = re.compile(rf"({_NAME.pattern})=(.+)", re.DOTALL)


class ChoosingRequest(DraftRequest, Protocol):
    """A request that names its drafter."""

    @property
    def drafter(self) -> str: ...


@dataclass(slots=True)
class _Served:
    """One request: its drafter, how that did so far, and the length of the draft under way."""

    part: Part
    record: Record = field(default_factory=Record)
    drafted: int = 0


class ChoiceDrafter(Drafter):
    """Serves each request with the drafter that the request names.

    Args:
        drafters: Name -> drafter, at least one; the first is the default.
        clock: Monotonic seconds.

    Raises:
        ConfigError: No drafter, a name that cannot be one, or a choice within a choice.
    """

    name = "choice"

    def __init__(self, drafters: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        if not drafters:
            raise ConfigError("no drafter is named", field="drafter", remedy="name one, or give None")
        for name, drafter in drafters.items():
            if not _NAME.fullmatch(name) or name == NONE:
                problem = f"{name!r:.80} cannot be a drafter's name"
                raise ConfigError(problem, field="drafter", remedy="use letters, digits, '_', '-' and '.', not 'none'")
            if isinstance(drafter, ChoiceDrafter):
                raise ConfigError("a choice holds another choice", field="drafter", remedy="name all side by side")
        self.drafters = dict(drafters)
        self._parts = {name: Part(drafter, clock=clock) for name, drafter in self.drafters.items()}
        self._served: dict[str, _Served] = {}
        self.taps = all_taps(list(self._parts.values()))

    def attach(self, context: DrafterContext) -> None:
        for drafter in self.drafters.values():
            drafter.attach(context)
        self.taps = all_taps(list(self._parts.values()))

    def start(self, request: DraftRequest) -> None:
        part = self._parts[cast("ChoosingRequest", request).drafter]
        part.drafter.start(request)
        self._served[request.id] = _Served(part)

    def outlook(self, request: DraftRequest, limit: int, price: StepPrice) -> Outlook:
        """That of the request's own drafter."""
        served = self._served[request.id]
        return served.part.outlook(request, served.record, limit, price)

    def propose(self, request: DraftRequest, k: int) -> Draft:
        return self.propose_batch([request], [k])[0]

    def propose_batch(self, requests: Sequence[DraftRequest], ks: Sequence[int]) -> list[Draft]:
        """Asks each drafter once, for all of its requests."""
        drafts = [NO_DRAFT] * len(requests)
        groups: dict[int, list[int]] = {}
        for n, (request, k) in enumerate(zip(requests, ks, strict=True)):
            served = self._served[request.id]
            served.drafted = 0
            if k:
                groups.setdefault(id(served.part), []).append(n)
        for members in groups.values():
            asked = [requests[n] for n in members]
            of_part = [self._served[request.id] for request in asked]
            made = of_part[0].part.propose(asked, [one.record for one in of_part], [ks[n] for n in members])
            for n, one, draft in zip(members, of_part, made, strict=True):
                drafts[n], one.drafted = draft, draft.k
        return drafts

    def observe(self, request: DraftRequest, verdict: Verdict | None, taps: Tensor | None) -> None:
        served = self._served[request.id]
        drafted, served.drafted = served.drafted, 0
        if verdict is not None and drafted:
            served.record.update(drafted, verdict.accepted)
            served.record.ended = len(request.ids)
        served.part.drafter.observe(request, verdict, served.part.taken(taps))

    def stop(self, request: DraftRequest) -> None:
        served = self._served.pop(request.id, None)
        if served is not None:
            served.part.drafter.stop(request)

    def reset(self) -> None:
        for drafter in self.drafters.values():
            drafter.reset()


def assemble(given: object, context: DrafterContext) -> Drafter | None:
    """The drafter, or the choice of drafters, that an engine's ``drafter`` argument asks for, attached.

    Args:
        given: None, a drafter, a spec such as ``"lookup"`` or ``"model:NAME"``, or several of them: a sequence, in
            which ``"NAME=SPEC"`` gives a name of its own, or a mapping from names. The first is the default.
        context: What the drafters may know of the engine.

    Raises:
        ConfigError: Something is no drafter, or two have one name.
    """
    if given is None:
        return None
    if isinstance(given, str | Drafter):
        named = _NAMED.fullmatch(given) if isinstance(given, str) else None
        made = ChoiceDrafter({named[1]: _made(named[2], context)}) if named else _made(given, context)
    elif isinstance(given, Mapping):
        made = ChoiceDrafter({str(name): _made(one, context) for name, one in given.items()})
    elif isinstance(given, Sequence):
        made = ChoiceDrafter(_named(given, context))
    else:
        raise ConfigError(f"{given!r:.80} is no drafter", field="drafter", remedy="give a name or a Drafter object")
    made.attach(context)
    return made


def names(drafter: Drafter | None) -> tuple[str, ...]:
    """What requests can choose from, the default first; empty for plain decoding."""
    if drafter is None:
        return ()
    return tuple(drafter.drafters) if isinstance(drafter, ChoiceDrafter) else (drafter.name,)


def check_names(specs: Sequence[str]) -> list[str]:
    """Names of the drafters that specs ask for, before any is made.

    Raises:
        ConfigError: Two have one name.
    """
    found: list[str] = []
    for spec in specs:
        match = _NAMED.fullmatch(spec)
        name = match[1] if match else spec.partition(":")[0]
        if name in found:
            raise ConfigError(
                f"two drafters are called {name!r}", field="drafter", remedy=f"give one another name: NAME={spec}"
            )
        found.append(name)
    return found


def _named(given: Sequence[object], context: DrafterContext) -> dict[str, Drafter]:
    labels = [one if isinstance(one, str) else getattr(one, "name", "") for one in given]
    keys = check_names(labels)
    specs = [match[2] if isinstance(one, str) and (match := _NAMED.fullmatch(one)) else one for one in given]
    return {key: _made(spec, context) for key, spec in zip(keys, specs, strict=True)}


def _made(one: object, context: DrafterContext) -> Drafter:
    made = create(one, context) if isinstance(one, str) else one
    if not isinstance(made, Drafter):
        raise ConfigError(f"{made!r:.80} is no drafter", field="drafter", remedy="give a name or a Drafter object")
    return made
