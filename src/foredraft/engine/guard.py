"""The guard: speculation that does not pay is taken from the request, or the tenant, that it does not pay for.

A client whose text the drafter cannot predict, on purpose or by bad luck, makes the target verify tokens that are
thrown away, at everybody's cost. ``k="auto"`` notices on its own; a fixed k, and what probing costs, do not. The guard
watches each request and each tenant by itself; nothing that it does to one depends on the acceptance of another.

Two things make an account pause:

- **A sequential test.** The hypothesis is "the expected share of drafted tokens that is accepted is at least the
  break-even rate". Against it stands a betting e-process: with the shares x and the rates r of its steps,
  ``M = ∏ (1 + λ (r - x))``, averaged over two λ in ``[0, 1 / (1 - r)]``. Under the hypothesis M is a supermartingale
  that begins at 1, so by Ville's inequality it reaches ``1 / a`` ever, at any time, with a probability of at most a
  (Waudby-Smith and Ramdas 2023, arXiv 2010.09686): a is the false-alarm rate of each run of the test.
- **A budget.** Drafted positions, less ``1 / r`` for every accepted token, may not exceed it; written tokens pay a
  little back.

A paused account drafts nothing for a while, twice as long each time. Then it tries a few short drafts, and a test of
the opposite hypothesis decides whether it returns. Only a long stretch of good drafts makes pauses shorter again, so
being good now and then does not buy much waste.

Why this cannot bend the law: as in :mod:`foredraft.engine.controller`, the length of a draft is fixed before it is
made, from what earlier steps showed.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from foredraft.config import EngineConfig
from foredraft.drafters.choice import NONE
from foredraft.engine.controller import Controller

if TYPE_CHECKING:
    from foredraft.engine.request import Request

log = logging.getLogger("foredraft")

Kind = Literal["paused", "restored"]
Scope = Literal["request", "tenant"]

BETS = (0.3, 0.9)  # shares of the largest λ that keeps M positive
RESTORE = 10.0  # evidence for paying that ends probation
PROBES = 8  # drafts of one probation
PROBE_K = 2
FIRST_PAUSE = 64  # written tokens
LAST_PAUSE = 2048
FORGIVEN = 512  # tokens written with drafts that pay, after which the next pause is half as long
REPAID = 0.02  # positions that a written token pays back
PATIENCE = 32  # written tokens of a tenant after which another of its requests takes over an idle probation
UNKNOWN_RATE = 0.2  # break-even before costs were measured
LOWEST_RATE, HIGHEST_RATE = 0.02, 0.9
TENANTS = 4096  # accounts kept; the longest unused is dropped


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """Something that an operator should know.

    Attributes:
        kind: ``paused`` or ``restored``.
        scope: Whether it concerns one ``request`` or all of a ``tenant``.
        tenant: Whose.
        request_id: The request whose step it was.
        message: In one line; it holds no text of the client.
    """

    kind: Kind
    scope: Scope
    tenant: str
    request_id: str
    message: str


@dataclass(slots=True)
class Account:
    """What is known of one request, or of one tenant.

    Args:
        false_alarm: False-alarm rate of the test.
        budget: Most wasted positions.

    Attributes:
        drafted: Tokens drafted in all.
        accepted: Those accepted.
        wasted: Drafted positions not paid for yet.
    """

    false_alarm: float
    budget: float
    drafted: int = 0
    accepted: int = 0
    wasted: float = 0.0
    state: Literal["open", "paused", "probing"] = "open"
    pause: int = FIRST_PAUSE
    prober: str = ""
    _rest: int = 0
    _probes: int = 0
    _idle: int = 0
    _good: int = 0
    _for: float = 1.0
    _against: list[float] = field(default_factory=lambda: [1.0] * len(BETS))

    def limit(self, request_id: str) -> int | None:
        """Most tokens that may be drafted now; None for no limit."""
        if self.state == "open":
            return None
        return PROBE_K if self.state == "probing" and request_id == self.prober else 0

    def update(self, request_id: str, drafted: int, accepted: int, written: int, rate: float) -> Kind | None:
        """Takes in one step.

        Args:
            request_id: Whose step.
            drafted: Tokens drafted.
            accepted: Those accepted.
            written: Tokens written.
            rate: Break-even share of accepted tokens, fixed before the outcome was known.

        Returns:
            What changed.
        """
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.wasted = max(0.0, self.wasted - REPAID * written)
        if self.state == "paused":
            self._rest -= written
            if self._rest <= 0:
                self.state, self.prober, self._probes, self._for, self._idle = "probing", request_id, 0, 1.0, 0
            return None
        if self.state == "open":
            self._good += written
            if self._good >= FORGIVEN:
                self._good, self.pause = 0, max(self.pause // 2, FIRST_PAUSE)
        if self.state == "probing" and request_id != self.prober:
            self._idle += written
            if self._idle >= PATIENCE:
                self.prober, self._idle = request_id, 0
        elif drafted:
            return self._judge(drafted, accepted, rate)
        return None

    def _judge(self, drafted: int, accepted: int, rate: float) -> Kind | None:
        share = accepted / drafted
        if self.state == "probing":
            self._idle, self._probes = 0, self._probes + 1
            self._for *= 1 + 0.5 / rate * (share - rate)
            if self._for >= RESTORE:
                self._reset()
                self.state = "open"
                return "restored"
            return self._stop() if self._probes >= PROBES else None
        self._against = [
            m * (1 + bet / (1 - rate) * (rate - share)) for m, bet in zip(self._against, BETS, strict=True)
        ]
        self.wasted = max(0.0, self.wasted + drafted - accepted / rate)
        if sum(self._against) / len(BETS) >= 1 / self.false_alarm or self.wasted > self.budget:
            return self._stop()
        return None

    def _stop(self) -> Kind | None:
        again = self.state == "probing"
        self._reset()
        self.state, self._rest = "paused", self.pause
        self.pause = min(2 * self.pause, LAST_PAUSE)
        return None if again else "paused"

    def _reset(self) -> None:
        self.wasted, self._good, self._against = 0.0, 0, [1.0] * len(BETS)


class Guard:
    """Watches requests and tenants.

    Args:
        config: Fields ``guard``, ``guard_rate``, ``guard_false_alarm``, ``guard_request_waste``,
            ``guard_tenant_waste``.
        controller: Knows what passes and drafts cost.

    Attributes:
        listeners: Called with every event, in the thread that steps the engine.
        counts: Events by ``(scope, kind)``.
    """

    def __init__(self, config: EngineConfig, controller: Controller) -> None:
        self.enabled = config.guard
        self.listeners: list[Callable[[GuardEvent], None]] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self._config, self._controller = config, controller
        self._tenants: OrderedDict[tuple[str, str], Account] = OrderedDict()

    def tenant(self, name: str, drafter: str = NONE) -> Account:
        """The account of a tenant with one drafter; it outlives the tenant's requests.

        One a drafter: where an engine has several, one that is bad for a tenant must not take the good one from it.
        """
        key = name, drafter
        if key not in self._tenants:
            self._tenants[key] = Account(self._config.guard_false_alarm, self._config.guard_tenant_waste)
            if len(self._tenants) > TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(key)
        return self._tenants[key]

    def limit(self, request: Request, most: int) -> int:
        """Most tokens that a request may draft now, at most ``most``."""
        if not self.enabled:
            return most
        for account in (self._own(request), self.tenant(request.tenant, request.drafter)):
            limit = account.limit(request.id)
            most = most if limit is None else min(most, limit)
        return most

    def rate(self, drafted: int, requests: int) -> float:
        """Break-even share of accepted tokens for a draft of this length in a pass of so many requests.

        A draft of k tokens in a pass of R requests costs ``c(R + k) - c(R)`` and its own making; an accepted token
        saves ``c(R) / R``, what plain decoding takes for it.
        """
        if self._config.guard_rate != "auto":
            return self._config.guard_rate
        plain, more = (self._controller.passes.estimate(rows) for rows in (requests, requests + drafted))
        if not drafted or not plain or not more:
            return UNKNOWN_RATE
        price = more - plain + drafted * (self._controller.drafts.per_token or 0.0)
        return min(max(price / (drafted * plain / requests), LOWEST_RATE), HIGHEST_RATE)

    def update(self, request: Request, drafted: int, accepted: int, written: int, requests: int) -> None:
        """Takes in one step of one request, in a pass of so many ``requests``."""
        if not self.enabled:
            return
        rate = self.rate(drafted, requests)
        accounts: tuple[tuple[Scope, Account], ...] = (
            ("request", self._own(request)),
            ("tenant", self.tenant(request.tenant, request.drafter)),
        )
        for scope, account in accounts:
            kind = account.update(request.id, drafted, accepted, written, rate)
            if kind is not None:
                self._tell(kind, scope, request, account, rate)

    def _own(self, request: Request) -> Account:
        if request.account is None:
            request.account = Account(self._config.guard_false_alarm, self._config.guard_request_waste)
        return request.account

    def _tell(self, kind: Kind, scope: Scope, request: Request, account: Account, rate: float) -> None:
        whom = f"request {request.id}" if scope == "request" else "a tenant"
        what = f"{account.accepted} of {account.drafted} drafted tokens accepted, break-even {rate:.0%}"
        event = GuardEvent(kind, scope, request.tenant, request.id, f"guard: drafting {kind} for {whom} ({what})")
        self.counts[scope, kind] += 1
        log.warning("%s, tenant %r", event.message, request.tenant)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                log.exception("a listener of the guard failed")
