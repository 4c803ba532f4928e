"""A cold tier for tests: a disk that keeps the content of every block that entered the tree, and reads it back when it is told to."""

from __future__ import annotations

from collections import deque

from kvd.cache.hashing import block_hash


class ColdDisk:
    """``read`` and ``fail`` are the reader's thread and its faults; ``post`` is the inbox."""

    def __init__(self, pool):
        self.pool = pool
        self.blocks = {}
        self.loads = deque()
        self.num_copied = 0
        self.num_lookups = 0
        self.is_slower = False
        self.post = None

    def keep(self, event, content):
        self.blocks[event.block_hash] = (event.parent_hash, event.token_ids, content)

    def lookup(self, namespace, parent_hash, blocks):
        self.num_lookups += 1
        assert blocks, "nothing is asked for"
        found = []
        for tokens in blocks:
            key = block_hash(parent_hash, tokens)
            if self.is_slower or self.blocks.get(key, ())[:2] != (parent_hash, tokens):
                break
            found.append(3)
            parent_hash = key
        return found

    def start_load(self, load_id, namespace, targets):
        assert targets, "an empty load"
        assert all(target.is_wanted and not target.node.is_ready for target in targets)
        self.loads.append((load_id, list(targets)))

    def read(self, num_blocks):
        """Copy further blocks of the oldest load into the pool; with its last one it ends, and so do those behind a block that nobody wants."""
        while self.loads and num_blocks > 0:
            _, targets = self.loads[0]
            target = targets[self.num_copied]
            if not target.is_wanted or target.block_hash not in self.blocks:
                self._end()
                continue
            self.pool[target.block_id] = list(self.blocks[target.block_hash][2])
            self.num_copied += 1
            num_blocks -= 1
            if self.num_copied == len(targets):
                self._end()

    def fail(self):
        """The next block of the oldest load is bad: the load ends with what it has."""
        if self.loads:
            _, targets = self.loads[0]
            self.blocks.pop(targets[self.num_copied].block_hash, None)
            self._end()

    def _end(self):
        load_id, _ = self.loads.popleft()
        num_loaded, self.num_copied = self.num_copied, 0
        self.post(load_id, num_loaded)
