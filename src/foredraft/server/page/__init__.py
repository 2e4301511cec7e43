"""The live page at ``/``: static files of this package, sent as they are.

Nothing on the page comes from elsewhere, and no script or style stands in the HTML, so the policy can forbid both. The
page shows texts of models and messages of the server; it writes them as text, and the policy forbids anything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "figures.js": "text/javascript; charset=utf-8",
    "playground.js": "text/javascript; charset=utf-8",
    "events.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
PATHS = frozenset({"/", *(f"/page/{name}" for name in TYPES if name != "index.html")})
"""What is served without a key: nothing here tells anything about the server."""

POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """``/`` and the files that it names. Files are read once, here; a request names one of them or gets 404."""
    router = APIRouter(include_in_schema=False)
    folder = resources.files(__name__) / "static"
    for name in TYPES:
        path = "/" if name == "index.html" else f"/page/{name}"
        router.add_api_route(path, _sender(folder.joinpath(name).read_bytes(), TYPES[name]), methods=["GET", "HEAD"])
    return router


def _sender(content: bytes, media_type: str) -> Callable[[HttpRequest], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def send(http: HttpRequest) -> Response:
        headers = {**HEADERS, "ETag": tag}
        if http.headers.get("if-none-match") == tag:
            return Response(None, 304, headers)
        return Response(content, 200, headers, media_type)

    return send
