"""How a long study tells whoever started it how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Two calls, so that a rich progress bar, a log or nothing at all can listen."""

    def stage(self, title: str, total: int) -> None:
        """A stage of ``total`` units begins (and the one before it, if any, is over)."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """``amount`` more units of the current stage are done; ``note`` is a short figure such as a loss."""


class NoProgress:
    """Listens to nothing."""

    def stage(self, title: str, total: int) -> None:
        """Ignored."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Ignored."""
