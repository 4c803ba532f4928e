"""Scheduler, cache and content executor together, with a client's ear on every stream; what state machine, soak and plain tests drive."""

from __future__ import annotations

import contextlib
from collections import Counter, deque

from cold_disk import ColdDisk
from content_executor import ContentExecutor
from stream_checker import FakeClock, StreamChecker, namespace_of

from kvd.cache.events import BlockRemoved, BlockStored
from kvd.cache.manager import CacheManager, PinCapacityError, PinNotReadyError, PinTooShortError, PrefixInfo, eviction_policy
from kvd.cache.tenants import Selection
from kvd.config import SchedulerConfig
from kvd.scheduler.scheduler import Scheduler
from kvd.types import pack_tokens


class Simulation:
    def __init__(
        self,
        *,
        num_blocks=14,
        block_size=2,
        max_in_flight=1,
        max_model_len=24,
        vocab=2,
        max_pinned_fraction=0.3,
        disk=False,
        policy="cost",
        min_partial_tokens=1,
        speculative=None,
        has_draft_model=False,
        **config,
    ):
        config = {
            "max_running": 5,
            "max_waiting": 12,
            "max_tokens_per_step": 7,
            "max_choices": 3,
            "stall_timeout_s": 30.0,
            "max_stalled": 3,
            **config,
        }
        self.config = SchedulerConfig(**config)
        self.cache = CacheManager(
            num_blocks=num_blocks,
            block_size_tokens=block_size,
            free_watermark=0.2,
            max_pinned_fraction=max_pinned_fraction,
            policy=eviction_policy(policy, num_blocks, block_size),
            min_partial_tokens=min_partial_tokens,
        )
        self.clock = FakeClock()
        self.executor = ContentExecutor(num_blocks, block_size, self.config.max_running, vocab)
        self.disk = ColdDisk(self.executor.pool) if disk else None
        self.scheduler = Scheduler(
            self.config,
            self.cache,
            self.clock,
            namespace_of=namespace_of,
            max_model_len=max_model_len,
            cold_tier=self.disk,
            shared_tile_tokens=block_size,
            speculative=speculative,
            has_draft_model=has_draft_model,
        )
        if self.disk is not None:
            self.disk.post = self.end_load
        self.checker = StreamChecker(max_model_len, vocab)
        self.max_in_flight = max_in_flight
        self.in_flight = deque()
        self.leases = []
        self.stored = {}

    def submit(self, prompt, **options):
        return self.checker.submit(self.scheduler, prompt, **options)

    def terminal(self, request_id):
        return self.checker.requests[request_id].terminal

    def code(self, request_id):
        return getattr(self.terminal(request_id), "code", "done")

    def heard(self, request_id):
        return self.checker.requests[request_id].heard

    def end_load(self, load_id, num_loaded):
        self.checker.take(self.scheduler.on_load_done(load_id, num_loaded))
        self.hear_cache()

    def read(self, num_blocks=1000):
        """Let the disk read, if there is one."""
        if self.disk is not None:
            self.disk.read(num_blocks)

    def evict_all(self):
        self.cache._blocks.evict(self.cache.num_blocks)
        self.hear_cache()

    def abort(self, request_id):
        self.checker.take(self.scheduler.abort(request_id))

    def grant(self, request_id, num_tokens):
        self.checker.take(self.scheduler.grant(request_id, num_tokens))

    def finish_choice(self, request_id, choice):
        self.checker.requests[request_id].cut.add(choice)
        self.checker.take(self.scheduler.finish_choice(request_id, choice))

    def submit_step(self):
        if len(self.in_flight) >= self.max_in_flight:
            return None
        step = self.scheduler.schedule()
        self.hear_cache()
        if step is not None:
            assert step.started or step.continued.rows
            self.in_flight.append((step, self.executor.execute(step)))
        return step

    def collect(self):
        if self.in_flight:
            self.checker.take(self.scheduler.update(*self.in_flight.popleft()))
            self.hear_cache()

    def round(self):
        step = self.submit_step()
        if self.in_flight and (step is None or len(self.in_flight) >= self.max_in_flight):
            self.collect()
        self.checker.take(self.scheduler.expire())
        return step

    def wait_s(self, seconds):
        self.clock.now_s += seconds
        self.cache.expire_retention(self.clock.now_s, self.cache.num_blocks)
        self.checker.take(self.scheduler.expire())
        assert self.scheduler.num_stalled <= self.config.max_stalled

    def forget(self, prompt, salt):
        """Forget what begins with the prompt's whole blocks; whatever lives now and begins so is stored no more."""
        size = self.cache.block_size_tokens
        selection = Selection("", salt, pack_tokens(prompt[: len(prompt) // size * size]))
        private = [each for each in self.scheduler._requests.values() if any(selection.may_hold(salt, s.tokens) for s in each.sequences)]
        self.checker.take(self.scheduler.forget(selection)[1])
        self.hear_cache()
        assert all(each.is_private for each in private if each.namespace.tenant_salt == salt)
        held = {node.block_id for node in self.cache._blocks.tree.nodes()}
        for node in self.cache._blocks.tree.nodes():
            assert not selection.holds(node.namespace.tenant_salt, PrefixInfo.of(node, 0).token_ids)
        assert held.isdisjoint(self.cache._blocks.outlived)

    def pin(self, name, prompt):
        with contextlib.suppress(PinCapacityError, PinNotReadyError, PinTooShortError):
            self.cache.pin(name, pack_tokens(prompt), namespace_of(b"", b""))

    def lease(self, block_hash):
        block, _ = self.stored[block_hash]
        assert self.cache.lease(block, block_hash)
        self.leases.append(block)

    def end_lease(self):
        if self.leases:
            self.cache.end_lease(self.leases.pop(0))

    def hear_cache(self):
        """Note what the cache says at once: the pool goes on changing."""
        for event in self.cache.take_events():
            if isinstance(event, BlockStored):
                content = list(self.executor.pool[event.block_id])
                assert b"nan" not in content, "a failed row's block entered the tree"
                self.stored[event.block_hash] = (event.block_id, content)
                if self.disk is not None:
                    self.disk.keep(event, content)
            elif isinstance(event, BlockRemoved):
                assert self.stored.pop(event.block_hash)[0] == event.block_id
        for block, content in self.stored.values():
            assert self.executor.pool[block] == content, "a block in the tree was written"

    def check(self):
        self.scheduler.check_invariants()
        self.hear_cache()
        assert self.executor.largest_step <= self.config.max_tokens_per_step

    def finish_all(self, max_rounds=1000):
        """Run until every request has ended; nothing may hang, nothing may leak."""
        while self.leases:
            self.end_lease()
        for request_id in self.checker.open():
            self.grant(request_id, 1000)
        for _ in range(max_rounds):
            if not self.scheduler.has_work():
                break
            self.round()
            self.read(1)
        assert not self.checker.open(), "a request hangs"
        while self.in_flight:
            self.collect()
        self.read()
        self.check()
        assert self.cache.num_used == 0
        assert self.cache.num_transient == 0
        assert self.cache.num_free + self.cache.num_cached == self.cache.num_blocks

    def ends(self):
        """How many requests ended how."""
        return Counter(self.code(request_id) for request_id in self.checker.requests)
