"""Adapters over the real scheduler, cache and fake executor, without a loop, and a disk whose thread answers when the test says so."""

from __future__ import annotations

import hashlib

from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager
from kvd.commands import (
    AdapterNames,
    AdapterRead,
    ChoiceDone,
    ListAdapters,
    OpDone,
    OpFailed,
    RequestDone,
    RequestFailed,
    Submit,
    TokensOut,
)
from kvd.config import SchedulerConfig
from kvd.engine.adapters import Adapters
from kvd.executor.fake import FakeRunner
from kvd.scheduler.scheduler import Scheduler
from kvd.types import SamplingParams, pack_tokens

PROMPT = list(b"Once upon a time, and a very good time it was, there was a moocow.")


class Clock:
    now_s = 100.0

    def monotonic(self):
        return self.now_s


class Disk:
    """Stands for the store and its thread, which finds and packs at once what it is asked for; its answers come when the test says so."""

    def __init__(self, runner):
        self.runner = runner
        self.contents = {}
        self.reads = []
        self.found = {}
        self.packed = set()
        self.lists = []

    def read(self, read_id, name):
        answer = self._find(read_id, name)
        if not answer.error:
            self.found[read_id] = answer.digest
        self.reads.append((name, answer))

    def list_names(self, op_id):
        self.lists.append(op_id)

    def install(self, read_id, digest):
        assert self.found.pop(read_id) == digest
        assert digest not in self.packed
        self.packed.add(digest)
        self.runner.install_adapter(digest, None)

    def discard(self, read_id):
        del self.found[read_id]

    def remove(self, digest):
        self.packed.remove(digest)
        self.runner.remove_adapter(digest)

    def answer(self):
        return self.reads.pop(0)[1]

    def _find(self, read_id, name):
        content = self.contents.get(name)
        if content is None:
            return AdapterRead(read_id, error=f"no adapter is named {name!r}", is_missing=True)
        if content == "damaged":
            return AdapterRead(read_id, error=f"adapter {name}: damaged")
        digest = hashlib.sha256(content.encode()).digest()
        return AdapterRead(read_id, digest, rank=8, num_bytes=1000)


class World:
    """Adapters over the real scheduler, cache and fake executor, without a loop."""

    def __init__(self, max_adapters=2, max_waiting=8, max_running=8, ageing_s=30.0, **contents):
        self.clock = Clock()
        self.runner = FakeRunner(256, 16, max_rows=8)
        self.disk = Disk(self.runner)
        self.disk.contents.update(contents)
        self.cache = CacheManager(num_blocks=256, block_size_tokens=16)
        self.scheduler = Scheduler(
            SchedulerConfig(max_running=max_running, ageing_s=ageing_s),
            self.cache,
            self.clock,
            namespace_of=lambda salt, adapter: Namespace(b"f" * 32, salt, adapter),
            max_model_len=256,
            shared_tile_tokens=16,
        )
        self.adapters = Adapters(
            scheduler=self.scheduler, source=self.disk, clock=self.clock, max_adapters=max_adapters, max_waiting=max_waiting
        )
        self.tokens = {}
        self.ends = {}
        self.usage = {}
        self.answers = {}
        self.num_ids = 0

    def take(self, events):
        for event in events:
            match event:
                case TokensOut():
                    self.tokens[event.request_id] += event.token_ids
                case RequestDone() | RequestFailed():
                    assert event.request_id not in self.ends, "one end each"
                    self.ends[event.request_id] = getattr(event, "code", "done")
                    self.usage[event.request_id] = getattr(event, "usage", None)
                    self.take(self.adapters.release(event.request_id))
                case OpDone() | OpFailed():
                    assert event.op_id not in self.answers, "one answer each"
                    self.answers[event.op_id] = getattr(event, "code", None) or event.result
                case ChoiceDone():
                    pass

    def id(self):
        self.num_ids += 1
        return self.num_ids.to_bytes(16, "big")

    def ask(self, adapter="", *, max_tokens=8, **options):
        request_id = self.id()
        self.tokens[request_id] = b""
        options = {"credit_tokens": 1000, **options}
        command = Submit(
            request_id=request_id,
            token_ids=pack_tokens(PROMPT),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            adapter_name=adapter,
            **options,
        )
        self.take(self.adapters.submit(command))
        return request_id

    def operate(self, kind, *args):
        op_id = self.id()
        self.take(self.adapters.handle(kind(op_id, *args)))
        return op_id

    def read(self):
        """The oldest read is over."""
        self.take(self.adapters.handle(self.disk.answer()))

    def step(self):
        step = self.scheduler.schedule()
        if step is not None:
            self.take(self.scheduler.update(step, self.runner.execute(step)))
        return step is not None

    def finish(self):
        for _ in range(1000):
            if self.disk.reads:
                self.read()
            elif not self.step():
                return
        raise AssertionError("no end")

    def listed(self, *on_disk):
        """Name and state of what the list holds, when these have directories."""
        op_id = self.operate(ListAdapters)
        self.take(self.adapters.handle(AdapterNames(self.disk.lists.pop(), on_disk)))
        return {each["name"]: each["state"] for each in self.answers[op_id]["adapters"]}

    def loaded(self):
        return {each["name"]: each["requests"] for each in self.adapters.report()["loaded"]}
