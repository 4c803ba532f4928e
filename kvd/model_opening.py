"""What a model, real or fake, brings into the daemon: its facts, its pool and its executor. The only module besides the executor's own that knows both kinds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.config import ConfigError, DaemonConfig, ModelConfig
from kvd.executor.adapter_store import AdapterTarget
from kvd.executor.fake import FakeRunner
from kvd.executor.head_start import HeadStart, begin
from kvd.executor.host_cores import compute_threads
from kvd.executor.host_memory import check_pool_fits
from kvd.executor.models.inspect import inspect_model
from kvd.executor.models.spec import ModelError, ModelSpec
from kvd.executor.worker import ExecutorThread, Runner
from kvd.step import TILE_TOKENS
from kvd.text.errors import TextError
from kvd.text.model import TextModel, load_text_model

if TYPE_CHECKING:
    from kvd.executor.draft_opening import DraftPlan

_FAKE_MODEL_LEN = 8192
_FAKE_POOL_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True)
class OpenEngine:
    """What a model, real or fake, brings: its runner comes later, by ``load``, so that the store can fill the pool meanwhile."""

    model: str
    fingerprint: bytes
    num_blocks: int
    max_model_len: int
    vocab_size: int
    executor: ExecutorThread
    adapters: AdapterTarget
    """Takes LoRA adapters once the weights are there."""
    load: Callable[[Callable[[int, int], None]], None]
    max_steps_in_flight: int
    """What ``engine.max_steps_in_flight`` 0 means."""
    shared_tile_tokens: int
    """Positions of a tile of attention: what rows share is told in whole ones."""
    facts: dict[str, Any]
    times: dict[str, float] = field(default_factory=dict)
    """Seconds that parts of opening and ``load`` took, by name, some of them beside each other."""
    draft: dict[str, Any] = field(default_factory=dict)
    """What there is to tell of the draft model; empty where there is none."""


def describe_model(config: ModelConfig) -> ModelSpec | None:
    """What the model is, before anything is opened for it; None for the fake executor.

    Raises:
        ModelError: it can't be served.
        ConfigError: it can't be read.
    """
    if config.executor == "fake":
        return None
    return _inspect("model", Path(config.model))


def _inspect(name: str, path: Path) -> ModelSpec:
    try:
        return inspect_model(path)
    except OSError as error:
        raise ConfigError(f"{name} = {path}: {error.strerror}: {error.filename or path}") from error


def describe_draft(config: DaemonConfig) -> tuple[Path, ModelSpec] | None:
    """Path of the draft model, and what it is; None where there is none.

    Raises:
        ConfigError: it can't be read, isn't served, or has another vocabulary than the model.
    """
    source, target = config.speculative.draft_model, config.model.model
    if not source:
        return None
    path = Path(source)
    try:
        spec = _inspect("draft_model", path)
    except ModelError as error:
        raise ConfigError(f"draft_model = {path}: {error}") from error
    if source != target:
        try:
            texts = load_text_model(source)
        except TextError as error:
            raise ConfigError(f"draft_model = {path}: {error}") from error
        check_same_vocabulary(source, texts, load_text_model(target))
    return path, spec


def check_same_vocabulary(source: str, draft: TextModel, target: TextModel) -> None:
    """Whether the draft model's tokens are the target's.

    Raises:
        ConfigError: they are not; the message names the first that differs.
    """
    if draft.vocab_size == target.vocab_size:
        ids = range(target.vocab_size)
        pairs = zip(ids, draft.token_bytes(ids), target.token_bytes(ids), strict=True)
        differing = next(
            (f"token {token_id} is {ours!r} there and {theirs!r} in the model" for token_id, ours, theirs in pairs if ours != theirs), ""
        )
        if not differing:
            return
    else:
        differing = f"it has {draft.vocab_size} tokens and the model {target.vocab_size}"
    raise ConfigError(
        f"draft_model = {source}: another vocabulary than the model's ({differing}); a draft model proposes the model's own tokens, so take a smaller one of the same family"
    )


def begin_opening(config: DaemonConfig, spec: ModelSpec | None) -> HeadStart:
    """Begin on other threads what of ``open_engine`` and its ``load`` needs no torch."""
    if spec is None:
        return HeadStart()
    threads = compute_threads(config.model.threads)
    return begin(Path(config.model.model), spec, config.model, config.cache, num_threads=threads)


def open_engine(config: DaemonConfig, spec: ModelSpec | None, fingerprint_cache: Path, head_start: HeadStart) -> OpenEngine:
    """Pool, fingerprint and executor of the model that ``describe_model`` described; the weights come with ``load``."""
    return _open_fake(config) if spec is None else _open_torch(config, spec, fingerprint_cache, head_start)


def _open_fake(config: DaemonConfig) -> OpenEngine:
    model, cache = config.model, config.cache
    check_pool_fits(cache.kv_memory)
    probe = FakeRunner(1, cache.block_size_tokens)
    num_blocks = (cache.kv_memory or _FAKE_POOL_BYTES) // probe.groups()[0].row_bytes
    if num_blocks < 2:
        raise ConfigError(f"kv_memory = {cache.kv_memory}: too small for two blocks of {probe.groups()[0].row_bytes} bytes")
    runner = FakeRunner(num_blocks, cache.block_size_tokens, max_rows=config.scheduler.max_running, step_ms=model.fake_step_ms)
    return OpenEngine(
        model="fake",
        fingerprint=runner.fingerprint,
        num_blocks=num_blocks,
        max_model_len=model.max_model_len or _FAKE_MODEL_LEN,
        vocab_size=257,
        executor=ExecutorThread(runner),
        adapters=runner,
        load=lambda _: None,
        max_steps_in_flight=1,
        shared_tile_tokens=TILE_TOKENS,
        facts={"executor": "fake", "kernels": "fake", "block_bytes": runner.groups()[0].row_bytes},
    )


def _open_torch(config: DaemonConfig, spec: ModelSpec, fingerprint_cache: Path, head_start: HeadStart) -> OpenEngine:
    # OpenMP's threads spin while they wait for each other. Beside the loop's and the edge's threads that turns a step of 45 ms into seconds
    # on two busy cores; a short spin keeps most of the speed of a quiet machine. Read once, when torch loads its runtime.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    begun_s = time.monotonic()
    from kvd.executor.assemble import open_model
    from kvd.executor.torch_threads import compute_here_with

    opened_s = time.monotonic()

    threads = compute_threads(config.model.threads)
    opened = open_model(
        Path(config.model.model),
        spec,
        config.model,
        config.cache,
        config.scheduler,
        threads=threads,
        digest_cache=fingerprint_cache,
        head_start=head_start,
        draft=describe_draft(config),
    )
    opened.adapters.max_rank = config.adapters.max_adapter_rank
    if config.adapters.adapter_dir and opened.adapters.why_not:
        raise ConfigError(f"adapter_dir: {opened.adapters.why_not}")
    opened.times.update(torch_import=opened_s - begun_s, pool_and_fingerprint=time.monotonic() - opened_s)
    runner: Runner = opened.runner
    executor = ExecutorThread(runner, opened.host_memory)
    executor.call(lambda: compute_here_with(opened.torch_threads))
    return OpenEngine(
        model=Path(config.model.model).name,
        fingerprint=opened.fingerprint,
        num_blocks=opened.num_blocks,
        max_model_len=opened.max_model_len,
        vocab_size=opened.spec.vocab_size,
        executor=executor,
        adapters=opened.adapters,
        load=opened.load,
        times=opened.times,
        draft={} if opened.draft is None else _draft_facts(opened.draft),
        max_steps_in_flight=opened.max_steps_in_flight,
        shared_tile_tokens=opened.shared_tile_tokens,
        facts={
            "executor": "torch",
            "device": str(opened.device),
            "dtype": str(opened.dtype).removeprefix("torch."),
            "threads": threads,
            "kernels": opened.kernel_family,
            "why_torch": opened.why_torch,
            "block_bytes": opened.pool.row_bytes,
        },
    )


def _draft_facts(draft: DraftPlan) -> dict[str, Any]:
    return {
        "model": draft.path.name,
        "dtype": str(draft.dtype).removeprefix("torch."),
        "kernels": draft.kernel_family,
        "why_torch": "" if draft.on_gpu else draft.why_torch,
        "block_bytes": draft.block_bytes,
        "max_positions": draft.max_positions,
    }
