"""The engine world's storage: a book of recipes whose writes end when they are told to, and a store that checks the bytes of every block that it is told of."""

from __future__ import annotations

from functools import lru_cache

from engine_client import BLOCK

from kvd.cache.events import BlockRemoved, BlockStored
from kvd.commands import CheckpointDone, ForgetDone, RecipeDurable
from kvd.executor.fake import GROUP, FakeRunner
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow
from kvd.types import SamplingParams


@lru_cache(maxsize=4096)
def block_content(packed: bytes) -> bytes:
    """What the last full block of a prefix must hold: computed by a lone runner."""
    num_tokens = len(packed) // 4
    num_blocks = num_tokens // BLOCK
    runner = FakeRunner(num_blocks, BLOCK, max_rows=1)
    started = StartedRow(0, packed, num_tokens, 0, num_tokens, tuple(range(num_blocks)), SamplingParams())
    runner.execute(SchedulerOutput(0, (started,), ContinuedRows()))
    content = bytearray(runner.groups()[0].row_bytes)
    runner.read_blocks(GROUP, [num_blocks - 1], memoryview(content))
    return bytes(content)


class FakeBook:
    """Recipes, as the real book orders and batches them; ``settle`` is the end of the write under way."""

    def __init__(self, inbox, recipes):
        self.inbox = inbox
        self.durable = dict(recipes)
        self.pending = []
        self.history = []
        self.written = set()
        self.failed = set()

    def recipes(self):
        return self._after(self.pending)

    def _after(self, changes):
        result = dict(self.durable)
        for _, name, value in changes:
            if value is None:
                result.pop(name, None)
            else:
                result[name] = value
        return result

    def put(self, op_id, value):
        self._note(op_id, value.name, value)

    def remove(self, op_id, name):
        self._note(op_id, name, None)

    def _note(self, op_id, name, value):
        self.pending.append((op_id, name, value))
        self.history.append((op_id, name))

    def last_change(self, name):
        return next((op_id for op_id, each in reversed(self.history) if each == name), None)

    def settle(self, num_changes=None, error=""):
        batch = self.pending[:num_changes]
        if not error:
            self.durable = self._after(batch)
        self.pending = self.pending[len(batch) :]
        for op_id, _, _ in batch:
            (self.failed if error else self.written).add(op_id)
            self.inbox.put_internal(RecipeDurable(op_id, error))


class FakeStore:
    """The cache's observer: follows its events, and holds the pool to them."""

    def __init__(self, world):
        self.world = world
        self.prefixes = {}
        self.blocks = {}
        self.leases = []
        self.checkpoints = []
        self.forgets = []
        self.unfinished = set()
        """Salts of forgets that failed on disk."""
        self.idle_delay = 0.1
        self.prefills = []
        self.step = 0
        self.queue_depth = 0

    def on_step(self, step, events):
        assert step >= self.step, "steps go back"
        self.step = step
        for event in events:
            if isinstance(event, BlockStored):
                before = self.prefixes[event.parent_hash] if event.depth else b""
                self.prefixes[event.block_hash] = before + event.token_ids
                self.blocks[event.block_hash] = event.block_id
                if self.world.disk is not None:
                    self.world.disk.keep(event, block_content(self.prefixes[event.block_hash]))
            elif isinstance(event, BlockRemoved):
                assert self.blocks.pop(event.block_hash) == event.block_id
        self.check_bytes(event.block_hash for event in events if isinstance(event, BlockStored))
        if self.world.disk is not None:
            self.world.disk.poll()

    def check_bytes(self, block_hashes):
        content = bytearray(self.world.runner.groups()[0].row_bytes)
        for block_hash in block_hashes:
            if block_hash in self.blocks:
                self.world.runner.read_blocks(GROUP, [self.blocks[block_hash]], memoryview(content))
                assert bytes(content) == block_content(self.prefixes[block_hash]), "a block in the tree holds other bytes than its tokens'"

    def lease(self, block_hash):
        if self.world.cache.lease(self.blocks[block_hash], block_hash):
            self.leases.append(block_hash)

    def end_lease(self):
        if self.leases:
            block_hash = self.leases.pop(0)
            self.check_bytes([block_hash])
            self.world.cache.end_lease(self.blocks[block_hash])
            self.world.woken = True

    def checkpoint_now(self, op_id):
        self.checkpoints.append(op_id)

    def forget(self, op_id, selection, pins):
        assert not any(selection.holds(*self.of_block(block_hash)) for block_hash in self.blocks), "memory has not forgotten it yet"
        self.forgets.append((op_id, pins))

    def of_block(self, block_hash):
        """The salt and the tokens that a block in memory stands for."""
        node = self.world.cache._blocks.node_of[self.blocks[block_hash]]
        return node.namespace.tenant_salt, self.prefixes[block_hash]

    def settle_forget(self, error=""):
        op_id, pins = self.forgets.pop(0)
        self.world.book.settle()
        for name, value in pins.items():
            if not error and self.world.book.durable.get(name) == value:
                del self.world.book.durable[name]
        self.world.inbox.put_internal(ForgetDone(op_id, 2, error))

    def settle(self, error=""):
        if self.checkpoints:
            self.world.inbox.put_internal(CheckpointDone(self.checkpoints.pop(0), 3, 1536, error))

    def set_queue_depth(self, num_waiting):
        self.queue_depth = num_waiting

    def note_prefill(self, num_tokens, seconds):
        self.prefills.append((num_tokens, seconds))

    def idle_delay_s(self):
        return self.idle_delay

    may_forget = True

    def is_forgetting(self, recipe):
        return recipe.tenant_salt in self.unfinished

    last_use_s_ago = 7.0

    def block_on_disk(self, block_hash):
        return (True, self.world.clock.unix() - self.last_use_s_ago) if block_hash in self.blocks else (False, 0.0)

    def status(self):
        return {"nodes": len(self.blocks)}

    def stats(self):
        return {"wal_records": 5}
