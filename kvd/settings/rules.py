"""What each configuration key may hold: the one place that checks values, and the words in which it says so."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvd.config import DaemonConfig
from kvd.transport.endpoints import check_exposure, parse_endpoint
from kvd.transport.errors import EndpointError


@dataclass(frozen=True, slots=True)
class Rule:
    """``allowed`` completes the sentence "allowed: …"."""

    allowed: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two keys that don't go together; ``keys`` are their flat names, the first one carries the blame."""

    keys: tuple[str, ...]
    message: str


def _at_least(least: float) -> Rule:
    return Rule(f"{least} or more", lambda value: value >= least)


def _between(least: float, most: float) -> Rule:
    return Rule(f"{least} to {most}", lambda value: least <= value <= most)


def _one_of(*words: str) -> Rule:
    return Rule(", ".join(f"`{word}`" for word in words), lambda value: value in words)


_POSITIVE = Rule("more than 0", lambda value: value > 0)
_AT_LEAST_4KIB = Rule("4KiB or more", lambda value: value >= 4096)


def _is_endpoint(url: str) -> bool:
    try:
        parse_endpoint(url)
    except EndpointError:
        return False
    return True


def _is_date(text: str) -> bool:
    try:
        return text == "" or dt.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


_BY_KIND: Mapping[type, Rule] = MappingProxyType(
    {
        bool: Rule("true or false", lambda _: True),
        str: Rule("any text", lambda _: True),
        Path: Rule("a directory", lambda _: True),
        int: _at_least(1),
        float: _POSITIVE,
    }
)
"""What a value of a kind may be where ``_BY_NAME`` says nothing else."""

_BY_NAME: Mapping[str, Rule] = MappingProxyType(
    {
        "executor": _one_of("torch", "fake"),
        "device": Rule("`auto`, `cpu`, `cuda`, `cuda:N`", lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None),
        "dtype": _one_of("auto", "float32", "bfloat16", "float16"),
        "kernels": _one_of("auto", "native", "torch"),
        "weights": _one_of("auto", "dequantised"),
        "max_model_len": _at_least(0),
        "threads": _between(0, 1024),
        "fake_step_ms": _at_least(0),
        "kv_memory": _at_least(0),
        "block_size_tokens": Rule("a power of two, 4 to 256", lambda value: 4 <= value <= 256 and value & (value - 1) == 0),
        "kv_dtype": _one_of("auto", "float32", "bfloat16", "int8"),
        "free_watermark": Rule("0 or more and less than 1", lambda value: 0 <= value < 1),
        "eviction_policy": _one_of("cost", "lru"),
        "max_pinned_fraction": _between(0, 1),
        "max_inter_token_ms": _at_least(0),
        "max_loading_fraction": _between(0, 1),
        "speculation": _one_of("auto", "ngram", "draft", "off"),
        "num_draft": _between(1, 32),
        "ngram_min": _between(1, 64),
        "ngram_max": _between(1, 64),
        "max_adapter_rank": _between(1, 1024),
        "max_steps_in_flight": _between(0, 2),
        "drain_timeout_s": _at_least(0),
        "listen": Rule("`ipc:///PATH` (at most 107 bytes of path), `tcp://HOST:PORT`", lambda value: all(map(_is_endpoint, value))),
        "frontend": _one_of("thread", "process"),
        "ipc_tenants": _one_of("none", "uid"),
        "max_message_bytes": _AT_LEAST_4KIB,
        "max_frames": _at_least(2),
        "max_stop_strings": _at_least(0),
        "template_date": Rule("YYYY-MM-DD, or nothing", _is_date),
        "store_max_bytes": Rule("32MiB or more", lambda value: value >= 32 << 20),
        "cold_tier": _one_of("auto", "always", "never"),
        "write_policy": _one_of("selective", "through", "shutdown"),
        "write_dwell_s": _at_least(0),
        "checkpoint_pause_queue_depth": _at_least(0),
        "durability": _one_of("fsync", "interval"),
        "wal_sync_interval_ms": _at_least(0),
        "wal_segment_bytes": _AT_LEAST_4KIB,
        "wal_max_bytes": _AT_LEAST_4KIB,
        "rehydrate_timeout_s": _at_least(0),
        "rehydrate_max_fraction": _between(0, 1),
        "recompute_budget_s": _at_least(0),
        "log_level": _one_of("debug", "info", "warning", "error"),
        "log_format": _one_of("auto", "json", "console", "journald"),
    }
)


def rule_of(name: str, kind: type) -> Rule:
    """The rule of the key with the flat name ``name`` and values of ``kind``."""
    return _BY_NAME.get(name) or _BY_KIND[kind]


def conflicts(config: DaemonConfig) -> list[Conflict]:
    """Keys that hold allowed values which don't go together."""
    found = []
    if config.model.dtype == "float16" and config.model.device == "cpu":
        found.append(Conflict(("dtype", "device"), "float16 is computed on cuda only; on cpu choose float32 or bfloat16"))
    if config.storage.wal_max_bytes < 2 * config.storage.wal_segment_bytes:
        found.append(Conflict(("wal_max_bytes", "wal_segment_bytes"), "the WAL has at least two segments"))
    if config.speculative.draft_model and config.model.executor == "fake":
        found.append(Conflict(("draft_model", "executor"), "the executor `fake` runs no model, and drafts by itself"))
    if config.speculative.ngram_max < config.speculative.ngram_min:
        found.append(Conflict(("ngram_max", "ngram_min"), "the most tokens of a match are at least the fewest"))
    if config.speculative.speculation == "draft" and not config.speculative.draft_model:
        found.append(
            Conflict(("speculation", "draft_model"), "speculation `draft` needs a draft model; `auto` or `ngram` propose without one")
        )
    transport = config.transport
    if bool(transport.curve_key_file) != bool(transport.curve_clients_file):
        missing, given = ("curve_clients_file", "curve_key_file") if transport.curve_key_file else ("curve_key_file", "curve_clients_file")
        found.append(Conflict((missing, given), f"CURVE needs both files; {missing} is missing"))
    for url in transport.listen:
        try:
            check_exposure(parse_endpoint(url), has_curve=bool(transport.curve_key_file), allow_plain_tcp=transport.allow_plain_tcp)
        except EndpointError as error:
            found.append(Conflict(("listen", "curve_key_file", "allow_plain_tcp"), str(error)))
    return found
