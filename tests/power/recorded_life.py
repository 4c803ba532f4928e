"""Lives of a storage room, to be run under ``record_io.c``: ``recorded_life.py NAME DIR LOG``. Marks say what was asked for and what was promised."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
sys.path.insert(0, str(Path(__file__).parent))

from replay import mark
from storage_harness import World, crash, prompt

PROMPTS = [*(prompt(number, 16 * 6, shared=48) for number in range(6)), *(prompt(number, 16 * 5) for number in range(30, 44))]
SETTINGS = {"store_max_bytes": 32 << 20, "wal_segment_bytes": 1 << 13, "wal_max_bytes": 1 << 15}


class Life(World):
    """A world that marks what it is promised."""

    def __init__(self, state_dir: Path, log: Path, **config) -> None:
        super().__init__(state_dir, **(SETTINGS | config))
        self.marks = log
        self.storage.mark_served()
        self.until(lambda: not (state_dir / "starting").exists())

    def pin(self, name: str, token_ids: bytes) -> str:
        mark(self.marks, begin=name, tokens=token_ids.hex())
        how = super().pin(name, token_ids)
        mark(self.marks, done=name, tokens=token_ids.hex(), how=how)
        return how

    def unpin(self, name: str) -> None:
        mark(self.marks, begin=name, tokens=None)
        self.cache.unpin(name)
        self.storage.recipe_book.remove(b"unpin-" + name.encode(), name)
        assert not self.wait_for(b"unpin-" + name.encode()).error
        mark(self.marks, done=name, tokens=None)
        self.tick()


def live(state_dir: Path, log: Path, **config) -> None:
    """A first life that ends in a crash, a second one that ends well, and a third that takes it up."""
    life = Life(state_dir, log, **config)
    for number in range(4):
        for _ in range(2):
            life.ask(PROMPTS[number])
        life.pin(f"pin-{number}", prompt(10 + number, 64, shared=16))
    life.pin("pin-1", prompt(21, 80))
    life.unpin("pin-0")
    for token_ids in PROMPTS[6:16]:
        life.ask(token_ids)
    crash(life)
    life = Life(state_dir, log, **config)
    life.unpin("pin-2")
    for number in range(4, 6):
        for _ in range(2):
            life.ask(PROMPTS[number])
    life.pin("pin-5", prompt(15, 64))
    life.checkpoint()
    life.stop()
    life = Life(state_dir, log, **config)
    life.pin("pin-6", prompt(16, 64))
    for token_ids in PROMPTS[16:]:
        life.ask(token_ids)
    life.unpin("pin-6")
    crash(life)


if __name__ == "__main__":
    {"fsync": live}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
