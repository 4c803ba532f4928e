"""A pin set that is whole and says what no store, start or unpin can take: it is refused before anything is changed, and a pin's rules are those of the edge."""

from __future__ import annotations

import hashlib
import math

import msgspec
import pytest
from kvd_client.protocol.messages import Pin
from storage_harness import World, prompt

from kvd.cache.hashing import Namespace
from kvd.cache.tenants import is_pin_name, tenant_salt
from kvd.commands import Recipe
from kvd.config import StorageConfig
from kvd.storage.pin_export import export_pins
from kvd.storage.pin_import import import_pins
from kvd.storage.pin_set_checks import entry_refusal
from kvd.storage.pin_sets import PinSetBlock, PinSetError, PinSetNode, PinTransferError, new_pin_set, read_pin_set
from kvd.storage.recipes import read_recipes
from kvd.transport.errors import RequestError
from kvd.transport.tenants import Caller, caller_of_ipc_peer
from kvd.transport.validation import check_name, check_pin

pytestmark = pytest.mark.store

NAMES = ["p", "a.b_c:d@e+f-g", "n" * 128, "", "n" * 129, "a/b", "a b", "a\0b", ".a", "-a", "\u00e4", "a\n", "../a", "/a", "a/", "p" * 600]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("pins")
    world = World(root / "state")
    world.pin("mine", prompt(0, 64))
    assert not world.checkpoint().error
    world.stop()
    export_pins(root / "state", root / "pins.kvdpins")
    return list(read_pin_set(root / "pins.kvdpins"))


def recipe(**changes):
    return Recipe(**({"name": "p", "token_ids": prompt(0, 64), "tokenizer_digest": bytes(32), "created_unix_s": 1.7e9} | changes))


def node(entries, **changes):
    each = next(entry for entry in entries if isinstance(entry, PinSetNode))
    return PinSetNode(**({"root": each.root, "parent": each.parent, "token_ids": each.token_ids, "uses": each.uses} | changes))


def block(entries, **changes):
    each = next(entry for entry in entries if isinstance(entry, PinSetBlock))
    return PinSetBlock(**({"group": each.group, "block_hash": each.block_hash, "root": each.root, "plain": each.plain} | changes))


BAD = {
    "empty name": lambda _: recipe(name=""),
    "long name": lambda _: recipe(name="n" * 600),
    "zero in a name": lambda _: recipe(name="a\0b"),
    "path as a name": lambda _: recipe(name="../../etc/x"),
    "no tenant": lambda _: recipe(name="/a", tenant_salt=bytes(48)),
    "two tenants": lambda _: recipe(name="a/b/c", tenant_salt=bytes(48)),
    "odd tenant": lambda _: recipe(name="a:b/c", tenant_salt=bytes(48)),
    "tenant without a salt": lambda _: recipe(name="acme/p"),
    "long salt": lambda _: recipe(tenant_salt=bytes(65)),
    "odd tokens": lambda _: recipe(token_ids=b"12345"),
    "two sources": lambda _: recipe(text="a", messages=[]),
    "priority above": lambda _: recipe(priority=101),
    "priority below": lambda _: recipe(priority=-1),
    "created never": lambda _: recipe(created_unix_s=math.nan),
    "created before time": lambda _: recipe(created_unix_s=-1.0),
    "ends at no time": lambda _: recipe(expires_unix_s=math.inf),
    "ends in no year": lambda _: recipe(expires_unix_s=1e18),
    "long digest": lambda _: recipe(tokenizer_digest=bytes(100)),
    "adapter name": lambda _: recipe(adapter_name="../poet"),
    "long adapter": lambda _: recipe(adapter=bytes(100)),
    "short fingerprint": lambda _: Namespace(b"x"),
    "long salt of a namespace": lambda _: Namespace(bytes(32), bytes(65)),
    "uses of 2**40": lambda entries: node(entries, uses=1 << 40),
    "negative uses": lambda entries: node(entries, uses=-1),
    "short root": lambda entries: node(entries, root=b"short"),
    "short parent": lambda entries: node(entries, parent=b"short"),
    "no tokens": lambda entries: node(entries, token_ids=b""),
    "odd tokens of a node": lambda entries: node(entries, token_ids=b"12345"),
    "huge node": lambda entries: node(entries, token_ids=bytes(4 * 4097)),
    "long group": lambda entries: block(entries, group="g" * 600),
    "no group": lambda entries: block(entries, group=""),
    "zero in a group": lambda entries: block(entries, group="a\0b"),
    "short hash": lambda entries: block(entries, block_hash=b"short"),
    "no bytes": lambda entries: block(entries, plain=b""),
}


@pytest.mark.parametrize("what", BAD)
def test_an_entry_out_of_bounds_is_refused_and_nothing_is_changed(exported, tmp_path, what):
    file = tmp_path / "pins"
    with new_pin_set(file) as writer:
        for entry in [*exported, BAD[what](exported)]:
            writer.add(entry)
    with pytest.raises(PinSetError, match=f"its entry {len(exported)} can't be taken"):
        import_pins(StorageConfig(state_dir=tmp_path / "state", store_max_bytes=64 << 20), file)
    assert not (tmp_path / "state").exists()


def test_what_an_export_writes_is_taken(exported):
    assert [entry_refusal(entry) for entry in exported] == [""] * len(exported)
    for each in (
        recipe(name="acme/p", tenant_salt=tenant_salt("acme", b"")),
        recipe(name="uid:1000/p", tenant_salt=tenant_salt("uid:1000", b"s")),
    ):
        assert entry_refusal(each) == ""
    assert entry_refusal(recipe(expires_unix_s=4e9, priority=100, adapter=hashlib.sha256(b"a").digest())) == ""


@pytest.mark.parametrize("name", NAMES)
def test_the_edge_and_an_import_take_the_same_names(name):
    """What may be pinned may be imported and the other way round, so that everything imported can be unpinned."""
    try:
        check_name(name)
    except RequestError:
        is_taken = False
    else:
        is_taken = True
        assert is_pin_name(Caller("acme").qualified(name))
        assert is_pin_name(caller_of_ipc_peer("localhost:4294967295:0:1", 0).qualified(name))
    tenant, _, _ = name.rpartition("/")
    assert is_pin_name(name) == (is_taken or name == "a/b")  # the one that is a tenant's pin
    assert (entry_refusal(recipe(name=name, tenant_salt=tenant_salt("a", b"") if tenant else b"")) == "") == is_pin_name(name)


@pytest.mark.parametrize("priority", [-1, 0, 100, 101])
def test_the_edge_and_an_import_take_the_same_priorities(priority):
    message = msgspec.convert({"op_id": bytes(16), "name": "p", "input": "ids", "priority": priority}, Pin)
    try:
        check_pin(message)
    except RequestError:
        assert entry_refusal(recipe(priority=priority))
    else:
        assert not entry_refusal(recipe(priority=priority))


def test_recipes_beyond_their_part_of_the_budget_are_refused(tmp_path):
    world = World(tmp_path / "state")
    world.pin("mine", prompt(0, 64))
    world.stop()
    with new_pin_set(tmp_path / "pins") as writer:
        writer.add(recipe(token_ids=bytes(4 << 20)))
    before = {path: path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(PinTransferError, match="store_max_bytes leaves them"):
        import_pins(StorageConfig(state_dir=tmp_path / "state", store_max_bytes=64 << 20), tmp_path / "pins")
    assert {path: path.read_bytes() for path in before} == before
    assert set(read_recipes(tmp_path / "state").value) == {"mine"}
