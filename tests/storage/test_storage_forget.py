"""Forgetting: nothing of it is in any file of the state directory once it is told; and what is others' comes back."""

from __future__ import annotations

import threading

import pytest
from forget_world import (
    ACME,
    ACME_SALTED,
    KEPT,
    OTHERS,
    OWN,
    OWN_ROWS,
    PREFIX,
    SALTED,
    SECRET,
    WHOLE,
    clutter,
    forget,
    found_in,
    live,
    needles,
)
from storage_harness import FINGERPRINT, World, crash

from kvd.cache.hashing import Namespace
from kvd.cache.tenants import Selection, tenant_salt
from kvd.storage.forget_intent import INTENT_NAME
from kvd.storage.tools import check_store

pytestmark = pytest.mark.store


@pytest.mark.parametrize("selection", [WHOLE, PREFIX], ids=["tenant", "prefix"])
def test_nothing_of_it_is_in_any_file(tmp_path, selection):
    world = World(tmp_path)
    live(world)
    clutter(tmp_path)
    before = found_in(tmp_path, OWN | OWN_ROWS)
    assert before == OWN.keys() | OWN_ROWS.keys(), "else finding none afterwards would say nothing"
    done = forget(world, selection)
    assert done.error == ""
    assert done.num_blocks >= 4
    assert found_in(tmp_path, OWN) == set()
    assert not (tmp_path / INTENT_NAME).exists()
    if selection is WHOLE:
        assert found_in(tmp_path, OWN_ROWS | needles(ACME_SALTED, SALTED)) == set()
    assert list(world.storage.recipe_book.recipes()) == ["rules"]
    assert world.ask(KEPT, OTHERS) == 96
    world.stop()
    assert found_in(tmp_path, OWN) == set()
    report = check_store(tmp_path)
    assert report["ok"], report
    again = World(tmp_path)
    assert again.ask(KEPT, ACME) == (0 if selection is WHOLE else 96)
    assert again.ask(SECRET, ACME) == 32, "its first two blocks are the other prompt's too"
    assert again.ask(KEPT, OTHERS) == 96
    assert again.num_restored == 96
    assert again.ask(SECRET[:128] + KEPT, OTHERS) >= 96, "equal tokens under another salt are another's"
    assert again.ask(SALTED, ACME_SALTED) == (0 if selection is WHOLE else 80)
    again.stop()


def test_a_salt_alone_leaves_the_tenants_others(tmp_path):
    world = World(tmp_path)
    live(world)
    assert forget(world, Selection("acme", ACME_SALTED.tenant_salt)).error == ""
    assert found_in(tmp_path, needles(ACME_SALTED, SALTED)) == set()
    assert found_in(tmp_path, OWN) == OWN.keys()
    assert set(world.storage.recipe_book.recipes()) == {"acme/safe", "rules"}
    crash(world)
    again = World(tmp_path)
    assert again.ask(SECRET, ACME) == 96
    assert again.ask(SALTED, ACME_SALTED) == 0
    again.stop()


def test_what_is_only_in_the_log_is_forgotten_too(tmp_path):
    world = World(tmp_path, checkpoint_interval_s=1000.0)
    world.ask(SECRET, ACME)
    wal = world.storage._running.wal
    world.until(lambda: wal.durable_lsn == wal.last_lsn >= 6)
    own = {name: needle for name, needle in OWN.items() if name.startswith("tokens")}
    assert found_in(tmp_path / "wal", own) == own.keys()
    assert forget(world, WHOLE).error == ""
    assert found_in(tmp_path, own) == set()
    before = wal.last_lsn
    world.ask(KEPT, OTHERS)
    world.until(lambda: wal.durable_lsn == wal.last_lsn >= before + 6)
    crash(world)
    again = World(tmp_path)
    assert len(again.storage._running.recovered.index.nodes) == 6
    again.stop()


@pytest.mark.parametrize("selection", [Selection("", b""), Selection("", b"", SECRET[: 4 * 64])], ids=["salt", "prefix"])
def test_what_is_asked_for_again_meanwhile_is_known_as_new(tmp_path, monkeypatch, selection):
    world = World(tmp_path)
    live(world)
    for _ in range(2):
        world.ask(SECRET, OTHERS)
    assert not world.checkpoint().error
    forgetting, may_go_on = world.storage._forgetting, threading.Event()
    original = forgetting._renew_keys
    monkeypatch.setattr(forgetting, "_renew_keys", lambda marks: may_go_on.wait(30) and original(marks))
    world.cache.forget(selection)
    world.tick()
    world.storage.forget(b"forget", selection, {})
    assert world.ask(SECRET, OTHERS) == (0 if not selection.token_ids else 32), "the first two blocks are another prompt's too"
    assert world.ask(SECRET, OTHERS) == 96
    may_go_on.set()
    assert world.until(lambda: world.inbox.find(b"forget"), timeout_s=60).error == ""
    lost_before = world.storage.stats()["lost_events"]
    assert world.pin("safe", SECRET) == "recipe+bytes"
    assert world.ask(SECRET + SECRET, OTHERS) == 96, "what hangs below is known too"
    assert world.storage.stats()["lost_events"] == lost_before
    crash(world)
    assert check_store(tmp_path)["ok"]
    again = World(tmp_path)
    assert again.ask(SECRET, OTHERS) == 96
    assert again.num_restored == 96
    again.stop()


def test_equal_prompts_of_different_salts_share_nothing_on_any_level(tmp_path):
    world = World(tmp_path)
    tables = []
    for namespace in (ACME, ACME_SALTED, OTHERS):
        assert world.ask(SECRET, namespace) == 0
        assert world.ask(SECRET, namespace) == 96
        table = world.cache.allocate(world.cache.match(SECRET, namespace), len(SECRET) // 4)
        tables.append(set(table.block_ids[:6]))
        world.cache.release(table)
    assert len(set.union(*tables)) == 18
    assert not world.checkpoint().error
    store = world.storage._running.recovered.store
    assert store.num_rows(b"blocks") == 18
    assert store.num_rows(b"nodes") == 18
    assert store.num_rows(b"namespaces") == 3
    crash(world)
    again = World(tmp_path)
    assert again.report.num_blocks == 18
    for namespace in (ACME, ACME_SALTED, OTHERS):
        assert again.ask(SECRET, namespace) == 96
        assert again.num_restored == 96
    assert again.ask(SECRET, Namespace(FINGERPRINT, tenant_salt("rival", b""))) == 0
    again.stop()
