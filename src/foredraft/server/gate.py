"""The outermost layer: request ids, keys, body sizes, the access log, an answer to every error that got so far."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.errors import FAILED, ApiError
from foredraft.server.keys import Client
from foredraft.server.page import PATHS as PAGE_PATHS
from foredraft.server.pieces import Piece
from foredraft.server.service import Service

access = logging.getLogger("foredraft.access")
log = logging.getLogger("foredraft.server")

OPEN_PATHS = {"/health", "/ready", "/openapi.json", "/docs"} | PAGE_PATHS
ADMIN_PATHS = {"/metrics", "/stats", "/stats/stream"}
BODY_TIMEOUT = 30.0
"""Seconds in which a request body must have arrived."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,64}")


@dataclass
class Visit:
    """One HTTP request, for the log and for error messages.

    Attributes:
        id: In the header ``X-Request-Id`` and in every error.
        client: Who sent it.
        outcome: How it ended if not ordinarily.
        facts: What the log says besides.
        status: Status of the answer; 0 before it.
        log_text: Whether prompts and outputs are logged.
    """

    id: str
    client: Client
    started: float = field(default_factory=time.monotonic)
    outcome: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    log_text: bool = False

    def first_piece(self) -> None:
        self.facts.setdefault("first_piece_s", round(time.monotonic() - self.started, 4))

    def finished(self, pieces: Sequence[Piece]) -> None:
        """Notes the figures of the answers."""
        results = [piece.result for piece in pieces if piece.result is not None]
        if self.log_text:
            self.facts["output"] = [piece.text for piece in pieces]
        self.facts |= {
            "prompt_tokens": sum(result.usage.prompt_tokens for result in results),
            "completion_tokens": sum(result.usage.completion_tokens for result in results),
            "accepted_tokens": sum(result.stats.num_accepted_draft_tokens for result in results),
            "drafted_tokens": sum(result.stats.num_draft_tokens for result in results),
            "finish_reasons": [result.finish_reason for result in results],
        }

    def failed(self, error: ApiError) -> None:
        self.outcome = error.code or error.type
        self.facts["error"] = error.code or error.type


class Gate:
    """Wraps the application.

    Args:
        app: What answers.
        service: Whose keys and limits hold.
        counted: Called with path and status of every answer.
        paths: Those of the application's routes, to name them where a request never got to its route.
    """

    def __init__(self, app: ASGIApp, service: Service, counted: Any, paths: Collection[str] = ()) -> None:
        self.app, self.service, self.counted, self.paths = app, service, counted, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = dict(scope["headers"])
        offered = headers.get(b"x-request-id", b"")
        request_id = offered.decode() if _REQUEST_ID.fullmatch(offered) else f"req-{uuid.uuid4().hex}"
        visit = Visit(request_id, Client("unknown"), log_text=self.service.config.log_prompts)
        scope.setdefault("state", {})["visit"] = visit
        answered = _Answered(send, visit)
        try:
            visit.client = self._admit(scope["path"], headers.get(b"authorization"))
            body = await self._read(headers, receive)
            await self.app(scope, _replay(body, receive), answered)
        except ApiError as error:
            await answered.error(error)
        except Exception:
            log.exception("request %s failed", visit.id)
            await answered.error(ApiError(500, FAILED, code="internal"))
        finally:
            self._note(scope, visit)

    def _admit(self, path: str, authorization: bytes | None) -> Client:
        keys = self.service.keys
        if path in OPEN_PATHS or (path in ADMIN_PATHS and self.service.config.public_stats):
            return Client("unknown")
        client = keys.find(authorization.decode("latin-1") if authorization is not None else None)
        if client is None:
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if path in ADMIN_PATHS and not (client.admin or keys.open):
            raise ApiError(403, "this key may not read statistics of all clients", code="not_admin")
        return client

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body, within its limit of bytes and time."""
        limit = self.service.config.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the body did not arrive whole", code="incomplete_body")
                    parts.append(message.get("body", b""))
                    size, more = size + len(parts[-1]), message.get("more_body", False)
                    if size > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive in {BODY_TIMEOUT:.0f} s", code="body_timeout") from None
        return b"".join(parts)

    def _note(self, scope: Scope, visit: Visit) -> None:
        # Paths with names in them, and those that no route has, are the client's text; a route is not.
        fixed = scope["path"] if scope["path"] in self.paths else "other"
        path = getattr(scope.get("route"), "path", fixed)
        self.counted(path, visit.status)
        if path in OPEN_PATHS or (path in ADMIN_PATHS and visit.status < 400):
            return
        seconds = round(time.monotonic() - visit.started, 4)
        facts = {"request_id": visit.id, "tenant": visit.client.name, "method": scope["method"], "path": path}
        facts |= {"status": visit.status, "seconds": seconds, "outcome": visit.outcome or "done"} | visit.facts
        access.info("request", extra={"facts": facts})


class _Answered:
    """The ``send`` of one request: adds its id to the headers and remembers what was sent."""

    def __init__(self, send: Send, visit: Visit) -> None:
        self._send, self._visit = send, visit

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._visit.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self._visit.id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    async def error(self, error: ApiError) -> None:
        """Answers with an error, if nothing was answered yet."""
        self._visit.failed(error)
        if self._visit.status:
            return
        body = json.dumps(error.body(self._visit.id)).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": error.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body once, then waits for the client to go away."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
