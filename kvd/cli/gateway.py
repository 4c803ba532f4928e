"""``kvd gateway``: settle addresses and keys, then hand over to the gateway."""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

import click

from kvd.cli.connect import Connection, connection_options
from kvd.cli.exits import CommandError, Exit
from kvd.cli.interrupts import end_at_once, raise_again
from kvd.extras import how_to_install
from kvd.settings.units import parse_size

_KEY_VARIABLE = "KVD_API_KEY"
_EXIT_OF_ERRNO: Mapping[int, Exit] = {
    errno.EADDRINUSE: Exit.TEMPORARY,
    errno.EACCES: Exit.NO_PERMISSION,
    errno.EPERM: Exit.NO_PERMISSION,
}


@click.command()
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; beyond this machine an API key is needed.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="TCP port; 0: any free one, the log names it.",
)
@click.option(
    "--served-model-name",
    "served_names",
    metavar="NAME",
    multiple=True,
    help="Name that requests may give as model; may be repeated, answers without one carry the first. [default: the daemon's name for it]",
)
@click.option(
    "--api-key-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"Keys of which requests must bear one, a line each; ${_KEY_VARIABLE} adds one.",
)
@click.option("--max-requests", metavar="N", type=click.IntRange(1), default=256, show_default=True, help="Requests at once; 429 beyond.")
@click.option("--max-body-bytes", metavar="SIZE", default="8MiB", show_default=True, help="Largest body of a request; 413 beyond.")
@click.option(
    "--request-timeout",
    "request_timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Time for a whole answer; 503 beyond.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Time for running requests after SIGTERM.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True, help="What is logged."
)
@click.option(
    "--log-format", type=click.Choice(["auto", "json", "console", "journald"]), default="auto", show_default=True, help="As of kvd serve."
)
@connection_options
def command(
    *,
    connection: Connection,
    host: str,
    port: int,
    served_names: tuple[str, ...],
    api_key_file: Path | None,
    max_requests: int,
    max_body_bytes: str,
    request_timeout_s: float,
    drain_timeout_s: float,
    log_level: str,
    log_format: str,
) -> int:
    """Serve the OpenAI API over HTTP in front of a daemon, until SIGTERM or Ctrl-C.

    docs/gateway.md says what of the API is there. The daemon may start and restart beside it: until it is ready, requests are
    answered with 503 and Retry-After.
    """
    api_keys = _api_keys(api_key_file, os.environ)
    if not api_keys and not _is_loopback(host):
        raise CommandError(f"--host {host}: whoever reaches it could use the model; give --api-key-file or ${_KEY_VARIABLE}", Exit.CONFIG)
    try:
        body_bytes = parse_size(max_body_bytes)
    except ValueError as error:
        raise click.UsageError(f"--max-body-bytes: {error}") from error
    end_at_once()
    try:
        from kvd.gateway.server import GatewayConfig, listen, run
    except ModuleNotFoundError as error:
        message = f"kvd gateway needs the extra `http` ({error.name} is missing): {how_to_install('http')}"
        raise CommandError(message, Exit.CONFIG) from error
    from kvd.observe import logging

    raise_again()
    logging.configure(level=log_level, log_format=log_format)
    try:
        listener = listen(host, port)
    except OSError as error:
        raise CommandError(f"{host}:{port}: {error.strerror}", _EXIT_OF_ERRNO.get(error.errno or 0, Exit.CONFIG)) from error
    config = GatewayConfig(
        endpoint=connection.endpoint,
        server_key=connection.server_key,
        client_key_file=connection.client_key_file,
        served_names=served_names,
        api_keys=api_keys,
        max_requests=max_requests,
        max_body_bytes=body_bytes,
        request_timeout_s=request_timeout_s,
        drain_timeout_s=drain_timeout_s,
    )
    try:
        return run(config, listener)
    except FileNotFoundError as error:
        raise CommandError(f"{error.filename} does not exist", Exit.NO_INPUT) from error
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error


def _api_keys(file: Path | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of the file's lines and of the environment.

    Raises:
        CommandError: the file can't be read, or holds no key.
    """
    keys = [key] if (key := environ.get(_KEY_VARIABLE, "").strip()) else []
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise CommandError(f"{file}: {error.strerror}", Exit.NO_INPUT) from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise CommandError(f"{file} holds no key", Exit.CONFIG)
        keys += found
    return tuple(keys)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
