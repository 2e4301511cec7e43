"""Says, once and in one line, when speculation does not pay; a metric says it all the time."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from foredraft.engine.controller import Controller
from foredraft.engine.loop import StepTimes

log = logging.getLogger("foredraft")

WINDOW = 32
SLACK = 0.95
LOOK = 8  # steps between two looks at what the last ones gave


@dataclass(frozen=True, slots=True)
class _Step:
    tokens: int
    seconds: float
    plain_seconds: float  # what decoding the same requests plainly would have taken, a token each
    requests: int
    declined: bool  # the controller chose to draft nothing


class Watch:
    """Compares the last steps with what plain decoding would have given.

    Attributes:
        message: The warning, once given.
    """

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.message: str | None = None
        self._steps: deque[_Step] = deque(maxlen=WINDOW)
        self._seen = 0

    def record(self, times: StepTimes, tokens: int, requests: int, declined: bool) -> None:
        """Takes in one step in which no prompt was read."""
        plain = self.controller.passes.estimate(requests)
        if times.pure and plain is not None:
            self._steps.append(_Step(tokens, times.total, plain, requests, declined))
            self._seen += 1
            if self.message is None and self._seen % LOOK == 0 and (reason := self._reason()):
                self.message = f"speculation does not pay here: {reason}"
                log.warning(self.message)

    @property
    def speedup(self) -> float | None:
        """Tokens a second over plain decoding's, in the last steps; None before enough were seen."""
        if len(self._steps) < WINDOW // 2:
            return None
        seconds = sum(step.seconds for step in self._steps)
        plain = sum(step.plain_seconds * step.tokens / step.requests for step in self._steps)
        return plain / seconds if seconds > 0 else None

    @property
    def pays(self) -> bool | None:
        """Whether drafting pays at present; None before enough steps were seen."""
        speedup = self.speedup
        return None if speedup is None else self._reason() is None

    def _reason(self) -> str | None:
        speedup = self.speedup
        if speedup is None:
            return None
        if sum(step.declined for step in self._steps) > len(self._steps) // 2:
            return "decoding plainly, since a draft would cost more than its accepted tokens save"
        if speedup < SLACK:
            return f"it runs at {speedup:.2f} times the speed of plain decoding"
        return None
