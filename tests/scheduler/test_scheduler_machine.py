"""A state machine over scheduler, cache and a content-checking executor: whatever happens, nobody hears a wrong token and all requests end."""

from __future__ import annotations

import contextlib
from collections import deque

import pytest
from content_executor import ContentExecutor
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from stream_checker import FakeClock, StreamChecker, namespace_of

from kvd.cache.events import BlockRemoved, BlockStored
from kvd.cache.manager import CacheManager, PinCapacityError, PinNotReadyError, PinTooShortError
from kvd.config import SchedulerConfig
from kvd.scheduler.scheduler import Scheduler
from kvd.types import pack_tokens

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12) | st.sampled_from([[0] * 9, [0] * 8, [0, 1] * 5])


class SchedulerMachine(RuleBasedStateMachine):
    max_in_flight = 1
    block_size = 2
    num_blocks = 14
    max_running = 5

    def __init__(self):
        super().__init__()
        self.cache = CacheManager(
            num_blocks=self.num_blocks, block_size_tokens=self.block_size, free_watermark=0.2, max_pinned_fraction=0.3
        )
        self.clock = FakeClock()
        config = SchedulerConfig(
            max_running=self.max_running, max_waiting=6, max_tokens_per_step=7, max_choices=3, stall_timeout_s=30.0, max_stalled=3
        )
        self.scheduler = Scheduler(config, self.cache, self.clock, namespace_of=namespace_of, max_model_len=24)
        self.executor = ContentExecutor(self.num_blocks, self.block_size, self.max_running)
        self.checker = StreamChecker(24)
        self.in_flight = deque()
        self.leases = []
        self.stored = {}

    # ------------------------------------------------------------------------------------------------ rules

    @rule(
        prompt=prompts,
        num_choices=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 9),
        stop=st.sampled_from([(), (), (1,)]),
        min_tokens=st.integers(0, 2),
        credit=st.sampled_from([0, 1, 3, 100]),
        salt=st.sampled_from([b"", b"", b"s"]),
    )
    def submit(self, prompt, num_choices, max_tokens, stop, min_tokens, credit, salt):
        self.checker.submit(
            self.scheduler,
            prompt,
            num_choices=num_choices,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            min_tokens=min_tokens,
            credit_tokens=credit,
            tenant_salt=salt,
        )

    @rule(prompt=prompts, background=st.booleans())
    def submit_internal(self, prompt, background):
        self.checker.submit(self.scheduler, prompt, internal=True, background=background, max_tokens=1, credit_tokens=1)

    @precondition(lambda self: self.checker.open())
    @rule(data=st.data())
    def abort(self, data):
        self.checker.take(self.scheduler.abort(data.draw(st.sampled_from(self.checker.open()))))

    @precondition(lambda self: self.checker.open())
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 2, 50]))
    def grant(self, data, num_tokens):
        self.checker.take(self.scheduler.grant(data.draw(st.sampled_from(self.checker.open())), num_tokens))

    @precondition(lambda self: self.checker.open())
    @rule(data=st.data(), choice=st.integers(0, 2))
    def finish_choice(self, data, choice):
        request_id = data.draw(st.sampled_from(self.checker.open()))
        self.checker.requests[request_id].cut.add(choice)
        self.checker.take(self.scheduler.finish_choice(request_id, choice))

    @rule(count=st.integers(1, 6))
    def rounds(self, count):
        for _ in range(count):
            self.round()

    @rule()
    def submit_step(self):
        if len(self.in_flight) < self.max_in_flight:
            step = self.scheduler.schedule()
            if step is not None:
                self.in_flight.append((step, self.executor.execute(step)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self):
        self.checker.take(self.scheduler.update(*self.in_flight.popleft()))

    @rule(index=st.integers(0, 4))
    def let_a_row_fail(self, index):
        self.executor.fail_row = lambda rows: rows[index] if index < len(rows) else None

    @rule(seconds=st.sampled_from([1.0, 31.0]))
    def time_passes(self, seconds):
        self.clock.now_s += seconds
        self.checker.take(self.scheduler.expire())
        assert self.scheduler.num_stalled <= 3

    @rule(name=st.sampled_from(["a", "b"]), prompt=prompts)
    def pin(self, name, prompt):
        with contextlib.suppress(PinCapacityError, PinNotReadyError, PinTooShortError):
            self.cache.pin(name, pack_tokens(prompt), namespace_of(b"", b""))

    @rule(name=st.sampled_from(["a", "b"]))
    def unpin(self, name):
        self.cache.unpin(name)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def lease(self, data):
        block_hash = data.draw(st.sampled_from(sorted(self.stored)))
        block, content = self.stored[block_hash]
        assert self.cache.lease(block, block_hash)
        self.leases.append((block, content))

    @precondition(lambda self: self.leases)
    @rule()
    def end_lease(self):
        self.cache.end_lease(self.leases.pop(0)[0])

    @rule(max_blocks=st.integers(1, 4))
    def evict(self, max_blocks):
        self.cache.evict_to_watermark(max_blocks)

    def round(self):
        step = self.scheduler.schedule() if len(self.in_flight) < self.max_in_flight else None
        if step is not None:
            assert step.started or step.continued.rows
            self.in_flight.append((step, self.executor.execute(step)))
        if self.in_flight and (step is None or len(self.in_flight) >= self.max_in_flight):
            self.checker.take(self.scheduler.update(*self.in_flight.popleft()))
        self.checker.take(self.scheduler.expire())

    # ------------------------------------------------------------------------------------------ invariants

    @invariant()
    def everything_adds_up(self):
        self.scheduler.check_invariants()
        for event in self.cache.take_events():
            if isinstance(event, BlockStored):
                self.stored[event.block_hash] = (event.block_id, list(self.executor.pool[event.block_id]))
                assert b"nan" not in self.executor.pool[event.block_id], "a failed row's block entered the tree"
            elif isinstance(event, BlockRemoved):
                assert self.stored.pop(event.block_hash)[0] == event.block_id
        for block, content in self.stored.values():
            assert self.executor.pool[block] == content, "a block in the tree was written"
        assert self.executor.largest_step <= 7

    def teardown(self):
        for block, _ in self.leases:
            self.cache.end_lease(block)
        for request_id in self.checker.open():
            self.checker.take(self.scheduler.grant(request_id, 1000))
        for _ in range(1000):
            if not self.scheduler.has_work():
                break
            self.round()
        assert not self.checker.open(), "a request hangs"
        while self.in_flight:
            self.round()
        self.scheduler.check_invariants()
        assert self.cache.num_used == 0
        assert self.cache.num_free + self.cache.num_cached == self.num_blocks


class TwoStepsInFlight(SchedulerMachine):
    max_in_flight = 2


class FewBlocks(SchedulerMachine):
    """Preemption all the time."""

    num_blocks = 9
    max_in_flight = 2


class LargeBlocks(SchedulerMachine):
    block_size = 4
    num_blocks = 8


MACHINES = [SchedulerMachine, TwoStepsInFlight, FewBlocks, LargeBlocks]
CONFIG = settings(max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
FULL = settings(CONFIG, max_examples=2000, stateful_step_count=80)


@pytest.mark.parametrize("machine", MACHINES)
def test_scheduler_machine(machine):
    run_state_machine_as_test(machine, settings=CONFIG)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES)
def test_scheduler_machine_for_long(machine):
    run_state_machine_as_test(machine, settings=FULL)
