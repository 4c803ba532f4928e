"""The engine room without model, disk and clients, for measuring its own cost: the executor answers at once, the disk says nothing, the edge throws away.

The loop, the scheduler, the cache and the channels are the daemon's own. Collections of garbage are timed by ``GcPauses``.
"""

from __future__ import annotations

import gc
import math
import time

from kvd.cache.events import BlockOrigin
from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager, eviction_policy
from kvd.commands import RequestDone, Submit
from kvd.config import SchedulerConfig
from kvd.engine.adapters import Adapters
from kvd.engine.clock import SystemClock
from kvd.engine.loop import EngineLoop, StartWork
from kvd.engine.pins import Pins
from kvd.engine.reports import Reports, StartFacts
from kvd.scheduler.scheduler import Scheduler
from kvd.step import TILE_TOKENS, ExecutorOutput
from kvd.transport.inproc import InprocInbox, InprocOutbox
from kvd.types import KvGroup, SamplingParams, pack_tokens

BLOCK = 16
FINGERPRINT = bytes(32)
GREEDY = SamplingParams(temperature=0.0)


def namespace_of(tenant_salt, adapter):
    return Namespace(FINGERPRINT, tenant_salt, adapter)


def prompt_of(number, num_tokens):
    """Tokens that share no block with another number's."""
    return pack_tokens([number % 30000, number // 30000] * (num_tokens // 2) + [0] * (num_tokens % 2))


class EchoRunner:
    """Samples token 7 for each row whose prompt is computed, with as little work as can be."""

    def __init__(self):
        self._left = {}
        self.num_executed = 0

    def groups(self):
        return (KvGroup("target", 64, FINGERPRINT),)

    def execute(self, step):
        self.num_executed += 1
        rows = []
        left = self._left
        for row in step.released:
            left.pop(row, None)
        for started in step.started:
            missing = len(started.token_ids) // 4 - started.num_computed - started.num_tokens
            if missing:
                left[started.row] = missing
            else:
                rows.append(started.row)
        if left:
            for row, count in zip(step.continued.rows, step.continued.num_tokens, strict=True):
                missing = left.get(row, 0)
                if missing > count:
                    left[row] = missing - count
                    continue
                left.pop(row, None)
                rows.append(row)
        else:
            rows += step.continued.rows
        return ExecutorOutput(step.step, rows, [0] * len(rows), [7] * len(rows))


class _Done:
    def __init__(self, output):
        self.output = output

    def done(self):
        return True

    def wait(self, timeout_s=None):
        return True


class AtOnce:
    """An executor on the engine's own thread; ``spent_s`` is what its runner took, which is not the engine's."""

    def __init__(self, runner, now=time.perf_counter):
        self._runner = runner
        self._now = now
        self.spent_s = 0.0

    def submit(self, step):
        began_s = self._now()
        ticket = _Done(self._runner.execute(step))
        self.spent_s += self._now() - began_s
        return ticket

    def collect(self, ticket):
        return ticket.output


class NoStore:
    """Storage that remembers nothing."""

    may_forget = True

    def on_step(self, step, events):
        pass

    def set_queue_depth(self, num_waiting):
        pass

    def note_prefill(self, num_tokens, seconds):
        pass

    def idle_delay_s(self):
        return 0.25

    def is_forgetting(self, recipe):
        return False

    def block_on_disk(self, block_hash):
        return False, 0.0

    def status(self):
        return {}

    def stats(self):
        return {}


class NoRecipes:
    def recipes(self):
        return {}

    def put(self, op_id, recipe):
        pass

    def remove(self, op_id, name):
        pass


class _TimedInbox(InprocInbox):
    """Each ``drain`` begins a round of the loop."""

    def __init__(self, on_round):
        super().__init__(100_000)
        self._on_round = on_round

    def drain(self):
        self._on_round()
        return super().drain()


class GcPauses:
    """Collections while it is open: how many, the longest, and all of them together, in seconds."""

    def __enter__(self):
        self.num = 0
        self.worst_s = self.total_s = 0.0
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_):
        gc.callbacks.remove(self._note)

    def _note(self, phase, _info):
        now = time.perf_counter()
        if phase == "start":
            self._began_s = now
        else:
            self.num += 1
            self.total_s += now - self._began_s
            self.worst_s = max(self.worst_s, now - self._began_s)


class EngineAlone:
    """``run`` until ``num_rounds`` rounds of the loop have gone by; what each of them took, without the executor's part, is in ``rounds_s``.

    With ``now=time.thread_time`` that is processor time: a busy machine does not count, waiting does not either.
    """

    def __init__(self, *, num_blocks, make_executor=None, now=time.perf_counter, max_steps_in_flight=1, **scheduler):
        config = SchedulerConfig(max_waiting=100_000, **scheduler)
        self.cache = CacheManager(num_blocks=num_blocks, block_size_tokens=BLOCK, policy=eviction_policy("cost", num_blocks, BLOCK))
        clock = SystemClock()
        self.scheduler = Scheduler(
            config, self.cache, clock, namespace_of=namespace_of, max_model_len=1 << 20, shared_tile_tokens=TILE_TOKENS
        )
        self.runner = EchoRunner()
        self._now = now
        self.executor = AtOnce(self.runner, now) if make_executor is None else make_executor(self.runner)
        self.inbox = _TimedInbox(self._on_round)
        self.outbox = InprocOutbox()
        self.outbox.on_put(self._take)
        self.num_done = 0
        self.num_events = 0
        store = NoStore()
        adapters = Adapters(scheduler=self.scheduler, source=None, clock=clock, max_adapters=1, max_waiting=1)
        pins = Pins(cache=self.cache, adapters=adapters, recipes=NoRecipes(), observer=store, namespace_of=namespace_of)
        reports = Reports(
            facts=StartFacts("bench", "", "", clock.monotonic()),
            scheduler=self.scheduler,
            cache=self.cache,
            observer=store,
            pins=pins,
            adapters=adapters,
            clock=clock,
            executor_stats=dict,
        )
        self.loop = EngineLoop(
            inbox=self.inbox,
            outbox=self.outbox,
            scheduler=self.scheduler,
            cache=self.cache,
            executor=self.executor,
            observer=store,
            pins=pins,
            adapters=adapters,
            reports=reports,
            clock=clock,
            max_steps_in_flight=max_steps_in_flight,
            drain_timeout_s=0.0,
            log_steps=False,
            on_progress=lambda state: None,
            on_state=lambda state: None,
            on_served=lambda: None,
        )
        self.rounds_s = []
        self.on_round = None
        self._num_submitted = 0
        self._early = []
        """Submitted before the loop runs: it is ready after its first round."""
        self._num_rounds = 0
        self._began_s = 0.0
        self._spent_s = 0.0

    def command(self, token_ids, *, request, **options):
        options = {"max_tokens": 1 << 19, "may_shorten": True, "credit_tokens": 1 << 30, **options}
        return Submit(request_id=request.to_bytes(16, "big"), token_ids=token_ids, sampling=GREEDY, **options)

    def submit(self, token_ids, **options):
        self._num_submitted += 1
        command = self.command(token_ids, request=self._num_submitted, **options)
        if self._began_s:
            self.inbox.put_internal(command)
        else:
            self._early.append(command)

    def run(self, num_rounds):
        self._num_rounds = num_rounds
        self.rounds_s = []
        self.loop.run(StartWork())

    def fill_cache(self, num_blocks, *, chain=512):
        """Have so many cached blocks, as chains that no prompt matches."""
        for number in range(math.ceil(num_blocks / chain)):
            blocks = [(prompt_of(number, BLOCK), 1), *((prompt_of(depth, BLOCK), 1) for depth in range(1, min(chain, num_blocks)))]
            targets = self.cache.begin_load(namespace_of(b"cached", b""), blocks, BlockOrigin.RESTORED)
            assert targets is not None
            self.cache.complete_fill([target.node for target in targets])
            self.cache.take_events()

    def _on_round(self):
        now = self._now()
        spent_s = getattr(self.executor, "spent_s", 0.0)
        if self._early and self._began_s:
            for command in self._early:
                self.inbox.put_internal(command)
            self._early.clear()
        elif self._began_s:
            self.rounds_s.append(now - self._began_s - (spent_s - self._spent_s))
            if len(self.rounds_s) >= self._num_rounds:
                self.loop.request_drain()
        if self.on_round is not None:
            self.on_round()
        self._spent_s = spent_s
        self._began_s = self._now()

    def _take(self):
        events = self.outbox.drain()
        self.num_events += len(events)
        self.num_done += sum(isinstance(event, RequestDone) for event in events)


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]
