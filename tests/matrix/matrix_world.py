"""Real models under the real scheduler and cache, in one thread, for the equality matrix: where a prefix comes from, who proposes tokens, in what company and in which chunks.

One pair of target and draft model serves all cells; each cell begins with a cache of its own and a pool full of garbage. Disk is a dictionary of what the pool held of each block
when it entered the tree, so that what comes back must be those bytes.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from kvd.cache.events import BlockOrigin, BlockStored
from kvd.cache.hashing import Namespace, block_hash
from kvd.cache.manager import CacheManager
from kvd.commands import ChoiceDone, RequestDone, RequestFailed, Submit, TokensOut
from kvd.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvd.executor.assemble import OpenedModel, open_model
from kvd.executor.models.inspect import inspect_model
from kvd.executor.worker import ExecutorThread
from kvd.scheduler.scheduler import Scheduler
from kvd.types import SamplingParams, Speculation, pack_tokens, unpack_tokens

SOURCES = ("cold", "hit", "restored", "disk")
MODES = ("plain", "ngram", "draft")
COMPANIES = ("alone", "batch", "preempted")
CHUNKS = ("chunked", "unchunked")
GREEDY = SamplingParams(temperature=0.0)
BLOCK = 16
_GARBAGE = 0x7F
_JOBS_ALONE = 4


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    num_tokens: int
    sampling: SamplingParams = GREEDY


@dataclass(slots=True)
class Result:
    """What came of a cell's jobs."""

    tokens: list[list[int]]
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    most_rows: int = 0


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1e-4
        return self.now_s


class Pair:
    """A target and its draft, loaded; ``executor`` runs their steps."""

    def __init__(self, target: Path, draft: Path | None, scratch: Path, *, num_blocks: int, kernels: str, threads: int = 1) -> None:
        spec = inspect_model(target)
        self.opened: OpenedModel = open_model(
            target,
            spec,
            ModelConfig(device="cpu", dtype="float32", kernels=kernels, max_model_len=min(1024, spec.max_positions)),
            CacheConfig(kv_memory=num_blocks * _block_bytes(target, draft)),
            SchedulerConfig(max_running=8, max_tokens_per_step=512),
            threads=threads,
            digest_cache=scratch / "digests.json",
            draft=None if draft is None else (draft, inspect_model(draft)),
        )
        self.opened.load(lambda _done, _total: None)
        self.executor = ExecutorThread(self.opened.runner)
        self.vocab_size = self.opened.spec.vocab_size

    def close(self) -> None:
        self.executor.close(10.0)

    def spoil(self) -> None:
        """Fill the pools with garbage: nothing that a cell reads may be left from the one before."""
        for pool in (self.opened.pool, self.opened.draft_pool):
            if pool is not None:
                pool.rows.fill_(_GARBAGE)


def _block_bytes(target: Path, draft: Path | None) -> int:
    """Of both groups, in float32."""
    specs = [inspect_model(path) for path in (target, draft) if path is not None]
    return sum(spec.num_layers * 2 * BLOCK * spec.num_kv_heads * spec.head_dim * 4 for spec in specs) + 4096


@dataclass(slots=True)
class Disk:
    """What the pool held of each block, by its hash; the scheduler's cold tier."""

    executor: ExecutorThread
    row_bytes: int
    blocks: dict[bytes, tuple[bytes, bytes, bytes]] = field(default_factory=dict)
    loads: deque[tuple[int, list]] = field(default_factory=deque)

    def keep(self, event: BlockStored) -> None:
        content = memoryview(bytearray(self.row_bytes))
        self.executor.copy_out("target", [event.block_id], content).result()
        self.blocks[event.block_hash] = (event.parent_hash, event.token_ids, bytes(content))

    def lookup(self, _namespace, parent_hash, blocks):
        uses = []
        for tokens in blocks:
            key = block_hash(parent_hash, tokens)
            if self.blocks.get(key, ())[:2] != (parent_hash, tokens):
                break
            uses.append(1)
            parent_hash = key
        return uses

    def start_load(self, load_id, _namespace, targets) -> None:
        self.loads.append((load_id, list(targets)))

    def read(self, targets) -> None:
        for target in targets:
            if target.is_wanted:
                content = memoryview(self.blocks[target.block_hash][2])
                self.executor.copy_in("target", [target.block_id], content).result()

    def restore(self, cache: CacheManager, namespace: Namespace) -> None:
        """Bring everything back, as a start does."""
        chains = {}
        for key, (parent, tokens, _) in self.blocks.items():  # in the order in which they were computed: parents first
            chains[key] = [*chains.get(parent, []), (tokens, 1)]
        for chain in chains.values():
            targets = cache.begin_load(namespace, chain, BlockOrigin.RESTORED)
            assert targets is not None, "the pool holds all of it"
            self.read(targets)
            cache.complete_fill([target.node for target in targets])


class World:
    """Scheduler and cache of one cell over a ``Pair``."""

    def __init__(self, pair: Pair, *, num_blocks: int, max_tokens_per_step: int, disk: Disk, reads_disk: bool) -> None:
        self.pair, self.disk = pair, disk
        self.namespace = Namespace(pair.opened.fingerprint, b"", b"")
        self.cache = CacheManager(num_blocks=num_blocks, block_size_tokens=BLOCK, free_watermark=0.0, max_pinned_fraction=0.5)
        self.scheduler = Scheduler(
            SchedulerConfig(max_running=8, max_tokens_per_step=max_tokens_per_step, max_loading_fraction=1.0),
            self.cache,
            Clock(),
            namespace_of=lambda _salt, _adapter: self.namespace,
            max_model_len=pair.opened.max_model_len,
            shared_tile_tokens=pair.opened.shared_tile_tokens,
            cold_tier=disk if reads_disk else None,
            speculative=SpeculativeConfig(),
            has_draft_model=pair.opened.draft is not None,
        )
        self.in_flight: deque = deque()
        self.events: list = []

    def run(self, jobs: list[Job], speculation: Speculation | None) -> Result:
        """All of them at once, to their ends."""
        before = self.scheduler.stats()
        for number, job in enumerate(jobs):
            self.events += self.scheduler.submit(
                Submit(
                    request_id=b"%d" % number,
                    token_ids=pack_tokens(job.prompt),
                    sampling=job.sampling,
                    max_tokens=job.num_tokens,
                    credit_tokens=1000,
                    speculation=speculation,
                )
            )
        result = Result([[] for _ in jobs])
        while self.scheduler.has_work():
            self._round(result)
        while self.in_flight:
            self._collect()
        for event in self.events:
            if isinstance(event, TokensOut):
                result.tokens[int(event.request_id)] += unpack_tokens(event.token_ids)
            elif isinstance(event, RequestDone):
                result.drafted += event.usage.drafted_tokens
                result.accepted += event.usage.accepted_tokens
                result.cached_tokens += event.usage.cached_tokens
                result.restored_tokens += event.usage.restored_tokens
            else:
                assert isinstance(event, ChoiceDone), event
                assert not isinstance(event, RequestFailed), event
        self.events.clear()
        result.preemptions = self.scheduler.stats()["preemptions"] - before["preemptions"]
        self.scheduler.check_invariants()
        assert self.cache.num_used == 0
        return result

    def _round(self, result: Result) -> None:
        step = self.scheduler.schedule() if len(self.in_flight) < self.pair.opened.max_steps_in_flight else None
        if step is not None:
            result.most_rows = max(result.most_rows, len(step.started) + len(step.continued.rows))
            self.in_flight.append((step, self.pair.executor.submit(step)))
        elif self.in_flight:
            self._collect()
        if self.disk.loads:
            load_id, targets = self.disk.loads.popleft()
            self.disk.read(targets)
            self.events += self.scheduler.on_load_done(load_id, len(targets))
        self.events += self.scheduler.expire()

    def _collect(self) -> None:
        step, ticket = self.in_flight.popleft()
        self.events += self.scheduler.update(step, self.pair.executor.collect(ticket))
        for event in self.cache.take_events():
            if isinstance(event, BlockStored):
                self.disk.keep(event)


def run_cell(pair: Pair, jobs: list[Job], *, source: str, mode: str, company: str, chunks: str, num_blocks: int, few_blocks: int) -> Result:
    """One cell of the matrix. ``alone``: one after the other; ``batch``: all at once; ``preempted``: all at once over ``few_blocks`` blocks."""
    pair.spoil()
    disk = Disk(pair.executor, pair.opened.pool.row_bytes)
    options = {"max_tokens_per_step": 24 if chunks == "chunked" else 512, "disk": disk}
    if source in ("restored", "disk"):
        first = World(pair, num_blocks=num_blocks, reads_disk=False, **options)
        first.run([Job(job.prompt, 1) for job in jobs], Speculation(mode="off"))
        pair.spoil()
    world = World(pair, num_blocks=few_blocks if company == "preempted" else num_blocks, reads_disk=source == "disk", **options)
    if source == "restored":
        disk.restore(world.cache, world.namespace)
    if source == "hit":
        world.run([Job(job.prompt, 1) for job in jobs], Speculation(mode="off"))
    speculation = Speculation(mode="off" if mode == "plain" else mode)
    if company != "alone":
        return world.run(jobs, speculation)
    total = Result([])
    for job in jobs:
        one = world.run([job], speculation)
        total.tokens += one.tokens
        for name in ("drafted", "accepted", "preemptions", "cached_tokens", "restored_tokens"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        total.most_rows = max(total.most_rows, one.most_rows)
    return total


Cell = tuple[str, str, str, str]
"""Source, mode, company, chunks."""


def all_cells() -> list[Cell]:
    return list(product(SOURCES, MODES, COMPANIES, CHUNKS))


def covering_cells() -> list[Cell]:
    """Twelve cells in which each two values of two axes meet."""
    return [
        (source, MODES[column], COMPANIES[(row + column) % 3], CHUNKS[(row + column) % 2])
        for row, source in enumerate(SOURCES)
        for column in range(3)
    ]


class Tally:
    """The cells of one pair of models, against its plain, cold run; divergences are counted, and printed at the end."""

    def __init__(self, name: str, pair: Pair, jobs: list[Job], *, num_blocks: int, few_blocks: int) -> None:
        self.name, self.pair, self.jobs = name, pair, jobs
        self._blocks = {"num_blocks": num_blocks, "few_blocks": few_blocks}
        self.expected = run_cell(pair, jobs, source="cold", mode="plain", company="alone", chunks="unchunked", **self._blocks).tokens
        self.num_cells = self.num_requests = self.drafted = self.accepted = 0
        self.divergences: list[str] = []

    def run(self, source: str, mode: str, company: str, chunks: str) -> tuple[Result, list[str]]:
        """The cell's result, and where its requests differ."""
        first = len(self.jobs) - _JOBS_ALONE if company == "alone" else 0
        jobs = self.jobs[first:]
        result = run_cell(self.pair, jobs, source=source, mode=mode, company=company, chunks=chunks, **self._blocks)
        differing = []
        for number, (ours, theirs) in enumerate(zip(result.tokens, self.expected[first:], strict=True), first):
            if ours != theirs:
                place = next(
                    (at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), min(len(ours), len(theirs))
                )
                differing.append(f"{source}, {mode}, {company}, {chunks}: request {number} from token {place} of {len(theirs)} on")
        self.num_cells += 1
        self.num_requests += len(jobs)
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.divergences += differing
        return result, differing

    def close(self) -> None:
        print(
            f"\n{self.name}: {self.num_cells} cells, {self.num_requests} requests, {len(self.divergences)} divergences; "
            f"{self.drafted} tokens drafted, {self.accepted} accepted"
        )
        for each in self.divergences:
            print(f"  {each}")
        self.pair.close()


def make_jobs(vocab_size: int, count: int, *, num_tokens: int, seed: int = 0) -> list[Job]:
    """Prompts that share a beginning, repeat themselves and end inside a block; every other one draws."""
    rng = random.Random(seed)
    phrase = [rng.randrange(1, vocab_size) for _ in range(9)]
    shared = [*phrase, *phrase, *[rng.randrange(1, vocab_size) for _ in range(16)], *phrase]
    jobs = []
    for number in range(count):
        own = [rng.randrange(1, vocab_size) for _ in range(5 + 3 * number)]
        prompt = (*shared, *own, *phrase[: 3 + number % 5], *own)
        sampling = SamplingParams(temperature=0.9, top_p=0.95 if number % 4 == 3 else 1.0, seed=number) if number % 2 else GREEDY
        jobs.append(Job(prompt, num_tokens, sampling))
    return jobs
