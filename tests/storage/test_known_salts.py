"""Clients choose salts without end: what the codec of an encrypted store knows of them stays bounded, whichever thread learns one last."""

from __future__ import annotations

import threading

import pytest
from storage_harness import FINGERPRINT, World, prompt

from kvd.cache.hashing import Namespace
from kvd.cache.tenants import tenant_salt
from kvd.engine.clock import SystemClock
from kvd.storage import budget

pytestmark = pytest.mark.store


def test_what_is_known_of_salts_is_bounded_however_many_clients_choose(tmp_path, key_file, monkeypatch):
    monkeypatch.setattr(budget, "_MAX_NODES", 40)
    state = tmp_path / "state"
    world = World(state, num_blocks=16, store_encryption_key_file=key_file)
    planner, codec = world.storage._running.planner, world.storage._encryption.codec
    for number in range(120):
        world.ask(prompt(number, 17), Namespace(FINGERPRINT, tenant_salt("", b"salt %d" % number)))
    for _ in range(2):  # one is used again, and stays
        world.ask(prompt(0, 17), Namespace(FINGERPRINT, tenant_salt("", b"salt 0")))
    assert not world.checkpoint().error
    world.until(lambda: not planner._mail and len(codec._salts) < 60 and len(planner._logged_roots) < 60)
    assert not world.storage.status()["degraded"]
    assert world.stop()
    world = World(state, num_blocks=16, store_encryption_key_file=key_file)
    assert world.ask(prompt(0, 17), Namespace(FINGERPRINT, tenant_salt("", b"salt 0"))) == 16
    assert world.storage.status()["damage"] == []
    world.stop()


class HeldClock(SystemClock):
    """One that stands still until it is moved on."""

    def __init__(self) -> None:
        self.now_s = super().monotonic()

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("late", ["kvd-store", "kvd-wal"])
def test_a_thread_that_learns_a_salt_after_its_namespace_was_trimmed_forgets_it_too(tmp_path, key_file, monkeypatch, late):
    monkeypatch.setattr(budget, "_MAX_NODES", 40)
    clock = HeldClock()
    world = World(tmp_path / "state", num_blocks=16, store_encryption_key_file=key_file, checkpoint_interval_s=1.0, clock=clock)
    planner, codec = world.storage._running.planner, world.storage._encryption.codec
    is_late, is_trimmed = threading.Event(), threading.Event()
    learn = codec.learn

    def learn_late(namespace: Namespace) -> None:
        if threading.current_thread().name == late:
            is_late.set()
            assert is_trimmed.wait(60)
        learn(namespace)

    monkeypatch.setattr(codec, "learn", learn_late)
    for number in range(120):
        world.ask(prompt(number, 17), Namespace(FINGERPRINT, tenant_salt("", b"salt %d" % number)))
    for _ in range(2):  # hot: its block, and all nodes before it, are handed over ahead of the checkpoint
        world.ask(prompt(119, 17), Namespace(FINGERPRINT, tenant_salt("", b"salt 119")))
    world.until(is_late.is_set)
    assert planner.counters.num_trimmed_nodes == 0
    clock.now_s += 2.0
    world.until(lambda: planner.counters.num_trimmed_nodes > 0)
    is_trimmed.set()

    def is_written() -> bool:
        return world.storage._running.wal.durable_lsn == 120 and not planner._handover._outstanding

    def is_bounded() -> bool:
        clock.now_s += 2.0
        return is_written() and len(codec._salts) <= 40

    world.until(is_written)
    world.until(is_bounded)
    world.stop()
