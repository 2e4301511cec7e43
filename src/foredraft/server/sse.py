"""Server-sent events that notice when their reader goes away or stops reading."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b": keep-alive\n\n"
QUIET = 15.0
"""Seconds without an event after which a comment is sent, so that proxies keep the connection."""

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event with JSON in it."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


async def gone(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what a generator yields, as long as somebody reads it; then closes the generator.

    Args:
        events: Events as bytes.
        cleanup: Awaited at the end, whether or not the generator was ever started.
        stall_timeout: Seconds that one send may take before the reader counts as gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], cleanup: Callable[[], Awaitable[None]], stall_timeout: float
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.cleanup = cleanup
        self.stall_timeout = stall_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer, listener = asyncio.create_task(self._write(send)), asyncio.create_task(gone(receive))
        try:
            await asyncio.wait({writer, listener}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, listener):
                task.cancel()
            await asyncio.gather(writer, listener, return_exceptions=True)
            await self.events.aclose()
            await self.cleanup()
        if not writer.cancelled() and (failure := writer.exception()) is not None:
            raise failure

    async def _write(self, send: Send) -> None:
        upcoming: asyncio.Task[bytes] | None = None
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            while True:
                if upcoming is None:
                    upcoming = asyncio.create_task(anext(self.events))
                done, _ = await asyncio.wait({upcoming}, timeout=QUIET)
                data = KEEP_ALIVE
                if done:
                    try:
                        data, upcoming = upcoming.result(), None
                    except StopAsyncIteration:
                        break
                async with asyncio.timeout(self.stall_timeout):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            if upcoming is not None:
                upcoming.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                    await upcoming
        await send({"type": "http.response.body", "body": b""})
