"""Lives of a storage room, to be run under ``record_io.c``: ``recorded_life.py fsync|interval|sealed DIR LOG``. Marks say what was asked for and what was promised."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
sys.path.insert(0, str(Path(__file__).parent))

from replay import mark
from storage_harness import World, crash, prompt

PROMPTS = [*(prompt(number, 16 * 6, shared=48) for number in range(6)), *(prompt(number, 16 * 5) for number in range(30, 50))]
SETTINGS = {"store_max_bytes": 32 << 20, "wal_segment_bytes": 1 << 13, "wal_max_bytes": 1 << 15}
INTERVAL_S = 0.3


class Life(World):
    """A world that marks what it is promised. With ``durability`` interval a promise holds from ``settle`` on."""

    def __init__(self, state_dir: Path, log: Path, **config) -> None:
        super().__init__(state_dir, **(SETTINGS | config))
        self.marks = log
        self.is_lazy = self.config.durability == "interval"
        self.storage.mark_served()
        self.until(lambda: not (state_dir / "starting").exists())

    def promise(self, name: str, tokens: str | None, **more: object) -> None:
        mark(self.marks, **{"lazy" if self.is_lazy else "done": name}, tokens=tokens, **more)

    def pin(self, name: str, token_ids: bytes) -> str:
        mark(self.marks, begin=name, tokens=token_ids.hex())
        how = super().pin(name, token_ids)
        self.promise(name, token_ids.hex(), how=how)
        return how

    def unpin(self, name: str) -> None:
        mark(self.marks, begin=name, tokens=None)
        self.cache.unpin(name)
        self.storage.recipe_book.remove(b"unpin-" + name.encode(), name)
        assert not self.wait_for(b"unpin-" + name.encode()).error
        self.promise(name, None)
        self.tick()

    def hear(self, *prompts: bytes) -> None:
        """Ask for each, and wait until the log knows them."""
        for token_ids in prompts:
            self.ask(token_ids)
        wal, planner = self.storage._running.wal, self.storage._running.planner
        self.until(lambda: not planner.is_busy)
        self.until(lambda: (wal._written_lsn if self.is_lazy else wal.durable_lsn) == wal.last_lsn)
        for token_ids in prompts:
            mark(self.marks, **{"lazy_known" if self.is_lazy else "known": token_ids.hex()})

    def settle(self) -> None:
        """Wait until nothing that was acknowledged is unsynced: a durability interval at most, while the disk works."""
        wal, recipes = self.storage._running.wal, self.storage.recipe_book
        self.until(lambda: wal.durable_lsn == wal.last_lsn and recipes._unsynced_since_s is None)
        mark(self.marks, settled=True)


def live(state_dir: Path, log: Path, **config) -> None:
    """A first life that ends in a crash, a second one that ends well, a third that takes it up, one that leaves prefixes to the log, and one that finds that log torn."""
    life = Life(state_dir, log, **config)
    for number in range(4):
        for _ in range(2):
            life.ask(PROMPTS[number])
        life.pin(f"pin-{number}", prompt(10 + number, 64, shared=16))
    life.hear(*PROMPTS[:4])
    life.pin("pin-1", prompt(21, 80))
    life.settle()
    life.unpin("pin-0")
    life.hear(*PROMPTS[6:11])
    life.hear(*PROMPTS[11:16])
    crash(life)
    life = Life(state_dir, log, **config)
    life.unpin("pin-2")
    life.settle()
    for number in range(4, 6):
        for _ in range(2):
            life.ask(PROMPTS[number])
    life.pin("pin-5", prompt(15, 64))
    life.checkpoint()
    life.stop()
    life = Life(state_dir, log, **config)
    life.pin("pin-6", prompt(16, 64))
    life.hear(*PROMPTS[16:20])
    life.unpin("pin-6")
    life.pin("pin-7", prompt(17, 64))
    life.settle()
    life.pin("pin-8", prompt(18, 64))
    crash(life)
    life = Life(state_dir, log, **config, checkpoint_interval_s=1000.0)
    life.hear(*PROMPTS[20:23])
    life.settle()
    life.hear(*PROMPTS[23:])
    crash(life)
    tear(state_dir)
    life = Life(state_dir, log, **config)
    life.pin("pin-9", prompt(19, 64))
    life.stop()


def tear(state_dir: Path) -> None:
    """Leave a torn record behind the log's last one, so that the next start has something to cut."""
    segment = max((state_dir / "wal").glob("*.wal"))
    end = len(segment.read_bytes().rstrip(b"\0"))
    with segment.open("r+b") as file:
        file.seek(end + -end % 8 + 8)
        file.write(b"torn off")
        file.flush()
        os.fsync(file.fileno())


def config_of(log: Path) -> dict[str, object]:
    """What a life and the starts after it have in common: the key, if there is one, lies beside the log."""
    key_file = log.with_suffix(".key")
    return {"store_encryption_key_file": str(key_file)} if key_file.exists() else {}


def run(name: str, state_dir: Path, log: Path) -> None:
    if name == "sealed":
        key_file = log.with_suffix(".key")
        key_file.touch(mode=0o600)
        key_file.write_bytes(os.urandom(32))
    durability = "interval" if name == "interval" else "fsync"
    live(state_dir, log, durability=durability, durability_interval_s=INTERVAL_S, **config_of(log))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
