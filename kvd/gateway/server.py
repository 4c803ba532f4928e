"""The gateway as a process: its socket, its signals, its end. Uvicorn serves; a signal lets what runs finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from kvd_client.aio import AsyncClient
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvd.gateway.app import ABORT, Gateway, Limits
from kvd.observe.logging import get_logger
from kvd.observe.notify import Notifier

_CONNECT_TIMEOUT_S = 5.0
_KEEP_ALIVE_S = 30
"""A connection on which no request comes is closed after so long."""
_LAST_WORDS_S = 2.0
"""How long after the drain timeout requests have to say that they were cut short."""
_BACKLOG = 1024
_EXIT_OK = 0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything that ``kvd gateway`` takes. ``endpoint`` None: where clients look by default."""

    endpoint: str | None
    server_key: str | None
    client_key_file: Path | None
    served_names: tuple[str, ...]
    api_keys: tuple[str, ...]
    max_requests: int
    max_body_bytes: int
    request_timeout_s: float
    drain_timeout_s: float


def listen(host: str, port: int) -> socket.socket:
    """The socket, bound; connections wait in it until ``run``.

    Raises:
        OSError: the address can't be resolved or bound.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def run(config: GatewayConfig, listener: socket.socket) -> int:
    """Serve on this thread until SIGTERM or SIGINT; the exit code for the process.

    Raises:
        ValueError: the endpoint or a key of the daemon is malformed.
        OSError: a key file can't be read.
    """
    return asyncio.run(_serve(config, listener))


async def _serve(config: GatewayConfig, listener: socket.socket) -> int:
    client = AsyncClient(
        config.endpoint,
        timeout_s=config.request_timeout_s,
        connect_timeout_s=_CONNECT_TIMEOUT_S,
        reconnect_timeout_s=_CONNECT_TIMEOUT_S,
        wait_until_ready=False,
        server_key=config.server_key,
        client_key_file=config.client_key_file,
    )
    async with client:
        limits = Limits(max_requests=config.max_requests, max_body_bytes=config.max_body_bytes, request_timeout_s=config.request_timeout_s)
        gateway = Gateway(client, served_names=config.served_names, api_keys=config.api_keys, limits=limits)
        server = _Server(
            uvicorn.Config(
                gateway.app(),
                http=Connection,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=config.drain_timeout_s + _LAST_WORDS_S,  # type: ignore[arg-type]  # any number of seconds
            ),
            client,
            config.drain_timeout_s,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its starts and ends are told by our own records
        host, port = listener.getsockname()[:2]
        log = get_logger("gateway")
        log.info("listening", host=host, port=port, endpoint=client.endpoint, authenticated=bool(config.api_keys))
        await server.serve(sockets=[listener])
        log.info("stopped", clean=server.exit_code == _EXIT_OK)
        return server.exit_code


class Connection(HttpToolsProtocol):
    """Uvicorn's, but that it ends if no request has come for ``timeout_keep_alive`` seconds: the first one too, and a part of one is none."""

    _waiting: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give requests the way to end it, which they have to when the client has stopped reading."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: transport.abort}
        self._wait()

    def on_headers_complete(self) -> None:
        """A request."""
        self._waiting.cancel()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Its end, or that of the first of several that came one upon the other."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._waiting.cancel()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Not ``close``, which would wait for a client that does not read the last answer."""
        self.transport.abort()

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)


class _Server(uvicorn.Server):
    """Uvicorn with the signals of every kvd command: the first lets requests finish, a second ends at once with 128 + its number."""

    def __init__(self, config: uvicorn.Config, client: AsyncClient, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_timeout_s = drain_timeout_s
        self._closing: asyncio.Future[None] | None = None
        self.exit_code = _EXIT_OK
        self._notifier = Notifier.from_environment()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in _SIGNALS:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            yield
        finally:
            for signum in _SIGNALS:
                loop.remove_signal_handler(signum)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._notifier.ready()

    def _on_signal(self, signum: int) -> None:
        if self.should_exit:
            sys.stderr.flush()
            self.exit_code = 128 + signum
            self.force_exit = True
            for task in self.server_state.tasks:
                task.cancel()
        else:
            self.should_exit = True
            self._notifier.stopping()
            asyncio.get_running_loop().call_later(self._drain_timeout_s, self._end_requests)

    def _end_requests(self) -> None:
        """What still runs ends as calls of a closed client do, in the API's form; uvicorn's own way is a bare 500."""
        self._closing = asyncio.ensure_future(self._client.aclose())
