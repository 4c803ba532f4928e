"""A state machine and a soak over scheduler, cache and a content-checking executor: whatever happens, nobody hears a wrong token and all requests end."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from simulation import Simulation

from kvd.config import SpeculativeConfig

STEMS = ([0] * 9, [0] * 8, [0, 1] * 5, [0] * 4 + [1] * 6)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12) | st.sampled_from(STEMS)
REQUESTS = {
    "num_choices": st.sampled_from([1, 1, 2, 3]),
    "max_tokens": st.sampled_from([1, 4, 12]),
    "stop_token_ids": st.sampled_from([(), (), (1,)]),
    "min_tokens": st.integers(0, 2),
    "credit_tokens": st.sampled_from([0, 1, 3, 100, 100]),
    "tenant_salt": st.sampled_from([b"", b"", b"s"]),
    "cache_priority": st.sampled_from([0, 50, 50, 100]),
    "cache_ttl_s": st.sampled_from([0.0, 0.0, 5.0]),
    "priority": st.sampled_from([0, 0, -1, 2]),
    "tenant": st.sampled_from(["", "", "a", "b"]),
    "deadline_s": st.sampled_from([0.0, 0.0, 0.0, 0.5, 40.0]),
    "queue_timeout_s": st.sampled_from([0.0, 0.0, 0.0, 0.5]),
}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        max_in_flight=st.integers(1, 2),
        shape=st.sampled_from([(14, 2), (9, 2), (8, 4), (6, 4)]),
        budget=st.sampled_from([2, 7, 30]),
        loading=st.sampled_from([None, 0.3, 1.0]),
        mode=st.sampled_from(["off", "auto", "ngram", "draft"]),
    )
    def begin(self, max_in_flight, shape, budget, loading, mode):
        num_blocks, block_size = shape
        self.sim = Simulation(
            num_blocks=num_blocks,
            block_size=block_size,
            max_in_flight=max_in_flight,
            max_tokens_per_step=budget,
            disk=loading is not None,
            max_loading_fraction=loading or 0.0,
            speculative=SpeculativeConfig(speculation=mode, num_draft=4, ngram_min=2, ngram_max=4),
            has_draft_model=mode in ("auto", "draft"),
        )

    @rule(prompt=prompts, **REQUESTS)
    def submit(self, prompt, **options):
        self.sim.submit(prompt, **options)

    @rule(stem=st.sampled_from(STEMS), tails=st.lists(st.sampled_from([[], [0], [1, 1, 1]]), min_size=2, max_size=5))
    def burst(self, stem, tails):
        for tail in tails:
            self.sim.submit(stem + tail, max_tokens=8, num_choices=len(tail) or 1)
        self.sim.submit_step()

    @rule(prompt=prompts, background=st.booleans())
    def submit_internal(self, prompt, background):
        self.sim.submit(prompt, internal=True, background=background, max_tokens=1, credit_tokens=1)

    @precondition(lambda self: self.sim.checker.open())
    @rule(index=st.integers(0, 3), what=st.sampled_from(["abort", "grant", "finish"]), number=st.integers(0, 3))
    def command(self, index, what, number):
        ids = self.sim.checker.open()
        request_id = ids[index % len(ids)]
        if what == "abort":
            self.sim.abort(request_id)
        elif what == "grant":
            self.sim.grant(request_id, 1 + number**3)
        else:
            self.sim.finish_choice(request_id, number)

    @rule(count=st.integers(1, 6))
    def rounds(self, count):
        for _ in range(count):
            self.sim.round()

    @rule()
    def submit_step(self):
        self.sim.submit_step()

    @rule()
    def collect(self):
        self.sim.collect()

    @rule(index=st.integers(0, 4))
    def fail_a_row(self, index):
        self.sim.executor.fail_row = lambda rows: rows[index] if index < len(rows) else None
        self.sim.submit_step()

    @rule(num_blocks=st.integers(1, 4), what=st.sampled_from(["read", "read", "fail", "slower"]))
    def disk(self, num_blocks, what):
        if self.sim.disk is None:
            return
        if what == "read":
            self.sim.read(num_blocks)
        elif what == "fail":
            self.sim.disk.fail()
        else:
            self.sim.disk.is_slower = num_blocks == 1

    @rule(prompt=st.lists(st.integers(0, 1), max_size=8), salt=st.sampled_from([b"", b"s"]))
    def forget(self, prompt, salt):
        self.sim.forget(prompt, salt)

    @rule()
    def memory_is_wanted(self):
        self.sim.evict_all()

    @rule(seconds=st.sampled_from([1.0, 31.0]))
    def time_passes(self, seconds):
        self.sim.wait_s(seconds)

    @rule(name=st.sampled_from(["a", "b"]), prompt=prompts, number=st.integers(0, 5))
    def cache_owner(self, name, prompt, number):
        hashes = sorted(self.sim.stored)
        if number == 0:
            self.sim.pin(name, prompt)
        elif number == 1:
            self.sim.cache.unpin(name)
        elif number == 2 and hashes:
            self.sim.lease(hashes[len(prompt) % len(hashes)])
        elif number == 3:
            self.sim.end_lease()
        else:
            self.sim.cache.evict_to_watermark(number)

    @invariant()
    def everything_adds_up(self):
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.finish_all()


CONFIG = settings(max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
FULL = settings(CONFIG, max_examples=5000, stateful_step_count=80)


def test_scheduler_machine():
    run_state_machine_as_test(SchedulerMachine, settings=CONFIG)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_scheduler_machine_for_long():
    run_state_machine_as_test(SchedulerMachine, settings=FULL)


def soak(seed, num_operations):
    """Random traffic, heavier and longer than hypothesis likes it."""
    draw = random.Random(seed)
    num_blocks, block_size = draw.choice([(14, 2), (10, 2), (8, 4), (20, 2), (30, 2)])
    sim = Simulation(
        num_blocks=num_blocks,
        block_size=block_size,
        max_in_flight=draw.choice([1, 2]),
        max_tokens_per_step=draw.choice([3, 7, 30]),
        max_running=draw.choice([3, 6, 10]),
        disk=draw.random() < 0.7,
        speculative=SpeculativeConfig(speculation=draw.choice(["off", "auto", "ngram"]), num_draft=draw.randint(1, 6), ngram_min=2),
        has_draft_model=draw.random() < 0.5,
    )
    for _ in range(num_operations):
        chance = draw.random()
        ids = sim.checker.open()
        if chance < 0.22 and len(ids) < 8:
            stem = draw.choice(STEMS)
            prompt = stem[: draw.randint(1, len(stem))] + [draw.randint(0, 1) for _ in range(draw.randint(0, 3))]
            sim.submit(
                prompt,
                num_choices=draw.choice([1, 1, 1, 2, 3]),
                max_tokens=draw.randint(1, 12),
                credit_tokens=draw.choice([2, 6, 100, 100]),
                stop_token_ids=draw.choice([(), (), (1,)]),
                min_tokens=draw.randint(0, 3),
                tenant_salt=draw.choice([b"", b"", b"s"]),
                priority=draw.choice([0, 0, 0, -1, 3]),
                tenant=draw.choice(["", "", "a", "b"]),
                deadline_s=draw.choice([0.0] * 6 + [0.5]),
                queue_timeout_s=draw.choice([0.0] * 6 + [0.5]),
            )
        elif chance < 0.31 and len(ids) < 6:  # several want one prefix, and its owner may go while it fills
            stem = draw.choice(STEMS)
            burst = [sim.submit(stem + [0] * tail, max_tokens=4) for tail in range(draw.randint(2, 4))]
            if draw.random() < 0.5:
                sim.executor.fail_row = lambda rows: rows[0]
            sim.submit_step()
            if draw.random() < 0.5:
                sim.abort(burst[0])
        elif chance < 0.33 and ids:
            sim.abort(draw.choice(ids))
        elif chance < 0.36 and ids:
            sim.finish_choice(draw.choice(ids), draw.randint(0, 2))
        elif chance < 0.45 and ids:
            sim.grant(draw.choice(ids), draw.choice([1, 4, 20]))
        elif chance < 0.47:
            sim.executor.fail_row = draw.choice
        elif chance < 0.49:
            sim.wait_s(draw.choice([1.0, 20.0]))
        elif chance < 0.52 and sim.stored:
            sim.lease(draw.choice(sorted(sim.stored)))
        elif chance < 0.56:
            sim.end_lease()
        elif chance < 0.58:
            sim.pin(draw.choice("ab"), draw.choice(STEMS))
        elif chance < 0.6:
            sim.cache.unpin(draw.choice("ab"))
        elif chance < 0.64:
            sim.cache.evict_to_watermark(draw.randint(1, 3))
        elif chance < 0.655:
            sim.evict_all()
        elif chance < 0.69:
            sim.read(draw.randint(1, 4))
        elif chance < 0.705 and sim.disk is not None:
            sim.disk.fail()
        elif chance < 0.73:
            sim.submit_step()
        elif chance < 0.77:
            sim.collect()
        else:
            sim.round()
        sim.check()
    sim.finish_all()
    return sim.ends(), Counter({key: value for key, value in sim.scheduler.stats().items() if isinstance(value, int)})


def soak_all(seeds, num_operations):
    ends, stats = Counter(), Counter()
    for seed in seeds:
        some_ends, some_stats = soak(seed, num_operations)
        ends += some_ends
        stats += some_stats
    for code in ("done", "nonfinite_logits", "client_too_slow", "kv_capacity", "deadline_exceeded", "queue_timeout"):
        assert ends[code] > 0, f"the soak never saw {code}"
    assert stats["preemptions"] > 0
    assert stats["replanned"] > 0
    assert stats["loads"] > 40
    assert stats["failed_loads"] > 4


def test_soak():
    soak_all(range(12), 300)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_soak_for_long():
    soak_all(range(1000, 1400), 600)
