"""``kvd adapter list``, ``kvd adapter load`` and ``kvd adapter unload``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvd.cli.connect import Target, json_option, target_options
from kvd.cli.output import print_json, print_rows
from kvd.settings.units import human_size

if TYPE_CHECKING:
    from kvd_client.results import AdapterInfo


@click.group()
def group() -> None:
    """The LoRA adapters of the daemon's `adapter_dir`: which there are, which are loaded."""


@group.command("list")
@json_option
@target_options
def list_command(*, target: Target, as_json: bool) -> None:
    """List the adapters that requests may name: those that are loaded, and those on disk, which are loaded when a request names them.

    One on disk is `unusable`, with the reason, once it was tried and could not be loaded; it is tried again when a request names it.
    """
    with target.client(needs_ready=True) as client:
        adapters = client.adapters()
    if as_json:
        print_json({"adapters": [_object(each) for each in adapters]})
    elif not adapters:
        click.echo("no adapters")
    else:
        print_rows(("NAME", "STATE", "RANK", "SIZE", "REQUESTS", "DIGEST"), [_row(each) for each in adapters])
        for each in adapters:
            if each.error:
                click.echo(each.error)


@group.command("load")
@click.argument("name")
@json_option
@target_options
def load_command(*, target: Target, name: str, as_json: bool) -> None:
    """Read an adapter, also one that is loaded: after this, requests that name it run with what its directory holds now.

    Without it an adapter is read when a request names it and it is not loaded.
    """
    with target.client(needs_ready=True) as client:
        adapter = client.load_adapter(name)
    if as_json:
        print_json(_object(adapter))
    else:
        click.echo(f"loaded {name}: rank {adapter.rank}, {human_size(adapter.num_bytes)}, digest {adapter.digest[:16]}")


@group.command("unload")
@click.argument("name")
@json_option
@target_options
def unload_command(*, target: Target, name: str, as_json: bool) -> None:
    """Let an adapter go, once the requests that run with it are over. Its cached prefixes stay, for when it is loaded again."""
    with target.client(needs_ready=True) as client:
        adapter = client.unload_adapter(name)
    if as_json:
        print_json(_object(adapter))
    elif adapter.num_requests:
        click.echo(f"{name} leaves when the {adapter.num_requests} requests that run with it are over")
    else:
        click.echo(f"unloaded {name}")


def _row(adapter: AdapterInfo) -> tuple[str, ...]:
    if not adapter.digest:
        return (adapter.name, adapter.state, "-", "-", "-", "-")
    return (
        adapter.name,
        adapter.state,
        str(adapter.rank),
        human_size(adapter.num_bytes),
        str(adapter.num_requests),
        adapter.digest[:16],
    )


def _object(adapter: AdapterInfo) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "state": adapter.state,
        "digest": adapter.digest,
        "rank": adapter.rank,
        "bytes": adapter.num_bytes,
        "requests": adapter.num_requests,
        **({"error": adapter.error} if adapter.error else {}),
    }
