"""Servers for the socket tests; zmq is imported where it is used, for the pure tier's sake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def failures() -> list[str]:
    """What servers report as fatal; a test that expects nothing finds it empty."""
    return []


@pytest.fixture
def start_server(tmp_path: Path, failures: list[str]) -> Iterator[Callable[..., Any]]:
    """Start servers with an echo engine behind each; they end with the test."""
    from edge_fakes import INSTANCE, ByteText, EngineThread

    from kvd.config import TransportConfig
    from kvd.transport.inproc import InprocInbox, InprocOutbox
    from kvd.transport.server import TransportServer

    class Running:
        def __init__(
            self, *, state: str = "ready", load_text: Callable[[], Any] = ByteText, inbox_capacity: int = 4096, **config: Any
        ) -> None:
            config = {"listen": (f"ipc://{tmp_path}/kvd.sock",), **config}
            inbox, outbox = InprocInbox(inbox_capacity), InprocOutbox()
            self.server = TransportServer(
                TransportConfig(**config),
                load_text=load_text,
                inbox=inbox,
                outbox=outbox,
                instance=INSTANCE,
                drain_timeout_s=30.0,
                on_failure=failures.append,
            )
            self.urls = self.server.bind()
            self.url = self.urls[0]
            self.outbox = outbox
            self.engine = EngineThread(inbox, outbox, state=state)
            self.server.start()
            self.is_ended = False

        def stop(self) -> None:
            if not self.is_ended:
                self.is_ended = True
                self.engine.stop()
                assert self.server.join(60), "the server did not end"

    running: list[Running] = []

    def start(**options: Any) -> Running:
        running.append(Running(**options))
        return running[-1]

    yield start
    for each in running:
        each.stop()
    assert not failures


@pytest.fixture
def connect() -> Iterator[Callable[..., Any]]:
    """Raw clients that are closed with the test."""
    from edge_client import RawClient

    clients: list[RawClient] = []

    def open_client(url: str, **options: Any) -> RawClient:
        clients.append(RawClient(url, **options))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()
