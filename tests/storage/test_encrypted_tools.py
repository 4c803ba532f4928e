"""Tools and commands on an encrypted store: with the key they see what they see of any, without it the structure and no content; one key takes another's place."""

from __future__ import annotations

import json

import pytest
from storage_harness import World, crash, found, prompt

from kvd.cli import app
from kvd.cli.exits import Exit
from kvd.storage import schema
from kvd.storage.encryption import reading_encryption
from kvd.storage.errors import EncryptionKeyError
from kvd.storage.generations import read_current
from kvd.storage.pin_export import export_pins
from kvd.storage.recipes import list_recipe_files
from kvd.storage.store import Store
from kvd.storage.tools import check_store, dump_store

pytestmark = pytest.mark.store


def test_a_damaged_row_of_a_pin_costs_its_bytes_in_an_export_not_the_export(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, store_encryption_key_file=key_file)
    for number, name in enumerate(("whole", "damaged")):
        assert world.pin(name, prompt(number, 48)) == "recipe+bytes"
    assert world.stop()
    codec = reading_encryption(state, key_file).codec
    store = Store(state / "kv" / str(read_current(state, codec).generation), 64 << 20, codec=codec)
    txn = store.begin()
    txn.put_row(schema.DB_PINS, codec.pin_key("damaged"), b"no row of a pin")
    txn.commit()
    store.close()
    report = export_pins(state, tmp_path / "pins.kvdpins", open_codec=lambda: codec)
    assert (report["pins"], report["blocks"], report["pins_without_all_bytes"]) == (2, 3, ["damaged"])


def test_tools_without_the_key_check_the_structure_and_show_no_content(tmp_path, key_file):
    state = tmp_path / "state"
    world = World(state, checkpoint_interval_s=1000.0, store_encryption_key_file=key_file)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    assert not world.checkpoint().error
    wal = world.storage._running.wal
    before = wal.last_lsn
    world.ask(prompt(1, 33))
    world.until(lambda: wal.durable_lsn == wal.last_lsn > before)
    crash(world)
    blind, seeing = check_store(state), check_store(state, key_file=key_file)
    assert blind["ok"], blind
    assert (blind["encryption"], seeing["encryption"]) == ("contents not checked: no key file given", "checked with the key")
    same = ("recipes", "nodes", "blocks", "namespaces", "wal_records", "recipe_copies")
    assert {name: blind[name] for name in same} == {name: seeing[name] for name in same}
    with pytest.raises(EncryptionKeyError, match="is encrypted"):
        next(dump_store(state))
    entries = list(dump_store(state, key_file=key_file))
    assert {entry["kind"] for entry in entries} >= {"recipe", "wal_record", "node", "block", "pin"}
    json.dumps(entries)
    newest = list_recipe_files(state)[0][1]
    newest.write_bytes(newest.read_bytes()[:-1])
    assert not check_store(state)["ok"]
    plain = tmp_path / "plain"
    World(plain).stop()
    with pytest.raises(EncryptionKeyError, match="is not encrypted"):
        check_store(plain, key_file=key_file)
    assert check_store(plain)["encryption"] == "none"


def test_the_commands_make_use_and_change_a_key(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvd.observe.logging.configure", lambda **_: None)
    state, old, new = tmp_path / "state", tmp_path / "old.key", tmp_path / "new.key"
    assert app.main(["store", "keygen", str(old)]) == Exit.OK
    assert app.main(["store", "keygen", str(new)]) == Exit.OK
    before = old.read_bytes()
    assert app.main(["store", "keygen", str(old)]) == Exit.CANNOT_CREATE
    assert old.read_bytes() == before
    world = World(state, store_encryption_key_file=str(old))
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    rekey = ["store", "rekey", "--old", str(old), "--new", str(new), "--state-dir", str(state)]
    assert app.main(rekey) == Exit.TEMPORARY, "a daemon holds it"
    world.stop()
    assert app.main(rekey) == Exit.OK
    assert app.main(rekey) == Exit.CONFIG
    check = ["store", "check", "--state-dir", str(state), "--json"]
    assert app.main([*check, "--store-encryption-key-file", str(old)]) == Exit.CONFIG
    for command in (check, ["store", "stat", "--state-dir", str(state), "--json"]):
        for key in ([], ["--store-encryption-key-file", str(new)]):
            capsys.readouterr()
            assert app.main([*command, *key]) == Exit.OK
            report = json.loads(capsys.readouterr().out)
            assert (report["nodes"], report["blocks"], report["problems"]) == (3, 3, [])
    assert app.main(["store", "dump", "--state-dir", str(state)]) == Exit.CONFIG
    export = ["store", "export", str(tmp_path / "pins"), "--state-dir", str(state)]
    assert app.main(export) == Exit.CONFIG
    assert app.main([*export, "--store-encryption-key-file", str(new)]) == Exit.OK
    elsewhere = tmp_path / "elsewhere"
    assert (
        app.main(["store", "import", str(tmp_path / "pins"), "--state-dir", str(elsewhere), "--store-encryption-key-file", str(old)])
        == Exit.OK
    )
    assert prompt(9, 48)[4:24] in (tmp_path / "pins").read_bytes()
    assert found(elsewhere, {"tokens": prompt(9, 48)[4:24], "name": b"system"}) == set()
    for directory, key in ((state, new), (elsewhere, old)):
        world = World(directory, store_encryption_key_file=str(key))
        assert world.report.num_blocks == 3
        assert world.ask(prompt(9, 49)) == 48
        world.stop()
        assert old.read_bytes().strip() not in b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())
