"""Blocks are copied out beside running steps: held back while requests wait, never under a name that their rows hold no more, and leased meanwhile."""

from __future__ import annotations

import pytest
from storage_harness import ROW_BYTES, World, prompt, row_of

from kvd.storage.tools import check_store

pytestmark = pytest.mark.store


def test_the_governor_holds_copies_back_while_requests_wait(tmp_path):
    world = World(tmp_path, checkpoint_pause_queue_depth=2)
    world.storage.set_queue_depth(3)
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.until(lambda: world.storage.status()["waiting_blocks"] == 5 and world.storage.status()["governor"] == "queue")
    for _ in range(20):
        world.tick()
    assert world.storage.stats()["checkpoint_copied_bytes"] == 0
    assert world.storage.status()["governor"] == "queue"
    world.until(lambda: world.storage.idle_delay_s() > 0.1)  # as soon as the planner has done what it had begun
    world.storage.set_queue_depth(2)
    world.until(lambda: world.storage.status()["blocks"] == 5)
    world.stop()


def test_somebody_who_waits_for_a_checkpoint_is_not_held_back(tmp_path):
    world = World(tmp_path, checkpoint_pause_queue_depth=2)
    world.storage.set_queue_depth(100)
    for _ in range(2):
        world.ask(prompt(0, 81))
    assert world.checkpoint().num_blocks == 5
    world.stop()


def test_a_block_evicted_and_refilled_before_its_copy_is_not_written_under_the_old_name(tmp_path):
    world = World(tmp_path, num_blocks=8, checkpoint_pause_queue_depth=1)
    world.storage.set_queue_depth(2)
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.until(lambda: world.storage.stats()["blocks_under_way"] == 5)
    for number in range(1, 4):  # the pool is small: the wanted blocks are evicted, their rows hold other prompts now
        world.ask(prompt(number, 113))
    world.storage.set_queue_depth(0)
    world.until(lambda: world.storage.stats()["blocks_under_way"] == 0)
    world.stop()
    report = check_store(tmp_path)
    assert report["ok"], report
    world = World(tmp_path)
    world.ask(prompt(0, 81))  # asserts the bytes of every block it hits
    for number in range(1, 4):
        world.ask(prompt(number, 113))
    world.stop()


def test_steps_go_on_and_leased_blocks_stay_while_a_copy_hangs(tmp_path):
    world = World(tmp_path, num_blocks=16, checkpoint_bytes_per_step=3 * ROW_BYTES)
    world.runner.gate.clear()
    for _ in range(2):
        world.ask(prompt(0, 81))
    world.until(lambda: world.storage._running.copy_out._copies)
    for number in range(1, 9):  # far more than the pool holds: everything that is not leased is evicted
        world.ask(prompt(number, 113))
    leased = world.storage._running.copy_out._copies[0].wanted
    assert len(leased) == 3
    for each in leased:
        assert bytes(world.runner.row(each.block_id)) == row_of(each.block_hash)
    world.runner.gate.set()
    world.until(lambda: world.storage.stats()["blocks_under_way"] == 0 and world.storage.status()["blocks"] >= 3)
    world.stop()
    assert check_store(tmp_path)["ok"]


def test_a_failing_executor_ends_checkpoints_with_an_error_and_persists_nothing_of_it(tmp_path):
    world = World(tmp_path)
    world.runner.fail_reads = True
    for _ in range(2):
        world.ask(prompt(0, 81))
    done = world.checkpoint()
    assert "could not copy" in done.error or done.num_blocks == 0
    world.stop(clean=False)
    assert check_store(tmp_path)["blocks"] == 0
