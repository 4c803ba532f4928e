"""Which blocks are written under which policy, in every order of events; what the governor calls itself; what expires first."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvd.cache.hashing import Namespace
from kvd.cli.status import GOVERNORS
from kvd.storage.governor import IDLE_AFTER_S, Governor, HeldBy
from kvd.storage.hot_blocks import HotBlocks, WritePolicy
from kvd.storage.node_index import IndexNode, NodeIndex
from kvd.types import BlockHash, BlockId

pytestmark = pytest.mark.store

NAMESPACE = Namespace(b"f" * 32)
DAY_S = 86400.0
DWELL_S = 10.0
NOTHING_S = 0.0
SELECTIVE, THROUGH, SHUTDOWN = WritePolicy.SELECTIVE, WritePolicy.THROUGH, WritePolicy.SHUTDOWN


def new_index(**arguments) -> NodeIndex:
    index = NodeIndex(100, **arguments)
    index.add_namespace(NAMESPACE)
    return index


def add(index: NodeIndex, number: int, parent: IndexNode | None = None) -> IndexNode:
    node = index.insert(NAMESPACE.root, NAMESPACE.root if parent is None else parent.block_hash, number.to_bytes(4, "little") * 16)
    assert node is not None
    return node


def resident(index: NodeIndex, number: int = 0, parent: IndexNode | None = None) -> IndexNode:
    node = add(index, number, parent)
    node.block_id = BlockId(number)
    return node


# -------------------------------------------------------------------------------- the policy


def fate(policy: WritePolicy, events: tuple[str, ...]) -> str:
    """What becomes of one block after ``events``: ``waits`` to be written, ``dwells``, or neither."""
    index = new_index()
    node = add(index, 0)
    hot = HotBlocks(policy, 8, dwell_s=DWELL_S)
    for event in events:
        if event == "stored":
            node.block_id = BlockId(0)
        elif event == "used":
            node.uses += 1
        elif event == "pinned":
            index.pin("p", node.block_hash)
        elif event == "unpinned":
            index.unpin("p")
        elif event == "removed":
            node.block_id = BlockId(-1)
            hot.discard(node)
            continue
        elif event == "everything":
            hot.everything = True
        hot.consider(node, NOTHING_S)
    assert not (hot.num_waiting and hot.num_dwelling), "in two places"
    assert node.queued == bool(hot.num_waiting)
    return "waits" if hot.num_waiting else "dwells" if hot.num_dwelling else "rests"


@pytest.mark.parametrize(
    ("policy", "events", "expected"),
    [
        (SELECTIVE, ("stored",), "dwells"),
        (SELECTIVE, ("stored", "used"), "waits"),
        (SELECTIVE, ("stored", "removed"), "rests"),
        (SELECTIVE, ("stored", "used", "removed"), "rests"),
        (SELECTIVE, ("stored", "used", "removed", "stored"), "waits"),
        (SELECTIVE, ("stored", "removed", "stored"), "dwells"),
        (SELECTIVE, ("pinned",), "rests"),
        (SELECTIVE, ("pinned", "stored"), "waits"),
        (SELECTIVE, ("stored", "everything"), "waits"),
        (THROUGH, ("stored",), "waits"),
        (THROUGH, ("stored", "used"), "waits"),
        (THROUGH, ("stored", "removed"), "rests"),
        (THROUGH, ("used",), "rests"),
        (SHUTDOWN, ("stored",), "rests"),
        (SHUTDOWN, ("stored", "used", "used"), "rests"),
        (SHUTDOWN, ("stored", "pinned"), "waits"),
        (SHUTDOWN, ("stored", "pinned", "removed"), "rests"),
        (SHUTDOWN, ("stored", "everything"), "waits"),
    ],
)
def test_what_each_policy_makes_of_a_block(policy, events, expected):
    assert fate(policy, events) == expected


def test_the_order_of_what_happens_to_a_resident_block_does_not_matter():
    for policy, events in itertools.product(WritePolicy, (("used", "pinned"), ("used", "everything"), ("pinned", "everything", "used"))):
        fates = {fate(policy, ("stored", *order)) for order in itertools.permutations(events)}
        assert fates == {"waits"}, (policy, events)


def test_pinned_blocks_go_first_and_each_block_goes_once():
    index, hot = new_index(), HotBlocks(THROUGH, 8, dwell_s=DWELL_S)
    nodes = [resident(index, number) for number in range(4)]
    for node in nodes:
        hot.consider(node, NOTHING_S)
    index.pin("p", nodes[2].block_hash)
    for node in nodes:
        hot.consider(node, NOTHING_S)
    taken = []
    while (node := hot.take()) is not None:
        taken.append(node)
        hot.consider(node, NOTHING_S)  # used while under way
    assert taken == [nodes[2], nodes[0], nodes[1], nodes[3]]
    assert hot.num_waiting == 0


def test_no_more_is_under_way_than_may_be():
    index, hot = new_index(), HotBlocks(THROUGH, 2, dwell_s=DWELL_S)
    nodes = [resident(index, number) for number in range(3)]
    for node in nodes:
        hot.consider(node, NOTHING_S)
    assert [hot.take(), hot.take(), hot.take()] == [nodes[0], nodes[1], None]
    assert hot.is_full
    hot.release(nodes[0].block_hash, nodes[0])
    assert hot.take() is nodes[2]


# -------------------------------------------------------------------------------- dwelling


def test_a_block_has_dwelt_after_the_time_from_when_it_came_and_the_oldest_goes_first():
    index, hot = new_index(), HotBlocks(SELECTIVE, 8, dwell_s=DWELL_S)
    first, second = resident(index, 0), resident(index, 1)
    hot.consider(first, 100.0)
    hot.consider(second, 104.0)
    hot.consider(first, 109.0)  # whatever happens to it meanwhile
    assert hot.take_dwelt(109.9) is None
    assert hot.take_dwelt(110.0) is first
    assert hot.take_dwelt(110.0) is None
    assert hot.take_dwelt(114.0) is second
    assert hot.num_under_way == 2


def test_dwelling_blocks_stay_behind_the_hot_ones_and_leave_half_of_the_way_free():
    index, hot = new_index(), HotBlocks(SELECTIVE, 4, dwell_s=DWELL_S)
    once, twice = [resident(index, number) for number in range(4)], resident(index, 9)
    for node in once:
        hot.consider(node, NOTHING_S)
    twice.uses = 2
    hot.consider(twice, 50.0)
    assert hot.take_dwelt(50.0) is None
    assert hot.take() is twice
    assert hot.take_dwelt(50.0) is once[0]
    assert hot.take_dwelt(50.0) is None
    hot.release(twice.block_hash, twice)
    assert hot.take_dwelt(50.0) is once[1]


def test_a_dwelling_block_that_becomes_hot_or_leaves_memory_dwells_no_longer():
    index, hot = new_index(), HotBlocks(SELECTIVE, 4, dwell_s=DWELL_S)
    used, pinned, gone = (resident(index, number) for number in range(3))
    for node in (used, pinned, gone):
        hot.consider(node, NOTHING_S)
    used.uses = 2
    hot.consider(used, NOTHING_S)
    index.pin("p", pinned.block_hash)
    hot.consider(pinned, NOTHING_S)
    assert not hot.discard(gone)
    assert hot.num_dwelling == 0
    assert [hot.take(), hot.take()] == [pinned, used]


def test_the_number_of_dwelling_blocks_has_a_bound(monkeypatch):
    monkeypatch.setattr("kvd.storage.hot_blocks.MAX_DWELLING", 2)
    index, hot = new_index(), HotBlocks(SELECTIVE, 4, dwell_s=DWELL_S)
    nodes = [resident(index, number) for number in range(3)]
    for node in nodes:
        hot.consider(node, NOTHING_S)
    assert hot.num_dwelling == 2
    assert [hot.take_dwelt(99.0), hot.take_dwelt(99.0), hot.take_dwelt(99.0)] == [nodes[0], nodes[1], None]


# -------------------------------------------------------------------------------- the governor


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return 1e9


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def governor(clock) -> Governor:
    return Governor(bytes_per_s=1000, burst_bytes=500, pause_queue_depth=2, clock=clock)


def test_the_rate_is_kept_and_named(governor, clock):
    assert governor.take(500)
    assert not governor.take(300)
    assert governor.state is HeldBy.RATE
    assert governor.delay_s(300) == pytest.approx(0.3)
    clock.now_s += 0.31
    assert governor.take(300)
    governor.let_go()
    assert governor.state is HeldBy.NONE
    assert governor.num_held() == {"rate": 1, "queue": 0, "staging": 0, "in_flight": 0, "disk": 0}


def test_a_deep_queue_pauses_and_is_named(governor):
    governor.queue_depth = 3
    assert not governor.take(1)
    assert not governor.take(1)
    assert governor.state is HeldBy.QUEUE
    governor.queue_depth = 2
    assert governor.take(1)
    assert governor.num_held()["queue"] == 2


def test_what_holds_the_planner_back_is_named_unless_a_copy_itself_is_held(governor):
    governor.hold_grants(HeldBy.DISK)
    assert governor.state is HeldBy.DISK
    governor.hold(HeldBy.STAGING)
    assert governor.state is HeldBy.STAGING
    governor.let_go()
    assert governor.state is HeldBy.DISK
    governor.hold_grants(HeldBy.NONE)
    assert governor.state is HeldBy.NONE
    assert governor.num_held() == {"rate": 0, "queue": 0, "staging": 1, "in_flight": 0, "disk": 1}


def test_every_name_has_its_words_and_its_line_in_the_manual():
    assert set(GOVERNORS) == {name.value for name in HeldBy}
    manual = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert [name.value for name in HeldBy if f"| `{name.value}` |" not in manual] == []


def test_idle_means_that_rounds_without_a_step_go_by_for_a_second(governor, clock):
    governor.on_step(1)
    clock.now_s += 10 * IDLE_AFTER_S  # one long step
    governor.on_step(1)
    assert not governor.is_idle
    clock.now_s += IDLE_AFTER_S
    governor.on_step(1)
    assert governor.is_idle
    governor.on_step(2)
    assert not governor.is_idle


# -------------------------------------------------------------------------------- worth on disk


def stored(index: NodeIndex, number: int, *, uses: int, age_s: float, parent: IndexNode | None = None, now_s: float = 1e9) -> IndexNode:
    node = add(index, number, parent)
    node.uses, node.last_use_unix_s = uses, int(now_s - age_s)
    index.set_stored(node, 100)
    return node


def expiry_order(index: NodeIndex) -> list[BlockHash]:
    order = []
    while index.stored_bytes:
        before = {key for key, node in index.nodes.items() if node.stored_bytes}
        assert index.expire_bytes(1) == 100
        order += [key for key in before if not index.nodes[key].stored_bytes]
    return order


def test_uses_count_half_after_each_half_life():
    index = new_index(uses_half_life_s=DAY_S)
    nodes = [
        stored(index, 0, uses=8, age_s=3 * DAY_S + 60),  # a little under 1
        stored(index, 1, uses=1, age_s=0),
        stored(index, 2, uses=8, age_s=3 * DAY_S - 60),  # a little over 1
        stored(index, 3, uses=100, age_s=6 * DAY_S),  # 1.56
        stored(index, 4, uses=2, age_s=0.25 * DAY_S),  # 1.68
        stored(index, 5, uses=2, age_s=0),
    ]
    assert 2 ** (index.value(nodes[5]) - index.value(nodes[3])) == pytest.approx(2 / (100 / 64))
    assert expiry_order(index) == [node.block_hash for node in nodes]


def test_a_short_half_life_forgets_and_a_long_one_remembers():
    for half_life_s, first in ((60.0, 0), (1e9, 1)):
        index = new_index(uses_half_life_s=half_life_s)
        nodes = [stored(index, 0, uses=50, age_s=3600), stored(index, 1, uses=3, age_s=0)]
        assert expiry_order(index)[0] == nodes[first].block_hash


def test_a_use_after_the_heap_was_made_counts():
    index = new_index()
    nodes = [stored(index, number, uses=number + 1, age_s=0) for number in range(4)]
    assert index.expire_bytes(1) == 100
    nodes[1].uses = 99
    assert expiry_order(index) == [nodes[2].block_hash, nodes[3].block_hash, nodes[1].block_hash]


def test_a_pin_made_and_ended_after_the_heap_was_made_counts():
    index = new_index()
    nodes = [stored(index, number, uses=number + 1, age_s=0) for number in range(4)]
    assert index.expire_bytes(1) == 100
    index.pin("p", nodes[1].block_hash)
    assert index.expire_bytes(1) == 100
    assert not nodes[2].stored_bytes
    index.unpin("p")
    assert index.expire_bytes(1) == 100
    assert not nodes[1].stored_bytes


def test_a_block_never_goes_before_what_hangs_below_it():
    index = new_index()
    parent = stored(index, 0, uses=1, age_s=5 * DAY_S)
    child = stored(index, 1, uses=1, age_s=0, parent=parent)
    other = stored(index, 2, uses=1, age_s=DAY_S)
    assert expiry_order(index) == [other.block_hash, child.block_hash, parent.block_hash]


def test_a_block_that_comes_back_to_disk_expires_again():
    index = new_index()
    node = stored(index, 0, uses=1, age_s=0)
    for _ in range(3):
        assert index.expire_bytes(1) == 100
        index.set_stored(node, 100)
    index.forget_stored()
    assert index.expire_bytes(1) == 0
    index.set_stored(node, 100)
    assert index.expire_bytes(1) == 100


def test_what_a_wrong_clock_called_its_last_use_is_not_believed():
    now_s = 10**9
    source = new_index()
    rows = [stored(source, 0, uses=1, age_s=-50 * 365 * DAY_S).row(), stored(source, 1, uses=2, age_s=0).row()]
    index = new_index(now_unix_s=now_s)
    index.load([NAMESPACE], rows, [])
    for node in index.nodes.values():
        index.set_stored(node, 100)
    assert expiry_order(index) == [row.block_hash for row in rows]


def test_expiring_costs_by_the_block_and_not_by_the_index(monkeypatch):
    """A full disk grants one block at a time: the ranks that are looked at must not grow with what is on disk."""
    index = new_index()
    nodes = [stored(index, number, uses=1 + number % 7, age_s=number) for number in range(2000)]
    index.expire_bytes(1)
    looks = 0
    rank = index.rank

    def counted(node: IndexNode):
        nonlocal looks
        looks += 1
        return rank(node)

    monkeypatch.setattr(index, "rank", counted)
    for number in range(500):
        fresh = stored(index, 10_000 + number, uses=3, age_s=0)
        nodes[number * 3].uses += 1
        assert index.expire_bytes(1) == 100
        assert fresh.stored_bytes
    assert looks < 500 * 5
