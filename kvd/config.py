"""One frozen dataclass per room, validated once. A room receives only its own.

``docs/operations.md`` names every key; the loader (flag > ``KVD_*`` environment > TOML file > default) is ``kvd.settings.loader``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar


class ConfigError(Exception):
    """A wrong key or value; the message names the key, where it came from and what is allowed. Exit code 78 (EX_CONFIG)."""


T = TypeVar("T")


def key(default: T, doc: str) -> T:
    """A configuration field with its documentation, as ``--print-config`` and docs/operations.md show it."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is run."""

    model: str = key("", "Name of a pulled model, a GGUF file or a Hugging Face directory; empty: the default model, smollm2")
    executor: str = key("torch", "`torch`, or `fake`: a content-sensitive stand-in that needs no model")
    device: str = key("auto", "`auto` (cuda where there is one, else cpu), `cpu`, `cuda`, `cuda:N`")
    dtype: str = key(
        "auto",
        "`auto` (the weights' own on cuda; on cpu bfloat16 where the processor has bf16 instructions, else float32), `float32`, `bfloat16`, `float16` (cuda only)",
    )
    kernels: str = key(
        "auto",
        "What computes on cpu: `auto` (kvd's native kernels where they are installed and compute the model, else torch), `native` (refuse to start without them), `torch`; on cuda: kvd's Triton kernels, or `torch`",
    )
    weights: str = key(
        "auto",
        "How a GGUF file's quantised weights are computed with: `auto` (as they are where the native kernels compute: Q8_0, Q4_0, Q4_1, Q4_K and Q6_K stay quantised in memory; elsewhere, and other types, converted to `dtype`), `dequantised` (all converted to `dtype`)",
    )
    max_model_len: int = key(0, "Positions of a sequence, prompt and output; 0: the model's own, at most 8192")
    threads: int = key(
        0, "Compute threads of the CPU executor, at most the processors that this process may use; 0: the physical cores among them"
    )
    fake_step_ms: float = key(0.0, "Executor `fake`: milliseconds that a step takes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV pool and the prefix tree."""

    kv_memory: int = key(
        0,
        "Bytes of the KV pool (suffixes KiB, MiB, GiB, TiB); 0: on cpu half of the free memory, at most 4 GiB; on cuda 0.9 of what the weights leave of the free memory",
    )
    block_size_tokens: int = key(
        16, "Positions in a block; the native CPU kernels read blocks of 16 and no others: with another size torch computes"
    )
    kv_dtype: str = key(
        "auto",
        "How K and V are kept: `auto` (as the model is computed), `float32`, `bfloat16`, or `int8` (with a scale for each head and position: about half of bfloat16's memory, its effect is in docs/kernels.md); other than `auto` only with the native CPU kernels",
    )
    free_watermark: float = key(0.05, "Fraction of the pool that background eviction keeps free")
    eviction_policy: str = key(
        "cost",
        "Which blocks leave memory first, within a retention priority: `cost` (least reuse x recompute cost, GreedyDual) or `lru` (least recently used)",
    )
    max_pinned_fraction: float = key(0.5, "Fraction of the pool that pins may hold; `pin_capacity` beyond")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many tokens of which request run in a step."""

    max_running: int = key(64, "Sequences (choices) that run at once")
    max_waiting: int = key(1024, "Requests that wait, besides those that free places are for; `overloaded` (retryable) beyond")
    max_tokens_per_step: int = key(512, "Token budget of a step, prompt chunks and decoded tokens together")
    max_choices: int = key(16, "Largest `n` of a request")
    ageing_s: float = key(
        60.0,
        "Time in the queue after which a request counts as one priority class more urgent (and again after each further); within a tenant, one without a deadline is ordered as if it had to be over after so long",
    )
    output_token_weight: float = key(2.0, "What an output token counts beside a computed prompt token in the fairness between tenants")
    max_inter_token_ms: float = key(
        200.0,
        "While streams decode, steps have only so many prompt tokens that the streams' next tokens are not more than this apart, as far as measured times tell (prompts always get on: by 16 tokens a step, and by a quarter of the time that the decodes take); 0: prompts fill the step's token budget",
    )
    max_loading_fraction: float = key(
        0.5, "Fraction of the pool that loads from disk may be filling while requests run; what does not fit is computed"
    )
    stall_timeout_s: float = key(30.0, "A request without stream credit for so long fails with `client_too_slow`")
    max_stalled: int = key(256, "Requests without stream credit at once; the oldest fails with `client_too_slow` beyond")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Structured output."""

    constraints: bool = key(
        True,
        "Take requests whose output must match a constraint; the vocabulary is indexed for them at the start (some 20 MiB for 50,000 tokens; with `frontend = process` the engine has its tokenizer besides)",
    )
    max_constraint_bytes: int = key(256 << 10, "Bytes of a constraint's source: schema, expression, grammar or alternatives")
    max_waiting_constraints: int = key(64, "Constraints that wait to be compiled; `overloaded` (retryable) beyond")
    constraint_timeout_s: float = key(5.0, "A constraint that takes longer to compile is refused")
    max_constraints_kept: int = key(128, "Compiled constraints (and refusals) remembered; the longest unused is forgotten beyond")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Tokens proposed before the model computes them, and verified in one pass."""

    speculation: str = key(
        "off",
        "How requests draft that don't say: `auto` (what followed the last tokens before, or else the draft model, wherever that is thought to pay), `ngram`, `draft` (one of these alone), `off`",
    )
    num_draft: int = key(8, "Tokens drafted for a sequence in a step, at most")
    ngram_min: int = key(2, "Tokens that must have come before in the same order, for what followed them to be proposed")
    ngram_max: int = key(12, "Tokens by which the places where they came before are told apart: the longest match is continued")
    draft_model: str = key(
        "",
        "A smaller model with the same vocabulary that drafts for requests which ask for it: named as `model` is; its keys and values take their share of `kv_memory`; empty: none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersConfig:
    """LoRA adapters."""

    adapter_dir: str = key(
        "",
        "Directory of LoRA adapters: each subdirectory with PEFT's `adapter_config.json` and `adapter_model.safetensors` is one, and its name is what requests name; empty: none",
    )
    max_adapters: int = key(
        4, "Adapters loaded at once; for another one the one that was idle longest makes room, and where all are in use its requests wait"
    )
    max_adapter_rank: int = key(64, "Largest rank of an adapter's matrices; with `max_adapters` it bounds their memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The loop."""

    max_steps_in_flight: int = key(
        0,
        "Steps submitted and not yet collected; 0: 2 where kvd's own kernels compute, so that the next step is launched while one is computed, else 1",
    )
    inbox_capacity: int = key(4096, "Commands that wait for the engine; `overloaded` beyond")
    drain_timeout_s: float = key(30.0, "On SIGTERM or `kvd drain`, running requests are aborted after so long")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Sockets, limits, clients."""

    listen: tuple[str, ...] = key((), "Endpoints, ipc:// or tcp://; none: kvd.sock in the runtime directory")
    frontend: str = key("thread", "Where transport and text run: `thread` or `process`")
    max_message_bytes: int = key(8 << 20, "Largest frame of a client's message")
    max_frames: int = key(8, "Frames of a client's message")
    max_clients: int = key(1000, "Clients with a conversation at once; the longest silent one is forgotten beyond")
    max_requests_per_client: int = key(1024, "Unfinished requests of one client; `overloaded` beyond")
    default_credit: int = key(1024, "Unread tokens of a stream that did not state its own credit")
    max_stop_strings: int = key(16, "Stop strings of a request")
    client_timeout_s: float = key(30.0, "Silence after which a client counts as gone and its requests are aborted")
    dedupe_capacity: int = key(65536, "Request ids remembered against re-delivery")
    max_backlog_bytes: int = key(8 << 20, "Bytes that wait for one client's socket; its requests fail with `client_too_slow` beyond")
    max_total_backlog_bytes: int = key(
        256 << 20, "Bytes that wait for the sockets of all clients together; beyond, the one with most fails with `client_too_slow`"
    )
    text_threads: int = key(1, "Threads that render templates and tokenise")
    max_text_jobs: int = key(1024, "Prompts that wait to be rendered and tokenised; `overloaded` beyond")
    max_text_bytes: int = key(64 << 20, "Bytes of the prompts that wait to be rendered and tokenised; `overloaded` beyond")
    curve_key_file: str = key("", "CURVE secret key of the daemon; with it tcp endpoints demand CURVE")
    curve_clients_file: str = key("", "Allowed client public keys, a line `KEY` or `KEY TENANT` each; required with curve_key_file")
    ipc_tenants: str = key(
        "none", "Tenants on ipc endpoints: `none`, or `uid`: each user of the machine, by the kernel's credentials, is one"
    )
    allow_plain_tcp: bool = key(False, "Accept a tcp endpoint that is not loopback without CURVE")
    template_date: str = key("", "Date that chat templates see, YYYY-MM-DD; empty: the day of the start")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """What is kept on disk, where and how fast."""

    state_dir: Path = key(Path(), "State directory; empty: $STATE_DIRECTORY, else kvd under the user's state directory")
    persist: bool = key(True, "Keep the prefix tree and hot blocks on disk")
    store_max_bytes: int = key(8 << 30, "Bytes of the state directory")
    write_policy: str = key(
        "selective",
        "Which blocks are written: `selective` (pinned, used twice, or used once but long in memory), `through` (every computed block), "
        "`shutdown` (pins; all else at the clean end)",
    )
    write_dwell_s: float = key(
        300.0,
        "Policy `selective`: a block used once is written too after so long in memory, when nothing runs and the disk budget has free room",
    )
    uses_half_life_s: float = key(
        86400.0, "A block's uses lose half their weight in so long since the last one, when it is ranked to expire or to come back"
    )
    store_encryption_key_file: str = key(
        "",
        "File with the key that encrypts what is stored (`kvd store keygen` makes one; needs the extra `encryption`); empty: stored in clear",
    )
    checkpoint_interval_s: float = key(5.0, "Time between checkpoints while there is something hot to write")
    checkpoint_bytes_per_step: int = key(8 << 20, "Block bytes copied out between two steps")
    checkpoint_bytes_per_s: int = key(256 << 20, "Governor: block bytes written a second")
    checkpoint_pause_queue_depth: int = key(8, "Governor: no copy-out while more requests than this wait; 0: never pause")
    durability: str = key(
        "fsync",
        "`fsync`: pins, unpins and log records count when they are synced; `interval`: when they are written, and all are synced every durability_interval_s",
    )
    durability_interval_s: float = key(1.0, "Durability `interval`: what a power cut may lose, at most")
    wal_sync_interval_ms: float = key(5.0, "Records of this many milliseconds share one fsync")
    wal_segment_bytes: int = key(4 << 20, "Size of a preallocated WAL segment")
    wal_max_bytes: int = key(64 << 20, "WAL size that forces a nodes-only checkpoint; never more than an eighth of `store_max_bytes`")
    rehydrate_timeout_s: float = key(60.0, "READY comes after so long at the latest, with `pins_pending`")
    rehydrate_max_fraction: float = key(0.8, "Fraction of the pool that rehydration fills")
    cold_tier: str = key(
        "auto",
        "Blocks that are on disk and not in memory, when a request asks for them: `auto` (read where that was measured to be quicker than computing), `always`, `never`",
    )
    cold_tier_timeout_s: float = key(10.0, "A load from disk that is not over after so long is given up, and its blocks are computed")
    recompute_budget_s: float = key(20.0, "Time for recomputing logged prefixes without bytes before READY (pins take rehydrate_timeout_s)")

    @property
    def unsynced_max_s(self) -> float:
        """How long pins, unpins and log records that were acknowledged may be written without being synced; 0: not at all."""
        return self.durability_interval_s if self.durability == "interval" else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """Logs."""

    log_level: str = key("info", "`debug`, `info`, `warning` or `error`")
    log_format: str = key(
        "auto", "`auto` (journald's protocol under systemd, console on a terminal, JSON elsewhere), `json`, `console`, `journald`"
    )
    log_steps: bool = key(False, "Log a line for each engine step: rows, tokens, blocks used, shared, cached, free")
    log_prompts: bool = key(False, "Log prompts and outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """All of it; each room gets its part from daemon.py."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
