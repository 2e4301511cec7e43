"""A real server in a thread, on a table model that recites a sentence or on any other engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cli_support import TEMPLATE, byte_tokenizer, reciter
from openai import OpenAI

from foredraft import Engine
from foredraft.drafters import Drafter
from foredraft.models.info import LoadedModel, ModelInfo
from foredraft.server import app, main
from foredraft.server.config import ServerConfig
from foredraft.testing import TableModel

PATIENCE = 20.0
"""Seconds after which something that should have happened has not."""


def reciting_engine(
    drafter: str | Drafter | None = "lookup", target: TableModel | None = None, **options: Any
) -> Engine:
    """An engine with a byte tokenizer over the model that recites the sentence."""
    tokenizer = byte_tokenizer(TEMPLATE)
    table = target or reciter(tokenizer)
    info = ModelInfo("reciter", Path("reciter"), "table", 0, 0, table.vocab_size, 0, "float64", 0)
    return Engine(target=LoadedModel(table, tokenizer, info), drafter=drafter, **options)


@dataclass
class Running:
    """A server that runs."""

    url: str
    application: app.Application
    server: main.Server

    @property
    def engine(self) -> Engine:
        return self.application.service.engine

    def openai(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=60, **options)

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def post(self, path: str, body: Any, key: str | None = None) -> httpx.Response:
        with self.http(key) as http:
            return http.post(path, json=body)

    def settled(self) -> None:
        """Waits until nothing runs; then nothing may be held but idle prefixes, and those can be given up."""
        service = self.application.service
        eventually(lambda: service.in_flight == 0 and not self.engine.scheduler.busy)
        freed = threading.Event()
        service.runner._inbox.put(lambda: (self.engine.reset(), freed.set()))  # type: ignore[arg-type,return-value]
        assert freed.wait(PATIENCE)
        assert self.engine.target.cache.slots_in_use == 0
        assert self.engine.target.cache.bytes_in_use == 0


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


@contextmanager
def running(engine: Engine, **options: Any) -> Iterator[Running]:
    """Serves the engine on a free port until the block ends."""
    application = app.build(engine, ServerConfig(port=0, **options))
    server = main.make_server(application)
    listening = main.listen(application.service.config)
    url = main.address(application.service.config, listening)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield Running(url, application, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
