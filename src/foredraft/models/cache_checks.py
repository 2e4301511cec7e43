"""What every slot cache asks of ``commit`` and ``rollback``."""

from __future__ import annotations

from collections.abc import Sequence


def kept_rows(keep: int | Sequence[int], depths: Sequence[int]) -> Sequence[int]:
    """The rows that ``commit(keep)`` keeps; ``depths`` are those of the pending rows.

    Raises:
        ValueError: More rows than are pending, or rows that are no path: the i-th must have depth i.
    """
    rows = range(keep) if isinstance(keep, int) else keep
    if len(rows) > len(depths) or (isinstance(keep, int) and keep < 0):
        raise ValueError(f"keep: {keep} asks for more rows than the {len(depths)} pending ones")
    if any(not 0 <= row < len(depths) or depths[row] != i for i, row in enumerate(rows)):
        raise ValueError(f"keep: rows {list(rows)} are not a path from the last committed token")
    return rows


def check_cut(length: int, committed: int) -> None:
    """Raises ValueError unless ``0 <= length <= committed``."""
    if not 0 <= length <= committed:
        raise ValueError(f"length: must be between 0 and the {committed} committed tokens (got {length})")
