"""A stub of the client library for the commands: it records what they send and gives fixed answers."""

from __future__ import annotations

import json

from kvd_client.results import (
    CheckpointResult,
    Choice,
    Chunk,
    Completion,
    ForgetResult,
    PingResult,
    PinResult,
    Timings,
    TokenLogprob,
    Usage,
)

USAGE = Usage(prompt_tokens=40, cached_tokens=32, restored_tokens=16, recomputed_tokens=0, completion_tokens=3)
TIMINGS = Timings(queue_ms=0.5, ttft_ms=12.25, total_ms=30.0)
STATUS = {
    "state": "ready",
    "model": "smollm2",
    "fingerprint": "ab" * 4,
    "instance": "cd" * 4,
    "uptime_s": 61.5,
    "requests": {"running": 2, "waiting": 1, "stalled": 0},
    "blocks": {"total": 100, "used": 10, "cached": 20, "free": 70},
    "store": {"nodes": 5, "blocks": 4, "bytes": 3 << 20, "wal_bytes": 1000, "last_checkpoint_age_s": 2.0, "degraded": False},
    "rehydration": {"blocks": 4, "tokens": 64, "bytes": 3 << 20, "seconds": 0.5, "pins_pending": 0, "dropped": {"checksum": 1}},
}
STATS = {
    "uptime_s": 10.0,
    "scheduler": {"prefill_tokens": 120},
    "transport": {"prefill_tokens": 7},
    "store": {
        "wal_bytes": 2048,
        "cold_bytes_per_s": 3 << 30,
        "prefill_tokens_per_s": 1663,
        "cold_latency_ms": None,
    },
    "rates_per_s": {"prefill_tokens": 12.5},
    "rates_window_s": 9.6,
}
PREFIXES = {
    "pins": [
        {"name": "support", "tokens": 1504, "hits": 7, "state": "held", "residency": "memory,disk", "priority": 50, "created_unix_s": 1.0}
    ],
    "hottest": [{"tokens": 96, "hits": 3, "residency": "memory", "age_s": 61.0}],
}


class StubStream:
    prompt = None

    def __init__(self, chunks, completion, fail):
        self._chunks, self.completion, self._fail = chunks, completion, fail
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def __iter__(self):
        yield from self._chunks
        if self._fail:
            raise self._fail


class StubClient:
    """Stands for kvd_client.Client; records the calls."""

    calls: list
    state = "ready"
    fail: BaseException | None = None
    texts = ("Hello there",)
    finish_reason = "stop"
    logprobs: tuple[TokenLogprob, ...] = ()
    made: dict

    def __init__(self, endpoint=None, **options):
        type(self).made = {"endpoint": endpoint, **options}
        self.endpoint = endpoint or "ipc:///default"
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def _record(self, name, *args, **kwargs):
        self.calls.append((name, args, kwargs))
        if self.fail:
            raise self.fail

    def ping(self, **_):
        return PingResult("cd" * 4, self.state, 0.002)

    def wait_ready(self, **_):
        self._record("wait_ready")

    def _answer(self, name, prompt, stream=False, **options):
        if stream:
            self.calls.append((name, (prompt,), {"stream": True, **options}))
        else:
            self._record(name, prompt, **options)
        choices = tuple(Choice(i, text, (1, 2, 3), self.finish_reason, self.logprobs) for i, text in enumerate(self.texts))
        completion = Completion(b"x" * 16, choices, USAGE, TIMINGS, 7)
        chunks = [Chunk(0, 0, (1,), "Hello"), Chunk(0, 1, (2, 3), " there"), Chunk(0, 3, (), "", finish_reason="stop")]
        return StubStream(chunks, completion, self.fail) if stream else completion

    def generate(self, prompt, **options):
        return self._answer("generate", prompt, **options)

    def chat(self, messages, **options):
        return self._answer("chat", messages, **options)

    def tokenize(self, prompt=None, *, messages=None):
        self._record("tokenize", prompt, messages=messages)
        return (5, 6, 7)

    def pin(self, name, prompt=None, *, messages=None, cache_salt=b"", adapter="", priority=50, ttl_s=0.0):
        salt = {"cache_salt": cache_salt} if cache_salt else {}
        salt |= {"adapter": adapter} if adapter else {}
        self._record("pin", name, prompt, messages=messages, priority=priority, ttl_s=ttl_s, **salt)
        return PinResult(name, {"tokens": 96, "blocks": 6, "durable": "recipe+bytes"})

    def unpin(self, name):
        self._record("unpin", name)

    forgets = ForgetResult(6, 1)

    def forget(self, prompt=None, *, messages=None, cache_salt=None, tenant=None, everything=False):
        self._record("forget", prompt, messages=messages, cache_salt=cache_salt, tenant=tenant, everything=everything)
        return self.forgets

    def prefixes(self):
        self._record("prefixes")
        return PREFIXES

    def status(self):
        self._record("status")
        return STATUS

    def stats(self):
        self._record("stats")
        return STATS

    def checkpoint(self):
        self._record("checkpoint")
        return CheckpointResult(3, 1 << 20)

    def drain(self, drain_timeout_s=None):
        self._record("drain", drain_timeout_s)


def only_object(text: str) -> dict:
    (line,) = text.splitlines()
    return json.loads(line)
