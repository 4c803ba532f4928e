"""The cold tier over a real store: bytes that left memory come back checked, and whatever happens meanwhile ends the load with what was good."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from storage_harness import BLOCK_TOKENS, ROW_BYTES, World, chain_of, crash, prompt, row_of

from kvd.cache.events import BlockStored
from kvd.commands import LoadDone
from kvd.storage import cold_tier, store_thread

pytestmark = pytest.mark.store

PROMPT = prompt(0, 161)
NUM_BLOCKS = 10


@pytest.fixture
def may_read(monkeypatch) -> threading.Event:
    """The cold reader waits before each part until this is set."""
    event = threading.Event()

    def wait(_: str) -> None:
        assert event.wait(60)

    monkeypatch.setattr(cold_tier, "failpoint_translated", wait)
    return event


def blocks_of(token_ids: bytes) -> list[bytes]:
    size = 4 * BLOCK_TOKENS
    return [token_ids[start : start + size] for start in range(0, len(token_ids) - size, size)]


def cold_world(state_dir: Path, **config) -> World:
    """A world in whose store the prompt's blocks are, and in whose memory they are not."""
    world = World(state_dir, **config)
    for _ in range(2):
        world.ask(PROMPT)
    assert world.checkpoint().num_blocks == NUM_BLOCKS
    forget_memory(world)
    return world


def forget_memory(world: World) -> None:
    world.cache._blocks.evict(world.cache.num_blocks)
    world.tick()
    planner = world.storage._running.planner
    world.until(lambda: not planner._mail)


def begin(world: World, token_ids: bytes = PROMPT, load_id: int = 1):
    """As the scheduler does: look up, make room, start."""
    blocks = blocks_of(token_ids)
    uses = world.storage.cold_tier.lookup(world.namespace, world.namespace.root, blocks)
    targets = world.cache.begin_load(world.namespace, list(zip(blocks, uses, strict=False)))
    world.storage.cold_tier.start_load(load_id, world.namespace, targets)
    return targets


def end(world: World, targets, load_id: int = 1) -> LoadDone:
    """Wait for the load, and do what the scheduler does then."""
    done = world.until(lambda: next((each for each in world.inbox.commands if getattr(each, "load_id", None) == load_id), None))
    nodes = [target.node for target in targets]
    world.cache.complete_fill(nodes[: done.num_loaded])
    world.cache.fail_fill(nodes[done.num_loaded :])
    world.tick()
    world.cache.check_invariants()
    return done


def damage(state_dir: Path, key: bytes) -> None:
    """Flip a bit of the block's row under the open store, behind a page's header and the value's. Where lmdb has used the memory of that page for another one
    since, whose rest it leaves unwritten, the row lies there as well."""
    (path,) = state_dir.glob("kv/*/data.mdb")
    data, row = path.read_bytes(), row_of(key)
    offsets = [start for start in range(16 + 96, len(data), 4096) if data.startswith(row, start)]
    assert offsets
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset + 17)
            file.write(bytes([row[17] ^ 4]))


def test_blocks_that_left_memory_come_back_with_their_bytes(tmp_path):
    world = cold_world(tmp_path)
    assert world.cache.match(PROMPT, world.namespace).num_tokens == 0
    done = end(world, begin(world))
    assert done == LoadDone(1, NUM_BLOCKS, "")
    assert world.ask(PROMPT) == 160
    assert world.num_restored == 160
    stats = world.storage.stats()
    assert (stats["cold_lookups"], stats["cold_loads"], stats["cold_loaded_blocks"]) == (1, 1, NUM_BLOCKS)
    assert stats["cold_loaded_bytes"] == NUM_BLOCKS * ROW_BYTES
    assert stats["cold_load_ms_max"] > 0
    assert stats["cold_bytes_per_s"] > 0
    world.stop()


def test_the_uses_of_the_past_come_along(tmp_path):
    world = cold_world(tmp_path)
    uses = world.storage.cold_tier.lookup(world.namespace, world.namespace.root, blocks_of(PROMPT))
    assert list(uses) == [2] * NUM_BLOCKS
    world.stop()


def test_a_load_larger_than_the_staging_memory_goes_through_it_in_parts(tmp_path):
    world = cold_world(tmp_path, checkpoint_bytes_per_step=2 * ROW_BYTES)
    assert end(world, begin(world)).num_loaded == NUM_BLOCKS
    assert world.ask(PROMPT) == 160
    world.stop()


@pytest.mark.parametrize("index", [0, 3, 9])
def test_a_damaged_block_ends_the_load_and_leaves_the_disk(tmp_path, index):
    world = cold_world(tmp_path)
    key = chain_of(PROMPT, world.namespace)[index]
    damage(tmp_path, key)
    assert end(world, begin(world)) == LoadDone(1, index, "checksum")
    stats = world.storage.stats()
    assert (stats["cold_failed_blocks"], stats["cold_failed_loads"]) == (NUM_BLOCKS - index, {"checksum": 1})
    world.until(lambda: not world.storage.block_on_disk(key)[0])
    assert world.ask(PROMPT) == 16 * index
    assert not world.checkpoint().error
    assert world.storage.block_on_disk(key)[0], "it was computed again, and written again"
    forget_memory(world)
    assert end(world, begin(world, load_id=2), 2).num_loaded == NUM_BLOCKS
    world.ask(PROMPT)
    world.stop()
    world = World(tmp_path)
    assert world.report.dropped == {}
    world.stop()


def test_a_damaged_block_is_not_offered_after_a_crash_either(tmp_path):
    world = cold_world(tmp_path, checkpoint_interval_s=1000.0)
    key = chain_of(PROMPT, world.namespace)[4]
    damage(tmp_path, key)
    end(world, begin(world))
    world.until(lambda: not world.storage.block_on_disk(key)[0])
    world.until_logged()
    crash(world)
    world = World(tmp_path)
    assert (world.report.num_blocks, world.report.dropped) == (4, {})
    world.stop()


def test_bytes_that_expired_since_the_look_up_are_a_miss_and_no_damage(tmp_path, may_read):
    world = cold_world(tmp_path)
    key = chain_of(PROMPT, world.namespace)[6]
    planner, index, last_lsn = world.storage._running.planner, world.storage._running.recovered.index, world.storage._running.wal.last_lsn
    targets = begin(world)

    class Expire:
        pass

    planner.handle(Expire, lambda _: index.drop_bytes(index.nodes[key]))
    planner.post(Expire())
    assert not world.checkpoint().error
    may_read.set()
    assert end(world, targets) == LoadDone(1, 6, "missing")
    world.until(lambda: not planner._mail)
    assert world.storage._running.wal.last_lsn == last_lsn, "nothing is logged of it"
    world.stop()


def test_a_generation_that_is_set_aside_meanwhile_fails_the_load(tmp_path, arm, monkeypatch, may_read):
    monkeypatch.setattr(store_thread, "_RETRY_MIN_S", 1000.0)  # nothing takes its place as long as this lasts
    world = cold_world(tmp_path)
    arm("store.before_commit=raise")
    targets = begin(world)
    world.ask(prompt(1, 33))
    world.until(lambda: world.storage.status()["degraded"])
    may_read.set()
    assert end(world, targets) == LoadDone(1, 0, "no_store")
    assert list(world.storage.cold_tier.lookup(world.namespace, world.namespace.root, blocks_of(PROMPT))) == []
    assert world.ask(PROMPT) == 0
    world.stop(clean=False)


def test_a_store_is_not_closed_under_its_reader(tmp_path, arm):
    world = cold_world(tmp_path)
    thread = world.storage._running.store
    closed = threading.Event()
    with thread.reading() as store:
        close = store.close
        store.close = lambda: (closed.set(), close())
        arm("store.before_commit=raise")
        world.ask(prompt(1, 33))
        world.until(lambda: thread._store is None)
        assert not closed.wait(0.2)
        with store.reading_blocks() as reader:
            assert reader.get("target", chain_of(PROMPT, world.namespace)[0]) is not None
        with thread.reading() as nothing:
            assert nothing is None, "nobody comes to read it any more"
    assert closed.wait(60)
    world.stop(clean=False)


def test_a_block_that_is_another_s_by_now_is_not_written(tmp_path):
    world = cold_world(tmp_path)
    tier = world.storage.cold_tier
    targets = begin(world)
    world_until_read(world)
    world.cache.fail_fill([targets[4].node])
    rows = {target.block_id: bytes(world.runner.row(target.block_id)) for target in targets[4:]}
    assert end(world, targets) == LoadDone(1, 4, "parent_failed")
    assert {block_id: bytes(world.runner.row(block_id)) for block_id in rows} == rows
    assert tier.stats()["cold_failed_blocks"] == NUM_BLOCKS - 4
    world.stop()


def world_until_read(world: World) -> None:
    """Until the reader has done its part, with nothing handed over yet."""
    tier = world.storage.cold_tier
    end_of_wait = threading.Event()
    for _ in range(12_000):
        if any(batch.is_last for batch in list(tier._batches)):
            return
        end_of_wait.wait(0.005)
    raise AssertionError("the reader does not read")


def test_loads_end_in_the_order_in_which_they_were_begun(tmp_path, arm):
    world = cold_world(tmp_path)
    world.ask(prompt(1, 81))
    world.ask(prompt(1, 81))
    assert not world.checkpoint().error
    forget_memory(world)
    arm("cold.before_read=sleep:0.05")
    first = begin(world, PROMPT, 1)
    second = begin(world, prompt(1, 81), 2)
    end(world, second, 2)
    assert [each.load_id for each in world.inbox.commands if isinstance(each, LoadDone)] == [1, 2]
    end(world, first, 1)
    world.stop()


def test_a_reader_that_stumbles_fails_the_load_and_reads_the_next(tmp_path, arm):
    world = cold_world(tmp_path)
    arm("cold.before_read=raise")
    assert end(world, begin(world)) == LoadDone(1, 0, "store_fault")
    assert len(world.log.named("cold.store_fault")) == 1
    assert end(world, begin(world, load_id=2), 2).num_loaded == NUM_BLOCKS
    world.stop()


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_part_that_does_not_reach_the_pool_ends_the_load_with_the_parts_before_it(tmp_path, arm, at):
    world = cold_world(tmp_path, checkpoint_bytes_per_step=2 * ROW_BYTES)
    arm(f"cold.before_copy_in=raise@{at}")
    assert end(world, begin(world)) == LoadDone(1, 2 * (at - 1), "executor")
    assert world.ask(PROMPT) == 32 * (at - 1)
    forget_memory(world)
    assert end(world, begin(world, load_id=2), 2).num_loaded == NUM_BLOCKS
    assert world.ask(PROMPT) == 160
    world.stop()


def test_a_disk_that_hangs_holds_nobody_up(tmp_path, may_read):
    world = cold_world(tmp_path, cold_tier_timeout_s=0.2, checkpoint_bytes_per_step=4 * ROW_BYTES)
    tier = world.storage.cold_tier
    first = begin(world)
    assert end(world, first) == LoadDone(1, 0, "timeout")
    assert list(tier.lookup(world.namespace, world.namespace.root, blocks_of(PROMPT))) == [], "nothing is asked of a disk that hangs"
    assert world.ask(PROMPT) == 0
    rows = bytes(world.runner.memory)
    may_read.set()
    world.until(lambda: tier._reading is None)
    world.tick()
    assert bytes(world.runner.memory) == rows, "what comes late is not used"
    tier._timeout_s = 60.0
    forget_memory(world)
    assert end(world, begin(world, load_id=3), 3).num_loaded == NUM_BLOCKS
    assert world.ask(PROMPT) == 160
    world.stop()


def test_an_executor_that_fails_ends_the_load(tmp_path):
    world = cold_world(tmp_path)
    world.runner.write_blocks = None
    assert end(world, begin(world)) == LoadDone(1, 0, "executor")
    assert end(world, begin(world, load_id=2), 2) == LoadDone(2, 0, "executor")
    world.stop(clean=False)


def test_only_what_equals_the_tokens_under_the_same_parent_is_found(tmp_path):
    world = cold_world(tmp_path)
    tier, root, blocks = world.storage.cold_tier, world.namespace.root, blocks_of(PROMPT)
    chain = chain_of(PROMPT, world.namespace)
    assert len(tier.lookup(world.namespace, chain[3], blocks[4:])) == NUM_BLOCKS - 4
    assert not tier.lookup(world.namespace, root, blocks[4:])
    assert not tier.lookup(world.namespace, root, [bytes(64)])
    nodes = world.storage._running.recovered.index.nodes
    nodes[chain[2]].token_ids = bytes(64)  # a colliding hash
    assert len(tier.lookup(world.namespace, root, blocks)) == 2
    nodes[chain[1]].is_suspect = True
    assert len(tier.lookup(world.namespace, root, blocks)) == 1
    nodes[chain[0]].root = bytes(32)
    assert not tier.lookup(world.namespace, root, blocks)
    crash(world)


def test_a_broken_planner_ends_the_cold_tier(tmp_path, monkeypatch):
    """It would not hear of a bad block, which would be offered and fail again and again."""
    world = cold_world(tmp_path)
    tier, planner = world.storage.cold_tier, world.storage._running.planner
    assert len(tier.lookup(world.namespace, world.namespace.root, blocks_of(PROMPT))) == NUM_BLOCKS

    def fails(_):
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setitem(planner._handlers, BlockStored, fails)
    world.ask(prompt(3, 81))
    world.until(lambda: planner.degraded_reason)
    world.until(lambda: not tier.lookup(world.namespace, world.namespace.root, blocks_of(PROMPT)))
    assert world.ask(PROMPT) == 0
    world.stop()


def test_what_a_start_leaves_on_disk_is_its_cold_tier(tmp_path):
    world = cold_world(tmp_path)
    assert world.stop()
    world = World(tmp_path, rehydrate_max_fraction=0.0625, num_blocks=64)
    assert world.report.num_blocks == 4
    assert end(world, begin(world)).num_loaded == NUM_BLOCKS - 4
    assert world.ask(PROMPT) == 160
    assert world.num_restored == 160
    world.stop()


def test_what_is_slower_is_refused_and_tried_again_now_and_then(tmp_path):
    world = cold_world(tmp_path)
    tier = world.storage.cold_tier
    end(world, begin(world))
    forget_memory(world)
    tier.note_prefill(1 << 20, 1e-6)
    lookups = [len(tier.lookup(world.namespace, world.namespace.root, blocks_of(PROMPT))) for _ in range(64)]
    assert lookups == ([0] * 31 + [8]) * 2
    assert tier.stats()["cold_refused_slower"] == 64
    assert len(world.log.named("cold.slower")) == 64
    for _ in range(3):
        tier.note_prefill(1 << 20, 1e9)
    assert len(tier.lookup(world.namespace, world.namespace.root, blocks_of(PROMPT))) == NUM_BLOCKS
    world.stop()


def test_always_loads_what_is_slower(tmp_path):
    world = cold_world(tmp_path, cold_tier="always")
    end(world, begin(world))
    world.storage.note_prefill(1 << 20, 1e-6)
    assert len(world.storage.cold_tier.lookup(world.namespace, world.namespace.root, blocks_of(PROMPT))) == NUM_BLOCKS
    world.stop()


def test_never_has_no_cold_tier(tmp_path):
    world = cold_world(tmp_path, cold_tier="never")
    assert world.storage.cold_tier is None
    assert "cold_loads" not in world.storage.stats()
    world.storage.note_prefill(100, 1.0)
    world.stop()
