"""The one order, against a plain sort, and the bound on every wait, in a simulation of the queue alone."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_checker import FakeClock, namespace_of

from kvd.cache.events import BlockOrigin
from kvd.commands import Submit
from kvd.scheduler.order import BACKGROUND, Order
from kvd.scheduler.queue import WaitingQueue
from kvd.scheduler.request import Request
from kvd.scheduler.tenants import Tenants
from kvd.types import MAX_PRIORITY, MIN_PRIORITY, SamplingParams, pack_tokens

AGEING_S = 10.0


class Waiting:
    """A queue with accounts and a clock; ``serve`` takes the first out and charges its tenant."""

    def __init__(self, ageing_s=AGEING_S):
        self.clock = FakeClock()
        self.ageing_s = ageing_s
        self.queue = WaitingQueue(self.clock, ageing_s)
        self.tenants = Tenants(2.0)
        self.num_arrived = 0

    def request(self, tenant="", priority=0, deadline_s=0.0, background=False):
        self.num_arrived += 1
        command = Submit(
            request_id=self.num_arrived.to_bytes(16, "big"),
            token_ids=pack_tokens([1]),
            sampling=SamplingParams(),
            max_tokens=1,
            priority=priority,
            deadline_s=deadline_s,
            tenant=tenant,
        )
        return Request(
            command,
            namespace_of(b"", b""),
            arrival=self.num_arrived,
            max_tokens=1,
            submitted_s=self.clock.now_s,
            tenant=self.tenants.open(tenant),
            priority=BACKGROUND if background else priority,
            rank_s=self.clock.now_s + min(deadline_s or self.ageing_s, self.ageing_s),
            is_internal=False,
            origin=BlockOrigin.COMPUTED,
        )

    def push(self, **options):
        request = self.request(**options)
        self.queue.lift(request.tenant)
        self.queue.push(request.sequences[0])
        return request

    def serve(self, cost=1.0):
        sequence = self.queue.first()
        if sequence is None:
            return None
        self.queue.remove(sequence)
        sequence.request.tenant.counter += cost
        return sequence.request


def serve_all(waiting, cost=1.0):
    served = []
    while (request := waiting.serve(cost)) is not None:
        served.append(request)
    return served


# ----------------------------------------------------------------------------------------------------------- the order


def test_class_comes_before_tenant_before_deadline_before_arrival():
    waiting = Waiting()
    busy, idle = waiting.tenants.open("busy"), waiting.tenants.open("idle")
    last = waiting.push(background=True)
    low = waiting.push(priority=1, tenant="idle", deadline_s=1.0)
    by_arrival = [waiting.push(tenant="busy"), waiting.push(tenant="busy")]
    dated = waiting.push(tenant="busy", deadline_s=5.0)
    other = waiting.push(tenant="idle")
    urgent = waiting.push(priority=-1, tenant="busy")
    busy.counter, idle.counter = 100.0, 7.0
    assert serve_all(waiting) == [urgent, other, dated, *by_arrival, low, last]


def test_a_sequence_that_comes_back_takes_its_place_again():
    waiting = Waiting()
    first, second = waiting.push(), waiting.push()
    assert waiting.serve(0.0) is first
    third = waiting.push()
    waiting.queue.push(first.sequences[0])
    assert serve_all(waiting) == [first, second, third]


def test_a_deadline_far_away_is_worth_no_more_than_none():
    waiting = Waiting()
    undated = waiting.push()
    waiting.clock.now_s += 0.5
    far, near = waiting.push(deadline_s=1000.0), waiting.push(deadline_s=AGEING_S - 1)
    assert serve_all(waiting) == [near, undated, far]


def test_ageing_makes_a_request_as_urgent_as_the_most_urgent_who_wait_and_no_more():
    waiting = Waiting()
    old = waiting.push(tenant="flood", priority=2)
    waiting.tenants.open("flood").counter = 50.0
    waiting.clock.now_s += 1.9 * AGEING_S
    fresh = waiting.push(tenant="other")
    assert waiting.queue.first().request is fresh, "not old enough"
    waiting.clock.now_s += 0.2 * AGEING_S
    old.tenant.counter = 52.0
    assert waiting.queue.first().request is fresh, "equals by now: the tenant that was served less comes first"
    fresh.tenant.counter = 53.0
    assert waiting.queue.first().request is old
    waiting.clock.now_s += 1000 * AGEING_S
    urgent = waiting.push(tenant="third", priority=MIN_PRIORITY)
    assert [request.priority for request in serve_all(waiting)] == [2, MIN_PRIORITY, 0], (
        "a tenant that comes is lifted to the lowest who waits"
    )
    assert urgent.tenant.counter == 53.0


def test_a_long_backlog_of_one_tenant_does_not_pass_the_fresh_requests_of_another():
    waiting = Waiting()
    for _ in range(100):
        waiting.push(tenant="flood", priority=MAX_PRIORITY)
    served = []
    for _ in range(50):
        waiting.clock.now_s += AGEING_S
        if not any(request.command.tenant == "small" for request in served[-2:]):
            waiting.push(tenant="small", priority=MAX_PRIORITY)
        served.append(waiting.serve(100.0))
    assert Counter(request.command.tenant for request in served)["small"] >= 16, "one comes after every second of the others"
    positions = [index for index, request in enumerate(served) if request.command.tenant == "small"]
    assert max(after - before for before, after in pairwise(positions)) <= 4


commands = st.one_of(
    st.tuples(
        st.just("push"), st.sampled_from("abc"), st.integers(-2, 2), st.sampled_from([0.0, 0.0, 3.0, 15.0, 500.0]), st.integers(0, 9)
    ),
    st.tuples(st.just("serve"), st.integers(0, 40)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 1.0, 7.0, AGEING_S, 33.0])),
    st.tuples(st.just("remove"), st.integers(0, 50)),
    st.tuples(st.just("return"), st.integers(0, 50)),
    st.tuples(st.just("work"), st.sampled_from("abc"), st.integers(1, 30)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(commands, max_size=60))
def test_the_queue_is_the_plain_sort_whatever_happens(what):
    waiting, out = Waiting(), []
    for name, *arguments in what:
        if name == "push":
            tenant, priority, deadline_s, background = arguments
            waiting.push(tenant=tenant, priority=priority, deadline_s=deadline_s, background=background == 0)
        elif name == "wait":
            waiting.clock.now_s += arguments[0]
        elif name == "work":
            waiting.tenants.open(arguments[0]).counter += arguments[1]
        elif name == "return" and out:
            waiting.queue.push(out.pop(arguments[0] % len(out)).sequences[0])
        elif name == "remove" and len(waiting.queue):
            sequences = waiting.queue.sequences()
            waiting.queue.remove(sequences[arguments[0] % len(sequences)])
        elif name == "serve" and (request := waiting.serve(arguments[0])) is not None:
            out.append(request)
        requests = [sequence.request for sequence in waiting.queue.sequences()]
        expected = min(requests, key=Order(requests, waiting.clock.now_s, AGEING_S).key, default=None)
        first = waiting.queue.first()
        assert (first.request if first is not None else None) is expected
        waiting.queue.check_invariants()


def test_the_queue_does_not_grow_with_what_has_left_it():
    waiting = Waiting()
    for _ in range(5000):
        waiting.push(tenant=str(waiting.num_arrived % 7), priority=waiting.num_arrived % 3)
        if len(waiting.queue) > 50:
            waiting.queue.remove(waiting.queue.sequences()[-1])
        if waiting.num_arrived % 500 == 0:
            waiting.clock.now_s += AGEING_S
    held = sum(len(heap) for level in waiting.queue._levels.values() for heap in level._queues.values()) + len(waiting.queue._ageing)
    assert held < 20 * len(waiting.queue)


# ------------------------------------------------------------------------------------------------------- bounded waits


def longest_waits(seed, *, service_s, num_tenants=3, num_served=3000):
    """The longest wait of each class, while twice as many requests of the other classes come as can be served; the victims are a tenth."""
    draw, waiting = random.Random(seed), Waiting()
    victim_class = draw.randint(-5, 5)
    waits = []
    for _ in range(num_served):
        waiting.clock.now_s += service_s
        for _ in range(2):
            if len(waiting.queue) < 60:  # max_waiting
                if draw.random() < 0.1:
                    waiting.push(tenant="v", priority=victim_class)
                else:
                    tenant = str(draw.randrange(num_tenants))
                    waiting.push(tenant=tenant, priority=draw.randint(MIN_PRIORITY, victim_class), deadline_s=draw.choice([0.0, 0.5, 5.0]))
        request = waiting.serve(draw.randint(1, 20))
        if request.command.tenant == "v":
            waits.append(waiting.clock.now_s - request.submitted_s)
    still = [
        waiting.clock.now_s - sequence.request.submitted_s
        for sequence in waiting.queue.sequences()
        if sequence.request.command.tenant == "v"
    ]
    return max(waits, default=0.0), max(still, default=0.0), victim_class


@pytest.mark.parametrize("seed", range(12))
def test_every_wait_is_bounded_under_an_endless_flood_of_more_urgent_requests(seed):
    """At most its climb by ageing, then everybody's share until its own tenant's earlier ones are through: 60 wait at most, costs differ by a factor of 20 at most."""
    service_s = 0.5
    longest, still, victim_class = longest_waits(seed, service_s=service_s)
    climb_s = (victim_class - MIN_PRIORITY) * AGEING_S
    bound_s = climb_s + AGEING_S + 60 * 4 * service_s
    assert longest > 0
    assert max(longest, still) <= bound_s, "it would wait for ever without ageing"


def test_without_ageing_there_is_no_bound():
    """What the simulation would see if ageing did nothing: the victims of the class behind never run."""
    waiting = Waiting(ageing_s=1e9)
    waiting.push(tenant="v", priority=1)
    for _ in range(2000):
        waiting.clock.now_s += 1.0
        waiting.push(tenant="flood")
        assert waiting.serve().command.tenant == "flood"


def test_within_a_tenant_no_flood_of_deadlines_keeps_one_without_waiting_for_ever():
    waiting = Waiting()
    undated = waiting.push()
    for _ in range(1000):
        waiting.clock.now_s += 1.0
        for _ in range(2):
            waiting.push(deadline_s=2.0)
        if waiting.serve() is undated:
            break
    assert waiting.clock.now_s - undated.submitted_s <= 2 * AGEING_S, "those that came within the first ten seconds, at one a second"


# ------------------------------------------------------------------------------------------------------------- tenants


def test_tenants_that_both_wait_are_served_alike_by_tokens_not_by_requests():
    waiting = Waiting()
    for _ in range(400):
        waiting.push(tenant="long")
        waiting.push(tenant="short")
    work = Counter()
    for _ in range(300):
        request = waiting.queue.first().request
        cost = 50 if request.command.tenant == "long" else 5
        waiting.serve(cost)
        work[request.command.tenant] += cost
    assert abs(work["long"] - work["short"]) <= 50, "within the largest request"


def test_a_tenant_that_was_idle_saved_nothing_up():
    waiting = Waiting()
    for _ in range(50):
        waiting.push(tenant="busy")
    for _ in range(40):
        waiting.serve(10)
    for _ in range(10):
        waiting.push(tenant="late")
    assert waiting.tenants.open("late").counter == 400.0
    served = [waiting.serve(10).command.tenant for _ in range(10)]
    assert served.count("late") == 5
    serve_all(waiting, 10)
    waiting.push(tenant="new")
    assert waiting.tenants.open("new").counter >= 400.0, "nobody waits: the last who did counts"


def test_idle_accounts_are_bounded():
    tenants = Tenants(2.0)
    busy = tenants.open("busy")
    for number in range(5000):
        tenant = tenants.open(str(number))
        tenant.counter = float(number)
        tenants.close(tenant)
        tenants.check_invariants()
    assert tenants.num_live == 1
    assert tenants.open("busy") is busy
    assert tenants.open("4999").counter == 4999.0, "the most served are remembered"
