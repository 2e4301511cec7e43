"""Runs the application under uvicorn: the start line, TLS, and an orderly end on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from foredraft.errors import ConfigError
from foredraft.server import ceiling
from foredraft.server.app import Application
from foredraft.server.config import ServerConfig

log = logging.getLogger("foredraft.server")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """A uvicorn server that drains: after the first signal it finishes what runs and refuses what is new, with the
    port still open, so that a load balancer sees /ready turn 503; then it exits with code 0. A second signal, or
    ``drain_timeout``, cancels what still runs.
    """

    def __init__(self, config: uvicorn.Config, application: Application) -> None:
        super().__init__(config)
        self.application = application
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's own it does not raise the signal again at the end: draining is success."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        except ValueError:  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self.should_exit = True
        else:
            self.application.service.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.application.service.draining and self._drain is None:
            self._drain = asyncio.create_task(self.drain())
        return await super().on_tick(counter)

    async def drain(self) -> None:
        """Waits until nothing runs, then lets the server exit."""
        service = self.application.service
        service.draining = True
        service.event("draining", f"{service.in_flight} requests in flight")
        log.info("draining: %d requests in flight, nothing new is taken", service.in_flight)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(service.config.drain_timeout):
                while service.in_flight and not self.should_exit:
                    await asyncio.sleep(0.02)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Whoever is still in here gets its error event now; uvicorn would wait for it.
        await self.application.service.runner.stop()
        await super().shutdown(sockets)


def listen(config: ServerConfig) -> socket.socket:
    """The listening socket.

    Raises:
        ConfigError: Address or port cannot be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        found = socket.socket(family)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((config.host, config.port))
    except socket.gaierror as problem:
        raise ConfigError(
            f"{config.host!r} is no address of this machine ({problem.strerror})",
            field="host",
            remedy="use 127.0.0.1, or 0.0.0.0 for every interface",
        ) from None
    except OSError as problem:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port} ({problem.strerror or problem})",
            field="port",
            remedy="choose another with --port, or 0 for a free one",
        ) from None
    return found


def address(config: ServerConfig, listening: socket.socket) -> str:
    """The URL to give to clients, without a path."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http{'s' if config.tls_certificate else ''}://{host}:{listening.getsockname()[1]}"


def make_server(application: Application) -> Server:
    """The server, not yet running.

    Raises:
        ConfigError: The TLS files cannot be used.
    """
    config = application.service.config
    settings = uvicorn.Config(
        application.asgi,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 * 1024,
        http="h11",
        ws="none",
    )
    try:
        settings.load()
    except OSError as problem:  # ssl.SSLError is one
        raise ConfigError(f"the TLS files cannot be used ({problem})", field="tls_certificate") from None
    return Server(settings, application)


def serve(application: Application, started: Callable[[str], None]) -> None:
    """Serves until a signal has been dealt with.

    Args:
        application: What to serve.
        started: Called with the URL when the socket listens.
    """
    config = application.service.config
    server = make_server(application)
    with contextlib.closing(listen(config)) as listening:
        application.stats.ceiling = ceiling.measure(application.service.engine.target)
        started(address(config, listening))
        server.run(sockets=[listening])
