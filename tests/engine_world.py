"""The engine room whole, in one thread: loop, pins and reports over the real scheduler, cache, channels and fake executor.

Time, disk and clients are stand-ins that audit: a client checks every token against a lone runner and every end against its cause, the store checks
the bytes of every block that it is told of, the inbox audits the books before each round. A *life* is a generator: it sends commands, and each ``yield``
lets the loop go round once. When it is over, the loop is asked to drain.
"""

from __future__ import annotations

from collections import deque

from engine_client import BLOCK, POISON, Client
from engine_disk import FakeDisk
from engine_storage import FakeBook, FakeStore

from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager
from kvd.commands import Drain, PinPrefix, Recipe, Submit
from kvd.config import SchedulerConfig
from kvd.engine.adapters import Adapters
from kvd.engine.loop import EngineLoop, LoopEnd, StartWork, State
from kvd.engine.pins import Pins
from kvd.engine.reports import Reports, StartFacts
from kvd.executor.fake import FakeRunner
from kvd.scheduler.scheduler import Scheduler
from kvd.transport.inproc import InprocInbox, InprocOutbox
from kvd.types import SamplingParams, pack_tokens

FINGERPRINT = b"engine room" + bytes(21)


def namespace_of(tenant_salt: bytes, adapter: bytes) -> Namespace:
    return Namespace(FINGERPRINT, tenant_salt, adapter)


def recipe(name, prefix, *, salt=b"", digest=b"text", **options):
    return Recipe(name=name, token_ids=pack_tokens(prefix), tokenizer_digest=digest, tenant_salt=salt, **options)


class FakeClock:
    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s

    def unix(self):
        return 1.7e9 + self.now_s


class _Ticket:
    def __init__(self, step, work):
        self.step = step
        self.work = work
        self.output = None

    def done(self):
        return self.output is not None

    def wait(self, timeout_s=None):
        return self.done()


class SyncExecutor:
    """Executes in order on the loop's own thread: as soon as it is told, or (``is_lazy``) only when the result is asked for."""

    def __init__(self, runner, *, is_lazy=False, max_in_flight=1):
        self.runner = runner
        self.is_lazy = is_lazy
        self.max_in_flight = max_in_flight
        self.queue = deque()
        self.in_flight = deque()
        self.fail_submit_at = self.fail_step_at = None
        self.is_dead = False
        self.on_submit = lambda step: None

    def submit(self, step):
        assert not self.is_dead, "the executor is used after it failed"
        self.on_submit(step)
        if step.step == self.fail_submit_at:
            self.is_dead = True
            raise RuntimeError("injected: the queue refuses")
        ticket = _Ticket(step, lambda: self.runner.execute(step))
        self.queue.append(ticket)
        self.in_flight.append(ticket)
        assert len(self.in_flight) <= self.max_in_flight, "more steps in flight than allowed"
        if not self.is_lazy and step.step != self.fail_step_at:
            self._execute(ticket)
        return ticket

    def collect(self, ticket):
        assert not self.is_dead, "the executor is used after it failed"
        assert ticket is self.in_flight.popleft(), "steps are collected in order"
        if ticket.step.step == self.fail_step_at:
            self.is_dead = True
            raise RuntimeError("injected: the step fails")
        self._execute(ticket)
        return ticket.output

    def copy_in(self, group, block_ids, memory):
        """Behind the steps that were handed over before."""
        assert not self.is_dead, "the executor is used after it failed"
        ticket = _Ticket(None, lambda: self.runner.write_blocks(group, block_ids, memory) or memory)
        self.queue.append(ticket)
        return ticket

    def _execute(self, last):
        while last.output is None:
            ticket = self.queue.popleft()
            ticket.output = ticket.work()


class _Inbox:
    """The real inbox; each ``drain`` begins a round of the world, and to wait is to let time pass."""

    def __init__(self, world):
        self._world = world
        self._inner = InprocInbox(10_000)
        self.put_internal = self._inner.put_internal

    def drain(self):
        self._world.begin_round()
        commands = self._inner.drain()
        state = self._world.state
        for command in commands:
            self._world.client.handed(command, state)
            state = State.DRAINING if isinstance(command, Drain) else state
        self._world.has_slept = self._world.has_slept and not commands
        return commands

    def left_over(self):
        """What the loop has not taken before it ended."""
        return self._inner.drain()

    def wait(self, timeout_s):
        assert 0 < timeout_s <= 0.25
        self._world.clock.now_s += timeout_s
        self._world.has_slept = True
        return self._inner.wait(0)


class World:
    """One engine. ``run`` a life in it."""

    def __init__(
        self,
        *,
        num_blocks=64,
        max_steps_in_flight=1,
        make_adapters=None,
        max_adapters=2,
        max_model_len=256,
        max_pinned_fraction=0.5,
        is_lazy=False,
        drain_timeout_s=30.0,
        recipes=(),
        make_executor=None,
        log_steps=False,
        disk=False,
        **scheduler,
    ):
        self.clock = FakeClock()
        self.runner = FakeRunner(num_blocks, BLOCK, max_rows=scheduler.get("max_running", 64), poison_token_id=POISON)
        self.cache = CacheManager(num_blocks=num_blocks, block_size_tokens=BLOCK, max_pinned_fraction=max_pinned_fraction)
        self.config = SchedulerConfig(**scheduler)
        self.disk = FakeDisk(self) if disk else None
        self.scheduler = Scheduler(
            self.config,
            self.cache,
            self.clock,
            namespace_of=namespace_of,
            max_model_len=max_model_len,
            cold_tier=self.disk,
            shared_tile_tokens=BLOCK,
        )
        self.inbox = _Inbox(self)
        self.outbox = InprocOutbox()
        self.client = Client(self, max_model_len)
        self.outbox.on_put(lambda: self.client.take(self.outbox.drain()))
        self.start_recipes = {each.name: each for each in recipes}
        self.book = FakeBook(self.inbox, self.start_recipes)
        self.store = FakeStore(self)
        self.adapters = Adapters(
            scheduler=self.scheduler,
            source=None if make_adapters is None else make_adapters(self),
            clock=self.clock,
            max_adapters=max_adapters,
            max_waiting=self.config.max_waiting,
        )
        self.pins = Pins(cache=self.cache, adapters=self.adapters, recipes=self.book, observer=self.store, namespace_of=namespace_of)
        self.executor = (
            SyncExecutor(self.runner, is_lazy=is_lazy, max_in_flight=max_steps_in_flight)
            if make_executor is None
            else make_executor(self.runner)
        )
        if make_executor is None:
            self.executor.on_submit = self.on_submit
        self.facts = StartFacts("fake", FINGERPRINT.hex(), "instance", self.clock.now_s, {"blocks": 2}, {"weights": 1.5})
        self.reports = Reports(
            facts=self.facts,
            scheduler=self.scheduler,
            cache=self.cache,
            observer=self.store,
            pins=self.pins,
            adapters=self.adapters,
            clock=self.clock,
            executor_stats=lambda: {"executor": "fake"},
        )
        self.states = []
        self.num_served = 0
        self.num_progress = 0
        self.loop = EngineLoop(
            inbox=self.inbox,
            outbox=self.outbox,
            scheduler=self.scheduler,
            cache=self.cache,
            executor=self.executor,
            observer=self.store,
            pins=self.pins,
            adapters=self.adapters,
            reports=self.reports,
            clock=self.clock,
            max_steps_in_flight=max_steps_in_flight,
            drain_timeout_s=drain_timeout_s,
            log_steps=log_steps,
            on_progress=self._on_progress,
            on_state=self._on_state,
            on_served=self._on_served,
        )
        self.drain_timeout_s = drain_timeout_s
        self.drain_deadline_s = float("inf")
        self.end = None
        self.round = 0
        self.round_s = 0.01
        self.max_rounds = 4000
        self.has_slept = False
        self.woken = False
        self._life = iter(())
        self._work = StartWork()

    # ---------------------------------------------------------------------------------------- the loop's side

    @property
    def state(self):
        return self.states[-1] if self.states else State.REHYDRATING

    def run(self, life=(), **work):
        """From the start to the end of a life and of the drain after it; how the loop ended. Nothing may be left over."""
        self._life = iter(life)
        self._work = StartWork(recipes=self.start_recipes, **work)
        self.end = self.loop.run(self._work)
        self._check_end()
        return self.end

    def begin_round(self):
        self.round += 1
        assert self.round < self.max_rounds, "the loop does not end"
        self.scheduler.check_invariants()
        self.clock.now_s += self.round_s
        self.woken = False
        if self._life is not None:
            try:
                next(self._life)
            except StopIteration:
                self._life = None
                self.request_drain()
        if self.woken:
            self.has_slept = False

    def executor_is_idle(self, ticket):
        """Whether no step is in flight; then a lazy executor has got to the copy ``ticket`` too."""
        if not isinstance(self.executor, SyncExecutor) or self.executor.in_flight or self.executor.is_dead:
            return False
        self.executor._execute(ticket)
        return True

    def on_submit(self, step):
        assert not self.has_slept, "the loop slept though a step could run"

    def _on_progress(self, state):
        self.num_progress += 1
        assert state is self.state

    def _on_served(self):
        self.num_served += 1
        assert self.num_served == 1, "served is told once"

    def _on_state(self, state):
        self.states.append(state)
        self.has_slept = False
        if state is State.READY:
            assert self.states.count(State.READY) == 1
            held, reasons = self.cache.pins(), {entry["name"]: entry["reason"] for entry in self.pins.report(self.clock.unix())}
            due = [name for name, each in self.start_recipes.items() if not each.has_expired(self.clock.unix())]
            missing = [name for name in due if name not in held and not reasons[name]]
            assert not missing or self.clock.now_s >= self._work.pins_deadline_s, f"READY without {missing}"
        if state is State.DRAINING:
            assert self.states.count(State.DRAINING) == 1

    def _check_end(self):
        assert not self.client.open_requests(), "a request has no end"
        is_late = self.clock.now_s >= self.drain_deadline_s
        if self.end is LoopEnd.DRAINED:
            assert is_late or not self.client.open_ops(), "an operation has no answer"
        while self.store.leases:
            self.store.end_lease()
        if self.disk is not None:
            self.disk.end_all()
        self.scheduler.check_invariants()
        assert not self.scheduler.has_work()
        assert self.cache.num_used == 0
        assert self.cache.num_free + self.cache.num_cached == self.cache.num_blocks
        self.store.check_bytes(list(self.store.blocks))
        if not self.client.open_ops():
            self.check_pins()

    def check_pins(self):
        """With no operation open: what is held has a recipe, the very one."""
        recipes = self.book.recipes()
        for name, info in self.cache.pins().items():
            assert name in recipes, f"{name} is held without a recipe"
            packed = recipes[name].token_ids
            assert info.token_ids == packed[: len(packed) // (4 * BLOCK) * 4 * BLOCK], f"{name} holds another prefix than its recipe's"

    # ---------------------------------------------------------------------------------------- a life's side

    def send(self, command):
        if isinstance(command, Drain):
            self.drain_deadline_s = min(self.drain_deadline_s, self.clock.now_s + command.timeout_s)
        self.inbox.put_internal(command)

    def request_drain(self):
        self.drain_deadline_s = min(self.drain_deadline_s, self.clock.now_s + self.drain_timeout_s)
        self.loop.request_drain()
        self.woken = True

    def submit(self, prompt, max_tokens=4, **options):
        """Hand in a request; its id."""
        options.setdefault("credit_tokens", 1000)
        options.setdefault("sampling", SamplingParams(temperature=0.0))
        request_id = b"request%9d" % len(self.client.requests)
        command = Submit(request_id=request_id, token_ids=pack_tokens(prompt), max_tokens=max_tokens, **options)
        self.client.expect(command)
        self.send(command)
        return request_id

    def op(self, make, *args):
        """Hand in an operation; its id."""
        op_id = b"op%14d" % len(self.client.ops)
        command = make(op_id, *args)
        self.client.ops[op_id] = command
        self.send(command)
        return op_id

    def pin(self, name, prefix, **options):
        return self.op(PinPrefix, recipe(name, prefix, **options))

    def until(self, condition, max_rounds=500):
        """Go round until the condition holds."""
        for _ in range(max_rounds):
            if condition():
                return
            yield
        raise AssertionError("it does not come about")

    def ready(self):
        return self.until(lambda: self.state is State.READY)

    def over(self, *request_ids):
        return self.until(lambda: all(self.client.requests[each].terminal is not None for each in request_ids))

    def answered(self, *op_ids):
        return self.until(lambda: all(each in self.client.answers for each in op_ids))
