"""Puts the application together: routes, errors in OpenAI's shape, the document that describes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from foredraft import __version__
from foredraft.engine.engine import Engine
from foredraft.server import sse
from foredraft.server.config import ServerConfig
from foredraft.server.errors import FAILED, ApiError
from foredraft.server.gate import Gate
from foredraft.server.keys import load_keys
from foredraft.server.metrics import Metrics
from foredraft.server.page import page_routes
from foredraft.server.routes import api_routes
from foredraft.server.service import Service
from foredraft.server.stats import LiveStats

STATS_EVERY = 1.0
"""Seconds between two events of /stats/stream."""


@dataclass
class Application:
    """What :func:`build` made: ``asgi`` is the ASGI application, the rest its parts."""

    asgi: Gate
    api: FastAPI
    service: Service
    metrics: Metrics
    stats: LiveStats


def build(engine: Engine, config: ServerConfig) -> Application:
    """An application that serves ``engine``; its thread starts with the ASGI lifespan.

    Raises:
        ConfigError: Keys or the model's name cannot be used.
    """
    name = config.served_name or (engine.target_info.name if engine.target_info is not None else "model")
    metrics, stats = Metrics(engine, name, __version__), LiveStats(engine)
    service = Service(engine, config, load_keys(config), name, [metrics, stats])

    @contextlib.asynccontextmanager
    async def lifespan(_api: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    api = FastAPI(title="foredraft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    routers = (api_routes(service), _operator_routes(service, metrics, stats), page_routes())
    for router in routers:
        api.include_router(router)
    _errors(api)
    _describe(api)
    paths = [route.path for router in routers for route in router.routes if isinstance(route, Route)]
    return Application(Gate(api, service, metrics.answered, paths), api, service, metrics, stats)


def _operator_routes(service: Service, metrics: Metrics, stats: LiveStats) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get("/health", summary="Whether the process works")
    async def health() -> Response:
        alive = service.runner.alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    @router.get("/ready", summary="Whether new requests are welcome")
    async def ready() -> Response:
        full = service.in_flight >= service.capacity
        status = "draining" if service.draining else "full" if full else "ready"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @router.get("/metrics", summary="Prometheus metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def shown() -> dict[str, Any]:
        names = service.engine.drafters
        head: dict[str, Any] = {"model": service.name, "drafter": next(iter(names), "none"), "choice": list(names)}
        head |= {"draining": service.draining, "in_flight": service.in_flight, "capacity": service.capacity}
        return head | stats.snapshot()

    @router.get("/stats", summary="Live figures")
    async def live() -> Response:
        return JSONResponse(shown())

    @router.get("/stats/stream", summary="Live figures, an event a second")
    async def live_stream() -> Response:
        async def events() -> AsyncGenerator[bytes, None]:
            last = -1
            while not service.draining:
                points = stats.history.since(last)
                last = points[-1]["number"] if points else last
                yield sse.event(shown() | {"history": points})
                await asyncio.sleep(STATS_EVERY)

        async def nothing() -> None:
            return None

        return sse.EventStream(events(), nothing, service.config.stall_timeout)

    return router


def _errors(api: FastAPI) -> None:
    def answer(http: HttpRequest, error: ApiError) -> Response:
        visit = http.scope["state"]["visit"]
        visit.failed(error)
        return JSONResponse(error.body(visit.id), error.status, error.headers)

    @api.exception_handler(ApiError)
    async def ours(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(http, error)

    @api.exception_handler(RequestValidationError)
    async def malformed(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(http, _validation_error(error))

    @api.exception_handler(Exception)
    async def bug(http: HttpRequest, error: Exception) -> Response:
        return answer(http, ApiError(500, FAILED, code="internal"))  # the gate writes it into the log

    @api.exception_handler(HTTPException)
    async def other(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:
            return answer(http, ApiError(400, "the body is not valid JSON", code="invalid_json"))
        missing = f"{http.method} {http.url.path:.120} is not here; see /openapi.json"
        message = missing if error.status_code in (404, 405) else str(error.detail)
        return answer(http, ApiError(error.status_code, message, code="not_found" if "not here" in message else None))


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first complaint that says most: one about a field, named by its path."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "path", "query")]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if not path:
        return ApiError(400, "the body must be a JSON object (Content-Type: application/json)", code="invalid_body")
    # Of pydantic's path the parts that name a branch of a union mean nothing to the client.
    field = ".".join(part for part in path if part.isidentifier() or part.isdigit())
    if first["type"] == "extra_forbidden":
        message = f"{field}: unknown or unsupported field"
        return ApiError(400, message, param=field, code="unknown_parameter")
    problem = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{field}: {problem[:1].lower()}{problem[1:]}", param=field, code="invalid_value")


def _describe(api: FastAPI) -> None:
    """The OpenAPI document says what really comes back: errors in OpenAI's shape, never FastAPI's 422."""
    plain = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = plain()
            error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
            document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{}, {"key": []}]
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    content = {"application/json": {"schema": error}}
                    operation["responses"]["default"] = {"description": "Error", "content": content}
            api.openapi_schema = document
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]
