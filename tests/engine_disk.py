"""The engine world's disk: keeps the content of every block that was ready in memory, and reads it back into the pool through the executor's queue."""

from __future__ import annotations

from collections import deque

from kvd.cache.hashing import block_hash
from kvd.commands import LoadDone
from kvd.executor.fake import GROUP


class _Load:
    def __init__(self, load_id, targets):
        self.load_id, self.targets = load_id, targets
        self.num_begun = self.num_copied = 0
        self.is_over = False
        """Nothing more is read of it."""


class FakeDisk:
    """The scheduler's cold tier. ``read`` and ``fail`` are what the reader does, ``poll`` is the engine's look between steps."""

    def __init__(self, world):
        self.world = world
        self.blocks = {}
        self.loads = deque()
        self.copies = deque()
        self.num_ended = 0

    def keep(self, event, content):
        self.blocks[event.block_hash] = (event.parent_hash, event.token_ids, content)

    def lookup(self, namespace, parent_hash, blocks):
        uses = []
        for tokens in blocks:
            key = block_hash(parent_hash, tokens)
            if self.blocks.get(key, ())[:2] != (parent_hash, tokens):
                break
            uses.append(1)
            parent_hash = key
        return uses

    def start_load(self, load_id, namespace, targets):
        assert targets
        self.loads.append(_Load(load_id, targets))

    def read(self, num_blocks):
        """Hand the next blocks of the oldest load that is not read yet to the executor."""
        load = next((each for each in self.loads if not each.is_over), None)
        if load is None or getattr(self.world.executor, "is_dead", False):
            return
        for target in load.targets[load.num_begun : load.num_begun + num_blocks]:
            if not target.is_wanted or target.block_hash not in self.blocks:
                load.is_over = True
                break
            content = memoryview(bytes(self.blocks[target.block_hash][2]))
            self.copies.append((load, self.world.executor.copy_in(GROUP, [target.block_id], content)))
            load.num_begun += 1
        load.is_over = load.is_over or load.num_begun == len(load.targets)

    def fail(self):
        """The oldest load that is not read yet ends with what was handed over."""
        load = next((each for each in self.loads if not each.is_over), None)
        if load is not None:
            load.is_over = True
            self.blocks.pop(load.targets[load.num_begun].block_hash, None)

    def poll(self):
        while self.copies and (self.copies[0][1].done() or self.world.executor_is_idle(self.copies[0][1])):
            load, _ = self.copies.popleft()
            load.num_copied += 1
        while self.loads and self.loads[0].is_over and self.loads[0].num_copied == self.loads[0].num_begun:
            load = self.loads.popleft()
            self.num_ended += 1
            self.world.inbox.put_internal(LoadDone(load.load_id, load.num_copied))

    def end_all(self):
        """The loop is over: whatever is under way, or was told and not heard any more, ends without it."""
        for command in self.world.inbox.left_over():
            if isinstance(command, LoadDone):
                self.world.scheduler.on_load_done(command.load_id, command.num_loaded)
        while self.loads:
            self.world.scheduler.on_load_done(self.loads.popleft().load_id, 0)
