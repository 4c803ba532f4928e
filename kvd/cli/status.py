"""``kvd status``, ``kvd stats`` and ``kvd ping``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import click

from kvd.cli.connect import READY, Target, json_option, target_options
from kvd.cli.exits import Exit
from kvd.cli.output import print_facts, print_json, print_rows
from kvd.settings.units import human_duration, human_size

_LINES_OF_THEIR_OWN = frozenset(
    {"governor", "waiting_blocks", "waiting_bytes", "unwritten_blocks", "refused_blocks", "max_block_bytes", "max_bytes"}
)
"""Of the store's part: they are put in words."""
GOVERNORS = MappingProxyType(
    {
        "none": "nothing holds copies to disk back",
        "rate": "checkpoint_bytes_per_s is used up",
        "queue": "more requests wait than checkpoint_pause_queue_depth",
        "staging": "the disk is slower than the copies",
        "in_flight": "as much as may be is under way",
        "disk": "the disk budget is full, or the store is degraded",
    }
)


@click.command()
@json_option
@target_options
def status_command(*, target: Target, as_json: bool) -> None:
    """Show the daemon's state, requests, blocks, store and how its last start went. Answered in every state."""
    with target.client(needs_ready=False) as client:
        report = client.status()
    if as_json:
        print_json(report)
    else:
        print_facts(list(_status_facts(report)))


@click.command()
@json_option
@target_options
def stats_command(*, target: Target, as_json: bool) -> None:
    """Show counters since the daemon's start, and their rates. Answered in every state."""
    with target.client(needs_ready=False) as client:
        report = client.stats()
    if as_json:
        print_json(report)
        return
    rates = report.get("rates_per_s", {})
    rows = [(name, _shown(name, value), _rate(name, rates)) for name, value in _flat(report)]
    print_rows(("COUNTER", "VALUE", f"PER S ({report.get('rates_window_s', 0):g} s)"), rows)


@click.command()
@json_option
@target_options
def ping_command(*, target: Target, as_json: bool) -> int:
    """Ask whether a daemon answers and is ready, and say in which state it is; with --wait, wait until it is ready.

    Exit code 69 if none answers, or it is not ready.
    """
    with target.client(needs_ready=target.wait) as client:
        result = client.ping()
        endpoint = client.endpoint
    if as_json:
        print_json(
            {"endpoint": endpoint, "state": result.state, "instance": result.instance, "round_trip_ms": round(result.round_trip_s * 1e3, 3)}
        )
    else:
        click.echo(f"{endpoint} is {result.state}, answered in {result.round_trip_s * 1e3:.1f} ms")
    return Exit.OK if result.state == READY else Exit.UNAVAILABLE


def _status_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of each line; parts that the daemon does not know yet are left out."""
    yield "state", str(report.get("state", "unknown"))
    for name in ("progress", "model", "kernels", "fingerprint", "instance"):
        if report.get(name):
            yield name, str(report[name])
    if draft := report.get("draft"):
        yield "draft", f"{draft.get('model')} ({draft.get('kernels')}), {human_size(draft.get('block_bytes', 0))} a block, in memory only"
    if "uptime_s" in report:
        yield "uptime", human_duration(report["uptime_s"])
    if requests := report.get("requests"):
        yield "requests", _list(requests)
    if blocks := report.get("blocks"):
        yield "blocks", _list(blocks)
    adapters = report.get("adapters") or {}
    if adapters.get("max_adapters"):
        names = ", ".join(f"{each['name']} ({each['requests']} requests)" for each in adapters["loaded"]) or "none loaded"
        if unloading := adapters.get("unloading"):
            names += f", {len(unloading)} unloading ({sum(each['requests'] for each in unloading)} requests)"
        yield "adapters", f"{names}; {adapters['max_adapters']} may be loaded, {adapters['waiting']} requests wait for one"
    if store := report.get("store"):
        yield "store", _list({key: value for key, value in store.items() if key not in _LINES_OF_THEIR_OWN})
        if governor := store.get("governor"):
            yield "governor", _governor(governor, store)
        if "max_block_bytes" in store:
            room = f"{human_size(store['max_block_bytes'])} of {human_size(store.get('max_bytes', 0))} (store_max_bytes)"
            yield "disk budget", f"blocks may take {room}, and take {human_size(store.get('bytes', 0))}"
        if "unwritten_blocks" in store:
            yield "not on disk", _unwritten(store)
    if rehydration := report.get("rehydration"):
        yield "rehydration", _list({key: value for key, value in rehydration.items() if key not in {"dropped", "pins_not_held"}})
        if dropped := rehydration.get("dropped"):
            yield "dropped", _list(dropped)
        if not_held := rehydration.get("pins_not_held"):
            yield "warning", f"{not_held} of the pins not held; `kvd prefixes` says why"


def _governor(name: str, store: Mapping[str, Any]) -> str:
    """What holds copies to disk back, in words."""
    waiting = f"{store.get('waiting_blocks', 0)} blocks ({human_size(store.get('waiting_bytes', 0))}) wait to be written"
    return f"{name}: {GOVERNORS.get(name, 'holds copies back')}; {waiting}"


def _unwritten(store: Mapping[str, Any]) -> str:
    """How much a crash would cost, and what would spare it."""
    text = f"{store['unwritten_blocks']} of the blocks in memory"
    if refused := store.get("refused_blocks"):
        text += f"; {refused} hot ones found no room under store_max_bytes"
    return text


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{_label(name)} {_shown(name, value)}" for name, value in values.items() if value not in (None, ""))


def _label(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        is_rate = name.endswith("_per_s")
        if name.removesuffix("_per_s").endswith("bytes"):
            return f"{human_size(value)}/s" if is_rate else human_size(value)
        if name.endswith(("_s", "seconds")) and not is_rate:
            return human_duration(value)
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return (_list(value) if isinstance(value, Mapping) else str(value)) or "none"


def _rate(name: str, rates: Mapping[str, float]) -> str:
    """The rate of a counter; the daemon keeps those of its scheduler and cache."""
    part, _, counter = name.partition(".")
    return f"{rates[counter]:g}" if part in {"scheduler", "cache"} and counter in rates else "-"


def _flat(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The counters by dotted name, rates left out."""
    for name, value in report.items():
        if name in {"rates_per_s", "rates_window_s"}:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
