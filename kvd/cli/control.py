"""``kvd checkpoint`` and ``kvd drain``."""

from __future__ import annotations

import click

from kvd.cli.connect import Target, json_option, target_options
from kvd.cli.output import print_json
from kvd.settings.units import human_size


@click.command()
@json_option
@target_options
def checkpoint_command(target: Target, as_json: bool) -> None:
    """Write every hot block to disk now; returns when that is durable."""
    with target.client(needs_ready=True) as client:
        result = client.checkpoint()
    if as_json:
        print_json({"blocks": result.num_blocks, "bytes": result.num_bytes})
    else:
        click.echo(f"{result.num_blocks} blocks, {human_size(result.num_bytes)} written")


@click.command()
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="Abort running requests after so long; otherwise the daemon's drain_timeout_s.",
)
@json_option
@target_options
def drain_command(target: Target, drain_timeout_s: float | None, as_json: bool) -> None:
    """Stop the daemon gracefully: it accepts nothing new, ends its requests, writes a checkpoint and exits.

    Returns when the daemon has stopped accepting.
    """
    with target.client(needs_ready=False) as client:
        client.drain(drain_timeout_s)
    if as_json:
        print_json({"draining": True})
    else:
        click.echo("draining")
