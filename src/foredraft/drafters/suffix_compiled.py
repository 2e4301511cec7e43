"""The suffix automaton in compiled code: what :mod:`~foredraft.drafters.suffix_automaton` does, five times as fast."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from ctypes import Array, byref, c_double, c_int32, c_int64

from foredraft.drafters.suffix_automaton import Found, SuffixAutomaton
from foredraft.kernels import library


class CompiledAutomaton:
    """As :class:`~foredraft.drafters.suffix_automaton.SuffixAutomaton`, which is its reference, for searches.

    Args:
        depth: Longest context whose counts are kept, >= 1.

    Attributes:
        size: Tokens added.

    Raises:
        MemoryError: There is no room for it; :meth:`extend` raises it, too, and nothing is found from then on.
    """

    def __init__(self, depth: int) -> None:
        self._compiled = library.library()
        self._handle = self._compiled.fd_suffix_new(depth)
        if not self._handle:
            raise MemoryError("no room for a suffix automaton")
        weakref.finalize(self, self._compiled.fd_suffix_free, self._handle)
        self.size = 0
        self._make_room(0)

    @property
    def bytes(self) -> int:
        """Memory held."""
        return int(self._compiled.fd_suffix_bytes(self._handle))

    def begin(self) -> None:
        """Begins another text: nothing runs across the border."""
        self._compiled.fd_suffix_begin(self._handle)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the current text."""
        ids = array("i", tokens)
        if not self._compiled.fd_suffix_extend(self._handle, ids.buffer_info()[0], len(ids)):
            raise MemoryError("no room for more tokens in a suffix automaton")
        self.size += len(ids)

    def start(self) -> Array[c_int32]:
        """A place for :meth:`follow`, at the empty string."""
        return (c_int32 * 2)(0, 0)

    def follow(self, place: Array[c_int32], tokens: Sequence[int]) -> None:
        """Moves a place along tokens of any text."""
        ids = array("i", tokens)
        self._compiled.fd_suffix_follow(self._handle, place, ids.buffer_info()[0], len(ids))

    def find(
        self, place: Array[c_int32] | None, limit: int, factor: float, min_prob: float, tree: bool, worth: float = 0.0
    ) -> Found | None:
        """See :meth:`SuffixAutomaton.find`."""
        if limit > self._room:
            self._make_room(limit)
        value, match = c_double(worth), c_int64()
        n = self._compiled.fd_suffix_copy(
            *(self._handle, place, limit, factor, min_prob, tree, byref(value), byref(match)),
            *(self._tokens, self._shares, self._parents),
        )
        if not n:
            return None
        parents = tuple(self._parents[:n]) if tree else None
        return Found(value.value, match.value, tuple(self._tokens[:n]), tuple(self._shares[:n]), parents)

    def _make_room(self, limit: int) -> None:
        """Where the tokens of a copy are written."""
        self._room = limit
        self._tokens, self._shares, self._parents = (c_int32 * limit)(), (c_double * limit)(), (c_int32 * limit)()


def automaton(depth: int) -> CompiledAutomaton | SuffixAutomaton:
    """An empty automaton, compiled where the kernels are in use."""
    return CompiledAutomaton(depth) if library.available() else SuffixAutomaton(depth)
