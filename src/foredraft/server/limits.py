"""How much one client may have at once and a minute."""

from __future__ import annotations

import time
from collections.abc import Callable

from foredraft.server.errors import ApiError, invalid
from foredraft.server.keys import Client


class Quota:
    """Requests at once and tokens a minute of one client. Used in the event loop's thread only.

    Tokens are a bucket that holds a minute's worth and refills steadily: a request takes its prompt and all that it
    may write before it starts, and gives back what it did not write.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = client
        self.active = 0
        self._clock = clock
        self._tokens = float(client.tokens_per_minute or 0)
        self._filled_at = clock()

    def enter(self, requests: int) -> None:
        """Takes places for so many requests, or raises 429 and takes none."""
        limit = self.client.max_requests
        if limit is not None and self.active + requests > limit:
            raise ApiError(
                429,
                f"this key may have {limit} requests at once and has {self.active}",
                code="too_many_requests",
                retry_after=1,
            )
        self.active += requests

    def leave(self, requests: int) -> None:
        self.active -= requests

    def take(self, tokens: int) -> None:
        """Takes tokens, or raises 429 (or 400 where they are more than a minute's worth) and takes none."""
        limit = self.client.tokens_per_minute
        if limit is None:
            return
        if tokens > limit:
            raise invalid(
                f"max_tokens: the request may need {tokens} tokens, this key has {limit} a minute; ask for fewer",
                "max_tokens",
                "token_budget_exceeded",
            )
        self._refill(limit)
        if tokens > self._tokens:
            wait = (tokens - self._tokens) * 60 / limit
            message = f"this key has {limit} tokens a minute and {int(self._tokens)} left; {tokens} may be needed"
            raise ApiError(429, message, code="token_budget_exceeded", retry_after=wait)
        self._tokens -= tokens

    def give_back(self, tokens: int) -> None:
        """Returns tokens that were taken and not used."""
        if (limit := self.client.tokens_per_minute) is not None:
            self._refill(limit)
            self._tokens = min(self._tokens + tokens, float(limit))

    def _refill(self, limit: int) -> None:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._filled_at) * limit / 60, float(limit))
        self._filled_at = now
