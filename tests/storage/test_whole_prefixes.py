"""A block on disk is of use with all above it alone: where there is not room for all, whole prefixes stay."""

from __future__ import annotations

import pytest
from storage_harness import SystemClock, World, prompt

from kvd.cache.hashing import Namespace
from kvd.storage.hot_blocks import HotBlocks, WritePolicy
from kvd.storage.node_index import IndexNode, NodeIndex

pytestmark = pytest.mark.store

CONFIG = {"store_max_bytes": 8 << 20, "num_blocks": 400, "row_bytes": 60_000}


class LaterClock(SystemClock):
    later_s = 0.0

    def unix(self) -> float:
        return super().unix() + self.later_s


@pytest.mark.parametrize("num_uses", [1, 2])
def test_newer_prompts_that_do_not_all_fit_leave_no_blocks_that_lack_those_above_them(tmp_path, num_uses):
    """A deep block is worth more than one above it, for it costs more to compute, and than one of an older prompt, and the oldest yield to it."""
    clock = LaterClock()
    world = World(tmp_path, clock=clock, **CONFIG)
    budget = world.storage._running.budget
    room = budget.max_block_bytes // budget.block_bytes
    for number in range(room // 5):
        for _ in range(num_uses):
            world.ask(prompt(number, 81))
    for number in range(room // 5, 60):
        clock.later_s += 60.0
        for _ in range(num_uses):
            world.ask(prompt(number, 81))
    world.stop()
    nodes = world.storage._running.recovered.index.nodes.values()
    assert not [node for node in nodes if node.stored_bytes and node.parent is not None and not node.parent.stored_bytes]
    world = World(tmp_path, **CONFIG)
    assert world.report.num_blocks == world.storage.status()["blocks"] >= room - 5
    world.stop()


def test_a_block_finds_no_room_in_the_place_of_the_one_above_it():
    index, namespace = NodeIndex(100), Namespace(b"f" * 32)
    index.add_namespace(namespace)
    above = index.insert(namespace.root, namespace.root, prompt(0, 16))
    other = index.insert(namespace.root, namespace.root, prompt(1, 16))
    below = index.insert(namespace.root, above.block_hash, prompt(2, 16))
    for node, uses in ((above, 1), (other, 2), (below, 9)):
        node.uses = uses
    for node in (above, other):
        index.set_stored(node, 100)
    assert index.expire_bytes(100, below=index.rank(below), keep={above.block_hash}) == 100
    assert (above.stored_bytes, other.stored_bytes) == (100, 0)
    assert index.expire_bytes(100, below=index.rank(below), keep={above.block_hash}) == 0
    assert index.expire_bytes(100, below=index.rank(below)) == 100, "it is held no more"


def test_what_is_above_blocks_under_way_is_known_until_they_are_settled():
    index, namespace = NodeIndex(100), Namespace(b"f" * 32)
    index.add_namespace(namespace)
    above = index.insert(namespace.root, namespace.root, prompt(0, 16))
    hot = HotBlocks(WritePolicy.THROUGH, 8, dwell_s=0.0)
    for _ in range(2):  # the second time it was forgotten while its copy was under way, and has come again
        below = IndexNode(b"b" * 32, namespace.root, above, prompt(1, 16))
        below.block_id = 1
        hot.consider(below, 0.0)
        assert hot.take() is below
        assert hot.above_under_way == {above.block_hash: 1}
    hot.release(below.block_hash, below)
    assert (hot.num_under_way, hot.above_under_way) == (0, {})
