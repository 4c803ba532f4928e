"""What every client command shares: where the daemon is, how long to wait for it, and how its answers are asked for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvd.cli.exits import CommandError, Exit, exit_of_failure
from kvd.cli.interrupts import end_at_once, raise_again

if TYPE_CHECKING:
    from kvd_client.client import Client
    from kvd_client.errors import ConnectionLost

_CONNECT_TIMEOUT_S = 5.0
_SAY_AFTER_S = 1.0
READY = "ready"
"""The one state in which a daemon takes requests."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a daemon is and what its endpoint demands; ``endpoint`` None: where clients look by default."""

    endpoint: str | None
    server_key: str | None
    client_key_file: Path | None


@dataclass(frozen=True, slots=True)
class Target:
    """The daemon that a command talks to."""

    endpoint: str | None
    timeout_s: float
    wait: bool
    server_key: str | None
    client_key_file: Path | None

    @contextmanager
    def client(self, *, needs_ready: bool) -> Iterator[Client]:
        """A connected client.

        Args:
            needs_ready: whether the call that follows is answered only by a daemon that is ready. Without ``--wait`` one that is not is an
                error at once; a restart during the call is waited through in any case.

        Raises:
            CommandError: no daemon answers, or it is not ready.
            UsageError: the endpoint or a key is malformed.
            KvdError: the call failed.
        """
        end_at_once()  # nothing is under way yet, and an import is a bad place for an exception
        from kvd_client.client import Client
        from kvd_client.errors import ConnectionLost

        raise_again()
        connect_timeout_s = self.timeout_s if self.wait else min(0.9 * self.timeout_s, _CONNECT_TIMEOUT_S)
        try:
            client = Client(
                self.endpoint,
                timeout_s=self.timeout_s,
                connect_timeout_s=connect_timeout_s,
                server_key=self.server_key,
                client_key_file=self.client_key_file,
            )
        except FileNotFoundError as error:
            raise CommandError(f"{error.filename} does not exist", Exit.NO_INPUT) from error
        except (ValueError, OSError) as error:
            raise click.UsageError(str(error)) from error
        try:
            with client:
                if needs_ready and self.wait:
                    with _said_while_waiting(client.endpoint):
                        client.wait_ready()
                elif needs_ready and (state := client.ping().state) != READY:
                    raise CommandError(f"the daemon at {client.endpoint} is {state}; --wait waits until it is ready", Exit.UNAVAILABLE)
                yield client
        except ConnectionLost as error:
            raise CommandError(_with_advice(error, client.endpoint), exit_of_failure(error.code, retryable=error.retryable)) from error


@contextmanager
def _said_while_waiting(endpoint: str) -> Iterator[None]:
    """One line on standard error, if it takes a moment."""
    timer = threading.Timer(_SAY_AFTER_S, lambda: click.echo(f"kvd: waiting for the daemon at {endpoint} to be ready", err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _with_advice(error: ConnectionLost, endpoint: str) -> str:
    """The message, which names the endpoint once, and what to do about it."""
    message = str(error).removeprefix("connection_lost: ")
    if endpoint not in message:
        message = f"{message} (at {endpoint})"
    return f"{message}; `kvd serve` starts one" if message.startswith("no daemon answers") else message


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--connect`` and the CURVE keys; the command gets them as ``connection``."""

    @click.option(
        "--connect",
        metavar="ENDPOINT",
        envvar="KVD_CONNECT",
        help="The daemon's endpoint, ipc://PATH or tcp://HOST:PORT; $KVD_CONNECT otherwise, then the user's daemon, then the machine's.",
    )
    @click.option(
        "--server-key",
        metavar="KEY",
        envvar="KVD_SERVER_KEY",
        help="The daemon's public CURVE key (Z85), of a tcp endpoint; $KVD_SERVER_KEY.",
    )
    @click.option(
        "--client-key-file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        envvar="KVD_CLIENT_KEY_FILE",
        help="Own secret CURVE key; $KVD_CLIENT_KEY_FILE.",
    )
    @functools.wraps(command)
    def wrapped(*, connect: str | None, server_key: str | None, client_key_file: Path | None, **rest: Any) -> Any:
        if _is_ipc(connect):
            _refuse_typed_keys(connect)
            server_key = client_key_file = None
        return command(connection=Connection(connect, server_key, client_key_file), **rest)

    return wrapped


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--connect`` and its companions; the command gets them as ``target``."""

    @connection_options
    @click.option(
        "--timeout",
        "timeout_s",
        metavar="SECONDS",
        type=click.FloatRange(min=0, min_open=True),
        envvar="KVD_TIMEOUT",
        default=600.0,
        show_default=True,
        help="Time for the whole command; $KVD_TIMEOUT.",
    )
    @click.option("--wait", is_flag=True, help="Wait, at most --timeout, for a daemon that is not there yet or not ready.")
    @functools.wraps(command)
    def wrapped(*, connection: Connection, timeout_s: float, wait: bool, **rest: Any) -> Any:
        target = Target(connection.endpoint, timeout_s, wait, connection.server_key, connection.client_key_file)
        return command(target=target, **rest)

    return wrapped


def _is_ipc(connect: str | None) -> bool:
    from kvd_client.endpoints import default_endpoint

    return (connect or default_endpoint()).startswith("ipc://")


def _refuse_typed_keys(connect: str | None) -> None:
    """CURVE keys of the environment are for the tcp endpoints that a shell talks to as well; one that was typed is meant.

    Raises:
        UsageError: it was.
    """
    context = click.get_current_context()
    for name in ("server_key", "client_key_file"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            where = connect or "the default endpoint (ipc)"
            raise click.UsageError(f"--{name.replace('_', '-')} is for tcp endpoints; {where} takes no CURVE keys")


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``; the command gets it as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)
