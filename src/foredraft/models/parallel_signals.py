"""Ctrl-C between passes, not within them: a split model whose pass is cut off in one process is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds an interrupt from the keyboard back until the end of the block; a second one comes through at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[Any, ...]] = []
    before = signal.getsignal(signal.SIGINT)

    def hold(*arguments: Any) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(arguments)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held and callable(before):
            before(*held[0])
