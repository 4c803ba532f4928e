"""A state machine over the whole cache: two tokens, small blocks, a shadow of every block's content and of every event."""

from __future__ import annotations

import hashlib
import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.cache.events import BlockOrigin, BlockRemoved, BlocksPinned, BlockStored, BlocksUnpinned, BlocksUsed
from kvd.cache.hashing import Namespace
from kvd.cache.manager import (
    BlockTable,
    CacheManager,
    CostPolicy,
    LruPolicy,
    PinCapacityError,
    PinNotReadyError,
    PinTooShortError,
    PrefixInfo,
    Retention,
)
from kvd.cache.retention import DEFAULT_RETENTION
from kvd.cache.tenants import Selection
from kvd.types import pack_tokens, unpack_tokens

NAMESPACES = (Namespace(b"f"), Namespace(b"f", b"tenant"))
tokens_strategy = st.lists(st.integers(0, 1), min_size=1, max_size=14)
names = st.sampled_from(["a", "b"])
retentions = st.tuples(st.sampled_from([0, 20, 50, 100]), st.sampled_from([1, 2, 4, math.inf]))


class Sequence:
    def __init__(self, table: BlockTable, namespace: Namespace, tokens: list[int]):
        self.table, self.namespace, self.tokens = table, namespace, tokens
        self.num_computed = table.num_cached_tokens
        self.has_begun = table.partial is None


class CacheMachine(RuleBasedStateMachine):
    """``content[block]`` maps an offset in the block to the whole prefix that was written there, as the KV of a position depends on it."""

    block_size = 2
    num_blocks = 12
    hash_bits = 256
    min_partial_tokens = 1

    def __init__(self):
        super().__init__()
        self.cache = CacheManager(
            num_blocks=self.num_blocks,
            block_size_tokens=self.block_size,
            free_watermark=0.3,
            max_pinned_fraction=0.5,
            hash_function=self.hash_block,
            policy=self.policy(),
            min_partial_tokens=self.min_partial_tokens,
        )
        self.now = 0
        self.kept = {}
        self.content = [{} for _ in range(self.num_blocks)]
        self.sequences: list[Sequence] = []
        self.loads = []
        self.leases = []
        self.stored = {}
        self.path_of = {}

    def policy(self):
        return LruPolicy()

    def release(self, table, retention=DEFAULT_RETENTION):
        nodes = [self.cache._blocks.node_of[block] for block in table.block_ids]
        self.cache.release(table, retention)
        for node in nodes:
            if node is not None:
                self.kept.setdefault(node, []).append(retention)

    def hash_block(self, parent, tokens):
        return hashlib.sha256(parent + tokens).digest()[: self.hash_bits // 8]

    def write(self, sequence, position):
        block = sequence.table.block_ids[position // self.block_size]
        self.content[block][position % self.block_size] = (sequence.namespace, tuple(sequence.tokens[: position + 1]))

    def check_content(self, sequence, num_tokens):
        for position in range(num_tokens):
            block = sequence.table.block_ids[position // self.block_size]
            expected = (sequence.namespace, tuple(sequence.tokens[: position + 1]))
            assert self.content[block][position % self.block_size] == expected

    def pick(self, data, predicate=lambda sequence: True):
        candidates = [sequence for sequence in self.sequences if predicate(sequence)]
        return data.draw(st.sampled_from(candidates)) if candidates else None

    def state(self):
        cache = self.cache
        return (cache.num_free, cache.num_cached, cache.num_used, cache.num_shared, cache.stats(), cache.pins())

    # ------------------------------------------------------------------------------------------------ rules

    @rule(tokens=tokens_strategy, namespace=st.sampled_from(NAMESPACES), counts_use=st.booleans(), reserve=st.integers(0, 2))
    def allocate(self, tokens, namespace, counts_use, reserve):
        before = self.state()
        match = self.cache.match(pack_tokens(tokens), namespace)
        assert self.state() == before
        assert match.num_tokens < len(tokens)
        self.check_partial(match, tokens)
        needed = self.cache.blocks_for(len(tokens)) - len(match.nodes)
        table = self.cache.allocate(match, len(tokens), counts_use=counts_use, reserve_blocks=reserve)
        if table is None:
            assert self.state() == before
            return
        assert needed + reserve <= before[0] + before[1]
        whole = len(match.nodes) * self.block_size
        assert table.num_cached_tokens == (whole if table.partial is None else match.num_tokens)
        assert not (table.partial and table.waits_for)
        sequence = Sequence(table, namespace, list(tokens))
        self.check_content(sequence, whole - self.block_size * len(table.waits_for))
        self.sequences.append(sequence)

    def check_partial(self, match, tokens):
        """The match ends as deep in a block as any ready one below its last node allows, by comparing with all."""
        whole = len(match.nodes) * self.block_size
        rest = tokens[whole : min(len(tokens) - 1, whole + self.block_size)]
        longest = 0
        for node in self.cache._blocks.tree.nodes():
            parent = match.nodes[-1] if match.nodes else None
            is_child = node.parent is parent if parent else node.depth == 0 and node.namespace == match.namespace
            if is_child and node.is_ready:
                same = [a == b for a, b in zip(rest, unpack_tokens(node.token_ids), strict=False)]
                longest = max(longest, same.index(False) if False in same else len(same))
        assert match.num_tokens == whole + (longest if longest >= self.min_partial_tokens else 0)

    def start(self, sequence):
        """The sequence's first step: what it was given of a block is copied; the source may go once the step is submitted, be it then or later."""
        copy = sequence.table.partial
        if copy is not None and not sequence.has_begun:
            self.content[copy.target] = dict(self.content[copy.source])
        sequence.has_begun = True

    @rule(data=st.data())
    def submitted(self, data):
        sequence = self.pick(data, lambda s: s.has_begun)
        if sequence is not None:
            self.cache.end_copy(sequence.table)

    @rule(data=st.data())
    def compute_prompt(self, data):
        sequence = self.pick(data, lambda s: s.num_computed < len(s.tokens) and not s.table.waits_for)
        if sequence is None:
            return
        upto = data.draw(st.integers(sequence.num_computed + 1, len(sequence.tokens)))
        self.start(sequence)
        self.check_content(sequence, sequence.num_computed)
        for position in range(sequence.num_computed, upto):
            self.write(sequence, position)
        sequence.num_computed = upto
        done = [node for node in sequence.table.fills if (node.depth + 1) * self.block_size <= upto]
        self.cache.complete_fill(done)
        if upto == len(sequence.tokens):
            self.cache.record(sequence.table, pack_tokens(sequence.tokens), upto)

    @rule(data=st.data(), token=st.integers(0, 1), count=st.integers(1, 3))
    def decode(self, data, token, count):
        sequence = self.pick(data, lambda s: s.num_computed == len(s.tokens))
        if sequence is None:
            return
        self.cache.end_copy(sequence.table)
        before = self.state()
        target = len(sequence.tokens) + count
        copies = self.cache.extend(sequence.table, target)
        if copies is None:
            assert self.state() == before
            return
        for copy in copies:
            self.content[copy.target] = dict(self.content[copy.source])
            assert sequence.table.block_ids[copy.index] == copy.target
        self.check_content(sequence, sequence.num_computed)
        for _ in range(count):
            sequence.tokens.append(token)
            self.write(sequence, len(sequence.tokens) - 1)
        sequence.num_computed = target
        self.cache.record(sequence.table, bytearray(pack_tokens(sequence.tokens)), target)
        self.check_content(sequence, target)

    @rule(data=st.data(), drafted=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def draft(self, data, drafted):
        """Positions are computed of which only the first stay; the blocks of the others remain."""
        sequence = self.pick(data, lambda s: s.num_computed == len(s.tokens))
        if sequence is None:
            return
        self.cache.end_copy(sequence.table)
        num_kept = data.draw(st.integers(0, len(drafted)))
        copies = self.cache.extend(sequence.table, len(sequence.tokens) + len(drafted))
        if copies is None:
            return
        for copy in copies:
            self.content[copy.target] = dict(self.content[copy.source])
        kept = [*sequence.tokens, *drafted[:num_kept]]
        sequence.tokens += drafted
        for position in range(sequence.num_computed, len(sequence.tokens)):
            self.write(sequence, position)
        sequence.tokens = kept
        sequence.num_computed = len(kept)
        blocks = list(sequence.table.block_ids)
        self.cache.record(sequence.table, bytearray(pack_tokens(kept)), len(kept))
        self.cache.rewind(sequence.table, len(kept))
        assert sequence.table.block_ids == blocks
        self.check_content(sequence, len(kept))

    @rule(data=st.data())
    def fork(self, data):
        sequence = self.pick(data, lambda s: s.num_computed == len(s.tokens))
        if sequence is not None and len(self.sequences) < 8:
            forked = Sequence(self.cache.fork(sequence.table), sequence.namespace, list(sequence.tokens))
            forked.num_computed = sequence.num_computed
            self.sequences.append(forked)

    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.pick(data, lambda s: s.num_computed == len(s.tokens))
        if sequence is not None:
            keep = data.draw(st.integers(1, len(sequence.tokens)))
            self.cache.end_copy(sequence.table)
            self.cache.truncate(sequence.table, keep)
            del sequence.tokens[keep:]
            sequence.num_computed = keep

    @rule(data=st.data(), retention=retentions)
    def finish_or_fail(self, data, retention):
        sequence = self.pick(data)
        if sequence is None:
            return
        affected = self.cache.fail_fill(list(sequence.table.fills))
        assert sequence.table not in affected
        by_table = {s.table: s for s in self.sequences}
        for table in affected:
            assert table.is_broken
            assert not table.fills
        for table in (sequence.table, *affected):
            self.release(table, Retention(retention[0], self.now + retention[1]))
            self.sequences.remove(by_table[table])

    @rule(name=names, tokens=tokens_strategy, namespace=st.sampled_from(NAMESPACES))
    def pin(self, name, tokens, namespace):
        before = self.state()
        try:
            num_blocks = self.cache.pin(name, pack_tokens(tokens), namespace)
        except (PinCapacityError, PinNotReadyError, PinTooShortError):
            assert self.state() == before
            return
        assert num_blocks == len(tokens) // self.block_size
        assert self.cache.pinned_blocks <= self.cache.max_pinned_blocks
        assert self.cache.pins()[name].num_tokens == num_blocks * self.block_size

    @rule(name=names)
    def unpin(self, name):
        assert self.cache.unpin(name) == (name in self.shadow_pins)

    @rule(
        tokens=tokens_strategy,
        namespace=st.sampled_from(NAMESPACES),
        origin=st.sampled_from([BlockOrigin.RESTORED, BlockOrigin.RECOMPUTED]),
    )
    def begin_load(self, tokens, namespace, origin):
        before = self.state()
        packed, size = pack_tokens(tokens), 4 * self.block_size
        chain = [(packed[i : i + size], 1) for i in range(0, len(packed) // size * size, size)]
        targets = self.cache.begin_load(namespace, chain, origin)
        if targets is None:
            assert self.state() == before
        elif targets:
            self.kept.update((target.node, [Retention()]) for target in targets)
            first = targets[0].node.depth
            assert [t.node.depth for t in targets] == list(range(first, len(chain)))
            self.loads.append((namespace, tokens, targets))

    @precondition(lambda self: self.loads)
    @rule(succeeds=st.booleans())
    def end_load(self, succeeds):
        namespace, tokens, targets = self.loads.pop(0)
        if succeeds:
            for target in targets:
                if target.node.in_tree:
                    end = (target.node.depth + 1) * self.block_size
                    for position in range(end - self.block_size, end):
                        self.content[target.block_id][position % self.block_size] = (namespace, tuple(tokens[: position + 1]))
            self.cache.complete_fill([target.node for target in targets])
            return
        by_table = {s.table: s for s in self.sequences}
        for table in self.cache.fail_fill([target.node for target in targets]):
            self.release(table)
            self.sequences.remove(by_table[table])

    @rule(tokens=st.lists(st.integers(0, 1), max_size=8), namespace=st.sampled_from(NAMESPACES))
    def forget(self, tokens, namespace):
        prefix = pack_tokens(tokens[: len(tokens) // self.block_size * self.block_size])
        selection = Selection("", namespace.tenant_salt, prefix)
        others = {node for node in self.cache._blocks.tree.nodes() if not self.is_in(node, selection)}
        pins = {name: hashes for name, hashes in self.shadow_pins.items() if self.cache.pins()[name].namespace != namespace}
        num_blocks, affected = self.cache.forget(selection)
        by_table = {s.table: s for s in self.sequences}
        for table in affected:
            assert table.is_broken
            self.release(table)
            self.sequences.remove(by_table[table])
        left = set(self.cache._blocks.tree.nodes())
        assert not any(self.is_in(node, selection) for node in left)
        assert pins.keys() <= self.cache.pins().keys()
        for node in others - left:  # what led to it alone
            assert selection.may_hold(node.namespace.tenant_salt, self.path_of[node])
        assert num_blocks >= len(others - left)

    def is_in(self, node, selection):
        tokens = self.path_of[node] = PrefixInfo.of(node, 0).token_ids
        return selection.holds(node.namespace.tenant_salt, tokens)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def lease(self, data):
        block_hash, block = data.draw(st.sampled_from(sorted(self.stored)))
        assert self.cache.lease(block, block_hash)
        assert not self.cache.lease(block, b"x" * 32)
        self.leases.append((block, dict(self.content[block])))

    @precondition(lambda self: self.leases)
    @rule()
    def end_lease(self):
        block, content = self.leases.pop(0)
        assert self.content[block] == content
        self.cache.end_lease(block)

    @rule(max_blocks=st.integers(0, 4))
    def evict(self, max_blocks):
        missing = max(0, self.cache.watermark_blocks - self.cache.num_free)
        free = self.cache.num_free
        self.check_next_victim()
        num_evicted = self.cache.evict_to_watermark(max_blocks)
        assert num_evicted <= min(max_blocks, missing)
        assert self.cache.num_free == free + num_evicted

    @rule(passed=st.integers(1, 3))
    def expire(self, passed):
        self.now += passed
        while self.cache.expire_retention(self.now, 2):
            pass
        assert self.cache.expire_retention(self.now, 100) == 0

    def check_next_victim(self):
        """The next to leave has the lowest priority of all that could."""
        blocks = self.cache._blocks
        evictable = [node for node in blocks.tree.nodes() if blocks.is_evictable(node)]
        victim = blocks._queue.pop()
        assert (victim is None) == (not evictable)
        if victim is not None:
            assert victim.priority == min(node.priority for node in evictable)
            blocks.settle(victim)

    # ------------------------------------------------------------------------------------------ invariants

    shadow_pins: dict

    @invariant()
    def everything_adds_up(self):
        self.cache.check_invariants()
        for node in self.cache._blocks.tree.nodes():  # the highest that a use gave and that has not ended
            counting = [each.priority for each in self.kept.get(node, ()) if each.expires_s > self.now]
            assert node.priority == max(counting, default=0)
        if not hasattr(self, "shadow_pins"):
            self.shadow_pins = {}
        for event in self.cache.take_events():
            match event:
                case BlockStored():
                    parents = {event.namespace.root} | {h for h, _ in self.stored}
                    assert event.parent_hash in parents
                    assert (event.depth == 0) == (event.parent_hash == event.namespace.root) or self.hash_bits < 256
                    prefix = self.content[event.block_id][self.block_size - 1]
                    assert prefix[0] == event.namespace
                    assert prefix[1][-self.block_size :] == tuple(unpack_tokens(event.token_ids))
                    assert len(prefix[1]) == (event.depth + 1) * self.block_size
                    self.stored[event.block_hash, event.block_id] = prefix
                case BlockRemoved():
                    del self.stored[event.block_hash, event.block_id]
                case BlocksUsed():
                    assert event.block_hashes
                    assert set(event.block_hashes) <= {h for h, _ in self.stored}
                case BlocksPinned():
                    self.shadow_pins[event.name] = event.block_hashes
                case BlocksUnpinned():
                    assert self.shadow_pins.pop(event.name) == event.block_hashes
        assert set(self.shadow_pins) == set(self.cache.pins())
        for (_, block), prefix in self.stored.items():  # what the tree calls ready holds exactly what it says
            assert self.content[block][self.block_size - 1] == prefix
        for sequence in self.sequences:
            if not sequence.table.waits_for and sequence.has_begun:
                self.check_content(sequence, sequence.num_computed)
            copy = sequence.table.partial
            if copy is not None:  # held until it was copied, whatever becomes of its node
                end = sequence.table.num_cached_tokens
                expected = (sequence.namespace, tuple(sequence.tokens[:end]))
                assert self.content[copy.source][(end - 1) % self.block_size] == expected

    def teardown(self):
        for sequence in self.sequences:
            self.cache.fail_fill(list(sequence.table.fills))
        for sequence in self.sequences:
            self.cache.release(sequence.table)
        for _, _, targets in self.loads:
            self.cache.fail_fill([target.node for target in targets])
        for block, _ in self.leases:
            self.cache.end_lease(block)
        for name in list(self.cache.pins()):
            self.cache.unpin(name)
        self.cache.check_invariants()
        assert self.cache.num_used == 0
        self.cache.watermark_blocks = self.num_blocks
        self.cache.evict_to_watermark(self.num_blocks)
        assert self.cache.num_free == self.num_blocks


class CostCacheMachine(CacheMachine):
    def policy(self):
        return CostPolicy(self.num_blocks, self.block_size)


class CollidingCacheMachine(CostCacheMachine):
    """With an 8-bit hash nearly everything collides; contents must still be right."""

    hash_bits = 8


class LargerBlocksMachine(CacheMachine):
    block_size = 4
    num_blocks = 7
    min_partial_tokens = 2


CONFIG = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
FULL = settings(CONFIG, max_examples=2000, stateful_step_count=80)


@pytest.mark.parametrize("machine", [CacheMachine, CostCacheMachine, CollidingCacheMachine, LargerBlocksMachine])
def test_cache_machine(machine):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=CONFIG)


@pytest.mark.full
@pytest.mark.parametrize("machine", [CacheMachine, CostCacheMachine, CollidingCacheMachine, LargerBlocksMachine])
def test_cache_machine_for_long(machine):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=FULL)
