"""How often something comes true of late, from a prior on."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 2.0  # tries that the prior counts for
DECAY = 0.93  # of what was seen, with every look: as the engine's acceptance of a request


@dataclass(slots=True)
class Rate:
    """Hits over tries, recent ones weighing more; ``prior`` before anything was seen."""

    prior: float
    hits: float = 0.0
    tries: float = 0.0

    def see(self, hits: int, tries: int) -> None:
        self.hits = DECAY * self.hits + hits
        self.tries = DECAY * self.tries + tries

    @property
    def value(self) -> float:
        return (WEIGHT * self.prior + self.hits) / (WEIGHT + self.tries)
