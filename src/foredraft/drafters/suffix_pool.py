"""Past outputs, searchable, by tenant: bounded in bytes, the oldest forgotten first."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from foredraft.drafters.suffix_compiled import automaton

PARTS = 8  # a generation may grow to this part of the pool
OVERHEAD = 4096  # bytes of an empty generation, generously
CHUNK = 256  # tokens added between two looks at the size


class Generation:
    """Outputs of about the same age: they are searched together and forgotten together.

    Attributes:
        tokens: All outputs, one after the other.
        ends: Where each of them ends.
    """

    def __init__(self, depth: int) -> None:
        self.automaton = automaton(depth)
        self.tokens = array("i")
        self.ends: list[int] = []

    @property
    def bytes(self) -> int:
        return OVERHEAD + self.automaton.bytes + 4 * len(self.tokens) + 40 * len(self.ends)

    def add(self, tokens: Sequence[int]) -> None:
        self.automaton.begin()
        self.automaton.extend(tokens)
        self.tokens.extend(tokens)
        self.ends.append(len(self.tokens))

    def outputs(self) -> Iterator[array[int]]:
        start = 0
        for end in self.ends:
            yield self.tokens[start:end]
            start = end


class SuffixPool:
    """Past outputs of every tenant, which never meet.

    When memory is short, the tenant that holds most loses its oldest generation, so a busy tenant cannot push out
    what others have.

    Args:
        depth: Longest context of the automata.
        max_bytes: Most memory that all tenants together hold; 0 keeps nothing.

    Attributes:
        bytes: Memory held.
    """

    def __init__(self, depth: int, max_bytes: int) -> None:
        self.depth = depth
        self.max_bytes = max_bytes
        self._tenants: dict[str, list[Generation]] = {}  # oldest first
        self._held: dict[str, int] = {}  # bytes by tenant
        self.bytes = 0

    def generations(self, tenant: str) -> Sequence[Generation]:
        """A tenant's generations, oldest first."""
        return self._tenants.get(tenant, ())

    def tenants(self) -> list[str]:
        return list(self._tenants)

    def add(self, tenant: str, output: Sequence[int]) -> None:
        """Takes in one output; one that is larger than a generation is kept in pieces."""
        if not self.max_bytes:
            return
        for start in range(0, len(output), CHUNK):
            generations = self._tenants.setdefault(tenant, [])
            if not generations or generations[-1].bytes > self.max_bytes // PARTS:
                generations.append(Generation(self.depth))
            piece = output[start : start + CHUNK]
            if start and generations[-1].ends:
                self._continue(generations[-1], piece)
            else:
                generations[-1].add(piece)
            held = sum(generation.bytes for generation in generations)
            self.bytes += held - self._held.get(tenant, 0)
            self._held[tenant] = held
            while self.bytes > self.max_bytes:
                self._forget(max(self._held, key=self._held.__getitem__))

    def clear(self) -> None:
        self._tenants.clear()
        self._held.clear()
        self.bytes = 0

    def _continue(self, generation: Generation, piece: Sequence[int]) -> None:
        generation.automaton.extend(piece)
        generation.tokens.extend(piece)
        generation.ends[-1] = len(generation.tokens)

    def _forget(self, tenant: str) -> None:
        generations = self._tenants[tenant]
        freed = generations.pop(0).bytes
        self._held[tenant] -= freed
        self.bytes -= freed
        if not generations:
            del self._tenants[tenant], self._held[tenant]
