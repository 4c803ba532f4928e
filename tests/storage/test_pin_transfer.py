"""Pins carried to another state directory: bytes that serve there, bytes that are refused, recipes that never are, and files that are not whole."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest
from crc32c import crc32c
from storage_harness import World, prompt

from kvd.cli import app
from kvd.cli.exits import Exit
from kvd.config import StorageConfig
from kvd.storage import schema
from kvd.storage.codec import PLAIN
from kvd.storage.errors import RecipesUnreadableError, StateLockedError, UnknownFormatError
from kvd.storage.forget_intent import INTENT_NAME, Mark, write_intent
from kvd.storage.generations import read_current
from kvd.storage.pin_export import export_pins, opened_store
from kvd.storage.pin_import import import_pins
from kvd.storage.pin_sets import NoSuchPinError, PinSetBlock, PinSetError, PinTransferError, new_pin_set, read_pin_set
from kvd.storage.recipes import read_recipes
from kvd.storage.store_stat import stat_store
from kvd.storage.tools import check_store

pytestmark = pytest.mark.store


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Two pins that share 48 tokens, exported: the file and the state directory."""
    root = tmp_path_factory.mktemp("pins")
    world = World(root / "state")
    for number in range(2):
        world.pin(f"pin-{number}", prompt(number, 96, shared=48))
    assert not world.checkpoint().error
    world.stop()
    report = export_pins(root / "state", root / "pins.kvdpins")
    assert report["pins"] == 2
    assert report["blocks"] == 3 + 3 + 3
    assert report["pins_without_all_bytes"] == []
    return root / "pins.kvdpins", root / "state"


def config_of(state_dir, store_max_bytes=64 << 20):
    return StorageConfig(state_dir=state_dir, store_max_bytes=store_max_bytes)


def kvd(*arguments):
    """A ``kvd store`` command in a process of its own (lmdb opens a file once per process)."""
    command = [sys.executable, "-m", "kvd", "store", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def served(state_dir, **world_arguments):
    """A life on the imported state: the tokens of each pin that were restored."""
    world = World(state_dir, **world_arguments)
    cached = []
    for number in range(2):
        world.ask(prompt(number, 97, shared=48))  # asserts the bytes of what it hits
        cached.append(world.num_restored)
    pins = set(world.storage.recipe_book.recipes())
    world.stop()
    return pins, cached


def test_on_another_machine_the_pins_are_restored_not_computed(exported, tmp_path):
    file, _ = exported
    report = import_pins(config_of(tmp_path / "state"), file)
    assert report["pins_added"] == ["pin-0", "pin-1"]
    assert report["blocks_added"] == 9
    assert report["blocks_refused"] == {}
    assert check_store(tmp_path / "state")["ok"]
    assert oct((tmp_path / "state").stat().st_mode & 0o777) == "0o700"
    assert served(tmp_path / "state") == ({"pin-0", "pin-1"}, [96, 48])


def test_a_second_import_changes_nothing(exported, tmp_path):
    file, _ = exported
    import_pins(config_of(tmp_path), file)
    generation = read_recipes(tmp_path).generation
    report = import_pins(config_of(tmp_path), file)
    assert report["pins_kept"] == ["pin-0", "pin-1"]
    assert (report["blocks_added"], report["blocks_known"]) == (0, 9)
    assert read_recipes(tmp_path).generation == generation


def test_bytes_of_another_fingerprint_are_refused_and_the_recipes_taken(exported, tmp_path):
    file, _ = exported
    world = World(tmp_path, fingerprint=b"g" * 32)
    world.ask(prompt(7, 64))
    world.ask(prompt(7, 64))
    assert not world.checkpoint().error
    world.stop()
    report = import_pins(config_of(tmp_path), file)
    assert report["pins_added"] == ["pin-0", "pin-1"]
    assert report["blocks_added"] == 0
    assert report["blocks_refused"] == {"fingerprint": 9}
    world = World(tmp_path, fingerprint=b"g" * 32)
    assert set(world.report.pins_pending) == {"pin-0", "pin-1"}
    world.stop()


def test_an_empty_store_takes_them_and_the_start_of_another_model_drops_them(exported, tmp_path):
    file, _ = exported
    assert import_pins(config_of(tmp_path), file)["blocks_added"] == 9
    world = World(tmp_path, fingerprint=b"g" * 32)
    assert world.report.num_blocks == 0
    assert set(world.report.pins_pending) == {"pin-0", "pin-1"}
    assert not world.checkpoint().error
    world.stop()
    with opened_store(tmp_path, PLAIN) as store:
        assert store.num_rows(schema.DB_BLOCKS) == 0


def test_one_pin_and_recipes_alone(exported, tmp_path):
    _, state_dir = exported
    report = export_pins(state_dir, tmp_path / "one", names=["pin-1"])
    assert (report["pins"], report["blocks"]) == (1, 6)
    report = export_pins(state_dir, tmp_path / "none", with_bytes=False)
    assert (report["blocks"], report["pins_without_all_bytes"]) == (0, ["pin-0", "pin-1"])
    assert import_pins(config_of(tmp_path / "state"), tmp_path / "none")["pins_added"] == ["pin-0", "pin-1"]
    with pytest.raises(NoSuchPinError, match="no pin is named 'absent'"):
        export_pins(state_dir, tmp_path / "absent", names=["absent"])
    assert not (tmp_path / "absent").exists()


def test_exit_codes_of_an_export(exported, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvd.observe.logging.configure", lambda **_: None)
    _, state_dir = exported
    out = str(tmp_path / "out")
    assert app.main(["store", "export", out, "--state-dir", str(state_dir), "--no-bytes", "--pin", "absent"]) == Exit.NO_INPUT
    (tmp_path / "empty" / "recipes").mkdir(parents=True)
    assert app.main(["store", "export", out, "--state-dir", str(tmp_path / "empty")]) == Exit.NO_INPUT
    assert capsys.readouterr().err.splitlines() == ["kvd: no pin is named 'absent'", f"kvd: there are no pins in {tmp_path / 'empty'}"]
    assert app.main(["store", "export", out, "--state-dir", str(state_dir), "--no-bytes"]) == Exit.OK
    assert app.main(["store", "export", out, "--state-dir", str(state_dir), "--no-bytes"]) == Exit.CANNOT_CREATE


def test_a_taken_name_is_kept_unless_replaced(exported, tmp_path):
    file, _ = exported
    world = World(tmp_path)
    world.pin("pin-0", prompt(5, 64))
    world.stop()
    mine = read_recipes(tmp_path).value["pin-0"]
    assert import_pins(config_of(tmp_path), file)["pins_kept"] == ["pin-0"]
    assert read_recipes(tmp_path).value["pin-0"] == mine
    assert import_pins(config_of(tmp_path), file, replace_pins=True)["pins_replaced"] == ["pin-0"]
    assert read_recipes(tmp_path).value["pin-0"] != mine
    assert read_recipes(tmp_path).is_settled


def test_beside_a_live_daemon_export_reads_and_import_is_refused(exported, tmp_path):
    file, _ = exported
    world = World(tmp_path / "state")
    world.pin("pin-0", prompt(0, 96, shared=48))
    assert not world.checkpoint().error
    assert kvd("export", tmp_path / "live", "--state-dir", tmp_path / "state")["blocks"] == 6
    assert kvd("stat", "--state-dir", tmp_path / "state")["in_use"]
    with pytest.raises(StateLockedError, match="in use by process"):
        import_pins(config_of(tmp_path / "state"), file)
    world.stop()


def test_while_a_forget_is_not_completed_nothing_is_imported(exported, tmp_path):
    file, _ = exported
    write_intent(tmp_path, [Mark("")])
    with pytest.raises(PinTransferError, match="forget"):
        import_pins(config_of(tmp_path), file)
    assert read_recipes(tmp_path).value is None
    world = World(tmp_path)
    world.until(lambda: not (tmp_path / INTENT_NAME).exists())
    world.stop()
    import_pins(config_of(tmp_path), file)
    assert served(tmp_path) == ({"pin-0", "pin-1"}, [96, 48])


def test_what_the_budget_has_no_room_for_is_counted(tmp_path):
    """Rows of a megabyte: of 40, a budget of 32 MiB takes some, from the first on, and says how many it did not."""
    world = World(tmp_path / "here", row_bytes=1_000_000, num_blocks=100, store_max_bytes=256 << 20)
    world.pin("big", prompt(0, 640))
    assert not world.checkpoint().error
    world.stop()
    export_pins(tmp_path / "here", tmp_path / "big")
    report = import_pins(config_of(tmp_path / "there", 32 << 20), tmp_path / "big")
    assert report["blocks_added"] >= 10
    assert report["blocks_added"] + report["blocks_refused"]["no_room"] == 40
    assert stat_store(tmp_path / "there")["blocks"] == report["blocks_added"]
    world = World(tmp_path / "there", row_bytes=1_000_000, num_blocks=100, store_max_bytes=32 << 20)
    assert world.report.num_blocks == report["blocks_added"]
    assert world.ask(prompt(0, 640)) >= 16 * report["blocks_added"]
    world.stop()


def test_every_cut_and_every_flipped_byte_is_found_before_anything_is_changed(exported, tmp_path):
    _, state_dir = exported
    small = tmp_path / "small"
    export_pins(state_dir, small, names=["pin-0"], with_bytes=False)
    data = small.read_bytes()
    damaged = tmp_path / "damaged"
    for length in range(len(data)):
        damaged.write_bytes(data[:length])
        with pytest.raises(PinSetError):
            list(read_pin_set(damaged))
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            damaged.write_bytes(changed)
            with pytest.raises((PinSetError, UnknownFormatError)):
                list(read_pin_set(damaged))
    damaged.write_bytes(data + b"\0")
    with pytest.raises(PinSetError, match="end"):
        import_pins(config_of(tmp_path / "state"), damaged)
    assert not (tmp_path / "state").exists()


def test_bytes_under_a_wrong_identity_are_refused(exported, tmp_path):
    file, _ = exported
    forged = tmp_path / "forged"
    blocks = [entry for entry in read_pin_set(file) if isinstance(entry, PinSetBlock)]
    with new_pin_set(forged) as writer:
        for entry in read_pin_set(file):
            is_victim = isinstance(entry, PinSetBlock) and entry.block_hash == blocks[4].block_hash
            writer.add(PinSetBlock(entry.group, entry.block_hash, entry.root, blocks[5].plain) if is_victim else entry)
    report = import_pins(config_of(tmp_path / "state"), forged)
    assert report["blocks_refused"] == {"identity": 2}, "the block whose header names another, and what hangs below it"
    assert report["blocks_added"] == 7


def test_another_format_and_unreadable_pins(exported, tmp_path):
    file, _ = exported
    data = bytearray(file.read_bytes())
    data[8:12] = struct.pack("<I", 9)
    (tmp_path / "new").write_bytes(data)
    with pytest.raises(UnknownFormatError, match="pin set of format 9"):
        import_pins(config_of(tmp_path / "state"), tmp_path / "new")
    (tmp_path / "other").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(PinSetError, match="is no pin set"):
        import_pins(config_of(tmp_path / "state"), tmp_path / "other")
    state_dir = tmp_path / "bad"
    (state_dir / "recipes").mkdir(parents=True)
    (state_dir / "recipes" / "recipes.1").write_bytes(b"nonsense" + struct.pack("<I", crc32c(b"x")))
    with pytest.raises(RecipesUnreadableError):
        import_pins(config_of(state_dir), file)


def test_stat_counts_without_reading_blocks(exported):
    _, state_dir = exported
    report = stat_store(state_dir)
    assert report["pins"] == 2
    assert (report["namespaces"], report["nodes"], report["blocks"]) == (1, 9, 9)
    assert report["generation"] == read_current(state_dir).generation
    assert report["problems"] == []
    assert 0 < report["used_bytes"] <= report["file_bytes"]
    assert report["disk_bytes"] >= sum(report["disk_bytes_of"].values()) - 4096
    assert {"kv", "wal", "recipes"} <= set(report["disk_bytes_of"])
